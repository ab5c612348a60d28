"""Kept columns: log-probabilities over the columns that a sampler kept for each token.

:mod:`liger_losses.kernels.given_ids` checks the columns, and :mod:`liger_losses.kernels.given_columns` reads only these
rows of the head. For tokens without a cut, the softmax is over the whole vocabulary:
:func:`liger_losses.linear_statistics`.

T tokens, H hidden size, V vocabulary size, K kept columns of a token, P kept columns of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from liger_losses.checks import check_temperature, check_tensor, checked_temperatures
from liger_losses.chunked.engine.adapters import low_rank_factors
from liger_losses.chunked.engine.agreement import checksum
from liger_losses.chunked.engine.autograd_functions import statistics_of
from liger_losses.chunked.engine.call import make_call
from liger_losses.chunked.engine.head import Head, operand_dtype
from liger_losses.chunked.engine.input_checks import check_inputs
from liger_losses.chunked.engine.plan import EngineOptions, default_bound, default_workspace, device_memory
from liger_losses.chunked.engine.query import Query, Statistics
from liger_losses.chunked.engine.tokens import shift_labels
from liger_losses.kernels import LOGIT_DTYPES, choose_backend
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.given_columns import (
    ByBlocks,
    ByRows,
    GivenCall,
    GivenColumns,
    evaluate,
    project_,
    with_gradients,
)
from liger_losses.kernels.given_ids import Facts, GivenIds, find
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.reading import start_reading

#: Reading the row of one kept column takes as long as computing so many of all columns by products, with gradients and
#: without: a token that keeps more than V / this takes the products. On an H200, from times of bf16 (8192 tokens, 870
#: columns each of 128256, H 4096: 40.3 and 19.0 ms by rows, 37.2 and 14.9 by products); on other devices, from those of
#: fp32 on two cores.
_COST = {"cuda": (160, 190), "cpu": (300, 300)}
#: What the host reads.
_FACTS = "which tokens have kept columns; capture the model without its loss"
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class TokenSupport:
    """The vocabulary entries that a sampler kept for each token (by top-k, top-p, min-p ...).

    A token without kept entries is evaluated over the whole vocabulary. The entries of masked tokens have no influence.
    Only the kept rows of the ``lm_head`` are read, so time and memory grow with their number, not with the vocabulary.
    Tokens with very many kept entries are computed by products with the whole head, which is faster.

    Args:
        ids: int64 or int32 ids of the kept entries. ``[..., K]``, one row for each label (with ``shift`` too), padded
            with -1 at any place; or ``[P]`` with ``offsets``.
        offsets: ``[T + 1]`` int64 or int32: in the order of the flattened labels, token t has
            ``ids[offsets[t]:offsets[t + 1]]``.
        add_label: if a token's label is not among its kept entries, add it. By default, a missing label is an error.
        sparse_grad: make the gradient of the weight a sparse tensor of the rows that some token keeps, as for
            ``nn.Embedding(sparse=True)``, for optimizers that take one. The kept rows of all tokens are then read, for
            any number of kept entries. If some token has no kept entries, the gradient is dense.

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
        """Raise ValueError unless there is a row for each label, on the weight's device, and the weight can have the
        requested kind of gradient."""
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
            raise ValueError(f"TokenSupport has {self.ids.numel()} ids, but there are no labels; pass no ids.")
        if self.sparse_grad and torch.is_grad_enabled() and weight.requires_grad and not weight.is_leaf:
            raise ValueError(
                "TokenSupport(sparse_grad=True) needs a weight that is a parameter, or detached, got the result of an "
                "operation, whose backward cannot read sparse gradients; leave sparse_grad out."
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
        head: labels and kept columns count the whole vocabulary, where ranks share it.
        labels: ``[...]`` int64, not yet shifted.
        support: the kept columns.
        names: of ``logp``, ``entropy`` and ``lse``, without tokens that have no cut also ``selected_logps``: the
            log-probabilities ``[..., K]`` of the columns. The label must be among these for ``logp`` alone.
        options: how to stream the tokens without a cut; its workspace bounds the products of those with many columns,
            and the rows that are dequantized at a time.
        shift: position ``t`` predicts the label at ``t + shift``.

    Returns:
        :class:`Statistics` in the labels' shape, fp32 or fp64; 0 for tokens without loss.

    Raises:
        TypeError, ValueError: inputs that do not fit together; columns out of range, twice, or without the label; a
            sparse gradient in a compiled function, or of a weight that is no parameter.
        RuntimeError: another rank that shares the vocabulary makes another call; a CUDA graph is being captured.
    """
    if not isinstance(support, TokenSupport):
        raise TypeError(f"support must be a TokenSupport(ids), got {type(support).__name__}.")
    device, ranks = head.weight.device, head.ranks
    local = ranks.local(hidden_states)
    ranks.least_memory(device_memory(device), device)
    compute_dtype = check_inputs([local], head, [labels])
    support.check(labels, head.weight)
    if isinstance(head.transform.temperature, Tensor):
        check_temperature(head.transform.temperature, device, [labels.shape])
    labels = shift_labels(labels, options.ignore_index, shift) if shift else labels
    how = _How.of(local, head, labels, support, options, compute_dtype)
    groups = how.groups(local.reshape(-1, local.shape[-1]), labels.reshape(-1), support, shift)
    read = start_reading(functools.reduce(torch.add, [group.call.found.facts.sum(1) for group in groups]), _FACTS)
    for group in groups:
        project_(group.call, head.bias, *group.factors)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in groups[0].factors[1::2]):
        _ = groups[0].call.given.sorted  # which backward needs: the GPU sorts while the host waits
    found = [evaluate(group.call, names) for group in groups if ranks.size == 1]
    numbers = Facts._make(read())
    how.check(numbers, groups, support, "logp" in names)
    if ranks.size > 1:
        ranks.agree(*how.signature(names, local, labels, support, numbers))
    parts = list[Statistics]()
    if numbers.uncut:
        uncut = labels.masked_fill(groups[0].facts.uncut.view(labels.shape) == 0, options.ignore_index)
        parts += statistics_of(*make_call(hidden_states, head, uncut, Query(names), options))
    if numbers.cut or not parts:
        # Ranks sum their projections once all have agreed to the call.
        found = found or [evaluate(group.call, names) for group in groups]
        for group, values in zip(groups, found, strict=True):
            of_group = with_gradients(group.call, values, names, head.bias, *group.factors)
            parts.append(Statistics(**{name: group.of_all(value, labels.shape) for name, value in of_group.items()}))
    return Statistics(**{name: functools.reduce(torch.add, [getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True, eq=False)
class _Group:
    """Tokens whose products are taken in one way: all, or those with many columns."""

    ids: GivenIds
    call: GivenCall
    factors: tuple[Tensor | None, ...]  # hidden states [T, H] and rows [V, H], one pair after another

    @property
    def facts(self) -> Facts:
        return Facts(*self.call.found.facts)

    def of_all(self, values: Tensor, shape: torch.Size) -> Tensor:
        """A value of all tokens in the labels' shape, 0 for others; of each place ``[..., K]``."""
        if self.ids.tokens is not None:
            values = values.new_zeros(shape.numel(), *values.shape[1:]).index_add(0, self.ids.tokens, values)
        return values.view(*shape, *values.shape[1:])


@dataclass(frozen=True, eq=False)
class _How:
    """How a call's columns are computed."""

    head: Head
    transform: LogitTransform
    ignore_index: int
    backend: str
    most: int | None  # columns of a token whose rows are read; of tokens with more, products are taken
    by_products: ByBlocks
    sparse_grad: bool

    @classmethod
    def of(
        cls,
        hidden_states: Tensor,
        head: Head,
        labels: Tensor,
        support: TokenSupport,
        options: EngineOptions,
        compute_dtype: torch.dtype,
    ) -> _How:
        device, size, transform = head.weight.device, head.vocab_size, head.transform
        wide = torch.promote_types(torch.float32, compute_dtype)
        backend = choose_backend(options.backend, [(device, wide)], dtypes=LOGIT_DTYPES)
        block_bytes = options.workspace or default_bound() or default_workspace(size, 4, device)
        if isinstance(transform.temperature, Tensor):
            each = transform.temperature.detach().to(wide).where(labels != options.ignore_index, 1.0)
            transform = replace(transform, temperature=checked_temperatures(each.reshape(-1)))
        adapted = [tensor for adapter in head.adapters for tensor in (adapter.a, adapter.b)]
        trained = any(t is not None and t.requires_grad for t in (hidden_states, head.weight, head.bias, *adapted))
        cost = _COST["cuda" if device.type == "cuda" else "cpu"][0 if trained and torch.is_grad_enabled() else 1]
        most = None if support.sparse_grad or head.batch_invariant else max(1, size // cost)
        products = ByBlocks(operand_dtype(compute_dtype, device, backend), block_bytes)
        return cls(head, transform, options.ignore_index, backend, most, products, support.sparse_grad)

    def groups(self, hidden: Tensor, labels: Tensor, support: TokenSupport, shift: int) -> list[_Group]:
        """All tokens, without the columns of tokens that have many; and these tokens, if there are any.

        Raises:
            ValueError: offsets that do not rise from 0 to the number of ids.
        """
        size, ids, offsets = self.head.vocab_size, support.ids, support.offsets
        most, width, number, widest = self.most or ids.numel(), ids.shape[-1], 0, ids.shape[-1]
        ids = ids.contiguous() if offsets is not None else ids.flatten(0, -2).contiguous()
        here = self.head.ranks.columns(size)
        given = GivenIds(
            ids, offsets, labels.contiguous(), self.ignore_index, size, range(size)[here], shift, support.add_label,
            most, None, max(width, 1),
        )  # fmt: skip
        if len(labels) and (offsets is not None or width > most):
            lengths = (ids != -1).sum(1) if offsets is None else offsets.long().diff()
            wide = lengths > most
            told = [lengths.masked_fill(wide, 0).amax(), lengths.amax(), wide.sum()]
            told += [] if offsets is None else [lengths.amin(), offsets[0], offsets[-1]]
            longest, widest, number, *rises = start_reading(torch.stack([each.long() for each in told]), _FACTS)()
            if rises and (rises[0] < 0 or rises[1:] != [0, len(ids)]):
                raise ValueError(
                    f"TokenSupport's offsets must rise from 0 to {len(ids)}, the number of ids; they go from "
                    f"{rises[1]} to {rises[2]}, by {rises[0]} or more."
                )
            if offsets is not None:
                given = given._replace(width=max(longest, 1))
        groups = [self._group(given, hidden, ByRows(self.backend))]
        if number:
            # Of rows, whose tokens are some places ahead; the first ones' have no loss then.
            tokens = (torch.nonzero_static(wide, size=number)[:, 0] - shift) % len(labels)
            width = given.width if offsets is None else widest
            many = given._replace(most=ids.numel(), tokens=tokens, width=width)
            groups.append(self._group(many, hidden.index_select(0, tokens), self.by_products))
        return groups

    def _group(self, given: GivenIds, hidden: Tensor, products: ByRows | ByBlocks) -> _Group:
        head, ranks, dtype = self.head, self.head.ranks, autocast_dtype(hidden.device) or hidden.dtype
        parts = head.weights.factors(dtype, self.by_products.block_bytes)
        pairs = [(hidden[:, part.columns], part.rows) for part in parts]
        factors = tuple(chain(*pairs, *low_rank_factors(hidden, head.weight, head.adapters)))
        wide = functools.reduce(torch.promote_types, [f.dtype for f in factors if f is not None], torch.float32)
        found = find(given, wide, backend=self.backend)
        call = GivenCall(
            GivenColumns(found.columns, len(given.computed)),
            found,
            products,
            self.transform if given.tokens is None else self.transform.rows(given.tokens),
            tuple(part.parts for part in parts),
            self.backend,
            self.sparse_grad,
            ranks.sum_ if ranks.size > 1 else None,
            ranks.of_gradients.start_sum_ if ranks.of_gradients.size > 1 else None,
        )
        return _Group(given, call, factors)

    def check(self, numbers: Facts, groups: list[_Group], support: TokenSupport, logp: bool) -> None:
        """Raise ValueError, which names the first token, for wrong labels or ids, or, with ``logp``, for a label that
        is not among its token's ids."""
        size = self.head.vocab_size

        def first(fact: str) -> tuple[Tensor, int, str]:
            """The first such token's ids and label, and its name."""
            for group in groups:
                rows = getattr(group.facts, fact).nonzero()[:, 0].tolist()
                if rows:
                    token = rows[0] if group.ids.tokens is None else int(group.ids.tokens[rows[0]])
                    name = f"token {token + group.ids.shift} of the flattened labels"
                    return group.ids.row(token), int(group.ids.labels[token]), name
            raise AssertionError(fact)

        if numbers.no_labels:
            _, label, _ = first("no_labels")
            raise ValueError(
                f"labels must be in [0, {size}), the rows of the weight, or ignore_index={self.ignore_index}; found "
                f"the label {label}. Mask padding with ignore_index, and check that the tokenizer and "
                "the weight have the same vocabulary."
            )
        if numbers.no_columns:
            ids, _, token = first("no_columns")
            padding = ", or -1 for padding" if support.offsets is None else ""
            raise ValueError(
                f"TokenSupport's ids must be in [0, {size}), the rows of the weight{padding}; {token} has ids from "
                f"{int(ids.amin())} to {int(ids.amax())}."
            )
        if numbers.twice:
            ids, _, token = first("twice")
            again, counts = ids.unique(return_counts=True)
            raise ValueError(
                f"TokenSupport has ids twice: {token} has {again[(counts > 1) & (again >= 0)].tolist()[0]} more than "
                "once; give each once, and pad with -1."
            )
        if numbers.lacking and logp and not support.add_label:
            _, label, token = first("lacking")
            raise ValueError(
                f"the label of {int(numbers.lacking)} tokens is not among their kept columns, so its probability "
                f"is 0 (the first: label {label} of {token}). Check that ids and labels belong to "
                "the same tokens; or add labels to the kept columns: TokenSupport(..., add_label=True)."
            )

    def signature(
        self, names: tuple[str, ...], hidden: Tensor, labels: Tensor, support: TokenSupport, numbers: Facts
    ) -> tuple[dict[str, Any], dict[str, Callable[[], Any]]]:
        """What all ranks that share the vocabulary must have in common."""
        whole = self.head.ranks.of_gradients.size > 1
        needs = torch.is_grad_enabled() and hidden.requires_grad
        signature = {
            "statistics of kept columns": names,
            "labels": list(labels.shape),
            "scored": f"{self.transform.said}, {self.backend}, sparse gradient: {self.sparse_grad}, "
            f"products: {self.by_products.dtype} above {self.most}",
            "gradients": f"{'whole' if whole else 'partial'} ones of hidden states in {hidden.dtype}: {needs}",
        }
        values: dict[str, Callable[[], Any]] = {
            "checksum of labels": lambda: int(checksum(labels)),
            "checksum of kept columns": lambda: int(checksum(support.ids)),
            "numbers of kept columns": lambda: tuple(numbers),
        }
        return signature, values
