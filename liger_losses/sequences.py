"""Sequences that run without a gradient because their coefficient in the loss is zero.

In GRPO, RLOO and their relatives a group whose rewards are all equal has advantage 0. With no other term in the loss,
its sequences have no gradient, but their log-probabilities are in the metrics. They need a forward, and neither saved
activations nor a backward. B sequences of a batch, b some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.arguments import lists_arguments
from liger_losses.checks import described
from liger_losses.kernels.autograd import once_differentiable
from liger_losses.kernels.reading import start_reading
from liger_losses.nested import map_nested

T = TypeVar("T")


@lists_arguments
def split_by_coefficient(
    forward: Callable[[Tensor], T],
    coefficients: Tensor,
    *,
    stand_in: Callable[[], T] | None = None,
    group: dist.ProcessGroup | None = None,
) -> T:
    """The outputs of ``forward`` for the whole batch, with a gradient only through sequences that have a coefficient.

    ``logps = split_by_coefficient(lambda rows: logps_of(model, ids[rows], mask[rows]), advantages)`` equals
    ``logps_of(model, ids, mask)``. If the loss of each sequence is a multiple of its coefficient, the loss and all
    gradients are equal too. If a share f of the sequences has a coefficient, forward and backward take 1/3 + 2/3 f of
    their time, or 1/4 + 3/4 f with gradient checkpointing. Dropout draws different masks than for the whole batch.

    Either all processes of a group split their batch, or none. If one has no sequence to leave out, none splits,
    because the others would wait for it. Each process then runs one forward with and one without a gradient, so DDP,
    FSDP and ZeRO run the same collectives on all. This takes one all-reduce of a number, and the host waits once for
    the coefficients.

    Args:
        forward: a function of indices ``[b]`` of sequences that returns their outputs: tensors ``[b, ...]``, or tuples
            and dictionaries of such tensors and of ``None``. It must treat sequences independently.
        coefficients: ``[B]`` or ``[B, T]``, the factors of the sequences in the loss: advantages, or advantages times a
            mask. A sequence is left out if all its coefficients are exactly 0; NaN is not 0. On the process group's
            device.
        stand_in: a function that returns outputs for any small input. If no sequence of this process has a coefficient,
            it runs with a gradient of zero, because other processes wait for its backward. By default the first
            sequence runs.
        group: the processes that run the model together; by default all.

    Raises:
        TypeError: ``forward`` is no function, or ``coefficients`` no tensor.
        ValueError: ``forward`` returned another number of sequences than it was asked for.
        RuntimeError: in backward, if a sequence that was left out has a gradient after all.
    """
    if not callable(forward) or not isinstance(coefficients, Tensor) or not coefficients.dim():
        raise TypeError(
            "split_by_coefficient takes a function of indices and then a tensor of coefficients, [B] or [B, T], such "
            f"as torch.tensor(advantages)[:, None] * mask; got {described(forward)} and {described(coefficients)}."
        )
    indices = torch.arange(len(coefficients), device=coefficients.device)
    if not torch.is_grad_enabled():
        return forward(indices)
    counts = (coefficients != 0).reshape(len(coefficients), -1).any(1)
    if stand_in is None:
        counts |= (indices == 0) & ~counts.any()
    leaves_out = (~counts).any().to(torch.int32).reshape(1)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(leaves_out, dist.ReduceOp.MIN, group=group)
    splits, number = torch.cat([leaves_out, counts.sum(dtype=torch.int32).reshape(1)]).tolist()
    if not splits:
        return forward(indices)
    sizes = (counts, number), (~counts, len(counts) - number)
    counted, others = (torch.nonzero_static(which, size=size).squeeze(-1) for which, size in sizes)
    # The forward without a gradient takes the host the least time for the same work of the device. Run second, it lets
    # the host get ahead of the device before backward.
    found = forward(counted) if stand_in is None or len(counted) else stand_in()
    with torch.no_grad():
        left_out = forward(others)
    return map_nested(partial(_merged, counted, others), found, left_out)


def _merged(rows: Tensor, others: Tensor, counted: Any, left_out: Any) -> Any:
    if counted is None:
        return None
    for outputs, of in ((counted, rows), (left_out, others)):
        if not isinstance(outputs, Tensor) or outputs.dim() == 0 or (len(of) and len(outputs) != len(of)):
            given = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ValueError(
                f"forward must return tensors [{len(of)}, ...] for {len(of)} sequences, or tuples and dictionaries of "
                f"them, got {given}."
            )
    return _Merge.apply(counted, left_out, rows.to(left_out.device), others.to(left_out.device))


#: Calls a function when all of a backward is queued, as DDP is called; torch has no public name for it.
queue_callback: Any = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None)


class _Merge(torch.autograd.Function):
    """Outputs of the sequences ``rows`` and ``others``, in the batch's order; only the first have a gradient."""

    @staticmethod
    def forward(ctx: Any, counted: Tensor, left_out: Tensor, rows: Tensor, others: Tensor) -> Tensor:
        ctx.save_for_backward(rows, others)
        ctx.shape = counted.shape  # of a stand-in, where there are no rows
        merged = left_out.new_empty(len(rows) + len(others), *left_out.shape[1:])
        merged[others] = left_out
        if len(rows):
            merged[rows] = counted
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        rows, others = ctx.saved_tensors
        without = gradient[others]
        wrong = start_reading((without.isfinite() & (without != 0)).any(), "which sequences have a gradient")

        def check() -> None:
            if wrong():
                raise RuntimeError(
                    "a sequence whose coefficient is 0 has a gradient: the loss has a term, such as a KL penalty or an "
                    "entropy bonus, that is not multiplied by the coefficients. The gradients that were written are "
                    "wrong: set them to None. Run all sequences with a gradient: "
                    "without split_by_coefficient, or with liger_losses.trl.enable(skip_zero_advantages=False)."
                )

        if gradient.is_cuda and queue_callback is not None:  # at once where torch cannot
            queue_callback(check)
        else:
            check()
        # NaN where theirs is not finite, as it would be in the whole batch's gradients.
        found = gradient[rows] if len(rows) else gradient.new_zeros(ctx.shape)
        return found + 0 * without.sum(), None, None, None
