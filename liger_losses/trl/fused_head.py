"""The replacement of TRL's fused head: the model's own forward, whose pending logits become per-token statistics.

TRL's ``add_fused_lm_head`` runs the backbone and multiplies by ``lm_head.weight`` itself, so scales, soft-caps and
adapters that it does not know of are missing from its logits. Here the model's own forward runs, with all that it does
to its logits, and these are reduced before the wrapped forward returns: inside its autocast, and while the
weights are gathered. Units of ``fully_shard`` that hold the head alone, or with the final norm, stay gathered from
their forward to their backward, as does the head under DeepSpeed's ZeRO-3. B batch size, T tokens of a sequence.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.checks import see
from liger_losses.chunked import Statistics, linear_statistics
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.patching.loss_head import head_of, is_prepared, owner_of_head, pending_logits, prepare_head
from liger_losses.patching.pending import PendingLogits
from liger_losses.trl.divergences import IGNORE_INDEX, chosen
from liger_losses.trl.packed_batches import packed_batch, run_packed

#: TRL's names of per-token outputs, and the engine's names of these statistics.
OUTPUTS = {
    "log_probs": "logp",
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logit",
    "is_top1": "argmax",
}


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
        ValueError: unknown outputs, or a temperature that is not positive.
        TypeError: at the first forward, if the model's last layer cannot be a :class:`Head`.
        RuntimeError: at a forward, if the head's weight was freed before the model's forward ended.
    """
    unknown = set(outputs) - set(OUTPUTS)
    if unknown:
        raise ValueError(f"unknown outputs {sorted(unknown)}; they are {', '.join(OUTPUTS)}.")
    LogitTransform(temperature)  # raises if it is not positive
    share = chosen.share_prompts if groups else False
    model._liger_losses_head = FusedHeadOptions(temperature, cast_lm_head_to_fp32, tuple(outputs), share)
    prepare_head(model)  # before fully_shard, which derives its classes from those it finds
    own = vars(model).get("forward")
    if own is not None and getattr(own, "_liger_losses_head", False):
        return
    inner = type(model).forward if own is None else getattr(own, "__func__", own)
    bound = own is None or hasattr(own, "__func__")

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
    units = _prepare_head(model)
    config = model.config.get_text_config()
    kwargs.update(use_cache=False, return_dict=True)
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    with pending_logits(model):
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
    loss, statistics = _reduce(logits, target, options)
    # Clones, because an in-place operation on a view would lose the view's hooks.
    statistics = Statistics(*(None if value is None else value.clone() for value in statistics))
    _reshard_or_regather(units, (loss, *statistics))
    per_token = {name: getattr(statistics, OUTPUTS[name]) for name in {*options.outputs, "log_probs"}}
    if "is_top1" in per_token:
        per_token["is_top1"] = (per_token["is_top1"] == target) & mask
    loss = loss / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
    aux_loss = getattr(outputs, "aux_loss", None)
    if aux_loss is not None and kwargs.get("output_router_logits"):
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss.to(loss.device)
    return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **per_token)


def _prepare_head(model: Any) -> list[Any]:
    """Prepare the last layer; its units of ``fully_shard``, which stay gathered until backward, are returned."""
    # Again, as adapters may have been added since the last call.
    reasons = [] if is_prepared(model) else [entry.reason for entry in prepare_head(model) if entry.reason]
    if reasons:
        raise TypeError(
            f"{type(model).__name__}'s last layer cannot be a Head ({'; '.join(reasons)}): train it with TRL's own "
            "head, outside of liger_losses.trl.enable()." + see("models-that-cannot-be-patched")
        )
    head: Any = head_of(owner_of_head(model))
    return [unit for unit in head.modules() if hasattr(unit, "set_reshard_after_forward")]


def _reshard_or_regather(units: list[Any], outputs: tuple[Tensor | None, ...]) -> None:
    """Reshard now if there is no backward; otherwise gather again when backward reaches the outputs.

    ``fully_shard`` gathers in a hook on the head's output, which backward does not pass; and whatever
    runs in between (the backward of another forward, a state dict) may have resharded the weights.
    """
    differentiable = [output for output in outputs if output is not None and output.requires_grad]
    for unit in units:
        if not differentiable:
            unit.reshard()
        for output in differentiable:
            output.register_hook(lambda gradient, unit=unit: unit.unshard())


def _reduce(logits: PendingLogits, labels: Tensor, options: FusedHeadOptions) -> tuple[Tensor, Statistics]:
    """The summed negative log-likelihood, and the statistics ``[B, T]`` of TRL's outputs."""
    head = logits.head.with_fields(transform=replace(logits.head.transform, temperature=options.temperature))
    if options.cast_to_fp32:
        bias = None if head.bias is None else head.bias.float()
        head = head.with_fields(weight=head.weight.float(), bias=bias)
        logits = logits.with_changes(hidden_states=logits.hidden_states.float(), autocast=None)
    hidden_states = logits.hidden_states
    names = ("logp", "entropy") if "entropy" in options.outputs else ("logp",)
    metrics = tuple(OUTPUTS[name] for name in options.outputs if OUTPUTS[name] not in ("logp", "entropy"))
    with logits.forward_autocast():
        statistics = linear_statistics(hidden_states, head, labels, names, metrics=metrics)
    return -statistics.logp.sum(), statistics
