"""Statistics without gradients, by kernels whose logits never leave the registers: nothing is stored.

On an H200 in bf16 (benchmarks/results/accelerators.txt), log-probabilities without a gradient take 0.74 to 0.94 of the
time, and 17 instead of 251 MiB at 16,384 tokens; DPO with a reference takes 0.90 to 0.99. R tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from liger_losses.chunked.accelerators.linear_exp import (
    bytes_of_sums,
    empty_values,
    epilogue_of,
    exponentials_of,
    has_matrix,
    labels_of,
    linear_exponentials,
    matrix_of,
)
from liger_losses.chunked.core.plan import Plan, Signature, by_blocks
from liger_losses.chunked.core.rows import merged
from liger_losses.chunked.core.statistics import Statistic
from liger_losses.chunked.core.target import Target
from liger_losses.kernels.matmul import HALF_DTYPES

#: What there are sums of; ranks that share a vocabulary merge all but the last.
STATISTICS = {"lse", "logp", "mean_logit", "entropy", "argmax"}


class StatisticsBlock(NamedTuple):
    """Of some tokens; ``constants`` are their statistics. Nobody asks it for gradients."""

    constants: dict[str, Tensor]


def block_of(part: Target, asked: tuple[Statistic, ...], plan: Plan) -> StatisticsBlock:
    names = {"lse", *[s.name for s in asked]}
    labels, here = labels_of(part)
    values = empty_values(names, part)
    linear_exponentials(part.hidden, matrix_of(part), labels, exponentials_of(values), epilogue_of(part))
    return StatisticsBlock(merged(values, part.head.ranks, plan, here))


def row_bytes(call: Signature) -> int:
    """Of a token: its hidden state, and sums of tiles."""
    return call.hidden_size * call.operand.itemsize + bytes_of_sums(call)


def planned(call: Signature) -> Plan | None:
    """Of calls in which nothing is trained, and a kernel has the statistics of one matrix that is at hand."""
    if not (has_matrix(call) and call.of_kernels and not call.trains and call.operand in HALF_DTYPES):
        return None
    if not call.statistics | call.metrics <= (STATISTICS if call.ranks == 1 else STATISTICS - {"argmax"}):
        return None
    plan = by_blocks(call, "statistics", block_of, row_bytes(call))
    return plan if plan.products.columns >= call.columns else None
