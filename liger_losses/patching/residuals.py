"""Finds layers that normalize sums of a residual and a block's output, by running copies, and fuses addition and norm.

A layer is run with stand-ins for its children, which record what they are given. If all that happens between the calls
of children is that their outputs are passed on and added up, the layer is that list of calls and additions.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.plain import is_plain
from liger_losses.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_and_input
from liger_losses.patching import probing
from liger_losses.patching.norms import Norm
from liger_losses.patching.probing import Mismatch
from liger_losses.patching.swap import Replacement, original_class, reason_not_to_swap, replacement_of


@dataclass(frozen=True)
class Call:
    """The call of a child. Sources are ``("value", number)``, ``("input", name)`` or ``("constant", value)``.

    Attributes:
        child: its name.
        args, kwargs: where its arguments come from.
        passes_on: whether it also gets the keyword arguments that the layer has no parameter for.
    """

    child: str
    args: tuple[tuple[str, Any], ...]
    kwargs: tuple[tuple[str, tuple[str, Any]], ...]
    passes_on: bool


@dataclass(frozen=True)
class Add:
    """The sum of two values."""

    first: int
    second: int


@dataclass(frozen=True)
class Residuals(Replacement):
    """A layer of calls and additions. Value 0 is its first argument, value i the result of step i.

    Attributes:
        steps: in the order in which the layer takes them.
        result: which value it returns.
    """

    steps: tuple[Call | Add, ...]
    result: int

    def __str__(self) -> str:
        return "add + rms_norm"

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return NotImplemented
        names = _parameters(module)
        given = {**dict(zip(names, args, strict=False)), **{name: kwargs[name] for name in names if name in kwargs}}
        x = given.get(next(iter(names)))
        if not is_plain(x) or len(args) > len(names):
            return NotImplemented
        passed_on = {name: value for name, value in kwargs.items() if name not in names}
        values: list[Any] = [x]
        for number in range(1, len(self.steps) + 1):
            if number == len(values):
                values += self._take(module, number, values, {**names, **given}, passed_on)
            for unused in _last_uses(self)[number]:
                values[unused] = None
        return values[self.result]

    def _take(
        self, module: nn.Module, number: int, values: list[Any], given: dict[str, Any], passed_on: dict[str, Any]
    ) -> list[Any]:
        """The value of a step; of a sum whose norm is the next step, also that of the norm."""
        step = self.steps[number - 1]
        if isinstance(step, Add):
            parts = values[step.first], values[step.second]
            following = self.steps[number] if number < len(self.steps) else None
            fused = _fused(module, following, number, parts)
            return [parts[0] + parts[1]] if fused is None else [fused[1], fused[0]]
        kind, source = step.args[0] if len(step.args) == 1 else ("", 0)
        fused = _fused(module, step, source, (values[source],)) if kind == "value" else None
        if fused is not None:
            values[source] = fused[1]
            return [fused[0]]
        sources: dict[str, Any] = {
            "value": values.__getitem__,
            "input": given.__getitem__,
            "constant": lambda value: value,
        }
        named = {name: sources[kind](which) for name, (kind, which) in step.kwargs}
        named |= passed_on if step.passes_on else {}
        y = getattr(module, step.child)(*(sources[kind](which) for kind, which in step.args), **named)
        return [y[0] if isinstance(y, tuple) else y]

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        """Nothing but children, among them a norm that the kernel computes."""
        if module._parameters or module._buffers or len(module._modules) < 3:
            return False
        return any(_is_norm(child) for child in module._modules.values())

    @classmethod
    def match(cls, module: nn.Module) -> Residuals:
        """Tries which children return tuples; the structure must be the same in all cases."""
        children = [name for name, child in module._modules.items() if child is not None and not _is_norm(child)]
        mismatch = None
        with probing.isolated():
            for count in range(3):
                for tuples in itertools.combinations(children, count):
                    try:
                        layer, *others = (_observe(module, tuples, *case) for case in _CASES)
                        alone = _observe(module, tuples, _F32, _F32, True, all_given=False)
                    except Mismatch as reason:
                        mismatch = mismatch or reason
                        continue
                    if any(other != layer for other in others) or alone != _with_defaults(module, layer):
                        raise Mismatch("what it computes depends on its arguments")
                    if not any(True for _ in _fusable(module, layer.steps)):
                        raise Mismatch("it normalizes no sum and no residual")
                    return layer
        raise mismatch or Mismatch("it has no children")

    @classmethod
    def key(cls, module: nn.Module) -> Any:
        children = [(name, type(child), _is_norm(child)) for name, child in module._modules.items()]
        return type(module), tuple(children), probing.attributes(module)

    @classmethod
    def bypassed(cls, module: nn.Module) -> dict[str, nn.Module]:
        """None: a norm with hooks is called."""
        return {}

    @classmethod
    def is_worth_listing(cls, module: nn.Module) -> bool:
        return False


@functools.cache
def _last_uses(layer: Residuals) -> list[list[int]]:
    """The values that no step uses after this one, by the step's number."""
    last = dict.fromkeys(range(len(layer.steps) + 1), 0) | {layer.result: len(layer.steps) + 1}
    for number, step in enumerate(layer.steps, 1):
        used = [step.first, step.second] if isinstance(step, Add) else _values_of(step)
        last.update((value, max(number, last[value])) for value in used)
        last[number] = max(number, last[number])
    return [[value for value, when in last.items() if when == number] for number in range(len(layer.steps) + 1)]


def _values_of(step: Call) -> list[int]:
    return [which for kind, which in (*step.args, *(source for _, source in step.kwargs)) if kind == "value"]


def _is_norm(child: nn.Module | None) -> bool:
    replacement = None if child is None else replacement_of(child)
    return isinstance(replacement, Norm) and replacement.function is rms_norm


def _fusable(module: nn.Module, steps: Sequence[Call | Add]) -> Iterator[Call]:
    """Calls of norms whose input is a sum, or is used again later."""
    for number, step in enumerate(steps, 1):
        if isinstance(step, Call) and _is_norm(getattr(module, step.child)) and len(step.args) == 1:
            source = step.args[0][1]
            later = any(source in (other.first, other.second) for other in steps[number:] if isinstance(other, Add))
            if later:
                yield step


def _fused(module: nn.Module, step: Any, source: int, parts: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """The norm of the sum of the parts, and the sum; ``None`` where the two must be computed one after the other."""
    if not isinstance(step, Call) or step.args != (("value", source),) or step.kwargs or step.passes_on:
        return None
    child: Any = getattr(module, step.child)
    norm = replacement_of(child)
    if not _is_norm(child) or nn.modules.module._has_any_global_hook() or reason_not_to_swap(child, {}) is not None:
        return None
    weight = None if norm.parameters[0] is None else getattr(child, norm.parameters[0])
    if not is_plain(*parts, *(() if weight is None else (weight,))) or len({part.shape for part in parts}) > 1:
        return None
    device = parts[0].device
    autocast = autocast_dtype(device) is not None
    if autocast and norm.cast_by_autocast:
        return None
    compute: Any = rms_norm_and_input if len(parts) == 1 else add_rms_norm
    with torch.autocast(device.type, enabled=False) if autocast else contextlib.nullcontext():
        found: tuple[Tensor, Tensor] = compute(*parts, weight, **dict(norm.options))
    return found


def _parameters(module: nn.Module) -> dict[str, Any]:
    """The named parameters of a layer's forward, and their defaults."""
    return _parameters_of(original_class(module).forward)


@functools.cache
def _parameters_of(forward: Any) -> dict[str, Any]:
    found = inspect.signature(forward).parameters.values()
    return {p.name: p.default for p in found if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


class _Argument:
    """Stands in for any argument but the first, and for what a child returns beside its output."""


class _Child(nn.Module):
    """Stands in for a child: records what it is given, and returns a leaf, alone or in a tuple."""

    def __init__(self, name: str, calls: list[Any], values: Tensor, in_tuple: bool) -> None:
        super().__init__()
        self.name, self.calls, self.values, self.in_tuple = name, calls, values, in_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if any(name == self.name for name, *_ in self.calls):
            raise Mismatch(f"it calls its {self.name} twice")
        output = self.values.view_as(self.values)
        self.calls.append((self.name, args, kwargs, output))
        return (output, _Argument()) if self.in_tuple else output


_F32, _B16, _F16 = torch.float32, torch.bfloat16, torch.float16
#: Dtypes of the input and of what the children return, and whether in training mode.
_CASES = ((_F32, _F32, True), (_B16, _B16, True), (_F16, _F16, True), (_F32, _B16, True), (_F32, _F32, False))
#: The scales of tokens; in half precision, some sums are infinite: some layers clamp them.
_SCALES = (1e-3, 1.0, 300.0, 5e4, 1e38)


def _random(generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    values = probing.random((3, len(_SCALES), 8), generator) * torch.tensor(_SCALES)[:, None]
    largest = 0.9 * torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype).requires_grad_()


def _observe(
    module: nn.Module,
    tuples: Sequence[str],
    dtype: torch.dtype,
    inner_dtype: torch.dtype,
    training: bool,
    all_given: bool = True,
) -> Residuals:
    """The calls and additions of a copy."""
    generator = torch.Generator().manual_seed(29)
    calls: list[Any] = []
    children = {name: child for name, child in module._modules.items() if child is not None}
    stand_ins = {name: _Child(name, calls, _random(generator, inner_dtype), name in tuples) for name in children}
    copy = probing.copy_of(module, generator, {child: stand_ins[name] for name, child in children.items()})
    copy.train(training)
    vars(copy).pop("gradient_checkpointing", None)
    original: Any = original_class(module)
    names = _parameters(module)
    others = [name for name in list(names)[1:] if all_given or names[name] is probing.REQUIRED]
    given: dict[str, Any] = {name: _Argument() for name in others}
    signature = inspect.signature(original.forward).parameters.values()
    extra = {"liger_unknown": _Argument()} if any(p.kind is p.VAR_KEYWORD for p in signature) else {}
    x = _random(generator, dtype)
    hidden = x.view_as(x)
    state = torch.get_rng_state()
    try:
        output = original.forward(copy, hidden, **given, **extra)
    except Mismatch:
        raise
    except Exception as error:
        raise Mismatch(f"it fails on stand-ins ({type(error).__name__}: {str(error)[:120]})") from error
    if not torch.equal(state, torch.get_rng_state()):
        raise Mismatch("it draws random numbers")
    leaves = [x, *(stand_in.values for stand_in in stand_ins.values())]
    found = _Steps(hidden)
    for name, args, kwargs, out in calls:
        passes_on = bool(extra) and all(kwargs.get(key) is value for key, value in extra.items())
        positional = tuple(found.source(value, given) for value in args)
        named = {key: found.source(value, given) for key, value in kwargs.items() if key not in extra}
        found.add(Call(name, positional, tuple(named.items()), passes_on), out)
    if any(leaf._version for leaf in leaves):
        raise Mismatch("it changes what it is given in place")
    if type(output) is not Tensor:
        raise Mismatch(f"it returns a {type(output).__name__}, not a tensor")
    result = found.number(output)
    return Residuals(tuple(found.steps), result)


class _Steps:
    """The calls and additions found so far, and their values."""

    def __init__(self, hidden: Tensor) -> None:
        self.values = [hidden]
        self.steps: list[Call | Add] = []

    def add(self, step: Call | Add, value: Tensor) -> None:
        self.steps.append(step)
        self.values.append(value)

    def number(self, tensor: Tensor) -> int:
        """Which value a tensor is; a sum of two values is added to them."""
        numbers = range(len(self.values))
        for number in numbers:
            if self.values[number] is tensor:
                return number
        for first, second in itertools.combinations(numbers, 2):
            if _is_sum(tensor, self.values[first], self.values[second]):
                self.add(Add(first, second), tensor)
                return len(self.values) - 1
        raise Mismatch("it computes more than sums between the calls of its children")

    def source(self, value: Any, given: dict[str, Any]) -> tuple[str, Any]:
        """Where an argument of a child comes from."""
        if isinstance(value, Tensor):
            return "value", self.number(value)
        for name, argument in given.items():
            if argument is value:
                return "input", name
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise Mismatch(f"it gives a child a {type(value).__name__} that is not an argument of its own")
        return "constant", value


def _is_sum(tensor: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether a tensor was computed by adding these two, as they are: the output of a child may have another shape than
    its stand-in's, so that a view of it matters."""
    node = tensor.grad_fn
    if node is None or node.name() != "AddBackward0":
        return False
    nodes = [after for after, _ in node.next_functions]
    return nodes in ([first.grad_fn, second.grad_fn], [second.grad_fn, first.grad_fn]) and torch.equal(
        tensor, first + second
    )


def _with_defaults(module: nn.Module, layer: Residuals) -> Residuals:
    """The layer where all inputs that have defaults are left out."""
    defaults = _parameters(module)

    def replaced(source: tuple[str, Any]) -> tuple[str, Any]:
        kind, which = source
        known = kind == "input" and defaults[which] is not probing.REQUIRED
        return ("constant", defaults[which]) if known else source

    def step_of(step: Call | Add) -> Call | Add:
        if isinstance(step, Add):
            return step
        kwargs = tuple((name, replaced(source)) for name, source in step.kwargs)
        return Call(step.child, tuple(map(replaced, step.args)), kwargs, step.passes_on)

    return Residuals(tuple(map(step_of, layer.steps)), layer.result)
