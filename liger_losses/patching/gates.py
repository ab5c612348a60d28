"""What gated MLPs do between their linear layers, and finding out which of the known forms it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_losses.kernels.glu import glu, glu_fused, glu_linear
from liger_losses.kernels.plain import is_plain, is_plain_linear
from liger_losses.patching.probing import Mismatch, Observed, check_close, floats_of, observe, random


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
        """The product, of two tensors or of one that holds both."""
        gate, up = self._parts(inner)
        if up is None:
            return glu_fused(gate, interleaved=self.layout == "interleaved", backend=backend, **self._formula)
        return glu(gate, up, backend=backend, **self._formula)

    def into(self, linear: nn.Module, *inner: Tensor) -> Tensor:
        """What a layer makes of the product. If it is a linear layer and no more, the product is not kept for it."""
        gate, up = self._parts(inner)
        if not is_plain_linear(linear) or not is_plain(*inner):
            return linear(self.compute(*inner))
        layer = cast(nn.Linear, linear)
        return glu_linear(gate, up, layer.weight, layer.bias, interleaved=self.layout == "interleaved", **self._formula)

    def _parts(self, inner: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Gate and up; or what holds both as the kernels take it, and None."""
        if len(inner) == 1 and self.layout != "second":
            return inner[0], None
        first, second = inner if len(inner) == 2 else inner[0].chunk(2, -1)
        return (second, first) if self.layout == "second" else (first, second)

    @property
    def _formula(self) -> Any:
        return {
            "activation": self.activation,
            "limit": self.limit,
            "alpha": self.alpha,
            "up_offset": self.up_offset,
        }


#: Leading dimensions of the input, dtype, and the mode.
CASES = (
    ("float32", (2, 9), torch.float32, True),
    ("bfloat16", (2, 9), torch.bfloat16, True),
    ("evaluation", (2, 9), torch.float32, False),
    ("two dimensions", (18,), torch.float32, True),
)
#: How large the rows of gate and up are: to where a clamp would show.
_SCALES = (0.0, 0.01, 0.3, 1.0, 2.0, 4.0, 10.0, 30.0, 300.0)


def inner_values(leading: Sequence[int], size: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """What the inner layers give in a probe."""
    scales = torch.tensor(_SCALES).repeat(2).view(*leading, 1)
    return (random((*leading, size), generator) * scales).to(dtype)


@dataclass
class Case:
    """What a module made of the values that its inner layers gave."""

    name: str
    inner: list[Tensor]
    observed: Observed

    def check(self, gate: Gate) -> None:
        """Raise Mismatch unless a gate computes the same."""
        half = self.inner[0].dtype is torch.bfloat16
        expected = observe(lambda *inner: gate.compute(*inner, backend="torch"), self.inner)
        check_close(f"{self.name}: the product", self.observed.output, expected.output, 1e-5, 2**-6 if half else None)
        for actual, wanted in zip(self.observed.grads, expected.grads, strict=True):
            check_close(f"{self.name}: the gradient", actual, wanted, 2**-5 if half else 1e-5)


def find(module: nn.Module, cases: Iterable[Case]) -> Gate:
    """The gate that agrees in all cases.

    Raises:
        Mismatch: none does.
    """
    cases = list(cases)
    furthest: tuple[int, str] = -1, ""
    for gate in _gates(module, len(cases[0].inner)):
        try:
            for number, case in enumerate(cases):
                at = number
                case.check(gate)
        except Mismatch as mismatch:
            if at > furthest[0]:
                furthest = at, f"not glu ({gate}): in {mismatch}"
            continue
        return gate
    raise Mismatch(furthest[1])


def _gates(module: nn.Module, tensors: int) -> Iterator[Gate]:
    for layout in ("first", "second") if tensors == 2 else ("first", "second", "interleaved"):
        for activation in ("silu", "gelu", "gelu_tanh"):
            yield Gate(layout, activation)
        for limit in floats_of(module):
            if limit <= 0:
                continue
            for activation in ("silu", "gelu", "gelu_tanh"):
                yield Gate(layout, activation, limit)
            for alpha in floats_of(module):
                for up_offset in (0.0, 1.0):
                    yield Gate(layout, "silu", limit, alpha, up_offset)
