"""Log-probabilities, log-sum-exps and entropies with gradients: a block holds ``exp(z - offset)`` in bf16, not logits.

The softmax is a multiple of it by row, so both gradient products are taken with it as it is (:mod:`.linear_exp`). It
takes half the memory of fp32 logits, so more losses that couple tokens keep their blocks until backward, and no pass
over logits between the products. The labels' own terms are added in fp32. Logits of selected columns are products with
single rows of the head; of terms there that may cancel, the sum is written among the exponentials. Entropies are mostly
metrics: where one has a derivative, the core's block computes the logits again.

On an H200 in bf16 (benchmarks/results/accelerators.txt), calls with it take this part of the time without it, at 4,096
and 16,384 tokens x 2048 and 4096 x 128256: cross-entropy 0.85 to 0.92, GRPO 0.65 to 0.90, log-probabilities 0.66 to
0.96, also with entropies and the largest column as TRL's trainers ask for them, DPO 0.94 to 0.96 and half the memory.
Calls of 1,024 tokens, whose host is slower, 1.00 to 1.18.

R or N tokens, P columns padded, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.accelerators.label_rows import (
    add_to_label_rows_,
    logits_of_columns,
    scale_and_add_label_rows_,
)
from liger_losses.chunked.accelerators.linear_exp import (
    Exponentials,
    bytes_of_sums,
    empty_values,
    epilogue_of,
    exponentials_of,
    has_matrix,
    labels_of,
    linear_exponentials,
    matrix_of,
)
from liger_losses.chunked.accelerators.tiles import with_contiguous_rows
from liger_losses.chunked.core.block import Block
from liger_losses.chunked.core.buffers import Gradients
from liger_losses.chunked.core.plan import MOST_PARTS, Plan, Signature, by_blocks, least_bytes, padded, slices
from liger_losses.chunked.core.rows import merged
from liger_losses.chunked.core.statistics import Statistic
from liger_losses.chunked.core.target import Target
from liger_losses.chunked.core.weights import ALL
from liger_losses.kernels._triton import jit, power_of_two, tl
from liger_losses.kernels.logit_transform import LogitTransform, capped_tanh, inverse_temperature, transform_gradient
from liger_losses.kernels.matmul import matmul_into

#: What has gradients here, and what may be computed with it.
STATISTICS = {"logp", "lse", "entropy", "selected_logps"}
METRICS = STATISTICS | {"mean_logit", "argmax"}
#: The most largest columns: a kernel numbers the candidates for them in 16 bits.
MOST_LARGEST = 512
#: Where an entropy has a derivative, so many blocks of the core write it one after the other.
SLICES = 16
#: The labels' terms, most of the weight's gradient, are added once at the end: with so many blocks, its error is at
#: most that of plain PyTorch, and twice as large in rows that are no token's label. Of selected columns, each block
#: adds its own.
BLOCKS = 32


@dataclass(eq=False)
class ExponentialBlock:
    """Of these tokens; ``constants`` are the statistics and the offsets of exponentials.

    ``place`` is the label's row. Where ranks share the vocabulary, ``here`` says whose is this rank's; of others it is
    another row, and so is ``logp here``. Where the statistics are known, exponentials are computed once a gradient
    reads them.
    """

    part: Any
    asked: tuple[Statistic, ...]
    plan: Plan
    memory: Tensor | None  # [R, P]
    constants: dict[str, Tensor]

    @classmethod
    def of(
        cls, part: Target, asked: tuple[Statistic, ...], plan: Plan, constants: dict[str, Tensor] | None = None, *_: Any
    ) -> ExponentialBlock:
        """A block of these tokens, with whole rows."""
        block = cls(part, asked, plan, None, constants or {})
        if constants is None:
            block._compute()
        return block

    def _rows(self) -> Tensor:
        """The memory's columns of this rank ``[R, C]``."""
        columns, like = self.part.head.weights.columns, self.part.hidden
        if self.memory is None:
            self.memory = like.new_empty(len(like), padded(columns), dtype=self.plan.products.dtype)
        return self.memory[:, :columns]

    def _compute(self) -> None:
        """Exponentials and statistics; these again where they are known."""
        part, out = self.part, self._rows()
        count, size = out.shape
        values = empty_values({"offset", "lse", "logp", *[s.name for s in self.asked]}, part)
        arguments, (labels, here) = (part.hidden, matrix_of(part)), labels_of(part)
        k = part.selected if isinstance(part.selected, int) else 0
        columns = linear_exponentials(*arguments, labels, exponentials_of(values), epilogue_of(part), out, k)
        if isinstance(part.selected, Tensor):
            columns = part.selected
            out[:1].expand(count, size).gather(1, columns)  # an error of a column outside of the vocabulary
        if columns is not None:
            logits = logits_of_columns(*arguments, columns, epilogue_of(part))
            values["selected_logps"] = logits - values["lse"][:, None]
        if part.head.ranks.size > 1:
            logits = values["logp"] + values["lse"]
            offset = values.pop("offset")
            values = merged(values, part.head.ranks, self.plan, here)
            values |= {"offset": offset, "logp here": logits - values["lse"]}
        self.constants = values | ({"place": labels} if here is None else {"place": labels, "here": here})

    def add_gradients(
        self, upstream: dict[str, Tensor], grads: Gradients, hidden: Tensor | None = None
    ) -> Tensor | None:
        """Add the gradients of weight and bias; return that of the hidden states ``[R, H]``, if they need one."""
        if "entropy" in upstream:
            grad, weights = self._of_logits(upstream, grads), self.part.head.weights
            weights.add_gradients(grads, grad, self.part.hidden, ALL)
            return weights.hidden_gradient(grad, ALL) if self.plan.hidden else None
        if self.memory is None:
            self._compute()
        hidden, at_label = self.add_products(upstream, grads)
        if "selected_logps" not in upstream:  # of which the labels' terms are among the exponentials
            add_label_terms(self.part, at_label, grads)
        return hidden

    def _of_logits(self, upstream: dict[str, Tensor], grads: Gradients) -> Tensor:
        """The gradient of projections ``[R, C]``, which takes the memory of exponentials, by the core's blocks of some
        tokens at a time: an entropy's derivative may be less than the rounding of exponentials."""
        grad = self._rows()
        for at in slices(0, len(grad), -(-len(grad) // SLICES) or 1):
            values = {name: value[at] for name, value in self.constants.items()}
            block = Block.of(self.part.take(at), self.asked, self.plan, values)
            block.gradient({name: g[at] for name, g in upstream.items()}, grads, grad[at])
        return grad

    def add_products(self, upstream: dict[str, Tensor], grads: Gradients) -> tuple[Tensor | None, Tensor]:
        """The same without the labels' terms of the weight's gradient; and these terms' factors ``[R]``."""
        part, weights, values = self.part, self.part.head.weights, self.constants
        e, labels, here = self._rows(), values["place"], values.get("here")
        if here is not None:
            values = values | {"logp": values["logp here"]}
        selected, of_columns = Selected(), upstream.get("selected_logps")
        if of_columns is not None:
            columns, logps, of_columns = part.selected.contiguous(), values["selected_logps"], of_columns.contiguous()
            selected = Selected(e, e.stride(0), labels, columns, logps, of_columns, logps.shape[1])
        hidden, transform = None if grads.of(weights.weight) is None else part.hidden, part.transform(part.temperature)
        derivatives = upstream.get("logp"), upstream.get("lse")
        scale, at_label, scaled = gradient_scales(
            *derivatives, exponentials_of(values), hidden, transform, here, selected
        )
        hidden = None
        if self.plan.hidden:
            matrix = matrix_of(part)
            hidden = matmul_into(torch.empty_like(part.hidden, dtype=torch.float32), e, matrix)
            scale_and_add_label_rows_(hidden, scale, at_label, matrix, labels)
        if scaled is not None:
            weights.add_gradients(grads, e, scaled, ALL)
        self._add_bias(e, scale, at_label, labels, grads)
        return hidden, at_label

    def _add_bias(self, e: Tensor, scale: Tensor, at_label: Tensor, labels: Tensor, grads: Gradients) -> None:
        """A product too, with the scales' digits in three operands of half precision."""
        buffer = grads.of(self.part.head.bias)
        if buffer is None:
            return
        total = buffer.whole()
        digits = torch.zeros(len(scale), 8, dtype=e.dtype, device=e.device)  # products of 8 columns are aligned
        for i in range(3):
            digits[:, i] = scale
            scale = scale - digits[:, i]
        total += matmul_into(torch.empty(e.shape[1], 8, dtype=torch.float32, device=e.device), e.t(), digits).sum(1)
        add_to_label_rows_(total[:, None], labels, at_label, torch.ones_like(at_label)[:, None])


class LabelTerms:
    """The labels' terms of several blocks, most of the weight's gradient, which are added once after all products."""

    def __init__(self, target: Target, plan: Plan, count: int) -> None:
        weights = target.head.weights
        self.at_label = torch.empty(count, dtype=torch.float32, device=target.hidden.device)
        # For as many tokens together as have hidden states that fit the memory of a block.
        self.most = max(plan.block_tokens, plan.block_tokens * weights.columns // weights.hidden_size)

    def take(self, block: ExponentialBlock, upstream: dict[str, Tensor], grads: Gradients, at: slice) -> Tensor | None:
        """Add the products of a block, whose tokens are those ``at`` of these; its hidden states' gradient."""
        hidden, self.at_label[at] = block.add_products(upstream, grads)
        return hidden

    def add_gradients(self, part_of: Callable[[slice], Target], rows: slice, grads: Gradients) -> None:
        """The terms of all tokens."""
        for at in slices(rows.start, rows.stop, self.most):
            add_label_terms(part_of(at), self.at_label[at.start - rows.start : at.stop - rows.start], grads)


def add_label_terms(part: Target, at_label: Tensor, grads: Gradients) -> None:
    """Add the labels' terms to the gradient of the weight."""
    buffer = grads.of(part.head.weights.weight)  # type: ignore[attr-defined]
    if buffer is not None:
        add_to_label_rows_(buffer.whole(), labels_of(part)[0], at_label, part.hidden)


def row_bytes(call: Signature) -> int:
    """Of a token: exponentials, sums of their tiles, hidden states, the same scaled, and their gradient in fp32; its
    part of the logits of the derivative by an entropy."""
    item = call.operand.itemsize
    logits = 4 * padded(call.columns) // SLICES if "entropy" in call.statistics else 0
    return padded(call.columns) * item + bytes_of_sums(call) + logits + call.hidden_size * (2 * item + 4)


def serves(call: Signature) -> bool:
    """Whether one matrix is at hand, exponentials fit its dtype (fp16 cannot hold all), and its statistics are theirs.
    Exponentials are rounded and have the soft-cap's slope: they say which logits are the largest where there is no
    soft-cap and no derivative by these."""
    if not (has_matrix(call) and call.trains and call.operand == torch.bfloat16):
        return False
    if call.kept or call.teacher_columns or not (call.statistics <= STATISTICS and call.metrics <= METRICS):
        return False
    differentiates = "selected_logps" in call.statistics
    if "entropy" in call.statistics and (differentiates or not call.gradients_in_backward):
        return False  # in one pass, its derivative is certain
    if call.largest and (differentiates or not call.linear or call.largest > MOST_LARGEST):
        return False
    # A rank has no logits of other columns.
    return call.ranks == 1 or not (differentiates or call.metrics & {"selected_logps", "argmax"})


def planned(call: Signature) -> Plan | None:
    """Of calls whose blocks are few, or live until backward."""
    if not serves(call):
        return None
    parts = MOST_PARTS if call.gradients_in_backward or "selected_logps" in call.statistics else BLOCKS
    row = row_bytes(call)
    call = replace(call, statistics=call.statistics & {"logp", "lse"})  # others' gradients are no further rows
    if call.workspace is not None and call.workspace < least_bytes(call, row):
        return None  # not even one row fits; the core, whose rows are longer, says so
    plan = by_blocks(call, "exponentials", ExponentialBlock.of, row, most_parts=parts)
    if plan.tile is not None or plan.products.columns < call.columns:
        return None
    blocks = -(-call.trained // plan.block_tokens) if call.trains_weight else 1
    if blocks > parts:
        return None
    if blocks == 1 or parts == MOST_PARTS:
        return plan
    return plan._replace(tokens=call.tokens, collected=LabelTerms)


# --- What products with exponentials are scaled by, to be gradients; k selected columns of a token -------------------


class Selected(NamedTuple):
    """Columns of each token whose log-probabilities have derivatives, of which some may be the same, or the label."""

    out: Tensor | None = None  # [N, V], exponentials
    stride: int = 0  # of its rows
    labels: Tensor | None = None  # [N] int64
    columns: Tensor | None = None  # [N, k] int64, contiguous as the others
    logps: Tensor | None = None  # [N, k]
    upstream: Tensor | None = None  # [N, k], the loss's derivatives by these
    width: int = 0  # k


def gradient_scales(
    of_logp: Tensor | None,
    of_lse: Tensor | None,
    values: Exponentials,
    hidden: Tensor | None = None,
    transform: LogitTransform = LogitTransform(),
    here: Tensor | None = None,
    selected: Selected = Selected(),
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors of products with exponentials, from ``d loss / d z = (of_lse - of_logp) p + of_logp onehot``.

    ``d loss / d projection = scale out`` at all columns but the label's, with ``out`` of :func:`linear_exponentials`;
    at the label's, it is ``at_label``. Selected columns add ``sum_j upstream_j (onehot_j - p)`` to ``d loss / d z``.
    Terms may cancel there: they are added before they are rounded, and written into ``out``, as the label's are then.

    Args:
        of_logp, of_lse: the loss's derivatives by both statistics, ``[N]`` fp32; ``None`` for 0.
        values: what :func:`linear_exponentials` returned.
        hidden: ``[N, H]``, to be scaled, or ``None``.
        transform: from projections to logits.
        here: ``[N]`` bool, whose label is among these columns; another has ``logp`` of another column, and at all of
            them ``d loss / d z = (of_lse - of_logp) p``. ``None`` for all.
        selected: other columns with derivatives; not with ``here``.

    Returns:
        ``scale [N]``, ``at_label [N]``, and ``scale hidden [N, H]``, rounded once, in its dtype (or ``None``).
    """
    scaled = None if hidden is None else torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    scale, at_label = torch.empty_like(values.lse), torch.empty_like(values.lse)
    hidden = None if hidden is None else with_contiguous_rows(hidden)
    if tokens := scale.shape[0]:
        sizes = (0, 0) if hidden is None else (hidden.stride(0), hidden.shape[1])
        vectors = [None if g is None else g.contiguous() for g in (of_logp, of_lse)]
        _scales_kernel[(tokens,)](
            scale, at_label, scaled, hidden, *sizes, *vectors, *values[:3], here, *selected,
            transform.for_kernel, BLOCK=1024, BLOCK_K=power_of_two(selected.width + 1),
        )  # fmt: skip
    return scale, at_label, scaled


@jit
def expm1(x):
    """``exp(x) - 1`` for x <= 0, exact for small x (Kahan's method)."""
    u = tl.exp(x)
    return tl.where(u == 1.0, x, tl.where(u < 1e-7, u - 1.0, (u - 1.0) * x / tl.log(u)))


#: Arguments whose alignment is no reason to compile again: slices of vectors begin anywhere.
_VECTORS = ["offset", "lse", "logp", "of_logp", "of_lse", "at_label_out", "here", "hidden"]
_VECTORS += ["out", "labels", "columns", "logps", "upstream"]


@jit(do_not_specialize=["count"], do_not_specialize_on_alignment=_VECTORS)
def _scales_kernel(
    scale_out, at_label_out, scaled, hidden, hidden_stride, hidden_size,
    of_logp, of_lse, offset, lse, logp, here, out, out_stride, labels, columns, logps, upstream, count, transform,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    row = tl.program_id(0).to(tl.int64)
    label_c = tl.zeros((), tl.float32)
    lse_c = tl.zeros((), tl.float32)
    if of_logp is not None:
        label_c = tl.load(of_logp + row)
    if of_lse is not None:
        lse_c = tl.load(of_lse + row)
    place = tl.arange(0, BLOCK_K)
    if upstream is not None:
        upstream += row * count
        g = tl.load(upstream + place, mask=place < count, other=0.0)
        lse_c -= tl.sum(g, 0)
        least = tl.maximum(tl.abs(label_c), tl.max(tl.abs(g), 0)) * 6e-5 + 1e-30
    p_c = lse_c - label_c
    if upstream is not None:  # what is divided by it stays finite, and changes by less than the rounding of gradients
        p_c = tl.where(tl.abs(p_c) < least, least, p_c)
    if here is not None:
        label_c = tl.where(tl.load(here + row), label_c, 0.0)
    row_lse = tl.load(lse + row)
    row_logp = tl.load(logp + row)
    row_offset = tl.load(offset + row)
    inverse = inverse_temperature(transform, row, True, 0)
    s = p_c * tl.exp(row_offset - row_lse)
    # p_coef p + label_coef with p = 1 + expm1(logp), so that p - 1 keeps its digits.
    at_label = (p_c + label_c) + p_c * expm1(row_logp)
    if transform.factor is not None:
        s *= transform.factor
        if transform.temperature is not None:
            s *= inverse
        at_label = transform_gradient(at_label, row_logp + row_lse, transform, inverse)
    tl.store(scale_out + row, s)
    if upstream is not None:
        at_label = 0.0
        columns += row * count
        label = tl.load(labels + row)
        column = tl.load(columns + place, mask=place < count, other=-1)
        column = tl.where(place == count, label, column)
        total = tl.where(column == label, label_c, 0.0)
        for i in range(count):  # of all that are the same column
            total += tl.where(column == tl.load(columns + i), tl.load(upstream + i), 0.0)
        log_p = tl.load(logps + row * count + place, mask=place < count, other=0.0)
        log_p = tl.where(column == label, row_logp, log_p)
        there = tl.where(log_p > -0.7, (p_c + total) + p_c * expm1(log_p), p_c * tl.exp(log_p) + total)
        there = there / p_c * tl.exp(row_lse - row_offset)
        if transform.cap is not None:
            tanh = capped_tanh(log_p + row_lse, transform, inverse)
            there *= 1 - tanh * tanh
        # Of a column that is there twice, the same number is stored twice.
        tl.store(out + row * out_stride + column, there.to(out.dtype.element_ty), mask=place <= count)
    tl.store(at_label_out + row, at_label)
    if hidden is not None:
        for start in range(0, hidden_size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < hidden_size
            h = tl.load(hidden + row * hidden_stride + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(scaled + row * hidden_size + at, (s * h).to(scaled.dtype.element_ty), mask=inside)
