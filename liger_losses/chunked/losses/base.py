"""The base classes a loss derives from.

A loss names the statistics it reads and returns a scalar; it never sees logits. Two kinds:

- :class:`ChunkedLoss`: any function of all tokens' statistics (sequence sums, pairs, batches);
- :class:`ChunkedTokenLoss`: a sum over tokens of a function of each token's own statistics, which runs in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_losses.chunked.engine import EngineOptions, Statistics, linear_statistics, linear_token_loss
from liger_losses.chunked.engine.checks import check_tensor
from liger_losses.chunked.engine.tokens import shift_labels
from liger_losses.kernels.logit_transform import LogitTransform


class ChunkedLoss(nn.Module):
    """A loss on the output of ``lm_head``, computed without the logits.

    Derive from it, name :attr:`statistics`, write :meth:`loss`; or pass a function to :meth:`from_function`.

    Args:
        ignore_index: the label of tokens that carry no loss; they are dropped before the projection.
        temperature, logit_scale, softcap: see :class:`liger_losses.LogitTransform`.
        shift: labels are unshifted: position ``t`` predicts the label at ``t + 1``.
        compact: drop tokens without loss (costs one synchronisation with the device).
        workspace: bytes for everything beyond inputs and outputs; chosen from the shapes by default.
        chunk_size: at most so many tokens' logits in a block of the forward pass, where more would fit the workspace.
        accum_dtype: ``torch.float32`` to add up the weight's gradient in a buffer of that dtype.
        backend: ``torch`` or ``triton`` for the work between the products; chosen from the device by default.
    """

    #: What :meth:`loss` is differentiated by; names from :data:`liger_losses.kernels.softmax_stats.STATISTICS`.
    statistics: ClassVar[tuple[str, ...]] = ("logp",)
    #: What it may read besides, without a gradient.
    metrics: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        temperature: float = 1.0,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        shift: bool = False,
        compact: bool = True,
        workspace: int | None = None,
        chunk_size: int | None = None,
        accum_dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.shift = shift
        self.transform = LogitTransform(temperature, logit_scale, softcap)
        self.options = EngineOptions(ignore_index, compact, workspace, chunk_size, accum_dtype, backend)

    def labels(self, labels: Tensor) -> Tensor:
        """Labels ``[...]`` as the engine takes them: shifted if this loss was told that they are not."""
        check_tensor("labels", labels)
        return shift_labels(labels, self.ignore_index) if self.shift else labels

    def loss(self, statistics: Statistics, mask: Tensor, **inputs: Any) -> Any:
        """The loss of all tokens.

        Args:
            statistics: tensors ``[...]`` in the labels' shape, 0 for tokens without loss.
            mask: ``[...]`` bool, true for tokens that carry loss.
            inputs: what :meth:`forward` was given by keyword.

        Returns:
            A 0-dim tensor, or that and metrics.
        """
        raise NotImplementedError(f"{type(self).__name__} must define loss(statistics, mask, **inputs)")

    def forward(
        self, weight: Tensor, hidden_states: Tensor, labels: Tensor, bias: Tensor | None = None, **inputs: Any
    ) -> Any:
        """What :meth:`loss` returns, for ``hidden_states [..., H] @ weight [V, H].T + bias [V]``."""
        labels = self.labels(labels)
        statistics = linear_statistics(
            hidden_states,
            weight,
            labels,
            self.statistics,
            metrics=self.metrics,
            bias=bias,
            transform=self.transform,
            options=self.options,
        )
        return self.loss(statistics, labels != self.ignore_index, **inputs)

    @staticmethod
    def from_function(
        function: Callable[..., Any], statistics: Sequence[str] = ("logp",), metrics: Sequence[str] = (), **options: Any
    ) -> ChunkedLoss:
        """A loss from a function.

        Args:
            function: ``(statistics, mask, **inputs) -> loss`` (or loss and metrics), as :meth:`loss`.
            statistics: names that it is differentiated by.
            metrics: names that it reads besides.
            options: as in :class:`ChunkedLoss`.
        """
        body = {
            "statistics": tuple(statistics),
            "metrics": tuple(metrics),
            "loss": staticmethod(function),
        }
        return type(getattr(function, "__name__", "FunctionLoss"), (ChunkedLoss,), body)(**options)


class ChunkedTokenLoss(ChunkedLoss):
    """A loss that is a sum over tokens, each of its own statistics: loss and gradients in one pass.

    Derive from it and write :meth:`token_loss`.
    """

    def token_loss(self, statistics: Statistics, labels: Tensor, **inputs: Tensor) -> Tensor:
        """Each token's contribution to the loss.

        Args:
            statistics: tensors ``[n]`` of some tokens.
            labels: ``[n]``, theirs.
            inputs: what :meth:`forward` was given by keyword, ``[n]`` each: constants for the gradient.

        Returns:
            ``[n]``; their sum over all tokens is the loss.
        """
        raise NotImplementedError(f"{type(self).__name__} must define token_loss(statistics, labels, **inputs)")

    def forward(
        self, weight: Tensor, hidden_states: Tensor, labels: Tensor, bias: Tensor | None = None, **inputs: Tensor
    ) -> Any:
        """The sum of :meth:`token_loss`, and the detached statistics ``[...]``."""
        return linear_token_loss(
            hidden_states,
            weight,
            self.labels(labels),
            self.token_loss,
            self.statistics,
            metrics=self.metrics,
            token_inputs=inputs,
            bias=bias,
            transform=self.transform,
            options=self.options,
        )
