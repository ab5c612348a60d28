"""From a model and a batch to what losses take: the head, the hidden states, and labels that are shifted."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_losses.caller import warn
from liger_losses.checks import check_labels, see
from liger_losses.chunked import Head
from liger_losses.chunked import shift_labels as shifted_labels
from liger_losses.patching.lazy.tensor import deferred_logits
from liger_losses.patching.lazy_head import make_head_lazy, owner_of_head
from liger_losses.patching.lazy_layers import force_lazy_head
from liger_losses.prompts.attention import attending, check_model
from liger_losses.prompts.packing import PackedCompletions

#: What most batches consist of, for which no signature is looked up in every step.
_USUAL = {"input_ids", "attention_mask", "position_ids", "inputs_embeds"}
#: For classes of models: whether the loss shifts the labels.
_SHIFTS: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


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
        model: a model of transformers, with or without wrappers. The call prepares its head for lazy logits; the logits
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

    The first forward of each class is given labels that show whether it shifts them.
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
            found = loss_inputs(model, shift_labels=torch.zeros_like(packed.input_ids), **batch)
        return found._replace(hidden_states=packed.completion_states(found.hidden_states), labels=packed.labels)
    name, inner = type(model).__name__, owner_of_head(model) or model
    _check_names(inner, batch)
    if batch.get("num_items_in_batch") is not None:
        raise TypeError(
            "loss_inputs computes no loss, of which num_items_in_batch is the divisor: take it out of the batch, and "
            "pass it to the loss, as in LigerFusedLinearCrossEntropyLoss()(*inputs, num_items_in_batch=...)."
        )
    config = getattr(inner, "config", None)
    if batch.get("return_dict") is False or getattr(config, "return_dict", True) is False:
        raise ValueError(
            f"{name} returns a tuple, in which logits have no name: leave out return_dict=False, and set "
            "model.config.return_dict = True."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder, whose labels are not shifted; give a causal language model.")
    given = labels if shift_labels is None else shift_labels
    targets = batch.get("input_ids") if given is None else given
    if targets is None:
        raise ValueError("there are neither input_ids nor labels; give input_ids= [batch, tokens], or labels=.")
    check_labels(targets)
    reasons = [entry.reason for entry in make_head_lazy(inner, only_when_forced=True) if entry.reason]
    if reasons:
        raise TypeError(
            f"the last layer of {name} cannot be a Head: {'; '.join(reasons)}." + see("models-that-cannot-be-patched")
        )
    if shift_labels is None:
        shifted, mask = shifted_labels(targets, ignore_index), batch.get("attention_mask")
        if mask is not None and mask.shape == targets.shape:
            active = mask.to(targets.device) != 0
            shifted = shifted.where(active & active.roll(-1, -1), ignore_index)
    else:
        shifted = targets
    with force_lazy_head():
        output = model(**batch) if shift_labels is not None else _run_shifting(inner, model, batch, targets)
    if output is None:
        raise ValueError(
            f"{name} does not shift its labels, as a causal language model does: the logits of a token are "
            "compared with that token's label. Give a causal language model, or pass the labels as "
            "shift_labels=, which are not shifted."
        )
    logits = getattr(output, "logits", None)
    deferred = deferred_logits(logits)
    if deferred is None:
        raise TypeError(
            f"{name} must return logits that are its last layer's, scaled or soft-capped, got {type(logits).__name__}: "
            "its forward applies an operation to them that needs their values." + see("models-that-cannot-be-patched")
        )
    hidden_states = deferred.hidden_states
    if hidden_states.shape[:-1] != targets.shape:
        raise ValueError(
            f"{name} returned logits of {tuple(hidden_states.shape[:-1])} tokens, and there are labels of "
            f"{tuple(targets.shape)}; give labels= for each of the logits, with ignore_index={ignore_index} for tokens "
            "that the model inserts, and leave out logits_to_keep."
        )
    return LossInputs(deferred.head, hidden_states, shifted.to(hidden_states.device))


def _run_shifting(inner: Any, model: nn.Module, batch: dict[str, Any], targets: Tensor) -> Any:
    """The output of a model that compares the logits at ``t`` with the label at ``t + 1``; ``None`` of another model.

    The first batch of a class is given labels of which a shift drops all that carry loss.
    """
    takes_labels = "labels" in inspect.signature(inspect.unwrap(type(inner).forward)).parameters
    # Where the forward raises, it runs again, which a cache must not see twice; transformers 5.24 calls it `cache`.
    cached = any(batch.get(name) is not None for name in ("cache", "past_key_values"))
    tells = takes_labels and targets.shape[-1] > 1 and not cached
    if not tells or type(inner) in _SHIFTS:
        return model(**batch) if _SHIFTS.get(type(inner), True) else None
    labels = torch.full_like(targets, -100)
    labels[..., 0] = 0
    losses, function = list[Tensor](), getattr(inner, "loss_function", None)

    def of_two_tokens(*args: Any, **kwargs: Any) -> Tensor:
        """The model's loss function alone, without a router's loss that the model adds."""
        logits = torch.zeros(1, 2, 3, dtype=torch.float32)
        with contextlib.suppress(Exception):  # a function with other arguments counts as one that shifts
            losses.append(function(logits, torch.tensor([[0, -100]]), vocab_size=3))  # type: ignore[misc]
        return labels.new_zeros((), dtype=torch.float32)

    added = _set_loss(inner, of_two_tokens) if function else frozenset[str]()
    try:
        output = model(**batch, labels=labels)
    except Exception:  # without labels, the forward says what is wrong with the batch
        return model(**batch)
    finally:
        if function:
            _set_loss(inner, function, added)
    loss = losses[0] if losses else getattr(output, "loss", None)
    if loss is None:
        return output
    _SHIFTS[type(inner)] = not bool((torch.isfinite(loss) & (loss != 0)).any())
    return output if _SHIFTS[type(inner)] else None


def _set_loss(model: Any, function: Callable[..., Any], added: frozenset[str] = frozenset()) -> frozenset[str]:
    """Give a model a loss function; or give it back its own, without the attributes that the other one ``added``.

    Returns the names of the attributes that are there because of this function.
    """
    before = set(vars(model))
    model.loss_function = function
    for name in added:
        vars(model).pop(name, None)
    return frozenset(set(vars(model)) - before)


def _check_names(model: Any, batch: dict[str, Any]) -> None:
    """Warn of what looks like a misspelt argument (``attn_mask``): a model's forward takes it and ignores it."""
    given = batch.keys() - _USUAL
    if not given:
        return
    known = {"labels", "shift_labels", *_USUAL}
    for module in (model, getattr(model, "base_model", None), getattr(model, "model", None)):
        known |= set(inspect.signature(module.forward).parameters) if isinstance(module, nn.Module) else set()
    for name in given - known:
        close = difflib.get_close_matches(name, known, 1, cutoff=0.7)
        if close:
            warn(f"{type(model).__name__} has no argument {name}; did you mean {close[0]}?")
