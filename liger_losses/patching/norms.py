"""Finds normalization layers by running them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.layer_norm import layer_norm
from liger_losses.kernels.plain import is_plain
from liger_losses.kernels.rms_norm import gated_rms_norm, rms_norm
from liger_losses.patching.kinds import PatchKind
from liger_losses.patching.probing import (
    REQUIRED,
    Case,
    Functions,
    Mismatch,
    copy_of,
    first_match,
    floats_of,
    isolated,
    observe,
    positional_defaults,
    random,
    shape_of,
    unchanged,
)

#: Operations that autocast runs in fp32 on a GPU, whatever their input.
_CAST_BY_AUTOCAST = {F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm, torch.native_layer_norm}

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Norm:
    """A normalization over the last dimension.

    Attributes:
        kind: ``rms_norm``, ``gated_rms_norm`` or ``layer_norm``.
        eps: the module's at the time of patching.
        weight, bias: the names of the module's parameters.
        offset, multiply: as in :func:`~liger_losses.kernels.rms_norm.rms_norm`.
        gate: the name of the second argument of a gated norm.
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
        """The normalized ``x [..., H]``, with the module's parameters."""
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
        """The forward of the module's new class; calls that were not probed go to the original forward."""

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


class _Norms(PatchKind):
    """Normalizations over the last dimension: RMS norm, gated RMS norm and layer norm."""

    replacement = Norm

    def is_candidate(self, module: nn.Module) -> bool:
        """No children or buffers, and at most two parameters, vectors of one size."""
        if module._modules or module._buffers:
            return False
        shapes = [shape_of(p) for p in module._parameters.values() if p is not None]
        return len(shapes) <= 2 and all(len(shape) == 1 for shape in shapes) and len(set(shapes)) <= 1

    def match(self, module: nn.Module) -> Norm:
        """A second argument is tried as a gate first; one that is optional may also be left out."""
        mismatches = []
        for gate in (*_tensor_arguments(module)[1:2], None):
            try:
                return _match(module, gate)
            except Mismatch as mismatch:
                mismatches.append(mismatch)
        raise mismatches[0]

    def is_worth_listing(self, module: nn.Module) -> bool:
        """Modules with parameters, and those whose class is named a norm."""
        return bool(module._parameters) or "norm" in type(module).__name__.lower()


NORMS = _Norms()


def _tensor_arguments(module: nn.Module) -> list[str]:
    """The arguments that may be tensors: the required ones, and a second one that may be None."""
    defaults = positional_defaults(module.forward)
    required = [name for name, default in defaults.items() if default is REQUIRED]
    if not 1 <= len(required) <= 2:
        raise Mismatch(f"its forward takes {len(required)} arguments")
    return required + [name for name in list(defaults)[1:2] if defaults[name] is None]


def _match(module: nn.Module, gate: str | None) -> Norm:
    functions = Functions()
    with isolated():
        norm = first_match(_candidates(module, gate), _cases(module, gate, functions))
    return replace(norm, cast_by_autocast=bool(functions.called & _CAST_BY_AUTOCAST))


def _candidates(module: nn.Module, gate: str | None) -> Iterator[Norm]:
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    # The module's own numbers first, then the constants in the code of some models.
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


#: The scales of the input's rows: eps decides the smallest, and a clamp would show in the largest.
_SCALES = (0.0, 1e-7, 3e-4, 3e-3, 0.1, 1.0, 300.0, 1e5)
_F32, _B16 = torch.float32, torch.bfloat16
#: Leading dimensions of the input, dtypes of the input and of the parameters, and whether in training mode.
_CASES = {
    "float32": ((2, 2), _F32, _F32, True),
    "bfloat16": ((2, 2), _B16, _B16, True),
    "evaluation": ((2, 2), _F32, _F32, False),
    "two dimensions": ((1,), _F32, _F32, True),
    "four dimensions": ((2, 1, 3), _F32, _F32, True),
    "bfloat16 with float32 parameters": ((2, 2), _B16, _F32, True),
    "float32 with bfloat16 parameters": ((2, 2), _F32, _B16, True),
    "evaluation in bfloat16": ((2, 2), _B16, _B16, False),
}
#: Cases in which a module may fail: then no model uses it so.
_OPTIONAL = (
    "two dimensions",
    "four dimensions",
    "bfloat16 with float32 parameters",
    "float32 with bfloat16 parameters",
)


def _cases(module: nn.Module, gate: str | None, functions: Functions) -> Iterator[Case]:
    for name, (leading, dtype, parameter_dtype, training) in _CASES.items():
        generator = torch.Generator().manual_seed(11)
        copy = copy_of(module, generator).to(parameter_dtype).train(training)
        if not training:
            with torch.no_grad():
                for parameter in copy.parameters():
                    parameter.mul_(100)  # so that a clamp of the output shows
        parameters = dict(copy.named_parameters())
        with unchanged(name, copy):
            for size in _sizes(module):
                inputs = [_rows(leading, size, dtype, generator, 100 if gate is None else 10)]
                if gate is not None:
                    inputs.append(random(inputs[0].shape, generator, dtype) * 3)
                try:
                    with functions:
                        observed = observe(copy, inputs, list(parameters.values()))
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
        half = _B16 in (dtype, parameter_dtype)
        yield Case(
            name,
            inputs,
            observed,
            lambda norm, copy=copy: partial(norm.compute, copy, backend="torch"),  # type: ignore[misc]
            tolerance=1e-5,
            rare=2**-6 if half else None,
            grad_tolerance=2**-6 if half else 2e-5,
            # Gradients of a weight are sums over rows, some of which PyTorch itself takes in half precision.
            parameters=parameters,
            parameter_tolerance=2**-4 if half else 2e-5,
        )


def _sizes(module: nn.Module) -> list[int]:
    """The parameters' size; without parameters, the sizes among the attributes, and any other."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return list(shape_of(parameter))
    numbers: list[int] = []
    for value in vars(module).values():
        for number in value if isinstance(value, (tuple, list)) else [value]:
            if type(number) is int and 8 <= number <= 65536:
                numbers.append(number)
    return [*numbers, 48]


def _rows(leading: tuple[int, ...], size: int, dtype: torch.dtype, generator: torch.Generator, spike: int) -> Tensor:
    """Inputs ``[..., rows, size]`` with a row of each scale, then all of them again with one large entry, the spike.

    The larger the spike, the harder is the gradient of a gate that is applied before the norm.
    """
    scales = torch.tensor(_SCALES).repeat(2)
    rows = random((*leading, len(scales), size), generator) * scales[:, None]
    rows += 0.5 * scales[:, None]
    rows[..., len(_SCALES) :, size // 3] *= spike
    return rows.to(dtype)
