"""The log-probabilities of TRL's main trainers.

One name of TRL's computes all of them, which :func:`chunked_log_probs` replaces. From TRL 1.15 on, models get a fused
head, too: TRL's ``add_fused_lm_head`` runs the backbone and multiplies by ``lm_head.weight`` itself, so scales,
soft-caps and adapters that it does not know of are missing from its logits. :func:`add_fused_lm_head` runs the model's
own forward, with all that it does to its logits, and these are reduced before the wrapped forward returns: inside its
autocast, and while the weights are gathered. Units of ``fully_shard`` that hold the head alone, or with the final norm,
stay gathered from their forward to their backward, as does the head under DeepSpeed's ZeRO-3. B batch size, T tokens of
a sequence.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.checks import see
from liger_losses.chunked import Head, linear_statistics
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.patching import loss_head
from liger_losses.patching.patch import patch
from liger_losses.patching.pending import PendingLogits
from liger_losses.trl.divergences import IGNORE_INDEX, chosen, gathered
from liger_losses.trl.packed_batches import packed_batch, run_packed

#: TRL's names of per-token outputs, and the engine's names of these statistics.
OUTPUTS = {
    "log_probs": "logp",
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logit",
    "is_top1": "argmax",
}


def chunked_log_probs(
    hidden: Tensor,
    weight: Any,
    bias: Any,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = tuple(OUTPUTS),
) -> tuple[Tensor | None, ...]:
    """Replaces ``apply`` of TRL's ``_ChunkedLogProbFunction``.

    Args:
        hidden, weight, bias: ``[N, H]``, ``[V, H]``, ``[V]``; the product has the dtype of the hidden states.
        targets: ``[N]``.
        temperature, final_logit_softcapping, logit_scale: of the logits.
        chunk_size: ignored; the engine chooses its block sizes.
        outputs: which of :data:`OUTPUTS` to compute; ``log_probs`` always are.

    Returns:
        For each of :data:`OUTPUTS` ``[N]``, or ``None``.
    """
    dtype = hidden.dtype if autocast_dtype(hidden.device) is None else weight.dtype
    weight, bias = (None if p is None else gathered(p, hidden.dtype).to(dtype) for p in (weight, bias))
    head = Head(weight, bias, LogitTransform(temperature, logit_scale, final_logit_softcapping))
    per_token = _per_token(hidden, head, targets, outputs)
    return tuple(map(per_token.get, OUTPUTS))


def _per_token(hidden_states: Tensor, head: Head, labels: Tensor, outputs: Sequence[str]) -> dict[str, Tensor]:
    """TRL's outputs, of the shape of the labels; ``log_probs`` are among them in any case."""
    names = ("logp", "entropy") if "entropy" in outputs else ("logp",)
    metrics = tuple(OUTPUTS[name] for name in outputs if OUTPUTS[name] not in ("logp", "entropy"))
    statistics = linear_statistics(hidden_states, head, labels, names, metrics=metrics)
    per_token = {name: getattr(statistics, OUTPUTS[name]) for name in {*outputs, "log_probs"}}
    if "is_top1" in per_token:
        per_token["is_top1"] = (per_token["is_top1"] == labels) & (labels != IGNORE_INDEX)
    return per_token


@dataclass(frozen=True)
class FusedHeadOptions:
    """The options of :func:`add_fused_lm_head`, as the model carries them."""

    temperature: float = 1.0
    cast_to_fp32: bool = False
    outputs: tuple[str, ...] = ("log_probs",)
    share_prompts: bool | None = False
    has_tried: bool = False


def add_fused_lm_head(
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
    *,
    groups: bool = False,
) -> None:
    """Make ``model(..., labels=labels, fused_lm_head=True)`` return per-token log-probabilities and the loss.

    The contract is TRL's; the module says what differs.

    Args:
        model: a causal language model of transformers.
        temperature: what logits are divided by.
        cast_lm_head_to_fp32: run the head in fp32, outside autocast.
        outputs: which of :data:`OUTPUTS` to compute; ``log_probs`` always are.
        groups: batches have several completions of a prompt, which may be computed once.

    Raises:
        TypeError: at the first forward, if the model's last layer cannot be a :class:`Head`.
        RuntimeError: at a forward, if the head's weight was freed before the model's forward ended.
    """
    if chosen.kernels:
        patch(model, loss_head=False)
    share_prompts = groups and chosen.share_prompts
    model._liger_losses_head = FusedHeadOptions(temperature, cast_lm_head_to_fp32, tuple(outputs), share_prompts)
    loss_head.prepare_head(model)  # before fully_shard, which derives its classes from those it finds
    own = model.forward
    if getattr(own, "_liger_losses_head", False):
        return
    inner, bound = getattr(own, "__func__", own), hasattr(own, "__func__")

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        # This closure does not capture the model: a copy of the model must run itself.
        call = functools.partial(inner, *(self,) * bound, *args)
        if fused_lm_head:
            return fused_forward(self, call, **kwargs)
        # As in TRL's wrapper, for models that do not take all of them.
        absent = [name for name in ("labels", "shift_labels", "num_items_in_batch") if kwargs.get(name) is None]
        return call(**{name: value for name, value in kwargs.items() if name not in absent})

    forward._liger_losses_head = True  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)


@functools.partial(torch.compiler.disable, recursive=False)  # the model's own forward, called here, is compiled
def fused_forward(model: Any, forward: Any, labels: Any = None, shift_labels: Any = None, **kwargs: Any) -> Any:
    """The model's ``forward``, with its logits reduced to TRL's ``FusedCausalLMOutput``."""
    from trl.trainer.utils import FusedCausalLMOutput

    if labels is None and shift_labels is None:
        raise ValueError("fused_lm_head=True needs labels (or shift_labels): they say which tokens are scored.")
    options: FusedHeadOptions = model._liger_losses_head
    num_items_in_batch = kwargs.pop("num_items_in_batch", None)
    reason = loss_head.reason_against_head(model)  # adapters may have been added since the last call
    if reason:
        raise TypeError(f"{reason}: train outside of liger_losses.trl.enable()." + see("models-that-cannot-be-patched"))
    # Units of fully_shard, which stay gathered until backward.
    head: Any = loss_head.head_of(loss_head.owner_of_head(model))
    units = [unit for unit in head.modules() if hasattr(unit, "set_reshard_after_forward")]
    config = model.config.get_text_config()
    kwargs.update(use_cache=False, return_dict=True)
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    with loss_head.pending_logits(model):
        packed = None if options.share_prompts is False else packed_batch(model, forward, labels, kwargs)
        outputs = None if packed is None else run_packed(model, forward, packed, kwargs)
        if outputs is None:
            packed, outputs = None, forward(**kwargs)
    labels = labels if packed is None else packed.labels
    target = labels[:, 1:].contiguous() if shift_labels is None else shift_labels
    logits = getattr(outputs, "logits", None)
    if not isinstance(logits, PendingLogits) or logits.computed:
        raise TypeError(
            f"the logits of {type(model).__name__} must be its last layer's, scaled or soft-capped: its forward "
            "applies an operation to them that needs their values, or torch's parallelize_module has split its last "
            "layer (tensor parallelism). Train it with TRL's own head, outside of liger_losses.trl.enable()."
            + see("models-that-cannot-be-patched")
        )
    if packed is not None:
        logits = logits.with_rows(packed.completion_states(logits.hidden_states)[:, 1:])
    elif shift_labels is None:
        logits = logits.with_rows(logits.hidden_states[:, :-1])
    target = target.to(logits.device)
    mask = target != IGNORE_INDEX
    logits.check()
    head = logits.head.with_fields(transform=replace(logits.head.transform, temperature=options.temperature))
    if options.cast_to_fp32:
        bias = None if head.bias is None else head.bias.float()
        head = head.with_fields(weight=head.weight.float(), bias=bias)
        logits = logits.with_changes(hidden_states=logits.hidden_states.float(), autocast=None)
    with logits.forward_autocast():
        per_token = _per_token(logits.hidden_states, head, target, options.outputs)
    # Clones, because an in-place operation on a view would lose the view's hooks.
    per_token = {name: value.clone() for name, value in per_token.items()}
    loss = -per_token["log_probs"].sum()
    _reshard_or_regather(units, (loss, *per_token.values()))
    loss = loss / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
    aux_loss = getattr(outputs, "aux_loss", None)
    if aux_loss is not None and kwargs.get("output_router_logits"):
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss.to(loss.device)
    return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **per_token)


def _reshard_or_regather(units: list[Any], outputs: Sequence[Tensor]) -> None:
    """Reshard now if there is no backward; otherwise gather again when backward reaches the outputs.

    ``fully_shard`` gathers in a hook on the head's output, which backward does not pass; and whatever
    runs in between (the backward of another forward, a state dict) may have resharded the weights.
    """
    differentiable = [output for output in outputs if output.requires_grad]
    for unit in units:
        if not differentiable:
            unit.reshard()
        for output in differentiable:
            output.register_hook(lambda gradient, unit=unit: unit.unshard())
