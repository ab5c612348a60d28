"""Runs copies of modules on small random inputs, to find what they compute. The user's modules are only read."""

from __future__ import annotations

import contextlib
import copy
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Mismatch(Exception):
    """What was probed computes something else; the message says where they differ."""


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """On the CPU, with gradients, outside of autocast, and with the random state put back afterwards."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # about inputs that only a probe gives
        yield


def random(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers; those of a half precision are what that precision makes of the same numbers."""
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """The whole shape of a parameter, also where DeepSpeed keeps only a part of it here."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def copy_of(
    module: nn.Module,
    generator: torch.Generator,
    stand_ins: dict[nn.Module, nn.Module] | None = None,
    *,
    with_parameters: bool = True,
) -> nn.Module:
    """A copy on the CPU with random fp32 parameters (or empty ones), and with some of its children replaced.

    Neither the module's parameters nor the replaced children are copied, so that it costs nothing for large ones.

    Raises:
        Mismatch: a module that cannot be copied.
    """
    memo: dict[int, Any] = {id(child): stand_in for child, stand_in in (stand_ins or {}).items()}
    for parameter in module.parameters(recurse=False):
        memo[id(parameter)] = nn.Parameter(random(shape_of(parameter) if with_parameters else (0,), generator))
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise Mismatch(f"it cannot be copied ({type(error).__name__}: {error})") from error


@dataclass
class Observed:
    """What a function returned for some inputs, and the gradients of what they are."""

    output: Tensor
    grads: list[Tensor | None]


def observe(function: Callable[..., Any], inputs: Sequence[Tensor], others: Sequence[Tensor] = ()) -> Observed:
    """Call a function and take the gradients with respect to its inputs and to other leaves.

    Raises:
        Mismatch: it fails, returns no tensor, changes its inputs, or draws random numbers.
    """
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    given = [x.detach().clone() for x in inputs]
    state = torch.get_rng_state()
    try:
        # Through a view, as leaves cannot be changed in place but what a model passes on can.
        output = function(*(x.view_as(x) for x in inputs))
    except Mismatch:
        raise
    except Exception as error:
        raise Mismatch(f"it fails on a tensor ({type(error).__name__}: {str(error)[:160]})") from error
    if type(output) is not Tensor:
        raise Mismatch(f"it returns a {type(output).__name__}, not a tensor")
    if not torch.equal(state, torch.get_rng_state()):
        raise Mismatch("it draws random numbers")
    if not all(torch.equal(x, y) for x, y in zip(inputs, given, strict=True)):
        raise Mismatch("it changes its input in place")
    if not output.requires_grad:
        return Observed(output, [None] * (len(inputs) + len(others)))
    generator = torch.Generator().manual_seed(7)
    upstream = random(output.shape, generator, output.dtype)
    grads = torch.autograd.grad(output, [*inputs, *others], upstream, allow_unused=True)
    return Observed(output.detach(), list(grads))


def check_close(
    what: str, actual: Tensor | None, expected: Tensor | None, tolerance: float, rare: float | None = None
) -> None:
    """Raise Mismatch unless two tensors agree, the error taken against the largest entry of the row.

    With ``rare``, one element in two hundred may be off by that much instead: a half precision rounds to the other
    side where sums are taken in another order.
    """
    if actual is None or expected is None:
        if actual is not expected:
            raise Mismatch(f"{what} is {'missing' if actual is None else 'there'}")
        return
    if actual.dtype != expected.dtype:
        raise Mismatch(f"{what} is of {actual.dtype}, not {expected.dtype}")
    if actual.shape != expected.shape:
        raise Mismatch(f"{what} has shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
    a, e = actual.double(), expected.double()
    if not bool(a.isfinite().all() & e.isfinite().all()):
        raise Mismatch(f"{what} is not finite")
    scale = e.abs().amax(-1, keepdim=True)
    off = (a - e).abs() > tolerance * scale
    if not bool(off.any()):
        return
    largest = float(((a - e).abs() / scale.clamp(min=1e-300)).max())
    if rare is None or largest > rare or int(off.sum()) > max(1, off.numel() // 200):
        raise Mismatch(f"{what} differs by up to {largest:.1e} of the row's largest entry")


def fingerprint(value: Any, depth: int = 4) -> Any:
    """A value made hashable: equal for objects in equal states. Tensors and functions count by identity."""
    if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)):
        return type(value).__name__, value
    if isinstance(value, (Tensor, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)) or not depth:
        return type(value).__name__, id(value)
    if isinstance(value, nn.Module):
        return type(value), id(value)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *(fingerprint(item, depth - 1) for item in value)
    if isinstance(value, dict):
        return "dict", *((str(key), fingerprint(item, depth - 1)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return "set", *sorted(map(str, value))
    if hasattr(value, "__dict__"):
        return type(value), id(value), fingerprint(vars(value), depth - 1)
    return type(value).__name__, id(value)


def attributes(module: nn.Module) -> Any:
    """The fingerprint of what a module holds besides tensors, children and hooks."""
    held = {key: value for key, value in vars(module).items() if key not in _TORCH_ATTRIBUTES}
    return fingerprint(held)


def children_of(module: nn.Module, without: Collection[str] = ()) -> Any:
    """The fingerprint of a module's children, and of theirs."""
    return tuple(
        (name, *((type(part), attributes(part), repr(part)) for part in child.modules()))
        for name, child in module._modules.items()
        if child is not None and name not in without
    )


#: What every module has; ``training`` is probed both ways.
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))


def floats_of(module: nn.Module) -> list[float]:
    """The floating-point attributes of a module, each value once."""
    return list(dict.fromkeys(value for value in vars(module).values() if type(value) is float))


class Functions(TorchFunctionMode):
    """Records which torch functions are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[Any] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.called.add(func)
        return func(*args, **(kwargs or {}))
