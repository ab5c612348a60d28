"""Who has which columns of a vocabulary, and what the processes that share it exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The processes that share a vocabulary: here this one alone, which exchanges nothing.

    ``first`` is this rank's first column, ``sizes`` the number of columns of each rank (none for one rank alone), and
    ``sums_hidden`` says whether the parts of the hidden states' gradients are summed here, not by somebody else.
    """

    size: int = 1
    first: int = 0
    sizes: tuple[int, ...] = ()
    sums_hidden: bool = True

    def most(self, columns: int) -> int:
        """The columns of the rank that has most, where this one has ``columns``: what all ranks plan with."""
        return columns

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Ids of the vocabulary as numbers of this rank's columns, and which of them it has (``None`` for all)."""
        return ids, None

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks, in the memory of ``value``."""
        return value

    def gather(self, value: Tensor) -> Tensor:
        """``[ranks, ...]``: the values of all ranks."""
        return value[None]

    def __reduce__(self) -> Any:
        return "ALONE" if type(self) is Ranks else super().__reduce__()  # a copy is the same object


#: One process.
ALONE = Ranks()


@dataclass(frozen=True, eq=False)
class VocabularyRanks(Ranks):
    """A process group whose ranks have consecutive columns, ``sizes`` of them each."""

    group: dist.ProcessGroup
    rank: int
    sizes: tuple[int, ...] = ()
    sums_hidden: bool = True

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.sizes)

    @property
    def first(self) -> int:  # type: ignore[override]
        return sum(self.sizes[: self.rank])

    def most(self, columns: int) -> int:
        return max(self.sizes)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        columns = self.sizes[self.rank]
        inside = ids - self.first
        return inside.clamp(0, columns - 1), (inside >= 0) & (inside < columns)

    def sum(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=self.group)
        return value

    def gather(self, value: Tensor) -> Tensor:
        value = value.contiguous()
        values = value.new_empty(self.size, *value.shape)
        dist.all_gather_into_tensor(values.view(-1), value.view(-1), group=self.group)
        return values


def share_vocabulary(group: dist.ProcessGroup, columns: int, device: torch.device) -> VocabularyRanks:
    """The ranks of a group, of which this one has so many columns: all ranks tell each other, and the host waits."""
    ranks = VocabularyRanks(group, dist.get_rank(group), (1,) * dist.get_world_size(group))
    sizes = ranks.gather(torch.tensor([columns], device=device))
    return VocabularyRanks(group, ranks.rank, tuple(sizes[:, 0].tolist()))
