"""Rows of exponentials of which some belong to tokens without loss: log-probabilities, a loss, and gradients.

For calls of some thousand tokens, which take as long as the device takes: fp32 logits would be written once and read
twice. As in :mod:`liger_losses.kernels.linear_exp`, e = exp(z - offset) comes out of the product, and p = ratio e with
ratio = 1 / sum(e). The label's e is then replaced by minus the sum of the others. As d logp / d z is -p at the others,
and 1 - p at the label, which is the sum of the others' p, ``d logp / d z = -ratio e`` in all columns: both products of
the gradients are taken with e, and nothing is added for labels.

T rows (tokens), V columns (vocabulary), H hidden size.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._tiles import Tiles, tiles_of
from liger_losses.kernels._triton import Launcher, jit, tl, triton
from liger_losses.kernels.hopper_pipeline import AVAILABLE, Launchable, NotCompiledError
from liger_losses.kernels.label_rows import masked_labels
from liger_losses.kernels.linear_exp import LARGEST_SUM, kernel_of, linear_exponentials, log1p, place_of_sums
from liger_losses.kernels.linear_exp_hopper import hopper_tiles, sums_on_hopper
from liger_losses.kernels.linear_lse import SumTiles
from liger_losses.kernels.linear_stats import MaskedStatistics
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform, transform_block
from liger_losses.kernels.masked_rows import Derivatives, RowGradients, RowStatistics, copy_row, label_of
from liger_losses.kernels.matmul import matmul_into
from liger_losses.kernels.rows import power_of_two
from liger_losses.kernels.targets import order_of

#: Entries of a row of hidden states, and labels, that a program reads at a time.
_BLOCK, _AT_ONCE = 1024, 4096
#: Rows of a program that adds up sums of tiles, and the most tiles that it reads at a time.
_ROWS, _TILES = 8, 512
#: Columns of a row of exponentials in memory are a multiple, so that products are aligned.
_PADDED = 64


class RowExponentials(NamedTuple):
    """What :meth:`ExponentialRows.project` computes of a call.

    ``values`` are the exponentials ``[T, V]``, with minus the sum of the others at the label; ``hidden`` the hidden
    states ``[T, H]``; ``lse [T]``, ``logp [...]`` and ``ratio [T]`` are fp32. All but ``values`` are 0 for tokens
    without loss. The second of ``facts``, int32, is the number of the other tokens.
    """

    values: Tensor
    hidden: Tensor
    lse: Tensor
    logp: Tensor
    ratio: Tensor
    facts: Tensor


class ExponentialRows:
    """The kernels of calls that have these shapes, strides, dtypes, alignments and options.

    It computes what :class:`~liger_losses.kernels.masked_rows.MaskedRows` does, of log-probabilities alone.

    Args:
        weight: ``[V, H]`` bf16, rows contiguous.
        tokens: T.
        ignore_index: the label of masked tokens.
        transform: from projections to logits, without a soft-cap; one temperature for all tokens.
        right: 0-dim bool, true, on the device: a label outside of ``[0, V)`` makes it false.
        backend: ``torch`` or ``triton``.
    """

    #: Whether gradients are written over the block, so that it serves one backward.
    overwrites = False

    def __init__(
        self, weight: Tensor, tokens: int, ignore_index: int, transform: LogitTransform, right: Tensor, backend: str
    ) -> None:
        self.tokens, self.ignore_index, self.right = tokens, int(ignore_index), right
        self.transform, self.triton = transform, backend == "triton"
        self.factor = transform.for_kernel.factor
        if not self.triton:
            return
        self.launch_start = Launcher(_start_kernel, tokens)
        # By whether it is the run that follows only if some offset was too small.
        self.launch_sums = cache(lambda second: Launcher(_sums_kernel, triton.cdiv(tokens, _ROWS), num_warps=8))
        # By whether there is an upstream gradient.
        self.launch_scales = cache(lambda upstream: Launcher(_scales_kernel, tokens))
        self.launch_scaling = Launcher(_scaled_rows_kernel, tokens)
        self._prepare(weight)

    def _prepare(self, weight: Tensor) -> None:
        """Choose the kernel of the product, and what runs where its offsets were too small."""
        tokens, (columns, hidden_size), device = self.tokens, weight.shape, weight.device
        clean, values = weight.new_empty(tokens, hidden_size), self._values(weight)
        in_turn, together, of_tiles = order_of(device, True, tokens, hidden_size, columns)
        self.in_turn = (
            AVAILABLE and in_turn and hopper_tiles(clean, weight, Epilogue(self.transform), values) is not None
        )
        tiles = self._tiles(clean, weight, values)
        self.parts: int | None = None
        if self.in_turn:
            self.sums_shape, self.group, self.parts = sums_on_hopper(tiles, tokens, together, of_tiles)
        else:
            self.sums_shape, self.group = (tiles.column_tiles, tokens), together
        self.column_tiles, self.count = tiles.column_tiles, min(_TILES, power_of_two(self.sums_shape[0]))
        kernel = kernel_of(self.in_turn)
        options = {name: tiles.arguments[name] for name in ("num_warps", "num_stages") if name in tiles.arguments}
        self.names, programs = kernel.arg_names, min(tiles.programs, tiles.row_tiles * tiles.column_tiles)
        self.fixed = {
            **dict.fromkeys(("out_stride", "tops", "logit_sums", "moments")),
            "group": self.group,
            "PROJECTIONS": False,
            "SUMS_OF_TILES": self.parts is None,
        }
        launched = Launchable(kernel) if self.in_turn else kernel
        self.launch_product = cache(lambda second: Launcher(launched, programs, **options))
        rest = self.ignore_index, self.transform, self.right, False, "triton"
        self.again = MaskedStatistics(clean, weight, *rest)
        self.find_offsets = SumTiles(tokens)

    def _values(self, weight: Tensor) -> Tensor:
        columns = len(weight)
        padded = weight.new_empty(self.tokens, -(-columns // _PADDED) * _PADDED)
        return padded if padded.shape[1] == columns else padded[:, :columns]

    def _tiles(self, hidden: Tensor, weight: Tensor, values: Tensor) -> Tiles:
        epilogue = Epilogue(self.transform)
        found = hopper_tiles(hidden, weight, epilogue, values) if self.in_turn else None
        return found or tiles_of(hidden, weight, epilogue, values)

    def project(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> RowExponentials:
        """Exponentials, log-probabilities, and what gradients are computed of.

        Args:
            hidden: ``[T, H]`` bf16, rows contiguous.
            weight: as the class was given it.
            labels: ``[...]`` int64, T of them, contiguous; the log-probabilities have their shape.
        """
        if not self.triton:
            return self._reference(hidden, weight, labels)
        (columns, hidden_size), device, fp32 = weight.shape, weight.device, torch.float32
        clean, values = weight.new_empty(self.tokens, hidden_size), self._values(weight)
        label_logit, offset, lse, ratio = [torch.empty(self.tokens, dtype=fp32, device=device) for _ in range(4)]
        logp, sums = [torch.empty(shape, dtype=fp32, device=device) for shape in (labels.shape, self.sums_shape)]
        facts = torch.empty(2, dtype=torch.int32, device=device)
        self.launch_start(
            hidden, hidden.stride(0), weight, weight.stride(0), labels, self.right, clean, label_logit, facts,
            self.tokens, columns, hidden_size, self.ignore_index, self.transform.for_kernel, _BLOCK, _AT_ONCE,
        )  # fmt: skip
        own = {"labels": labels, "partial": sums}
        arguments = {**self.fixed, **self._tiles(clean, weight, values).arguments, **own}
        arguments.setdefault("out", values)
        statistics = sums, labels, label_logit, offset, values, values.stride(0), lse, logp, ratio, facts
        sizes = self.column_tiles, self.tokens, columns, self.ignore_index, self.parts, self.group
        for second in (False, True):
            if second:  # these return at once unless the device has found a label whose sum is too large
                self.find_offsets(offset, self.again.partial_sums(clean, weight, labels, facts), facts)
            arguments |= {"offset": offset, "needed": facts} if second else {"offset": label_logit, "needed": None}
            try:
                self.launch_product(second)(*[arguments[name] for name in self.names])
            except NotCompiledError:
                self._prepare(weight)
                return self.project(hidden, weight, labels)
            limit = None if second else LARGEST_SUM
            self.launch_sums(second)(*statistics, *sizes, limit, _ROWS, self.count)
        return RowExponentials(values, clean, lse, logp, ratio, facts)

    def statistics(
        self, block: RowExponentials, labels: Tensor, entropy: bool = False, mean_logit: bool = False
    ) -> RowStatistics:
        """The log-sum-exps and the labels' log-probabilities; nothing else can be asked for."""
        return RowStatistics(block.lse, block.logp)

    def gradients(
        self,
        block: RowExponentials,
        labels: Tensor,
        hidden: Tensor,
        lse: Tensor,
        entropy: Tensor | None,
        upstream: Derivatives,
    ) -> RowGradients:
        """The gradient of any function of the log-probabilities, by which it has the derivatives ``upstream``."""
        return self._gradients(block, labels, upstream.logp, 1.0, False)

    def loss(
        self, block: RowExponentials, labels: Tensor, hidden: Tensor, scales: tuple[float, float | None], mean: bool
    ) -> RowGradients:
        """The terms of ``sum_t share s logp_t`` and its gradient; ``share`` is 1, or 1 over the number of tokens that
        carry loss.

        Args:
            block, labels: as in :meth:`project`.
            hidden: not read.
            scales: s, and ``None``.
            mean: whether the share is the second.
        """
        return self._gradients(block, labels, None, scales[0], mean)

    def _gradients(
        self, block: RowExponentials, labels: Tensor, upstream: Tensor | None, coefficient: float, mean: bool
    ) -> RowGradients:
        """``upstream``, or ``coefficient`` and a loss: d loss / d logp."""
        ratio, clean = block.ratio, block.hidden
        if not self.triton:
            ignored, share = (labels == self.ignore_index).reshape(-1), 1.0 / block.facts[1].clamp(min=1)
            g = torch.full_like(ratio, coefficient) * (share if mean else 1.0)
            g = (g if upstream is None else upstream.reshape(-1)).masked_fill(ignored, 0)
            scale = -g * ratio * (1.0 if self.factor is None else self.factor)
            terms = g * block.logp.reshape(-1)
            return RowGradients(block.values, (scale[:, None] * clean).to(clean.dtype), terms, scale)
        scale, scaled = torch.empty_like(ratio), torch.empty_like(clean)
        losses = None if upstream is not None else torch.empty_like(ratio)
        self.launch_scales(upstream is not None)(
            labels, block.logp, ratio, block.facts, upstream, clean, scale, scaled, losses,
            clean.shape[1], self.ignore_index, coefficient, self.factor, mean, _BLOCK,
        )  # fmt: skip
        return RowGradients(block.values, scaled, losses, scale)

    def hidden_gradient_into(self, out: Tensor, found: RowGradients, weight: Tensor) -> None:
        """Write the gradient by hidden states ``[T, H]``, rounded once."""
        product = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        matmul_into(product, found.grad, weight)
        assert found.scale is not None
        if self.triton:
            self.launch_scaling(out, product, found.scale, out.shape[1], _BLOCK)
        else:
            out.copy_(product * found.scale[:, None])

    def weight_gradient(self, found: RowGradients, dtype: torch.dtype) -> Tensor:
        """The gradient by the weight ``[V, H]``."""
        out = found.hidden.new_empty(found.grad.shape[1], found.hidden.shape[1], dtype=dtype)
        return matmul_into(out, found.grad.t(), found.hidden)

    def _reference(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> RowExponentials:
        """In torch."""
        safe, ignored, _, right = masked_labels(labels.reshape(-1), self.ignore_index, len(weight))
        self.right.logical_and_(right)
        clean, values = hidden.masked_fill(ignored[:, None], 0), self._values(weight)
        found = linear_exponentials(clean, weight, safe, values, Epilogue(self.transform))
        ratio = (found.offset - found.lse).exp()
        others = -found.logp.expm1() / ratio
        values.scatter_(1, safe[:, None], -others[:, None].to(values.dtype))
        lse, logp, ratio = [value.masked_fill(ignored, 0) for value in (found.lse, found.logp, ratio)]
        facts = torch.stack([ignored.sum() * 0, (~ignored).sum()]).int()
        return RowExponentials(values, clean, lse, logp.view(labels.shape), ratio, facts)


@jit(do_not_specialize=["tokens", "ignore_index"], do_not_specialize_on_alignment=["labels"])
def _start_kernel(
    hidden, hidden_stride, weight, weight_stride, labels, right, clean, label_logit, facts,
    tokens, columns, hidden_size, ignore_index, transform,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program per row: hidden states without what tokens without loss may hold, and the label's logit."""
    row = tl.program_id(0).to(tl.int64)
    label, active, known = label_of(labels, row, ignore_index, columns)
    tl.store(right, known, mask=active & (known == 0))
    copy_row(clean, hidden, hidden_stride, row, active, hidden_size, BLOCK)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tl.where(active, hidden_size, 0), BLOCK):
        at = start + tl.arange(0, BLOCK)
        h = tl.load(hidden + row * hidden_stride + at, mask=at < hidden_size, other=0.0).to(tl.float32)
        w = tl.load(weight + label * weight_stride + at, mask=at < hidden_size, other=0.0).to(tl.float32)
        products += h * w
    z = tl.sum(products, 0)
    if transform.factor is not None:
        z = transform_block(z, None, label, True, transform, 1.0)
    tl.store(label_logit + row, tl.where(active, z, 0.0))
    if row == 0:
        counts = tl.zeros((AT_ONCE,), tl.int32)
        for start in range(0, tokens, AT_ONCE):
            at = start + tl.arange(0, AT_ONCE)
            counts += (tl.load(labels + at, mask=at < tokens, other=ignore_index) != ignore_index).to(tl.int32)
        tl.store(facts, 0)
        tl.store(facts + 1, tl.sum(counts, 0))


@jit(
    do_not_specialize=["column_tiles", "tokens", "ignore_index", "parts", "group"],
    do_not_specialize_on_alignment=["labels", "logp"],
)
def _sums_kernel(
    partial, labels, label_logit, offset, values, values_stride, lse, logp, ratio, facts,
    column_tiles, tokens, columns, ignore_index, parts, group, limit,
    BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Log-probabilities and ratios from the tiles' sums over all columns but the label's; minus these go there.

    The first run, whose offsets are the labels' logits, has the largest sum as ``limit``; where a sum is larger, it
    sets the first of ``facts`` and makes the offset NaN. The second run reads the offsets.
    """
    if limit is None:  # noqa: SIM102, because Triton resolves only the outer condition while compiling
        if tl.load(facts) == 0:
            return
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < tokens
    first, step, count = place_of_sums(tl.program_id(0) * BLOCK, column_tiles, tokens, parts, group)
    others = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, TILES):
        tile = start + tl.arange(0, TILES)
        mask = (tile < count)[:, None] & inside[None, :]
        others += tl.sum(tl.load(partial + first + tile[:, None] * step + rows[None, :], mask=mask, other=0.0), 0)
    label = tl.load(labels + rows, mask=inside, other=ignore_index)
    active = label != ignore_index
    z = tl.load(label_logit + rows, mask=inside, other=0.0)
    if limit is None:
        used = tl.load(offset + rows, mask=inside, other=0.0)
        at_label = tl.exp(z - used)
        log_total = tl.where(used == z, log1p(others), tl.log(others + at_label))
    else:
        used = z
        at_label = 1.0
        log_total = log1p(others)
        unsafe = active & ((others <= limit) == 0)  # NaN is not safe
        tl.store(offset + rows, tl.where(unsafe, float("nan"), z), mask=inside)
        if tl.max(unsafe.to(tl.int32), 0) > 0:
            tl.store(facts, 1)
    tl.store(lse + rows, tl.where(active, used + log_total, 0.0), mask=inside)
    tl.store(logp + rows, tl.where(active, z - used - log_total, 0.0), mask=inside)
    tl.store(ratio + rows, tl.where(active, 1.0 / (at_label + others), 0.0), mask=inside)
    known = active & (label >= 0) & (label < columns)
    at = values + rows.to(tl.int64) * values_stride + label
    tl.store(at, (-others).to(values.dtype.element_ty), mask=known)


@jit(
    do_not_specialize=["ignore_index", "coefficient"],
    do_not_specialize_on_alignment=["labels", "logp", "upstream"],
)
def _scales_kernel(
    labels, logp, ratio, facts, upstream, clean, scale_out, scaled, losses,
    hidden_size, ignore_index, coefficient, factor,
    MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: what its exponentials and its hidden states are multiplied by, and a term of a loss."""
    row = tl.program_id(0).to(tl.int64)
    active = tl.load(labels + row) != ignore_index
    if upstream is not None:
        g = tl.load(upstream + row)
    else:
        g = coefficient * 1.0
        if MEAN:
            g = g / tl.maximum(tl.load(facts + 1), 1).to(tl.float32)
        tl.store(losses + row, tl.where(active, g * tl.load(logp + row), 0.0))
    scale = tl.where(active, -g * tl.load(ratio + row), 0.0)
    if factor is not None:
        scale *= factor
    tl.store(scale_out + row, scale)
    for start in range(0, hidden_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        h = tl.load(clean + row * hidden_size + at, mask=at < hidden_size, other=0.0).to(tl.float32)
        tl.store(scaled + row * hidden_size + at, (scale * h).to(scaled.dtype.element_ty), mask=at < hidden_size)


@jit
def _scaled_rows_kernel(out, product, scale, hidden_size, BLOCK: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.load(scale + row)
    for start in range(0, hidden_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(product + row * hidden_size + at, mask=at < hidden_size, other=0.0)
        tl.store(out + row * hidden_size + at, (s * value).to(out.dtype.element_ty), mask=at < hidden_size)
