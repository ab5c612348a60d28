"""Finds normalization layers by running them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.layers.layer_norm import layer_norm
from liger_losses.layers.plain import is_plain
from liger_losses.layers.rms_norm import gated_rms_norm, rms_norm
from liger_losses.patching import probing
from liger_losses.patching.probing import Mismatch
from liger_losses.patching.swap import Replacement, is_short

#: Normalizations of torch, which autocast runs in fp32 on a GPU, whatever their input.
_OF_TORCH = {F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm, torch.native_layer_norm}


@dataclass(frozen=True)
class Norm(Replacement):
    """An RMS norm, gated RMS norm or layer norm over the last dimension.

    Attributes:
        function: the kernel.
        parameters: the names of the module's weight and bias; ``None`` for no weight.
        options: keyword arguments of the kernel, among them the module's eps; if that changes, the module is restored.
        gate: the name of the second argument of a gated norm.
        of_torch: whether it calls one of torch's normalizations, a single operation, whose input autocast casts to
            fp32 on a GPU.
    """

    function: Callable[..., Tensor]
    parameters: tuple[str | None, ...]
    options: tuple[tuple[str, Any], ...]
    gate: str | None = None
    of_torch: bool = False

    def __str__(self) -> str:
        options = dict(self.options)
        details = (
            f"{options['offset']:g} + weight" if options.get("offset") else "",
            "fp32" if options.get("multiply") == "fp32" else "",
            "gate first" if options.get("gate_first") else "",
        )
        return self.function.__name__ + (f" ({', '.join(filter(None, details))})" if any(details) else "")

    def compute(self, module: nn.Module, *inputs: Tensor, backend: str | None = None) -> Tensor:
        """The normalized first input ``[..., H]``, with the module's parameters."""
        parameters = [None if name is None else getattr(module, name) for name in self.parameters]
        return self.function(*inputs, *parameters, backend=backend, **dict(self.options))

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.gate is not None and list(kwargs) == [self.gate]:
            args, kwargs = (*args, kwargs[self.gate]), {}
        if kwargs or len(args) != (1 if self.gate is None else 2):
            return NotImplemented
        parameters = [getattr(module, name) for name in self.parameters if name is not None]
        if not is_plain(*args, *parameters) or (self.gate is not None and args[0].shape != args[1].shape):
            return NotImplemented
        x, *gate = args
        if self.of_torch and is_short(x):
            return NotImplemented
        if autocast_dtype(x.device) is None:
            return self.function(*args, *(parameters or (None,)), **dict(self.options))
        if self.of_torch and x.device.type != "cpu" and x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()
        with torch.autocast(x.device.type, enabled=False):
            return self.compute(module, x, *gate)

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        """No children or buffers, and at most two parameters, vectors of one size."""
        shapes = [probing.shape_of(p) for p in module.parameters(recurse=False)]
        vectors = len(shapes) <= 2 and all(len(shape) == 1 for shape in shapes) and len(set(shapes)) <= 1
        return vectors and not any(True for _ in module.children()) and not any(True for _ in module.buffers())

    @classmethod
    def match(cls, module: nn.Module) -> Norm:
        """A second argument is tried as a gate first; one that is None by default may also be left out."""
        defaults = probing.positional_defaults(module.forward)
        required = sum(default is probing.REQUIRED for default in defaults.values())
        if not 1 <= required <= 2:
            raise Mismatch(f"its forward takes {required} arguments")
        gates = [name for name in list(defaults)[1:2] if required == 2 or defaults[name] is None]
        mismatches = []
        for gate in (*gates, None):
            try:
                cases = list(probing.cases_of(module, partial(_inputs, module, gate), (2e-5, 2**-6)))
                norm = probing.first_match(_candidates(module, gate), cases)
                with probing.Functions() as functions:
                    cases[0].module(*cases[0].inputs)
            except Mismatch as mismatch:
                mismatches.append(mismatch)
            else:
                return replace(norm, of_torch=bool(functions.called & _OF_TORCH))
        raise mismatches[0]

    @classmethod
    def is_worth_listing(cls, module: nn.Module) -> bool:
        """Modules with parameters, and those whose class is named a norm."""
        return any(True for _ in module.parameters()) or "norm" in type(module).__name__.lower()


def _candidates(module: nn.Module, gate: str | None) -> Iterator[Norm]:
    names = tuple(name for name, _ in module.named_parameters(recurse=False))
    rms, option, choices = (gated_rms_norm, "gate_first", (False, True)) if gate else (rms_norm, "offset", (0.0, 1.0))
    multiplied = itertools.product(("cast_first", "fp32"), choices if len(names) < 2 else ())
    forms: list[tuple[Any, Any]] = [(rms, (("multiply", by), (option, choice))) for by, choice in multiplied]
    forms += [] if gate else [(layer_norm, ())]
    # The module's own numbers first, then the constants in the code of some models.
    for eps in dict.fromkeys([*probing.floats_of(module), 1e-5, 1e-6]):
        for (function, options), order in itertools.product(forms, dict.fromkeys((names, names[::-1]))):
            if 0 <= eps < 1:
                yield Norm(function, order or (None,), (("eps", eps), *options), gate)


#: The scales of the input's rows: eps decides the smallest, and a clamp would show in the largest.
_SCALES = (0.0, 1e-7, 3e-4, 3e-3, 0.1, 1.0, 300.0, 1e5)


def _inputs(
    module: nn.Module, gate: str | None, leading: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> Iterator[list[Tensor]]:
    """Inputs ``[..., rows, size]`` with a row of each scale, then all of them again with one large entry; and gates.

    They have the parameters' size; without parameters, the sizes among the attributes, and any other.
    """
    sizes = [size for p in module.parameters(recurse=False) for size in probing.shape_of(p)]
    lists = [value if isinstance(value, (tuple, list)) else [value] for value in vars(module).values()]
    for size in sizes[:1] or [*(n for numbers in lists for n in numbers if type(n) is int and 8 <= n <= 65536), 48]:
        rows = probing.rows_of(_SCALES, leading, size, generator)
        # The larger it is, the harder is the gradient of a gate that is applied before the norm.
        rows[..., len(_SCALES) :, size // 3] *= 100 if gate is None else 10
        gates = [] if gate is None else [probing.random(rows.shape, generator, dtype) * 3]
        yield [rows.to(dtype), *gates]
