"""Blocks of a quantized head that does not fit in floating point: the vocabulary is the outer loop.

A block takes as many tokens as the workspace allows. Slab after slab, rows of the head are dequantized, and all of the
block's tokens are multiplied by them: a block dequantizes each row twice, however many slabs there are.

R tokens of a block, C columns of a slab, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from liger_losses.chunked.engine.blocks import (
    Block,
    HeadGradients,
    Part,
    Upstream,
    fused_statistics,
    projection_gradient,
)
from liger_losses.chunked.engine.call import OpenCall
from liger_losses.chunked.engine.plan import blocks, padded
from liger_losses.chunked.engine.quantized_weight import dequantize_into
from liger_losses.chunked.engine.ranks import merge, merge_logps
from liger_losses.kernels.label_rows import copy_label_rows_, label_logits, scale_and_add_label_rows, scale_rows_
from liger_losses.kernels.linear_exp import Exponentials, gradient_scales, linear_exponentials
from liger_losses.kernels.linear_grad import linear_softmax_gradient_into
from liger_losses.kernels.logit_transform import Epilogue
from liger_losses.kernels.matmul import matmul_into
from liger_losses.kernels.softmax_grad import SoftmaxGradient
from liger_losses.kernels.softmax_stats import softmax_statistics


class Slabs(Block):
    """Statistics by one pass over the slabs, whose softmaxes are merged; gradients by another, from the statistics."""

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        self.rows, work = rows, self.call.work
        self.weight = opened.weight.new_empty(self.call.plan.slab, work.hidden_size, dtype=work.operand_dtype)

    def tile(self, tokens: int, columns: int) -> Tensor:
        """``[R, C]``: fp32 projections, which their gradients overwrite, or what fused kernels write.

        New for each slab, and gone before the next one is dequantized, whose temporaries take its place.
        """
        dtype = self.call.work.operand_dtype if self.call.work.fused else self.call.work.logits_dtype
        return self.weight.new_empty(tokens, padded(columns), dtype=dtype)[:, :columns]

    @cached_property
    def product(self) -> Tensor:
        """``[R, H]``: products with the slabs are added up wide."""
        return self.weight.new_empty(self.rows, self.weight.shape[1], dtype=self.call.work.logits_dtype)

    def slabs(self, part: Part) -> Iterator[tuple[slice, OpenCall, Part]]:
        """Columns, and the call and the part on them alone, whose rows of the head are valid until the next slab."""
        quantized, most = self.opened.quantized, self.call.plan.weight_chunk
        assert quantized is not None
        for columns in blocks(self.vocab_size, self.call.plan.slab):
            weight = self.weight[: columns.stop - columns.start]
            dequantize_into(weight, quantized, self.opened.weight, columns.start, most)
            # The call on these columns, whose rows of the head are given.
            opened = copy.copy(self.opened)
            opened.weight, opened.first_column, opened.vocab_size = weight, columns.start, len(weight)
            opened.labels = (self.opened.labels - columns.start).clamp(0, len(weight) - 1)
            yield columns, opened, part._replace(epilogue=part.epilogue.columns(columns))

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        labels, found = self.call.tokens.labels[part.rows], dict[str, Tensor]()
        class_weight = self.call.query.class_weight
        ends = torch.arange(0, self.vocab_size + self.call.plan.slab, self.call.plan.slab, device=labels.device)
        for i, (columns, opened, own) in enumerate(self.slabs(part)):
            of_slab = {name: value.double() for name, value in self._statistics(opened, own).items()}
            if found:  # in fp64, as there are many roundings, of few numbers
                both = {name: torch.stack([found[name], value]) for name, value in of_slab.items()}
                sizes = torch.stack([ends[i], ends[i + 1].clamp(max=self.vocab_size) - ends[i]])
                weights = None if class_weight is None else class_weight[: columns.stop]
                of_slab = {
                    n: v.double() for n, v in merge(both, sizes, labels.clamp(max=columns.stop - 1), weights).items()
                }
            found = of_slab
        for name in found.keys() & part.values.keys():
            part.values[name].copy_(found[name])

    def _statistics(self, opened: OpenCall, part: Part) -> Mapping[str, Tensor]:
        """Those of a slab's softmax; ``logp`` is any number for labels of other slabs."""
        call = self.call
        if call.work.fused:
            return fused_statistics(opened, part)
        projected = matmul_into(self.tile(len(part.hidden), opened.vocab_size), part.hidden, opened.weight.t())
        return softmax_statistics(
            projected,
            opened.labels[part.rows],
            call.block_names,
            part.epilogue,
            scratch=call.plan.scratch,
            backend=call.backend,
        )

    def refill(self, part: Part, upstream: Upstream) -> None:
        """Nothing: gradients follow from the statistics."""

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        call, out, first = self.call, None, part.rows.start == 0
        coefficients = SoftmaxGradient.of(upstream, part.values, call.query.class_weight)
        trained = head_grads.trained(part.hidden)
        for columns, opened, own in self.slabs(part):
            grad_bias = None if head_grads.bias is None else head_grads.bias[columns]
            grad = self._gradient(opened, own, coefficients, grad_bias)
            head_grads.add_weight(grad, trained, columns, first=first)
            if any(call.needs_hidden):
                out = self.product[: len(grad)]
                matmul_into(out, grad, opened.weight, accumulate=columns.start > 0)
            del grad
        return out

    def _gradient(
        self, opened: OpenCall, part: Part, coefficients: SoftmaxGradient, grad_bias: Tensor | None
    ) -> Tensor:
        """d loss / d projection ``[R, C]`` in the operand dtype."""
        call, columns = self.call, slice(0, opened.vocab_size)
        tile = self.tile(len(part.hidden), opened.vocab_size)
        if not call.work.fused:
            matmul_into(tile, part.hidden, opened.weight.t())
            return projection_gradient(opened, tile, part, columns, coefficients, grad_bias)
        return linear_softmax_gradient_into(
            tile,
            part.hidden,
            opened.weight,
            part.values["lse"],
            call.tokens.labels[part.rows],
            coefficients,
            part.epilogue,
            first_column=opened.first_column,
            vocab_size=call.vocab_size,
            backend=call.backend,
        )


class ExponentialSlabs(Slabs):
    """Statistics and products by one pass, for the hidden states' gradient from losses of ``logp`` and ``lse``.

    As in :class:`~liger_losses.chunked.engine.blocks.ExponentialBlock`, the softmax is a multiple of the exponentials
    by row, so that their products with the slabs are added up before it is known. A pass before finds the labels' rows,
    whose logits are the offsets. Where a label is so unlikely that a slab took its log-sum-exp as offset, what was
    added up by then is scaled.
    """

    def __init__(self, opened: OpenCall, rows: int) -> None:
        super().__init__(opened, rows)
        self.label_rows = self.weight.new_empty(rows, self.weight.shape[1])
        self.found: Exponentials | None = None

    def fill(self, part: Part, upstream: Upstream | None = None) -> None:
        call, values, count, backend = self.call, part.values, len(part.hidden), self.call.backend
        labels, label_rows = call.tokens.labels[part.rows], self.label_rows[:count]
        for columns, opened, _ in self.slabs(part):
            copy_label_rows_(label_rows, opened.weight, labels, columns.start, backend=backend)
        places = torch.arange(count, device=labels.device)
        bias = None if part.epilogue.bias is None else part.epilogue.bias[labels]
        epilogue = Epilogue(part.epilogue.transform, bias)
        label_logit = label_logits(part.hidden, label_rows, places, epilogue, backend=backend)
        offset, logp, product = label_logit, torch.zeros_like(label_logit, dtype=torch.float64), self.product[:count]
        metrics, mean_logit = values.keys() & {"mean_logit"}, torch.zeros_like(label_logit)
        for columns, opened, own in self.slabs(part):
            e = self.tile(count, opened.vocab_size)
            found = Exponentials.into({name: torch.empty_like(label_logit) for name in ("lse", *metrics)})
            in_slab = opened.labels[part.rows]
            in_slab = torch.where(labels == in_slab + columns.start, in_slab, -1)
            linear_exponentials(
                own.hidden, opened.weight, in_slab, e, own.epilogue,
                found=found, label_logit=label_logit, backend=backend,
            )  # fmt: skip
            highest = torch.maximum(offset, found.offset)
            scale_rows_(e, (found.offset - highest).exp(), backend=backend)
            if columns.start:
                scale_rows_(product, (offset - highest).exp(), backend=backend)
            matmul_into(product, e, opened.weight, accumulate=columns.start > 0)
            del e
            offset, logp = highest, merge_logps(torch.stack([logp, found.logp.double()]))
            if found.mean_logit is not None:
                mean_logit += found.mean_logit * (opened.vocab_size / self.vocab_size)
        self.found = Exponentials(offset, (label_logit - logp).float(), logp.float(), mean_logit)
        for name in values.keys() & {"lse", "logp", "mean_logit"}:
            values[name].copy_(getattr(self.found, name))

    def gradients(
        self, part: Part, upstream: Upstream, head_grads: HeadGradients, out_view: Tensor | None = None
    ) -> Tensor | None:
        assert self.found is not None
        count, backend = len(part.hidden), self.call.backend
        coefficients = SoftmaxGradient.of(upstream, part.values, self.call.query.class_weight)
        p_coef, label_coef, transform = coefficients.p_coef, coefficients.label_coef, part.epilogue.transform
        scale, at_label, _ = gradient_scales(p_coef, label_coef, self.found, transform=transform, backend=backend)
        return scale_and_add_label_rows(
            torch.empty_like(part.hidden, memory_format=torch.contiguous_format) if out_view is None else out_view,
            self.product[:count],
            scale,
            at_label,
            self.label_rows[:count],
            torch.arange(count, device=scale.device),
            backend=backend,
        )
