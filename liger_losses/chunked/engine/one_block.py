"""A call of few tokens, whose logits are one block: product, statistics, softmax gradient, two products.

T tokens, all of them projected; H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from liger_losses.chunked.engine.accumulation import side_by_side
from liger_losses.chunked.engine.blocks import Upstream
from liger_losses.chunked.engine.call import Call
from liger_losses.chunked.engine.plan import padded
from liger_losses.kernels.logit_transform import Epilogue
from liger_losses.kernels.matmul import matmul_into
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import softmax_statistics


class OneBlock:
    """Statistics and gradients of a call whose logits are one block, as :class:`Stream` computes them of several.

    No rows are gathered, no gradients are accumulated, and the host waits for nothing, so it launches a small call in a
    few hundred microseconds.
    """

    def __init__(self, call: Call, weight: Tensor, bias: Tensor | None, hidden_states: Sequence[Tensor]) -> None:
        self.call, self.weight, self.bias, self.hidden_states = call, weight, bias, hidden_states
        flat = [part if part.dim() == 2 else part.reshape(-1, part.shape[-1]) for part in hidden_states]
        hidden = flat[0] if len(flat) == 1 else torch.cat(flat)
        # Tokens without loss may hold anything: 0 times NaN would be NaN in the weight's gradient.
        self.hidden = call.tokens.masked(hidden.to(call.work.operand_dtype))
        self.count = hidden.shape[0]
        rows = None if bias is None else bias.contiguous()  # as kernels read it
        self.epilogue = Epilogue(call.transform, rows, call.query.class_weight)

    def statistics(self, keep_block: bool = False) -> tuple[dict[str, Tensor], Tensor | None]:
        """The statistics ``[T]``, and with ``keep_block`` the projections ``[T, V]``."""
        projected = self._projected()
        return self._statistics(projected), projected if keep_block else None

    def gradients(
        self, values: dict[str, Tensor], upstream: Upstream, kept: Tensor | None, pending: None = None
    ) -> tuple[Tensor | None, ...]:
        """``(grad_weight, grad_bias, grad_hidden)``, from projections that were kept, and are overwritten. So few
        tokens are not counted."""
        return self._gradients(self._projected() if kept is None else kept, values, upstream)

    def token_loss(self) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor | None, ...]]:
        """A separable loss (0-dim), the statistics, and ``(grad_weight, grad_bias, grad_hidden)`` of the loss."""
        projected, weights = self._projected(), self.call.query.token_weights
        values = self._statistics(projected)
        if weights is None:
            losses, upstream = self.call.token_losses(values, slice(0, self.count))
        else:
            upstream = dict(weights)
            losses = self.call.weighted_sum(weights, values, slice(0, self.count))
        return losses.sum(dtype=values["lse"].dtype), values, self._gradients(projected, values, upstream)

    def _projected(self) -> Tensor:
        """``hidden @ weight.T`` ``[T, V]``, in fp32 (fp64 of fp64)."""
        size, dtype = self.weight.shape[0], self.call.work.logits_dtype
        rows = torch.empty(self.count, padded(size), dtype=dtype, device=self.hidden.device)
        projected = rows if rows.shape[1] == size else rows[:, :size]
        return matmul_into(projected, self.hidden, self.weight.t())

    def _statistics(self, projected: Tensor) -> dict[str, Tensor]:
        call = self.call
        scratch, backend = call.plan.scratch, call.backend
        return softmax_statistics(
            projected, call.tokens.labels, call.block_names, self.epilogue, scratch=scratch, backend=backend
        )

    def _gradients(self, projected: Tensor, values: dict[str, Tensor], upstream: Upstream) -> tuple[Tensor | None, ...]:
        call, hidden, weight, device = self.call, self.hidden, self.weight, self.hidden.device
        grad_weight = grad_bias = grad_hidden = None
        columns = weight.shape[0]
        if call.needs_bias:
            grad_bias = torch.zeros(columns, dtype=call.work.logits_dtype, device=device)
        narrow = projected.view(call.work.operand_dtype)  # each row in the first half of the same fp32 row
        grad = softmax_gradient_into(
            narrow if narrow.shape[1] == columns else narrow[:, :columns],
            projected,
            values["lse"],
            call.tokens.labels,
            SoftmaxGradient.of(upstream, values, call.query.class_weight),
            self.epilogue,
            grad_bias=grad_bias,
            scratch=call.plan.scratch,
            backend=call.backend,
        )
        products = []
        if any(call.needs_hidden):
            grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=device)
            products.append(partial(matmul_into, grad_hidden, grad, weight))
        if call.needs_weight:
            grad_weight = torch.empty(weight.shape, dtype=call.grad_weight_dtype, device=device)
            products.append(partial(matmul_into, grad_weight, grad.t(), hidden))
        side_by_side(device, products, self.count * columns * hidden.shape[1])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None and self.bias is not None:
            grad_bias = grad_bias.to(self.bias.dtype)
        return grad_weight, grad_bias, *self._by_tensor(grad_hidden)

    def _by_tensor(self, grad: Tensor | None) -> list[Tensor | None]:
        """The gradient ``[T, H]`` of all hidden states as one of each tensor, in its shape and dtype."""
        needs, given = self.call.needs_hidden, self.hidden_states
        if grad is None:
            return [None] * len(given)
        parts = [grad] if len(given) == 1 else grad.split([part.numel() // part.shape[-1] for part in given])
        pairs = zip(parts, given, needs, strict=True)
        return [part.view(own.shape).to(own.dtype) if need else None for part, own, need in pairs]
