"""Recognises gated MLPs by running them with their linear layers replaced by recorders.

The layers themselves stay and are called as before, so that adapters and quantisation go on working: what is replaced
is what happens between them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_losses.kernels.plain import is_plain
from liger_losses.patching.gates import CASES, Case, Gate, find, inner_values
from liger_losses.patching.probing import Mismatch, Observed, attributes, children_of, copy_of, isolated, random


@dataclass(frozen=True)
class GatedMLP:
    """``down(act(gate(x)) * up(x))``.

    Attributes:
        inner: the names of the layers applied to the input, in the order of their calls: two, or one that gives both.
        down: the name of the layer applied to the product.
        gate: the product.
    """

    inner: tuple[str, ...]
    down: str
    gate: Gate

    method: ClassVar[str] = "forward"

    def __str__(self) -> str:
        return f"{'glu' if len(self.inner) == 2 else 'glu_fused'} ({self.gate})"

    def replace(self, original: type[nn.Module]) -> Callable[..., Any]:
        """The forward of the module's new class; calls of another form, or on other tensors, go to the original."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs or not is_plain(*args):
                return original.forward(module, *args, **kwargs)
            inner = [getattr(module, name)(args[0]) for name in self.inner]
            return self.gate.into(getattr(module, self.down), *inner)

        return forward


REPLACEMENT = GatedMLP


def is_worth_listing(module: nn.Module) -> bool:
    """Whether a module that is not recognised belongs into the report: not if it takes more than one tensor."""
    return _arguments(module)[1] == 1


def bypassed(module: nn.Module) -> dict[str, nn.Module]:
    """The children that the replacement does not call: all but the linear layers."""
    linears = _linears(module)
    return {
        f"{name}.{inner}".strip("."): part
        for name, child in module._modules.items()
        if child is not None and name not in linears
        for inner, part in child.named_modules()
    }


def key_of(module: nn.Module) -> Any:
    """Modules with the same key compute the same between their linear layers."""
    linears = {name: (child.in_features, child.out_features) for name, child in _linears(module).items()}
    return type(module), tuple(linears.items()), children_of(module, linears), attributes(module)


def is_candidate(module: nn.Module) -> bool:
    """Whether a module has the build of a gated MLP: three linear layers or two, and nothing else that learns."""
    linears = _linears(module)
    if len(linears) not in (2, 3) or module._parameters or module._buffers:
        return False
    if any(part._parameters or part._buffers for part in bypassed(module).values()):
        return False
    # Three of which two are alike, or two of which one gives gate and up.
    wide = [child.out_features // (2 if len(linears) == 2 else 1) for child in linears.values()]
    narrow = [child.in_features for child in linears.values()]
    if not any(narrow.count(size) >= 1 and wide.count(size) >= len(linears) - 1 for size in set(wide)):
        return False
    required, _ = _arguments(module)
    return required == 1


def _arguments(module: nn.Module) -> tuple[int, int]:
    """How many positional arguments its forward requires, and how many it takes."""
    parameters = inspect.signature(module.forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional), len(positional)


def _linears(module: nn.Module) -> dict[str, Any]:
    """The children that map features to features: linear layers, quantised ones, and adapters around them."""
    return {
        name: child
        for name, child in module._modules.items()
        if type(getattr(child, "in_features", None)) is int and type(getattr(child, "out_features", None)) is int
    }


class _Recorder(nn.Module):
    """Stands in for a linear layer: keeps what it is given, and gives what it was told to."""

    def __init__(self, linear: Any, calls: list[_Recorder]) -> None:
        super().__init__()
        self.in_features, self.out_features, self.calls = linear.in_features, linear.out_features, calls
        self.given: Tensor | None = None
        self.answer: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise Mismatch(f"a layer for {self.in_features} features is given {x.shape[-1]}")
        self.calls.append(self)
        self.given = x
        return self.answer(x)


def recognise(module: nn.Module) -> GatedMLP:
    """Which gated MLP a module computes, found on copies without its weights.

    Raises:
        Mismatch: none that there is a kernel for; the message says how the nearest one differs.
    """
    with isolated():
        observed = [case for case in (_observe(module, *case) for case in CASES) if case is not None]
        inner, down, _ = observed[0]
        if any(names != [inner, down] for *names, _ in observed):
            raise Mismatch("it calls its layers in different orders")
        return GatedMLP(inner, down, find(module, [case for *_, case in observed]))


def _observe(
    module: nn.Module, name: str, leading: tuple[int, ...], dtype: torch.dtype, training: bool
) -> tuple[tuple[str, ...], str, Case] | None:
    """The names of the inner layers and of the last one, and what the module gave to the last one."""
    generator = torch.Generator().manual_seed(13)
    calls: list[_Recorder] = []
    recorders = {key: _Recorder(child, calls) for key, child in _linears(module).items()}
    copy = copy_of(module, generator, {getattr(module, key): recorder for key, recorder in recorders.items()})
    copy.train(training)
    before = attributes(copy), children_of(copy, recorders)
    answers: dict[_Recorder, Tensor] = {}

    def answer(recorder: _Recorder) -> Callable[[Tensor], Tensor]:
        answers[recorder] = inner_values(leading, recorder.out_features, dtype, generator).requires_grad_()
        return lambda given: answers[recorder].view_as(answers[recorder])

    for recorder in recorders.values():
        recorder.answer = answer(recorder)
    state = torch.get_rng_state()
    try:
        x, output = _call(copy, recorders.values(), leading, dtype, generator)
    except Mismatch:
        if name == "two dimensions":
            return None  # no model calls it so
        raise
    if len(calls) != len(recorders) or len(set(calls)) != len(calls):
        raise Mismatch(f"{name}: it does not call each of its layers once")
    if not torch.equal(state, torch.get_rng_state()):
        raise Mismatch(f"{name}: it draws random numbers")
    if (attributes(copy), children_of(copy, recorders)) != before:
        raise Mismatch(f"{name}: it changes its own attributes")
    *inner, down = calls
    for recorder in inner:
        _check_same(f"{name}: the input of a layer", recorder.given, x)
    _check_same(f"{name}: the output", output, answers[down])
    product, leaves = down.given, [answers[recorder] for recorder in inner]
    if product is None or not product.requires_grad:
        raise Mismatch(f"{name}: no gradient reaches its inner layers")
    upstream = random(product.shape, torch.Generator().manual_seed(7), product.dtype)
    others = [x, answers[down]]
    *grads, to_input, to_output = torch.autograd.grad(product, [*leaves, *others], upstream, allow_unused=True)
    if to_input is not None or to_output is not None:
        raise Mismatch(f"{name}: the last layer is given more than the product")
    names = {recorder: key for key, recorder in recorders.items()}
    case = Case(name, [leaf.detach() for leaf in leaves], Observed(product.detach(), list(grads)))
    return tuple(names[recorder] for recorder in inner), names[down], case


def _call(
    copy: nn.Module,
    recorders: Iterable[_Recorder],
    leading: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Tensor, Any]:
    """An input of the size that the module takes, and what it returns for it."""
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
    """Raise Mismatch unless a tensor is another one, unchanged, for gradients too."""
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
