"""Kept columns: log-probabilities over the columns that a sampler's cut of the vocabulary has kept for each token.

Each token and each of its columns is a pair of :mod:`liger_losses.kernels.given_columns`, which reads these rows of the
head alone. Of tokens without a cut, the softmax is over the whole vocabulary: :func:`liger_losses.linear_statistics`.

T tokens, H hidden size, V vocabulary size, K kept columns of a token, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.chunked.engine.autograd_functions import query_statistics
from liger_losses.chunked.engine.checks import check_tensor
from liger_losses.chunked.engine.given import Given, given_to_loss
from liger_losses.chunked.engine.head import Head, operand_dtype
from liger_losses.chunked.engine.input_checks import check_inputs
from liger_losses.chunked.engine.plan import EngineOptions, default_bound, default_workspace, device_memory
from liger_losses.chunked.engine.quantized_weight import QuantizedWeight
from liger_losses.chunked.engine.query import Query, Statistics
from liger_losses.chunked.engine.tokens import check_temperature, checked_temperatures, shift_labels
from liger_losses.kernels import LOGIT_DTYPES, choose_backend
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.given_columns import (
    NO_COLUMNS,
    Facts,
    GivenCall,
    GivenColumns,
    Products,
    evaluate,
    with_gradients,
)

#: What can be asked about kept columns.
SUPPORT_STATISTICS = ("logp", "entropy", "lse")
#: Reading the row of one kept column takes as long as computing so many of all columns by products, with gradients and
#: without: a token that keeps more than V / this takes the products. On an H200, from times of bf16 (8192 tokens, 870
#: columns each of 128256, H 4096: 40.3 and 19.0 ms by rows, 37.2 and 14.9 by products); on other devices, from those of
#: fp32 on two cores.
_COST = {"cuda": (160, 190), "cpu": (300, 300)}
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class TokenSupport:
    """The columns of the vocabulary that a sampler kept for each token (by top-k, top-p, min-p ...), its support.

    Tokens without any have no cut, and are scored over the whole vocabulary. What tokens without loss have does not
    matter. Only the rows of the ``lm_head`` that are kept are read: time and memory grow with their number, not with
    the vocabulary. Tokens with so many of them that products with the whole head take less time are scored by these.

    Args:
        ids: int64 or int32 columns, the ``S_t`` of token t: ``[..., K]``, one row for each label (with ``shift`` too),
            padded with -1 at any place; or ``[P]`` with ``offsets``.
        offsets: ``[T + 1]`` int64 or int32: in the order of the flattened labels, token t has
            ``ids[offsets[t]:offsets[t + 1]]``.
        add_label: add a token's label to its columns where they lack it; otherwise this is an error.
        sparse_grad: the gradient of the weight is a sparse tensor of the rows that some token keeps, as that of
            ``nn.Embedding(sparse=True)``, for optimizers that take one. All tokens' rows are read then, however many.
            Tokens without a cut still make it dense.

    Raises:
        TypeError, ValueError: not integer tensors, or of other shapes.
    """

    ids: Tensor
    offsets: Tensor | None = None
    add_label: bool = False
    sparse_grad: bool = False

    def __post_init__(self) -> None:
        given = {"ids": self.ids} if self.offsets is None else {"ids": self.ids, "offsets": self.offsets}
        for name, value in given.items():
            check_tensor(f"TokenSupport's {name}", value)
            if value.dtype not in _INTEGERS:
                raise TypeError(f"TokenSupport's {name} must be int64 or int32, got {value.dtype}.")
        for name in ("add_label", "sparse_grad"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"TokenSupport's {name} must be True or False, got {getattr(self, name)!r}.")
        if self.offsets is not None and (self.ids.dim() != 1 or self.offsets.dim() != 1):
            raise ValueError(
                f"TokenSupport(ids, offsets) takes ids [P] and offsets [tokens + 1], got {list(self.ids.shape)} and "
                f"{list(self.offsets.shape)}; leave offsets out for padded ids [..., K]."
            )

    def check(self, labels: Tensor, weight: Tensor) -> None:
        """Raise ValueError unless there is a row for each label, on the weight's device, and the weight may have a
        sparse gradient where one is asked for."""
        for name, value in (("ids", self.ids), ("offsets", self.offsets)):
            if value is not None and value.device != weight.device:
                raise ValueError(
                    f"TokenSupport's {name} are on {value.device}, the weight is on {weight.device}; move them with "
                    ".to(...)."
                )
        if self.offsets is None and (self.ids.shape[:-1] != labels.shape or self.ids.dim() == 0):
            raise ValueError(
                f"TokenSupport's ids must be [..., K], one row for each label of {list(labels.shape)}, got "
                f"{list(self.ids.shape)}."
            )
        if self.offsets is not None and len(self.offsets) != labels.numel() + 1:
            raise ValueError(
                f"TokenSupport's offsets must be [{labels.numel() + 1}], one more than there are labels, got "
                f"{list(self.offsets.shape)}."
            )
        if self.ids.numel() and not labels.numel():
            raise ValueError(f"there are no labels, but {self.ids.numel()} of TokenSupport's ids.")
        if self.sparse_grad and torch.is_grad_enabled() and weight.requires_grad and not weight.is_leaf:
            raise ValueError(
                "TokenSupport(sparse_grad=True) takes a weight that is a parameter, or detached: what this weight was "
                "computed with has no backward for sparse gradients. Leave sparse_grad out."
            )


def linear_support_statistics(
    hidden_states: Tensor,
    head: Head,
    labels: Tensor,
    support: TokenSupport,
    names: tuple[str, ...],
    options: EngineOptions,
    *,
    shift: int = 0,
) -> Statistics:
    """Per-token statistics over the kept columns, differentiable.

    Args:
        hidden_states: ``[..., H]``.
        head: labels and kept columns are those of its whole vocabulary, where ranks share it.
        labels: ``[...]`` int64, not yet shifted.
        support: the kept columns.
        names: of :data:`SUPPORT_STATISTICS`, without tokens that have no cut also ``selected_logps``: the
            log-probabilities ``[..., K]`` of the columns. The label must be among these for ``logp`` alone.
        options: how to stream the tokens without a cut; its workspace bounds the products of those with many columns,
            and the rows that are dequantized at a time.
        shift: position ``t`` predicts the label at ``t + shift``.

    Returns:
        :class:`Statistics` in the labels' shape, fp32 or fp64; 0 for tokens without loss.

    Raises:
        TypeError, ValueError: inputs that do not fit together; columns out of range, twice, or without the label; a
            sparse gradient in a compiled function, or of a weight that is no parameter.
        RuntimeError: another rank that shares the vocabulary has raised; a CUDA graph is being captured.
    """
    if not isinstance(support, TokenSupport):
        raise TypeError(f"support must be a TokenSupport(ids), got {type(support).__name__}.")
    device = head.weight.device
    # Exchanges that all ranks reach, before checks that one alone may fail.
    local = head.ranks.local(hidden_states)
    head.ranks.least_memory(device_memory(device), device)
    with head.ranks.agreement(device) as agreement:
        compute_dtype = check_inputs([local], head, [labels])
        support.check(labels, head.weight)
        if isinstance(head.transform.temperature, Tensor):
            check_temperature(head.transform.temperature, device, [labels.shape])
        labels = shift_labels(labels, options.ignore_index, shift) if shift else labels
        kept = _Kept.of(local, head, labels, support, shift, options, compute_dtype)
        found = evaluate(kept.call, head.bias, *kept.factors)
        numbers = kept.numbers(found.facts, "logp" in names)
        if numbers.wide:
            kept = kept.with_products(numbers.wide, operand_dtype(compute_dtype, device, kept.call.backend))
            found = evaluate(kept.call, head.bias, *kept.factors, before=found)
            kept.numbers(found.facts, "logp" in names)
        if head.ranks.size > 1:
            agreement.given = kept.given(names, labels, numbers)
    agreement.wait()
    parts = []
    if numbers.uncut:
        uncut = labels.masked_fill(Facts(*found.facts).uncut.view(labels.shape) == 0, options.ignore_index)
        parts += query_statistics([hidden_states], head, [uncut], Query(names), options)
    if numbers.cut or not parts:
        if head.ranks.size > 1:
            head.ranks.merge_(kept.call.given.labels, {name: getattr(found, name) for name in SUPPORT_STATISTICS})
            nothing = found.lse < NO_COLUMNS / 2  # no rank has a column
            for name in SUPPORT_STATISTICS:
                getattr(found, name).masked_fill_(nothing, 0.0)
        pairs = head.ranks.sum_(found.pairs(kept.call, head.bias)) if "selected_logps" in names else None
        *values, pairs = with_gradients(kept.call, found, pairs, head.bias, *kept.factors)
        kinds = dict(zip(SUPPORT_STATISTICS, [value.view(labels.shape) for value in values], strict=True))
        parts.append(Statistics(**kinds, selected_logps=None if pairs is None else pairs.view(support.ids.shape)))
    if len(parts) == 1:
        return Statistics(**{name: getattr(parts[0], name) for name in names})
    return Statistics(**{name: getattr(parts[0], name) + getattr(parts[1], name) for name in names})


@dataclass(frozen=True, eq=False)
class _Kept:
    """One call's inputs, of all tokens."""

    support: TokenSupport
    shift: int
    call: GivenCall
    factors: tuple[Tensor | None, ...]  # hidden states [T, H] and rows [V, H], one pair after another
    block_bytes: int  # of the logits of wide tokens at a time

    @classmethod
    def of(
        cls,
        hidden_states: Tensor,
        head: Head,
        labels: Tensor,
        support: TokenSupport,
        shift: int,
        options: EngineOptions,
        compute_dtype: torch.dtype,
    ) -> _Kept:
        device, ranks, size, transform = head.weight.device, head.ranks, head.vocab_size, head.transform
        wide = torch.promote_types(torch.float32, compute_dtype)
        backend = choose_backend(options.backend, [(device, wide)], dtypes=LOGIT_DTYPES)
        flat, block_bytes = labels.reshape(-1).contiguous(), options.workspace or default_bound()
        block_bytes = block_bytes or default_workspace(size, 4, device)
        if isinstance(transform.temperature, Tensor):
            each = transform.temperature.detach().reshape(-1).to(wide).where(flat != options.ignore_index, 1.0)
            transform = replace(transform, temperature=checked_temperatures(each))
        factors, slabs = _factors(hidden_states.reshape(-1, hidden_states.shape[-1]), head, block_bytes)
        trained = [t for t in (head.bias, *factors) if t is not None and t.requires_grad]
        cost = _COST["cuda" if device.type == "cuda" else "cpu"][0 if trained and torch.is_grad_enabled() else 1]
        sums_over = ranks.of_gradients
        given = GivenColumns.of(
            support.ids.flatten(0, -2) if support.offsets is None else support.ids,
            support.offsets,
            flat,
            options.ignore_index,
            range(size)[ranks.columns(size)],
            size,
            shift=shift,
            add_label=support.add_label,
            most=None if support.sparse_grad or head.batch_invariant else max(1, size // cost),
        )
        call = GivenCall(
            given,
            transform,
            slabs,
            backend,
            support.sparse_grad,
            NO_COLUMNS if ranks.size > 1 else 0.0,
            sums_over.start_sum_ if sums_over.size > 1 else None,
        )
        return cls(support, shift, call, factors, block_bytes)

    def with_products(self, number: int, dtype: torch.dtype) -> _Kept:
        """These inputs with products of the wide tokens, so many."""
        products = Products.of(self.call.given, number, dtype, self.block_bytes)
        return replace(self, call=replace(self.call, products=products))

    def given(self, names: tuple[str, ...], labels: Tensor, numbers: Facts) -> Given:
        """What all ranks that share the vocabulary must have in common."""
        call, hidden, found = self.call, self.factors[0], given_to_loss()
        assert hidden is not None
        sums, needs = "whole" if call.start_sum_ else "partial", torch.is_grad_enabled() and hidden.requires_grad
        found.values |= {
            "statistics": names,
            "kept columns are scored": f"{call.transform.said}, {call.backend}, sparse gradient: {call.sparse_grad}, "
            f"products: {None if call.products is None else call.products.dtype}",
            "gradients": f"{sums} ones of hidden states in {hidden.dtype}: {needs}",
        }
        found.add("labels", labels)
        found.add("numbers of kept columns", torch.tensor(numbers, device="cpu"))
        found.add("kept columns", self.support.ids)
        found.add("offsets of kept columns", self.support.offsets)
        if isinstance(call.transform.temperature, Tensor):
            found.add("temperatures", call.transform.temperature)
        return found

    def numbers(self, facts: Tensor, with_labels: bool) -> Facts:
        """How many tokens are cut and uncut, once the host knows that all is right, ``with_labels`` these too.

        Raises:
            ValueError: labels, offsets or ids that are wrong; names the first token.
        """
        given, ids, offsets, sums = self.call.given, self.support.ids, self.support.offsets, facts.sum(1)
        if offsets is not None:
            wrong = (offsets.diff() < 0).any() | (offsets[0] != 0) | (offsets[-1] != len(ids))
            sums = torch.cat([sums, wrong.view(1)])
        if given.wide is not None:
            sums = torch.cat([sums, given.wide.sum().view(1)])
        read = _start_reading(sums)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in self.factors[1::2]):
            _ = given.sorted  # which backward needs: the GPU sorts while the host waits
        counts, size = read(), given.vocab_size
        numbers = Facts._make([*counts[: len(facts)], 0 if given.wide is None else counts[-1]])

        def first(fact: str) -> int:
            return int(getattr(Facts(*facts), fact).nonzero()[0])

        def ids_of(token: int) -> Tensor:
            row = token + self.shift
            return ids.flatten(0, -2)[row] if offsets is None else ids[int(offsets[row]) : int(offsets[row + 1])]

        if numbers.no_labels:
            raise ValueError(
                f"labels must be in [0, {size}), the rows of the weight, or ignore_index={given.ignore_index}; found "
                f"the label {int(given.labels[first('no_labels')])}. Mask padding with ignore_index, and check that "
                "the tokenizer and the weight have the same vocabulary."
            )
        if offsets is not None and counts[len(facts)]:
            raise ValueError(
                f"TokenSupport's offsets must rise from 0 to {len(ids)}, the number of ids; they go from "
                f"{int(offsets[0])} to {int(offsets[-1])}, by {int(offsets.diff().amin())} or more."
            )
        if numbers.no_columns:
            token, padding = first("no_columns"), ", or -1 for padding" if offsets is None else ""
            raise ValueError(
                f"TokenSupport's ids must be in [0, {size}), the rows of the weight{padding}; token "
                f"{token + self.shift} of the flattened labels has ids from {int(ids_of(token).amin())} to "
                f"{int(ids_of(token).amax())}."
            )
        if numbers.twice:
            token = first("twice")
            again, counts = ids_of(token).unique(return_counts=True)
            raise ValueError(
                f"TokenSupport has ids twice: token {token + self.shift} of the flattened labels has "
                f"{again[(counts > 1) & (again >= 0)].tolist()[0]} more than once; give each once, and pad with -1."
            )
        if numbers.lacking and with_labels:
            token = first("lacking")
            raise ValueError(
                f"the label of {int(numbers.lacking)} tokens is not among their kept columns, so that its probability "
                f"is 0 (the first: label {int(given.labels[token])} of token {token + self.shift} of the flattened "
                "labels). Check that ids and labels are those of the same tokens; or add labels to the kept columns: "
                "TokenSupport(..., add_label=True)."
            )
        return numbers


def _factors(hidden: Tensor, head: Head, block_bytes: int) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
    """Hidden states ``[T, H]`` and rows ``[V, H]`` whose products are added: of the head, and of each adapter.

    Rows of a quantized weight are ``None``, beside what yields those that are dequantized at a time.
    """
    factors, slabs, size = list[Tensor | None](), list[Any](), 0
    if head.quantized is not None:
        size, dtype = head.quantized.shape[1], autocast_dtype(hidden.device) or hidden.dtype
        factors += [hidden[:, :size], None]
        slabs.append(partial(_dequantized, head.quantized, dtype, block_bytes))
    if head.weight.shape[1]:
        factors += [hidden[:, size:] if size else hidden, head.weight]
        slabs.append(None)
    for adapter in head.adapters:
        dropped = F.dropout(hidden, adapter.dropout) if adapter.dropout else hidden
        factors += [F.linear(dropped.to(adapter.a.dtype), adapter.a) * adapter.scale, adapter.b]
        slabs.append(None)
    return tuple(factors), tuple(slabs)


def _dequantized(weight: QuantizedWeight, dtype: torch.dtype, block_bytes: int) -> Iterator[tuple[int, Tensor]]:
    """The first column and the rows of one part of a weight after another, each within ``block_bytes``."""
    count, size = weight.shape
    step = max(1, block_bytes // (size * (weight.temporary_bytes + dtype.itemsize)))
    for first in range(0, count, step):
        yield first, weight.rows(first, min(first + step, count)).to(dtype)


def _start_reading(numbers: Tensor) -> Callable[[], list[int]]:
    """Copy numbers to the host beside what is queued next; the function that is returned waits for them alone."""
    if not numbers.is_cuda:
        return numbers.tolist
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured, so that the host cannot read which tokens have kept columns; capture the "
            "model without its loss."
        )
    host = numbers.to("cpu", non_blocking=True)  # into pinned memory
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(numbers.device))

    def read() -> list[int]:
        copied.synchronize()
        return host.tolist()

    return read
