"""The operations of lazy logits that need no values, each a function of :class:`DeferredLogits` and its arguments.

An operation on tokens is applied to the hidden states; a step, such as a scale, changes the head; a reduction over the
vocabulary is computed by the engine. Each returns deferred logits or results, or ``NotImplemented`` for arguments with
which the values are needed after all.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked import EngineOptions
from liger_losses.chunked.losses.cross_entropy_terms import linear_cross_entropy
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.patching.lazy.deferred import DeferredLogits


class Operation(NamedTuple):
    """A row of the table.

    Attributes:
        function: computes it.
        signature: the arguments that the function takes.
        of_tokens: whether torch returns a view of the logits, if it returns one of the hidden states.
        in_graphs: whether torch.compile traces it, instead of ending its graph.
    """

    function: Callable[..., Any]
    signature: inspect.Signature
    of_tokens: bool
    in_graphs: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError:
            return NotImplemented
        return self.function(*args, **kwargs)


#: By the names of methods, functions and operators.
OPERATIONS: dict[str, Operation] = {}
#: No label has this value, so that as ``ignore_index`` it ignores no token.
_NO_LABEL = -(2**62)


def _operation(names: str, of_tokens: bool = False, in_graphs: bool = False) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        row = Operation(function, inspect.signature(function), of_tokens, in_graphs)
        OPERATIONS.update(dict.fromkeys(names.split(), row))
        return function

    return register


def _is_vocabulary(deferred: DeferredLogits, dim: Any) -> bool:
    """Whether a dimension, which may be given as a tuple of one, is the vocabulary's, the last one."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return isinstance(dim, int) and dim in (-1, len(deferred.shape) - 1)


# --- Tokens: the hidden states are reshaped and chosen ----------------------------------------------------------------


@_operation("view reshape", of_tokens=True, in_graphs=True)
def _reshape(deferred: DeferredLogits, *shape: Any) -> Any:
    sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)
    if len(sizes) < 2 or not all(isinstance(size, (int, torch.SymInt)) for size in sizes):
        return NotImplemented
    hidden_states, vocab_size = deferred.hidden_states, deferred.head.vocab_size
    if sizes[-1] == -1 and -1 not in sizes[:-1]:
        sizes[-1] = deferred.shape.numel() // max(math.prod(sizes[:-1]), 1)
    if sizes[-1] != vocab_size:
        return NotImplemented
    return deferred.with_rows(hidden_states.reshape(*sizes[:-1], hidden_states.shape[-1]))


def _on_tokens(name: str, deferred: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """A view whose last dimension is the vocabulary, as a tensor without memory shows."""
    like_logits = torch.empty(deferred.shape, dtype=deferred.hidden_states.dtype, device="meta")
    try:
        views, found = (getattr(tensor, name)(*args, **kwargs) for tensor in (like_logits, deferred.hidden_states))
    except (RuntimeError, IndexError):  # sizes of the vocabulary, which hidden states do not have, or wrong arguments
        return NotImplemented
    several = isinstance(found, tuple)
    pairs = list(zip(views, found, strict=False)) if several else [(views, found)]
    (*_, size), width = deferred.shape, deferred.hidden_states.shape[-1]
    for view, part in pairs:
        last = view.shape[-1:] == (size,) and part.shape[-1:] == (width,) and view.stride(-1) == 1 != size
        if not last or view.dim() < 2 or view.shape[:-1] != part.shape[:-1]:
            return NotImplemented
    parts = tuple(deferred.with_rows(part) for _, part in pairs)
    return NotImplemented if not parts else parts if several else parts[0]


for _name in "flatten split chunk unbind transpose permute unsqueeze squeeze narrow".split():  # noqa: SIM905
    _operation(_name, of_tokens=True)(partial(_on_tokens, _name))


@_operation("contiguous", of_tokens=True, in_graphs=True)
def _contiguous(deferred: DeferredLogits) -> DeferredLogits:
    return deferred.with_rows(deferred.hidden_states.contiguous())


@_operation("clone")
def _clone(deferred: DeferredLogits, *, memory_format: Any = None) -> DeferredLogits:
    return replace(deferred)


@_operation("__getitem__", of_tokens=True, in_graphs=True)
def _getitem(deferred: DeferredLogits, index: Any) -> Any:
    """Any index of tokens, and a slice of the vocabulary."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, bool) for part in parts):
        return NotImplemented
    masks = [part for part in parts if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)]
    dims = sum([part is not None and part is not ... for part in parts]) + sum([mask.dim() - 1 for mask in masks])
    at = next((i for i, part in enumerate(parts) if part is ...), len(parts))
    whole = (slice(None),) * (len(deferred.shape) - dims)  # what an ellipsis stands for
    parts = parts[:at] + whole + parts[at + 1 :]
    columns = parts[-1]
    if not isinstance(columns, slice) or columns.step not in (None, 1):
        return NotImplemented
    found = deferred.with_rows(deferred.hidden_states[parts[:-1] + (slice(None),)])
    head = deferred.head
    start, stop = (0, head.vocab_size) if columns == slice(None) else columns.indices(head.vocab_size)[:2]
    if (start, stop) == (0, head.vocab_size):
        return found
    if deferred.normalized or stop <= start or head.ranks.size > 1:
        return NotImplemented  # log-probabilities of some columns depend on all of the head, which ranks may share
    return replace(found, head=head.columns(columns))


# --- Steps: the head is changed ---------------------------------------------------------------------------------------


def _cast(deferred: DeferredLogits, dtype: torch.dtype) -> Any:
    if not dtype.is_floating_point:
        return NotImplemented
    if dtype == deferred.dtype:
        return deferred
    if deferred.normalized and torch.promote_types(dtype, deferred.dtype) != dtype:
        return NotImplemented  # a step comes before the softmax, so it would round the logits instead
    return replace(deferred.with_step("to", dtype), dtype=dtype)


#: Tokens whose logits exist at a time.
_ROWS = 1024
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
for _name, _dtype in _CASTS.items():
    _operation(_name, in_graphs=True)(partial(_cast, dtype=_dtype))


@_operation("to", in_graphs=True)
def _to(deferred: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """An empty tensor shows what the arguments mean."""
    try:
        moved = torch.empty(0, dtype=deferred.dtype, device=deferred.device).to(*args, **kwargs)
    except (TypeError, RuntimeError):  # arguments that torch refuses
        return NotImplemented
    if moved.device != deferred.device or kwargs.get("memory_format") is not None or kwargs.get("copy"):
        return NotImplemented
    return _cast(deferred, moved.dtype)


def _scale(name: str, deferred: DeferredLogits, other: Any) -> Any:
    """Multiply or divide by a number: a scale of the head, and of its soft-cap if there is one."""
    number = isinstance(other, (int, float)) and not isinstance(other, bool)
    if not number or not math.isfinite(other) or other == 0 or deferred.normalized:
        return NotImplemented
    by, transform = 1.0 / other if name == "div" else float(other), deferred.head.transform
    changes = {"logit_scale": transform.logit_scale * by}
    if transform.softcap is not None:
        changes["softcap"] = transform.softcap * by
    if not math.isfinite(changes["logit_scale"]) or not 0 < changes.get("softcap", 1.0) < math.inf:
        return NotImplemented
    return deferred.with_step(name, other, **changes)


_operation("mul multiply __mul__ __rmul__", in_graphs=True)(partial(_scale, "mul"))
_operation("div divide true_divide __truediv__ __div__", in_graphs=True)(partial(_scale, "div"))


@_operation("tanh", in_graphs=True)
def _tanh(deferred: DeferredLogits) -> Any:
    if deferred.normalized or deferred.head.transform.softcap is not None:
        return NotImplemented
    return deferred.with_step("tanh", softcap=1.0)


@_operation("neg negative __neg__")
def _neg(deferred: DeferredLogits) -> Any:
    """Negate log-probabilities, as losses do; to negate other logits, their values are computed."""
    return replace(deferred, negated=not deferred.negated) if deferred.normalized else NotImplemented


@_operation("add __add__ __radd__", in_graphs=True)
def _add(deferred: DeferredLogits, other: Any) -> Any:
    """Add a bias ``[V]`` to a head's product; or add another product, such as an adapter's: both heads side by side."""
    head, dtype = deferred.head, deferred.dtype
    if deferred.normalized or deferred.steps or head.ranks.size > 1:
        return NotImplemented
    if isinstance(other, DeferredLogits):
        return _add_product(deferred, other)
    if not isinstance(other, Tensor) or head.quantized is not None or other.dtype != head.weight.dtype:
        return NotImplemented
    vector = other.shape[-1:] == (head.vocab_size,) and other.numel() == head.vocab_size
    if not vector or other.dim() > len(deferred.shape) or other.device != head.weight.device:
        return NotImplemented
    bias = other.flatten() if head.bias is None else head.bias + other.flatten()
    return replace(deferred, head=head.with_fields(bias=bias), dtype=torch.promote_types(dtype, other.dtype))


def _add_product(one: DeferredLogits, two: DeferredLogits) -> Any:
    if one.autocast != two.autocast or one.shape != two.shape or two.head.ranks.size > 1:
        return NotImplemented
    if two.normalized or two.head.transform.softcap is not None or two.head.quantized is not None:
        return NotImplemented
    scale = two.head.transform.logit_scale
    parts = (one.hidden_states, one.head.weight), (two.hidden_states * scale, two.head.weight)
    mixed = any(a.dtype != b.dtype for a, b in zip(*parts, strict=True))
    # PEFT keeps adapters in fp32. They take the dtype of the hidden states of a head in half precision, to which PEFT
    # rounds the sum, and of a quantized head, whose weight takes it as well.
    rounded = one.head.quantized is not None or (one.dtype.itemsize == 2 and one.dtype == one.head.weight.dtype)
    if mixed and one.autocast is None and not rounded:
        return NotImplemented
    dtype = one.autocast or (one.hidden_states.dtype if rounded else None)

    def cast(part: Tensor) -> Tensor:
        return part if dtype is None else part.to(dtype)

    biases = [cast(part.bias * part.transform.logit_scale) for part in (one.head, two.head) if part.bias is not None]
    bias = sum(biases[1:], biases[0]) if biases else None
    hidden, weight = [torch.cat([cast(part) for part in pair], -1) for pair in zip(*parts, strict=True)]
    sums = replace(one, head=one.head.with_fields(weight=weight, bias=bias))
    return replace(sums.with_rows(hidden), dtype=torch.promote_types(one.dtype, two.dtype))


@_operation("log_softmax")
def _log_softmax(
    deferred: DeferredLogits, dim: Any = None, *args: Any, dtype: torch.dtype | None = None, **others: Any
) -> Any:
    if not _is_vocabulary(deferred, dim) or deferred.normalized:
        return NotImplemented
    dtype = next((arg for arg in args if isinstance(arg, torch.dtype)), dtype)
    if dtype is None and deferred.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        dtype = torch.float32  # autocast runs it in fp32 on a GPU
    cast = deferred if dtype is None else _cast(deferred, dtype)
    return cast if cast is NotImplemented else replace(cast, normalized=True)


# --- Reductions: the engine computes them -----------------------------------------------------------------------------


def _cross_entropy(
    normalized: bool,
    deferred: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``cross_entropy`` of logits; ``nll_loss``, which has no label smoothing, of log-probabilities."""
    class_indices = isinstance(target, Tensor) and target.dtype == torch.int64 and target.dim() == 1
    right = reduction in ("mean", "sum", "none") and 0 <= label_smoothing <= 1
    right = right and (weight is None or weight.shape == deferred.shape[-1:])  # otherwise torch says what is wrong
    deprecated = size_average is not None or reduce is not None
    if deprecated or not (class_indices and right) or len(deferred.shape) != 2:
        return NotImplemented
    if deferred.normalized != normalized or deferred.negated:
        return NotImplemented
    deferred.check(values=True)
    with deferred.under_forward_autocast():
        tensors = deferred.hidden_states, deferred.head, target, weight
        loss = linear_cross_entropy(
            *tensors, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    deferred.mark_read()
    # Autocast runs it in fp32.
    return loss if autocast_dtype(loss.device) is not None else loss.to(deferred.dtype)


_operation("cross_entropy", in_graphs=True)(partial(_cross_entropy, False))
_operation("nll_loss")(partial(_cross_entropy, True))


@_operation("gather")
def _gather(deferred: DeferredLogits, dim: int, index: Tensor) -> Any:
    """Logits or log-probabilities of some columns: ``logit = logp + lse``."""
    if not _is_vocabulary(deferred, dim) or index.shape[:-1] != deferred.shape[:-1]:
        return NotImplemented
    index, lse = index.long(), () if deferred.normalized else ("lse",)
    if index.shape[-1] == 1:
        # A column outside of the vocabulary is an error, the usual ignore_index too.
        found = deferred.statistics(index[..., 0], "logp", *lse, options=EngineOptions(ignore_index=_NO_LABEL))
        logps = found.logp[..., None]
    else:
        found = deferred.statistics(None, "selected_logps", *lse, selected=index)
        logps = found.selected_logps
    logps = -logps if deferred.negated else logps
    return (logps + found.lse[..., None] if lse else logps).to(deferred.dtype)


@_operation("take_along_dim")
def _take_along_dim(deferred: DeferredLogits, indices: Tensor, dim: int) -> Any:
    return NotImplemented if indices.dim() != len(deferred.shape) else _gather(deferred, dim, indices)


def _by_rows(name: str, deferred: DeferredLogits, **options: Any) -> list[Any]:
    """``topk`` or ``argmax`` over the vocabulary, of the model's logits, whose rounding decides ties.

    The logits exist for some tokens at a time.
    """
    hidden_states = deferred.hidden_states.detach()
    hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
    with torch.no_grad():
        parts = (deferred.with_rows(part) for part in hidden_states.split(_ROWS))
        return [getattr(part.values(), name)(dim=-1, **options) for part in parts]


@_operation("argmax")
def _argmax(deferred: DeferredLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    if not _is_vocabulary(deferred, dim):
        return NotImplemented
    columns = torch.cat(_by_rows("argmax", deferred)).view(deferred.shape[:-1])
    return columns[..., None] if keepdim else columns


@_operation("topk")
def _topk(deferred: DeferredLogits, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Values have the gradient of the logits in their columns."""
    if not _is_vocabulary(deferred, dim):
        return NotImplemented
    parts = zip(*_by_rows("topk", deferred, k=k, largest=largest, sorted=sorted), strict=True)
    values, columns = [torch.cat(part).view(*deferred.shape[:-1], k) for part in parts]
    if torch.is_grad_enabled() and deferred.requires_grad:
        gathered = _gather(deferred, -1, columns)
        values = values + (gathered - gathered.detach())
    return torch.return_types.topk((values, columns))


def _sum(
    name: str, deferred: DeferredLogits, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """``logsumexp``, ``mean`` or ``sum`` over the vocabulary; the last two over everything, too."""
    everything = dim is None and not keepdim and name != "logsumexp"
    supported = everything or _is_vocabulary(deferred, dim)
    if not supported or not (dtype or deferred.dtype).is_floating_point:
        return NotImplemented
    statistic = "lse" if name == "logsumexp" else "mean_logp" if deferred.normalized else "mean_logit"
    if statistic == "lse" and deferred.normalized:
        return NotImplemented
    result = getattr(deferred.statistics(None, statistic), statistic)
    result = -result if deferred.negated else result
    if name == "sum":
        result = result * deferred.shape[-1]  # in the engine's dtype, which holds sums that half precision would round
        if dtype is None and result.is_cuda and torch.is_autocast_enabled("cuda"):
            dtype = torch.float32
    if everything:
        result = getattr(result, name)()
    return (result[..., None] if keepdim else result).to(dtype or deferred.dtype)


for _name in ("logsumexp", "mean", "sum"):
    _operation(_name)(partial(_sum, _name))
