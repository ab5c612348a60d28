"""The classes of ``liger_kernel.chunked_loss``, and the ``apply`` of its autograd functions, by this library.

The classes are this library's of the same names, which take the same arguments. B sequences of T positions, V
vocabulary size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import liger_losses
from liger_losses.chunked.losses.policy import GRPOOptions


class _GRPOOptions(GRPOOptions):
    epsilon_high: float | None = 0.2  # for ``cispo`` too


class LigerFusedLinearGRPOLoss(liger_losses.LigerFusedLinearGRPOLoss):
    """:class:`liger_losses.LigerFusedLinearGRPOLoss`, with liger-kernel's default of ``epsilon_high``."""

    options_type = _GRPOOptions


def _with_their_metrics(loss: type) -> type:
    """A loss of completions that takes its inputs, and defines its metrics, as liger-kernel's class does.

    Logits are averaged (pairs) or summed (single completions) over all positions, prompts and padding too, and
    ``chosen_nll_loss`` is 0 where it is not part of the loss, and a missing ``kl`` is 0.
    """
    inner: Callable[..., tuple[Tensor, Any]] = loss.forward  # type: ignore[attr-defined]
    names = list(inspect.signature(inner).parameters)[1:]

    @functools.wraps(inner)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> tuple[Tensor, Any]:
        call = dict(zip(names, arguments, strict=False)) | keywords
        hidden, weight = call.get("_input"), call.get("lin_weight")
        if len(arguments) > len(names) or not (isinstance(hidden, Tensor) and isinstance(weight, Tensor)):
            return inner(self, *arguments, **keywords)  # a call in another form than liger-kernel's
        if "kl" in names and call.get("kl") is None:
            call["kl"] = 0.0
        value, metrics = inner(self, **call)
        sums = _mean_logits_of_sequences(hidden.detach(), weight.detach(), call.get("bias"))
        if "chosen_logits_sum" in metrics._fields:
            chosen = call["preference_labels"].to(torch.bool)
            per_logit = sums * len(weight)
            parts = {
                "chosen_logits_sum": (per_logit * chosen).sum(),
                "rejected_logits_sum": (per_logit * ~chosen).sum(),
            }
        else:
            means = sums.view(2, -1).mean(1) / hidden.shape[1]
            parts = {"chosen_logits_mean": means[0], "rejected_logits_mean": means[1]}
            if not self.compute_nll_loss:
                parts["chosen_nll_loss"] = torch.zeros_like(metrics.chosen_nll_loss)
        return value, metrics._replace(**parts)

    return type(loss.__name__, (loss,), {"forward": forward, "__doc__": loss.__doc__, "__module__": __name__})


def _mean_logits_of_sequences(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[B]``: the logits of ``hidden [B, T, H]``, averaged over the vocabulary and summed over the positions."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    sums = hidden.sum(1, dtype=wide) @ weight.mean(0, dtype=wide)
    return sums if bias is None else sums + hidden.shape[1] * bias.detach().to(wide).mean()


_PAIRS = "_input lin_weight target bias"
_REFERENCE = "ref_input ref_weight ref_bias"
_STUDENT = "student_input student_weight teacher_input teacher_weight true_labels student_bias teacher_bias"
#: Functions ``LigerFusedLinear...Function``: their inputs by position, then their options if they have another order
#: than their class's, and defaults that differ from its.
_FUNCTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "CPO": (_PAIRS, "", {"average_log_prob": False}),
    "SimPO": (_PAIRS, "", {"compute_nll_loss": False}),
    "KTO": (f"_input lin_weight target preference_labels bias {_REFERENCE} kl", "", {"use_ref_model": True}),
    "JSD": (_STUDENT, "", {}),
    "CosineSimilarity": (_STUDENT, "", {}),
    "ORPO": (_PAIRS, "ignore_index beta compute_nll_loss nll_target compiled chunk_size", {}),
    "DPO": (
        f"{_PAIRS} {_REFERENCE}",
        "ignore_index beta compute_nll_loss compiled use_ref_model average_log_prob chunk_size loss_type "
        "label_smoothing discopop_tau alpha",
        {},
    ),
    "GRPO": (
        "_input lin_weight selected_token_ids attention_mask advantages bias ref_per_token_logps old_per_token_logps "
        f"{_REFERENCE}",
        "beta epsilon_low epsilon_high loss_type max_completion_length importance_sampling_level "
        "sapo_temperature_pos sapo_temperature_neg temperature compiled use_ref_model chunk_size vllm_is_ratio delta "
        "use_bias_correction_kl vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg num_items_in_batch",
        {},
    ),
}

_OURS = {middle: getattr(liger_losses, f"LigerFusedLinear{middle}Loss") for middle in _FUNCTIONS}
#: Classes by the middle of their name, ``LigerFusedLinear...Loss``.
LOSSES: dict[str, Any] = {
    middle: _with_their_metrics(loss) if middle in ("DPO", "ORPO", "CPO", "SimPO", "KTO") else loss
    for middle, loss in _OURS.items()
} | {"GRPO": LigerFusedLinearGRPOLoss}


def applied(loss: type, names: str, **defaults: Any) -> Callable[..., Any]:
    """A function of the arguments of a loss's constructor and call, by liger-kernel's names and in their order.

    Args:
        names: the arguments, which the signature then has, as liger-kernel's models read them there: ``theirs:ours``
            for one that has another name in the loss, ``theirs:`` for one without effect.
        defaults: by the loss's names, those that differ from its own.
    """
    pairs = [name.partition(":") for name in names.split()]
    ours = {theirs: own if colon else theirs for theirs, colon, own in pairs}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind, default=None) for name in ours])
    # A temperature that is a number is the constructor's, one per token the call's.
    of_call = {*inspect.signature(loss.forward).parameters, *loss.parameters_named}  # type: ignore[attr-defined]

    def apply(*arguments: Any, **keywords: Any) -> Any:
        try:
            bound = signature.bind(*arguments, **keywords).arguments
        except TypeError as error:
            raise TypeError(f"{loss.__name__}{signature}: {error}") from None
        values = {**defaults, **{ours[name]: value for name, value in bound.items() if ours[name]}}
        call = {n: v for n, v in values.items() if n in of_call and (n != "temperature" or isinstance(v, Tensor))}
        return loss(**{name: value for name, value in values.items() if name not in call})(**call)

    apply.__doc__ = f"{loss.__name__} by position: {', '.join(ours)}."
    vars(apply)["__signature__"] = signature
    return apply


#: ``apply`` by the middle of the function's name.
CHUNKED = {
    middle: applied(LOSSES[middle], f"{inputs} {options or ' '.join(LOSSES[middle].positions)}", **defaults)
    for middle, (inputs, options, defaults) in _FUNCTIONS.items()
}
