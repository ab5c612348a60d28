"""Recognises normalisations by running them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.layer_norm import layer_norm
from liger_losses.kernels.plain import is_plain
from liger_losses.kernels.rms_norm import gated_rms_norm, rms_norm
from liger_losses.patching.probing import (
    Functions,
    Mismatch,
    Observed,
    attributes,
    check_close,
    copy_of,
    floats_of,
    isolated,
    observe,
    random,
    shape_of,
)

#: Operations that autocast runs in fp32 on a GPU, whatever their input.
_CAST_BY_AUTOCAST = {F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm, torch.native_layer_norm}

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Norm:
    """A normalisation over the last dimension.

    Attributes:
        kind: ``rms_norm``, ``gated_rms_norm`` or ``layer_norm``.
        eps: as the module has it now; change the module before patching.
        weight, bias: the names of the module's parameters.
        offset, multiply: as in :func:`~liger_losses.kernels.rms_norm.rms_norm`.
        gate: the name of the second argument, for a gated one.
        gate_first: as in :func:`~liger_losses.kernels.rms_norm.gated_rms_norm`.
        cast_by_autocast: whether autocast casts its input to fp32 on a GPU.
    """

    kind: str
    eps: float
    weight: str | None = None
    bias: str | None = None
    offset: float = 0.0
    multiply: str = "cast_first"
    gate: str | None = None
    gate_first: bool = False
    cast_by_autocast: bool = False

    method: ClassVar[str] = "forward"

    def __str__(self) -> str:
        details = [
            f"{self.offset:g} + weight" if self.offset else "",
            "fp32" if self.multiply == "fp32" and self.kind != "layer_norm" else "",
            "gate first" if self.gate_first else "",
        ]
        details = [detail for detail in details if detail]
        return self.kind + (f" ({', '.join(details)})" if details else "")

    def compute(self, module: nn.Module, x: Tensor, gate: Tensor | None = None, backend: str | None = None) -> Tensor:
        """The normalisation, with the module's parameters."""
        weight = None if self.weight is None else getattr(module, self.weight)
        if self.kind == "layer_norm":
            bias = None if self.bias is None else getattr(module, self.bias)
            return layer_norm(x, weight, bias, self.eps, backend=backend)
        if gate is not None:
            return gated_rms_norm(
                x, gate, weight, self.eps, gate_first=self.gate_first, multiply=self.multiply, backend=backend
            )
        return rms_norm(x, weight, self.eps, offset=self.offset, multiply=self.multiply, backend=backend)

    def replace(self, original: type[nn.Module]) -> Callable[..., Any]:
        """The forward of the module's new class; calls of another form, or on other tensors, go to the original."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            tensors = (*args, kwargs[self.gate]) if self.gate is not None and list(kwargs) == [self.gate] else args
            as_probed = len(tensors) == (1 if self.gate is None else 2) and len(tensors) == len(args) + len(kwargs)
            weight = None if self.weight is None else getattr(module, self.weight)
            if not as_probed or not is_plain(*tensors) or not (weight is None or is_plain(weight)):
                return original.forward(module, *args, **kwargs)
            x, *gate = tensors
            if gate and gate[0].shape != x.shape:
                return original.forward(module, *args, **kwargs)
            if autocast_dtype(x.device) is None:
                return self.compute(module, x, *gate)
            if self.cast_by_autocast and x.device.type != "cpu" and x.dtype in _HALF:
                x = x.float()
            with torch.autocast(x.device.type, enabled=False):
                return self.compute(module, x, *gate)

        return forward


REPLACEMENT = Norm


def is_worth_listing(module: nn.Module) -> bool:
    """Whether a module that is not recognised belongs into the report: one that learns, or is called a norm."""
    return bool(module._parameters) or "norm" in type(module).__name__.lower()


def bypassed(module: nn.Module) -> dict[str, nn.Module]:
    """The children that the replacement does not call: there are none."""
    return {}


def key_of(module: nn.Module) -> Any:
    """Modules with the same key compute the same."""
    parameters = tuple((name, None if p is None else shape_of(p)) for name, p in module._parameters.items())
    return type(module), parameters, attributes(module)


def is_candidate(module: nn.Module) -> bool:
    """Whether a module has the build of a normalisation: no children or buffers, one or two vectors at most."""
    if module._modules or module._buffers:
        return False
    shapes = [shape_of(p) for p in module._parameters.values() if p is not None]
    return len(shapes) <= 2 and all(len(shape) == 1 for shape in shapes) and len(set(shapes)) <= 1


def recognise(module: nn.Module) -> Norm:
    """Which normalisation a module computes, found on copies of it.

    Raises:
        Mismatch: none that there is a kernel for; the message says how the nearest one differs.
    """
    gates = _tensor_arguments(module)[1:]
    if not gates:
        return _recognise(module, None)
    try:
        return _recognise(module, gates[0])
    except Mismatch as gated:
        try:
            return _recognise(module, None)
        except Mismatch:
            raise gated from None


def _tensor_arguments(module: nn.Module) -> list[str]:
    """The names of the arguments that may be tensors: the required ones, or a second one that may be None."""
    signature = inspect.signature(module.forward)
    positional = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    if not 1 <= len(required) <= 2:
        raise Mismatch(f"its forward takes {len(required)} arguments")
    optional = [p.name for p in positional[1:2] if len(required) == 1 and p.default is None]
    return required + optional


@dataclass
class _Case:
    name: str
    module: nn.Module
    inputs: list[Tensor]
    observed: Observed
    half: bool

    def check(self, candidate: Norm) -> None:
        parameters = list(self.module.parameters())
        compute = functools.partial(candidate.compute, self.module, backend="torch")
        try:
            expected = observe(compute, self.inputs, parameters)
        except Mismatch as mismatch:
            raise Mismatch(f"{self.name}: {mismatch}") from mismatch
        rare = 2**-6 if self.half else None
        check_close(f"{self.name}: the output", self.observed.output, expected.output, 1e-5, rare)
        names = [*(f"input {number}" for number in range(len(self.inputs))), *dict(self.module.named_parameters())]
        for number, name in enumerate(names):
            # Gradients of a weight are sums over rows, which some of PyTorch's own take in half precision.
            of_half = 2**-6 if number < len(self.inputs) else 2**-4
            check_close(
                f"{self.name}: the gradient of {name}",
                self.observed.grads[number],
                expected.grads[number],
                of_half if self.half else 2e-5,
            )


def _recognise(module: nn.Module, gate: str | None) -> Norm:
    with isolated():
        functions = Functions()
        cases = []
        for case in _cases(module, gate, functions):
            cases.append(case)
            if len(cases) == 1:  # The first one tells most candidates apart, and most modules from norms.
                survivors = _survivors(list(_candidates(module, gate)), cases)
        survivors = _survivors(survivors, cases[1:])
    chosen = survivors[0]
    cast = bool(functions.called & _CAST_BY_AUTOCAST)
    return Norm(**{**vars(chosen), "cast_by_autocast": cast})


def _survivors(candidates: list[Norm], cases: list[_Case]) -> list[Norm]:
    """The candidates that agree in all cases; if none does, Mismatch from the one that came furthest."""
    survivors, furthest = [], (-1, "it has none of the known forms")
    for candidate in candidates:
        for number, case in enumerate(cases):
            try:
                case.check(candidate)
            except Mismatch as mismatch:
                if number > furthest[0]:
                    furthest = number, f"not {candidate}: in {mismatch}"
                break
        else:
            survivors.append(candidate)
    if not survivors:
        raise Mismatch(furthest[1])
    return survivors


def _candidates(module: nn.Module, gate: str | None) -> Iterator[Norm]:
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    # Those that are constants in the code of some models come after the module's own.
    for eps in dict.fromkeys([*floats_of(module), 1e-5, 1e-6]):
        if not 0 <= eps < 1:
            continue
        if len(names) == 2:
            if gate is None:
                yield Norm("layer_norm", eps, names[0], names[1])
                yield Norm("layer_norm", eps, names[1], names[0])
            continue
        weight = names[0] if names else None
        for multiply in ("cast_first", "fp32"):
            if gate is not None:
                for gate_first in (False, True):
                    yield Norm("gated_rms_norm", eps, weight, multiply=multiply, gate=gate, gate_first=gate_first)
                continue
            yield Norm("rms_norm", eps, weight, multiply=multiply)
            if weight is not None:
                yield Norm("rms_norm", eps, weight, offset=1.0, multiply=multiply)
        if gate is None:
            yield Norm("layer_norm", eps, weight)


#: How large the rows of the inputs are: from where eps is all that counts to where a clamp would show.
_SCALES = (0.0, 1e-7, 3e-4, 3e-3, 0.1, 1.0, 300.0, 1e5)
_F32, _B16 = torch.float32, torch.bfloat16

#: Layouts of the input, dtypes of the input and the parameters, and the mode.
_CASES = (
    ("float32", (2, 2), _F32, _F32, True),
    ("bfloat16", (2, 2), _B16, _B16, True),
    ("evaluation", (2, 2), _F32, _F32, False),
    ("two dimensions", (1,), _F32, _F32, True),
    ("four dimensions", (2, 1, 3), _F32, _F32, True),
    ("bfloat16 with float32 parameters", (2, 2), _B16, _F32, True),
    ("float32 with bfloat16 parameters", (2, 2), _F32, _B16, True),
    ("evaluation in bfloat16", (2, 2), _B16, _B16, False),
)
#: Cases that a module need not support; where it fails there, no model calls it so.
_OPTIONAL = (
    "two dimensions",
    "four dimensions",
    "bfloat16 with float32 parameters",
    "float32 with bfloat16 parameters",
)


def _cases(module: nn.Module, gate: str | None, functions: Functions) -> Iterator[_Case]:
    for name, layout, dtype, parameter_dtype, training in _CASES:
        generator = torch.Generator().manual_seed(11)
        copy = copy_of(module, generator).to(parameter_dtype).train(training)
        if not training:
            with torch.no_grad():
                for parameter in copy.parameters():
                    parameter.mul_(100)  # so that a clamp of the output shows
        before = attributes(copy)
        for size in _sizes(module):
            inputs = [_rows(layout, size, dtype, generator, 100 if gate is None else 10)]
            if gate is not None:
                inputs.append(random(inputs[0].shape, generator, dtype) * 3)
            try:
                with functions:
                    observed = observe(copy, inputs, list(copy.parameters()))
            except Mismatch as mismatch:
                failure = mismatch
                continue
            break
        else:
            if name in _OPTIONAL and failure.__cause__ is not None:
                continue
            raise failure
        with torch.no_grad():
            if not torch.equal(copy(*inputs), observed.output):
                raise Mismatch(f"{name}: it computes something else without gradients, or when called again")
        if attributes(copy) != before:
            raise Mismatch(f"{name}: it changes its own attributes")
        half = _B16 in (dtype, parameter_dtype)
        yield _Case(name, copy, inputs, observed, half)


def _sizes(module: nn.Module) -> list[int]:
    """The size of the parameters; where there are none, what the attributes suggest, or any."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return list(shape_of(parameter))
    numbers: list[int] = []
    for value in vars(module).values():
        for number in value if isinstance(value, (tuple, list)) else [value]:
            if type(number) is int and 8 <= number <= 65536:
                numbers.append(number)
    return [*numbers, 48]


def _rows(layout: tuple[int, ...], size: int, dtype: torch.dtype, generator: torch.Generator, spike: int) -> Tensor:
    """Rows of all scales, one after the other along a dimension before the last; then all of them with a spike.

    The gradient of a gate that comes first is the harder to compute the larger the spike.
    """
    scales = torch.tensor(_SCALES).repeat(2)
    rows = random((*layout, len(scales), size), generator) * scales[:, None]
    rows += 0.5 * scales[:, None]
    rows[..., len(_SCALES) :, size // 3] *= spike
    return rows.to(dtype)
