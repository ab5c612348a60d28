"""Streams hidden states through ``lm_head`` in blocks.

N active tokens, H hidden size, V vocabulary size, R rows and C columns of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from liger_losses.chunked.engine.blocks import Block, ExponentialBlock, LogitBlock, Upstream, projection_gradient
from liger_losses.chunked.engine.call import OpenCall, Statistics, linear_metrics
from liger_losses.chunked.engine.divergence_block import DivergenceBlock
from liger_losses.chunked.engine.gradients import HeadGradients, HiddenGradients
from liger_losses.chunked.engine.mean_logit import MeanLogit
from liger_losses.chunked.engine.plan import blocks, padded
from liger_losses.kernels.linear_exp import Exponentials, linear_exponentials
from liger_losses.kernels.linear_grad import linear_softmax_gradient_into
from liger_losses.kernels.linear_stats import linear_softmax_statistics
from liger_losses.kernels.softmax_grad import SoftmaxGradient


def _rows_of(values: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Views of some tokens' values."""
    return {name: value[rows] for name, value in values.items()}


class Stream:
    """The passes over all active tokens of a call."""

    def __init__(self, opened: OpenCall) -> None:
        self.opened, self.call = opened, opened.call
        self.count = opened.count
        self.mean_logit = MeanLogit(opened) if linear_metrics(opened.call.query, opened.call.transform) else None

    # --- Whole passes ------------------------------------------------------------------------------------------

    def statistics(self, keep_block: bool = False) -> tuple[dict[str, Tensor], Block | None]:
        """The statistics ``[N]`` of every active token, and with ``keep_block`` one block that holds all of them."""
        values = self._empty_statistics()
        if not keep_block and self.call.fused:
            for rows, hidden in self._hidden_blocks(self._fused_rows()):
                self._fused_statistics(rows, hidden, _rows_of(values, rows))
            return values, None
        size = self.count if keep_block else self.call.plan.rows
        block = self._block(size)
        for rows, hidden in self._hidden_blocks(size):
            self._fill(block, rows, hidden, _rows_of(values, rows))
        return values, block if keep_block else None

    def gradients(
        self, values: Mapping[str, Tensor], upstream: Upstream, kept: Block | None
    ) -> tuple[Tensor | None, ...]:
        """``(grad_weight, grad_bias, *grad_hidden)``: from the block of all tokens if it was kept, else recomputed.

        ``upstream`` is d loss / d statistic, ``[N]`` each.
        """
        head_grads, hidden_grads = HeadGradients(self.opened), HiddenGradients(self.opened)
        if kept is None and not self.call.query.needs_logits:
            self._gradients_by_tiles(values, upstream, head_grads, hidden_grads)
            return *head_grads.results(), *hidden_grads.results
        size = self.call.plan.rows if kept is None else self.count
        block = self._block(size) if kept is None else kept
        for rows, hidden in self._hidden_blocks(size):
            wanted = _rows_of(upstream, rows)
            if kept is None:
                block.refill(rows, hidden, wanted)
            self._write_gradients(block, rows, hidden, _rows_of(values, rows), wanted, head_grads, hidden_grads)
        return *head_grads.results(), *hidden_grads.results

    def _gradients_by_tiles(
        self,
        values: Mapping[str, Tensor],
        upstream: Upstream,
        head_grads: HeadGradients,
        hidden_grads: HiddenGradients,
    ) -> None:
        """Recomputed tiles walk the vocabulary, so that grad_weight is written once per ``tile_rows`` tokens."""
        plan, tiles = self.call.plan, self._tiles()
        coefficients = SoftmaxGradient.of(upstream, values, self.call.query.class_weight)
        for rows, hidden in self._hidden_blocks(plan.tile_rows):
            out, tile_values = None, _rows_of(values, rows)
            tile_coefficients = coefficients.rows(rows.start, rows.stop)
            for columns in blocks(self.opened.vocab_size, plan.tile_columns):
                grad = self._tile_gradient(
                    tiles, rows, columns, hidden, tile_values, tile_coefficients, head_grads.bias
                )
                out = head_grads.add(grad, hidden, columns, first=rows.start == 0, out=out)
            hidden_grads.write(rows, out)

    def statistics_and_unit_gradient(self) -> tuple[dict[str, Tensor], Tensor]:
        """Statistics, and the gradient ``[N, H]`` of the only one with respect to each token's hidden state."""
        (statistic,) = self.call.query.statistics
        values, head_grads = self._empty_statistics(), HeadGradients(self.opened)
        dtype = self.opened.hidden_states[0].dtype
        for part in self.opened.hidden_states:
            dtype = torch.promote_types(dtype, part.dtype)
        unit_gradient = self.opened.weight.new_empty(self.count, self.opened.weight.shape[1], dtype=dtype)
        block = self._block(self.call.plan.rows)
        for rows, hidden in self._hidden_blocks(self.call.plan.rows):
            block_values, out_view = _rows_of(values, rows), unit_gradient[rows]
            try:
                self._fill(block, rows, hidden, block_values)
                ones = {statistic: torch.ones_like(block_values["lse"])}
                gradient = block.gradients(rows, hidden, block_values, ones, head_grads, out_view)
            except BaseException:
                block.wait()
                raise
            if gradient is not None and gradient is not out_view:
                out_view.copy_(gradient)
        return values, unit_gradient

    def scaled(self, unit_gradient: Tensor, upstream: Upstream) -> list[Tensor | None]:
        """Gradients of the hidden states: each token's unit gradient, times its upstream gradient."""
        hidden_grads = HiddenGradients(self.opened)
        for g in upstream.values():
            for rows in blocks(self.count, self.call.plan.rows):
                hidden_grads.write(rows, unit_gradient[rows] * g[rows, None])
        return hidden_grads.results

    def token_loss(self) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor | None, ...]]:
        """A separable loss (0-dim), the statistics, and ``(grad_weight, grad_bias, grad_hidden)`` of the loss."""
        values, weights = self._empty_statistics(), self.call.query.token_weights
        losses = torch.empty(self.count, dtype=self.call.logits_dtype, device=self.opened.weight.device)
        block, grads = self._block(self.call.plan.rows), None
        for rows, hidden in self._hidden_blocks(self.call.plan.rows):
            block_values, known = _rows_of(values, rows), None if weights is None else _rows_of(weights, rows)
            try:
                self._fill(block, rows, hidden, block_values, known)
                losses[rows], upstream = self._token_losses(rows, block_values, known)
                # Allocated once the first block is queued, so that the device need not wait for it.
                grads = grads or (HeadGradients(self.opened), HiddenGradients(self.opened))
                self._write_gradients(block, rows, hidden, block_values, upstream, *grads)
            except BaseException:
                block.wait()  # its memory is about to be freed
                raise
        head_grads, hidden_grads = grads or (HeadGradients(self.opened), HiddenGradients(self.opened))
        return losses.sum(), values, (*head_grads.results(), *hidden_grads.results)

    # --- Their steps -----------------------------------------------------------------------------------------------

    def _hidden_blocks(self, size: int) -> Iterator[tuple[slice, Tensor]]:
        """``(rows, hidden [R, H])`` of at most ``size`` active tokens at a time, in the operand dtype."""
        for rows in blocks(self.count, size):
            hidden = self.call.tokens.gather(self.opened.flat, rows.start, rows.stop)
            yield rows, hidden.to(self.call.operand_dtype)

    def _fused_rows(self) -> int:
        """Tokens whose hidden states are gathered at once: all where that copies nothing, else even parts that fit."""
        if not self.call.gathers:
            return self.count
        parts = -(-self.count // self.call.plan.tile_rows)
        return -(-self.count // max(parts, 1))

    def _block(self, rows: int) -> Block:
        rows = min(rows, self.count)
        if self.call.query.comparison is not None:
            return DivergenceBlock(self.opened, rows)
        return ExponentialBlock(self.opened, rows) if self.call.exponentials else LogitBlock(self.opened, rows)

    def _fill(
        self, block: Block, rows: slice, hidden: Tensor, values: dict[str, Tensor], upstream: Upstream | None = None
    ) -> None:
        """All of the tokens' statistics into ``values``."""
        if self.mean_logit is not None:
            self.mean_logit.into(values["mean_logit"], hidden)
        block.fill(rows, hidden, {name: values[name] for name in self.call.block_names}, upstream)

    def _write_gradients(
        self,
        block: Block,
        rows: slice,
        hidden: Tensor,
        values: Mapping[str, Tensor],
        upstream: Upstream,
        head_grads: HeadGradients,
        hidden_grads: HiddenGradients,
    ) -> None:
        out_view = hidden_grads.out_view(rows)
        hidden_grads.write(rows, block.gradients(rows, hidden, values, upstream, head_grads, out_view))

    def _tiles(self) -> Tensor:
        """Memory of the gradient pass's tiles: half-precision gradients, or the fp32 projections they overwrite."""
        plan, call = self.call.plan, self.call
        dtype = call.operand_dtype if call.fused else call.logits_dtype
        rows, columns = min(plan.tile_rows, self.count), padded(min(plan.tile_columns, self.opened.vocab_size))
        return torch.empty(rows, columns, dtype=dtype, device=self.opened.weight.device)

    def _tile_gradient(
        self,
        tiles: Tensor,
        rows: slice,
        columns: slice,
        hidden: Tensor,
        values: Mapping[str, Tensor],
        coefficients: SoftmaxGradient,
        grad_bias: Tensor | None,
    ) -> Tensor:
        """d loss / d projection ``[R, C]`` in the operand dtype, recomputed."""
        opened, call, width = self.opened, self.call, columns.stop - columns.start
        if not call.fused:
            opened.projection.into(tiles[: len(hidden), :width], hidden, columns.start, columns.stop)
            return projection_gradient(opened, tiles, rows, columns, values, coefficients, grad_bias)
        return linear_softmax_gradient_into(
            tiles[: len(hidden), :width],
            hidden,
            opened.weight[columns],
            values["lse"],
            call.tokens.labels[rows],
            coefficients,
            opened.epilogue.columns(columns),
            first_column=columns.start,
            vocab_size=opened.vocab_size,
            backend=call.backend,
        )

    def _fused_statistics(self, rows: slice, hidden: Tensor, values: Mapping[str, Tensor]) -> None:
        """Statistics whose logits never reach memory, into ``values``."""
        opened, call = self.opened, self.call
        labels, names = call.tokens.labels[rows], call.block_names
        if self.mean_logit is not None:
            self.mean_logit.into(values["mean_logit"], hidden)
        if names <= {"logp", "lse"}:
            found = Exponentials.into(values)
            linear_exponentials(hidden, opened.weight, labels, None, opened.epilogue, found=found, backend=call.backend)
            return
        computed = linear_softmax_statistics(
            hidden, opened.weight, labels, names, opened.epilogue, backend=call.backend
        )
        for name in names:
            values[name].copy_(computed[name])

    def _empty_statistics(self) -> dict[str, Tensor]:
        """Memory for the statistics ``[N]`` (``selected_logps``: ``[N, k]``) of every active token."""

        def empty(name: str) -> Tensor:
            dtype = torch.int64 if name == "argmax" else self.call.logits_dtype
            selected = self.call.query.selected if name == "selected_logps" else None
            shape = (self.count,) if selected is None else selected.shape
            return torch.empty(shape, dtype=dtype, device=self.opened.weight.device)

        return {name: empty(name) for name in dict.fromkeys(("lse", *self.call.outputs))}

    def _token_losses(
        self, rows: slice, values: Mapping[str, Tensor], weights: Upstream | None
    ) -> tuple[Tensor, Upstream]:
        """The tokens' losses, and their derivatives by each statistic: from autograd, unless the loss gives them."""
        call, query = self.call, self.call.query
        if weights is not None:
            total = sum((weight * values[name] for name, weight in weights.items()), torch.zeros_like(values["lse"]))
            return total, weights
        assert query.token_loss is not None
        with torch.enable_grad():
            leaves = {name: values[name].detach().requires_grad_() for name in query.statistics}
            named = {**leaves, **{name: values[name] for name in query.metrics}}
            inputs = _rows_of(query.token_inputs, rows)
            result = query.token_loss(Statistics(**named), call.tokens.labels[rows], **inputs)
            losses, derivatives = result if isinstance(result, tuple) else (result, None)
            if losses.shape != (rows.stop - rows.start,):
                count = rows.stop - rows.start
                raise ValueError(f"token_loss must return one value per token, [{count}], got {tuple(losses.shape)}.")
            losses = call.tokens.masked(losses, rows)
            if derivatives is not None:
                return losses.detach(), {n: call.tokens.masked(g.detach(), rows) for n, g in derivatives.items()}
            if not losses.requires_grad:
                return losses, {}
            upstream = torch.autograd.grad(losses.sum(), tuple(leaves.values()), allow_unused=True)
        # Masked again: where a loss is not finite, not even 0 times its derivative is.
        pairs = zip(leaves, upstream, strict=True)
        return losses.detach(), {name: call.tokens.masked(g, rows) for name, g in pairs if g is not None}
