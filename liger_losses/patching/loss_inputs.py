"""From a model and a batch to what losses take: the head, the hidden states, and labels that are shifted."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_losses.checks import check_labels, see
from liger_losses.chunked import Head
from liger_losses.chunked import shift_labels as shifted_labels
from liger_losses.patching.loss_head import SHIFTS, head_of, owner_of_head, pending_logits, reason_against_head
from liger_losses.patching.pending import PendingLogits, is_pending
from liger_losses.prompts.attention import attending, check_model
from liger_losses.prompts.packing import PackedCompletions


class LossInputs(NamedTuple):
    """The first three arguments of :class:`liger_losses.LigerFusedLinearCrossEntropyLoss` and most other losses."""

    head: Head
    hidden_states: Tensor
    labels: Tensor


def loss_inputs(
    model: nn.Module,
    packed: PackedCompletions | None = None,
    *by_position: Any,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    ignore_index: int = -100,
    **batch: Any,
) -> LossInputs:
    """Run a causal language model without computing its logits, and return the arguments of a loss.

    ``hidden_states[:, t]`` predicts ``labels[:, t]``, the batch's label at ``t + 1``::

        loss = LigerFusedLinearCrossEntropyLoss()(*loss_inputs(model, **batch))

    The model's forward runs, with all wrappers (PEFT, DistributedDataParallel, fully_shard). The head therefore
    includes bias, adapters, and the model's scale and soft-cap of logits. Losses that the model adds, such as a
    router's auxiliary loss, are not included. Under autocast, call the loss under autocast too.

    Args:
        model: a model of transformers, with or without wrappers. The call prepares its head; the logits
            of ordinary forwards do not change.
        packed: completions of :func:`pack_completions`, instead of ``input_ids``, ``attention_mask`` and ``labels``.
            The model runs their packed row, in which each prompt stands once.
        labels: ``[B, T]`` int64, not shifted, as transformers' models take them; ``input_ids`` by default.
        shift_labels: ``[B, T]`` int64, instead of ``labels``: labels that need no shift. Either the caller has shifted
            them, which is necessary before sequences are cut for context parallelism; or the model does not shift
            labels. Returned unchanged.
        ignore_index: the label of masked tokens: the last position, padding, and tokens that would be predicted from
            padding, where ``attention_mask [B, T]`` is 0.
        batch: the other arguments of the model's forward: ``input_ids``, ``attention_mask``, ...

    Returns:
        The :class:`Head`, hidden states ``[B, T, H]`` and labels ``[B, T]``; of ``packed``, ``[N, C, H]`` and
        ``[N, C]`` of its completions.

    Raises:
        TypeError: a model whose last layer or logit transform a head cannot express; ``num_items_in_batch``, which is
            an argument of the loss.
        CannotShareError: a ValueError; the model cannot run a packed row.
        ValueError: an encoder-decoder; a model that returns a tuple (``return_dict=False``); labels, not given as
            ``shift_labels``, of a model whose loss does not shift them, such as a masked language model; labels that
            are missing or do not fit the hidden states.

    The first forward of each model is given labels that show whether it shifts them.
    """
    if by_position or not (packed is None or isinstance(packed, PackedCompletions)):
        raise TypeError("pass the batch by keyword: loss_inputs(model, input_ids=..., attention_mask=...).")
    if packed is not None:
        tensors = {"labels": labels, "shift_labels": shift_labels, **batch}
        names = [name for name, value in tensors.items() if isinstance(value, Tensor)]
        if names:
            raise ValueError(
                f"packed completions have their ids, mask, positions and labels, and no images: leave out "
                f"{', '.join(names)}. Labels are an argument of pack_completions."
            )
        check_model(model)
        with attending(model, packed) as arguments:
            batch |= arguments
            row = loss_inputs(model, shift_labels=torch.zeros_like(packed.input_ids), **batch)
        return row._replace(hidden_states=packed.completion_states(row.hidden_states), labels=packed.labels)
    name, inner = type(model).__name__, owner_of_head(model) or model
    head: Any = head_of(inner)
    _check_batch(name, getattr(inner, "config", None), batch)
    targets = labels if shift_labels is None else shift_labels
    targets = batch.get("input_ids") if targets is None else targets
    if targets is None:
        raise ValueError("there are neither input_ids nor labels; give input_ids= [batch, tokens], or labels=.")
    check_labels(targets)
    reason = reason_against_head(inner)
    if reason:
        raise TypeError(f"{reason}." + see("models-that-cannot-be-patched"))
    shifted = _shifted(targets, batch.get("attention_mask"), ignore_index) if shift_labels is None else targets
    losses = _Losses()
    takes_labels = "labels" in inspect.signature(inspect.unwrap(type(inner).forward)).parameters
    # With labels, a forward may not look at its cache; transformers 5.24 calls it `cache`.
    cached = any(batch.get(name) is not None for name in ("cache", "past_key_values"))
    with pending_logits(inner), contextlib.ExitStack() as stack:
        asks = shift_labels is None and not hasattr(head, SHIFTS)
        if asks and takes_labels and targets.shape[-1] > 1 and not cached:
            batch["labels"] = torch.full_like(targets, -100)
            batch["labels"][..., 0] = 0  # a shift drops all that carry loss
            stack.enter_context(losses)
        output = model(**batch)
    if losses.labels:
        setattr(head, SHIFTS, not any(bool((labels != -100).any()) for labels in losses.labels))
    if shift_labels is None and not getattr(head, SHIFTS, True):
        raise ValueError(
            f"{name} does not shift its labels, as a causal language model does: the logits of a token are "
            "compared with that token's label. Give a causal language model, or pass the labels as "
            "shift_labels=, which are not shifted."
        )
    logits = getattr(output, "logits", None)
    if not is_pending(logits):
        raise TypeError(
            f"{name} must return logits that are its last layer's, scaled or soft-capped, got {type(logits).__name__}: "
            "its forward applies an operation to them that needs their values." + see("models-that-cannot-be-patched")
        )
    hidden_states = logits.hidden_states
    if hidden_states.shape[:-1] != targets.shape:
        raise ValueError(
            f"{name} returned logits of {tuple(hidden_states.shape[:-1])} tokens, and there are labels of "
            f"{tuple(targets.shape)}; give labels= for each of the logits, not shifted (shift_labels= takes those that "
            f"are), with ignore_index={ignore_index} for tokens that the model inserts, and leave out logits_to_keep."
        )
    return LossInputs(logits.head, hidden_states, shifted.to(hidden_states.device))


def _check_batch(name: str, config: Any, batch: dict[str, Any]) -> None:
    if batch.get("num_items_in_batch") is not None:
        raise TypeError(
            "loss_inputs computes no loss, of which num_items_in_batch is the divisor: take it out of the batch, and "
            "pass it to the loss, as in LigerFusedLinearCrossEntropyLoss()(*inputs, num_items_in_batch=...)."
        )
    if batch.get("return_dict") is False or getattr(config, "return_dict", True) is False:
        raise ValueError(
            f"{name} returns a tuple, in which logits have no name: leave out return_dict=False, and set "
            "model.config.return_dict = True."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder, whose labels are not shifted; give a causal language model.")


def _shifted(labels: Tensor, mask: Tensor | None, ignore_index: int) -> Tensor:
    """Labels moved by one position, without those of padding, and those that would be predicted from padding."""
    shifted = shifted_labels(labels, ignore_index)
    if mask is None or mask.shape != labels.shape:
        return shifted
    active = mask.to(labels.device) != 0
    return shifted.where(active & active.roll(-1, -1), ignore_index)


class _Losses(TorchFunctionMode):
    """Within this context, losses of pending logits are 0, and their labels are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (F.cross_entropy, F.nll_loss) or not isinstance(args[0], PendingLogits):
            return func(*args, **kwargs)
        self.labels.append(kwargs["target"] if "target" in kwargs else args[1])
        return args[0].hidden_states.new_zeros((), dtype=torch.float32)
