"""From what a user gives to a :class:`Call`: inputs checked, active tokens selected, strategy chosen, sizes planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine.call import Call, Query, linear_metrics
from liger_losses.chunked.engine.checks import check_inputs, check_like_labels, check_names, check_tensor, check_vector
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.options import EngineOptions
from liger_losses.chunked.engine.plan import Plan, Workload, make_plan
from liger_losses.chunked.engine.projection import can_fuse, operand_dtype
from liger_losses.chunked.engine.teachers import Teacher, TeacherLogits
from liger_losses.chunked.engine.tokens import Tokens
from liger_losses.kernels import LOGIT_DTYPES, choose_backend
from liger_losses.kernels.divergence import TEMPORARIES
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.matmul import HALF_DTYPES
from liger_losses.kernels.softmax_stats import STATISTICS

_DIFFERENTIABLE = tuple(name for name in STATISTICS if name != "argmax")


def make_call(
    hidden_states: Any, head: Head, labels: Any, query: Query, options: EngineOptions
) -> tuple[Call, tuple[Tensor, ...]]:
    """Check the inputs, select the active tokens, and decide how to run.

    Args:
        hidden_states: ``[..., H]``, or a sequence of such tensors.
        head: what projects them.
        labels: ``[...]`` int64, or a sequence of such tensors, or :class:`Tokens`.
        query: what is asked.
        options: how to stream.

    Returns:
        The call, and the tensors of hidden states.
    """
    alone = not isinstance(hidden_states, (list, tuple))
    hidden = (hidden_states,) if alone else tuple(hidden_states)
    if not isinstance(labels, Tokens):
        labels = (labels,) if alone else tuple(labels)
    compute_dtype = check_inputs(hidden, head.weight, head.bias, labels)
    shapes = labels.shapes if isinstance(labels, Tokens) else tuple(part.shape for part in labels)
    vocab_size = _check_query(query, head, hidden, shapes)
    tokens = labels
    if not isinstance(tokens, Tokens):
        tokens = Tokens.select(
            labels, vocab_size=vocab_size, ignore_index=options.ignore_index, compact=options.compact
        )

    wide = torch.promote_types(torch.float32, compute_dtype)
    backend = choose_backend(options.backend, [(head.weight.device, wide)], dtypes=LOGIT_DTYPES)
    operand = operand_dtype(compute_dtype, head.weight.device, backend)
    grad = torch.is_grad_enabled()
    needs_hidden = tuple(grad and part.requires_grad for part in hidden)
    needs_weight = grad and head.weight.requires_grad
    needs_bias = grad and head.bias is not None and head.bias.requires_grad
    fused_products = can_fuse(head.weight, operand, backend)
    fused = fused_products and not needs_bias and not query.needs_logits
    computed = {*query.statistics, *query.metrics} - linear_metrics(query, head.transform)
    # fp16 cannot hold exponentials of every size.
    exponentials = fused and operand == torch.bfloat16 and computed <= {"logp", "lse"}
    gathers = _gathers(hidden, tokens, operand)
    temporaries = 4 if backend == "torch" or (needs_bias and query.comparison is None) else 0
    work = Workload(
        tokens=tokens.count,
        hidden_size=head.hidden_size,
        vocab_size=vocab_size,
        operand_dtype=operand,
        weight_dtype=head.weight.dtype,
        device=head.weight.device,
        temporaries=TEMPORARIES if temporaries and query.comparison is not None else temporaries,
        gathers=gathers,
        fused=fused,
        exponentials=exponentials,
        fused_products=fused_products,
        teacher_row_bytes=_teacher_row_bytes(query, vocab_size, operand),
    )
    plan = make_plan(work, options.workspace, options.chunk_size)
    grad_weight_dtype = torch.promote_types(head.weight.dtype, options.accum_dtype or head.weight.dtype)
    strategy = "statistics"
    if any(needs_hidden) or needs_weight or needs_bias:
        # A half-precision grad_weight must not be rounded many times.
        few_roundings = grad_weight_dtype not in HALF_DTYPES or plan.few_blocks or not needs_weight
        # fp16 gradients underflow without the loss scale, which is only known in backward.
        one_pass = query.separable and torch.float16 not in (compute_dtype, operand) and few_roundings
        frozen_head = not (needs_weight or needs_bias or query.needs_logits) and len(query.statistics) == 1
        possible = _strategies(plan, one_pass, frozen_head, needs_weight)
        strategy = possible[0]
        if options.strategy is not None:
            check_names([options.strategy], possible, "strategy for these inputs")
            strategy = options.strategy
    if query.selected is not None and strategy == "two_pass" and not plan.few_blocks:
        # Every block adds to all of grad_weight: many of them are accumulated wide, at the cost of a buffer.
        grad_weight_dtype = torch.promote_types(grad_weight_dtype, torch.float32)
    call = Call(
        query=query.of_active_tokens(tokens, torch.promote_types(torch.float32, operand)),
        transform=head.transform,
        tokens=tokens,
        plan=plan,
        strategy=strategy,
        operand_dtype=operand,
        grad_weight_dtype=grad_weight_dtype,
        backend=backend,
        gathers=gathers,
        fused=fused,
        exponentials=exponentials,
        needs_hidden=needs_hidden,
        needs_weight=needs_weight,
        needs_bias=needs_bias,
    )
    return call, hidden


def _check_query(query: Query, head: Head, hidden: Sequence[Tensor], shapes: Sequence[torch.Size]) -> int:
    """Raise TypeError or ValueError for a query that does not fit; return the number of columns it is about."""
    check_vector("class_weight", query.class_weight, head.weight)
    names: tuple[str, ...] = _DIFFERENTIABLE
    metrics: tuple[str, ...] = STATISTICS
    vocab_size = head.vocab_size
    if query.selected is not None:
        names = ("selected_logps", "logp", "lse")
    if query.comparison is not None:
        names, metrics = ("divergence", "logp"), ("entropy",)
        vocab_size = _check_comparison(query, head, hidden[0])
    beside = "" if query.selected is None else " beside selected_logps"
    check_names(query.statistics, names, f"differentiable statistic{beside}")
    check_names(query.metrics, metrics, "statistic")
    if query.selected is not None:
        _check_selected(query.selected, shapes)
    for name, value in {**query.token_inputs, **(query.token_weights or {})}.items():
        check_like_labels(name, value, shapes[0])
    return vocab_size


def _check_comparison(query: Query, head: Head, hidden_states: Tensor) -> int:
    comparison = query.comparison
    assert comparison is not None
    if not isinstance(comparison.teacher, (Teacher, TeacherLogits)):
        raise TypeError(f"teacher must be a Teacher or TeacherLogits, got {type(comparison.teacher).__name__}.")
    if not isinstance(comparison.divergence, Divergence):
        raise TypeError(f"divergence must be a liger_losses.Divergence, got {type(comparison.divergence).__name__}.")
    heads = {"student": head}
    if isinstance(comparison.teacher, Teacher):
        heads["teacher"] = comparison.teacher.head
    for whose, either in heads.items():
        if either.transform.temperature != 1.0:
            raise ValueError(
                f"the temperature of the {whose}'s transform must be 1, got {either.transform.temperature}; give "
                "temperature= instead, which divides both models' logits."
            )
    comparison.teacher.check(hidden_states[..., 0], head.weight)
    return min(head.vocab_size, comparison.teacher.vocab_size)


def _check_selected(selected: Any, shapes: Sequence[torch.Size]) -> None:
    check_tensor("selected", selected)
    if len(shapes) != 1:
        raise TypeError("selected= goes with one tensor of hidden states, not with a sequence of them.")
    shape = shapes[0]
    if selected.dtype != torch.int64 or selected.dim() != len(shape) + 1 or selected.shape[:-1] != shape:
        raise ValueError(
            f"selected must be int64 columns [..., k] for each label of {tuple(shape)}, got {selected.dtype} of "
            f"{tuple(selected.shape)}."
        )


def _gathers(hidden: Sequence[Tensor], tokens: Tokens, operand: torch.dtype) -> bool:
    """Whether hidden states are copied before they are multiplied."""
    (first, *more), (index, *_) = hidden, tokens.indices
    dense = first.is_contiguous() or (first.dim() == 2 and first.stride(1) == 1)
    return bool(more) or index is not None or not dense or first.dtype != operand


def _teacher_row_bytes(query: Query, vocab_size: int, operand: torch.dtype) -> int:
    """Bytes of a teacher's hidden state, gathered and cast, or of its logits; 0 without a teacher."""
    if query.comparison is None:
        return 0
    teacher, item = query.comparison.teacher, torch.promote_types(torch.float32, operand).itemsize
    if isinstance(teacher, TeacherLogits):
        return vocab_size * item
    return teacher.head.hidden_size * (operand.itemsize + item)


def _strategies(plan: Plan, one_pass: bool, frozen_head: bool, needs_weight: bool) -> list[str]:
    """The strategies that are exact for these inputs and fit the workspace, the cheapest first."""
    allowed = {"one_pass": one_pass, "frozen_head": frozen_head, "resident": plan.resident}
    single = [name for name, possible in allowed.items() if possible]
    return [*single, "two_pass"] if plan.tall_blocks or not needs_weight else ["two_pass", *single]
