"""Raises on bad input before any work: each error says what was given, what was expected and what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_losses.kernels.reading import assert_on_device

#: The site that ``make docs`` builds; the same as in pyproject.toml, which a test compares.
DOCUMENTATION = "https://liger-losses.github.io/liger-losses/"

#: What counts as several hidden states, heads or labels.
LISTS = (list, tuple, nn.ModuleList)

#: Where hidden states come from.
LOSS_INPUTS = "loss_inputs(model, input_ids=...) gives head, hidden states and labels"

#: In which order a head and hidden states are given.
ORDER = "linear_logps and the like take hidden_states, lm_head, labels; most losses take lm_head, hidden_states, labels"

#: The types of devices whose tensors have no values.
WITHOUT_VALUES: tuple[str, ...] = ("meta",)
NO_VALUES = (
    "weight, hidden states and labels are {} have a shape and no values, so that there is no loss; put model and batch "
    "on a device that computes: load the weights, or model.to_empty(device=...) and initialize them."
)

#: The dtypes of hidden states, weights and biases.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: The types of options that are finite numbers: any, at least 0, above 0, and from 0 to 1.
FiniteFloat: TypeAlias = float
NonNegativeFloat: TypeAlias = float
PositiveFloat: TypeAlias = float
UnitFloat: TypeAlias = float
#: The bounds of each, and whether the lower one itself is out of the range.
RANGES = {
    "FiniteFloat": (-math.inf, math.inf, False),
    "NonNegativeFloat": (0.0, math.inf, False),
    "PositiveFloat": (0.0, math.inf, True),
    "UnitFloat": (0.0, 1.0, False),
}


def see(heading: str) -> str:
    """The end of an error's text: its heading in the repository, and by the same anchor on the site."""
    return f" See docs/errors.md#{heading} in the repository, or {DOCUMENTATION}errors/#{heading}"


def one_each(value: Any, count: int) -> list[Any]:
    """A list of one for each target, from such a list, or from what serves all."""
    return list(value) if isinstance(value, LISTS) else [value] * count


def meant(name: str, known: Iterable[str]) -> str:
    """In brackets, which of the known names this one is close to, if it is close to one."""
    known = list(known)
    close = difflib.get_close_matches(name, known, len(known) + 1)  # torch.compile cannot trace how it takes the best
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_names(
    names: Iterable[str], known: Iterable[str], what: str, elsewhere: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise ValueError, listing the known names, if one of ``names`` is unknown.

    ``elsewhere`` says of names that users may know how this library writes them.
    """
    known = tuple(known)
    for name in names:
        if name not in known:
            hint = ""
            if isinstance(name, str):
                hint = f"; use {elsewhere[name]}" if name in elsewhere else meant(name, known)
            raise ValueError(f"unknown {what} {name!r}{hint}; it must be one of {', '.join(known)}.")


def check_new(
    what: str, name: Any, taken: Container[str], function: Any, earlier: Any = None, replace: bool = False
) -> None:
    """Raise TypeError or ValueError for no name, and for one that is taken.

    A function of the module and qualified name of the ``earlier`` one replaces it, as a cell of a notebook that runs
    again defines its function again; with ``replace``, any function replaces one that a user registered.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"the name of a new {what} must be a text, got {name!r}.")
    if name not in taken or (earlier is not None and _definition(function) == _definition(earlier)):
        return
    registered = earlier is not None and not _definition(earlier)[0].startswith("liger_losses.")
    if not (replace and registered):
        advice = "pass replace=True to replace it" if registered else "it is built in; take another name"
        raise ValueError(f"the {what} {name!r} exists already: {advice}.")


def _definition(function: Any) -> tuple[str, str]:
    """Where a function is defined: its module and qualified name. A partial's are those of its function."""
    while isinstance(function, partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, partial) else function.__wrapped__
    if not hasattr(function, "__qualname__"):  # a callable object
        function = type(function)
    return function.__module__, function.__qualname__


def check_tensor(
    name: str, value: Any, dtypes: Sequence[torch.dtype] = (), advice: str = "", *, allow_dtensor: bool = False
) -> None:
    """Raise TypeError unless this is a tensor that is whole and dense, of one of these dtypes where there are any.

    With ``allow_dtensor``, hidden states may be a DTensor: :class:`liger_losses.Head` says with which weights.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}{_what_to_do(name, value)}.")
    if hasattr(value, "full_tensor") and not allow_dtensor:
        raise TypeError(
            f"{name} is a DTensor, of which this process holds a part. Patch the model (liger_losses.patch), "
            "which computes the loss within the model's forward, where the weight is whole; or, if no gradient "
            f"is needed, pass {name}.full_tensor()." + see("sharded-weights")
        )
    if value.layout != torch.strided:
        raise TypeError(f"{name} is a sparse tensor ({value.layout}); pass {name}.to_dense().")
    if value.is_nested:
        raise TypeError(f"{name} is a nested tensor; pass {name}.to_padded_tensor(0.0).")
    if dtypes and value.dtype not in dtypes:
        expected = "floating point" if dtypes is FLOATS else " or ".join([f"{dtype}"[6:] for dtype in dtypes])
        raise TypeError(f"{name} must be {expected}, got {described(value)}{advice}.")


def _what_to_do(name: str, value: Any) -> str:
    """What to pass instead of something that is not a tensor."""
    if isinstance(value, nn.Module):
        return f"; a layer such as model.lm_head goes where the weight goes. {ORDER}"
    if getattr(value, "last_hidden_state", None) is not None:
        return "; pass its .last_hidden_state"
    if hasattr(value, "logits"):
        return "; " + LOSS_INPUTS
    of_tensors = isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value)
    if of_tensors and name in ("hidden_states", "ref_hidden_states", "ref_input"):
        return f" of {len(value)}; for the last layer, pass outputs.hidden_states[-1]"
    if name.isidentifier() and isinstance(value, list):
        return f"; pass torch.{'stack' if of_tensors else 'tensor'}({name})"
    return "; pass torch.as_tensor(...) of it" if isinstance(value, list) or hasattr(value, "__array__") else ""


def described(value: Any) -> str:
    """What was given, in errors: a tensor's dtype and shape, or the type of something else."""
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_device(of: str, device: torch.device, **tensors: Tensor | None) -> None:
    """Raise ValueError unless these tensors, where there are any, are on the device of another one."""
    for name, value in tensors.items():
        if value is not None and value.device != device:
            raise ValueError(f"{name} is on {value.device}, {of} on {device}; move it with .to(...).")


def check_values(weight: Tensor) -> None:
    """Raise ValueError for a weight without values."""
    if type(weight).__name__ == "FakeTensor":  # which torch has no public name for
        raise ValueError(NO_VALUES.format("of FakeTensorMode, whose tensors"))
    if weight.device.type in WITHOUT_VALUES:
        raise ValueError(NO_VALUES.format("on the meta device, where tensors"))


def check_group(group: Any, dimension: str) -> None:
    """Raise TypeError unless this is a process group of which this rank is a member.

    ``dimension`` is the usual name of its dimension in a DeviceMesh.
    """
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            f"group must be a torch.distributed.ProcessGroup of which this rank is a member, got {group!r}; of a "
            f"DeviceMesh, pass mesh['{dimension}'].get_group()."
        )


def check_labels(labels: Any) -> None:
    """Raise TypeError unless these are labels."""
    advice = (
        "; these are token ids: convert them with .long(), unless they are hidden states or a mask, and the arguments "
        "are in another order"
    )
    check_tensor("labels", labels, (torch.int64,), advice)


def host_checks(device: torch.device) -> bool:
    """Whether labels can be read at no cost, so that a bad one is an ordinary error."""
    return device.type == "cpu"


def check_temperature(temperature: Tensor, device: torch.device, shape: torch.Size) -> None:
    """Raise ValueError unless this is one temperature for each label."""
    if temperature.shape != shape:
        raise ValueError(
            f"temperature must be a number, or a tensor with one for each hidden state, {list(shape)}, got shape "
            f"{list(temperature.shape)}; one for each sequence [B] becomes one per token by "
            "temperature[:, None].expand_as(labels); of several tensors of hidden states, [T] has all of their tokens."
        )
    check_device("the weight", device, temperature=temperature)


def checked_temperatures(temperatures: Tensor) -> Tensor:
    """The temperatures, unless one is not positive and finite: a ValueError on a CPU, a device assertion on a GPU."""
    right = (temperatures > 0) & (temperatures < math.inf)
    if not host_checks(temperatures.device):
        assert_on_device(right.all())
    elif not right.all():
        wrong = temperatures[~right]
        raise ValueError(
            f"temperature must be positive and finite for every token with a label, got {float(wrong[0])!r} for "
            f"{len(wrong)} of {len(temperatures)}."
        )
    return temperatures


def check_vocabulary(extremes: Sequence[int], vocab_size: int, ignore_index: int) -> None:
    """Raise ValueError unless the lowest and highest labels are in the vocabulary."""
    if extremes and (min(extremes) < 0 or max(extremes) >= vocab_size):
        one = len(set(extremes)) == 1
        labels = f"the label {extremes[0]}" if one else f"labels from {min(extremes)} to {max(extremes)}"
        raise ValueError(
            f"labels must be in [0, {vocab_size}), the rows of the weight, or ignore_index={ignore_index}; "
            f"found {labels}. Mask padding with ignore_index; tokenizer and weight must have the same vocabulary."
            + see("labels-outside-of-the-vocabulary")
        )


def check_right(right: Tensor, labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise ValueError unless it is ``right`` that all labels are in the vocabulary; on a GPU, assert it there."""
    if not host_checks(labels.device):
        assert_on_device(right)
    elif not right:
        right.fill_(True)  # of the next call
        active = labels[labels != ignore_index]
        check_vocabulary([int(active.amin()), int(active.amax())], vocab_size, ignore_index)


def check_shift(shift: Any, several: bool = True) -> None:
    """Raise TypeError or ValueError unless this is a number of positions, or with ``several`` a list of them."""
    if isinstance(shift, (list, tuple)) and not several:
        raise TypeError(f"shift={shift!r} needs lists of hidden states or heads; for one head, pass a number.")
    for positions in shift if isinstance(shift, (list, tuple)) else [shift]:
        if not isinstance(positions, Integral):
            raise TypeError(f"shift must be a number of positions, or a list of one for each head, got {shift!r}.")
        if positions < 0:
            raise ValueError(f"shift must not be negative, as labels come from later positions; got {shift!r}.")


def check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise TypeError or ValueError unless this is a finite number in ``[low, high]`` (above low with ``open_low``)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    # Comparisons alone: of a number that changes, torch.compile traces nothing else.
    if not (low <= value <= high and -math.inf < value < math.inf) or (open_low and value == low):
        left, right = "(" if open_low else "[", "]" if math.isfinite(high) else ")"
        range_ = f"lie in {left}{low}, {high}{right}" if math.isfinite(low) else "be a finite number"
        raise ValueError(f"{name} must {range_}, got {value!r}.")


def check_fields(options: Any) -> None:
    """Raise TypeError or ValueError if a field is out of the range that :data:`RANGES` has for its type, if a bool
    was given as text or as a float, or if a name is unknown: ``options.names`` has the known names of each field, and a
    mapping from other libraries' names to them."""
    names = getattr(options, "names", {})
    for field in options.__dataclass_fields__.values():
        value: Any = getattr(options, field.name, None)
        if value is field.default:  # which is right
            continue
        if field.name in names:
            known, *elsewhere = names[field.name]
            check_names([value], known, field.name, *elsewhere)
        kind, _, optional = str(field.type).partition(" | ")
        if kind == "bool" and isinstance(value, (str, float)):  # all texts would be true
            raise TypeError(f"{field.name} must be True or False, got {value!r}.")
        if kind in RANGES and not (optional and value is None):
            low, high, open_low = RANGES[kind]
            check_range(field.name, value, low, high, open_low=open_low)


def check_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """:func:`check_range`, for an option of a function that may also be a tensor."""
    if not isinstance(value, Tensor):
        check_range(name, value, low, high, open_low=open_low)


def check_alike(**tensors: Any) -> None:
    """Raise TypeError or ValueError unless these are floating-point tensors that expand to the shape of the first.

    ``None`` is left out.
    """
    first = next(iter(tensors))
    for name, value in tensors.items():
        if value is not None:
            check_tensor(name, value, FLOATS)
            check_shape_of(name, value, first, tensors[first])


def checked_mask(name: str, mask: Any, of: str, values: Tensor) -> Tensor:
    """Return a mask of ``values``, which errors call ``of``, as bool and in their shape.

    In masks of integers, as tokenizers and TRL make them, what is not 0 is true. Raises TypeError for other dtypes and
    ValueError for another shape or device.
    """
    check_tensor(name, mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"{name} must be a mask of bool or integers, got {mask.dtype}; pass {name} != 0.")
    check_shape_of(name, mask, of, values)
    mask = mask if mask.dtype == torch.bool else mask != 0
    return mask if mask.shape == values.shape else mask.expand(values.shape)


def check_shape_of(name: str, value: Tensor, of: str, values: Tensor) -> None:
    """Raise ValueError unless a tensor expands to the shape of another one, on its device; a number may be on the CPU.

    ``[B]`` beside ``[B, 1]``, which would make a matrix of them, does not.
    """
    sizes, shape = value.shape, values.shape
    if len(sizes) > len(shape) or any(n not in (1, m) for n, m in zip(sizes[::-1], shape[::-1], strict=False)):
        raise ValueError(f"{name} must be {list(shape)}, as {of}, got {list(sizes)}.")
    if value.dim() or value.device.type != "cpu":
        check_device(of, values.device, **{name: value})


def check_shaped(
    name: str, value: Any, of: str, device: torch.device, *shapes: Sequence[int], dtypes: Sequence[torch.dtype] = ()
) -> None:
    """Raise TypeError or ValueError unless this is a tensor of one of these shapes on this device, one per ``of``."""
    check_tensor(name, value, dtypes)
    if tuple(value.shape) not in [tuple(shape) for shape in shapes]:
        expected = " or ".join([f"{list(shape)}" for shape in shapes])
        raise ValueError(f"{name} must be {expected}, one per {of}, got {list(value.shape)}.")
    check_device(f"the {of}", device, **{name: value})


def checked_items(value: Any, device: torch.device) -> Tensor:
    """``num_items_in_batch`` as a 0-dim fp32 tensor; TypeError or ValueError unless it is one number, at least 0.

    Losses divide by 1 instead of 0, which trainers count in batches without labels.
    """
    name = "num_items_in_batch"
    if not isinstance(value, Tensor):
        check_range(name, value, 0.0, math.inf)
        return as_tensor(value, device)
    if value.numel() != 1:
        raise ValueError(f"{name} must be one number, the sum over all processes, got shape {tuple(value.shape)}.")
    if value.device.type == "cpu" and not torch.compiler.is_compiling():
        # Elsewhere it would be a synchronization.
        check_range(name, value.item(), 0.0, math.inf)
    return value.to(device, torch.float32).reshape(())


def as_tensor(value: float, device: torch.device) -> Tensor:
    """A number as a 0-dim fp32 tensor, without a copy from the host, which would wait."""
    if torch.compiler.is_compiling():  # a number that changes would be compiled again for each value
        return torch.ones((), dtype=torch.float32, device=device) * value
    return torch.full((), value, dtype=torch.float32, device=device)


def check_weight(weight: Any) -> None:
    """Raise TypeError or ValueError unless this is a weight ``[V, H]``."""
    check_tensor("weight", weight, FLOATS, "; dequantize it first, or pass the quantized layer")
    if weight.dim() != 2:
        swapped = f"; were weight and hidden states swapped? {ORDER}." if weight.dim() == 3 else "."
        raise ValueError(f"weight must be [vocab_size, hidden_size], got shape {tuple(weight.shape)}{swapped}")
    if 0 in weight.shape:
        raise ValueError(f"weight must not be empty, got shape {tuple(weight.shape)}.")


def check_vector(name: str, vector: Any, weight: Tensor, vocab_size: int | None = None) -> None:
    """Raise TypeError or ValueError unless this is one value per row of the weight, on its device.

    Where the weight is a part of a head, ``vocab_size`` is the number of values.
    """
    check_shaped(name, vector, "row of the weight", weight.device, (vocab_size or len(weight),), dtypes=FLOATS)


def is_weight_and_bias(layer: nn.Module) -> TypeGuard[nn.Linear | nn.Embedding]:
    """Whether a layer's weight and bias are all that its logits are made of.

    A subclass of a linear layer may override ``forward``, for example to scale the logits. So may a function that is
    assigned to the layer's ``forward``, unless accelerate has assigned it, to move tensors or for autocast. An
    embedding's forward differs from the forward of a head that shares its weight.
    """
    if isinstance(layer, nn.Embedding):
        return True
    attributes = layer.__dict__
    if "forward" in attributes and not attributes.keys() & {"_hf_hook", "_original_forward"}:
        return False
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
