"""The ``apply`` of the autograd functions of ``liger_kernel.chunked_loss``, answered by this library.

Its classes are answered by this library's classes of the same names, which take the same arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

import liger_losses


def function_class(name: str, apply: Callable[..., Any]) -> type:
    """A class with the ``apply`` of an autograd function."""
    return type(name, (), {"apply": staticmethod(apply), "__doc__": apply.__doc__})


def with_arguments(function: Callable[..., Any], names: str, required: int = 2) -> None:
    """Let :func:`inspect.signature` say the names of a function's arguments, some of which it reads by position.

    liger-kernel's models read them there.
    """
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    parameters = [
        inspect.Parameter(name, kind, default=empty if i < required else None) for i, name in enumerate(names.split())
    ]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


def _applied(loss: type, names: str, **defaults: Any) -> Callable[..., Any]:
    """The ``apply`` of a function of ``chunked_loss``: arguments of ``loss``'s constructor and call by position."""
    order = names.split()
    # The functions' temperature is one number, the loss's own; a call's would be one for each token.
    of_call = inspect.signature(loss.forward).parameters.keys() - {"temperature"}  # type: ignore[attr-defined]

    def apply(*arguments: Any) -> Any:
        if len(arguments) > len(order):
            raise TypeError(f"apply takes at most {len(order)} arguments ({', '.join(order)}), got {len(arguments)}.")
        given = dict(zip(order, arguments, strict=False))
        call = {name: value for name, value in given.items() if name in of_call}
        if not isinstance(call.get("temperature"), Tensor):  # a number is the constructor's, one per token the call's
            call.pop("temperature", None)
        options = {name: value for name, value in given.items() if name not in call}
        return loss(**{**defaults, **options})(**call)

    apply.__doc__ = f"{loss.__name__} by position: {', '.join(order)}."
    return apply


_PAIRS = "_input lin_weight target bias"
_REFERENCE = "ref_input ref_weight ref_bias"
_DISTILLATION = (
    "student_input student_weight teacher_input teacher_weight true_labels student_bias teacher_bias "
    "weight_hard_loss weight_soft_loss beta ignore_index temperature compiled chunk_size return_soft_hard_loss"
)


#: ``apply`` by the middle of the function's name, ``LigerFusedLinear...Function``. Defaults are given where the
#: function's differ from its class's.
CHUNKED = {
    "DPO": _applied(
        liger_losses.LigerFusedLinearDPOLoss,
        f"{_PAIRS} {_REFERENCE} ignore_index beta compute_nll_loss compiled use_ref_model average_log_prob chunk_size "
        "loss_type label_smoothing discopop_tau alpha",
    ),
    "ORPO": _applied(
        liger_losses.LigerFusedLinearORPOLoss,
        f"{_PAIRS} ignore_index beta compute_nll_loss nll_target compiled chunk_size",
    ),
    "CPO": _applied(
        liger_losses.LigerFusedLinearCPOLoss,
        f"{_PAIRS} ignore_index beta alpha label_smoothing compute_nll_loss compiled average_log_prob chunk_size",
        average_log_prob=False,
    ),
    "SimPO": _applied(
        liger_losses.LigerFusedLinearSimPOLoss,
        f"{_PAIRS} ignore_index beta alpha label_smoothing compute_nll_loss compiled gamma chunk_size",
        compute_nll_loss=False,
    ),
    "KTO": _applied(
        liger_losses.LigerFusedLinearKTOLoss,
        f"_input lin_weight target preference_labels bias {_REFERENCE} kl ignore_index beta compiled use_ref_model "
        "average_log_prob chunk_size",
        use_ref_model=True,
    ),
    "GRPO": _applied(
        liger_losses.LigerFusedLinearGRPOLoss,
        "_input lin_weight selected_token_ids attention_mask advantages bias ref_per_token_logps old_per_token_logps "
        f"{_REFERENCE} beta epsilon_low epsilon_high loss_type max_completion_length importance_sampling_level "
        "sapo_temperature_pos sapo_temperature_neg temperature compiled use_ref_model chunk_size vllm_is_ratio delta "
        "use_bias_correction_kl vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg num_items_in_batch",
    ),
    "JSD": _applied(liger_losses.LigerFusedLinearJSDLoss, _DISTILLATION),
    "CosineSimilarity": _applied(liger_losses.LigerFusedLinearCosineSimilarityLoss, _DISTILLATION),
}
