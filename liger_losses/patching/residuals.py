"""Finds layers that normalize sums of a residual and a block's output, by running copies, and fuses addition and norm.

A layer is run with stand-ins for its children, which record what they are given. If all that happens between the calls
of children is that their outputs are passed on and added up, the layer is that list of calls and additions.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
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
        first_of_tuple: whether the layer takes the first value of a tuple that the child returns; else it uses the
            tuple itself.
    """

    child: str
    args: tuple[tuple[str, Any], ...]
    kwargs: tuple[tuple[str, tuple[str, Any]], ...]
    passes_on: bool
    first_of_tuple: bool = False


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
        reads: the layer's own attributes that its forward reads, with their values then.
    """

    steps: tuple[Call | Add, ...]
    result: int
    reads: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "add + rms_norm"

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return NotImplemented
        if any(getattr(module, name) != value for name, value in self.reads):
            return NotImplemented
        names, takes_others = _parameters(module)
        given = {**names, **dict(zip(names, args, strict=False))}
        passed_on: dict[str, Any] = {}
        for name, value in kwargs.items():
            (given if name in names else passed_on)[name] = value
        x = given[next(iter(names))]
        twice = not kwargs.keys().isdisjoint(itertools.islice(names, len(args)))
        wrong = twice or (passed_on and not takes_others) or len(args) > len(names)
        if wrong or not is_plain(x) or any(value is probing.REQUIRED for value in given.values()):
            return NotImplemented
        values: list[Any] = [x]
        for number, unused in enumerate(self._last_uses, 1):
            if number == len(values):
                values += self._take(module, number, values, given, passed_on)
            for value in unused:
                values[value] = None
        return values[self.result]

    @functools.cached_property
    def _last_uses(self) -> list[list[int]]:
        """For each step, the values that no step after it uses."""
        steps = list(enumerate(self.steps, 1))
        last = {self.result: len(steps) + 1}
        for number, step in reversed(steps):
            for value in (number, *([step.first, step.second] if isinstance(step, Add) else _values_of(step))):
                last.setdefault(value, number)
        return [[value for value, when in last.items() if when == number] for number, _ in steps]

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

        def found(source: tuple[str, Any]) -> Any:
            kind, which = source
            return which if kind == "constant" else (values if kind == "value" else given)[which]

        named = {name: found(source) for name, source in step.kwargs}
        named |= passed_on if step.passes_on else {}
        y = getattr(module, step.child)(*map(found, step.args), **named)
        return [y[0] if step.first_of_tuple and isinstance(y, tuple) else y]

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
                    reads: dict[str, Any] = {}
                    try:
                        layer, *others = (_observe(module, tuples, *case, reads=reads) for case in _CASES)
                        alone = _observe(module, tuples, _F32, _F32, True, _WIDE, reads=reads, all_given=False)
                    except Mismatch as reason:
                        mismatch = mismatch or reason
                        continue
                    if any(other != layer for other in others) or alone != _with_defaults(module, layer):
                        raise Mismatch("what it computes depends on its arguments")
                    if not any(True for _ in _fusable(module, layer.steps)):
                        raise Mismatch("it normalizes no sum and no residual")
                    either = [name for name in children if name not in tuples and _same(module, layer, tuples, name)]
                    return _with_first(layer, {*tuples, *either}, reads)
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


def _parameters(module: nn.Module) -> tuple[dict[str, Any], bool]:
    """The named parameters of a layer's forward with their defaults, and whether it takes others (``**kwargs``)."""
    return _parameters_of(original_class(module).forward)


@functools.cache
def _parameters_of(forward: Any) -> tuple[dict[str, Any], bool]:
    found = inspect.signature(forward).parameters.values()
    named = {p.name: p.default for p in found if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return named, any(p.kind is p.VAR_KEYWORD for p in found)


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

    def __getattr__(self, name: str) -> Any:
        raise Mismatch(f"it reads an attribute ({name}) of one of its children")

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance reads it
        raise Mismatch("it asks for the class of one of its children")


_F32, _B16, _F16 = torch.float32, torch.bfloat16, torch.float16
_NARROW, _WIDE = (3, 1, 8), (2, 2, 6)
#: Dtypes of the input and of what the children return, whether in training mode, and the input's shape.
_CASES = (
    (_F32, _F32, True, _NARROW),
    (_B16, _B16, True, _NARROW),
    (_F16, _F16, True, _NARROW),
    (_F32, _B16, True, _NARROW),
    (_B16, _F32, True, _NARROW),
    (_F32, _F32, False, _WIDE),
)
#: The scales of tokens; in half precision, some sums are infinite: some layers clamp them.
_SCALES = (1e-3, 1.0, 300.0, 5e4, 1e38)


def _random(generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, int, int]) -> Tensor:
    """Values ``[batch, repeats * scales, width]``."""
    batch, repeats, width = shape
    scales = torch.tensor(_SCALES).repeat(repeats)
    values = probing.random((batch, len(scales), width), generator) * scales[:, None]
    largest = 0.9 * torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype).requires_grad_()


def _observe(
    module: nn.Module,
    tuples: Sequence[str],
    dtype: torch.dtype,
    inner_dtype: torch.dtype,
    training: bool,
    shape: tuple[int, int, int],
    *,
    reads: dict[str, Any],
    all_given: bool = True,
) -> Residuals:
    """The calls and additions of a copy. The attributes that it reads are added to ``reads``."""
    generator = torch.Generator().manual_seed(29)
    calls: list[Any] = []
    children = {name: child for name, child in module._modules.items() if child is not None}
    stand_ins = {name: _Child(name, calls, _random(generator, inner_dtype, shape), name in tuples) for name in children}
    copy = probing.copy_of(module, generator, {child: stand_ins[name] for name, child in children.items()})
    copy.train(training)
    vars(copy).pop("gradient_checkpointing", None)
    original: Any = original_class(module)
    names, takes_others = _parameters(module)
    others = [name for name in list(names)[1:] if all_given or names[name] is probing.REQUIRED]
    given: dict[str, Any] = {name: _Argument() for name in others}
    unknown = {"liger_unknown", *(_strings_of(original.forward) - names.keys() if all_given else ())}
    extra = {name: _Argument() for name in unknown} if takes_others else {}
    x = _random(generator, dtype, shape)
    hidden = x.view_as(x)
    states = torch.get_rng_state(), random.getstate()
    try:
        with _watched(copy, reads):
            output = original.forward(copy, hidden, **given, **extra)
    except Mismatch:
        raise
    except Exception as error:
        raise Mismatch(f"it fails on stand-ins ({type(error).__name__}: {str(error)[:120]})") from error
    if not torch.equal(states[0], torch.get_rng_state()) or states[1] != random.getstate():
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


@contextlib.contextmanager
def _watched(module: nn.Module, reads: dict[str, Any]) -> Iterator[None]:
    """Add the attributes that are read within this context to ``reads``; raise Mismatch if any changes."""
    kind: Any = type(module)

    def __getattribute__(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if name not in probing.TORCH_ATTRIBUTES and not name.startswith("__") and not inspect.isroutine(value):
            reads[name] = value
        return value

    before = probing.attributes(module)
    module.__class__ = type(kind)(kind.__name__, (kind,), {"__getattribute__": __getattribute__})
    try:
        yield
    finally:
        module.__class__ = kind
    if inspect.unwrap(kind.forward) is not kind.forward:
        # Read by what transformers wraps around the forward; it wraps the new one, too.
        reads.pop("gradient_checkpointing", None)
    if probing.attributes(module) != before:
        raise Mismatch("it changes its own attributes")
    for name, value in reads.items():
        if not _is_simple(value):
            raise Mismatch(f"it reads its {name}, a {type(value).__name__}")


def _strings_of(forward: Any) -> set[str]:
    """The names among the strings in a function's code: it may look for keyword arguments by them."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return {value for value in getattr(code, "co_consts", ()) if isinstance(value, str) and value.isidentifier()}


def _is_simple(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _same(module: nn.Module, layer: Residuals, tuples: Sequence[str], child: str) -> bool:
    """Whether a layer computes the same if this child, too, returns a tuple."""
    try:
        return _observe(module, (*tuples, child), *_CASES[0], reads={}) == layer
    except Mismatch:
        return False


def _with_first(layer: Residuals, children: Collection[str], reads: dict[str, Any]) -> Residuals:
    """The layer that takes the first values of what these children return, and reads these attributes."""
    steps = (
        replace(step, first_of_tuple=step.child in children) if isinstance(step, Call) else step for step in layer.steps
    )
    return Residuals(tuple(steps), layer.result, tuple(sorted(reads.items())))


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
        if not _is_simple(value):
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
    defaults, _ = _parameters(module)

    def replaced(source: tuple[str, Any]) -> tuple[str, Any]:
        kind, which = source
        known = kind == "input" and defaults[which] is not probing.REQUIRED
        return ("constant", defaults[which]) if known else source

    def step_of(step: Call | Add) -> Call | Add:
        if isinstance(step, Add):
            return step
        kwargs = tuple((name, replaced(source)) for name, source in step.kwargs)
        return replace(step, args=tuple(map(replaced, step.args)), kwargs=kwargs)

    return replace(layer, steps=tuple(map(step_of, layer.steps)))
