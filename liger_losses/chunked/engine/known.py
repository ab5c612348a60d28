"""What a call's shapes, dtypes, devices and options decide: once for all calls of one kind, as the device is idle
meanwhile.

A kind of call is all that its checks, its strategy and the sizes of its blocks depend on, beside the number of active
tokens, and no value of a tensor. A call that raises is not kept, so that the next one of its kind raises too.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_losses.chunked.engine import workspace
from liger_losses.chunked.engine.checks import check_names
from liger_losses.chunked.engine.head import Head, can_fuse, check_invariant, dequantized_bytes, operand_dtype
from liger_losses.chunked.engine.plan import EngineOptions, Plan, Workload, make_plan
from liger_losses.chunked.engine.teachers import Teacher, teacher_row_bytes_of
from liger_losses.chunked.engine.tokens import Tokens
from liger_losses.kernels._triton import BACKEND_VARIABLE
from liger_losses.kernels.autograd import autocast_dtype, within_transform
from liger_losses.kernels.divergence import TEMPORARIES
from liger_losses.kernels.matmul import HALF_DTYPES
from liger_losses.kernels.tracing import state

if TYPE_CHECKING:
    from liger_losses.chunked.engine.call import CheckedInputs, Query

#: The most kinds of calls that are kept, and of each the most numbers of active tokens; then all are dropped.
MOST_KINDS, MOST_COUNTS = 128, 32


class Planned(NamedTuple):
    """What follows from the number of active tokens too."""

    work: Workload
    plan: Plan
    strategy: str
    grad_weight_dtype: torch.dtype


@dataclass(frozen=True)
class Decisions:
    """What holds for all calls of a kind. No tensor is among it, so that none is kept alive."""

    compute_dtype: torch.dtype
    vocab_size: int  # the number of columns that the query is about
    backend: str
    operand: torch.dtype  # of the products
    dequantized_bytes: int
    needs_hidden: tuple[bool, ...]
    needs_weight: bool
    needs_bias: bool
    dense: bool
    fused_products: bool
    fused: bool
    exponentials: bool
    grad_weight_dtype: torch.dtype
    #: By the number of active tokens, and whether the first tensor of labels has no others.
    _planned: dict[tuple[int, bool], Planned] = field(default_factory=dict)

    @classmethod
    def of(
        cls, checked: CheckedInputs, head: Head, query: Query, options: EngineOptions, memory: int | None, backend: str
    ) -> Decisions:
        """The decisions about one call."""
        hidden, _, shapes, compute_dtype, vocab_size = checked
        device, grad = head.weight.device, torch.is_grad_enabled()
        operand, dequantized = operand_dtype(compute_dtype, device, backend), 0
        if head.quantized is not None or query.comparison is not None:
            teacher = None if query.comparison is None else query.comparison.teacher
            heads = [head, teacher.head] if isinstance(teacher, Teacher) else [head]
            most = sum(shape.numel() for shape in shapes)
            dequantized = dequantized_bytes(heads, most, operand, options.workspace, memory)
        if head.batch_invariant:
            check_invariant(head, backend, query.comparison is not None, dequantized)
        needs_bias = grad and head.bias is not None and head.bias.requires_grad
        fused_products = can_fuse(head, operand, backend, dequantized > 0)
        fused = fused_products and not needs_bias and not query.needs_logits
        # fp16 cannot hold exponentials of every size.
        exponentials = fused and operand == torch.bfloat16 and query.of_exponentials
        if head.shard is not None:
            compared = vocab_size if query.comparison is None else min(vocab_size, query.comparison.teacher.vocab_size)
            head.shard.check_columns(compared)
            # Of a rank's columns and labels of other ranks there is no entropy.
            exponentials = exponentials and "entropy" not in query.metrics
        return cls(
            compute_dtype=compute_dtype,
            vocab_size=vocab_size,
            backend=backend,
            operand=operand,
            dequantized_bytes=dequantized,
            needs_hidden=tuple(grad and part.requires_grad for part in hidden),
            needs_weight=grad and head.weight.requires_grad,
            needs_bias=needs_bias,
            dense=_is_dense(hidden, operand),
            fused_products=fused_products,
            fused=fused,
            exponentials=exponentials,
            grad_weight_dtype=torch.promote_types(head.weight.dtype, options.accum_dtype or head.weight.dtype),
        )

    def planned(self, tokens: Tokens, head: Head, query: Query, options: EngineOptions, memory: int | None) -> Planned:
        """What follows from the active tokens, for a call of this kind."""
        found = tokens.count, tokens.indices[0] is None
        planned = self._planned.get(found)
        if planned is None:
            planned = self._plan(*found, head, query, options, memory)
            _make_room(self._planned, MOST_COUNTS)
            self._planned[found] = planned
        return planned

    def _plan(
        self, count: int, all_active: bool, head: Head, query: Query, options: EngineOptions, memory: int | None
    ) -> Planned:
        """What follows from the number of active tokens, and from whether the first tensor of labels has no others."""
        operand, fused, vocab_size = self.operand, self.fused, self.vocab_size
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
                if not all_active or not _is_dense([teacher.hidden_states], operand):
                    teacher_hidden_bytes = 2 * teacher.head.hidden_size * operand.itemsize
        work = Workload(
            tokens=count,
            hidden_size=head.hidden_size,
            # Ranks take blocks of the same tokens, whose size depends on the largest part of the vocabulary.
            vocab_size=vocab_size if head.shard is None else min(vocab_size, max(head.shard.sizes)),
            operand_dtype=operand,
            weight_dtype=operand if at_once and head.quantized is not None else head.weight.dtype,
            device=head.weight.device,
            temporaries=temporaries,
            gathers=not all_active or not self.dense,
            fused=fused,
            exponentials=self.exponentials,
            fused_products=self.fused_products,
            teacher_row_bytes=teacher_row_bytes,
            ranks=1 if head.shard is None else len(head.shard.sizes),
            device_memory=memory,
            teacher_hidden_bytes=teacher_hidden_bytes,
            divergence_tiles=divergence_tiles,
            dequantized_row_bytes=dequantized,
            dequantized_bytes=self.dequantized_bytes,
        )
        plan = make_plan(work, options.workspace, options.chunk_size)
        if dequantized and plan.rows < count and head.shard is None and not query.needs_logits:
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
            one_pass = query.separable and torch.float16 not in (self.compute_dtype, operand) and few_roundings
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
        return Planned(work, plan, strategy, grad_weight_dtype)


def _is_dense(hidden: Sequence[Tensor], operand: torch.dtype) -> bool:
    """Whether hidden states are multiplied as they are, where all tokens are active: no copy is made of them."""
    first, *more = hidden
    contiguous = first.is_contiguous() or (first.dim() == 2 and first.stride(1) == 1)
    return contiguous and not more and first.dtype == operand


#: By kind; a call of none is checked and decided anew.
_kinds: dict[Hashable, Decisions] = {}


def kind_of(
    hidden_states: Any, head: Head, labels: Any, query: Query, options: EngineOptions
) -> tuple[Hashable, ...] | None:
    """What a call's checks and decisions depend on; ``None`` where that is more than is compared here.

    There is more to compare where ranks must agree, where a head is quantized, beside a teacher, selected columns,
    class weights and temperatures of tokens, and where tensors are no ordinary ones or stand for others.
    """
    if state.shapes_only or within_transform() or torch.compiler.is_compiling():
        return None
    if head.shard is not None or head.quantized is not None or isinstance(head.transform.temperature, Tensor):
        return None
    if not (query.class_weight is query.selected is query.comparison is query.token_weights is None):
        return None
    given = [hidden_states, labels, head.weight]
    if isinstance(hidden_states, (list, tuple)):
        if not isinstance(labels, (list, tuple)):
            return None
        given = [*hidden_states, *labels, head.weight]
    if head.bias is not None:
        given.append(head.bias)
    for tensor in given:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_nested:
            return None
    kind = (
        *[(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad) for tensor in given],
        isinstance(hidden_states, (list, tuple)),
        head.batch_invariant,
        query.statistics,
        query.metrics,
        query.token_loss is None,
        options,
        torch.is_grad_enabled(),
        autocast_dtype(given[0].device),
        os.environ.get(BACKEND_VARIABLE),
        workspace.context.get(),
        workspace.process.bytes,
    )
    try:
        hash(kind)
    except TypeError:  # a name or an option is a list, say, which checks refuse or take for true
        return None
    return kind


def find(kind: tuple[Hashable, ...] | None) -> Decisions | None:
    """The decisions about calls of a kind, if there was such a call."""
    return None if kind is None else _kinds.get(kind)


def keep(kind: tuple[Hashable, ...] | None, decisions: Decisions) -> None:
    """Keep the decisions about calls of a kind, none of which has raised."""
    if kind is not None:
        _make_room(_kinds, MOST_KINDS)
        _kinds[kind] = decisions


def forget() -> None:
    """Drop all that is kept."""
    _kinds.clear()


def _make_room(kept: dict[Any, Any], most: int) -> None:
    """Drop all that is kept if there is no room for more. Threads may do so at the same time: what is dropped is
    decided again, and alike."""
    if len(kept) >= most:
        kept.clear()
