"""Recognises the functions that rotate queries and keys, by calling them, and replaces them where they are bound.

They are globals of a modeling module, which all models of a family in the process share: a replacement stays until the
last patched model of the family is unpatched or deleted.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.kernels.plain import is_plain
from liger_losses.kernels.rope import rope
from liger_losses.patching.probing import Mismatch, Observed, check_close, isolated, observe, random
from liger_losses.patching.swap import original_class


@dataclass(frozen=True)
class Rotation:
    """How a function rotates queries and keys.

    Attributes:
        tensors: whether it takes both (2) or one of them at a time (1).
        interleaved: as in :func:`~liger_losses.kernels.rope.rope`.
        angles: what it makes of cos and sin: ``full`` for nothing; else every angle of all of them or of the first half
            of their width (``all``, ``half``) twice, side by side or one after the other (``pairs``, ``halves``).
        sorted: whether it moves the first elements of all pairs before the second ones.
        cast_back: whether it returns the dtypes of q and k where cos and sin are of a wider one.
    """

    tensors: int = 2
    interleaved: bool = False
    angles: str = "full"
    sorted: bool = False
    cast_back: bool = False

    def __str__(self) -> str:
        details = (["interleaved"] if self.interleaved else []) + (["sorted"] if self.sorted else [])
        return "rope" + (f" ({', '.join(details)})" if details else "")

    def compute(self, *args: Tensor, unsqueeze_dim: int = 1, backend: str | None = None) -> Any:
        """The rotated tensors, of q, k (where it takes both), cos and sin."""
        *given, cos, sin = args
        tensors = given
        if self.sorted:
            tensors = [x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in given]
        # The kernel takes two; the second one may have no heads.
        q, k = tensors if self.tensors == 2 else (tensors[0], tensors[0].narrow(unsqueeze_dim, 0, 0))
        cos, sin = _angles(cos, self.angles), _angles(sin, self.angles)
        rotated = rope(q, k, cos, sin, interleaved=self.interleaved, unsqueeze_dim=unsqueeze_dim, backend=backend)
        if self.cast_back:
            rotated = rotated[0].to(given[0].dtype), rotated[1].to(given[-1].dtype)
        return rotated if self.tensors == 2 else rotated[0]


def _angles(x: Tensor, form: str) -> Tensor:
    if form == "full":
        return x
    which, order = form.split(" ")
    x = x[..., : x.shape[-1] // 2] if which == "half" else x
    return x.repeat_interleave(2, -1) if order == "pairs" else torch.cat((x, x), -1)


_CANDIDATES = tuple(
    (interleaved, angles, is_sorted, cast_back)
    for interleaved in (False, True)
    for angles in ("full", "half pairs", "half halves", "all pairs", "all halves")
    for is_sorted in (False, True)
    for cast_back in (False, True)
)


def recognise(function: Callable[..., Any]) -> Rotation:
    """Which rotation a function computes.

    Raises:
        Mismatch: none that there is a kernel for; the message says why.
    """
    signature = inspect.signature(function).parameters.values()
    positional = [p for p in signature if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in positional]
    tensors = names.index("cos") if "cos" in names else 0
    required = [p.name for p in positional[tensors + 2 :] if p.default is p.empty]
    if tensors not in (1, 2) or names[tensors + 1 : tensors + 2] != ["sin"] or required:
        raise Mismatch(f"it takes {', '.join(names)}, not one or two tensors, cos and sin")
    with isolated():
        cases = [
            (case, unsqueeze_dim, observed)
            for unsqueeze_dim in ((1, 2) if "unsqueeze_dim" in names else (1,))
            for case in _cases(unsqueeze_dim)
            if (observed := _observe(function, case, tensors, unsqueeze_dim, "unsqueeze_dim" in names)) is not None
        ]
        # One where each sequence has angles of its own.
        if not any(case.dtypes == (torch.float32,) * 2 and case.cos.shape[0] == 2 for case, *_ in cases):
            raise Mismatch("it does not take [batch, heads, tokens, size] with cos and sin of [batch, tokens, size]")
        furthest: tuple[int, str] = -1, ""
        for form in _CANDIDATES:
            candidate = Rotation(tensors, *form)
            try:
                for number, (case, unsqueeze_dim, observed) in enumerate(cases):
                    at = number
                    case.check(candidate, unsqueeze_dim, observed)
            except Mismatch as mismatch:
                if at > furthest[0]:
                    furthest = at, f"not {candidate}: {mismatch}"
                continue
            return candidate
    raise Mismatch(furthest[1])


@dataclass
class _Case:
    name: str
    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        return self.q.dtype, self.cos.dtype

    def check(self, candidate: Rotation, unsqueeze_dim: int, observed: Observed) -> None:
        def compute(*tensors: Tensor) -> Tensor:
            rotated = candidate.compute(*tensors, self.cos, self.sin, unsqueeze_dim=unsqueeze_dim, backend="torch")
            return torch.cat(rotated, unsqueeze_dim) if candidate.tensors == 2 else rotated

        tolerance = 1e-5 if self.dtypes == (torch.float32,) * 2 else 2**-6
        expected = observe(compute, (self.q, self.k)[: candidate.tensors])
        check_close(f"{self.name}: the output", observed.output, expected.output, tolerance)
        for actual, wanted in zip(observed.grads, expected.grads, strict=True):
            check_close(f"{self.name}: the gradient", actual, wanted, tolerance)


#: Head size, width of cos and sin, their batch size, and the dtypes of q and k and of cos and sin.
_SHAPES = (
    ("float32", 16, 16, 2, torch.float32, torch.float32),
    ("cos of half the head size", 16, 8, 2, torch.float32, torch.float32),
    ("cos of a quarter of the head size", 16, 4, 2, torch.float32, torch.float32),
    ("cos of three quarters of the head size", 16, 12, 2, torch.float32, torch.float32),
    ("cos of one batch entry", 16, 16, 1, torch.float32, torch.float32),
    ("bfloat16", 16, 16, 2, torch.bfloat16, torch.bfloat16),
    ("bfloat16, cos of half the head size", 16, 8, 2, torch.bfloat16, torch.bfloat16),
    ("bfloat16 with float32 cos", 16, 16, 2, torch.bfloat16, torch.float32),
    ("bfloat16 with float32 cos of half the head size", 16, 8, 2, torch.bfloat16, torch.float32),
    ("float32 with bfloat16 cos", 16, 16, 2, torch.float32, torch.bfloat16),
)


def _cases(unsqueeze_dim: int) -> Iterator[_Case]:
    generator = torch.Generator().manual_seed(17)
    tokens = 5
    for name, size, width, batch, dtype, angle_dtype in _SHAPES:
        q = random((2, 4, tokens, size), generator, dtype) * 3
        k = random((2, 2, tokens, size), generator, dtype) * 3
        if unsqueeze_dim == 2:
            q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        # Any numbers: a function that takes a part of them for the whole would not be the kernel's.
        cos, sin = (random((batch, tokens, width), generator, angle_dtype) for _ in range(2))
        yield _Case(name, q, k, cos, sin)


def _observe(
    function: Callable[..., Any], case: _Case, tensors: int, unsqueeze_dim: int, takes_it: bool
) -> Observed | None:
    """What it gives, q above k; None where it fails, as no model calls it so."""
    options = {"unsqueeze_dim": unsqueeze_dim} if takes_it and unsqueeze_dim != 1 else {}

    def call(*given: Tensor) -> Tensor:
        cos, sin = case.cos.clone(), case.sin.clone()
        outputs = function(*given, cos, sin, **options)
        if not (torch.equal(cos, case.cos) and torch.equal(sin, case.sin)):
            raise Mismatch("it changes cos or sin in place")
        if tensors == 1:
            return outputs
        if type(outputs) is not tuple or [x.shape for x in outputs] != [x.shape for x in given]:
            raise Mismatch("it does not return two tensors like q and k")
        if outputs[0].dtype != outputs[1].dtype:
            raise Mismatch("it returns tensors of two dtypes")
        return torch.cat(outputs, unsqueeze_dim)

    try:
        return observe(call, (case.q, case.k)[:tensors])
    except Mismatch as mismatch:
        if mismatch.__cause__ is not None:
            return None
        raise


@dataclass
class _Bound:
    """A replaced global, and the models that it was replaced for."""

    namespace: dict[str, Any]
    name: str
    original: Callable[..., Any]
    wrapper: Callable[..., Any]
    rotation: Rotation
    owners: set[int] = field(default_factory=set)


_BOUND: dict[tuple[int, str], _Bound] = {}


def bind(model: nn.Module, namespace: dict[str, Any], name: str, rotation: Rotation) -> None:
    """Replace a global function for a model, until :func:`release`."""
    key = id(namespace), name
    if key not in _BOUND:
        original = namespace[name]
        wrapper = _wrapper(original, rotation)
        _BOUND[key] = _Bound(namespace, name, original, wrapper, rotation)
        namespace[name] = wrapper
    own(model, namespace, name)


def own(model: nn.Module, namespace: dict[str, Any], name: str) -> None:
    """Have a replaced global stay for a model too."""
    bound = _BOUND[id(namespace), name]
    if id(model) not in bound.owners:
        bound.owners.add(id(model))
        weakref.finalize(model, _release, (id(namespace), name), id(model))


def release(model: nn.Module) -> None:
    """Give up what was replaced for a model."""
    for key in list(_BOUND):
        _release(key, id(model))


def _release(key: tuple[int, str], owner: int) -> None:
    bound = _BOUND.get(key)
    if bound is None or owner not in bound.owners:
        return
    bound.owners.discard(owner)
    if not bound.owners:
        del _BOUND[key]
        if bound.namespace.get(bound.name) is bound.wrapper:
            bound.namespace[bound.name] = bound.original


def bound_rotation(namespace: dict[str, Any], name: str) -> Rotation | None:
    """What a global was replaced by, if it was."""
    bound = _BOUND.get((id(namespace), name))
    return bound.rotation if bound is not None and namespace.get(name) is bound.wrapper else None


def _wrapper(original: Callable[..., Any], rotation: Rotation) -> Callable[..., Any]:
    names = list(inspect.signature(original).parameters)
    given = rotation.tensors + 2

    @functools.wraps(original)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        options = dict(zip(names, args, strict=False)) | kwargs
        unsqueeze_dim = options.pop("unsqueeze_dim", 1)
        tensors = [options.pop(name, None) for name in names[:given]]
        unknown = any(value is not None for value in options.values())
        if unknown or not is_plain(*tensors) or not _fits(*tensors, unsqueeze_dim=unsqueeze_dim):
            return original(*args, **kwargs)
        return rotation.compute(*tensors, unsqueeze_dim=unsqueeze_dim)

    return rotate


def _fits(*tensors: Tensor, unsqueeze_dim: Any) -> bool:
    """Whether a call has the shapes that were probed; broadcasting is the original's business."""
    q, k, cos, sin = tensors[0], tensors[-3], tensors[-2], tensors[-1]
    if unsqueeze_dim not in (1, 2) or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    token = 3 - unsqueeze_dim
    return (
        q.shape[0] == k.shape[0]
        and q.shape[token] == k.shape[token] == cos.shape[1]
        and q.shape[-1] == k.shape[-1]
        and cos.shape[0] in (1, q.shape[0])
    )


def functions_of(model: nn.Module) -> list[tuple[dict[str, Any], str, list[tuple[str, nn.Module]]]]:
    """The global functions taking cos and sin that the code of a model's classes calls.

    Returns:
        Namespace, name, and the modules (with their names in the model) whose class calls it.
    """
    modules: dict[type, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        modules.setdefault(original_class(module), []).append((path, module))
    found: dict[tuple[int, str], tuple[dict[str, Any], str, list[tuple[str, nn.Module]]]] = {}
    for kind, callers in modules.items():
        for namespace, name in _called_by(kind):
            found.setdefault((id(namespace), name), (namespace, name, []))[2].extend(callers)
    return list(found.values())


def _called_by(kind: type) -> Iterator[tuple[dict[str, Any], str]]:
    pending = [
        function
        for base in kind.__mro__
        if base.__module__.partition(".")[0] != "torch"
        for value in vars(base).values()
        if isinstance(function := inspect.unwrap(value) if callable(value) else value, types.FunctionType)
    ]
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if not isinstance(value, types.FunctionType):
                continue
            if {"cos", "sin"} <= set(inspect.signature(value).parameters):
                yield function.__globals__, name
            elif value.__globals__ is function.__globals__:
                pending.append(value)  # a helper of the same file
