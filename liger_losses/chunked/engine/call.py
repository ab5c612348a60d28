"""What one call asks for and how it runs: decided once, then only read.

N active tokens, H hidden size, V vocabulary size, C columns of a slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.engine.plan import Plan
from liger_losses.chunked.engine.projection import Projection
from liger_losses.chunked.engine.teachers import Teacher, TeacherLogits
from liger_losses.chunked.engine.tokens import Tokens
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform


class Statistics(NamedTuple):
    """Per-token statistics of the logits' softmax; ``None`` for those not asked for, 0 for tokens without loss.

    See :func:`liger_losses.kernels.softmax_stats.softmax_statistics` for their definitions.
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


@dataclass(frozen=True)
class Comparison:
    """What a student is compared with.

    Args:
        teacher: see :class:`liger_losses.Teacher`.
        divergence: see :class:`liger_losses.Divergence`.
        temperature: what both models' logits are divided by in the divergence.
    """

    teacher: Teacher | TeacherLogits
    divergence: Divergence
    temperature: float = 1.0


@dataclass(frozen=True)
class Query:
    """What is asked about each token.

    Args:
        statistics: names of :class:`Statistics` that are differentiated.
        metrics: further names, without gradient.
        class_weight: ``[V]``, the ``c`` of ``mean_logp``.
        selected: the columns of ``selected_logps``.
        comparison: the other side of ``divergence``.
        token_loss: of a separable loss, ``(statistics, labels, **inputs) -> [n]``; see
            :func:`liger_losses.linear_token_loss`.
        token_inputs: tensors that ``token_loss`` gets as keywords.
        token_weights: of a separable loss ``sum_t sum_s weights[s]_t s_t``, the weights of its statistics instead.

    Per-token tensors (``selected``, ``token_inputs``, ``token_weights``) have the labels' shape in what a user gives,
    and are ``[N]`` or ``[N, k]`` in a :class:`Call`.
    """

    statistics: tuple[str, ...]
    metrics: tuple[str, ...] = ()
    class_weight: Tensor | None = None
    selected: Tensor | None = None
    comparison: Comparison | None = None
    token_loss: Callable[..., Any] | None = None
    token_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    token_weights: Mapping[str, Tensor] | None = None

    @property
    def separable(self) -> bool:
        """Whether the loss is a sum over tokens, each of its own statistics."""
        return self.token_loss is not None or self.token_weights is not None

    @property
    def needs_logits(self) -> bool:
        """Whether blocks must hold whole rows of fp32 logits."""
        return self.selected is not None or self.comparison is not None

    def of_active_tokens(self, tokens: Tokens, dtype: torch.dtype) -> Query:
        """The query with its per-token tensors gathered; tensors that enter the arithmetic are cast to ``dtype``."""
        selected, weights = self.selected, self.token_weights
        if selected is not None:
            selected = tokens.gather_like_labels(selected)
            if tokens.mask is not None:
                selected = selected.masked_fill(~tokens.mask[:, None], 0)  # tokens without loss may hold anything
        if weights is not None:
            weights = {n: tokens.masked(tokens.gather_like_labels(w.detach())).to(dtype) for n, w in weights.items()}
        return replace(
            self,
            metrics=tuple(name for name in self.metrics if name not in self.statistics),
            class_weight=None if self.class_weight is None else self.class_weight.detach().to(dtype).contiguous(),
            selected=selected,
            token_inputs={n: tokens.gather_like_labels(value.detach()) for n, value in self.token_inputs.items()},
            token_weights=weights,
        )


@dataclass(frozen=True)
class Call:
    """Everything about a call but the tensors that autograd tracks.

    Args:
        query: what is asked, with per-token tensors of the active tokens.
        transform: from projections to logits.
        tokens: the active ones.
        plan: sizes of the blocks.
        strategy: one of :data:`liger_losses.chunked.engine.options.STRATEGIES`.
        operand_dtype: dtype of the products' operands.
        grad_weight_dtype: dtype in which the weight's gradient is accumulated.
        backend: ``torch`` or ``triton``.
        gathers: whether hidden states are copied before they are multiplied.
        fused: whether products and softmax share a kernel, so that no fp32 logits reach memory.
        exponentials: whether blocks of whole rows hold exponentials in half precision instead of fp32 logits.
        needs_hidden, needs_weight, needs_bias: what needs a gradient.
    """

    query: Query
    transform: LogitTransform
    tokens: Tokens
    plan: Plan
    strategy: str
    operand_dtype: torch.dtype
    grad_weight_dtype: torch.dtype
    backend: str
    gathers: bool
    fused: bool
    exponentials: bool
    needs_hidden: tuple[bool, ...]
    needs_weight: bool
    needs_bias: bool

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names that the user gets, differentiable ones first."""
        return self.query.statistics + self.query.metrics

    @cached_property
    def block_names(self) -> frozenset[str]:
        """The statistics that blocks compute."""
        return frozenset({*self.query.statistics, *self.query.metrics, "lse"}) - linear_metrics(
            self.query, self.transform
        )

    @property
    def logits_dtype(self) -> torch.dtype:
        """fp32, or fp64 for fp64 inputs: logits are never rounded to half precision."""
        return torch.promote_types(torch.float32, self.operand_dtype)

    def open(self, weight: Tensor, bias: Tensor | None, hidden_states: Sequence[Tensor]) -> OpenCall:
        """The call with the tensors that autograd tracks."""
        return OpenCall(self, weight, bias, hidden_states)


def linear_metrics(query: Query, transform: LogitTransform) -> frozenset[str]:
    """The metrics that are linear in the hidden states, so that no block has to compute them.

    Without a soft-cap, the mean logit is ``hidden_states @ weight.mean(0)``.
    """
    linear = "mean_logit" in query.metrics and "mean_logit" not in query.statistics and transform.softcap is None
    return frozenset(["mean_logit"]) if linear else frozenset()


class OpenCall:
    """A call and the tensors it runs on: what the stream, its blocks and the gradients read.

    Args:
        call: what to do.
        weight: ``[V', H]``; ``V`` of its rows are used, which are fewer where a teacher has a smaller vocabulary.
        bias: ``[V']`` or ``None``.
        hidden_states: ``[..., H]`` each.
    """

    def __init__(self, call: Call, weight: Tensor, bias: Tensor | None, hidden_states: Sequence[Tensor]) -> None:
        comparison = call.query.comparison
        #: Rows of the head's gradient; those beyond ``vocab_size`` are 0.
        self.weight_rows = weight.shape[0]
        self.vocab_size = weight.shape[0]
        if comparison is not None:
            self.vocab_size = min(self.vocab_size, comparison.teacher.vocab_size)
        self.call, self.hidden_states = call, hidden_states
        self.weight = weight[: self.vocab_size]
        self.bias = None if bias is None else bias[: self.vocab_size].contiguous()
        self.count = call.tokens.count
        self.flat = [_flat(part) for part in hidden_states]
        self.projection = Projection(self.weight, call.operand_dtype, call.plan.weight_chunk)
        self.epilogue = Epilogue(call.transform, self.bias, call.query.class_weight)


def _flat(hidden_states: Tensor) -> Tensor:
    """``[T, H]``, or the tensor itself where that would copy it: then only the active tokens are gathered."""
    try:
        return hidden_states.view(-1, hidden_states.shape[-1])
    except RuntimeError:
        return hidden_states
