"""Runs copies of modules on small random inputs to find what they compute. The user's modules are only read."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

_Candidate = TypeVar("_Candidate")
REQUIRED = inspect.Parameter.empty


class Mismatch(Exception):
    """A module or function computes something else; the message says where the two differ."""


class Refusal(Mismatch):
    """A module or function fails on some inputs."""


def reason_of(error: Exception) -> str:
    """The reason to leave a module: how it differs, or what was raised when it was looked at or a copy was run."""
    if isinstance(error, Mismatch):
        return str(error)
    return f"it cannot be probed ({type(error).__name__}: {str(error)[:160]})"


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """A context on the CPU, with gradients, without autocast, which restores the random state afterwards."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # about inputs that only a probe has
        yield


def random(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, drawn in fp32 and rounded to ``dtype``."""
    return torch.randn(tuple(shape), dtype=torch.float32, generator=generator).to(dtype)


def rows_of(scales: Sequence[float], leading: Sequence[int], size: int, generator: torch.Generator) -> Tensor:
    """An input of a probe ``[*leading, rows, size]``, with two rows of each scale."""
    column = torch.tensor(scales, dtype=torch.float32).repeat(2)[:, None]
    return (random((*leading, len(column), size), generator) + 0.5) * column


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """The full shape of a parameter, also of one that DeepSpeed has partitioned; no dimensions before it has any."""
    return () if is_lazy(parameter) else tuple(getattr(parameter, "ds_shape", parameter.shape))


def floats_of(module: nn.Module) -> list[float]:
    """The floating-point attributes of a module, each value once."""
    return list(dict.fromkeys(value for value in vars(module).values() if type(value) is float))


def positional_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters that can be passed by position, with their defaults; :data:`REQUIRED` for those without one."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)}


def copy_of(
    module: nn.Module, generator: torch.Generator, stand_ins: Mapping[Any, Any] | None = None, *, empty: bool = False
) -> nn.Module:
    """Copy a module to the CPU, with random fp32 parameters or ``empty`` ones, and ``stand_ins`` for some children.

    Neither its parameters nor the replaced children are copied, so that large modules cost nothing.
    """
    memo: dict[int, Any] = {id(child): stand_in for child, stand_in in (stand_ins or {}).items()}
    for parameter in module.parameters(recurse=False):
        memo[id(parameter)] = nn.Parameter(random((0,) if empty else shape_of(parameter), generator))
    return copy.deepcopy(module, memo)


def fingerprint(value: Any) -> Any:
    """A hashable value, equal for equal numbers, strings and containers of them. All else counts by identity."""
    if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)):
        return type(value).__name__, value
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *map(fingerprint, value)
    if isinstance(value, dict):
        return "dict", *((str(key), fingerprint(item)) for key, item in value.items())
    return type(value).__name__, id(value)


def has_tensors(module: nn.Module) -> bool:
    """Whether a module itself has parameters or buffers."""
    return any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


#: Attributes that every module has; ``training`` is among them, and probes run in both modes.
TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))


def attributes(module: nn.Module) -> Any:
    """The fingerprint of a module's attributes other than tensors, children and hooks."""
    return fingerprint({key: value for key, value in vars(module).items() if key not in TORCH_ATTRIBUTES})


def linears_of(module: nn.Module) -> dict[str, Any]:
    """The children with ``in_features`` and ``out_features``: linear layers, quantized ones, adapters around them."""
    return {
        name: child
        for name, child in module.named_children()
        if type(getattr(child, "in_features", None)) is int and type(getattr(child, "out_features", None)) is int
    }


def children_of(module: nn.Module) -> Any:
    """The fingerprint of a module's children and of theirs. Linear layers count by their sizes only."""
    linears = linears_of(module)
    return tuple(
        (name, child.in_features, child.out_features)
        if name in linears
        else (name, *((type(part), attributes(part), repr(part)) for part in child.modules()))
        for name, child in module.named_children()
    )


def observe(
    function: Callable[..., Any], inputs: Sequence[Tensor], others: Iterable[Tensor] = ()
) -> list[Tensor | None]:
    """A function's output, then the gradients with respect to its inputs and to other leaves.

    Of several outputs, the rows are one above the other. Raises Mismatch if it fails, returns no tensor, changes its
    inputs, or draws random numbers.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    state = torch.get_rng_state()
    try:
        # Views, as leaves cannot be changed in place but activations can.
        output = function(*(x.view_as(x) for x in leaves))
    except Mismatch:
        raise
    except Exception as error:
        raise Refusal(f"it fails on a tensor ({type(error).__name__}: {str(error)[:160]})") from error
    if type(output) is tuple:
        if len({(x.dtype, x.shape[-1]) for x in output}) > 1:
            raise Mismatch("it returns tensors of two dtypes or widths")
        output = torch.cat([x.flatten(0, -2) for x in output])
    if type(output) is not Tensor:
        raise Mismatch(f"it returns a {type(output).__name__}, not a tensor")
    if not torch.equal(state, torch.get_rng_state()):
        raise Mismatch("it draws random numbers")
    if not all(map(torch.equal, leaves, inputs)):
        raise Mismatch("it changes its input in place")
    leaves += others
    if not output.requires_grad:
        return [output, *[None] * len(leaves)]
    upstream = random(output.shape, torch.Generator().manual_seed(7), output.dtype).to(output.device)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream, allow_unused=True)]


def call_with(
    parameters: Mapping[str, Tensor], compute: Callable[[Any, Tensor], Tensor], module: nn.Module, x: Tensor
) -> Any:
    """``compute(module, x)``, with other parameters under these names, and without the module's hooks."""
    around: Any = nn.ModuleDict({"module": module})
    around.forward = partial(compute, module)
    return torch.func.functional_call(around, {f"module.{name}": p for name, p in parameters.items()}, x)


def check_close(
    what: str, actual: Tensor | None, expected: Tensor | None, tolerance: float, rare: float | None = None
) -> None:
    """Raise Mismatch unless two tensors (``None``: no gradient) agree within ``tolerance`` of the row's largest entry.

    With ``rare``, one element in two hundred may be off by that much instead: sums in another order sometimes round to
    another number of a half precision.
    """
    kinds = [None if tensor is None else (tensor.dtype, tuple(tensor.shape)) for tensor in (actual, expected)]
    if kinds[0] != kinds[1]:
        raise Mismatch(f"{what} is {kinds[0] or 'missing'}, not {kinds[1] or 'missing'}")
    if actual is None or expected is None:
        return
    a, e = actual.double(), expected.double()
    if not bool(a.isfinite().all() & e.isfinite().all()):
        raise Mismatch(f"{what} is not finite")
    scale = e.abs().amax(-1, keepdim=True)
    off = int(((a - e).abs() > tolerance * scale).sum())
    largest = float(((a - e).abs() / scale.clamp(min=1e-300)).max()) if off else 0.0
    if off and (rare is None or largest > rare or off > max(1, a.numel() // 200)):
        raise Mismatch(f"{what} differs by up to {largest:.1e} of the row's largest entry")


@dataclass
class Case:
    """What a module returned for some inputs; a candidate must return the same, with the same gradients.

    Attributes:
        module: the copy; the first argument of the candidates' ``compute``.
        observed: what :func:`observe` returned.
        tolerances: of the output, the inputs' gradients and the parameters'.
        rare: of the output; see :func:`check_close`.
        parameters: the other leaves, by name, whose gradients were observed.
    """

    name: str
    module: Any
    inputs: Sequence[Tensor]
    observed: list[Tensor | None]
    tolerances: tuple[float, float, float]
    rare: float | None = None
    parameters: Mapping[str, Tensor] = field(default_factory=dict)

    def check(self, candidate: Any) -> None:
        """Raise Mismatch unless a candidate computes the same."""
        compute = partial(candidate.compute, self.module, backend="torch")
        output, *grads = observe(compute, self.inputs, self.parameters.values())
        check_close("the output", self.observed[0], output, self.tolerances[0], self.rare)
        names = [*(f"input {number}" for number in range(len(self.inputs))), *self.parameters]
        for name, actual, wanted in zip(names, self.observed[1:], grads, strict=True):
            check_close(f"the gradient of {name}", actual, wanted, self.tolerances[1 + (name in self.parameters)])


_F32, _B16 = torch.float32, torch.bfloat16
#: Of a case: its name, the leading dimensions of the input, dtypes of the input and of the parameters, and whether in
#: training mode.
_SETTINGS = (
    ("float32", (2,), _F32, _F32, True),
    ("bfloat16", (2,), _B16, _B16, True),
    ("evaluation", (2,), _F32, _F32, False),
    ("two dimensions", (), _F32, _F32, True),
    ("four dimensions", (2, 3), _F32, _F32, True),
    ("bfloat16 with float32 parameters", (2,), _B16, _F32, True),
    ("float32 with bfloat16 parameters", (2,), _F32, _B16, True),
    ("evaluation in bfloat16", (2,), _B16, _B16, False),
)


def cases_of(
    module: nn.Module,
    inputs_of: Callable[[tuple[int, ...], torch.dtype, torch.Generator], Iterable[Sequence[Tensor]]],
    grad_tolerances: tuple[float, float],
    stand_ins_of: Callable[[torch.Generator], Mapping[Any, Any]] = lambda _: {},
    method: str = "forward",
) -> Iterator[Case]:
    """What copies of a module compute: of the first inputs that they do not refuse, in training twice.

    Args:
        inputs_of: from leading dimensions, dtype and generator to the inputs to try.
        grad_tolerances: of the inputs' gradients in fp32, and where there is bf16.
        stand_ins_of: see :func:`copy_of`.
        method: the module's method; if it is not the forward, it reads no parameters.
    """
    for name, leading, dtype, parameter_dtype, training in _SETTINGS:
        generator = torch.Generator().manual_seed(11)
        stand_ins = stand_ins_of(generator)
        copy: Any = copy_of(module, generator, stand_ins, empty=method != "forward")
        copy.to(parameter_dtype).train(training)
        if not training:
            with torch.no_grad():
                for parameter in copy.parameters():
                    parameter.mul_(100)  # so that a clamp of the output shows
        parameters = dict(copy.named_parameters())
        before = attributes(copy), children_of(copy)
        several, function = inputs_of(leading, dtype, generator), getattr(copy, method)
        refusal = Mismatch("there are no inputs for it")
        for inputs in several:
            try:
                observed = observe(function, inputs, parameters.values())
                break
            except Mismatch as mismatch:
                refusal = mismatch
        else:
            # Modules may fail with other layouts and with mixed dtypes: then no model uses them so.
            if isinstance(refusal, Refusal) and (leading != _SETTINGS[0][1] or dtype != parameter_dtype):
                continue
            raise Mismatch(f"{name}: {refusal}") from refusal
        with torch.no_grad():
            if not torch.equal(function(*inputs), cast(Tensor, observed[0])):
                raise Mismatch(f"{name}: it computes something else without gradients, or when called again")
        if (attributes(copy), children_of(copy)) != before:
            raise Mismatch(f"{name}: it changes its own attributes")
        # Gradients of a weight are sums over rows, some of which PyTorch itself takes in half precision.
        half = torch.bfloat16 in (dtype, parameter_dtype)
        rare, of_weight = (2**-6, 2**-4) if half else (None, 2e-5)
        yield Case(name, copy, inputs, observed, (1e-5, grad_tolerances[half], of_weight), rare, parameters)


def first_match(candidates: Iterable[_Candidate], cases: Sequence[Case]) -> _Candidate:
    """The first candidate that agrees in all cases; if none does, the Mismatch is from the one that agreed in most."""
    furthest, reason = -1, "it has none of the known forms"
    for candidate in candidates:
        for number, case in enumerate(cases):
            try:
                case.check(candidate)
            except Mismatch as mismatch:
                if number > furthest:
                    furthest, reason = number, f"not {candidate}: in {case.name}: {mismatch}"
                break
        else:
            return candidate
    raise Mismatch(reason)


class Functions(TorchFunctionMode):
    """Records which torch functions are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.add(func)
        return func(*args, **(kwargs or {}))
