"""What replaces TRL's fused head: the model's own forward, with its last layer lazy, reduced before it returns.

TRL's ``add_fused_lm_head`` runs the backbone and multiplies by ``lm_head.weight`` itself; scales, soft-caps
and adapters that it does not know of are missing then. Here the model's own forward runs, so that whatever it does to
its logits is in them, and the lazy logits are reduced to per-token statistics while the forward is still on: inside
autocast, and inside whatever holds the weights.

Of ``fully_shard``, that is the unit of the model. A head that is a unit of its own, or in one with the final norm,
would be without its weight once its own forward is over: such units stay gathered from then to their backward. So do
the head's weights under DeepSpeed's ZeRO-3.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.chunked.engine import linear_statistics, linear_token_loss
from liger_losses.kernels.autograd import once_differentiable
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.patching.lazy import DeferredLogits, LazyLogits
from liger_losses.patching.lazy_head import (
    LazyLinear,
    ReducedLinear,
    force_lazy_head,
    head_layers,
    keep_gathered,
    unsupported_reason,
)

IGNORED = -100
#: TRL's names of per-token outputs, and ours.
OUTPUTS = {
    "log_probs": "logp",
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logit",
    "is_top1": "argmax",
}
DIFFERENTIABLE = ("log_probs", "entropy")


@dataclass(frozen=True)
class HeadOptions:
    """As ``add_fused_lm_head`` takes them.

    Args:
        temperature: what logits are divided by.
        cast_to_fp32: multiply in fp32, outside autocast.
        outputs: which of :data:`OUTPUTS`.
        one_pass: take the loss's gradient in forward; log-probabilities are differentiable all the same, at the cost
            of computing them again.
    """

    temperature: float = 1.0
    cast_to_fp32: bool = False
    outputs: tuple[str, ...] = ("log_probs",)
    one_pass: bool = False


def add_fused_lm_head(
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
    *,
    one_pass: bool = False,
) -> None:
    """``model(..., labels=labels, fused_lm_head=True)`` returns per-token log-probabilities and the loss.

    The contract is TRL's; see the module for what differs.

    Args:
        model: a causal language model of transformers.
        temperature, cast_lm_head_to_fp32, outputs: as in TRL.
        one_pass: see :class:`HeadOptions`.

    Raises:
        ValueError: outputs that are not known, a temperature that is not positive.
        TypeError: at the first forward, a model whose last layer cannot be lazy.
        RuntimeError: at a forward, a head whose weight was freed by then.
    """
    unknown = set(outputs) - set(OUTPUTS)
    if unknown:
        raise ValueError(f"unknown outputs {sorted(unknown)}; they are {', '.join(OUTPUTS)}.")
    LogitTransform(temperature)  # its check
    model._liger_losses_head = HeadOptions(temperature, cast_lm_head_to_fp32, tuple(outputs), one_pass)
    _make_lazy(model)  # before fully_shard, which derives classes from those it finds
    own = vars(model).get("forward")
    if own is not None and getattr(own, "_liger_losses_head", False):
        return
    inner = type(model).forward if own is None else getattr(own, "__func__", own)
    bound = own is None or hasattr(own, "__func__")

    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        # Nothing of this instance is captured: a copy of the model runs itself.
        call = functools.partial(inner, self) if bound else inner
        if fused_lm_head:
            return fused_forward(self, call, args, kwargs, labels, shift_labels, num_items_in_batch)
        given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        return call(*args, **kwargs, **{name: value for name, value in given.items() if value is not None})

    forward._liger_losses_head = True  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)


def fused_forward(
    model: Any,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    labels: Tensor | None,
    shift_labels: Tensor | None,
    num_items_in_batch: Any,
) -> Any:
    """The forward with its logits reduced; see TRL's ``FusedCausalLMOutput``."""
    from trl.trainer.utils import FusedCausalLMOutput

    if labels is None and shift_labels is None:
        raise ValueError("fused_lm_head=True needs labels (or shift_labels): they say which tokens are scored.")
    options: HeadOptions = model._liger_losses_head
    units = _prepare(model)
    config = model.config.get_text_config()
    kwargs = {**kwargs, "use_cache": False, "return_dict": True}
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    with force_lazy_head():
        outputs = call(*args, **kwargs)
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, LazyLogits):
        logits.check()
    if not isinstance(logits, LazyLogits) or logits.changed is not None or logits.deferred.transform is None:
        raise TypeError(
            f"{type(model).__name__} does something to its logits that cannot be done lazily, or its last layer is "
            f"spread by tensor parallelism (its forward returned {type(logits).__name__}), so it cannot be trained "
            "without them here: train it with TRL's own head, outside of liger_losses.trl.enable()."
        )
    deferred, target = logits.deferred, shift_labels
    if target is None:
        assert labels is not None
        deferred, target = deferred.rows(slice(None, -1)), labels[:, 1:]
    target = target.to(deferred.hidden_states.device)
    mask = target != IGNORED
    _check_there(model, deferred)
    with deferred.under_its_autocast():
        loss, found = _reduce(deferred, target, options)
    # No views: an operation in place on one would lose the hooks on it.
    found = found._make(None if value is None else value.clone() for value in found)
    _release(units, (loss, *found))
    wanted = {*options.outputs, "log_probs"}
    per_token = {name: getattr(found, ours) for name, ours in OUTPUTS.items() if name in wanted}
    if "is_top1" in per_token:
        per_token["is_top1"] = (per_token["is_top1"] == target) & mask
    loss = loss / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
    aux_loss = getattr(outputs, "aux_loss", None)
    if aux_loss is not None and kwargs.get("output_router_logits"):
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss.to(loss.device)
    return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **per_token)


def _make_lazy(model: Any) -> list[str]:
    """Let the last layer be lazy where it can be; why the rest cannot."""
    layers = head_layers(model)
    reasons = [] if layers else ["get_output_embeddings() gives none"]
    for layer in layers:
        if isinstance(layer, (LazyLinear, ReducedLinear)):
            continue
        reason = unsupported_reason(layer)
        if reason is None:
            layer.__class__ = ReducedLinear
        else:
            reasons.append(reason)
    return reasons


def _prepare(model: Any) -> list[Any]:
    """The units of ``fully_shard`` in the last layer, which is lazy now and has its weight after its own forward."""
    reasons = _make_lazy(model)  # again: adapters may have come or gone since the last call
    if reasons:
        raise TypeError(
            f"{type(model).__name__}'s last layer cannot be lazy ({'; '.join(reasons)}): train it with TRL's own head, "
            "outside of liger_losses.trl.enable()."
        )
    units = _units(model.get_output_embeddings())
    for unit in units:
        keep_gathered(unit)
    return units


def _units(head: nn.Module) -> list[Any]:
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in head.modules() if isinstance(module, FSDPModule)]


def _release(units: list[Any], outputs: tuple[Tensor | None, ...]) -> None:
    """Let go of the weights where there is no backward; where there is, have them there again.

    Backward does not come by the lazy logits, on which ``fully_shard`` has its own hook, and what happens in between
    (the backward of another forward, a state dict) may have freed the weights.
    """
    differentiable = [output for output in outputs if output is not None and output.requires_grad]
    for unit in units:
        if not differentiable:
            unit.reshard()
        for output in differentiable:
            output.register_hook(functools.partial(_unshard, unit))


def _unshard(unit: Any, gradient: Tensor) -> None:
    unit.unshard()


def _check_there(model: Any, deferred: DeferredLogits) -> None:
    """Raise RuntimeError for a head that other means than ``fully_shard`` have freed since its own forward."""
    for name, tensor in (("weight", deferred.weight), ("bias", deferred.bias)):
        if tensor is not None and tensor.untyped_storage().size() == 0:
            raise RuntimeError(
                f"the {name} of {type(model).__name__}'s last layer was freed when that layer's own forward ended; it "
                "must be there until the model's ends. Shard with torch.distributed.fsdp.fully_shard, or leave the "
                "last layer in the model's own unit, or train with TRL's own head, outside of "
                "liger_losses.trl.enable()."
            )


def _reduce(deferred: DeferredLogits, target: Tensor, options: HeadOptions) -> tuple[Tensor, Any]:
    """The summed negative log-likelihood, and the statistics ``[B, T]``."""
    hidden_states, weight, bias = deferred.tensors
    plain = deferred.transform
    assert plain is not None
    transform = LogitTransform(options.temperature, plain.logit_scale, plain.softcap)
    device = hidden_states.device.type
    if options.cast_to_fp32:
        hidden_states, weight = hidden_states.float(), weight.float()
        bias = None if bias is None else bias.float()
    names = [OUTPUTS[name] for name in options.outputs if name in DIFFERENTIABLE and name != "log_probs"]
    metrics = [OUTPUTS[name] for name in options.outputs if name not in DIFFERENTIABLE]
    common: dict[str, Any] = {"bias": bias, "transform": transform}
    with torch.autocast(device, enabled=False) if options.cast_to_fp32 else deferred.under_its_autocast():
        if not options.one_pass:
            found = linear_statistics(hidden_states, weight, target, ("logp", *names), metrics=metrics, **common)
            return -found.logp.sum(), found
        loss, found = linear_token_loss(
            hidden_states, weight, target, _nll, ("logp",), metrics=(*names, *metrics), **common
        )

    def again(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        with torch.autocast(device, enabled=False) if options.cast_to_fp32 else deferred.under_its_autocast():
            given = {**common, "bias": bias}
            statistics = linear_statistics(hidden_states, weight, target, ("logp", *names), **given)
        return [getattr(statistics, name) for name in ("logp", *names)]

    values = [getattr(found, name) for name in ("logp", *names)]
    values = list(_OnDemand.apply(again, len(values), *values, hidden_states, weight, bias))
    return loss, found._replace(**dict(zip(("logp", *names), values, strict=True)))


def _nll(statistics: Any, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -statistics.logp, {"logp": torch.full_like(statistics.logp, -1.0)}


class _OnDemand(torch.autograd.Function):
    """Values that are there, and are computed again only if their gradient is wanted."""

    @staticmethod
    def forward(ctx: Any, again: Callable[..., list[Tensor]], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.again = again
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[count:])
        return tuple(value.clone() for value in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        nothing = (None, None, *[None] * len(gradients))
        wanted = ctx.needs_input_grad[len(nothing) :]
        leaves = [
            None if t is None else t.detach().requires_grad_(need)
            for t, need in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        needed = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        if not needed or all(g is None for g in gradients):
            return *nothing, *[None] * len(leaves)
        with torch.enable_grad():
            values = ctx.again(*leaves)
        given = [(value, g) for value, g in zip(values, gradients, strict=True) if g is not None]
        found = iter(torch.autograd.grad([v for v, _ in given], needed, [g for _, g in given]))
        return *nothing, *(next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves)
