"""One call: what it computes, which tokens are active, and how it runs.

N active tokens, H hidden size, V vocabulary size, C columns of a slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine.decision import Decision, decide
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.plan import EngineOptions, Plan, Workload, default_bound, device_memory
from liger_losses.chunked.engine.query import Query, changed
from liger_losses.chunked.engine.ranks import ALONE, Ranks
from liger_losses.chunked.engine.teachers import Teacher
from liger_losses.chunked.engine.tokens import Counting, Tokens, listed
from liger_losses.chunked.engine.weights import Projection, QuantizedWeight, weights_of
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform, said


@dataclass(frozen=True)
class Call:
    """Everything about a call but the tensors that autograd tracks."""

    query: Query  # what is asked, with per-token tensors of the active tokens
    transform: LogitTransform  # from projections to logits
    batch_invariant: bool  # whether a token's statistics have the same bits in any batch
    ranks: Ranks  # who has which columns
    quantized: QuantizedWeight | None  # multiplied by the first columns of the hidden states, before the weight
    vocab_size: int  # the number of columns, of all ranks
    tokens: Tokens  # the active ones
    work: Workload  # dtypes, and what blocks hold
    plan: Plan
    strategy: str  # one of STRATEGIES
    grad_weight_dtype: torch.dtype  # in which the weight's gradient is accumulated
    backend: str
    needs_hidden: tuple[bool, ...]  # which hidden states need a gradient
    needs_weight: bool
    needs_bias: bool
    decision: Decision  # what is known of such a call with any number of active tokens
    outputs: tuple[str, ...]  # the names that the user gets, differentiable ones first
    block_names: frozenset[str]  # the statistics that blocks compute

    def token_losses(self, values: Mapping[str, Tensor], rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        """The tokens' losses ``[n]``, and their derivatives by each statistic: autograd's, unless the loss gives them.

        Args:
            values: ``[n]``, the statistics of these tokens.
            rows: which of the active tokens these are.
        """
        tokens, query, dtype = self.tokens, self.query, self.work.logits_dtype
        inputs, labels = query.token_inputs, tokens.labels
        if rows.stop - rows.start < labels.shape[0]:
            inputs, labels = {name: value[rows] for name, value in inputs.items()}, labels[rows]
        known = getattr(query.token_loss, "closed_form", False)
        with torch.set_grad_enabled(not known):
            leaves = values if known else {name: values[name].detach().requires_grad_() for name in query.statistics}
            named = {name: leaves[name] for name in query.statistics} | {name: values[name] for name in query.metrics}
            losses, derivatives = query.evaluated(named, labels, inputs)
            losses = tokens.masked(losses, rows)
            if derivatives is None:
                wanted = [leaves[name] for name in query.statistics] if losses.requires_grad else []
                found = torch.autograd.grad(losses.sum(), wanted, allow_unused=True) if wanted else ()
                derivatives = {name: g for name, g in zip(query.statistics, found, strict=False) if g is not None}
        # Masked again: where a loss is not finite, not even 0 times its derivative is. Of fp64 weights, a function's
        # own derivatives are fp64.
        return losses.detach(), {n: tokens.masked(g.detach().to(dtype), rows) for n, g in derivatives.items()}


class OpenCall:
    """A call and the tensors it runs on: what the stream, its blocks and the gradients read.

    Of weight ``[V', r]`` and bias ``[V']`` (this rank's, if ranks share a vocabulary), V rows are used: fewer than V'
    for a divergence alone from a teacher of fewer. Without ``multiplies``, no quantized weight is dequantized.
    """

    def __init__(
        self, call: Call, weight: Tensor, bias: Tensor | None, hidden_states: Sequence[Tensor], multiplies: bool = True
    ) -> None:
        #: The columns computed here, and each label's among them; for a label of another rank, any column.
        columns, self.labels, self.others = call.ranks.share(call.tokens.labels, call.vocab_size)
        self.first_column, self.vocab_size = columns.start, columns.stop - columns.start
        #: Rows of the head's gradient; those beyond ``vocab_size`` are 0.
        self.weight_rows = weight.shape[0]
        class_weight = None if call.query.class_weight is None else call.query.class_weight[columns]
        self.call, self.hidden_states = call, hidden_states
        weights = weights_of(weight, call.quantized)
        if self.vocab_size < self.weight_rows:
            weights = weights.columns(slice(0, self.vocab_size))
        self.trained, self.device = weights.trained, weight.device
        self.bias = None if bias is None else bias[: self.vocab_size].contiguous()
        self.count = call.tokens.count
        self.flat = _flat(hidden_states)
        if call.work.dequantized_bytes and multiplies:
            weights = weights.dequantized(call.work.operand_dtype)
        self.projection = Projection(weights, call.work.operand_dtype, call.plan.weight_chunk, call.batch_invariant)
        #: The head's rows ``[V, H]`` as fused kernels read them; ``None`` where the plan has no such kernels.
        self.weight: Any = weights.matrix(call.work.operand_dtype)
        self.epilogue = Epilogue(call.transform, self.bias, class_weight)
        #: How many of the hidden states' columns are multiplied by rows that get no gradient.
        self.frozen_columns = call.work.hidden_size - self.trained.shape[1]

    def of_tokens(self, call: Call) -> OpenCall:
        """The same tensors for a call of some of the tokens."""
        opened = changed(self, call=call, count=call.tokens.count)
        _, opened.labels, opened.others = call.ranks.share(call.tokens.labels, call.vocab_size)
        opened.epilogue = self.epilogue._replace(transform=call.transform)
        return opened

    def merge_(self, rows: slice, *softmaxes: Mapping[str, Tensor]) -> None:
        """Merge statistics of this rank's columns into statistics of the whole vocabulary, for some tokens."""
        if self.others is not None:
            labels, class_weight = self.call.tokens.labels[rows], self.call.query.class_weight
            self.call.ranks.merge_(labels, *softmaxes, class_weight=class_weight)


def _flat(hidden_states: Sequence[Tensor]) -> list[Tensor]:
    """``[T, H]`` each, or the tensor itself where that would copy it: then only the active tokens are gathered."""
    found: list[Tensor] = []
    for part in hidden_states:
        try:
            found.append(part if part.dim() == 2 else part.view(-1, part.shape[-1]))
        except RuntimeError:
            found.append(part)
    return found


#: ``(weight, bias, *hidden_states)``, which autograd tracks.
Tensors = tuple[Any, ...]


def make_call(
    hidden_states: Any, head: Head, labels: Any, query: Query, options: EngineOptions
) -> tuple[Tensors, Call]:
    """Check the inputs, select the active tokens, and decide how to run.

    Ranks that share a vocabulary agree on the call, or all raise an error.
    """
    if head.adapters:
        hidden_states, head = head.expand(hidden_states)
    if head.ranks is not ALONE:
        return _make_shared_call(hidden_states, head, labels, query, options)
    hidden, labels = listed(hidden_states, labels)
    decision = decide(hidden, head, labels, query, options)
    return (head.weight, head.bias, *hidden), _call(decision, head, query, _counted(decision, labels))


def _make_shared_call(
    hidden_states: Any, head: Head, labels: Any, query: Query, options: EngineOptions
) -> tuple[Tensors, Call]:
    device, alone = head.weight.device, not isinstance(hidden_states, (list, tuple))
    hidden_states = [head.ranks.local(part) for part in ([hidden_states] if alone else hidden_states)]
    hidden_states = hidden_states[0] if alone else hidden_states
    teacher = None if query.comparison is None else query.comparison.teacher
    if isinstance(teacher, Teacher):
        _ = teacher.local_hidden_states  # the teacher keeps them
    memory = head.ranks.least_memory(device_memory(device), device)
    hidden, labels = listed(hidden_states, labels)
    decision = decide(hidden, head, labels, query, options, memory)
    counted = _counted(decision, labels)
    signature = _signature(decision, head, hidden, query, counted.shapes)
    head.ranks.agree(signature, {"checksum of labels": lambda: int(counted.checksum(decision.backend))})
    return (head.weight, head.bias, *hidden), _call(decision, head, query, counted)


def _counted(decision: Decision, labels: Sequence[Tensor] | Tokens) -> Tokens | Counting:
    """The active tokens, which a GPU counts while the host does what needs no count."""
    if isinstance(labels, Tokens):
        return labels
    return Counting(labels, decision.head_columns, decision.options.ignore_index, decision.compact, decision.backend)


def _call(decision: Decision, head: Head, query: Query, counted: Tokens | Counting) -> Call:
    """The call, once the active tokens are known."""
    tokens = counted.tokens() if isinstance(counted, Counting) else counted
    gathers = tokens.indices[0] is not None or tokens.ignored is not None  # of one tensor, whether rows are copied
    run = decision.runs.get((tokens.count, gathers)) or decision.run(tokens.count, gathers)
    transform = head.transform
    dtype = run.work.logits_dtype
    if isinstance(transform.temperature, Tensor):
        transform = replace(transform, temperature=tokens.temperatures(transform.temperature, dtype))
    made = object.__new__(Call)  # whose constructor takes the host longer
    made.__dict__.update(
        run.known,
        query=query.of_active_tokens(tokens, dtype, head.ranks, run.takes_numbers),
        transform=transform,
        batch_invariant=head.batch_invariant,
        ranks=head.ranks,
        quantized=head.quantized,
        tokens=tokens,
        decision=decision,
    )
    return made


def _signature(
    made: Decision, head: Head, hidden: tuple[Tensor, ...], query: Query, shapes: Sequence[torch.Size]
) -> dict[str, Any]:
    """What all ranks that share a vocabulary must have in common: the rest of a call follows."""
    options, comparison = made.options, query.comparison
    kinds = [name for name in ("gathers", "fused_products", "fused", "exponentials") if getattr(made.work, name)]
    needs = [name for name, need in (("weight", made.needs_weight), ("bias", made.needs_bias)) if need]
    sums = "partial" if head.ranks.partial_gradients else "whole"
    facts = {
        "labels' shapes": [tuple(shape) for shape in shapes],
        "hidden states": f"{hidden[0].shape[-1]} in {', '.join(str(part.dtype) for part in hidden)}",
        "ignore_index": options.ignore_index,
        "statistics": query.statistics,
        "metrics": query.metrics,
        "a loss per token": query.separable,
        "logits": head.transform.said,
        "columns": made.vocab_size,
        "gradients": f"{sums} ones of hidden states {made.needs_hidden}, {needs} in {made.grad_weight_dtype}",
        "workspace": options.workspace or f"default workspace {default_bound()}",
        "chunk_size": options.chunk_size,
        "strategy": options.strategy,
        "compact": options.compact,
        "products": f"in {made.work.operand_dtype} by {made.backend} ({', '.join(kinds)})",
    }
    if comparison is not None:
        teacher, kind = comparison.teacher, "logits"
        if isinstance(teacher, Teacher):
            kind = f"hidden states of {teacher.head.hidden_size}"
        facts["teacher"] = f"{kind}, {teacher.vocab_size} columns"
        facts["divergence"] = f"{comparison.divergence}, temperature {said(comparison.temperature)}"
    return facts
