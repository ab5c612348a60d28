"""Finds gated MLPs and experts by running copies of them.

The linear layers of an MLP stay and are called as before, so that adapters and quantization go on working; what
happens between them is replaced. Experts have their weights stacked in one tensor: in transformers, such modules run
grouped matrix products and call their method ``_apply_gate`` on the output of the first; that method is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_losses.kernels.plain import is_plain
from liger_losses.patching import probing
from liger_losses.patching.gates import CASES, Gate, case_of, inner_values, match_gate
from liger_losses.patching.probing import Case, Mismatch
from liger_losses.patching.swap import Replacement


@dataclass(frozen=True)
class GatedMLP(Replacement):
    """``down(act(gate(x)) * up(x))`` of three linear layers, or of two, the first of which gives gate and up.

    Attributes:
        inner: the names of the layers applied to the input, in the order of their calls: two, or one for gate and up.
        down: the name of the layer applied to the product.
        gate: how the product is computed.
    """

    inner: tuple[str, ...]
    down: str
    gate: Gate

    def __str__(self) -> str:
        return f"{'glu' if len(self.inner) == 2 else 'glu_fused'} ({self.gate})"

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not is_plain(*args):
            return NotImplemented
        return self.gate.into(getattr(module, self.down), *(getattr(module, name)(args[0]) for name in self.inner))

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        """Nothing but the linear layers has parameters or buffers, their sizes fit, and forward takes one argument."""
        linears = _linears(module)
        if len(linears) not in (2, 3) or module._parameters or module._buffers:
            return False
        if any(part._parameters or part._buffers for part in cls.bypassed(module).values()):
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
            observations = [found for case in CASES if (found := _observe(module, *case)) is not None]
            inner, down, _ = observations[0]
            if any(names != [inner, down] for *names, _ in observations):
                raise Mismatch("it calls its layers in different orders")
            return GatedMLP(inner, down, match_gate(module, [case for *_, case in observations]))

    @classmethod
    def key(cls, module: nn.Module) -> Any:
        """The linear layers count by their sizes only."""
        linears = {name: (child.in_features, child.out_features) for name, child in _linears(module).items()}
        return type(module), tuple(linears.items()), probing.children_of(module, linears), probing.attributes(module)

    @classmethod
    def bypassed(cls, module: nn.Module) -> dict[str, nn.Module]:
        """All submodules but the linear layers."""
        linears = _linears(module)
        parts = super().bypassed(module)
        return {name: part for name, part in parts.items() if name.partition(".")[0] not in linears}

    @classmethod
    def is_worth_listing(cls, module: nn.Module) -> bool:
        """Modules whose forward takes one argument and no more."""
        return len(probing.positional_defaults(module.forward)) == 1


@dataclass(frozen=True)
class GatedExperts(Replacement):
    """The gate of experts with stacked weights."""

    gate: Gate

    method: ClassVar[str] = "_apply_gate"

    def __str__(self) -> str:
        return f"experts' glu_fused ({self.gate})"

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if len(args) != 1 or kwargs or not is_plain(*args) else self.gate.compute(*args)

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        """Weights of three dimensions, and the method."""
        stacked = any(p is not None and len(probing.shape_of(p)) == 3 for p in module._parameters.values())
        return stacked and callable(getattr(type(module), cls.method, None)) and getattr(module, "has_gate", True)

    @classmethod
    def match(cls, module: nn.Module) -> GatedExperts:
        """Runs the method on copies without weights, and on 64 gates: it does not depend on the weights' sizes."""
        cases = []
        with probing.isolated():
            for name, leading, dtype, training in CASES:
                generator = torch.Generator().manual_seed(13)
                copy: Any = probing.copy_of(module, generator, with_parameters=False).train(training)
                inner = [inner_values(leading, 128, dtype, generator)]
                with probing.unchanged(name, copy):
                    cases.append(case_of(name, inner, *probing.observe(copy._apply_gate, inner)))
            return GatedExperts(match_gate(module, cases))


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
                failure = error
        else:
            if name == "two dimensions":
                return None
            raise Mismatch(f"its code does not fit a gated MLP ({type(failure).__name__}: {str(failure)[:160]})")
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
    upstream = probing.random(product.shape, torch.Generator().manual_seed(7), product.dtype)
    *grads, of_input, of_output = torch.autograd.grad(product, [*leaves, x, down.values], upstream, allow_unused=True)
    if of_input is not None or of_output is not None:
        raise Mismatch(f"{name}: the last layer is given more than the product")
    names = {recorder: key for key, recorder in recorders.items()}
    case = case_of(name, [leaf.detach() for leaf in leaves], product.detach(), list(grads))
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
