"""Recognises gated MLPs by running them with their linear layers replaced by recorders.

The layers themselves stay and are called as before, so that adapters and quantisation go on working: what is replaced
is what happens between them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.kernels.glu import glu, glu_fused
from liger_losses.patching.probing import (
    Mismatch,
    attributes,
    check_close,
    copy_of,
    floats_of,
    isolated,
    observe,
    random,
)
from liger_losses.patching.swap import is_plain


@dataclass(frozen=True)
class GatedMLP:
    """``down(act(gate(x)) * up(x))``.

    Attributes:
        inner: the names of the layers applied to the input, in the order of their calls: two, or one that gives both.
        down: the name of the layer applied to the product.
        layout: where the gate is: ``first`` or ``second`` of two layers or halves, or ``interleaved`` with ``up``.
        activation, limit, alpha, up_offset: as in :func:`~liger_losses.kernels.glu.glu`.
    """

    inner: tuple[str, ...]
    down: str
    layout: str
    activation: str
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0

    def __str__(self) -> str:
        details = [self.activation] + ([f"limit {self.limit:g}"] if self.limit is not None else [])
        return f"{'glu' if len(self.inner) == 2 else 'glu_fused'} ({', '.join(details)})"

    def compute(self, *inner: Tensor, backend: str | None = None) -> Tensor:
        """The product, from what the inner layers returned."""
        formula: Any = {
            "activation": self.activation,
            "limit": self.limit,
            "alpha": self.alpha,
            "up_offset": self.up_offset,
            "backend": backend,
        }
        if len(inner) == 1 and self.layout != "second":
            return glu_fused(inner[0], interleaved=self.layout == "interleaved", **formula)
        first, second = inner if len(inner) == 2 else inner[0].chunk(2, -1)
        return glu(second, first, **formula) if self.layout == "second" else glu(first, second, **formula)

    def forward(self, original: type[nn.Module]) -> Callable[..., Any]:
        """The forward of the module's new class; calls of another form, or on other tensors, go to the original."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs or not is_plain(*args):
                return original.forward(module, *args, **kwargs)
            inner = [getattr(module, name)(args[0]) for name in self.inner]
            return getattr(module, self.down)(self.compute(*inner))

        return forward


REPLACEMENT = GatedMLP


def is_worth_listing(module: nn.Module) -> bool:
    """Whether a module that is not recognised belongs into the report: every candidate."""
    return True


def key_of(module: nn.Module) -> Any:
    """Modules with the same key compute the same between their linear layers."""
    linears = {name: (child.in_features, child.out_features) for name, child in _linears(module).items()}
    others = tuple(
        (name, type(child), attributes(child), repr(child))
        for name, child in module._modules.items()
        if child is not None and name not in linears
    )
    return type(module), tuple(linears.items()), others, attributes(module)


def is_candidate(module: nn.Module) -> bool:
    """Whether a module has the build of a gated MLP: three linear layers or two, and nothing else that learns."""
    linears = _linears(module)
    if len(linears) not in (2, 3) or module._parameters or module._buffers:
        return False
    for name, child in module._modules.items():
        if name not in linears and child is not None and next(child.parameters(), None) is not None:
            return False
    # Three of which two are alike, or two of which one gives gate and up.
    wide = [child.out_features // (2 if len(linears) == 2 else 1) for child in linears.values()]
    narrow = [child.in_features for child in linears.values()]
    if not any(narrow.count(size) >= 1 and wide.count(size) >= len(linears) - 1 for size in set(wide)):
        return False
    parameters = inspect.signature(module.forward).parameters.values()
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) == 1


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
        cases = [case for case in (_observe(module, *case) for case in _CASES) if case is not None]
        inner, down = cases[0].inner, cases[0].down
        if any((case.inner, case.down) != (inner, down) for case in cases):
            raise Mismatch("it calls its layers in different orders")
        furthest: tuple[int, str] = -1, "no known formula fits"
        for candidate in _candidates(module, inner, down):
            try:
                for number, case in enumerate(cases):
                    at = number
                    case.check(candidate)
            except Mismatch as mismatch:
                if at > furthest[0]:
                    furthest = at, f"not {candidate}: in {mismatch}"
                continue
            return candidate
    raise Mismatch(furthest[1])


def _candidates(module: nn.Module, inner: tuple[str, ...], down: str) -> Iterator[GatedMLP]:
    layouts = ("first", "second") if len(inner) == 2 else ("first", "second", "interleaved")
    for layout in layouts:
        for activation in ("silu", "gelu", "gelu_tanh"):
            yield GatedMLP(inner, down, layout, activation)
        for limit in floats_of(module):
            if limit <= 0:
                continue
            yield GatedMLP(inner, down, layout, "silu", limit)
            for alpha in floats_of(module):
                for up_offset in (0.0, 1.0):
                    yield GatedMLP(inner, down, layout, "silu", limit, alpha, up_offset)


#: Leading dimensions of the input, dtype, and the mode.
_CASES = (
    ("float32", (2, 9), torch.float32, True),
    ("bfloat16", (2, 9), torch.bfloat16, True),
    ("evaluation", (2, 9), torch.float32, False),
    ("two dimensions", (18,), torch.float32, True),
)
#: How large the rows of gate and up are: to where a clamp would show.
_SCALES = (0.0, 0.01, 0.3, 1.0, 2.0, 4.0, 10.0, 30.0, 300.0)


@dataclass
class _Case:
    name: str
    inner: tuple[str, ...]
    down: str
    #: What the inner layers gave, what the last one was given, and the gradients of that.
    answers: list[Tensor]
    product: Tensor
    grads: list[Tensor | None]
    half: bool

    def check(self, candidate: GatedMLP) -> None:
        expected = observe(lambda *inner: candidate.compute(*inner, backend="torch"), self.answers)
        check_close(f"{self.name}: the product", self.product, expected.output, 1e-5, 2**-6 if self.half else None)
        for actual, wanted in zip(self.grads, expected.grads, strict=True):
            check_close(f"{self.name}: the gradient", actual, wanted, 2**-6 if self.half else 1e-5)


def _observe(
    module: nn.Module, name: str, leading: tuple[int, ...], dtype: torch.dtype, training: bool
) -> _Case | None:
    generator = torch.Generator().manual_seed(13)
    calls: list[_Recorder] = []
    recorders = {key: _Recorder(child, calls) for key, child in _linears(module).items()}
    copy = copy_of(module, generator, {getattr(module, key): recorder for key, recorder in recorders.items()})
    copy.train(training)
    before = attributes(copy)
    answers: dict[_Recorder, Tensor] = {}

    def answer(recorder: _Recorder) -> Callable[[Tensor], Tensor]:
        shape = (*leading, recorder.out_features)
        scales = torch.tensor(_SCALES).repeat(2).view(*leading, 1)
        answers[recorder] = (random(shape, generator) * scales).to(dtype).requires_grad_()
        return lambda given: answers[recorder].view_as(answers[recorder])

    for recorder in recorders.values():
        recorder.answer = answer(recorder)
    size = next(iter(recorders.values())).in_features
    sizes = {recorder.in_features for recorder in recorders.values()}
    for size in sizes:
        x = random((*leading, size), generator, dtype).requires_grad_()
        calls.clear()
        state = torch.get_rng_state()
        try:
            output = copy(x)
        except Exception as error:
            failure = error
            continue
        break
    else:
        if name == "two dimensions":
            return None
        raise Mismatch(f"its code does not fit a gated MLP ({type(failure).__name__}: {str(failure)[:160]})")
    if len(calls) != len(recorders) or len(set(calls)) != len(calls):
        raise Mismatch(f"{name}: it does not call each of its layers once")
    if not torch.equal(state, torch.get_rng_state()):
        raise Mismatch(f"{name}: it draws random numbers")
    if attributes(copy) != before:
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
    return _Case(
        name,
        tuple(names[recorder] for recorder in inner),
        names[down],
        [leaf.detach() for leaf in leaves],
        product.detach(),
        list(grads),
        dtype is torch.bfloat16,
    )


def _check_same(what: str, actual: Any, expected: Tensor) -> None:
    """Raise Mismatch unless a tensor is another one, unchanged, for gradients too."""
    if type(actual) is not Tensor and actual is not expected:
        raise Mismatch(f"{what} is not a tensor")
    if actual.shape != expected.shape or actual.dtype != expected.dtype or not torch.equal(actual, expected):
        raise Mismatch(f"{what} is changed")
    upstream = random(expected.shape, torch.Generator().manual_seed(5), expected.dtype)
    (grad,) = torch.autograd.grad(actual, expected, upstream, allow_unused=True, retain_graph=True)
    if grad is None or not torch.equal(grad, upstream):
        raise Mismatch(f"{what} does not pass gradients on")
