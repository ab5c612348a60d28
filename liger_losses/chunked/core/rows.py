"""What is computed of rows of logits, by the backend that the plan has chosen: the kernels' row functions, and terms in
torch of statistics that have no kernel.

R rows (tokens), C columns, k selected columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import torch
from torch import Tensor

from liger_losses.chunked.core.plan import Plan
from liger_losses.chunked.core.ranks import Ranks
from liger_losses.chunked.core.statistics import Statistic
from liger_losses.kernels.divergence import Logits, square_sums
from liger_losses.kernels.divergence import divergence_sums as divergence_sums_of
from liger_losses.kernels.divergence_forms import Divergence, finite_logs
from liger_losses.kernels.logit_transform import Epilogue
from liger_losses.kernels.online_softmax import merge
from liger_losses.kernels.softmax_stats import row_slices, softmax_statistics

#: The largest logits are chosen from one of so many parts of the columns after the other, or from slices of rows whose
#: temporaries take so many bytes: a block is never copied as a whole.
_PARTS, _BYTES = 16, 2**25


def merged(
    values: dict[str, Tensor],
    ranks: Ranks,
    plan: Plan,
    here: Tensor | None = None,
    class_weight: Tensor | None = None,
) -> dict[str, Tensor]:
    """Statistics of the whole vocabulary from those of each rank's columns, which are exchanged as one tensor.

    ``selected_logps`` are logits in ``values``, 0 for columns of other ranks; ``here [R]`` says whose label is among
    this rank's columns.
    """
    if ranks.size == 1:
        if "selected_logps" in values:
            values["selected_logps"] = values["selected_logps"] - values["lse"][:, None]
        return values
    if "logp" in values:
        values = values | {"logp": of_label_here(values["logp"], here)}
    names = sorted(values)  # in an order that all ranks have
    rows = [values[name].t() if values[name].dim() == 2 else values[name][None] for name in names]
    gathered = ranks.gather(torch.cat([row.to(values["lse"].dtype) for row in rows]))
    parts = {}
    for name, part in zip(names, gathered.split([len(row) for row in rows], dim=1), strict=True):
        parts[name] = part.mT if values[name].dim() == 2 else part[:, 0]
    return merge(parts, ranks.sizes, class_weight, backend=plan.backend)


def of_label_here(logp: Tensor, here: Tensor | None) -> Tensor:
    """``logp`` as :func:`~liger_losses.kernels.online_softmax.merge` reads it: inf where the label is not here."""
    return logp if here is None else torch.where(here, logp, torch.inf)


def divergence_sums(
    student: Logits, teacher: Logits, which: Divergence, parameter: Tensor | None, ranks: Ranks, plan: Plan
) -> dict[str, Tensor]:
    """Each row's divergence over all ranks' columns, and what its gradient needs of the whole row: ``h`` and, of the
    cosine, the ``squares`` of both models' logits."""
    squares = None
    if which.form == "cosine":
        squares = ranks.sum(square_sums(student, teacher, **plan.of_kernels))
    sums = divergence_sums_of(
        student, teacher, which, squares=squares, parameter=parameter, whole_rows=plan.products.fixed, **plan.of_kernels
    )
    value, h = ranks.sum(sums)
    constants = {"divergence": value, "h": h}
    return constants if squares is None else constants | {"squares": squares[0], "teacher_squares": squares[1]}


# --- Statistics without a kernel: rows of the table of statistics ---------------------------------------------------


def table_sums(
    asked: Sequence[Statistic], z: Tensor, lse: Tensor, epilogue: Epilogue, vocab_size: int, ranks: Ranks, plan: Plan
) -> dict[str, Tensor]:
    """``sum phi`` by the statistics' names, and ``sum psi`` of each, over all ranks' columns."""
    sums = lse.new_empty(2 * len(asked), len(lse))
    for at in row_slices(z, plan.scratch // 4):
        log_p = finite_logs(epilogue.rows(at)(z[at]) - lse[at, None])
        there = log_p > -1e4  # columns that are not kept, or have no probability, have no terms
        for i, s in enumerate(asked):
            assert s.phi is not None
            sums[2 * i, at] = torch.where(there, s.phi(log_p, vocab_size), 0.0).sum(1)
            sums[2 * i + 1, at] = torch.where(there, s.derivative(log_p, vocab_size), 0.0).sum(1)
    sums = ranks.sum(sums)
    return {name: sums[2 * i + j] for i, s in enumerate(asked) for j, name in enumerate((s.name, s.name + " psi"))}


def table_gradient(
    asked: Sequence[Statistic],
    upstream: dict[str, Tensor],
    constants: dict[str, Tensor],
    z: Tensor,
    epilogue: Epilogue,
    vocab_size: int,
) -> Tensor:
    """``[R, C]``, the gradient of logits by rows of the table, for a slice of rows that is small enough."""
    log_p = finite_logs(epilogue(z) - constants["lse"][:, None])
    there, p, total = log_p > -1e4, log_p.exp(), torch.zeros_like(log_p)
    for s in asked:
        g = upstream[s.name]
        sums = constants[s.name + " psi"]
        psi = torch.where(there, s.derivative(log_p, vocab_size), 0.0)
        total += g[:, None] * (psi - p * sums[:, None])
    return total


# --- Selected columns -----------------------------------------------------------------------------------------------


def largest(z: Tensor, epilogue: Epilogue, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row, in descending order, and their columns; all of a row that has fewer.

    They are in the k groups of columns whose largest logits are largest, which one reading of the block shows. Columns
    of a group are far apart, so that adjacent ones, of different groups, are read together.
    """
    columns, transform, bias = z.shape[1], epilogue.transform, epilogue.bias
    if columns < 512 * k:  # the groups' columns would take as much memory as logits
        tops = [epilogue.rows(at)(z[at]).topk(min(k, columns), -1) for at in row_slices(z, _BYTES) or [slice(0, 0)]]
        return torch.cat([top.values for top in tops]), torch.cat([top.indices for top in tops])
    size = 1 << (isqrt(columns // k).bit_length() - 1)
    count = columns // size
    projected = z[:, : count * size].unflatten(1, (size, count))
    maxima = list[Tensor]()
    grows = bias is None and transform.logit_scale > 0  # the largest logits are those of the largest projections
    shifts = None if bias is None else bias[: count * size].unflatten(0, (size, count))
    step = count if grows else max(count // _PARTS, 1)
    for start in range(0, count, step):
        part = projected[..., start : start + step]
        at = slice(start, start + step)
        maxima.append((part if grows else transform(part, None if shifts is None else shifts[:, at])).amax(1))
    groups = torch.cat(maxima, 1).topk(k, -1).indices
    ids = (groups[..., None] + count * torch.arange(size, device=z.device)).flatten(1)
    others = torch.arange(count * size, columns, device=z.device).expand(len(z), -1)  # of no whole group
    ids = torch.cat([ids, others], 1)
    value, at_ids = transform(z.gather(1, ids), None if bias is None else bias[ids]).topk(k, -1)
    return value, ids.gather(1, at_ids)


def largest_of_ranks(logits: Tensor, ids: Tensor, k: int, ranks: Ranks) -> Tensor:
    """The ids ``[R, k]`` of the largest logits of the whole vocabulary, from those of this rank's columns."""
    if ranks.size == 1:
        return ids
    missing = k - logits.shape[1]
    logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(ids + ranks.first, (0, missing))
    all_logits, all_ids = (ranks.gather(values).transpose(0, 1).flatten(1) for values in (logits, ids))
    return all_ids.gather(1, all_logits.topk(k, -1).indices)


def rest(
    memory: Tensor, columns: int, ids: Tensor, owned: Tensor | None, lse: Tensor, epilogue: Epilogue, plan: Plan
) -> Tensor:
    """The probability of this rank's columns but ``ids [R, k]``, from the sum of theirs.

    Their projections are -inf while the sum is taken. ``memory`` has one column more than there are, which stands for
    columns of other ranks.
    """
    z = memory[:, :columns]
    transform = epilogue.transform
    by_logits = transform.softcap is not None or transform.logit_scale <= 0
    if by_logits:  # the logit of -inf, here a mark, is another number
        z.clamp_(min=torch.finfo(z.dtype).min)
    ids = ids if owned is None else torch.where(owned, ids, columns)
    values = memory.gather(1, ids)
    memory.scatter_(1, ids, -torch.inf)
    if by_logits:
        parts = row_slices(z, plan.scratch)
        rows = [epilogue.rows(at)(z[at]).masked_fill_(z[at] == -torch.inf, -torch.inf).logsumexp(1) for at in parts]
        of_others = torch.cat([lse.new_empty(0), *rows])
    else:
        label = torch.zeros(len(z), dtype=torch.int64, device=z.device)
        of_others = softmax_statistics(z, label, frozenset(), epilogue, **plan.of_kernels)["lse"]
    memory.scatter_(1, ids, values)
    return (of_others - lse).exp()


def totals(ids: Tensor, values: Tensor) -> Tensor:
    """``[R, k]``: the sum of a row's values that have the same id, with the same bits from run to run."""
    ordered, order = ids.sort(dim=-1, stable=True)
    first = torch.searchsorted(ordered, ordered)
    sums = torch.zeros_like(values).scatter_add_(1, first, values.gather(1, order))
    return torch.empty_like(values).scatter_(1, order, sums.gather(1, first))
