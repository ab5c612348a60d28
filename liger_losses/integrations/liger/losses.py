"""liger-kernel's fused linear losses outside ``chunked_loss``, computed by this library.

N tokens, H hidden size, V vocabulary size, K columns. As in liger-kernel, the teacher of a divergence is a constant.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import liger_losses
from liger_losses import TeacherLogits
from liger_losses.checks import check_labels, check_shaped, check_tensor
from liger_losses.chunked import EngineOptions, Head, linear_statistics
from liger_losses.integrations.liger.chunked import applied
from liger_losses.kernels.logit_transform import LogitTransform

_CROSS_ENTROPY = (
    "weight:lin_weight target bias ce_weight "
    f"{' '.join(liger_losses.LigerFusedLinearCrossEntropyLoss.positions)} chunk_mem_const:"
)
#: ``liger_fused_linear_cross_entropy``.
fused_linear_cross_entropy = applied(liger_losses.LigerFusedLinearCrossEntropyLoss, f"input:_input {_CROSS_ENTROPY}")
#: What ``liger_kernel.functional`` has beside it, without effect here.
_IMPLEMENTATION = "impl: mode: backend:"
_dispatched = applied(liger_losses.LigerFusedLinearCrossEntropyLoss, f"_input {_CROSS_ENTROPY} {_IMPLEMENTATION}")


def apply_fused_linear_cross_entropy(*arguments: Any, **keywords: Any) -> tuple[Tensor | None, ...]:
    """``LigerFusedLinearCrossEntropyFunction.apply``: :func:`fused_linear_cross_entropy` by position.

    Returns:
        Loss, z-loss, token accuracy and predicted tokens; ``None`` for what was not asked for.
    """
    result = _dispatched(*arguments, **keywords)
    return tuple(result) if isinstance(result, tuple) else (result, None, None, None)


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
    columns = None if selected_token_ids is None else selected_token_ids.expand(len(target), -1)
    others = ["entropy"] * return_entropy + ["selected_logps"] * (columns is not None)
    head, options = Head(weight, transform=LogitTransform(temperature), group=group), EngineOptions(ignore_index)
    found = linear_statistics(_input, head, target, ("logp", *others), selected=columns, options=options)
    return (-found.logp, *[getattr(found, name) for name in others]) if others else -found.logp


def scaled_cross_entropy_tp(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    tiles_per_reduce: int = 1,
    return_entropy: bool = False,
) -> Any:
    """``liger_fused_linear_scaled_cross_entropy_tp``: :func:`scaled_cross_entropy` of ranks that share the vocabulary.

    Args:
        tp_group: all ranks by default.
        tiles_per_reduce: no effect.
    """
    group = dist.group.WORLD if tp_group is None else tp_group
    return scaled_cross_entropy(
        input, weight, target, temperature, ignore_index, return_entropy=return_entropy, group=group
    )


def _active(shift_labels: Any, hidden: Any, ignore_index: int) -> Tensor:
    """Labels that say which tokens are active: a teacher's labels may lie outside of the student's vocabulary."""
    check_tensor("student_input", hidden)
    active = int(ignore_index == 0)  # a label that is not ignored
    if shift_labels is None:
        return torch.full(hidden.shape[:-1], active, dtype=torch.int64, device=hidden.device)
    check_labels(shift_labels)
    return torch.where(shift_labels == ignore_index, ignore_index, active)


class LigerFusedLinearJSD(liger_losses.LigerFusedLinearJSDLoss):
    """The mean of :class:`liger_losses.LigerFusedLinearJSDLoss`'s divergence alone.

    Args:
        jsd_beta: share of the teacher in the mixture.
        accum_dtype: no effect.
    """

    def __init__(
        self, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0, accum_dtype: Any = None
    ) -> None:
        super().__init__(0.0, 1.0, jsd_beta, ignore_index=ignore_index, temperature=temperature)

    def forward(  # type: ignore[override]
        self, student_input: Any, student_weight: Any, teacher_input: Any, teacher_weight: Any, shift_labels: Any = None
    ) -> Any:
        """``shift_labels [N]``: only which are ``ignore_index`` matters. With ``None``, all tokens are active."""
        labels = _active(shift_labels, student_input, self.ignore_index)
        return super().forward(student_input, student_weight, teacher_input, teacher_weight, labels)


_JSD = "student_input student_weight teacher_input teacher_weight shift_labels jsd_beta ignore_index temperature"
#: ``liger_fused_linear_jsd``, and ``LigerFusedLinearJSDFunction.apply``.
fused_linear_jsd = applied(LigerFusedLinearJSD, f"{_JSD} accum_dtype jsd_impl: jsd_mode:")
#: ``liger_kernel.functional.fused_linear_jsd``.
dispatched_jsd = applied(LigerFusedLinearJSD, f"{_JSD} {_IMPLEMENTATION}")


class LigerFusedLinearKLDivLoss(liger_losses.LigerFusedLinearKLLoss):
    """``KL(q || p)`` of probabilities q that are given, and the student p.

    Args:
        reduction: ``batchmean`` divides the sum by the number of active tokens, ``mean`` also by V; or ``sum``.
        temperature: divides the logits of the student alone.
        eps, accum_dtype: no effect; where q is 0, the term is 0.

    Raises:
        ValueError: another reduction.
    """

    def __init__(
        self,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        temperature: float = 1.0,
        eps: float = 1e-10,
        accum_dtype: Any = None,
    ) -> None:
        if reduction not in ("batchmean", "mean", "sum"):
            raise ValueError(f"reduction must be batchmean, mean or sum, got {reduction!r}.")
        super().__init__(0.0, 1.0, ignore_index=ignore_index, temperature=temperature)
        self.reduction = reduction

    def forward(  # type: ignore[override]
        self, student_input: Any, student_weight: Any, target: Any, shift_labels: Any = None
    ) -> Tensor:
        """The loss.

        Args:
            student_input, student_weight: ``[N, H]``, ``[V, H]``.
            target: q, ``[N, V]``; each row is divided by its sum.
            shift_labels: ``[N]``: only which are ``ignore_index`` matters. With ``None``, all tokens are active.

        Raises:
            TypeError, ValueError: inputs that do not fit together.
        """
        labels, head = _active(shift_labels, student_input, self.ignore_index), Head.of(student_weight)
        shape = (*student_input.shape[:-1], head.vocab_size)
        check_shaped("target", target, "row of student_input and student_weight", student_input.device, shape)
        # The temperature of the loss divides the teacher's logits too.
        wide, rows = torch.promote_types(target.dtype, torch.float32), target.reshape(-1, head.vocab_size)
        teacher = TeacherLogits(lambda i: self.temperature * rows[i].to(wide).log(), columns=head.vocab_size)
        items = 1 if self.reduction == "sum" else None
        value, _ = super().forward(head, student_input, labels, teacher, num_items_in_batch=items)
        return value / head.vocab_size if self.reduction == "mean" else value


#: ``liger_fused_linear_kl_div``.
fused_linear_kl_div = applied(
    LigerFusedLinearKLDivLoss,
    "student_input student_weight target shift_labels reduction ignore_index temperature eps accum_dtype",
)
