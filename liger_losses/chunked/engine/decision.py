"""How a call runs, as far as its signature determines: decided once, and cached.

N active tokens, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_losses.caller import warn
from liger_losses.checks import check_device, check_names, see
from liger_losses.chunked.engine.head import Head, check_invariant, dequantized_bytes, operand_dtype
from liger_losses.chunked.engine.input_checks import check, shapes_of
from liger_losses.chunked.engine.plan import (
    EngineOptions,
    Plan,
    Workload,
    bound_of,
    default_bound,
    make_plan,
    padded,
)
from liger_losses.chunked.engine.query import Comparison, EqualWeights, Query
from liger_losses.chunked.engine.ranks import ALONE
from liger_losses.chunked.engine.teachers import Teacher, TeacherLogits, teacher_row_bytes_of
from liger_losses.chunked.engine.tokens import Tokens
from liger_losses.chunked.engine.weights import can_fuse
from liger_losses.kernels import LOGIT_DTYPES, choose_backend
from liger_losses.kernels._triton import BACKEND_VARIABLE
from liger_losses.kernels.autograd import autocast_dtype, within_transform
from liger_losses.kernels.divergence import TEMPORARIES
from liger_losses.kernels.matmul import HALF_DTYPES, wide_dtype


class Run(NamedTuple):
    """What depends on the number of active tokens too."""

    work: Workload
    plan: Plan
    strategy: str  # one of STRATEGIES
    grad_weight_dtype: torch.dtype  # in which the weight's gradient is accumulated
    takes_numbers: bool  # whether a weight of all tokens may be a number
    known: dict[str, Any]  # the fields of a call that follow from the decision


@dataclass(frozen=True, eq=False)
class Decision:
    """All decisions about a call that depend on shapes, dtypes, options and settings, and not on the active tokens."""

    vocab_size: int  # the number of columns that the query is about
    head_columns: int  # the number of columns of the head, which has all labels
    backend: str
    needs_hidden: tuple[bool, ...]
    needs_weight: bool
    needs_bias: bool
    compact: bool  # whether tokens without loss are dropped
    #: Which strategies are exact for the query and these gradients, whatever the sizes of blocks.
    one_pass: bool
    frozen: bool
    needs_logits: bool  # whether blocks hold whole rows of logits, each of whose gradients reaches all of grad_weight
    options: EngineOptions
    grad_weight_dtype: torch.dtype
    sums_bytes: int  # of an fp32 grad_weight, where parts of it would be added up in half precision; else 0
    outputs: tuple[str, ...]  # the names that the user gets, differentiable ones first
    block_names: frozenset[str]  # the statistics that blocks compute
    shared_columns: int  # how many columns student and teacher have in common
    has_two_softmaxes: bool  # whether the hard loss and the divergence are of different softmaxes of the student
    work: Workload  # of no tokens, which ``gathers`` where hidden states are copied even if all tokens are active
    runs: dict[tuple[int, bool], Run] = field(default_factory=dict)

    def run(self, tokens: int, gathers: bool) -> Run:
        """How so many active tokens run; ``gathers`` says whether some are masked, so that their rows are copied."""
        run = self.runs.get((tokens, gathers))
        if run is None:
            if len(self.runs) >= MOST_DECISIONS:
                self.runs.clear()
            options, planned = self.options, tokens
            if tokens >= MANY and bound_of(options.workspace) is None and options.chunk_size is None:
                # A GPU is idle while the host plans, and each step of training has another number.
                planned = padded(tokens)
            run = self.runs.get((planned, gathers))
            if run is None:
                work = replace(self.work, tokens=planned, gathers=gathers or self.work.gathers)
                run = self.runs[planned, gathers] = self._chosen(work)
            self.runs[tokens, gathers] = run
        return run

    def _chosen(self, work: Workload) -> Run:
        """The cheapest strategy that is exact here and fits the workspace, or the requested one."""
        plan = make_plan(work, self.options.workspace, self.options.chunk_size)
        dtype, strategy = self.grad_weight_dtype, "statistics"
        if any(self.needs_hidden) or self.needs_weight or self.needs_bias:
            # A half-precision grad_weight must not be rounded many times; with a teacher, two passes change nothing.
            one_pass = self.one_pass and (plan.few_blocks or not self.sums_bytes or work.teacher_row_bytes > 0)
            allowed = {"one_pass": one_pass, "frozen_head": self.frozen, "resident": plan.resident}
            single = [name for name, possible in allowed.items() if possible and not work.walks]
            # Logits that are kept are one block, of all tokens.
            tall_blocks = plan.tall_blocks or (plan.resident and not one_pass)
            possible = [*single, "two_pass"] if tall_blocks or not self.needs_weight else ["two_pass", *single]
            strategy = self.options.strategy or possible[0]
            check_names([strategy], possible, "strategy for these inputs")
        if self.sums_bytes and not self._rounds_few_times(plan, strategy):
            plan, dtype = self._exact(work, plan, strategy)
        known = {name: getattr(self, name) for name in _OF_CALLS}
        known |= {"work": work, "plan": plan, "strategy": strategy, "grad_weight_dtype": dtype}
        return Run(work, plan, strategy, dtype, strategy == "one_pass" and work.exponentials, known)

    def _rounds_few_times(self, plan: Plan, strategy: str) -> bool:
        """Whether a half-precision grad_weight is a sum of few parts."""
        if strategy == "two_pass" and not self.needs_logits:
            return plan.few_tiles
        return plan.few_blocks or strategy == "resident"

    def _exact(self, work: Workload, plan: Plan, strategy: str) -> tuple[Plan, torch.dtype]:
        """Fewer parts if they fit; else the same, added up in fp32, at the cost of a buffer.

        Without a bound, a buffer of fp32 is faster than blocks whose logits are computed in shorter parts.
        """
        workspace, chunk_size = self.options.workspace, self.options.chunk_size
        taller, bound = make_plan(work.taller(), workspace, chunk_size), bound_of(workspace)
        shorter = taller.part_rows < plan.part_rows
        if self._rounds_few_times(taller, strategy) and not (shorter and bound is None):
            return taller, self.grad_weight_dtype
        if bound is not None and self.sums_bytes <= bound // 2:
            with suppress(ValueError):  # too little is left for one row
                return make_plan(work, bound - self.sums_bytes, chunk_size), torch.float32
        if bound is not None and not torch.compiler.is_compiling():
            warn(
                f"a workspace of {bound} bytes has no room for the gradients of an eighth of the tokens. To be exact, "
                f"the gradient of the weight is accumulated in fp32, in {self.sums_bytes} bytes beyond the workspace. "
                "Pass a larger workspace, or accum_dtype=torch.float32 to allow it." + see("workspace"),
            )
        return plan, torch.float32


#: Fields of a decision that a call has too.
_OF_CALLS = "vocab_size", "backend", "needs_hidden", "needs_weight", "needs_bias", "outputs", "block_names"
#: What :func:`decide` has found, by :func:`_signature`.
_decisions: dict[Any, Decision] = {}
MOST_DECISIONS = 1024
#: Of so many active tokens, a few more have the same plan, where no bound of the memory may refuse them.
MANY = 1024


def decide(
    hidden: tuple[Tensor, ...],
    head: Head,
    labels: tuple[Tensor, ...] | Tokens,
    query: Query,
    options: EngineOptions,
    memory: int | None = None,
) -> Decision:
    """:func:`check` a call, and decide how it runs; cached for calls of the same :func:`_signature`.

    ``memory`` is the number of bytes of the smallest device, where ranks share the vocabulary.

    Raises:
        TypeError, ValueError: inputs that do not fit together.
    """
    signature = _signature(hidden, head, labels, query, options, memory)
    try:
        found = None if signature is None else _decisions.get(signature)
    except TypeError:  # a name or option that cannot be hashed is wrong, which the checks say
        signature = found = None
    if found is None:
        found = _decide(hidden, head, labels, query, options, memory)
        if signature is not None:
            if len(_decisions) >= MOST_DECISIONS:
                _decisions.clear()
            _decisions[signature] = found
    return found


def _signature(
    hidden: tuple[Tensor, ...], head: Head, labels: Any, query: Query, options: EngineOptions, memory: int | None
) -> tuple[Any, ...] | None:
    """All that :func:`_decide` reads of a call; ``None`` for calls whose decision is not kept."""
    known = isinstance(options, EngineOptions) and isinstance(query.token_inputs, Mapping)
    if within_transform() or not known:
        return None
    weights = {} if query.token_weights is None else query.token_weights
    of_tokens = [weight for weight in weights.values() if not isinstance(weight, EqualWeights)] if weights else []
    of_labels = (labels.shapes, labels.ignored is None) if isinstance(labels, Tokens) else len(labels)
    targets = () if isinstance(labels, Tokens) else labels
    beside = query.class_weight, query.selected, *query.token_inputs.values(), *of_tokens
    names = query.statistics, query.metrics, tuple(query.token_inputs), tuple(weights), query.token_loss is not None
    of_columns = query.largest, query.registered
    settings = (
        torch.is_grad_enabled(),
        autocast_dtype(head.weight.device),
        default_bound(),
        os.environ.get(BACKEND_VARIABLE),
    )
    compared = None if query.comparison is None else _signature_of_comparison(query.comparison, head)
    tensors = _facts(*hidden, *targets, *beside)
    of_head = _signature_of_head(head)
    if tensors is None or of_head is None or (compared is None and query.comparison is not None):
        return None
    return len(hidden), of_labels, tensors, of_head, compared, names, of_columns, options, settings, memory


def _facts(*values: Any) -> tuple[Any, ...] | None:
    """What a decision reads of tensors, and numbers as they are; ``None`` where that cannot be told.

    It does not exist for DTensors, for tensors that torch traces, and for what is not a tensor.
    """
    facts: list[Any] = []
    for value in values:
        if value is None or type(value) is float or type(value) is int:
            facts.append(value)
        elif type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_nested:
            facts.append((value.shape, value.stride(), value.dtype, value.device, value.requires_grad))
        else:
            return None
    return tuple(facts)


def _signature_of_head(head: Head) -> tuple[Any, ...] | None:
    transform, codes = head.transform, head.quantized
    facts = _facts(head.weight, head.bias, transform.temperature, transform.logit_scale, transform.softcap)
    of_codes = None if codes is None else (type(codes), codes.shape, codes.dtype, codes.device, codes.temporary_bytes)
    ranks = () if head.ranks is ALONE else head.ranks.signature
    return None if facts is None else (facts, of_codes, head.batch_invariant, ranks)


def _signature_of_comparison(comparison: Comparison, head: Head) -> tuple[Any, ...] | None:
    teacher = comparison.teacher
    of_head: Any = None
    given: Tensor | None = None
    # Whatever is warned of, or refused, is checked again.
    columns: int | None = None
    if isinstance(teacher, Teacher):
        given, own = teacher.parts
        of_head, columns = _signature_of_head(own), own.vocab_size
        if of_head is None:
            return None
    elif isinstance(teacher, TeacherLogits):
        columns, given = teacher.vocab_size, teacher.logits if isinstance(teacher.logits, Tensor) else None
    if columns != head.vocab_size:
        return None
    facts = _facts(given, comparison.temperature)
    kind = type(teacher), teacher.columns_correspond, comparison.divergence, columns
    return None if facts is None else (of_head, facts, kind)


def _decide(
    hidden: tuple[Tensor, ...], head: Head, labels: Any, query: Query, options: EngineOptions, memory: int | None
) -> Decision:
    if not isinstance(options, EngineOptions):
        raise TypeError(f"options must be liger_losses.EngineOptions(...), got {type(options).__name__}.")
    (compute_dtype, vocab_size), shapes = check(hidden, head, labels, query), shapes_of(labels)
    device, needs_weight = head.weight.device, _needs_gradient(head.weight)
    backend = choose_backend(options.backend, [(device, wide_dtype(compute_dtype))], dtypes=LOGIT_DTYPES)
    operand, most = operand_dtype(compute_dtype, device, backend), sum([s.numel() for s in shapes])
    teacher = None if query.comparison is None else query.comparison.teacher
    heads = [head, teacher.head] if isinstance(teacher, Teacher) else [head]
    at_once = dequantized_bytes(heads, most, operand, options.workspace, memory)
    if head.batch_invariant:
        check_invariant(head, backend, at_once)
    shared = vocab_size if teacher is None else min(vocab_size, teacher.vocab_size)
    head.ranks.check_columns(shared)
    copied = sum([each.weights.copied_row_bytes(operand) for each in heads if not at_once])
    work = replace(
        _workload(head, query, operand, backend, at_once),
        # Ranks take blocks of the same tokens, whose size depends on the largest part of the vocabulary.
        vocab_size=head.ranks.most_columns(vocab_size),
        gathers=not _dense(hidden, operand),
        device_memory=memory,
        copied_row_bytes=copied,
        teacher_row_bytes=0 if teacher is None else teacher_row_bytes_of(teacher, vocab_size, operand),
    )
    # Where rows are dequantized for each tile, there are many.
    wide = torch.float32 if work.walks else options.accum_dtype or head.weight.dtype
    grad_weight_dtype = torch.promote_types(head.weight.dtype, wide)
    row_bytes = 4 * head.weight.shape[1] * (needs_weight and grad_weight_dtype in HALF_DTYPES)
    outputs = query.statistics + tuple([name for name in query.metrics if name not in query.statistics])
    of_argmax = {"max_logit"} if "argmax" in outputs and (work.walks or head.ranks is not ALONE) else set()
    temperature = 1.0 if query.comparison is None else query.comparison.temperature
    other = isinstance(temperature, Tensor) or temperature != 1.0
    return Decision(
        vocab_size=vocab_size,
        head_columns=head.vocab_size,
        shared_columns=shared,
        has_two_softmaxes="logp" in outputs and (other or vocab_size > shared),
        outputs=outputs,
        block_names=frozenset({*outputs, "lse", *of_argmax}),
        backend=backend,
        needs_hidden=tuple([_needs_gradient(part) for part in hidden]),
        needs_weight=needs_weight,
        needs_bias=_needs_gradient(head.bias),
        compact=options.compact,
        # fp16 gradients underflow without the loss scale, which is only known in backward.
        one_pass=query.separable and torch.float16 not in (compute_dtype, operand),
        frozen=not (needs_weight or _needs_gradient(head.bias) or query.needs_logits) and len(query.statistics) == 1,
        needs_logits=query.needs_logits,
        options=options,
        grad_weight_dtype=grad_weight_dtype,
        sums_bytes=head.ranks.most_columns(head.vocab_size) * row_bytes,
        work=work,
    )


def _needs_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def _workload(head: Head, query: Query, operand: torch.dtype, backend: str, dequantized: int) -> Workload:
    """What the sizes of blocks depend on, as far as head and query determine it."""
    teacher, needs_bias = query.comparison is not None, _needs_gradient(head.bias)
    # Rows that are dequantized where they are needed serve all tokens of a tile, in any number of them.
    walks = head.quantized is not None and not dequantized and not query.needs_logits
    fused_products = can_fuse(head.weights, operand, backend, dequantized > 0 or walks)
    fused = fused_products and not needs_bias and not query.needs_logits
    # Rows of temporaries that elementwise work needs.
    temporaries = 4 if backend == "torch" or (needs_bias and not teacher) else 0
    return Workload(
        tokens=0,
        hidden_size=head.hidden_size,
        vocab_size=head.vocab_size,
        operand_dtype=operand,
        device=head.weight.device,
        temporaries=TEMPORARIES if query.in_torch or (backend == "torch" and teacher) else temporaries,
        fused=fused,
        # fp16 cannot hold exponentials of every size.
        exponentials=fused and not walks and operand == torch.bfloat16 and query.of_exponentials,
        fused_products=fused_products,
        ranks=head.ranks.size,
        dequantized_bytes=dequantized,
        walks=walks,
    )


def active_tokens(labels: Sequence[Tensor], head: Head, options: EngineOptions, vocab_size: int | None = None) -> Any:
    """The active tokens of labels, for several calls about them; in a graph of torch.compile, the labels
    themselves.

    Labels must be columns of the head, or be below ``vocab_size``.
    """
    for part in labels:
        if part.device != head.weight.device or part.is_meta:
            check_device(head.weight, labels=part)
    if torch.compiler.is_dynamo_compiling():
        return labels
    if vocab_size is None:
        vocab_size = len(head.weight) if head.ranks is ALONE else head.vocab_size
    return Tokens.select(labels, vocab_size, options.ignore_index, options.compact, options.backend)


def _dense(hidden: Sequence[Tensor], operand: torch.dtype) -> bool:
    """Whether hidden states are multiplied as they are, where all tokens are active: no copy is made of them."""
    first, *more = hidden
    contiguous = first.is_contiguous() or (first.dim() == 2 and first.stride(1) == 1)
    return contiguous and not more and first.dtype == operand
