"""Finds gated MLPs and experts, by running copies of them.

The linear layers of an MLP stay and are called as before, so that adapters and quantization go on working; what
happens between them is replaced. Experts have their weights stacked in one tensor: in transformers, such modules run
grouped matrix products and call their method ``_apply_gate`` on the output of the first; that method is replaced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.layers.glu import glu, glu_fused, glu_linear, glu_mlp
from liger_losses.layers.plain import is_plain, is_watched, plain_linear
from liger_losses.patching import probing
from liger_losses.patching.probing import Mismatch
from liger_losses.patching.swap import Replacement, is_short
from liger_losses.patching.tiles import compute_tiled


@dataclass(frozen=True)
class Gate:
    """``act(gate) * up``.

    Attributes:
        layout: where the gate is: ``first`` or ``second`` of two tensors or halves, or ``interleaved`` with ``up``.
        options: keyword arguments of :func:`~liger_losses.layers.glu.glu`, the activation and the limit first.
    """

    layout: str
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        (_, activation), (_, limit), *_ = self.options
        return f"{activation}" if limit is None else f"{activation}, limit {limit:g}"

    def compute(self, *inner: Tensor, backend: str | None = None) -> Tensor:
        """The product of gate and up, given as two tensors or as one that holds both."""
        gate, up = self.parts(inner)
        if up is None:
            return glu_fused(gate, backend=backend, interleaved=self.layout == "interleaved", **dict(self.options))
        return glu(gate, up, backend=backend, **dict(self.options))

    def parts(self, inner: Sequence[Any]) -> tuple[Any, Any]:
        """Gate and up, tensors or layers; or one that holds both as the kernels take it, and None."""
        if len(inner) == 1 and self.layout != "second":
            return inner[0], None
        first, second = inner if len(inner) == 2 else inner[0].chunk(2, -1)
        return (second, first) if self.layout == "second" else (first, second)


@dataclass(frozen=True)
class GatedMLP(Replacement):
    """``down(act(gate(x)) * up(x))`` of three linear layers, or of two, the first of which gives gate and up.

    Attributes:
        inner: the names of the layers applied to the input, in the order of their calls: two, or one for gate and up.
        down: the name of the layer applied to the product.
        gate: how the product is computed.
        tile: how many tokens it is computed for at a time; 0 for a number that its sizes give, ``None`` for all.
        activations: the names of the other submodules, which are not called, and the forwards of their classes.
    """

    inner: tuple[str, ...]
    down: str
    gate: Gate
    tile: int | None = None
    activations: tuple[tuple[str, Callable[..., Any]], ...] = ()

    def __str__(self) -> str:
        tiles = "" if self.tile is None else f", tiles of {self.tile} tokens" if self.tile else ", tiles"
        return f"{'glu' if len(self.inner) == 2 else 'glu_fused'} ({self.gate}){tiles}"

    def in_tiles(self, tokens: bool | int) -> GatedMLP:
        return self if tokens is False else replace(self, tile=0 if tokens is True else tokens)

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Of few tokens, the original forward launches two operations between the layers.
        if len(args) != 1 or kwargs or not is_plain(*args) or is_short(*args) or torch.jit.is_tracing():
            return NotImplemented
        parts = [(getattr(module, name), forward) for name, forward in self.activations]
        if any(type(part).forward is not forward or is_watched(part) for part, forward in parts):
            return NotImplemented
        return compute_tiled(self.compute, module, *args, self.tile)

    def compute(self, module: Any, x: Tensor, backend: str | None = None) -> Tensor:
        """The output; where all layers are plain ones, backward writes over the outputs of the inner ones."""
        layers, gate = [getattr(module, name) for name in (*self.inner, self.down)], self.gate
        options = {"interleaved": gate.layout == "interleaved", **dict(gate.options)}
        *linears, linear = map(plain_linear, layers)
        if linear is not None and all(linears) and not (len(linears) == 1 and gate.layout == "second"):
            return glu_mlp(x, *gate.parts(linears), linear, **options)
        inner = [layer(x) for layer in layers[:-1]]
        if linear is not None and is_plain(*inner):
            # Does not save the product.
            return glu_linear(*gate.parts(inner), *linear, **options)
        return layers[-1](gate.compute(*inner, backend=backend))

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        """Two or three linear layers whose sizes fit, nothing else with tensors, and a forward of one argument."""
        linears = probing.linears_of(module)
        if len(linears) not in (2, 3) or any(map(probing.has_tensors, (module, *cls.bypassed(module).values()))):
            return False
        inner = [child.out_features // (2 if len(linears) == 2 else 1) for child in linears.values()]
        down = [child.in_features for child in linears.values()]
        fits = any(size in down and inner.count(size) >= len(linears) - 1 for size in set(inner))
        return fits and list(probing.positional_defaults(module.forward).values()).count(probing.REQUIRED) == 1

    @classmethod
    def is_worth_listing(cls, module: nn.Module) -> bool:
        """Modules whose forward takes one argument and no more."""
        return len(probing.positional_defaults(module.forward)) == 1

    @classmethod
    def match(cls, module: nn.Module) -> GatedMLP:
        """Runs copies with cheap layers: what is computed between them decides."""
        linears, calls = probing.linears_of(module), list[str]()

        def cheap(generator: torch.Generator) -> dict[nn.Module, nn.Module]:
            return {layer: CheapLinear(name, layer, calls, generator) for name, layer in linears.items()}

        def inputs(leading: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Iterator[list[Tensor]]:
            for size in sorted({layer.in_features for layer in linears.values()}):
                calls.clear()
                yield [probing.rows_of(_SCALES, leading, size, generator).to(dtype)]

        cases = []
        for case in probing.cases_of(module, inputs, _GRAD_TOLERANCES, cheap):
            order = calls[: len(linears)]
            if sorted(order) != sorted(linears) or calls != 2 * order:
                raise Mismatch(f"{case.name}: it does not call each of its layers once")
            *inner, down = order
            cases.append(case)
        others = tuple((name, type(part).forward) for name, part in module.named_children() if name not in linears)
        gates = _gates(module, len(inner))
        return probing.first_match((GatedMLP(tuple(inner), down, gate, None, others) for gate in gates), cases)


@dataclass(frozen=True)
class GatedExperts(Replacement):
    """The gate of experts with stacked weights."""

    gate: Gate

    methods = ("_apply_gate",)

    def __str__(self) -> str:
        return f"experts' glu_fused ({self.gate})"

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not is_plain(*args) or any(map(is_watched, module.children())):
            return NotImplemented
        return self.compute(module, *args)

    def compute(self, module: Any, x: Tensor, backend: str | None = None) -> Tensor:
        """The product of gate and up."""
        return self.gate.compute(x, backend=backend)

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        """Weights of three dimensions, and the method."""
        stacked = any(len(probing.shape_of(p)) == 3 for p in module.parameters(recurse=False))
        return stacked and callable(getattr(type(module), "_apply_gate", None)) and getattr(module, "has_gate", True)

    @classmethod
    def match(cls, module: nn.Module) -> GatedExperts:
        """Runs the method on copies without weights, and on 64 gates: it does not depend on the weights' sizes."""

        def inputs(leading: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> list[list[Tensor]]:
            return [[probing.rows_of(_SCALES, leading, 128, generator).to(dtype)]]

        cases = probing.cases_of(module, inputs, _GRAD_TOLERANCES, method="_apply_gate")
        return probing.first_match(map(GatedExperts, _gates(module, 1)), list(cases))


class CheapLinear(nn.Module):
    """Stands in for a linear layer of any size: each output is one input, scaled. Adds its name to ``calls``."""

    def __init__(self, name: str, linear: Any, calls: list[str], generator: torch.Generator) -> None:
        super().__init__()
        self.name, self.in_features, self.out_features = name, linear.in_features, linear.out_features
        self.calls, self.scale = calls, probing.random((self.out_features,), generator)
        self.index = torch.arange(self.out_features) % self.in_features

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise Mismatch(f"no gated MLP: {self.name}, of {self.in_features} inputs, is called with {x.shape[-1]}")
        self.calls.append(self.name)
        return x[..., self.index] * self.scale.to(x.dtype)


_GRAD_TOLERANCES = 1e-5, 2**-5
#: The scales of the rows of gate and up; a clamp would show in the largest.
_SCALES = (0.0, 0.01, 0.3, 1.0, 2.0, 4.0, 10.0, 30.0, 300.0)


def _gates(module: nn.Module, tensors: int) -> Iterator[Gate]:
    for layout in ("first", "second") if tensors == 2 else ("first", "second", "interleaved"):
        for limit in (None, *(number for number in probing.floats_of(module) if number > 0)):
            for activation in ("silu", "gelu", "gelu_tanh"):
                yield Gate(layout, (("activation", activation), ("limit", limit)))
            for alpha, offset in itertools.product(probing.floats_of(module) if limit is not None else (), (0.0, 1.0)):
                yield Gate(layout, (("activation", "silu"), ("limit", limit), ("alpha", alpha), ("up_offset", offset)))
