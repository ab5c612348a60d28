"""Kept columns: log-probabilities over the columns that a sampler's cut of the vocabulary has kept for each token.

T tokens, N of them active with kept columns, H hidden size, V vocabulary size, K kept columns of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from liger_losses.chunked.engine.checks import check_labels, check_tensor
from liger_losses.chunked.engine.given import given_to_loss
from liger_losses.chunked.engine.head import Head, dequantized_bytes, operand_dtype
from liger_losses.chunked.engine.input_checks import check_inputs
from liger_losses.chunked.engine.plan import EngineOptions, default_bound, default_workspace, device_memory
from liger_losses.chunked.engine.query import Statistics
from liger_losses.chunked.engine.ranks import VocabularyRanks
from liger_losses.chunked.engine.tokens import check_temperature, checked_temperatures, shift_labels
from liger_losses.chunked.engine.weights import weights_of
from liger_losses.kernels import LOGIT_DTYPES, choose_backend
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.support_columns import Facts, KeptIds, TokenColumns, find_columns
from liger_losses.kernels.support_logps import NO_COLUMNS, Exchange, SupportOptions, support_statistics
from liger_losses.kernels.support_products import Products
from liger_losses.kernels.tracing import record, state

#: What can be asked about kept columns.
SUPPORT_STATISTICS = ("logp", "entropy", "lse")
#: Reading the row of one kept column takes as long as computing so many of all columns by products, with gradients and
#: without: a token that keeps more than V / this takes the products. On an H200, from times of bf16 (8192 tokens, 870
#: columns each of 128256, H 4096: 40.3 and 19.0 ms by rows, 37.2 and 14.9 by products); on other devices, from those of
#: fp32 on two cores.
_COST = {"cuda": (160, 190), "cpu": (300, 300)}
_NO_LIMIT = 2**31 - 1
_INTEGERS = (torch.int32, torch.int64)


@record
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


def check_support_head(head: Head) -> None:
    """Raise TypeError for quantized weights and adapters of a vocabulary that ranks share, whose rows are not read."""
    if head.shard is not None and (head.quantized is not None or head.adapters):
        raise TypeError(
            "support= takes a head with one floating-point weight where ranks share the vocabulary, not a quantized "
            "one, or one with adapters; leave support out, or pass Head(dequantized_weight, group=group)."
        )


def _readable(hidden_states: Tensor, head: Head, tokens: int, options: EngineOptions) -> tuple[Tensor, Head]:
    """Hidden states and a head whose rows can be read: adapters become columns of it, and a quantized weight exists in
    floating point until backward.

    Raises:
        ValueError: a quantized weight that takes more than half of the workspace.
    """
    if head.adapters:
        hidden_states, head = head.expand(hidden_states)
    if head.quantized is None or state.shapes_only:
        return hidden_states, head
    operand = autocast_dtype(hidden_states.device) or hidden_states.dtype
    if not dequantized_bytes([head], tokens, operand, options.workspace, None):
        size = head.vocab_size * head.hidden_size * operand.itemsize
        raise ValueError(
            f"support= reads single rows of the head, so that a quantized weight is dequantized as a whole, {size} "
            "bytes, and that takes at most half of the workspace: give a larger workspace=, or leave support out."
        )
    beside = head.weight.to(operand)
    rows = weights_of(head.weight[:, :0], head.quantized).dequantized(operand).trained
    weight = torch.cat([rows, beside], 1) if beside.shape[1] else rows
    return hidden_states, head.with_fields(weight=weight, quantized=None)


def linear_support_statistics(
    hidden_states: Tensor,
    head: Head,
    labels: Tensor,
    support: TokenSupport,
    names: tuple[str, ...],
    options: EngineOptions,
    *,
    whole: Callable[..., Statistics],
    shift: int = 0,
) -> Statistics:
    """Per-token statistics over the kept columns, differentiable.

    Args:
        hidden_states: ``[..., H]``.
        head: labels and kept columns are those of its whole vocabulary, where ranks share it.
        labels: ``[...]`` int64, not yet shifted.
        support: the kept columns.
        names: of :data:`SUPPORT_STATISTICS`.
        options: how to stream the tokens without a cut; its workspace bounds the products of those with many columns.
        whole: :func:`liger_losses.linear_statistics`, for tokens without a cut.
        shift: position ``t`` predicts the label at ``t + shift``.

    Returns:
        :class:`Statistics` in the labels' shape, fp32 or fp64; 0 for tokens without loss.

    Raises:
        TypeError, ValueError: inputs that do not fit together; columns out of range, twice, or without the label;
            ``compact=False``; a sparse gradient in a compiled function, or of a weight that is no parameter.
        RuntimeError: another rank that shares the vocabulary has raised; a CUDA graph is being captured.
    """
    if not isinstance(support, TokenSupport):
        raise TypeError(f"support must be a TokenSupport(ids), got {type(support).__name__}.")
    check_support_head(head)
    if not options.compact:
        raise ValueError("support= finds on the host which tokens have kept columns; leave compact at True.")
    if support.sparse_grad and (state.shapes_only or state.recorded is not None):
        raise ValueError("no compiled function returns sparse gradients; leave sparse_grad=True out of it.")
    given_pair = hidden_states, head
    if head.adapters or head.quantized is not None:
        check_labels(labels)
        hidden_states, head = _readable(hidden_states, head, labels.numel(), options)
    shard, local = head.shard, hidden_states
    if shard is not None:
        # Exchanges that all ranks reach, before checks that one alone may fail.
        local = shard.local(hidden_states)
        shard.least_memory(device_memory(head.weight.device), head.weight.device)
    agreed = None if shard is None else shard.agreement(head.weight.device)
    with agreed or nullcontext():
        compute_dtype = check_inputs([local], head, [labels])
        support.check(labels, head.weight)
        if isinstance(head.transform.temperature, Tensor):
            check_temperature(head.transform.temperature, head.weight.device, [labels.shape])
        wide = torch.promote_types(torch.float32, compute_dtype)
        if not state.shapes_only:
            labels = shift_labels(labels, options.ignore_index, shift) if shift else labels
            backend = choose_backend(options.backend, [(head.weight.device, wide)], dtypes=LOGIT_DTYPES)
            call = _Call.of(local, head, labels, support, shift, backend, options.ignore_index, compute_dtype)
            columns, facts = find_columns(call.kept, backend=backend)
            read, narrow = _start_reading(facts.sum(1)), None
            if shard is None and facts.is_cuda:
                narrow = call.statistics(columns)  # before the host knows: what errors there are is no harm to it
            numbers = Facts(*read())
            call.check(facts, numbers)
            most_columns = call.of_many_columns(facts, numbers) if numbers.wide else None
            if agreed is not None and shard is not None:
                needs = torch.is_grad_enabled() and local.requires_grad
                sums = "partial" if shard.partial_gradients else "whole"
                agreed.given = given = given_to_loss()
                given.values |= {
                    "statistics": names,
                    "kept columns are scored": str(call),
                    "gradients": f"{sums} ones of hidden states in {local.dtype}: {needs}",
                }
                given.add("labels", labels)
                given.add("numbers of kept columns", torch.tensor(numbers, device="cpu"))
                given.add("kept columns", support.ids)
                given.add("offsets of kept columns", support.offsets)
                if isinstance(call.options.transform.temperature, Tensor):
                    given.add("temperatures", call.options.transform.temperature.float())
    if agreed is not None:
        agreed.wait()
    if state.shapes_only:
        return Statistics(**{name: local.new_empty(labels.shape, dtype=wide) for name in names})
    parts = []
    if numbers.uncut:  # of the head as it was given, which may be streamed
        uncut = labels.masked_fill(facts[Facts._fields.index("uncut")].view(labels.shape) == 0, options.ignore_index)
        # The backward of a compiled function repeats this call: it takes nothing from what other calls have recorded.
        before = state.recorded, state.known
        state.recorded = state.known = None
        try:
            found = whole(*given_pair, uncut, names, options=options)
        finally:
            state.recorded, state.known = before
        parts.append({name: getattr(found, name) for name in names})
    if most_columns is not None:
        parts.append(call.by_products(*most_columns, options.workspace))
    if numbers.pairs or not parts:
        parts.append(narrow or call.statistics(columns))
    return Statistics(**{name: sum_of([part[name].view(labels.shape) for part in parts]) for name in names})


@dataclass(frozen=True, eq=False)
class _Call:
    """One call's inputs, of all tokens."""

    hidden: Tensor  # [T, H]
    head: Head
    kept: KeptIds
    options: SupportOptions
    operand_dtype: torch.dtype

    @classmethod
    def of(
        cls,
        hidden_states: Tensor,
        head: Head,
        labels: Tensor,
        support: TokenSupport,
        shift: int,
        backend: str,
        ignore_index: int,
        compute_dtype: torch.dtype,
    ) -> _Call:
        hidden, flat = hidden_states.reshape(-1, hidden_states.shape[-1]), labels.reshape(-1).contiguous()
        ids, device, size = support.ids, head.weight.device, head.vocab_size
        operand = operand_dtype(compute_dtype, device, backend)
        tensors = (hidden_states, head.weight, *([] if head.bias is None else [head.bias]))
        grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        cost = _COST["cuda" if device.type == "cuda" else "cpu"][0 if grad else 1]
        most = _NO_LIMIT if support.sparse_grad else max(1, size // cost)
        first = 0 if head.shard is None else head.shard.first_column
        kept = KeptIds(
            ids.flatten(0, -2) if support.offsets is None else ids,
            support.offsets, flat, ignore_index, size, first, first + len(head.weight), shift, support.add_label,
            fewest=0, most=most,
        )  # fmt: skip
        transform = head.transform
        if isinstance(transform.temperature, Tensor):
            own = transform.temperature.detach().reshape(-1).to(torch.promote_types(torch.float32, compute_dtype))
            transform = replace(transform, temperature=checked_temperatures(own.where(flat != ignore_index, 1.0)))
        return cls(hidden, head, kept, SupportOptions(transform, backend, support.sparse_grad), operand)

    def __str__(self) -> str:
        options = self.options
        return (
            f"{options.transform.said}, {options.backend}, sparse gradient: {options.sparse_grad}, products of "
            f"{self.operand_dtype} above {self.kept.most} columns"
        )

    def statistics(self, columns: TokenColumns) -> dict[str, Tensor]:
        """Statistics ``[T]`` by reading the rows of each token's columns."""
        options = self.options._replace(exchange=_exchange(self.head.shard, self.kept.labels))
        found = support_statistics(self.hidden, self.head.weight, self.head.bias, columns, options)
        return dict(zip(SUPPORT_STATISTICS, found, strict=True))

    def of_many_columns(self, facts: Tensor, numbers: Facts) -> tuple[Tensor, TokenColumns]:
        """The tokens ``[N]`` with more columns than rows are read for, and these columns."""
        flags = facts[Facts._fields.index("wide")] > 0
        tokens = torch.nonzero_static(flags, size=int(numbers.wide)).squeeze(-1)
        kept = self.kept._replace(fewest=self.kept.most, most=_NO_LIMIT)
        columns = find_columns(kept, backend=self.options.backend)[0].compacted(tokens)
        ordered, order = columns.sorted
        owners = columns.tokens[order]
        twice = (ordered[1:] == ordered[:-1]) & (owners[1:] == owners[:-1])
        if twice.any():
            raise self._twice(int(tokens[owners[1:][twice][0]]))
        return tokens, columns

    def by_products(self, tokens: Tensor, columns: TokenColumns, workspace: int | None) -> dict[str, Tensor]:
        """Statistics ``[T]`` of these tokens by products with the whole head."""
        size, labels, count = self.kept.vocab_size, self.kept.labels, len(self.hidden)
        everything = len(tokens) == count
        hidden = self.hidden if everything else self.hidden.index_select(0, tokens)
        block_bytes = workspace or default_bound() or default_workspace(size, 4, hidden.device)
        exchange = _exchange(self.head.shard, labels[tokens])
        transform, products = self.options.transform.rows(tokens), Products(self.operand_dtype, block_bytes)
        options = self.options._replace(transform=transform, exchange=exchange, products=products)
        found = support_statistics(hidden, self.head.weight, self.head.bias, columns, options)
        values = dict(zip(SUPPORT_STATISTICS, found, strict=True))
        if everything:
            return values
        return {name: value.new_zeros(count).index_copy(0, tokens, value) for name, value in values.items()}

    def check(self, facts: Tensor, numbers: Facts) -> None:
        """Raise ValueError for ids, offsets and labels that are wrong, and name the first token."""
        kept, first = self.kept, {}
        for name, row, number in zip(Facts._fields, facts, numbers, strict=True):
            if name in _ERRORS and number:
                first[name] = int(row.nonzero()[0])
        if "no_labels" in first:
            raise ValueError(
                f"labels must be in [0, {kept.vocab_size}), the rows of the weight, or ignore_index="
                f"{kept.ignore_index}; found the label {int(kept.labels[first['no_labels']])}. Mask padding with "
                "ignore_index, and check that the tokenizer and the weight have the same vocabulary."
            )
        if "no_offsets" in first:
            assert kept.offsets is not None
            raise ValueError(
                f"TokenSupport's offsets must rise from 0 to {len(kept.ids)}, the number of ids; they go from "
                f"{int(kept.offsets[0])} to {int(kept.offsets[-1])}, by {int(kept.offsets.diff().amin())} or more."
            )
        if "no_columns" in first:
            padding = ", or -1 for padding" if kept.offsets is None else ""
            token = first["no_columns"]
            ids = self._ids_of(token)
            raise ValueError(
                f"TokenSupport's ids must be in [0, {kept.vocab_size}), the rows of the weight{padding}; token "
                f"{token + kept.shift} of the flattened labels has ids from {int(ids.amin())} to {int(ids.amax())}."
            )
        if "twice" in first:
            raise self._twice(first["twice"])
        if "lacking" in first and not kept.add_label:
            token = first["lacking"]
            raise ValueError(
                f"the label of {int(numbers.lacking)} tokens is not among their kept columns, so that its probability "
                f"is 0 (the first: label {int(kept.labels[token])} of token {token + kept.shift} of the flattened "
                "labels). Check that ids and labels are those of the same tokens; or add labels to the kept columns: "
                "TokenSupport(..., add_label=True)."
            )

    def _ids_of(self, token: int) -> Tensor:
        row, offsets = token + self.kept.shift, self.kept.offsets
        return self.kept.ids[row] if offsets is None else self.kept.ids[int(offsets[row]) : int(offsets[row + 1])]

    def _twice(self, token: int) -> ValueError:
        ids, counts = self._ids_of(token).unique(return_counts=True)
        again = ids[(counts > 1) & (ids >= 0)].tolist()
        return ValueError(
            f"TokenSupport has ids twice: token {token + self.kept.shift} of the flattened labels has {again[0]} more "
            "than once; give each once, and pad with -1."
        )


_ERRORS = ("lacking", "no_columns", "twice", "no_labels", "no_offsets")


def sum_of(values: list[Tensor]) -> Tensor:
    """The sum, of one value that value itself."""
    return values[0] if len(values) == 1 else torch.stack(values).sum(0)


def _exchange(shard: VocabularyRanks | None, labels: Tensor) -> Exchange | None:
    """What ranks that share the vocabulary exchange about tokens with these labels."""
    if shard is None:
        return None

    def merge_(logp: Tensor, entropy: Tensor, lse: Tensor) -> None:
        shard.merge_(labels, {"logp": logp, "entropy": entropy, "lse": lse})
        nothing = lse < NO_COLUMNS / 2  # no rank has a column
        for value in (logp, entropy, lse):
            value.masked_fill_(nothing, 0.0)

    return Exchange(merge_, None if shard.partial_gradients else shard.start_sum_)


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
