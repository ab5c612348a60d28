"""Rows of exponentials of which some belong to masked tokens: log-probabilities, a loss, and gradients.

For calls of some thousand tokens, which take as long as the device takes: fp32 logits would be written once and read
twice. As in :mod:`liger_losses.kernels.linear_exp`, e = exp(z - offset) comes out of the product, and p = e / sum(e).

T rows (tokens), V columns (vocabulary), H hidden size.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._tiles import tiles_of
from liger_losses.kernels._triton import Launcher, triton
from liger_losses.kernels.exponential_row_kernels import scales_kernel, start_kernel
from liger_losses.kernels.label_rows import ASSERTS, MOST_COMPARED, LabelRows, add_label_rows_kernel, masked_labels
from liger_losses.kernels.linear_exp import (
    _GROUP,
    LARGEST_SUM,
    _exponentials_kernel,
    linear_exponentials,
    row_exponentials_kernel,
)
from liger_losses.kernels.linear_stats import MaskedStatistics
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.masked_rows import Derivatives, RowStatistics
from liger_losses.kernels.matmul import matmul_into
from liger_losses.kernels.online_softmax import MERGED, Sums, merge_kernel, stored
from liger_losses.kernels.rows import power_of_two

#: The most tokens, whose labels are sorted in one launch.
MOST_TOKENS = MOST_COMPARED
#: Entries of a row of hidden states, and of a vector of all tokens, that a program reads at a time.
_BLOCK, _AT_ONCE = 1024, 4096
#: Rows of a program that adds up sums of tiles; the most tiles, and labels, that it reads at a time.
_ROWS, _TILES = 8, 512
#: Columns of a row of exponentials in memory are a multiple, so that products are aligned.
_PADDED = 64


def exponentials_serve(weight: Tensor, transform: LogitTransform) -> bool:
    """Whether :class:`ExponentialRows` takes a head: bf16 holds exponentials of any size, and fp16 does not."""
    return weight.dtype == torch.bfloat16 and weight.stride(1) == 1 and transform.softcap is None


class RowExponentials(NamedTuple):
    """What :meth:`ExponentialRows.project` computes of a call.

    ``values`` are the exponentials e ``[T, V]``, 0 at the label, and anything for masked tokens. Others are 0 there:
    ``hidden [T, H]``; ``ratio [T]``, which is p / e; and ``others [T]``, which is 1 - p of the label. ``ordered`` are
    the labels in ascending order, V for masked tokens, ``source`` the row of each, and ``rank`` the place of each row.
    Of ``facts``, the first says whether the label's logit was too small an offset of some row, the second is the number
    of tokens that carry loss, at least 1, and the others say which rows those are. Backward needs no ``statistics``.
    """

    values: Tensor
    hidden: Tensor
    ratio: Tensor
    others: Tensor
    ordered: Tensor
    source: Tensor
    rank: Tensor
    facts: Tensor
    statistics: RowStatistics | None = None


class ExponentialGradients(NamedTuple):
    """What products of the gradients are taken of: d loss / d projections is ``scale e``, and ``coef [T]`` at labels.

    ``hidden`` are the hidden states with the factor ``scale [T]``; ``ordered_coef`` are in the order of the labels.
    """

    block: RowExponentials
    labels: Tensor
    scale: Tensor
    coef: Tensor
    ordered_coef: Tensor
    hidden: Tensor
    loss: Tensor | None


class ExponentialRows:
    """The kernels of calls that have these shapes, strides, dtypes, alignments and options.

    It computes what :class:`~liger_losses.kernels.masked_rows.MaskedRows` does, of log-probabilities and mean logits.

    Args:
        weight: ``[V, H]`` bf16, rows contiguous.
        tokens: T, at most :data:`MOST_TOKENS`.
        ignore_index: the label of masked tokens.
        transform: from projections to logits, without a soft-cap; one temperature for all tokens.
        right: 0-dim bool, true, on the device: a label outside of ``[0, V)`` makes it false.
        backend: ``torch`` or ``triton``.
        mean_logit: whether mean logits are computed.
    """

    #: Whether gradients are written over the block, so that it serves one backward.
    overwrites = False

    def __init__(
        self,
        weight: Tensor,
        tokens: int,
        ignore_index: int,
        transform: LogitTransform,
        right: Tensor,
        backend: str,
        mean_logit: bool = False,
    ) -> None:
        self.tokens, self.ignore_index, self.right, self.mean_logit = tokens, int(ignore_index), right, mean_logit
        self.transform, self.triton, (self.columns, self.hidden_size) = transform, backend == "triton", weight.shape
        self.factor = transform.for_kernel.factor
        self.label_rows = LabelRows(tokens, self.hidden_size, backend)
        if not self.triton:
            return
        self.launch_start = Launcher(start_kernel, tokens, **ASSERTS)
        self.launch_sums = Launcher(row_exponentials_kernel, triton.cdiv(tokens, _ROWS), num_warps=8)
        self.launch_merge = Launcher(merge_kernel, triton.cdiv(tokens, MERGED[0]))
        # By whether there is an upstream gradient.
        self.launch_scales = cache(lambda upstream: Launcher(scales_kernel, tokens))
        self.launch_hidden_gradient = Launcher(add_label_rows_kernel, tokens)
        self._prepare(weight)

    def _prepare(self, weight: Tensor) -> None:
        """Choose the kernel of the product, and those that follow where a label's logit was too small an offset."""
        tokens, epilogue = self.tokens, Epilogue(self.transform)
        clean, values = weight.new_empty(tokens, self.hidden_size), self._values(weight)
        tiles = tiles_of(clean, weight, epilogue, values)
        self.sums_shape = tiles.column_tiles, tokens
        at_once = min(_TILES, power_of_two(self.sums_shape[0]))
        sizes = tiles.column_tiles, tokens, self.columns, self.ignore_index
        self.of_sums = *sizes, LARGEST_SUM, _ROWS, at_once, _TILES
        programs = min(tiles.programs, tiles.row_tiles * tiles.column_tiles)
        options = {name: tiles.arguments[name] for name in ("num_warps", "num_stages") if name in tiles.arguments}
        #: The second is for other offsets, where there are rows that need one.
        self.launch_product, self.launch_again = (Launcher(_exponentials_kernel, programs, **options) for _ in range(2))
        beside: dict[str, Any] = {"group": _GROUP, "PROJECTIONS": False}
        self.names, self.given = _exponentials_kernel.arg_names, {**beside, **tiles.arguments}
        for name in ("hidden", "weight", "out"):  # each call has its own
            del self.given[name]
        rest = self.ignore_index, self.transform, self.right, False, "triton"
        # Descriptors take the host some time in each call, and this seldom runs.
        self.statistics_again = MaskedStatistics(clean, weight, *rest, by_pointers=True)
        self.of_merge = self.statistics_again.splits, tokens, self.columns, self.ignore_index, Sums(), *MERGED

    def _values(self, weight: Tensor) -> Tensor:
        padded = weight.new_empty(self.tokens, -(-self.columns // _PADDED) * _PADDED)
        return padded if padded.shape[1] == self.columns else padded[:, : self.columns]

    def project(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> RowExponentials:
        """Exponentials, log-probabilities, and what gradients are computed of.

        Args:
            hidden: ``[T, H]`` bf16, rows contiguous.
            weight: as the class was given it.
            labels: ``[...]`` int64, T of them, contiguous; the log-probabilities have their shape.
        """
        if not self.triton:
            return self._reference(hidden, weight, labels)
        tokens, device, fp32 = self.tokens, weight.device, torch.float32
        clean, values = weight.new_empty(tokens, self.hidden_size), self._values(weight)
        label_logit, lse, ratio, others = torch.empty(4, tokens, dtype=fp32, device=device).unbind()
        logp = torch.empty(labels.shape, dtype=fp32, device=device)
        mean = torch.empty_like(logp) if self.mean_logit else None
        sums = torch.empty(self.sums_shape, dtype=fp32, device=device)
        logit_sums = torch.empty_like(sums) if self.mean_logit else None
        ordered, source, rank = torch.empty(3, tokens, dtype=torch.int64, device=device).unbind()
        facts = torch.empty(2 + tokens, dtype=torch.int32, device=device)
        self.launch_start(
            hidden, hidden.stride(0), weight, weight.stride(0), labels, self.right, clean, label_logit, facts,
            tokens, self.columns, self.hidden_size, self.ignore_index, self.transform.for_kernel, _BLOCK, _AT_ONCE,
        )  # fmt: skip
        own = {"labels": labels, "offset": label_logit, "partial": sums, "logit_sums": logit_sums}
        arguments = {**self.given, **self._operands(clean, weight, values), **own}
        # What is not given, these kernels do without.
        self.launch_product(*[arguments.get(name) for name in self.names])
        self.launch_sums(
            sums, logit_sums, None, label_logit, None, lse, logp, mean, None, facts,
            labels, ratio, others, ordered, source, rank, *self.of_sums,
        )  # fmt: skip
        # These return at once unless the device has found a label whose sum is too large.
        again = self.statistics_again.partial_sums(clean, weight, labels, facts)
        self.launch_merge(
            again, label_logit, None, None, facts, label_logit, ratio, others,
            stored({"lse": lse, "logp": logp}), *self.of_merge,
        )  # fmt: skip
        arguments["needed"] = facts
        self.launch_again(*[arguments.get(name) for name in self.names])
        statistics = RowStatistics(lse, logp, None, mean)
        return RowExponentials(values, clean, ratio, others, ordered, source, rank, facts, statistics)

    def statistics(
        self, block: RowExponentials, labels: Tensor, entropy: bool = False, mean_logit: bool = False
    ) -> RowStatistics:
        """The log-sum-exps, the labels' log-probabilities and the mean logits; there are no entropies."""
        assert block.statistics is not None
        return block.statistics

    def gradients(
        self,
        block: RowExponentials,
        labels: Tensor,
        hidden: Tensor,
        lse: Tensor,
        entropy: Tensor | None,
        upstream: Derivatives,
    ) -> ExponentialGradients:
        """The gradient of any function of the log-probabilities, by which it has the derivatives ``upstream``."""
        return self._gradients(block, labels, upstream.logp, 1.0, False)

    def loss(
        self, block: RowExponentials, labels: Tensor, hidden: Tensor, scales: tuple[float, float | None], mean: bool
    ) -> ExponentialGradients:
        """``sum_t share s logp_t`` and its gradient; ``share`` is 1, or 1 over the number of tokens that carry loss.

        Args:
            block, labels: as in :meth:`project`.
            hidden: not read.
            scales: s, and ``None``.
            mean: whether the share is the second.
        """
        return self._gradients(block, labels, None, scales[0], mean)

    def _gradients(
        self, block: RowExponentials, labels: Tensor, upstream: Tensor | None, coefficient: float, mean: bool
    ) -> ExponentialGradients:
        """``upstream``, or ``coefficient`` and a loss: d loss / d logp."""
        if not self.triton:
            return self._reference_gradients(block, labels, upstream, coefficient, mean)
        # A loss is summed up of what backward has no more.
        logp = block.statistics.logp if block.statistics is not None and upstream is None else None
        scale, coef, ordered_coef = torch.empty(3, self.tokens, dtype=torch.float32, device=labels.device).unbind()
        scaled = torch.empty_like(block.hidden)
        loss = None if upstream is not None else torch.empty((), dtype=torch.float32, device=labels.device)
        self.launch_scales(upstream is not None)(
            labels, logp, block.ratio, block.others, block.rank, block.facts, upstream, block.hidden,
            scale, coef, ordered_coef, scaled, loss,
            self.tokens, self.hidden_size, self.ignore_index, coefficient, self.factor, mean, _BLOCK, _AT_ONCE,
        )  # fmt: skip
        return ExponentialGradients(block, labels, scale, coef, ordered_coef, scaled, loss)

    def hidden_gradient_into(self, out: Tensor, found: ExponentialGradients, weight: Tensor) -> None:
        """Write the gradient by hidden states ``[T, H]``, rounded once."""
        product = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        matmul_into(product, found.block.values, weight)
        if self.triton:
            self.launch_hidden_gradient(
                out, self.hidden_size, product, found.scale, found.coef, weight, weight.stride(0), found.labels,
                self.columns, self.hidden_size, _BLOCK,
            )  # fmt: skip
            return
        rows = weight[found.labels.reshape(-1).clamp(0, self.columns - 1)].float()
        out.copy_(product * found.scale[:, None] + rows * found.coef[:, None])

    def weight_gradient(self, found: ExponentialGradients, dtype: torch.dtype) -> Tensor:
        """The gradient by the weight ``[V, H]``."""
        block = found.block
        out = torch.empty(self.columns, self.hidden_size, dtype=dtype, device=block.values.device)
        matmul_into(out, block.values.t(), found.hidden)
        return self.label_rows.add_(out, block.ordered, block.source, found.ordered_coef, block.hidden)

    def _operands(self, hidden: Tensor, weight: Tensor, out: Tensor) -> dict[str, Any]:
        """The matrices of the product."""
        given = tiles_of(hidden, weight, Epilogue(self.transform), out).arguments
        return {name: given[name] for name in ("hidden", "weight", "out")}

    # --- The reference, in torch ---------------------------------------------------------------------------------

    def _reference(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> RowExponentials:
        safe, ignored, _, right = masked_labels(labels.reshape(-1), self.ignore_index, self.columns)
        self.right.logical_and_(right)
        clean, values = hidden.masked_fill(ignored[:, None], 0), self._values(weight)
        names = ("lse", "mean_logit")[: 1 + self.mean_logit]
        into = {name: torch.empty(self.tokens, dtype=torch.float32, device=hidden.device) for name in names}
        found = linear_exponentials(clean, weight, safe, values, Epilogue(self.transform), found=into)
        offset, lse, logp = found.stored
        vectors = lse, logp, (offset - lse).exp(), -logp.expm1()
        lse, logp, ratio, others = [value.masked_fill(ignored, 0) for value in vectors]
        ordered, source = safe.masked_fill(ignored, self.columns).sort(stable=True)
        facts = torch.stack([ignored.sum() * 0, (~ignored).sum().clamp(min=1)]).int()
        mean = found.mean_logit.masked_fill(ignored, 0).view(labels.shape) if found.mean_logit is not None else None
        statistics = RowStatistics(lse, logp.view(labels.shape), None, mean)
        return RowExponentials(values, clean, ratio, others, ordered, source, source.argsort(), facts, statistics)

    def _reference_gradients(
        self, block: RowExponentials, labels: Tensor, upstream: Tensor | None, coefficient: float, mean: bool
    ) -> ExponentialGradients:
        ignored, share = (labels == self.ignore_index).reshape(-1), 1.0 / block.facts[1]
        g = torch.full_like(block.ratio, coefficient) * (share if mean else 1.0)
        g = (g if upstream is None else upstream.reshape(-1)).masked_fill(ignored, 0)
        by_projection = g if self.factor is None else g * self.factor
        scale, coef = -by_projection * block.ratio, by_projection * block.others
        scaled = (scale[:, None] * block.hidden).to(block.hidden.dtype)
        loss = None if block.statistics is None else (g * block.statistics.logp.reshape(-1)).sum()
        return ExponentialGradients(block, labels, scale, coef, coef[block.source], scaled, loss)
