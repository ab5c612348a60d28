"""What one call asks for and how it runs: decided once, then only read.

N active tokens, H hidden size, V vocabulary size, C columns of a slice of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine.checks import check_names, check_vector
from liger_losses.chunked.engine.given import Given, given_to_loss, running
from liger_losses.chunked.engine.head import (
    Head,
    Projection,
    can_fuse,
    check_invariant,
    dequantized_bytes,
    operand_dtype,
)
from liger_losses.chunked.engine.input_checks import check_inputs, check_like_labels
from liger_losses.chunked.engine.plan import EngineOptions, Plan, Workload, default_bound, device_memory, make_plan
from liger_losses.chunked.engine.quantized_weight import QuantizedWeight, dequantize
from liger_losses.chunked.engine.shard import Agreement, VocabularyShard
from liger_losses.chunked.engine.teachers import Teacher, TeacherLogits, check_comparison, teacher_row_bytes_of
from liger_losses.chunked.engine.tokens import Counting, Tokens, check_temperature
from liger_losses.kernels import LOGIT_DTYPES, choose_backend
from liger_losses.kernels.divergence import TEMPORARIES
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform, said
from liger_losses.kernels.matmul import HALF_DTYPES
from liger_losses.kernels.softmax_stats import STATISTICS
from liger_losses.kernels.tracing import state


class Statistics(NamedTuple):
    """Per-token statistics of the logits' softmax; ``None`` for those not asked for, 0 for tokens without loss.

    :func:`liger_losses.kernels.softmax_stats.softmax_statistics` defines them; ``selected_logps [..., k]`` are the
    log-probabilities of selected columns, ``divergence`` is that from a teacher.
    """

    logp: Any = None
    entropy: Any = None
    lse: Any = None
    mean_logp: Any = None
    log_sum_sq_probs: Any = None
    mean_logit: Any = None
    argmax: Any = None
    selected_logps: Any = None
    divergence: Any = None


class DeclaredStatistics:
    """The :class:`Statistics` that a loss of a user's own reads: one that was not asked for is an AttributeError.

    It is no named tuple, of which torch.compile reads all fields.

    Args:
        values: the statistics, ``None`` for those not asked for.
        reader: the name of the loss.
        place: where it names its statistics.
    """

    def __init__(self, values: Sequence[Any], reader: str, place: str) -> None:
        self._reader, self._place = reader, place
        for name, value in zip(Statistics._fields, values, strict=True):
            if value is not None:
                setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in Statistics._fields:
            raise AttributeError(f"there is no statistic {name!r}; it must be one of {', '.join(Statistics._fields)}.")
        known = ", ".join([field for field in Statistics._fields if field in self.__dict__])
        raise AttributeError(
            f"{self._reader} reads statistics.{name}, which was not asked for; declared are {known or 'none'}. Add "
            f"{name!r} to {self._place}."
        )


def read_by(token_loss: Callable[..., Any], values: Sequence[Any]) -> Any:
    """The statistics that the function of a separable loss reads."""
    name = getattr(token_loss, "__name__", type(token_loss).__name__)
    return DeclaredStatistics(values, f"token_loss ({name})", "statistics=, or to metrics= where it needs no gradient")


def wrong_token_losses(losses: Any, count: int) -> ValueError:
    """The error for a ``token_loss`` that has not returned one value for each of so many tokens."""
    got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    return ValueError(
        f"token_loss must return one value per token, [{count}], got {got}. Return it before any sum or mean: the loss "
        "is the sum over the tokens; a mean's divisor goes into token_inputs."
    )


@dataclass(frozen=True)
class Comparison:
    """What a student is compared with, and how: see :func:`liger_losses.linear_divergence`."""

    teacher: Teacher | TeacherLogits
    divergence: Divergence
    temperature: float | Tensor = 1.0  # what both models' logits are divided by in the divergence

    def __post_init__(self) -> None:
        LogitTransform(self.temperature)  # raises unless it can be one


@dataclass(frozen=True)
class Query:
    """What is asked about each token.

    Per-token tensors (``selected``, ``token_inputs``, ``token_weights``, temperatures) have the labels' shape in what a
    user gives, and are ``[N]`` or ``[N, k]`` in a :class:`Call`.
    """

    statistics: tuple[str, ...]  # names of Statistics that are differentiated
    metrics: tuple[str, ...] = ()  # further names, without gradient
    class_weight: Tensor | None = None  # [V], the c of mean_logp
    selected: Tensor | None = None  # the columns of selected_logps
    comparison: Comparison | None = None  # the other side of the divergence
    token_loss: Callable[..., Any] | None = None  # of a separable loss: (statistics, labels, **inputs) -> [n]
    token_inputs: Mapping[str, Tensor] = field(default_factory=dict)  # what it gets as keywords
    token_weights: Mapping[str, Tensor] | None = None  # of a separable loss that is a weighted sum of statistics

    @property
    def separable(self) -> bool:
        """Whether the loss is a sum over tokens, each of its own statistics."""
        return self.token_loss is not None or self.token_weights is not None

    @property
    def of_exponentials(self) -> bool:
        """Whether blocks may hold exponentials of the logits instead of the logits."""
        return {*self.statistics} <= {"logp", "lse"} and {*self.metrics} <= {"logp", "lse", "mean_logit", "entropy"}

    @property
    def needs_logits(self) -> bool:
        """Whether blocks must hold whole rows of fp32 logits."""
        return self.selected is not None or self.comparison is not None

    def of_active_tokens(self, tokens: Tokens, dtype: torch.dtype, shard: VocabularyShard | None) -> Query:
        """The query with its per-token tensors gathered; tensors that enter the arithmetic are cast to ``dtype``."""
        selected, weights, comparison = self.selected, self.token_weights, self.comparison
        if comparison is not None and isinstance(comparison.temperature, Tensor):
            comparison = replace(comparison, temperature=tokens.temperatures(comparison.temperature, dtype))
        if selected is not None:
            selected = tokens.gather_like_labels(selected)
            if tokens.mask is not None:
                selected = selected.masked_fill(~tokens.mask[:, None], 0)  # tokens without loss may hold anything
            if shard is not None:
                shard.check_selected(selected)
        if weights is not None:
            weights = {n: tokens.masked(tokens.gather_like_labels(w.detach())).to(dtype) for n, w in weights.items()}
        return replace(
            self,
            metrics=tuple(name for name in self.metrics if name not in self.statistics),
            class_weight=None if self.class_weight is None else self.class_weight.detach().to(dtype).contiguous(),
            selected=selected,
            comparison=comparison,
            token_inputs={n: tokens.gather_like_labels(value.detach()) for n, value in self.token_inputs.items()},
            token_weights=weights,
        )


@dataclass(frozen=True)
class Call:
    """Everything about a call but the tensors that autograd tracks."""

    query: Query  # what is asked, with per-token tensors of the active tokens
    transform: LogitTransform  # from projections to logits
    batch_invariant: bool  # whether a token's statistics have the same bits in any batch
    shard: VocabularyShard | None  # the part of the vocabulary that this rank has; None for all of it
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

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The names that the user gets, differentiable ones first."""
        return self.query.statistics + self.query.metrics

    @cached_property
    def block_names(self) -> frozenset[str]:
        """The statistics that blocks compute."""
        merges = self.shard is not None or self.plan.slab > 0
        beside = {"max_logit"} if merges and "argmax" in self.outputs else set()
        return frozenset({*self.outputs, "lse", *beside})

    def by_tensor(self, values: Mapping[str, Tensor]) -> list[Statistics]:
        """From statistics ``[T]`` of all tokens to those of each tensor of labels, in its shape."""
        parts = {name: self.tokens.split(value) for name, value in values.items()}
        return [Statistics(**{name: p[i] for name, p in parts.items()}) for i in range(len(self.tokens.shapes))]


class OpenCall:
    """A call and the tensors it runs on: what the stream, its blocks and the gradients read.

    Of weight ``[V', H]`` and bias ``[V']`` (this rank's, if ranks share a vocabulary), V rows are used: fewer than V'
    for a divergence alone from a teacher of fewer. Without ``multiplies``, no quantized weight is dequantized.
    """

    def __init__(
        self, call: Call, weight: Tensor, bias: Tensor | None, hidden_states: Sequence[Tensor], multiplies: bool = True
    ) -> None:
        #: Rows of the head's gradient; those beyond ``vocab_size`` are 0.
        self.weight_rows, self.vocab_size = weight.shape[0], call.vocab_size
        #: The columns computed here, and each label's among them; for a label of another rank, any column.
        self.first_column, self.labels, self.owned = 0, call.tokens.labels, None
        #: Whose parts of the hidden states' gradients are summed.
        self.sums_over = call.shard
        class_weight = call.query.class_weight
        if call.shard is not None:
            columns = call.shard.columns(call.vocab_size)
            self.first_column, self.vocab_size = columns.start, columns.stop - columns.start
            local = self.labels - columns.start
            self.labels = local.clamp(0, self.vocab_size - 1)
            self.owned = self.labels == local
            class_weight = None if class_weight is None else class_weight[columns]
            self.sums_over = None if call.shard.partial_gradients else call.shard
        self.call, self.hidden_states = call, hidden_states
        self.weight = self.trained = weight if len(weight) == self.vocab_size else weight[: self.vocab_size]
        self.bias = None if bias is None else bias[: self.vocab_size].contiguous()
        self.count = call.tokens.count
        self.flat = [_flat(part) for part in hidden_states]
        #: Rows that are dequantized where they multiply the first columns of the hidden states. Where all are, at once,
        #: ``weight`` has them, beside the columns ``trained``, which get a gradient.
        self.quantized, self.frozen_columns = None, 0
        if call.quantized is not None:
            self.frozen_columns, quantized = call.quantized.shape[1], call.quantized.part(0, self.vocab_size)
            if not call.work.dequantized_bytes:
                self.quantized = quantized
            elif multiplies:
                self.weight = dequantize(quantized, self.weight, call.work.operand_dtype)
        self.projection = Projection(self.weight, call.work.operand_dtype, call.plan.weight_chunk, self.quantized)
        self.epilogue = Epilogue(call.transform, self.bias, class_weight)

    def merge_(self, rows: slice, *softmaxes: Mapping[str, Tensor]) -> None:
        """Replace statistics of the columns computed here by those of the whole vocabulary, of some tokens."""
        assert self.call.shard is not None
        labels, class_weight = self.call.tokens.labels[rows], self.call.query.class_weight
        self.call.shard.merge_(labels, *softmaxes, class_weight=class_weight)


def _flat(hidden_states: Tensor) -> Tensor:
    """``[T, H]``, or the tensor itself where that would copy it: then only the active tokens are gathered."""
    try:
        return hidden_states.view(-1, hidden_states.shape[-1])
    except RuntimeError:
        return hidden_states


_DIFFERENTIABLE: tuple[str, ...] = tuple(name for name in STATISTICS if name != "argmax")


class CheckedInputs(NamedTuple):
    """The inputs of a call that fit together."""

    hidden_states: tuple[Tensor, ...]
    labels: tuple[Tensor, ...] | Tokens
    shapes: tuple[torch.Size, ...]  # of each tensor of labels
    compute_dtype: torch.dtype
    vocab_size: int  # the number of columns that the query is about

    @classmethod
    def of(cls, hidden_states: Any, head: Head, labels: Any, query: Query) -> CheckedInputs:
        """Raise TypeError or ValueError unless the inputs fit together.

        ``hidden_states`` and ``labels`` are tensors or sequences of them, ``labels`` or the :class:`Tokens` selected
        from them.
        """
        alone = not isinstance(hidden_states, (list, tuple))
        hidden = (hidden_states,) if alone else tuple(hidden_states)
        if not isinstance(labels, Tokens):
            labels = (labels,) if alone else tuple(labels)
        compute_dtype = check_inputs(hidden, head, labels)
        shapes = labels.shapes if isinstance(labels, Tokens) else tuple(part.shape for part in labels)
        return cls(hidden, labels, shapes, compute_dtype, _check_query(query, head, shapes))


def make_call(
    hidden_states: Any, head: Head, labels: Any, query: Query, options: EngineOptions
) -> tuple[CheckedInputs, Call | None]:
    """Check the inputs, select the active tokens, and decide how to run; no call where only shapes are asked for.

    Ranks that share a vocabulary agree on the call, or all raise an error.
    """
    if head.shard is None:
        checked = CheckedInputs.of(hidden_states, head, labels, query)
        return checked, None if state.shapes_only else _Draft(checked, head, query, options).call()
    device, call = head.weight.device, None
    alone = not isinstance(hidden_states, (list, tuple))
    # Exchanges that all ranks reach, before checks of which one rank alone may fail.
    hidden_states = [head.shard.local(part) for part in ([hidden_states] if alone else hidden_states)]
    teacher = None if query.comparison is None else query.comparison.teacher
    if isinstance(teacher, Teacher):
        _ = teacher.local_hidden_states  # the teacher keeps them
    memory = head.shard.least_memory(device_memory(device), device)
    with Agreement(head.shard.group, device) as agreement:
        checked = CheckedInputs.of(hidden_states[0] if alone else hidden_states, head, labels, query)
        if not state.shapes_only:
            draft = _Draft(checked, head, query, options, memory)
            agreement.given = draft.given()
            if device.type == "cpu":  # which also finds what is wrong with the values of one rank
                call = draft.call()
    try:
        if not state.shapes_only and call is None:
            call = draft.call()  # while the ranks compare what they were given
    except Exception:
        with suppress(ValueError, RuntimeError):  # the exchanges that follow from it are those of all ranks
            agreement.wait()
        raise
    agreement.wait()
    return checked, call


class _Draft:
    """All of a call but what depends on the number of active tokens, which a GPU counts meanwhile."""

    def __init__(
        self, checked: CheckedInputs, head: Head, query: Query, options: EngineOptions, memory: int | None = None
    ) -> None:
        if not isinstance(options, EngineOptions):
            raise TypeError(f"options must be liger_losses.EngineOptions(...), got {type(options).__name__}.")
        self.checked, self.head, self.query, self.options, self.memory = checked, head, query, options, memory
        hidden, labels, shapes, compute_dtype, vocab_size = checked
        device, grad = head.weight.device, torch.is_grad_enabled()
        wide = torch.promote_types(torch.float32, compute_dtype)
        self.backend = backend = choose_backend(options.backend, [(device, wide)], dtypes=LOGIT_DTYPES)
        self.operand = operand = operand_dtype(compute_dtype, device, backend)
        self.dequantized_bytes = 0
        if head.quantized is not None or query.comparison is not None:
            teacher = None if query.comparison is None else query.comparison.teacher
            heads = [head, teacher.head] if isinstance(teacher, Teacher) else [head]
            most = sum(shape.numel() for shape in shapes)
            self.dequantized_bytes = dequantized_bytes(heads, most, operand, options.workspace, memory)
        if head.batch_invariant:
            check_invariant(head, backend, query.comparison is not None, self.dequantized_bytes)
        count = head.vocab_size, options.ignore_index, options.compact, backend
        self.labels: Tokens | Counting = labels if isinstance(labels, Tokens) else Counting(labels, *count)
        self.needs_hidden = tuple(grad and part.requires_grad for part in hidden)
        self.needs_weight = grad and head.weight.requires_grad
        self.needs_bias = grad and head.bias is not None and head.bias.requires_grad
        self.dense = _dense(hidden, operand)
        self.fused_products = can_fuse(head, operand, backend, self.dequantized_bytes > 0)
        self.fused = self.fused_products and not self.needs_bias and not query.needs_logits
        # fp16 cannot hold exponentials of every size.
        self.exponentials = self.fused and operand == torch.bfloat16 and query.of_exponentials
        if head.shard is not None and "entropy" in query.metrics:  # of a rank's columns and labels of other ranks
            self.exponentials = False
        self.grad_weight_dtype = torch.promote_types(head.weight.dtype, options.accum_dtype or head.weight.dtype)
        if head.shard is not None:
            compared = vocab_size if query.comparison is None else min(vocab_size, query.comparison.teacher.vocab_size)
            head.shard.check_columns(compared)

    def given(self) -> Given:
        """What all ranks that share a vocabulary must have in common: the rest of a call follows."""
        query, options, (hidden, _, shapes, _, vocab_size) = self.query, self.options, self.checked
        in_a_loss, found = running.loss is not None, given_to_loss()
        kinds = [name for name in ("dense", "fused_products", "fused", "exponentials") if getattr(self, name)]
        needs = [name for name, need in (("weight", self.needs_weight), ("bias", self.needs_bias)) if need]
        sums = "partial" if self.head.shard is not None and self.head.shard.partial_gradients else "whole"
        found.values |= {
            "labels' shapes": [tuple(shape) for shape in shapes],
            "hidden states": f"{hidden[0].shape[-1]} in {', '.join(str(part.dtype) for part in hidden)}",
            "ignore_index": options.ignore_index,
            "statistics": query.statistics,
            "metrics": query.metrics,
            "a loss per token": query.separable,
            "logits": self.head.transform.said,
            "columns": vocab_size,
            "gradients": f"{sums} ones of hidden states {self.needs_hidden}, {needs} in {self.grad_weight_dtype}",
            "workspace": options.workspace or f"default workspace {default_bound()}",
            "chunk_size": options.chunk_size,
            "strategy": options.strategy,
            "compact": options.compact,
            "products": f"in {self.operand} by {self.backend} ({', '.join(kinds)})",
        }
        compared = self.head.transform if query.comparison is None else query.comparison
        if query.comparison is not None:
            teacher, kind = query.comparison.teacher, "logits"
            if isinstance(teacher, Teacher):
                kind = f"hidden states of {teacher.head.hidden_size}"
            found.values["teacher"] = f"{kind}, {teacher.vocab_size} columns"
            found.values["divergence"] = f"{query.comparison.divergence}, temperature {said(compared.temperature)}"
        found.checksums["labels"] = self.labels.checksum(self.backend)
        of_tokens: dict[str, Any] = {}
        if isinstance(compared.temperature, Tensor):
            check_temperature(compared.temperature, self.head.weight.device, self.checked.shapes)
            of_tokens["temperatures"] = compared.temperature.float()
        if query.selected is not None:
            of_tokens["selected columns"] = query.selected
        if not in_a_loss:  # a loss has noted these by its own names
            of_tokens |= {f"token_inputs[{name!r}]": value for name, value in query.token_inputs.items()}
            of_tokens |= {f"weights[{name!r}]": value for name, value in (query.token_weights or {}).items()}
        for name, value in of_tokens.items():
            found.add(name, self.labels.masked_values(value))
        found.add("class weights", query.class_weight)
        return found

    def call(self) -> Call:
        """The call, once the active tokens are known."""
        head, query, options, operand, fused = self.head, self.query, self.options, self.operand, self.fused
        _, _, _, compute_dtype, vocab_size = self.checked
        tokens = self.labels.tokens() if isinstance(self.labels, Counting) else self.labels
        temporaries, teacher_row_bytes = 4 if self.backend == "torch" or self.needs_bias else 0, 0
        teacher_hidden_bytes, divergence_tiles = 0, False
        at_once = self.dequantized_bytes > 0
        dequantized = 0 if at_once or head.quantized is None else head.dequantized_row_bytes(operand)
        if query.comparison is not None:
            temporaries, teacher = TEMPORARIES if self.backend == "torch" else 0, query.comparison.teacher
            teacher_row_bytes = teacher_row_bytes_of(teacher, vocab_size, operand)
            if isinstance(teacher, Teacher) and not at_once:
                dequantized += teacher.head.dequantized_row_bytes(operand)
            if isinstance(teacher, Teacher) and self.fused_products and not self.needs_bias and head.shard is None:
                # A bias's gradient is summed before anything is rounded, which takes whole rows of logits.
                divergence_tiles = can_fuse(teacher.head, operand, self.backend, at_once)
                if tokens.indices[0] is not None or not _dense([teacher.hidden_states], operand):
                    teacher_hidden_bytes = 2 * teacher.head.hidden_size * operand.itemsize
        work = Workload(
            tokens=tokens.count,
            hidden_size=head.hidden_size,
            # Ranks take blocks of the same tokens, whose size depends on the largest part of the vocabulary.
            vocab_size=vocab_size if head.shard is None else min(vocab_size, max(head.shard.sizes)),
            operand_dtype=operand,
            weight_dtype=operand if at_once and head.quantized is not None else head.weight.dtype,
            device=head.weight.device,
            temporaries=temporaries,
            gathers=tokens.indices[0] is not None or not self.dense,
            fused=fused,
            exponentials=self.exponentials,
            fused_products=self.fused_products,
            teacher_row_bytes=teacher_row_bytes,
            ranks=1 if head.shard is None else len(head.shard.sizes),
            device_memory=self.memory,
            teacher_hidden_bytes=teacher_hidden_bytes,
            divergence_tiles=divergence_tiles,
            dequantized_row_bytes=dequantized,
            dequantized_bytes=self.dequantized_bytes,
        )
        plan = make_plan(work, options.workspace, options.chunk_size)
        if dequantized and plan.rows < tokens.count and head.shard is None and not query.needs_logits:
            # Every block of tokens would dequantize the head again.
            fused = can_fuse(head, operand, self.backend, True) and not self.needs_bias
            exponentials = operand == torch.bfloat16 and query.of_exponentials and not self.needs_weight
            work = work.in_slabs(fused, exponentials)
            plan = make_plan(work, options.workspace, options.chunk_size)
        grad_weight_dtype, needs_weight, strategy = self.grad_weight_dtype, self.needs_weight, "statistics"
        if any(self.needs_hidden) or needs_weight or self.needs_bias:
            # A half-precision grad_weight must not be rounded many times.
            few_roundings = grad_weight_dtype not in HALF_DTYPES or plan.few_blocks or not needs_weight
            # fp16 gradients underflow without the loss scale, which is only known in backward.
            one_pass = query.separable and torch.float16 not in (compute_dtype, operand) and few_roundings
            frozen = not (needs_weight or self.needs_bias or query.needs_logits) and len(query.statistics) == 1
            # Those that are exact for these inputs and fit the workspace, the cheapest first.
            allowed = {"one_pass": one_pass, "frozen_head": frozen, "resident": plan.resident}
            single = [name for name, possible in allowed.items() if possible]
            # Logits that are kept are one block, of all tokens.
            tall_blocks = plan.tall_blocks or (plan.resident and not one_pass)
            possible = [*single, "two_pass"] if tall_blocks or not needs_weight else ["two_pass", *single]
            strategy = possible[0]
            if options.strategy is not None:
                check_names([options.strategy], possible, "strategy for these inputs")
                strategy = options.strategy
        if plan.slab or (query.selected is not None and strategy == "two_pass" and not plan.few_blocks):
            # Every block adds to all of grad_weight: many of them are accumulated wide, at the cost of a buffer.
            grad_weight_dtype = torch.promote_types(grad_weight_dtype, torch.float32)
        transform = head.transform
        if isinstance(transform.temperature, Tensor):
            transform = replace(transform, temperature=tokens.temperatures(transform.temperature, work.logits_dtype))
        return Call(
            query=query.of_active_tokens(tokens, work.logits_dtype, head.shard),
            transform=transform,
            batch_invariant=head.batch_invariant,
            shard=head.shard,
            quantized=head.quantized,
            vocab_size=vocab_size,
            tokens=tokens,
            work=work,
            plan=plan,
            strategy=strategy,
            grad_weight_dtype=grad_weight_dtype,
            backend=self.backend,
            needs_hidden=self.needs_hidden,
            needs_weight=needs_weight,
            needs_bias=self.needs_bias,
        )


def _check_query(query: Query, head: Head, shapes: Sequence[torch.Size]) -> int:
    """Raise TypeError or ValueError for a query that does not fit; return the number of columns that are computed."""
    if query.class_weight is not None:
        check_vector("class_weight", query.class_weight, head.weight, head.vocab_size)
    names, vocab_size = _DIFFERENTIABLE, head.vocab_size
    if query.selected is not None:
        names = ("selected_logps", "logp", "lse")
    if query.comparison is not None:
        names = ("divergence", "logp")
        check_comparison(query.comparison.teacher, query.comparison.divergence, head, shapes[0])
        if "logp" not in query.statistics:
            # The divergence is of the columns that both models have; the student's log-probabilities, of all it has.
            vocab_size = min(vocab_size, query.comparison.teacher.vocab_size)
    divided = head.transform if query.comparison is None else query.comparison
    if isinstance(divided.temperature, Tensor):
        check_temperature(divided.temperature, head.weight.device, shapes)
    beside = "" if query.selected is None else " beside selected_logps"
    check_names(query.statistics, names, f"differentiable statistic{beside}")
    check_names(query.metrics, ("entropy",) if query.comparison is not None else STATISTICS, "statistic")
    if query.selected is not None:
        if len(shapes) != 1:
            raise TypeError("selected= goes with one tensor of hidden states, not with a sequence of them.")
        check_like_labels("selected", query.selected, shapes[0], head)
        if query.selected.dtype != torch.int64 or query.selected.shape[:-1] != shapes[0]:
            raise ValueError(
                f"selected must be int64 columns [..., k] for each label of {tuple(shapes[0])}, got "
                f"{query.selected.dtype} of {tuple(query.selected.shape)}."
            )
    like = shapes[0] if len(shapes) == 1 else torch.Size([sum([math.prod(shape) for shape in shapes])])
    for name, value in {**query.token_inputs, **(query.token_weights or {})}.items():
        check_like_labels(name, value, like, head)
    return vocab_size


def _dense(hidden: Sequence[Tensor], operand: torch.dtype) -> bool:
    """Whether hidden states are multiplied as they are, where all tokens are active: no copy is made of them."""
    first, *more = hidden
    contiguous = first.is_contiguous() or (first.dim() == 2 and first.stride(1) == 1)
    return contiguous and not more and first.dtype == operand
