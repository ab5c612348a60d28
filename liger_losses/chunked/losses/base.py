"""What every loss derives from. A loss names the statistics that it reads; it never sees logits."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_losses.chunked.engine import EngineOptions, Head, Statistics, linear_statistics
from liger_losses.chunked.engine.checks import check_tensor
from liger_losses.chunked.engine.tokens import shift_labels
from liger_losses.kernels.logit_transform import LogitTransform

_UNSET = object()


class ChunkedLoss(nn.Module):
    """A loss on the output of ``lm_head``, computed without materializing the logits.

    To write one, derive from it, name the :attr:`statistics` that it reads and define :meth:`loss`.

    Every option is an attribute that is read at each call. Assigning a value that does not fit raises, and leaves the
    attribute as it was.

    Args:
        ignore_index: label of tokens that carry no loss; they are dropped before the projection.
        temperature, logit_scale, softcap: see :class:`liger_losses.LogitTransform`.
        shift: labels are unshifted: position ``t`` predicts the label at ``t + 1``.
        compact: drop tokens without loss, at the cost of one host synchronization.
        workspace: upper bound in bytes for all temporary memory; chosen from the shapes by default.
        chunk_size: upper bound for the tokens of a block in the forward pass.
        accum_dtype: ``torch.float32`` to accumulate the weight's gradient in a buffer of that dtype.
        backend: ``torch`` or ``triton``; chosen from the device by default.
    """

    #: What :meth:`loss` is differentiated by; names from :data:`liger_losses.kernels.softmax_stats.STATISTICS`.
    statistics: ClassVar[tuple[str, ...]] = ("logp",)
    #: Further statistics that it reads, without a gradient.
    metrics: tuple[str, ...] = ()
    #: Whether :attr:`chunk_size` counts tokens. liger-kernel's counts completions in some losses, and is ignored there.
    chunks_are_tokens: ClassVar[bool] = True

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
        self.ignore_index, self.shift, self.compact = ignore_index, shift, compact
        self.temperature, self.logit_scale, self.softcap = temperature, logit_scale, softcap
        self.workspace, self.chunk_size, self.accum_dtype, self.backend = workspace, chunk_size, accum_dtype, backend
        # Subclasses assign their options before they call this constructor, so that all are checked together here.
        self.check_options()

    def __setattr__(self, name: str, value: Any) -> None:
        before = self.__dict__.get(name, _UNSET)
        super().__setattr__(name, value)
        if before is not _UNSET:
            try:
                self.check_options()
            except (TypeError, ValueError):
                self.__dict__[name] = before
                raise

    def check_options(self) -> None:
        """Raise TypeError or ValueError for attributes that are out of range or contradict each other."""
        _ = self.transform, self.options  # both check themselves when they are made

    @property
    def transform(self) -> LogitTransform:
        """What is done to the logits of policy and reference."""
        return LogitTransform(self.temperature, self.logit_scale, self.softcap)

    @property
    def options(self) -> EngineOptions:
        """How the engine streams."""
        chunk_size = self.chunk_size if self.chunks_are_tokens else None
        return EngineOptions(
            self.ignore_index, self.compact, self.workspace, chunk_size, self.accum_dtype, self.backend
        )

    def attributes_of(self, options: type) -> dict[str, Any]:
        """The attributes that bear the names of a dataclass's fields."""
        return {field.name: getattr(self, field.name) for field in fields(options)}

    def labels(self, labels: Tensor) -> Tensor:
        """Labels ``[...]`` as the engine takes them: shifted by one position if :attr:`shift` is set."""
        check_tensor("labels", labels)
        if labels.dtype != torch.int64:
            raise TypeError(f"labels must be int64 token ids, got {labels.dtype}; convert them with .long().")
        return shift_labels(labels, self.ignore_index) if self.shift else labels

    def loss(self, statistics: Statistics, mask: Tensor, **inputs: Any) -> Any:
        """The loss of all tokens; subclasses define it.

        Args:
            statistics: tensors ``[...]`` in the labels' shape, 0 for tokens without loss.
            mask: ``[...]`` bool, true for tokens that carry loss.
            inputs: the keyword arguments of the call.

        Returns:
            A 0-dim tensor, or a tuple of that and metrics.
        """
        raise NotImplementedError(f"{type(self).__name__} must define loss(statistics, mask, **inputs)")

    def forward(
        self,
        weight: Tensor | nn.Module | Head,
        hidden_states: Tensor,
        labels: Tensor,
        bias: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Compute :meth:`loss` from the statistics of ``hidden_states @ weight.T + bias``.

        Args:
            weight: ``[V, H]``, the ``lm_head``: a tensor, a linear layer, or a :class:`liger_losses.Head`.
            hidden_states: ``[..., H]``.
            labels: ``[...]`` int64.
            bias: ``[V]``, for a weight without one of its own.
            inputs: passed on to :meth:`loss`.

        Raises:
            TypeError, ValueError: inputs that do not fit together.
        """
        labels = self.labels(labels)
        head = Head.of(weight, bias, self.transform)
        statistics = linear_statistics(
            hidden_states, head, labels, self.statistics, metrics=self.metrics, options=self.options
        )
        return self.loss(statistics, labels != self.ignore_index, **inputs)
