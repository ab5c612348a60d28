"""Finds the functions that rotate queries and keys by calling them, and replaces them in the modules that call them.

They are globals of a modeling file, which all models of a family in the process share. The kernel takes their place
only while a method of a patched module runs; other callers get it in another thread at most, with the same results.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.layers.plain import is_plain
from liger_losses.layers.rope import rope
from liger_losses.patching import probing
from liger_losses.patching.probing import Case, Mismatch
from liger_losses.patching.swap import Replacement, replaced_on_instance


@dataclass(frozen=True)
class Rotation:
    """How a function rotates queries and keys.

    Attributes:
        tensors: 2 if it takes queries and keys, 1 if it takes one of them at a time.
        interleaved: as in :func:`~liger_losses.layers.rope.rope`.
        angles: what it takes of cos and sin: ``full`` for what they are; ``all`` or ``half`` for each of their angles,
            or those of the first half, for both elements of a pair.
        sorted: whether it moves the first elements of all pairs before the second ones.
        cast_back: whether its results have the dtypes of q and k even if cos and sin have a wider one.
    """

    tensors: int = 2
    interleaved: bool = False
    angles: str = "full"
    sorted: bool = False
    cast_back: bool = False

    def __str__(self) -> str:
        details = (["interleaved"] if self.interleaved else []) + (["sorted"] if self.sorted else [])
        return "rope" + (f" ({', '.join(details)})" if details else "")

    def compute(self, angles: tuple[Tensor, Tensor, int], *heads: Tensor, backend: str | None = None) -> Any:
        """The rotated tensors, of q and k (if it takes both); ``angles`` are cos, sin and ``unsqueeze_dim``."""
        (cos, sin, unsqueeze_dim), tensors = angles, [*heads]
        if self.sorted:
            tensors = [x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in heads]
        # The kernel takes two; the second one may have no heads.
        q, k = tensors if self.tensors == 2 else (tensors[0], tensors[0].narrow(unsqueeze_dim, 0, 0))
        if self.angles != "full":
            cos, sin = self._angles(cos), self._angles(sin)
        rotated = rope(q, k, cos, sin, interleaved=self.interleaved, unsqueeze_dim=unsqueeze_dim, backend=backend)
        if self.cast_back:
            rotated = rotated[0].to(heads[0].dtype), rotated[1].to(heads[-1].dtype)
        return rotated if self.tensors == 2 else rotated[0]

    def _angles(self, x: Tensor) -> Tensor:
        x = x[..., : x.shape[-1] // 2] if self.angles == "half" else x
        return x.repeat_interleave(2, -1) if self.interleaved else torch.cat((x, x), -1)


def _with_signature(function: Any) -> Any:
    """What has the signature of a function that the package ``kernels`` may have made a module of."""
    return function.forward if isinstance(function, nn.Module) else function


def match(function: Callable[..., Any]) -> Rotation:
    """The rotation that a function computes; raises Mismatch if there is no kernel for it."""
    defaults = probing.positional_defaults(_with_signature(function))
    names = list(defaults)
    tensors = names.index("cos") if "cos" in names else 0
    needs_more = any(defaults[name] is probing.REQUIRED for name in names[tensors + 2 :])
    if tensors not in (1, 2) or names[tensors + 1 : tensors + 2] != ["sin"] or needs_more:
        raise Mismatch(f"it takes {', '.join(names)}, not one or two tensors, cos and sin")
    forms = itertools.product((False, True), ("full", "half", "all"), (False, True), (False, True))
    unsqueeze_dims = (1, 2) if "unsqueeze_dim" in names else (1,)
    cases = list[Case]()
    for unsqueeze_dim, name in itertools.product(unsqueeze_dims, _CASES):
        with contextlib.suppress(probing.Refusal):  # no model calls it so then
            cases.append(_case(function, tensors, unsqueeze_dim, name))
    # In these, every sequence has different angles.
    if not any(_CASES[case.name][1:] == (2, _F32, _F32) for case in cases):
        raise Mismatch("it does not take [batch, heads, tokens, size] with cos and sin of [batch, tokens, size]")
    return probing.first_match((Rotation(tensors, *form) for form in forms), cases)


_F32, _B16 = torch.float32, torch.bfloat16
#: Width of cos and sin where the head size is 16, their batch size, and the dtypes of q and k and of cos and sin.
_CASES = {
    "float32": (16, 2, _F32, _F32),
    "cos of half the head size": (8, 2, _F32, _F32),
    "cos of a quarter of the head size": (4, 2, _F32, _F32),
    "cos of three quarters of the head size": (12, 2, _F32, _F32),
    "cos of one batch entry": (16, 1, _F32, _F32),
    "bfloat16": (16, 2, _B16, _B16),
    "bfloat16, cos of half the head size": (8, 2, _B16, _B16),
    "bfloat16 with float32 cos": (16, 2, _B16, _F32),
    "bfloat16 with float32 cos of half the head size": (8, 2, _B16, _F32),
    "float32 with bfloat16 cos": (16, 2, _F32, _B16),
}


def _case(function: Callable[..., Any], tensors: int, unsqueeze_dim: int, name: str) -> Case:
    """What a function returns, q above k."""
    width, batch, dtype, angle_dtype = _CASES[name]
    generator = torch.Generator().manual_seed(17)
    q, k = (probing.random((2, heads, 5, 16), generator, dtype) * 3 for heads in (4, 2))
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    # Random cos and sin: a function that reads only a part of them, which real ones would not show, does not match.
    cos, sin = (probing.random((batch, 5, width), generator, angle_dtype) for _ in range(2))
    options = {} if unsqueeze_dim == 1 else {"unsqueeze_dim": unsqueeze_dim}
    inputs = (q, k)[:tensors]

    def call(*inputs: Tensor) -> Any:
        angles = cos.clone(), sin.clone()
        outputs = function(*inputs, *angles, **options)
        if not (torch.equal(cos, angles[0]) and torch.equal(sin, angles[1])):
            raise Mismatch("it changes cos or sin in place")
        if tensors == 2 and (type(outputs) is not tuple or [x.shape for x in outputs] != [x.shape for x in inputs]):
            raise Mismatch("it does not return two tensors like q and k")
        return outputs

    tolerance = 1e-5 if (dtype, angle_dtype) == (_F32, _F32) else 2**-6
    return Case(name, (cos, sin, unsqueeze_dim), inputs, probing.observe(call, inputs), (tolerance, tolerance, 0.0))


def _wrapper(original: Callable[..., Any], rotation: Rotation) -> Callable[..., Any]:
    names = list(inspect.signature(_with_signature(original)).parameters)

    @functools.wraps(_with_signature(original))
    def rotate(*args: Any, **kwargs: Any) -> Any:
        options = dict(zip(names, args, strict=False)) | kwargs
        tensors = [options.pop(name, None) for name in names[: rotation.tensors + 2]]
        unsqueeze_dim = options.pop("unsqueeze_dim", 1)
        others = any(value is not None for value in options.values())
        if others or not is_plain(*tensors) or not _was_probed(*tensors, unsqueeze_dim=unsqueeze_dim):
            return original(*args, **kwargs)
        *heads, cos, sin = tensors
        return rotation.compute((cos, sin, unsqueeze_dim), *heads)

    return rotate


def _was_probed(*tensors: Tensor, unsqueeze_dim: Any) -> bool:
    """Whether a call has shapes that were probed; the original function broadcasts all others."""
    q, k, cos, sin = tensors[0].shape, tensors[-3].shape, tensors[-2].shape, tensors[-1].shape
    if unsqueeze_dim not in (1, 2) or len(q) != 4 or len(k) != 4 or len(cos) != 3 or cos != sin:
        return False
    token_dim = 3 - unsqueeze_dim
    same_tokens = q[token_dim] == k[token_dim] == cos[1]
    return same_tokens and q[0] == k[0] and q[3] == k[3] and cos[0] in (1, q[0])


@dataclass(frozen=True)
class Rotations(Replacement):
    """A module whose methods call functions that rotate queries and keys.

    While its methods run, the kernel is in the place of each function. Where somebody has replaced a function in the
    file since, it stays; and so it does under torch.compile, which fuses rotations itself.

    Attributes:
        functions: the Python module and the name of each function, and what it computes.
        methods: those that call such a function, themselves or through others of the same file.
    """

    functions: tuple[tuple[str, str, Rotation], ...]
    methods: tuple[str, ...] = ("forward",)
    reads_module = True
    key = staticmethod(type)  # type: ignore[assignment]

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(str(rotation) for *_, rotation in self.functions))

    def new_method(self, replaced: Callable[..., Any]) -> Callable[..., Any]:
        names = inspect.unwrap(replaced).__globals__  # of the file, which has all functions that the method calls
        own = [(name, by) for file, name, by in self.functions if file == names["__name__"] and name in names]
        functions = {name: names[name] for name, _ in own}
        kernels = {name: _wrapper(functions[name], by) for name, by in own}

        def method(*args: Any, **kwargs: Any) -> Any:
            there = all(names.get(name) is function for name, function in functions.items())
            if not there or torch.compiler.is_dynamo_compiling():
                return NotImplemented
            try:
                names.update(kernels)
                return replaced(*args, **kwargs)
            finally:
                names.update(functions)

        return method

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        return bool(_methods_of(module))

    @classmethod
    def match(cls, module: nn.Module) -> Rotations:
        methods, rotations, reasons = _methods_of(module), {}, []
        for names, name, function in itertools.chain.from_iterable(methods.values()):
            try:
                rotations[names["__name__"], name] = match(function)
            except Mismatch as mismatch:
                reasons.append(f"{name}: {mismatch}")
        if not rotations:
            raise Mismatch(reasons[0])
        return cls(tuple((*where, rotation) for where, rotation in rotations.items()), tuple(methods))

    @classmethod
    def reason_to_leave(cls, module: nn.Module) -> str | None:
        """Hooks and kinds of parameters are no reason: the methods do all else that they did."""
        return replaced_on_instance(module, _methods_of(module))


#: The globals of a file, the name of one of them, and the function that it is.
_Global = tuple[dict[str, Any], str, Any]


def _methods_of(module: nn.Module) -> dict[str, list[_Global]]:
    """The methods of a module's class that call functions with parameters cos and sin, and these functions."""
    classes = [cls for cls in reversed(type(module).__mro__) if not cls.__module__.startswith("torch.")]
    methods = {name: value for cls in classes for name, value in vars(cls).items()}
    return {
        name: rotations
        for name, method in methods.items()
        if isinstance(method, types.FunctionType) and (rotations := list(_rotations_in(method, set())))
    }


def _rotations_in(function: Any, seen: set[Any]) -> Iterator[_Global]:
    """The functions with parameters cos and sin that a function calls, itself or through others of its file."""
    seen.add(function)
    function = inspect.unwrap(function)
    try:
        names, read = function.__globals__, inspect.getclosurevars(function).globals
    except (AttributeError, ValueError):  # it decorates no function; a variable that it encloses has no value yet
        return
    for name, value in read.items():
        # The package kernels makes modules of some functions.
        if not isinstance(value, types.FunctionType) and not hasattr(type(value), "kernel_layer_name"):
            continue
        if {"cos", "sin"} <= set(inspect.signature(_with_signature(value)).parameters):
            yield names, name, value
        if getattr(value, "__globals__", None) is names and value not in seen:
            yield from _rotations_in(value, seen)
