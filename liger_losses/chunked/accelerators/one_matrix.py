"""What kernels over a whole head are given: its matrix, and memory of statistics. R tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.chunked.accelerators.linear_exp import Exponentials
from liger_losses.chunked.accelerators.tiles import with_contiguous_rows
from liger_losses.chunked.core.plan import Signature, padded
from liger_losses.chunked.core.target import Target
from liger_losses.chunked.core.weights import ALL, Dense, Quantized
from liger_losses.kernels.logit_transform import Epilogue


def matrix_of(part: Target) -> Tensor:
    """The head's rows in the operands' dtype: a copy only of a matrix whose rows are not contiguous."""
    assert isinstance(part.head.weights, Dense)
    return with_contiguous_rows(part.head.weights.rows(ALL))


def labels_of(part: Target) -> tuple[Tensor, Tensor | None]:
    """The labels' rows of the matrix, and which of them are this rank's (``None`` for all): any row for another's."""
    places, here = part.head.ranks.local(part.labels)
    return places.contiguous(), here


def epilogue_of(part: Target) -> Epilogue:
    """From projections to logits."""
    weight = part.class_weight
    weight = None if weight is None else weight.detach().float().contiguous()
    return Epilogue(part.transform(part.temperature), part.head.local_bias(ALL), weight)


def empty_values(names: set[str], part: Target) -> dict[str, Tensor]:
    """Memory ``[R]`` of what :func:`linear_exponentials` writes, by name."""
    wanted = [name for name in Exponentials._fields[:-1] if name in names]
    memory = torch.empty(len(wanted), len(part.hidden), dtype=torch.float32, device=part.hidden.device)
    values = dict(zip(wanted, memory.unbind(), strict=True))
    return values | ({"argmax": torch.empty_like(part.labels)} if "argmax" in names else {})


def exponentials_of(values: dict[str, Tensor]) -> Exponentials:
    return Exponentials._make(map(values.get, Exponentials._fields))


def bytes_of_sums(call: Signature) -> int:
    """Of a token: what kernels write of each tile of 128 columns (Hopper's are wider), a number for each sum in fp32,
    and two maxima."""
    names = call.statistics | call.metrics
    numbers = 1 + len(names & {"mean_logit", "entropy"}) + 2 * (call.largest > 0 or "argmax" in names)
    return padded(call.columns) // 32 * numbers


def has_matrix(call: Signature) -> bool:
    """Whether kernels may read the head as one matrix; their sums depend on the number of tokens."""
    return call.weights in ((Dense,), (Quantized,)) and call.backend == "triton" and not call.batch_invariant
