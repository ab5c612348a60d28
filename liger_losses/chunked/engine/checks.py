"""Raises on bad input before any work: each error says what was given, what was expected and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_losses.chunked.engine.documentation import see
from liger_losses.chunked.engine.tokens import Tokens
from liger_losses.kernels.autograd import NO_TRANSFORMS, autocast_dtype, within_transform
from liger_losses.kernels.tracing import state

if TYPE_CHECKING:
    from liger_losses.chunked.engine.head import Head

#: What counts as several hidden states, heads or labels.
LISTS = (list, tuple, nn.ModuleList)

#: Where hidden states come from.
LOSS_INPUTS = "loss_inputs(model, input_ids=...) gives head, hidden states and labels"

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def one_each(value: Any, count: int) -> list[Any]:
    """A list of one for each target, from such a list, or from what serves all of them."""
    return list(value) if isinstance(value, LISTS) else [value] * count


def check_names(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise ValueError, listing the known names, if one of ``names`` is unknown."""
    known = tuple(known)
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; it must be one of {', '.join(known)}.")


def check_tensor(name: str, value: Any, *, allow_dtensor: bool = False) -> None:
    """Raise TypeError unless this is a tensor that is whole and dense.

    With ``allow_dtensor``, hidden states may be a DTensor: :class:`liger_losses.Head` says with which weights.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}{_what_to_do(name, value)}.")
    if hasattr(value, "full_tensor") and not allow_dtensor:
        raise TypeError(
            f"{name} is a DTensor, of which this process holds a part. Patch the model (liger_losses.patch), which "
            "computes the loss within the model's forward, where the whole weight is at hand; or, where no gradient "
            f"is needed, pass {name}.full_tensor()." + see("weights-of-which-a-process-holds-a-part")
        )
    if value.layout != torch.strided:
        raise TypeError(f"{name} is a sparse tensor ({value.layout}); pass {name}.to_dense().")
    if value.is_nested:
        raise TypeError(f"{name} is a nested tensor; pass {name}.to_padded_tensor(0.0).")


def _what_to_do(name: str, value: Any) -> str:
    """What to pass in place of something that is no tensor."""
    if isinstance(value, nn.Module):
        return "; a layer such as model.lm_head goes where the weight goes"
    if getattr(value, "last_hidden_state", None) is not None:
        return "; pass its .last_hidden_state"
    if hasattr(value, "logits"):
        return "; " + LOSS_INPUTS
    if isinstance(value, (list, tuple)) and name == "hidden_states" and any(isinstance(v, Tensor) for v in value):
        return f" of {len(value)}; for the last layer, pass outputs.hidden_states[-1]"
    if name.isidentifier() and isinstance(value, list):
        return f"; pass torch.tensor({name})"
    return "; pass torch.as_tensor(...) of it" if isinstance(value, list) or hasattr(value, "__array__") else ""


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
    check_tensor("labels", labels)
    if labels.dtype != torch.int64:
        raise TypeError(
            f"labels must be int64 token ids, got {labels.dtype} of shape {tuple(labels.shape)}; convert them with "
            ".long(), unless these are hidden states or a mask, and the arguments are in another order."
        )


def check_shift(shift: Any, several: bool = True) -> None:
    """Raise TypeError or ValueError unless this is a number of positions, or with ``several`` a list of them."""
    if isinstance(shift, (list, tuple)) and not several:
        raise TypeError(
            f"shift={shift!r} goes with lists of hidden states or heads: for one of each, give a number of positions."
        )
    for positions in shift if isinstance(shift, (list, tuple)) else [shift]:
        if not isinstance(positions, Integral):
            raise TypeError(f"shift must be a number of positions, or a list of one for each head, got {shift!r}.")
        if positions < 0:
            raise ValueError(f"shift must not be negative, as labels come from later positions; got {shift!r}.")


def check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise TypeError or ValueError unless this is a finite number in ``[low, high]`` (above low with ``open_low``)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if not math.isfinite(value) or not (low <= value <= high) or (open_low and value == low):
        left, right = "(" if open_low else "[", "]" if math.isfinite(high) else ")"
        raise ValueError(f"{name} must lie in {left}{low}, {high}{right}, got {value!r}.")


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
        if value is None:
            continue
        check_tensor(name, value)
        if value.dtype not in _FLOATS:
            raise TypeError(f"{name} must be floating point, got {value.dtype} of shape {tuple(value.shape)}.")
        check_shape_of(name, value, first, tensors[first])


def checked_mask(name: str, mask: Any, of: str, values: Tensor) -> Tensor:
    """Return a mask of ``values``, which errors call ``of``, as bool and in their shape.

    In masks of integers, as tokenizers and TRL make them, what is not 0 is true. Raises TypeError for other dtypes and
    ValueError for another shape or device.
    """
    check_tensor(name, mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"{name} must be bool, got {mask.dtype}; pass {name} != 0.")
    check_shape_of(name, mask, of, values)
    mask = mask if mask.dtype == torch.bool else mask != 0
    return mask if mask.shape == values.shape else mask.expand(values.shape)


def check_shape_of(name: str, value: Tensor, of: str, values: Tensor) -> None:
    """Raise ValueError unless a tensor expands to the shape of another one, on its device; a number may be on the CPU.

    ``[B]`` beside ``[B, 1]``, which would make a matrix of them, does not.
    """
    given, shape = tuple(value.shape), tuple(values.shape)
    fits = len(given) <= len(shape) and all(n in (1, m) for n, m in zip(given[::-1], shape[::-1], strict=False))
    if not fits:
        raise ValueError(f"{name} must be {list(shape)}, as {of}, got {list(given)}.")
    if value.device != values.device and (value.dim() or value.device.type != "cpu"):
        raise ValueError(f"{name} is on {value.device}, {of} on {values.device}; move it with .to(...).")


def checked_items(value: Any, device: torch.device) -> Tensor:
    """``num_items_in_batch`` as a 0-dim fp32 tensor; TypeError or ValueError unless it is one number, at least 0."""
    name = "num_items_in_batch"
    if not isinstance(value, Tensor):
        check_range(name, value, 0.0, math.inf)
        return torch.full((), value, dtype=torch.float32, device=device)  # a copy from the host would wait
    if value.numel() != 1:
        raise ValueError(f"{name} must be one number, the sum over all processes, got shape {tuple(value.shape)}.")
    if value.device.type == "cpu" and not (state.shapes_only or torch.compiler.is_compiling()):
        # Elsewhere it would be a synchronization.
        check_range(name, value.item(), 0.0, math.inf)
    return value.to(device, torch.float32).reshape(())


def check_device(weight: Tensor, /, **tensors: Tensor) -> None:
    """Raise ValueError if a tensor is on another device than the weight."""
    for name, tensor in tensors.items():
        if tensor.device != weight.device:
            raise ValueError(f"{name} is on {tensor.device}, the weight on {weight.device}; move it with .to(...).")


def check_weight(weight: Any, bias: Any = None) -> None:
    """Raise TypeError or ValueError unless these are a weight ``[V, H]`` and its bias ``[V]`` (or ``None``)."""
    check_tensor("weight", weight)
    if weight.dtype not in _FLOATS:
        raise TypeError(
            f"weight must be floating point, got {weight.dtype} of shape {tuple(weight.shape)}; dequantise it first."
        )
    if weight.dim() != 2:
        swapped = "; were weight and hidden states swapped?" if weight.dim() == 3 else "."
        raise ValueError(f"weight must be [vocab_size, hidden_size], got shape {tuple(weight.shape)}{swapped}")
    if 0 in weight.shape:
        raise ValueError(f"weight must not be empty, got shape {tuple(weight.shape)}.")
    check_vector("bias", bias, weight)


def check_vector(name: str, vector: Any, weight: Tensor, vocab_size: int | None = None) -> None:
    """Raise TypeError or ValueError unless this is ``None`` or one value per row of the weight, beside it.

    Where the weight is a part of a head, ``vocab_size`` is the number of values.
    """
    if vector is None:
        return
    check_tensor(name, vector)
    if vector.dtype not in _FLOATS:
        raise TypeError(f"{name} must be floating point, got {vector.dtype}.")
    rows = weight.shape[0] if vocab_size is None else vocab_size
    if vector.shape != (rows,):
        raise ValueError(f"{name} must be [{rows}], one value per row of the weight, got shape {tuple(vector.shape)}.")
    check_device(weight, **{name: vector})


def check_inputs(hidden_states: Sequence[Tensor], head: Head, labels: Sequence[Tensor] | Tokens) -> torch.dtype:
    """Raise TypeError or ValueError unless hidden states ``[..., H]`` and labels ``[...]`` fit each other and a head.

    So it does within a transform of ``torch.func``. Returns the dtype to compute in: the inputs' common one, or
    autocast's.
    """
    if within_transform():
        raise RuntimeError(NO_TRANSFORMS)
    if not hidden_states:
        raise ValueError("got an empty sequence; give one tensor of hidden states or more, and labels for each.")
    for part in hidden_states:
        check_tensor("hidden_states", part)
        if part.dtype not in _FLOATS:
            raise TypeError(
                f"hidden_states must be floating point, got {part.dtype} of shape {tuple(part.shape)}. They come from "
                "the model's last layer; token ids go into labels."
            )
    targets = [] if isinstance(labels, Tokens) else labels
    for target in targets:
        check_labels(target)
    shapes = labels.shapes if isinstance(labels, Tokens) else [target.shape for target in targets]
    if len(hidden_states) != len(shapes):
        raise ValueError(f"got {len(hidden_states)} tensors of hidden states and {len(shapes)} of labels.")
    weight_shape = head.weight.shape
    if head.quantized is not None:
        weight_shape = torch.Size((len(head.weight), head.hidden_size))
    for part, shape in zip(hidden_states, shapes, strict=True):
        _check_shapes(part.shape, shape, weight_shape)
    devices = {tensor.device for tensor in (head.weight, *hidden_states, *targets)}
    if len(devices) > 1:
        raise ValueError(
            f"all tensors must be on one device, got {', '.join(sorted(map(str, devices)))}; move them with .to(...)."
        )
    return _compute_dtype(hidden_states, head)


def check_like_labels(name: str, value: Any, labels_shape: torch.Size, head: Head) -> None:
    """Raise TypeError or ValueError unless this is a tensor of one value, or one row, for each label, beside a head."""
    check_tensor(name, value)
    check_device(head.weight, **{name: value})
    if value.shape[: len(labels_shape)] != labels_shape or value.dim() > len(labels_shape) + 1:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, but there is one value for each label: {tuple(labels_shape)}."
        )


def _check_shapes(hidden_states: torch.Size, labels: torch.Size, weight: torch.Size) -> None:
    if len(hidden_states) < 2 or hidden_states[-1] != weight[1]:
        logits = ""
        if len(hidden_states) > 1 and hidden_states[-1] == weight[0]:
            logits = (
                f" These look like logits: pass the last hidden states; {LOSS_INPUTS}. Of a patched model, take the "
                "model's own loss (labels=)."
            )
        raise ValueError(
            f"hidden_states must be [..., {weight[1]}] to fit the weight {tuple(weight)}, "
            f"got shape {tuple(hidden_states)}. The weight is [vocab_size, hidden_size], as in nn.Linear.{logits}"
            + see("shapes-dtypes-and-devices")
        )
    if labels != hidden_states[:-1]:
        if labels == weight[:1]:
            raise ValueError(
                f"weight {tuple(weight)} and hidden states {tuple(hidden_states)} were swapped: there are labels "
                f"{tuple(labels)}, one for each row of the weight." + see("shapes-dtypes-and-devices")
            )
        advice = "Shorten neither: with shift=True, each position predicts the next one's label."
        if labels.numel() == hidden_states[:-1].numel() and len(labels) != len(hidden_states) - 1:
            advice = f"Give both flat, or both {list(labels if len(labels) > 1 else hidden_states[:-1])}."
        raise ValueError(
            f"labels must have one entry per hidden state: hidden_states {tuple(hidden_states)} need labels "
            f"of shape {tuple(hidden_states[:-1])}, got {tuple(labels)}. {advice}" + see("shapes-dtypes-and-devices")
        )


def _compute_dtype(hidden_states: Sequence[Tensor], head: Head) -> torch.dtype:
    # Rows that are dequantized take the dtype of the hidden states.
    weights = [head.weight] if head.weight.shape[1] else []
    tensors = [*hidden_states, *weights, *([] if head.bias is None else [head.bias])]
    dtypes, autocast = {tensor.dtype for tensor in tensors}, autocast_dtype(tensors[0].device)
    if autocast is not None and torch.float64 not in dtypes:
        return autocast
    if len(dtypes) > 1:
        names = [*["hidden_states"] * len(hidden_states), *["weight"] * len(weights), "bias"]
        given = dict.fromkeys(f"{name} {tensor.dtype}" for name, tensor in zip(names, tensors, strict=False))
        raise TypeError(
            f"hidden_states, weight and bias must share a dtype outside autocast, got {', '.join(given)}. "
            "Cast one side, or run under torch.autocast." + see("shapes-dtypes-and-devices")
        )
    return dtypes.pop()
