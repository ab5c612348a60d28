"""The operations on pending logits that need no values, each a function of the logits and its other arguments.

An operation on tokens is applied to the hidden states; a step, such as a scale, changes the head; a reduction over the
vocabulary is computed by the engine. Each returns pending logits or results, or raises :class:`NeedsValues` for
arguments with which the values are needed after all.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked import EngineOptions, Largest
from liger_losses.chunked.losses.cross_entropy import linear_cross_entropy
from liger_losses.kernels.autograd import autocast_dtype

#: ``liger_losses.patching.pending`` has the class, which has these operations.
PendingLogits = Any

#: No label has this value, so that as ``ignore_index`` it ignores no token.
_NO_LABEL = -(2**62)
#: Steps whose results are no logits, and the operations on these.
_LAST_STEPS = {"softmax": (), "kl_div": ("sum",)}


class NeedsValues(Exception):
    """Something cannot be computed without the values of the logits."""


def require(condition: Any) -> None:
    """Raise :class:`NeedsValues` where this is not so."""
    if not condition:
        raise NeedsValues


def compute(name: str, logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
    """What an operation returns of pending logits; raises NeedsValues if it needs their values."""
    require(not logits.computed and name in OPERATIONS and name in _LAST_STEPS.get(logits.last_step, OPERATIONS))
    require(all(kwargs.pop(deprecated, None) is None for deprecated in ("size_average", "reduce")))
    try:
        _SIGNATURES[name].bind(logits, *args, **kwargs)
    except TypeError:  # arguments that it does not take
        raise NeedsValues from None
    return OPERATIONS[name](logits, *args, **kwargs)


def _is_vocabulary(logits: PendingLogits, dim: Any) -> bool:
    """Whether a dimension, which may be given as a tuple of one, is the vocabulary's, the last one."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return isinstance(dim, int) and dim in (-1, len(logits.shape) - 1)


# --- Tokens: the hidden states are reshaped and chosen ----------------------------------------------------------------


def _reshape(logits: PendingLogits, *shape: Any) -> Any:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    (*tokens, size), hidden_states = logits.shape, logits.hidden_states
    require(len(sizes) > 1)
    require(sizes[-1] == size or (sizes[-1] == -1 and math.prod(sizes[:-1]) == math.prod(tokens)))
    return logits.with_rows(hidden_states.reshape(*sizes[:-1], hidden_states.shape[-1]))


def _on_tokens(name: str, logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
    """A view whose last dimension is the vocabulary, as a tensor without memory shows: the one with a stride."""
    hidden_states, (*_, size) = logits.hidden_states, logits.shape
    like = torch.empty(size, dtype=torch.uint8, device="meta").expand(logits.shape)
    try:
        views, rows = (getattr(tensor, name)(*args, **kwargs) for tensor in (like, hidden_states))
    except (RuntimeError, IndexError):  # sizes of the vocabulary, which hidden states do not have, or wrong arguments
        raise NeedsValues from None
    several = isinstance(rows, tuple)
    pairs = list(zip(views, rows, strict=False)) if several else [(views, rows)]
    require(pairs)
    for view, part in pairs:
        require(view.dim() > 1 and view.shape[-1] == size and view.stride(-1) == 1 != size)
        require(part.shape == (*view.shape[:-1], hidden_states.shape[-1]))
    parts = tuple(logits.with_rows(part) for _, part in pairs)
    return parts if several else parts[0]


def _getitem(logits: PendingLogits, index: Any) -> Any:
    """Any index of tokens, and a slice of the vocabulary."""
    parts = index if isinstance(index, tuple) else (index,)
    require(not any(isinstance(part, bool) for part in parts))
    masks = [part for part in parts if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)]
    dims = sum([part is not None and part is not ... for part in parts]) + sum([mask.dim() - 1 for mask in masks])
    at = next((i for i, part in enumerate(parts) if part is ...), len(parts))
    whole = (slice(None),) * (len(logits.shape) - dims)  # what an ellipsis stands for
    parts = parts[:at] + whole + parts[at + 1 :]
    columns = parts[-1]
    require(isinstance(columns, slice) and columns.step in (None, 1))
    rows, head = logits.hidden_states[parts[:-1] + (slice(None),)], logits.head
    require(rows.dim() > 1)  # logits of one token are few
    # Graphs of torch 2.11 have no slice.indices.
    start, stop = (0, head.vocab_size) if columns == slice(None) else columns.indices(head.vocab_size)[:2]
    if (start, stop) == (0, head.vocab_size):
        return logits.with_rows(rows)
    # Log-probabilities of some columns depend on all of the head, which ranks may share.
    require(not logits.normalized and start < stop and head.ranks.size == 1)
    return logits.with_rows(rows, head=head.columns(columns))


# --- Steps: the head is changed ---------------------------------------------------------------------------------------


def _cast(name: str, logits: PendingLogits, *args: Any, **kwargs: Any) -> Any:
    """An empty tensor shows what the arguments mean."""
    try:
        like = getattr(torch.empty(0, dtype=logits.dtype, device=logits.device), name)(*args, **kwargs)
    except (TypeError, RuntimeError):  # arguments that torch refuses
        raise NeedsValues from None
    require(like.device == logits.device and like.is_floating_point() and {"memory_format", "copy"}.isdisjoint(kwargs))
    if like.dtype == logits.dtype:
        return logits
    # The engine's log-probabilities are rounded once, at the end.
    require(not logits.normalized or torch.promote_types(like.dtype, logits.dtype) == like.dtype)
    return logits.with_step("to", like.dtype).with_changes(dtype=like.dtype)


def _scale(name: str, logits: PendingLogits, other: Any) -> Any:
    """Multiply or divide by a number: a scale of the head, and of its soft-cap if there is one. Or multiply by a vector
    ``[V]``: a scale of each row."""
    head = logits.head
    require(not logits.normalized)
    if isinstance(other, Tensor):
        require(head.ranks.size == 1 and head.quantized is None and head.transform.softcap is None)
        require(name == "mul" and other.shape == logits.shape[-1:])
        require(other.is_floating_point() and other.device == head.weight.device)
        return logits.with_changes(head=head.scaled(other), dtype=torch.promote_types(logits.dtype, other.dtype))
    require(isinstance(other, (int, float)) and not isinstance(other, bool) and math.isfinite(other) and other != 0)
    by, transform = 1.0 / other if name == "div" else float(other), head.transform
    changes = {"logit_scale": transform.logit_scale * by}
    if transform.softcap is not None:
        changes["softcap"] = transform.softcap * by
    require(math.isfinite(changes["logit_scale"]) and 0 < changes.get("softcap", 1.0) < math.inf)
    return logits.with_step(name, other, **changes)


def _tanh(logits: PendingLogits) -> Any:
    require(not logits.normalized and logits.head.transform.softcap is None)
    return logits.with_step("tanh", softcap=1.0)


def _neg(logits: PendingLogits) -> Any:
    """Negate log-probabilities, as losses do; to negate other logits, their values are computed."""
    require(logits.normalized)
    return logits.with_step("neg")


def _add(logits: PendingLogits, other: Any) -> Any:
    """Add a bias ``[V]`` to a head's product; or add another product, such as an adapter's: both heads side by side."""
    head, size = logits.head, logits.head.vocab_size
    require(not logits.steps and head.ranks.size == 1)
    if isinstance(other, type(logits)):
        return _add_product(logits, other)
    require(isinstance(other, Tensor) and head.quantized is None)
    require((other.dtype, other.device) == (head.weight.dtype, head.weight.device))
    require(other.shape[-1:] == (size,) and other.numel() == size and other.dim() <= len(logits.shape))
    bias = other.flatten() if head.bias is None else head.bias + other.flatten()
    return logits.with_changes(head=head.with_fields(bias=bias), dtype=torch.promote_types(logits.dtype, other.dtype))


def _add_product(one: PendingLogits, two: PendingLogits) -> Any:
    require(not two.computed and not two.normalized and (one.autocast, one.shape) == (two.autocast, two.shape))
    require(two.head.ranks.size == 1 and two.head.transform.softcap is None and two.head.quantized is None)
    scale = two.head.transform.logit_scale
    parts = (one.hidden_states, one.head.weight), (two.hidden_states * scale, two.head.weight)
    mixed = any(a.dtype != b.dtype for a, b in zip(*parts, strict=True))
    # PEFT keeps adapters in fp32. They take the dtype of the hidden states of a head in half precision, to which PEFT
    # rounds the sum, and of a quantized head, whose weight takes it as well.
    rounded = one.head.quantized is not None or (one.dtype.itemsize == 2 and one.dtype == one.head.weight.dtype)
    require(not mixed or one.autocast is not None or rounded)
    dtype, heads = one.autocast or one.hidden_states.dtype, [part.head for part in (one, two)]
    biases = [(head.bias * head.transform.logit_scale).to(dtype) for head in heads if head.bias is not None]
    bias = sum(biases[1:], biases[0]) if biases else None
    hidden, weight = [torch.cat([part.to(dtype) for part in pair], -1) for pair in zip(*parts, strict=True)]
    head, dtype = one.head.with_fields(weight=weight, bias=bias), torch.promote_types(one.dtype, two.dtype)
    return one.with_changes(hidden_states=hidden, head=head, dtype=dtype)


def _softmax(
    name: str, logits: PendingLogits, dim: Any = None, *args: Any, dtype: torch.dtype | None = None, **others: Any
) -> Any:
    """Log-probabilities; or, of logits without gradients, probabilities, which ``kl_div`` takes of a teacher."""
    require(_is_vocabulary(logits, dim) and not logits.normalized and not (name == "softmax" and logits.requires_grad))
    dtype = next((arg for arg in args if isinstance(arg, torch.dtype)), dtype)
    if dtype is None and logits.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        dtype = torch.float32  # autocast runs it in fp32 on a GPU
    return (logits if dtype is None else _cast("to", logits, dtype)).with_step(name, -1)


def _kl_div(log_probs: PendingLogits, target: Any, *, reduction: str = "mean", log_target: bool = False) -> Any:
    """The terms of the divergence from a teacher, which have a sum; or that sum."""
    divisors = {"none": 1, "sum": 1, "batchmean": log_probs.shape[0], "mean": log_probs.numel()}
    require(isinstance(target, type(log_probs)) and not target.computed and not target.requires_grad)
    require(reduction in divisors and (log_probs.shape, log_probs.autocast) == (target.shape, target.autocast))
    steps = "log_softmax", "log_softmax" if log_target else "softmax"
    require((log_probs.last_step, target.last_step) == steps)
    terms = log_probs.with_step("kl_div", target, None, None, "none", log_target)
    terms = terms.with_changes(dtype=torch.promote_types(log_probs.dtype, target.dtype))
    return terms if reduction == "none" else _sum("sum", terms) / divisors[reduction]


# --- Reductions: the engine computes them -----------------------------------------------------------------------------


def _cross_entropy(
    name: str, logits: PendingLogits, target: Tensor, weight: Tensor | None = None, **options: Any
) -> Any:
    """``cross_entropy`` of logits; ``nll_loss``, which has no label smoothing, of log-probabilities."""
    require(isinstance(target, Tensor) and target.dtype == torch.int64 and target.dim() == 1 and len(logits.shape) == 2)
    require(logits.normalized == (name == "nll_loss") and not logits.negated)
    # Otherwise torch says what is wrong.
    require(options.get("reduction", "mean") in ("mean", "sum", "none") and 0 <= options.get("label_smoothing", 0) <= 1)
    require(weight is None or weight.shape == logits.shape[-1:])
    with logits.forward_autocast():
        loss = linear_cross_entropy(logits.hidden_states, logits.head, target, weight, **options)
    # Autocast runs it in fp32.
    return loss if autocast_dtype(loss.device) is not None else loss.to(logits.dtype)


def _gather(logits: PendingLogits, dim: int, index: Tensor) -> Any:
    """Logits or log-probabilities of some columns: ``logit = logp + lse``."""
    require(_is_vocabulary(logits, dim) and index.shape[:-1] == logits.shape[:-1] and index.shape[-1])
    if index.shape[-1] > 1:
        return _columns(logits, None, "selected_logps", selected=index.long())[0]
    # A column outside of the vocabulary is an error, the usual ignore_index too.
    return _columns(logits, index[..., 0].long(), "logp", options=EngineOptions(ignore_index=_NO_LABEL))[0]


def _columns(logits: PendingLogits, labels: Tensor | None, name: str, **options: Any) -> tuple[Tensor, Any]:
    """Some columns of logits or log-probabilities, and the statistics that they are made of."""
    statistics = logits.statistics(labels, name, *(() if logits.normalized else ("lse",)), **options)
    logps = getattr(statistics, name)
    logps = logps if labels is None else logps[..., None]
    logps = -logps if logits.negated else logps
    return (logps if logits.normalized else logps + statistics.lse[..., None]).to(logits.dtype), statistics


def _topk(logits: PendingLogits, k: Any, dim: Any = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The largest logits or log-probabilities, in descending order."""
    require(type(k) is int and 1 <= k <= logits.shape[-1] and largest and not logits.negated and len(logits.shape) > 1)
    require(_is_vocabulary(logits, dim))
    values, statistics = _columns(logits, None, "selected_logps", selected=Largest(k), metrics=("columns",))
    return torch.return_types.topk((values, statistics.columns))


#: Tokens whose logits exist at a time.
_ROWS = 1024


@torch.no_grad()
def _argmax(logits: PendingLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    """Of the model's logits, whose rounding decides ties; they exist for some tokens at a time."""
    require(_is_vocabulary(logits, dim))
    rows = logits.hidden_states.detach().reshape(-1, logits.hidden_states.shape[-1]).split(_ROWS)
    parts = [logits.with_changes(hidden_states=part).values().argmax(-1) for part in rows]
    columns = torch.cat(parts).view(logits.shape[:-1])
    return columns[..., None] if keepdim else columns


def _sum(
    name: str, logits: PendingLogits, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """``logsumexp``, ``mean`` or ``sum`` over the vocabulary; the last two over everything, too."""
    everything = dim is None and not keepdim and name != "logsumexp"
    require((everything or _is_vocabulary(logits, dim)) and not (name == "logsumexp" and logits.normalized))
    require((dtype or logits.dtype).is_floating_point)
    statistic = "lse" if name == "logsumexp" else "mean_logp" if logits.normalized else "mean_logit"
    statistic = "divergence" if logits.last_step == "kl_div" else statistic
    result = getattr(logits.statistics(None, statistic), statistic)
    result = -result if logits.negated else result
    if name == "sum" and statistic != "divergence":
        result = result * logits.shape[-1]  # in the engine's dtype, which holds sums that half precision would round
        if dtype is None and result.is_cuda and torch.is_autocast_enabled("cuda"):
            dtype = torch.float32
    if everything:
        result = getattr(result, name)()
    return (result[..., None] if keepdim else result).to(dtype or logits.dtype)


# --- The table --------------------------------------------------------------------------------------------------------

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "view reshape": _reshape,
    "contiguous": lambda logits: logits.with_rows(logits.hidden_states.contiguous()),
    "clone": lambda logits: logits.with_changes(),
    "detach": lambda logits: logits.with_rows(logits.hidden_states.detach(), head=logits.head.detach()),
    "__getitem__": _getitem,
    "mul multiply __mul__ __rmul__": partial(_scale, "mul"),
    "div divide true_divide __truediv__": partial(_scale, "div"),
    "tanh": _tanh,
    "neg negative __neg__": _neg,
    "add __add__ __radd__": _add,
    "kl_div": _kl_div,
    "gather": _gather,
    "take_along_dim": lambda logits, indices, dim: _gather(logits, dim, indices),
    "topk": _topk,
    "argmax": _argmax,
}
#: Functions that take the name of the operation first.
_NAMED: dict[str, Callable[..., Any]] = {
    "flatten split chunk unbind transpose permute unsqueeze squeeze": _on_tokens,
    "to float double half bfloat16": _cast,
    "softmax log_softmax": _softmax,
    "cross_entropy nll_loss": _cross_entropy,
    "logsumexp mean sum": _sum,
}
#: By the names of methods, functions and operators.
OPERATIONS = {name: function for names, function in _OPERATIONS.items() for name in names.split()}
OPERATIONS |= {name: partial(function, name) for names, function in _NAMED.items() for name in names.split()}
_SIGNATURES = {name: inspect.signature(function) for name, function in OPERATIONS.items()}
