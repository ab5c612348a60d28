"""How calls of few tokens run that were made before: product, one kernel of the rows, two products.

T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine.accumulation import side_by_side
from liger_losses.chunked.engine.query import Query
from liger_losses.chunked.engine.tokens import check_right, host_checks
from liger_losses.kernels.autograd import edges, launch_scale, once_differentiable
from liger_losses.kernels.coupled_rows import Coupled
from liger_losses.kernels.exponential_rows import ExponentialRows, RowExponentials
from liger_losses.kernels.linear_stats import MaskedStatistics
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.masked_rows import Derivatives, MaskedRows, RowStatistics


class FewTokens(NamedTuple):
    """Hidden states ``[..., H]`` and labels ``[...]``, one or several tensors of each; the head, and the fields of a
    :class:`LogitTransform` beside it; a mask ``[...]``, 0 for labels that carry no loss; a coupled loss's constants."""

    hidden_states: Sequence[Any]
    labels: Sequence[Any]
    head: Any
    transform: tuple[Any, ...]
    mask: Any = None
    inputs: Sequence[Any] = ()


class StraightLine:
    """How calls of one kind run."""

    def __init__(
        self,
        tokens: FewTokens,
        weight: Tensor,
        query: Query,
        strategy: str,
        ignore_index: int,
        transform: LogitTransform,
        coupled: Callable[..., Coupled] | None,
    ) -> None:
        self.names, self.strategy, self.ignore_index = query.statistics + query.metrics, strategy, ignore_index
        self.metrics, self.entropy = len(query.metrics), "entropy" in self.names
        self.mean_logit = "mean_logit" in self.names
        self.device, self.kind, (self.vocab_size, self.hidden_size) = weight.device, weight.device.type, weight.shape
        #: Of each tensor of labels; and whether all have the same.
        self.shapes = [part.shape for part in tokens.labels]
        self.alike = len({*self.shapes}) == 1
        self.sizes = [shape.numel() for shape in self.shapes]
        self.tokens = sum(self.sizes)
        self.multiplications = self.tokens * weight.numel()
        #: Whether the weight and the tensors of hidden states need gradients, which are computed in forward.
        self.needs = [part.requires_grad for part in (weight, *tokens.hidden_states)]
        counts = any(self.needs[1:]) * self.tokens * self.hidden_size, self.needs[0] * weight.numel()
        self.trains, self.scale_ = strategy != "statistics", launch_scale(*counts, (self.device, weight.dtype))
        #: Whether all labels were in the vocabulary, which a host reads where that costs nothing.
        self.right, self.host_checks = torch.ones((), dtype=torch.bool, device=self.device), host_checks(self.device)
        #: The label of tokens that a mask leaves out, on the device.
        self.ignored = torch.full((), ignore_index, dtype=torch.int64, device=self.device)
        self.rows: MaskedRows | ExponentialRows = MaskedRows(
            self.tokens, self.vocab_size, ignore_index, transform, self.right, "triton"
        )
        self.fused: MaskedStatistics | None = None
        #: What computes the loss from all tokens' statistics.
        self.coupled = coupled
        self.settings: object = None
        given = query.token_weights or {}
        #: Whether the loss is the tokens' mean, and what their log-probabilities are multiplied by.
        self.mean = any(weight.total is None for weight in given.values())
        scales = {name: scale / (1.0 if total is None else total) for name, (scale, total) in given.items()}
        self.scales = scales.get("logp", 0.0), scales.get("mean_logp")

    def without_autocast(self) -> AbstractContextManager[Any]:
        """Autocast is off. The weight's device is the current one: in backward, autograd makes it that."""
        return torch.autocast(self.kind, enabled=False) if torch.is_autocast_enabled(self.kind) else _NO_CHANGE

    def joined(self, tokens: FewTokens) -> tuple[Tensor, Tensor]:
        """The hidden states ``[T, H]`` and the labels of all tensors, a copy of several."""
        hidden, labels, mask = tokens.hidden_states, tokens.labels, tokens.mask
        if len(hidden) == 1:
            (states,), (targets,) = hidden, labels
        elif self.alike:  # views of each would take the host time too
            states, targets = torch.cat(hidden), torch.cat(labels)  # type: ignore[arg-type]
        else:
            states = torch.cat([part.flatten(0, -2) for part in hidden])
            targets = torch.cat([part.flatten() for part in labels])
        if mask is not None:  # the ignore_index is no token, whatever the mask says
            targets = torch.where(mask if mask.dtype == torch.bool else mask != 0, targets, self.ignored)
        return states if states.dim() == 2 else states.view(-1, self.hidden_size), targets

    def values(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[RowStatistics, Any]:
        """The statistics of each row, whose labels are checked, and the block, if there is one."""
        block: Any = None
        if self.fused is None:
            block = self.rows.project(hidden, weight, labels)
            found = self.rows.statistics(block, labels, self.entropy, self.mean_logit)
        else:
            found = self.fused(hidden, weight, labels)
        self.check(labels)
        return found, block

    def check(self, labels: Tensor) -> None:
        """Raise ValueError if a label is outside of the vocabulary; on a GPU, kernels have asserted that none is."""
        if self.host_checks:
            check_right(self.right, labels, self.vocab_size, self.ignore_index)

    def named(self, values: RowStatistics, labels: Tensor) -> tuple[Tensor, ...]:
        """What the user gets, in the order of the names."""
        return tuple([values.lse.view(labels.shape) if name == "lse" else getattr(values, name) for name in self.names])

    def loss(self, tokens: FewTokens, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...], Any]:
        """The loss, 0-dim, its metrics, and the gradients that inputs need, as from :meth:`products`."""
        hidden, labels = self.joined(tokens)
        found: Any
        block: Any
        if self.coupled is None and self.fused is not None:
            return self.of_logps(self.values(hidden, weight, labels)[0].logp, labels), (), None
        if self.coupled is None:
            block = self.rows.project(hidden, weight, labels)
            found = self.rows.loss(block, labels, hidden, self.scales, self.mean)
            self.check(labels)
            return found.loss, (), self.products(found, weight, self.needs) if self.trains else None
        values, block = self.values(hidden, weight, labels)
        loss, metrics, derivative = self.coupled(values, labels, *tokens.inputs)
        if not self.trains:
            return loss, metrics, None
        found = self.rows.gradients(block, labels, hidden, values.lse, None, Derivatives(logp=derivative))
        return loss, metrics, self.products(found, weight, self.needs)

    def of_logps(self, logps: Tensor, labels: Tensor) -> Tensor:
        """The loss of log-probabilities, which are 0 for tokens without loss."""
        total = logps.sum() * self.scales[0]
        return total / (labels != self.ignore_index).sum().clamp_(min=1) if self.mean else total

    def products(
        self, found: Any, weight: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        """The gradients by all hidden states, if any needs it; and by the weight and each tensor of hidden states.

        ``needs`` has the weight's first.
        """
        of_weight, *of_hidden = needs
        hidden = None
        each: Sequence[Any] = [None] * len(of_hidden)
        products: list[Callable[[], Any]] = []
        if any(of_hidden):  # allocated on the caller's stream, as the product may run on another
            hidden = torch.empty_like(found.hidden)
            products.append(partial(self.rows.hidden_gradient_into, hidden, found, weight))
            each = self.separated(hidden, self.hidden_size)
        if of_weight:
            products.append(partial(self.rows.weight_gradient, found, weight.dtype))
        last = side_by_side(self.device, products, self.multiplications)
        return hidden, (last if of_weight else None, *each)

    def separated(self, value: Tensor, *rest: int) -> Sequence[Tensor]:
        """``[T, *rest]``, or in the labels' shape, as what each tensor of labels has."""
        if len(self.shapes) == 1:
            shape = (*self.shapes[0], *rest)
            return (value if value.shape == shape else value.view(shape),)
        if self.alike:
            return value.view(len(self.shapes), *self.shapes[0], *rest).unbind()
        return [part.view(*shape, *rest) for part, shape in zip(value.split(self.sizes), self.shapes, strict=True)]


#: A context in which nothing is different.
_NO_CHANGE = nullcontext()


class LineStatistics(torch.autograd.Function):
    """Statistics, whose block of rows is kept until backward."""

    @staticmethod
    def forward(
        ctx: Any, line: StraightLine, weight: Tensor, tokens: FewTokens, *hidden_states: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        with line.without_autocast():
            hidden, labels = line.joined(tokens)
            values, block = line.values(hidden, weight, labels)
        ctx.line, ctx.block, kept = (line, block, ()) if line.rows.overwrites else (line, None, block[:-1])
        ctx.kept = len(kept)
        ctx.save_for_backward(hidden, weight, labels, *kept, *edges(*hidden_states))
        ctx.lse, ctx.entropy = values.lse, values.entropy
        # Users may change an output in place; what backward needs must not change with it.
        named = zip(line.names, line.named(values, labels), strict=True)
        outputs = [found.clone() if name in ("lse", "entropy") else found for name, found in named]
        if line.metrics:
            ctx.mark_non_differentiable(*outputs[-line.metrics :])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        line: StraightLine = ctx.line
        hidden, weight, labels, *kept = ctx.saved_tensors[: 3 + ctx.kept]
        given = {name: None if g is None else g.contiguous() for name, g in zip(line.names, upstream, strict=True)}
        derivatives = Derivatives(given.get("lse"), given.get("logp"), given.get("entropy"))
        # A second backward computes a block again that gradients overwrite.
        block: Any = RowExponentials(*kept) if kept else ctx.block
        ctx.block = None
        with line.without_autocast():
            block = line.rows.project(hidden, weight, labels) if block is None else block
            found = line.rows.gradients(block, labels, hidden, ctx.lse, ctx.entropy, derivatives)
            del block
            needs = ctx.needs_input_grad
            _, (of_weight, *of_hidden) = line.products(found, weight, (needs[1], *needs[3:]))
        return None, of_weight, None, *of_hidden


class LineLoss(torch.autograd.Function):
    """A loss, whose gradients are computed in forward; backward only scales these. Its metrics follow it."""

    @staticmethod
    def forward(ctx: Any, line: StraightLine, weight: Tensor, tokens: FewTokens, *_: Tensor) -> Any:
        ctx.line = line
        ctx.save_for_backward(weight, *tokens.hidden_states, *tokens.labels, tokens.mask, *tokens.inputs)
        with line.without_autocast():
            loss, metrics, ctx.gradients = line.loss(tokens, weight)
        if not metrics:
            return loss
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*metrics)
        return loss, *metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: None) -> tuple[Any, ...]:
        line: StraightLine = ctx.line
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # the first backward scaled them in place and returned them
            weight, *saved = ctx.saved_tensors
            count = len(line.shapes)
            states, labels, (mask, *inputs) = saved[:count], saved[count : 2 * count], saved[2 * count :]
            with line.without_autocast():
                tokens = FewTokens(states, labels, None, (), mask, inputs)
                gradients = line.loss(tokens, weight)[2]
        hidden, (of_weight, *of_hidden) = gradients
        line.scale_(upstream, hidden, of_weight)
        return None, of_weight, None, *of_hidden
