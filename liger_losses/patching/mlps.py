"""Finds gated MLPs and experts by running copies of them.

The linear layers of an MLP stay and are called as before, so that adapters and quantization go on working; what
happens between them is replaced. Experts have their weights stacked in one tensor: in transformers, such modules run
grouped matrix products and call their method ``_apply_gate`` on the output of the first; that method is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.kernels.glu import glu, glu_fused, glu_linear, gradients_only
from liger_losses.kernels.plain import is_plain, is_plain_linear
from liger_losses.patching import probing
from liger_losses.patching.probing import Case, Mismatch
from liger_losses.patching.swap import Replacement
from liger_losses.patching.tiles import Tiles, compute_tiled


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

    def into(self, linear: Any, *inner: Tensor) -> Tensor:
        """The output of a layer applied to the product; for a plain linear layer, without saving the product."""
        gate, up = self._parts(inner)
        if not is_plain_linear(linear) or not is_plain(*inner):
            return linear(self.compute(*inner))
        interleaved = self.layout == "interleaved"
        return glu_linear(gate, up, linear.weight, linear.bias, interleaved=interleaved, **self._formula)

    def _parts(self, inner: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Gate and up; or one tensor that holds both as the kernels take it, and None."""
        if len(inner) == 1 and self.layout != "second":
            return inner[0], None
        first, second = inner if len(inner) == 2 else inner[0].chunk(2, -1)
        return (second, first) if self.layout == "second" else (first, second)

    @property
    def _formula(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("activation", "limit", "alpha", "up_offset")}


class LinearsStay(Replacement):
    """A replacement of a module whose linear layers stay and are called as before."""

    @classmethod
    def key(cls, module: nn.Module) -> Any:
        """The linear layers count by their sizes only."""
        linears = {name: (child.in_features, child.out_features) for name, child in linears_of(module).items()}
        return type(module), tuple(linears.items()), probing.children_of(module, linears), probing.attributes(module)

    @classmethod
    def bypassed(cls, module: nn.Module) -> dict[str, nn.Module]:
        """All submodules but the linear layers."""
        linears, parts = linears_of(module), super().bypassed(module)
        return {name: part for name, part in parts.items() if name.partition(".")[0] not in linears}

    @classmethod
    def is_worth_listing(cls, module: nn.Module) -> bool:
        """Modules whose forward takes one argument and no more."""
        return len(probing.positional_defaults(module.forward)) == 1


@dataclass(frozen=True)
class GatedMLP(LinearsStay):
    """``down(act(gate(x)) * up(x))`` of three linear layers, or of two, the first of which gives gate and up.

    Attributes:
        inner: the names of the layers applied to the input, in the order of their calls: two, or one for gate and up.
        down: the name of the layer applied to the product.
        gate: how the product is computed.
        tiles: how many tokens it is computed for at a time; ``None`` for all.
    """

    inner: tuple[str, ...]
    down: str
    gate: Gate
    tiles: Tiles | None = None

    def __str__(self) -> str:
        tiles = "" if self.tiles is None else f", {self.tiles}"
        return f"{'glu' if len(self.inner) == 2 else 'glu_fused'} ({self.gate}){tiles}"

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not is_plain(*args):
            return NotImplemented
        if self.tiles is None:
            return self.compute(module, args[0])
        return compute_tiled(self.compute, module, args[0], self.tiles, gradients_only)

    def in_tiles(self, tiles: Tiles) -> GatedMLP:
        return replace(self, tiles=tiles)

    def compute(self, module: Any, x: Tensor) -> Tensor:
        """The output of the MLP."""
        return self.gate.into(getattr(module, self.down), *(getattr(module, name)(x) for name in self.inner))

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        """Nothing but the linear layers has parameters or buffers, their sizes fit, and forward takes one argument."""
        linears = linears_of(module)
        if len(linears) not in (2, 3) or any(
            probing.has_tensors(part) for part in (module, *cls.bypassed(module).values())
        ):
            return False
        inner = [child.out_features // (2 if len(linears) == 2 else 1) for child in linears.values()]
        down = [child.in_features for child in linears.values()]
        if not any(size in down and inner.count(size) >= len(linears) - 1 for size in set(inner)):
            return False
        return sum(default is probing.REQUIRED for default in probing.positional_defaults(module.forward).values()) == 1

    @classmethod
    def match(cls, module: nn.Module) -> GatedMLP:
        """Runs copies whose linear layers return given values."""
        with probing.isolated():
            observations = [found for case in _CASES if (found := _observe(module, *case)) is not None]
            inner, down, _ = observations[0]
            if any(names != [inner, down] for *names, _ in observations):
                raise Mismatch("it calls its layers in different orders")
            return GatedMLP(inner, down, _match_gate(module, [case for *_, case in observations]))


@dataclass(frozen=True)
class GatedExperts(Replacement):
    """The gate of experts with stacked weights."""

    gate: Gate

    methods = ("_apply_gate",)

    def __str__(self) -> str:
        return f"experts' glu_fused ({self.gate})"

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if len(args) != 1 or kwargs or not is_plain(*args) else self.gate.compute(*args)

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        """Weights of three dimensions, and the method."""
        stacked = any(len(probing.shape_of(p)) == 3 for p in module.parameters(recurse=False))
        return stacked and callable(getattr(type(module), "_apply_gate", None)) and getattr(module, "has_gate", True)

    @classmethod
    def match(cls, module: nn.Module) -> GatedExperts:
        """Runs the method on copies without weights, and on 64 gates: it does not depend on the weights' sizes."""
        cases = []
        with probing.isolated():
            for name, leading, dtype, training in _CASES:
                generator = torch.Generator().manual_seed(13)
                copy: Any = probing.copy_of(module, generator, empty=True).train(training)
                inner = [_inner_values(leading, 128, dtype, generator)]
                with probing.unchanged(name, copy):
                    cases.append(_case_of(name, inner, *probing.observe(copy._apply_gate, inner)))
            return GatedExperts(_match_gate(module, cases))


def linears_of(module: nn.Module) -> dict[str, Any]:
    """The children with ``in_features`` and ``out_features``: linear layers, quantized ones, adapters around them."""
    return {
        name: child
        for name, child in module.named_children()
        if type(getattr(child, "in_features", None)) is int and type(getattr(child, "out_features", None)) is int
    }


class _Recorder(nn.Module):
    """Stands in for a linear layer: adds itself to ``calls``, keeps its input, and returns the given values, a leaf."""

    def __init__(self, linear: Any, calls: list[_Recorder], values: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.calls, self.values = calls, values

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise Mismatch(f"a layer for {self.in_features} features is given {x.shape[-1]}")
        self.calls.append(self)
        self.input = x
        return self.values.view_as(self.values)


def _observe(
    module: nn.Module, name: str, leading: tuple[int, ...], dtype: torch.dtype, training: bool
) -> tuple[tuple[str, ...], str, Case] | None:
    """The names of the inner layers and of the last one, and the product that the last one was given.

    ``None`` if the module does not take inputs of two dimensions: no model gives it any then.
    """
    generator = torch.Generator().manual_seed(13)
    calls: list[_Recorder] = []
    recorders = {
        key: _Recorder(child, calls, _inner_values(leading, child.out_features, dtype, generator).requires_grad_())
        for key, child in linears_of(module).items()
    }
    copy = probing.copy_of(module, generator, {getattr(module, key): recorder for key, recorder in recorders.items()})
    copy.train(training)
    state = torch.get_rng_state()
    with probing.unchanged(name, copy, recorders):
        for size in sorted({recorder.in_features for recorder in recorders.values()}):
            calls.clear()
            x = probing.random((*leading, size), generator, dtype).requires_grad_()
            try:
                output = copy(x)
                break
            except Exception as error:
                failure = f"{type(error).__name__}: {str(error)[:160]}"
        else:
            if name == "two dimensions":
                return None
            raise Mismatch(f"its code does not fit a gated MLP ({failure})")
        if len(calls) != len(recorders) or len(set(calls)) != len(calls):
            raise Mismatch(f"{name}: it does not call each of its layers once")
        if not torch.equal(state, torch.get_rng_state()):
            raise Mismatch(f"{name}: it draws random numbers")
    *inner, down = calls
    for recorder in inner:
        _check_same(f"{name}: the input of a layer", recorder.input, x)
    _check_same(f"{name}: the output", output, down.values)
    product, leaves = down.input, [recorder.values for recorder in inner]
    if not product.requires_grad:
        raise Mismatch(f"{name}: no gradient reaches its inner layers")
    upstream = probing.random(product.shape, torch.Generator().manual_seed(7), product.dtype)
    *grads, of_input, of_output = torch.autograd.grad(product, [*leaves, x, down.values], upstream, allow_unused=True)
    if of_input is not None or of_output is not None:
        raise Mismatch(f"{name}: the last layer is given more than the product")
    names = {recorder: key for key, recorder in recorders.items()}
    case = _case_of(name, [leaf.detach() for leaf in leaves], product.detach(), list(grads))
    return tuple(names[recorder] for recorder in inner), names[down], case


def _check_same(what: str, actual: Any, expected: Tensor) -> None:
    """Raise Mismatch unless a tensor equals another one and passes its gradient on to it unchanged."""
    if type(actual) is not Tensor and actual is not expected:
        raise Mismatch(f"{what} is not a tensor")
    if actual.shape != expected.shape or actual.dtype != expected.dtype or not torch.equal(actual, expected):
        raise Mismatch(f"{what} is changed")
    grad = None
    if actual.requires_grad:
        upstream = probing.random(expected.shape, torch.Generator().manual_seed(5), expected.dtype)
        (grad,) = torch.autograd.grad(actual, expected, upstream, allow_unused=True, retain_graph=True)
    if grad is None or not torch.equal(grad, upstream):
        raise Mismatch(f"{what} does not pass gradients on")


#: Name, leading dimensions of the input, dtype, and whether in training mode.
_CASES = (
    ("float32", (2, 9), torch.float32, True),
    ("bfloat16", (2, 9), torch.bfloat16, True),
    ("evaluation", (2, 9), torch.float32, False),
    ("two dimensions", (18,), torch.float32, True),
)
#: The scales of the rows of gate and up; a clamp would show in the largest.
_SCALES = (0.0, 0.01, 0.3, 1.0, 2.0, 4.0, 10.0, 30.0, 300.0)


def _inner_values(leading: Sequence[int], size: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values for the output of an inner layer in a probe."""
    scales = torch.tensor(_SCALES).repeat(2).view(*leading, 1)
    return (probing.random((*leading, size), generator) * scales).to(dtype)


def _case_of(name: str, inner: list[Tensor], output: Tensor, grads: list[Tensor | None]) -> Case:
    """The product that a module computed from the outputs of its inner layers, and their gradients."""
    rare, grad_tolerance = (2**-6, 2**-5) if inner[0].dtype is torch.bfloat16 else (None, 1e-5)
    return Case(
        name, inner, output, grads, lambda gate: partial(gate.compute, backend="torch"), 1e-5, grad_tolerance, rare
    )


def _match_gate(module: nn.Module, cases: Sequence[Case]) -> Gate:
    """The gate that computes the same in all cases; raises Mismatch if there is none."""
    return probing.first_match(_gates(module, len(cases[0].inputs)), cases, lambda gate: f"glu ({gate})")


def _gates(module: nn.Module, tensors: int) -> Iterator[Gate]:
    for layout in ("first", "second") if tensors == 2 else ("first", "second", "interleaved"):
        for limit in (None, *(number for number in probing.floats_of(module) if number > 0)):
            for activation in ("silu", "gelu", "gelu_tanh"):
                yield Gate(layout, activation, limit)
            for alpha in probing.floats_of(module) if limit is not None else ():
                for up_offset in (0.0, 1.0):
                    yield Gate(layout, "silu", limit, alpha, up_offset)
