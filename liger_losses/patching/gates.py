"""The gated products between the linear layers of an MLP, and the search for the one that a module computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_losses.kernels.glu import glu, glu_fused, glu_linear
from liger_losses.kernels.plain import is_plain, is_plain_linear
from liger_losses.patching.probing import Case, first_match, floats_of, random


@dataclass(frozen=True)
class Gate:
    """``act(gate) * up``.

    Attributes:
        layout: where the gate is: ``first`` or ``second`` of two tensors or halves, or ``interleaved`` with ``up``.
        activation, limit, alpha, up_offset: as in :func:`~liger_losses.kernels.glu.glu`.
    """

    layout: str
    activation: str
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0

    def __str__(self) -> str:
        return self.activation if self.limit is None else f"{self.activation}, limit {self.limit:g}"

    def compute(self, *inner: Tensor, backend: str | None = None) -> Tensor:
        """The product of gate and up, given as two tensors or as one that holds both."""
        gate, up = self._parts(inner)
        if up is None:
            return glu_fused(gate, interleaved=self.layout == "interleaved", backend=backend, **self._formula)
        return glu(gate, up, backend=backend, **self._formula)

    def into(self, linear: nn.Module, *inner: Tensor) -> Tensor:
        """The output of a layer applied to the product; for a plain linear layer, without saving the product."""
        gate, up = self._parts(inner)
        if not is_plain_linear(linear) or not is_plain(*inner):
            return linear(self.compute(*inner))
        layer = cast(nn.Linear, linear)
        return glu_linear(gate, up, layer.weight, layer.bias, interleaved=self.layout == "interleaved", **self._formula)

    def _parts(self, inner: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Gate and up; or one tensor that holds both as the kernels take it, and None."""
        if len(inner) == 1 and self.layout != "second":
            return inner[0], None
        first, second = inner if len(inner) == 2 else inner[0].chunk(2, -1)
        return (second, first) if self.layout == "second" else (first, second)

    @property
    def _formula(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("activation", "limit", "alpha", "up_offset")}


#: Name, leading dimensions of the input, dtype, and whether in training mode.
CASES = (
    ("float32", (2, 9), torch.float32, True),
    ("bfloat16", (2, 9), torch.bfloat16, True),
    ("evaluation", (2, 9), torch.float32, False),
    ("two dimensions", (18,), torch.float32, True),
)
#: The scales of the rows of gate and up; a clamp would show in the largest.
_SCALES = (0.0, 0.01, 0.3, 1.0, 2.0, 4.0, 10.0, 30.0, 300.0)


def inner_values(leading: Sequence[int], size: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values for the output of an inner layer in a probe."""
    scales = torch.tensor(_SCALES).repeat(2).view(*leading, 1)
    return (random((*leading, size), generator) * scales).to(dtype)


def case_of(name: str, inner: list[Tensor], output: Tensor, grads: list[Tensor | None]) -> Case:
    """The product that a module computed from the outputs of its inner layers, and their gradients."""
    rare, grad_tolerance = (2**-6, 2**-5) if inner[0].dtype is torch.bfloat16 else (None, 1e-5)
    return Case(
        name, inner, output, grads, lambda gate: partial(gate.compute, backend="torch"), 1e-5, grad_tolerance, rare
    )


def match_gate(module: nn.Module, cases: Sequence[Case]) -> Gate:
    """The gate that computes the same in all cases.

    Raises:
        Mismatch: there is none.
    """
    return first_match(_gates(module, len(cases[0].inputs)), cases, lambda gate: f"glu ({gate})")


def _gates(module: nn.Module, tensors: int) -> Iterator[Gate]:
    for layout in ("first", "second") if tensors == 2 else ("first", "second", "interleaved"):
        for limit in (None, *(number for number in floats_of(module) if number > 0)):
            for activation in ("silu", "gelu", "gelu_tanh"):
                yield Gate(layout, activation, limit)
            for alpha in floats_of(module) if limit is not None else ():
                for up_offset in (0.0, 1.0):
                    yield Gate(layout, "silu", limit, alpha, up_offset)
