"""What is computed of rows of logits, by the backend that the plan has chosen: the kernels' row functions, and terms in
torch of statistics that have no kernel.

R rows (tokens), C columns, k selected columns.
"""

from __future__ import annotations

from collections.abc import Sequence

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

#: Of more logits than these, the largest are chosen among the largest of so many parts of the vocabulary: a GPU's cache
#: holds a part of a row while it is read again and again.
_LOGITS, _PARTS = 2**21, 16


def merged(values: dict[str, Tensor], labels: Tensor, ranks: Ranks, class_weight: Tensor | None) -> dict[str, Tensor]:
    """Statistics of the whole vocabulary from those of each rank's columns, which are exchanged as one tensor.

    ``selected_logps`` are logits in ``values``, 0 for columns of other ranks; labels count the whole vocabulary.
    """
    if ranks.size == 1:
        if "selected_logps" in values:
            values["selected_logps"] = values["selected_logps"] - values["lse"][:, None]
        return values
    names = sorted(values)  # in an order that all ranks have
    rows = [values[name].t() if values[name].dim() == 2 else values[name][None] for name in names]
    gathered = ranks.gather(torch.cat([row.to(values["lse"].dtype) for row in rows]))
    parts = {}
    for name, part in zip(names, gathered.split([len(row) for row in rows], dim=1), strict=True):
        parts[name] = part.mT if values[name].dim() == 2 else part[:, 0]
    return merged_parts(parts, ranks.sizes, labels, class_weight)


def merged_parts(
    parts: dict[str, Tensor], sizes: Sequence[int], labels: Tensor, class_weight: Tensor | None
) -> dict[str, Tensor]:
    """Statistics of a vocabulary from those of parts of it, ``[parts, R]`` each, which have so many columns."""
    on_device = torch.tensor(sizes, device="cpu").to(labels.device, non_blocking=True)  # nobody waits for it
    wide = None if class_weight is None else class_weight.to(parts["lse"].dtype)
    return merge(parts, on_device, labels, wide)


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
        g, sums = upstream[s.name], constants[s.name + " psi"]
        psi = torch.where(there, s.derivative(log_p, vocab_size), 0.0)
        total += g[:, None] * (psi - p * sums[:, None])
    return total


# --- Selected columns -----------------------------------------------------------------------------------------------


def largest(z: Tensor, epilogue: Epilogue, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row, in descending order, and their columns; all of a row that has fewer."""
    size = z.shape[1] if z.numel() <= _LOGITS else max(-(-z.shape[1] // _PARTS), 4 * k)
    values, ids = list[Tensor](), list[Tensor]()
    for start in range(0, z.shape[1], size):
        columns = slice(start, min(start + size, z.shape[1]))
        logits = epilogue.columns(columns)(z[:, columns])
        value, at = logits.topk(min(k, logits.shape[1]), -1)
        values.append(value)
        ids.append(at + start)
    value, at = torch.cat(values, -1).topk(min(k, z.shape[1]), -1)
    return value, torch.cat(ids, -1).gather(1, at)


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
    z, transform = memory[:, :columns], epilogue.transform
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


def add_at(grad: Tensor, ids: Tensor, values: Tensor) -> None:
    """``grad[r, ids[r, i]] += values[r, i]``, with the same bits from run to run where a row repeats a column."""
    ordered, order = ids.sort(dim=-1, stable=True)
    first = torch.searchsorted(ordered, ordered)
    sums = torch.zeros_like(values).scatter_add_(1, first, values.gather(1, order))
    totals = torch.empty_like(values).scatter_(1, order, sums.gather(1, first))
    grad.scatter_(1, ids, grad.gather(1, ids) + totals)
