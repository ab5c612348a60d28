"""A language model's last layer: a matrix, a bias, what is done to logits, and who has which columns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from liger_losses.chunked.core.buffers import local_part
from liger_losses.chunked.core.ranks import Ranks
from liger_losses.chunked.core.weights import Products, Weights
from liger_losses.kernels.logit_transform import LogitTransform


@dataclass(frozen=True, eq=False)
class Projection:
    """``logits = transform(hidden @ weights.T + bias)``. A :class:`Target`'s temperature replaces the transform's."""

    weights: Weights
    transform: LogitTransform  # no default: torch 2.11 traces none that is an object
    ranks: Ranks
    bias: Tensor | None = None
    batch_invariant: bool = False

    @property
    def vocab_size(self) -> int:
        """Columns of all ranks."""
        return sum(self.ranks.sizes) or self.weights.columns

    def open(self, products: Products) -> Projection:
        """The same for one call, with the weight cast or dequantized if all of its rows are copied together."""
        return replace(self, weights=self.weights.open(products))

    def local_bias(self, columns: slice | Tensor) -> Tensor | None:
        """The bias of some of this rank's columns."""
        return None if self.bias is None else local_part(self.bias.detach())[columns].contiguous()
