"""Rows of logits of which some belong to tokens without loss: statistics and gradients, one launch each.

For calls of few tokens, which take as long as the host takes: what would otherwise be launches (labels without
``ignore_index``, a check of them, hidden states without what padding may hold) is done by the programs of the rows.
T rows (tokens), V columns (vocabulary), H hidden size.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import Launcher, jit, tl
from liger_losses.kernels.label_rows import ASSERTS, check_known, count_active, label_of, masked_labels
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform, load_logits
from liger_losses.kernels.matmul import matmul
from liger_losses.kernels.online_softmax import Sums, online_row, reference_statistics, stored
from liger_losses.kernels.rows import power_of_two
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into, store_row_gradient
from liger_losses.kernels.softmax_stats import row_statistics_kernel
from liger_losses.kernels.targets import target_of

#: Entries of a row that a program reads, and labels that it counts, at a time (H100: 64 to 1024 rows of 49,152 to
#: 151,936 entries take 2 to 25 % less time than with half as many and 8 warps).
_BLOCK, _AT_ONCE = 8192, 1024


class RowStatistics(NamedTuple):
    """``[T]`` fp32 each, 0 for tokens without loss; ``None`` for what was not asked for."""

    lse: Tensor
    logp: Tensor
    entropy: Tensor | None = None
    mean_logit: Tensor | None = None


class Derivatives(NamedTuple):
    """The derivatives of a function by each statistic, ``[T]`` fp32, contiguous; ``None`` for 0.

    For tokens without loss, they may be anything.
    """

    lse: Tensor | None = None
    logp: Tensor | None = None
    entropy: Tensor | None = None


class RowGradients(NamedTuple):
    """What :class:`MaskedRows` computes for the products of the gradients.

    ``grad`` is d loss / d projections ``[T, V]``, in the memory of the projections, and ``hidden`` are the hidden
    states ``[T, H]``; both are 0 for tokens without loss. ``losses [T]`` are terms of the loss, where it is known.
    """

    grad: Tensor
    hidden: Tensor
    losses: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """The loss, 0-dim."""
        assert self.losses is not None
        return self.losses.sum()


class MaskedRows:
    """The kernels of calls that have these shapes, strides, dtypes, alignments and options.

    Args:
        tokens, columns: T and V.
        ignore_index: the label of masked tokens.
        transform: from projections to logits; one temperature for all tokens.
        right: 0-dim bool, true, on the device: a label outside of ``[0, V)`` makes it false.
        backend: ``torch`` or ``triton``.
    """

    #: Whether gradients are written over the block, so that it serves one backward.
    overwrites = True

    def __init__(
        self, tokens: int, columns: int, ignore_index: int, transform: LogitTransform, right: Tensor, backend: str
    ) -> None:
        self.tokens, self.columns, self.ignore_index, self.right = tokens, columns, int(ignore_index), right
        self.transform, self.triton = transform, backend == "triton"
        if self.triton:
            # Few rows leave processors idle: each program is as large as there are.
            self.block = min(_BLOCK, power_of_two(columns))
            warps = {"num_warps": target_of(right.device).warps(self.block // 8)}
            asserts = warps | ASSERTS
            self.for_kernel = transform.for_kernel
            # By which statistics, and which derivatives, there are.
            self.launch_statistics = cache(lambda *asked: Launcher(row_statistics_kernel, tokens, **asserts))
            self.launch_gradient = cache(lambda *given: Launcher(_gradient_kernel, tokens, **warps))
            self.launch_loss = Launcher(_loss_kernel, tokens, **asserts)

    def project(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """``hidden @ weight.T`` ``[T, V]`` in fp32."""
        return matmul(hidden, weight.t(), torch.float32)

    def statistics(
        self, projected: Tensor, labels: Tensor, entropy: bool = False, mean_logit: bool = False
    ) -> RowStatistics:
        """Log-sum-exp, the label's log-probability, the entropy and the mean logit of each row.

        Args:
            projected: ``[T, V]`` fp32, contiguous.
            labels: ``[...]`` int64, T of them, contiguous; the statistics have their shape.
            entropy, mean_logit: whether to compute it.
        """
        if not self.triton:
            return self._reference(projected, labels, entropy, mean_logit)
        lse = torch.empty_like(labels, dtype=torch.float32)
        logp = torch.empty_like(lse)
        entropies = torch.empty_like(logp) if entropy else None
        means = torch.empty_like(logp) if mean_logit else None
        self.launch_statistics(entropy, mean_logit)(
            projected, self.columns, labels, self.right, self.ignore_index, None, None,
            stored({"lse": lse, "logp": logp, "entropy": entropies, "mean_logit": means}),
            self.columns, self.for_kernel, _SUMS[entropy, mean_logit], self.block,
        )  # fmt: skip
        return RowStatistics(lse, logp, entropies, means)

    def gradients(
        self,
        projected: Tensor,
        labels: Tensor,
        hidden: Tensor,
        lse: Tensor,
        entropy: Tensor | None,
        upstream: Derivatives,
    ) -> RowGradients:
        """The gradient of any function of the statistics; ``projected`` is overwritten.

        Args:
            projected, labels: as in :meth:`statistics`.
            hidden: ``[T, H]``, rows contiguous.
            lse, entropy: what :meth:`statistics` returned; an entropy where there is a derivative by it.
            upstream: the function's derivatives.
        """
        grad = self._in_place(projected, hidden)
        if not self.triton:
            ignored = (labels == self.ignore_index).reshape(-1)
            given = {name: g for name, g in upstream._asdict().items() if g is not None}
            masked = {name: g.reshape(-1).masked_fill(ignored, 0) for name, g in given.items()}
            values = {} if entropy is None else {"entropy": entropy.reshape(-1)}
            coefficients = SoftmaxGradient.of(masked, values)
            return self._reference_gradients(grad, projected, labels, hidden, lse, coefficients)
        clean = torch.empty_like(hidden)
        self.launch_gradient(*[g is None for g in upstream])(
            projected, labels, lse, entropy, *upstream, hidden, hidden.stride(0), clean,
            self.columns, hidden.shape[1], self.ignore_index, self.for_kernel, self.block, _AT_ONCE,
        )  # fmt: skip
        return RowGradients(grad, clean)

    def loss(
        self, projected: Tensor, labels: Tensor, hidden: Tensor, scales: tuple[float, float | None], mean: bool
    ) -> RowGradients:
        """The terms of ``sum_t share (s logp_t + m mean_logp_t)`` and its gradient; ``projected`` is overwritten.

        ``mean_logp`` is the mean over the vocabulary of the log-probabilities; ``share`` is 1, or 1 over the number of
        tokens that carry loss.

        Args:
            projected, labels, hidden: as in :meth:`gradients`.
            scales: s, and m or ``None`` for 0.
            mean: whether the share is the second.
        """
        grad = self._in_place(projected, hidden)
        if not self.triton:
            return self._reference_loss(grad, projected, labels, hidden, scales, mean)
        clean = torch.empty_like(hidden)
        losses = torch.empty_like(labels, dtype=torch.float32)
        self.launch_loss(
            projected, labels, self.right, losses, hidden, hidden.stride(0), clean,
            self.tokens, self.columns, hidden.shape[1], self.ignore_index, *scales,
            self.for_kernel, _SUMS_OF_MEANS[scales[1] is not None], mean, self.block, _AT_ONCE,
        )  # fmt: skip
        return RowGradients(grad, clean, losses)

    def hidden_gradient_into(self, out: Tensor, found: RowGradients, weight: Tensor) -> None:
        """Write the gradient by hidden states ``[T, H]``."""
        matmul(found.grad, weight, out.dtype, out)

    def weight_gradient(self, found: RowGradients, dtype: torch.dtype) -> Tensor:
        """The gradient by the weight ``[V, H]``."""
        return matmul(found.grad.t(), found.hidden, dtype)

    def _in_place(self, projected: Tensor, hidden: Tensor) -> Tensor:
        """Each row of gradients in the hidden states' dtype, at the beginning of its row of projections."""
        if hidden.dtype == projected.dtype:
            return projected
        return projected.view(hidden.dtype).as_strided(projected.shape, (2 * self.columns, 1))

    # --- The reference, in torch ---------------------------------------------------------------------------------

    def _masked(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        safe, ignored, shares, right = masked_labels(labels.reshape(-1), self.ignore_index, self.columns)
        self.right.logical_and_(right)
        return safe, ignored, shares

    def _reference(self, projected: Tensor, labels: Tensor, entropy: bool, mean_logit: bool) -> RowStatistics:
        safe, ignored, _ = self._masked(labels)
        asked = {"logp": True, "entropy": entropy, "mean_logit": mean_logit}
        names = frozenset([name for name, wanted in asked.items() if wanted])
        found = reference_statistics(projected, safe, names, Epilogue(self.transform))
        shaped = {name: found[name].masked_fill(ignored, 0).view(labels.shape) for name in names}
        return RowStatistics(found["lse"].masked_fill(ignored, 0), **shaped)

    def _reference_gradients(
        self,
        grad: Tensor,
        projected: Tensor,
        labels: Tensor,
        hidden: Tensor,
        lse: Tensor,
        coefficients: SoftmaxGradient,
    ) -> RowGradients:
        safe, ignored, _ = self._masked(labels)
        projected.masked_fill_(ignored[:, None], 0)
        softmax_gradient_into(
            grad, projected, lse.reshape(-1), safe, coefficients, Epilogue(self.transform), backend="torch"
        )
        return RowGradients(grad, hidden.masked_fill(ignored[:, None], 0))

    def _reference_loss(
        self,
        grad: Tensor,
        projected: Tensor,
        labels: Tensor,
        hidden: Tensor,
        scales: tuple[float, float | None],
        mean: bool,
    ) -> RowGradients:
        safe, ignored, shares = self._masked(labels)
        names = ("logp",) if scales[1] is None else ("logp", "mean_logp")
        rows = projected.masked_fill(ignored[:, None], 0)
        found = reference_statistics(rows, safe, frozenset(names), Epilogue(self.transform))
        share = shares if mean else (~ignored).float()
        weights = {name: scale * share for name, scale in zip(names, scales, strict=False) if scale is not None}
        zero = torch.zeros((), dtype=torch.float32)
        losses = sum([(w * found[name]).masked_fill(ignored, 0) for name, w in weights.items()], zero)
        coefficients = SoftmaxGradient.of(weights, found)
        return self._reference_gradients(grad, projected, labels, hidden, found["lse"], coefficients)._replace(
            losses=losses
        )


#: By whether there are an entropy and a mean logit; by whether there is a mean log-probability.
_SUMS = {
    (entropy, mean): Sums(moment=1 if entropy else None, logits=1 if mean else None)
    for entropy in (False, True)
    for mean in (False, True)
}
_SUMS_OF_MEANS = {False: Sums(), True: Sums(logits=1)}


@jit
def copy_row(clean, hidden, hidden_stride, row, active, hidden_size, BLOCK: tl.constexpr):
    """A row of hidden states, or zeros where it carries no loss: it may hold anything, and 0 times NaN is NaN."""
    read = tl.where(active, hidden_size, 0)
    for start in range(0, hidden_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(hidden + row * hidden_stride + at, mask=at < read, other=0.0)
        tl.store(clean + row * hidden_size + at, value, mask=at < hidden_size)


@jit(
    do_not_specialize=["ignore_index"],
    do_not_specialize_on_alignment=["labels", "entropy", "g_lse", "g_logp", "g_entropy"],
)
def _gradient_kernel(
    projected, labels, lse, entropy, g_lse, g_logp, g_entropy, hidden, hidden_stride, clean,
    columns, hidden_size, ignore_index, transform,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    label, active, _known = label_of(labels, row, ignore_index, columns)
    p_coef = 0.0
    p_logp_coef = 0.0
    label_coef = 0.0
    if g_lse is not None:
        p_coef += tl.load(g_lse + row)
    if g_logp is not None:
        label_coef = tl.load(g_logp + row)
        p_coef -= label_coef
    if g_entropy is not None:
        p_logp_coef = -tl.load(g_entropy + row)
        p_coef += p_logp_coef * tl.load(entropy + row)
    own = projected + row * columns
    out = own.to(tl.pointer_type(clean.dtype.element_ty), bitcast=True)
    store_row_gradient(
        out, own, None, None, columns, tl.where(active, columns, 0), tl.load(lse + row), label,
        (labels, g_entropy, None, labels, None, None), (p_coef, p_logp_coef, 0.0, label_coef, 0.0, 0.0), transform, 1.0,
        BLOCK,
    )  # fmt: skip
    copy_row(clean, hidden, hidden_stride, row, active, hidden_size, AT_ONCE)


@jit(do_not_specialize=["tokens", "ignore_index"], do_not_specialize_on_alignment=["labels"])
def _loss_kernel(
    projected, labels, right, losses, hidden, hidden_stride, clean,
    tokens, columns, hidden_size, ignore_index, logp_scale, mean_scale, transform, sums,
    MEAN: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program per row, which reads all labels for the share of each: a launch takes the host longer."""
    row = tl.program_id(0).to(tl.int64)
    label, active, known = label_of(labels, row, ignore_index, columns)
    check_known(right, known | (active == 0))
    copy_row(clean, hidden, hidden_stride, row, active, hidden_size, AT_ONCE)
    share = 1.0
    if MEAN:
        share = 1.0 / count_active(labels, tokens, ignore_index, AT_ONCE).to(tl.float32)
    own = projected + row * columns
    state = online_row(own, None, None, columns, tl.where(active, columns, 0), transform, 1.0, sums, BLOCK)
    _best, logit_sum, _moment, _squares, top, total, _weight_sum, _weighted_sum = state
    log_total = tl.log(tl.where(active, total, 1.0))
    lse = top + log_total
    label_coef = share * logp_scale
    term = label_coef * ((load_logits(own, None, label, active, transform, 1.0) - top) - log_total)
    p_coef = -label_coef
    uniform_coef = 0.0
    if mean_scale is not None:
        mean_coef = share * mean_scale
        term += mean_coef * (logit_sum / columns - lse)
        p_coef -= mean_coef
        uniform_coef = mean_coef / columns
    tl.store(losses + row, tl.where(active, term, 0.0))
    out = own.to(tl.pointer_type(clean.dtype.element_ty), bitcast=True)
    # The label's logit and those of all columns have been read by all threads before any is overwritten.
    tl.debug_barrier()
    store_row_gradient(
        out, own, None, None, columns, tl.where(active, columns, 0), lse, label,
        (labels, None, None, labels, mean_scale, None), (p_coef, 0.0, 0.0, label_coef, uniform_coef, 0.0), transform,
        1.0, BLOCK,
    )  # fmt: skip
