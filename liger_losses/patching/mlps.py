"""Finds gated MLPs by running them with their linear layers replaced by recorders.

The layers themselves stay and are called as before, so that adapters and quantization go on working; what happens
between them is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_losses.kernels.plain import is_plain
from liger_losses.patching.gates import CASES, Gate, case_of, inner_values, match_gate
from liger_losses.patching.kinds import PatchKind
from liger_losses.patching.probing import (
    REQUIRED,
    Case,
    Mismatch,
    Observed,
    attributes,
    children_of,
    copy_of,
    isolated,
    positional_defaults,
    random,
    unchanged,
)


@dataclass(frozen=True)
class GatedMLP:
    """``down(act(gate(x)) * up(x))``.

    Attributes:
        inner: the names of the layers applied to the input, in the order of their calls: two, or one for gate and up.
        down: the name of the layer applied to the product.
        gate: how the product is computed.
    """

    inner: tuple[str, ...]
    down: str
    gate: Gate

    method: ClassVar[str] = "forward"

    def __str__(self) -> str:
        return f"{'glu' if len(self.inner) == 2 else 'glu_fused'} ({self.gate})"

    def replace(self, original: type[nn.Module]) -> Callable[..., Any]:
        """The forward of the module's new class; calls that were not probed go to the original forward."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs or not is_plain(*args):
                return original.forward(module, *args, **kwargs)
            inner = [getattr(module, name)(args[0]) for name in self.inner]
            return self.gate.into(getattr(module, self.down), *inner)

        return forward


class _GatedMLPs(PatchKind):
    """MLPs of three linear layers (gate, up, down), or of two, the first of which gives gate and up."""

    replacement = GatedMLP

    def is_candidate(self, module: nn.Module) -> bool:
        """Nothing but the linear layers has parameters or buffers, their sizes fit, and forward takes one argument."""
        linears = _linears(module)
        if len(linears) not in (2, 3) or module._parameters or module._buffers:
            return False
        if any(part._parameters or part._buffers for part in self.bypassed(module).values()):
            return False
        inner = [child.out_features // (2 if len(linears) == 2 else 1) for child in linears.values()]
        down = [child.in_features for child in linears.values()]
        if not any(size in down and inner.count(size) >= len(linears) - 1 for size in set(inner)):
            return False
        return sum(default is REQUIRED for default in positional_defaults(module.forward).values()) == 1

    def match(self, module: nn.Module) -> GatedMLP:
        """Runs copies whose linear layers return given values."""
        with isolated():
            observations = [found for case in CASES if (found := _observe(module, *case)) is not None]
            inner, down, _ = observations[0]
            if any(names != [inner, down] for *names, _ in observations):
                raise Mismatch("it calls its layers in different orders")
            return GatedMLP(inner, down, match_gate(module, [case for *_, case in observations]))

    def key(self, module: nn.Module) -> Any:
        """The linear layers count by their sizes only."""
        linears = {name: (child.in_features, child.out_features) for name, child in _linears(module).items()}
        return type(module), tuple(linears.items()), children_of(module, linears), attributes(module)

    def bypassed(self, module: nn.Module) -> dict[str, nn.Module]:
        """All submodules but the linear layers."""
        linears = _linears(module)
        return {
            f"{name}.{inner}".strip("."): part
            for name, child in module._modules.items()
            if child is not None and name not in linears
            for inner, part in child.named_modules()
        }

    def is_worth_listing(self, module: nn.Module) -> bool:
        """Modules whose forward takes one argument and no more."""
        return len(positional_defaults(module.forward)) == 1


GATED_MLPS = _GatedMLPs()


def _linears(module: nn.Module) -> dict[str, Any]:
    """The children with ``in_features`` and ``out_features``: linear layers, quantized ones, adapters around them."""
    return {
        name: child
        for name, child in module._modules.items()
        if type(getattr(child, "in_features", None)) is int and type(getattr(child, "out_features", None)) is int
    }


class _Recorder(nn.Module):
    """Stands in for a linear layer: records its call and its input, and returns the given values.

    Args:
        linear: the layer.
        calls: a list of the recorders in the order of their calls, to append to.
        values: ``[..., out_features]``, a leaf.
    """

    def __init__(self, linear: Any, calls: list[_Recorder], values: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.calls, self.values = calls, values
        self.input: Tensor | None = None

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
        key: _Recorder(child, calls, inner_values(leading, child.out_features, dtype, generator).requires_grad_())
        for key, child in _linears(module).items()
    }
    copy = copy_of(module, generator, {getattr(module, key): recorder for key, recorder in recorders.items()})
    copy.train(training)
    state = torch.get_rng_state()
    with unchanged(name, copy, recorders):
        try:
            x, output = _call(copy, recorders.values(), leading, dtype, generator)
        except Mismatch:
            if name == "two dimensions":
                return None
            raise
        if len(calls) != len(recorders) or len(set(calls)) != len(calls):
            raise Mismatch(f"{name}: it does not call each of its layers once")
        if not torch.equal(state, torch.get_rng_state()):
            raise Mismatch(f"{name}: it draws random numbers")
    *inner, down = calls
    for recorder in inner:
        _check_same(f"{name}: the input of a layer", recorder.input, x)
    _check_same(f"{name}: the output", output, down.values)
    product, leaves = down.input, [recorder.values for recorder in inner]
    if product is None or not product.requires_grad:
        raise Mismatch(f"{name}: no gradient reaches its inner layers")
    upstream = random(product.shape, torch.Generator().manual_seed(7), product.dtype)
    *grads, of_input, of_output = torch.autograd.grad(product, [*leaves, x, down.values], upstream, allow_unused=True)
    if of_input is not None or of_output is not None:
        raise Mismatch(f"{name}: the last layer is given more than the product")
    names = {recorder: key for key, recorder in recorders.items()}
    case = case_of(name, [leaf.detach() for leaf in leaves], Observed(product.detach(), list(grads)))
    return tuple(names[recorder] for recorder in inner), names[down], case


def _call(
    copy: nn.Module,
    recorders: Iterable[_Recorder],
    leading: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Tensor, Any]:
    """An input of a size that the module takes, and its output."""
    for size in sorted({recorder.in_features for recorder in recorders}):
        for recorder in recorders:
            recorder.calls.clear()
        x = random((*leading, size), generator, dtype).requires_grad_()
        try:
            return x, copy(x)
        except Exception as error:
            failure = error
    raise Mismatch(f"its code does not fit a gated MLP ({type(failure).__name__}: {str(failure)[:160]})")


def _check_same(what: str, actual: Any, expected: Tensor) -> None:
    """Raise Mismatch unless a tensor equals another one and passes its gradient on to it unchanged."""
    if type(actual) is not Tensor and actual is not expected:
        raise Mismatch(f"{what} is not a tensor")
    if actual.shape != expected.shape or actual.dtype != expected.dtype or not torch.equal(actual, expected):
        raise Mismatch(f"{what} is changed")
    if not actual.requires_grad:
        raise Mismatch(f"{what} does not pass gradients on")
    upstream = random(expected.shape, torch.Generator().manual_seed(5), expected.dtype)
    (grad,) = torch.autograd.grad(actual, expected, upstream, allow_unused=True, retain_graph=True)
    if grad is None or not torch.equal(grad, upstream):
        raise Mismatch(f"{what} does not pass gradients on")
