"""liger-kernel's losses outside ``chunked_loss``, computed by this library.

N tokens, H hidden size, V vocabulary size, K columns, B completions of T tokens. As in liger-kernel, the second of two
distributions is a constant.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import liger_losses
from liger_losses.chunked import EngineOptions, Head, linear_statistics
from liger_losses.chunked.losses.softmax_divergences import jsd
from liger_losses.integrations import on_logits
from liger_losses.integrations.liger.call_forms import called_as, module_class
from liger_losses.kernels.logit_transform import LogitTransform

_OPTIONS = " ".join(("ce_weight", *liger_losses.LigerFusedLinearCrossEntropyLoss.positions))


@called_as(f"input weight target bias {_OPTIONS} chunk_mem_const:")
def fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> Any:
    """``liger_fused_linear_cross_entropy``: the loss of :class:`liger_losses.LigerFusedLinearCrossEntropyLoss`.

    Args:
        input, weight, target, bias: ``[N, H]``, ``[V, H]``, ``[N]``, ``[V]``.
        options: arguments of that class's constructor; ``chunk_mem_const`` has no effect.
    """
    return liger_losses.LigerFusedLinearCrossEntropyLoss(**options)(weight, input, target, bias)


class LigerCrossEntropyLoss(on_logits.CrossEntropyOfLogits):
    """Cross-entropy of logits; see :func:`liger_losses.integrations.on_logits.cross_entropy`."""

    def __init__(self, weight: Tensor | None = None, *arguments: Any, **options: Any) -> None:
        super().__init__(weight, *arguments, **options)

    @property
    def weight(self) -> Tensor | None:
        """The class weights ``[V]``."""
        return self.ce_weight

    def forward(self, _input: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        """The loss, and the z-loss, in the dtype of the logits, as in liger-kernel."""
        found = super().forward(_input, target)
        if isinstance(found, Tensor):
            return found.to(_input.dtype)
        z_loss = None if found.z_loss is None else found.z_loss.to(_input.dtype)
        return found._replace(loss=found.loss.to(_input.dtype), z_loss=z_loss)


@called_as(
    "input target weight size_average: ignore_index reduce: reduction label_smoothing lse_square_scale softcap "
    "return_z_loss return_token_accuracy return_predicted_tokens"
)
def cross_entropy(input: Tensor, target: Tensor, **options: Any) -> Any:
    """``liger_cross_entropy``: :class:`LigerCrossEntropyLoss` by torch's arguments."""
    return LigerCrossEntropyLoss(**options)(input, target)


def _all_results(found: Any) -> tuple[Tensor | None, ...]:
    """Loss, z-loss, token accuracy, predicted tokens; ``None`` for what was not asked for."""
    return tuple(found) if isinstance(found, tuple) else (found, None, None, None)


def apply_fused_linear_cross_entropy(*arguments: Any) -> Any:
    """``LigerFusedLinearCrossEntropyFunction.apply``: :func:`fused_linear_cross_entropy` by position."""
    return _all_results(fused_linear_cross_entropy(*arguments))


def apply_cross_entropy(_input: Tensor, target: Tensor, *options: Any) -> Any:
    """``LigerCrossEntropyFunction.apply``: :class:`LigerCrossEntropyLoss` by position."""
    return _all_results(LigerCrossEntropyLoss(*options[:9])(_input, target))


def scaled_cross_entropy(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    m_tiles_per_cluster: int = 1,
    return_entropy: bool = False,
    selected_token_ids: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """``LigerFusedLinearScaledCrossEntropyFunction.apply``: each token's negative log-likelihood, differentiable.

    Args:
        _input, weight, target: ``[N, H]``, ``[V, H]``, ``[N]``.
        temperature: what the logits are divided by.
        m_tiles_per_cluster: no effect.
        return_entropy: also the entropies ``[N]``, in nats, differentiable.
        selected_token_ids: ``[K]`` int64: also the log-probabilities of these columns, ``[N, K]``, differentiable.
        group: the ranks that share the vocabulary; the weight is this rank's rows of it, any number of them.
    """
    head, options = Head(weight, transform=LogitTransform(temperature), group=group), EngineOptions(ignore_index)
    names = ("logp", "entropy") if return_entropy else ("logp",)
    found = linear_statistics(_input, head, target, names, options=options)
    outputs = (-found.logp, found.entropy) if return_entropy else (-found.logp,)
    if selected_token_ids is not None:
        columns = selected_token_ids.expand(len(target), -1)
        found = linear_statistics(_input, head, target, "selected_logps", selected=columns, options=options)
        outputs = (*outputs, found.selected_logps)
    return outputs if len(outputs) > 1 else outputs[0]


@called_as("_input weight target tp_group:group temperature ignore_index tiles_per_reduce: return_entropy")
def scaled_cross_entropy_tp(*, group: dist.ProcessGroup | None = None, **call: Any) -> Any:
    """``LigerFusedLinearScaledCrossEntropyTPFunction.apply``: the same for ranks that share the vocabulary.

    ``tp_group`` are all ranks by default.
    """
    return scaled_cross_entropy(**call, group=dist.group.WORLD if group is None else group)


def fused_linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
    *_unused: Any,
) -> Tensor:
    """``liger_fused_linear_jsd``: the mean of :class:`liger_losses.LigerFusedLinearJSDLoss`'s divergence alone.

    Args:
        shift_labels: ``[N]``; only which are ``ignore_index`` matters. Without them, all tokens are active.
        jsd_beta: share of the teacher in the mixture.
        accum_dtype: no effect.
    """
    if shift_labels is None:
        shift_labels = torch.zeros(student_input.shape[:-1], dtype=torch.int64, device=student_input.device)
    else:  # a teacher's labels may lie outside of the student's vocabulary
        shift_labels = torch.where(shift_labels == ignore_index, ignore_index, 0)
    loss = liger_losses.LigerFusedLinearJSDLoss(0.0, 1.0, jsd_beta, ignore_index=ignore_index, temperature=temperature)
    return loss(student_input, student_weight, teacher_input, teacher_weight, shift_labels)


def mean_jsd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    *_unused: Any,
) -> Tensor:
    """``liger_jsd``: the mean of the generalized JSD over the active tokens, as liger-kernel defines it.

    ``beta KL(p || m) + (1 - beta) KL(q || m)`` with ``m = beta p + (1 - beta) q``, teacher p and student q; for beta 0
    and 1 ``KL(p || q)`` and ``KL(q || p)``, where the inputs need not sum to 1.

    Args:
        input, target: ``[N, V]``, log-softmax of student and teacher.
        shift_labels: as in :func:`fused_linear_jsd`.
    """
    log_q, log_p = (values.float().clamp(min=-10_000.0) for values in (input, target.detach()))  # a probability of 0
    if beta in (0.0, 1.0):
        log_a, log_b = (log_p, log_q) if beta == 0.0 else (log_q, log_p)
        values = (log_a.exp() * (log_a - log_b)).sum(-1)
    else:
        values = jsd(log_q, log_p, beta=beta)
    if shift_labels is None:
        return values.mean().to(input.dtype)
    active = shift_labels != ignore_index
    return (torch.where(active, values, 0.0).sum() / active.sum().clamp(min=1)).to(input.dtype)


def kl_div(
    input: Tensor, target: Tensor, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10
) -> Tensor:
    """``LigerKLDivLossFunction.apply``: :func:`torch.nn.functional.kl_div`, which needs no ``eps``.

    Args:
        input: ``[N, V]``, log-probabilities.
        target: ``[N, V]``, probabilities, or their logarithms with ``log_target``.
    """
    return nn.functional.kl_div(input.float(), target.detach().float(), reduction=reduction, log_target=log_target)


#: ``liger_kl_div``: :func:`kl_div` by torch's arguments.
functional_kl_div = called_as("input target size_average: reduce: reduction log_target eps", reduction="mean")(kl_div)


class LigerKLDIVLoss(nn.KLDivLoss):
    """:class:`torch.nn.KLDivLoss` with liger-kernel's ``eps`` first, which has no effect."""

    def __init__(self, eps: float = 1e-10, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return kl_div(y_pred, y_true, self.reduction, self.log_target)


def total_variation(
    p: Tensor, q: Tensor, shift_labels: Tensor | None = None, reduction: str = "batchmean", ignore_index: int = -100
) -> Tensor:
    """``LigerTVDLossFunction.apply``: ``1/2 sum |p - q|``.

    Args:
        p, q: ``[N, V]``, probabilities.
        shift_labels: as in :func:`fused_linear_jsd`.
        reduction: ``batchmean`` (over the active tokens), ``mean`` (over their entries), ``sum`` or ``none``, which
            returns ``[N, V]``.
    """
    terms, count = 0.5 * (p.float() - q.detach().float()).abs(), torch.tensor(len(p), device=p.device)
    if shift_labels is not None:
        active = shift_labels != ignore_index
        terms, count = terms * active[:, None], active.sum().clamp(min=1)
    if reduction == "none":
        return terms
    divisors: dict[str, Any] = {"batchmean": count, "mean": count * p.shape[1], "sum": 1}
    return terms.sum() / divisors[reduction]


#: ``liger_tvd``: :func:`total_variation`, with another reduction by default.
functional_tvd = called_as("input:p target:q shift_labels reduction ignore_index", reduction="mean")(total_variation)
LigerFusedLinearJSD = module_class(
    "LigerFusedLinearJSD", fused_linear_jsd, "jsd_beta ignore_index temperature accum_dtype"
)
LigerJSD = module_class(
    "LigerJSD", called_as("log_q:input log_p:target shift_labels beta ignore_index")(mean_jsd), "beta ignore_index"
)
LigerTVDLoss = module_class("LigerTVDLoss", total_variation, "reduction ignore_index")


@called_as(
    "logits old_logp:old_logps ref_logp:ref_logps completion_ids advantages completion_mask:mask temperature beta "
    "eps_low:epsilon_low eps_high:epsilon_high inplace: loss_type max_completion_length importance_sampling_level "
    "reduce sapo_temperature_pos sapo_temperature_neg vllm_is_ratio:is_ratio delta use_bias_correction_kl "
    "num_items_in_batch vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
    temperature=0.9,
    epsilon_high=0.4,
)
def triton_grpo_loss(
    logits: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    *,
    beta: float = 0.04,
    max_completion_length: int | None = None,
    reduce: bool = False,
    **options: Any,
) -> Any:
    """``triton_grpo_loss``: :func:`liger_losses.integrations.on_logits.grpo_loss`.

    Args:
        logits: ``[B, T + 1, V]``; the last position predicts no token of the completion, and all stay as they are.
        reduce: return the loss and a list of metrics, instead of each token's loss, KL estimate and clipping.
    """
    options |= {"beta": beta, "old_logps": old_logps, "ref_logps": ref_logps, "per_token": not reduce}
    options["max_completion_length"] = max_completion_length or completion_ids.shape[1]
    loss, *others = on_logits.grpo_loss(logits[:, :-1], completion_ids, advantages, **options)
    if reduce:
        return loss, list(others[0])
    kl, clipped = others
    return loss, kl if beta else None, clipped
