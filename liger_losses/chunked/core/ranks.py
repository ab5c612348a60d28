"""Who has which columns of a vocabulary, and what the processes that share it exchange."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.checks import check_group, check_tensor, see
from liger_losses.chunked.core.agreement import all_gather, compare, known_of, lines_of
from liger_losses.kernels.tracing import outside_graphs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Ranks:
    """The processes that share a vocabulary, each of which has consecutive columns; without a group, this one alone.

    ``sizes`` are the numbers of columns of each rank (none for one rank alone), ``sums_hidden`` says whether the parts
    of the hidden states' gradients are summed here, not by somebody else, and ``mesh`` is a DTensor's.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    sizes: tuple[int, ...] = ()
    sums_hidden: bool = True
    mesh: DeviceMesh | None = None
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", max(len(self.sizes), 1))

    @property
    def first(self) -> int:
        """This rank's first column."""
        return sum(self.sizes[: self.rank])

    def most(self, columns: int) -> int:
        """The columns of the rank that has most, where this one has ``columns``: what all ranks plan with."""
        return max(self.sizes, default=columns)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Ids of the vocabulary as numbers of this rank's columns, and which of them it has (``None`` for all).

        Those of other ranks' columns are spread over this rank's: many tokens of one column would wait for each other.
        """
        if self.size == 1:
            return ids, None
        here = ids - self.first
        places = here.remainder(self.sizes[self.rank])
        return places, places == here

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks, in the memory of ``value``."""
        if self.group is not None:
            dist.all_reduce(value, group=self.group)
        return value

    def gather(self, value: Tensor) -> Tensor:
        """``[ranks, ...]``: the values of all ranks."""
        value = value.contiguous()
        values = value.new_empty(len(self.sizes), *value.shape)
        all_gather(values.view(-1), value.view(-1), group=self.group)
        return values

    def columns(self, vocab_size: int) -> slice:
        """This rank's columns among the first ``vocab_size`` of the vocabulary."""
        stop = sum(self.sizes[: self.rank + 1]) or vocab_size
        return slice(min(self.first, vocab_size), min(stop, vocab_size))

    def states(self, hidden_states: Tensor) -> Tensor:
        """This rank's hidden states, of all tokens.

        Raises:
            TypeError, ValueError: hidden states that are no DTensor on the mesh of a weight that is one.
        """
        if self.mesh is None:
            return hidden_states
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if not isinstance(hidden_states, DTensor):
            check_tensor("hidden_states", hidden_states)
            raise TypeError(
                "the weight is a DTensor, of which this rank has some rows, and hidden_states is a plain tensor. For "
                "tensor parallelism (the ranks share the vocabulary), pass "
                "hidden_states as a DTensor on the mesh of the weight, or Head(weight.to_local(), "
                "group=weight.device_mesh.get_group()). For FSDP2 (each rank has different tokens), patch the model "
                "(liger_losses.patch), or call the loss inside the forward of the root module; if no gradient is "
                "needed, pass weight.full_tensor()." + see("sharded-weights")
            )
        if hidden_states.device_mesh != self.mesh:
            raise ValueError(
                f"hidden_states must be on the weight's mesh, {self.mesh}, got {hidden_states.device_mesh}."
            )
        if hidden_states.placements != (Replicate(),):  # otherwise the gradient would be summed here already
            hidden_states = hidden_states.redistribute(placements=[Replicate()])
        return hidden_states.to_local(grad_placements=[Partial()])

    def whole(self, rows: Tensor) -> Tensor:
        """``[V, ...]``: the rows of all ranks."""
        if self.group is None:
            return rows
        padded = rows.new_zeros(max(self.sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        return torch.cat([part[:size] for part, size in zip(self.gather(padded), self.sizes, strict=True)])

    def least_memory(self, memory: int, device: torch.device) -> int:
        """The smallest of the ranks' device memories."""
        if self.group is None:
            return memory
        # Exchanged once per group and type of device, by whichever head comes first.
        known = known_of(self.group).least_memory
        if device.type not in known:
            known[device.type] = int(self.gather(torch.tensor(memory, device=device)).min())
        return known[device.type]

    def __reduce__(self) -> Any:
        return "ALONE" if self is ALONE else super().__reduce__()  # a copy is the same object


#: One process.
ALONE = Ranks()


def check_teacher_ranks(student: Ranks, teacher: Ranks) -> None:
    """Raise ValueError for a teacher whose vocabulary is shared in another way than the student's."""
    if teacher is ALONE:
        return
    if student is ALONE:
        raise ValueError(
            "the teacher's head is vocabulary-parallel, and the student's is not; make both vocabulary-parallel, "
            "or gather the teacher's weight first."
        )
    common = min(sum(student.sizes), sum(teacher.sizes))
    ours, theirs = [(dist.get_process_group_ranks(r.group), r.columns(common)) for r in (student, teacher)]
    if ours != theirs:
        raise ValueError(
            f"each rank must hold the same part of the {common} columns that student and teacher have in common, but "
            f"the student has {ours[1]} of ranks {ours[0]} here and the teacher {theirs[1]} of ranks {theirs[0]}."
        )


def local_rows(name: str, value: Any, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of a weight or bias that is a DTensor.

    Raises:
        TypeError, ValueError: a value that is no DTensor whose rows the ranks of a one-dimensional mesh share.
    """
    from torch.distributed.tensor import Shard

    if not hasattr(value, "full_tensor"):
        raise TypeError(f"the weight is a DTensor and {name} is not; make {name} one, with the weight's placements.")
    if value.device_mesh != mesh or mesh.ndim != 1 or value.placements != (Shard(0),):
        raise ValueError(
            f"{name} must be a DTensor with placements [Shard(0)] on the one-dimensional mesh of the weight, got "
            f"{list(value.placements)} on {value.device_mesh}. For a larger mesh, take the dimension whose ranks "
            f'share the vocabulary, such as mesh["tp"]; or, if no gradient is needed, pass {name}.full_tensor().'
        )
    return value.to_local()


def share_mesh(weight: Any) -> Ranks:
    """The shard of a DTensor that :func:`local_rows` has checked: it follows from shape and mesh, without exchange."""
    mesh, size = weight.device_mesh, weight.shape[0]
    most = -(-size // mesh.size())
    sizes = tuple(min(max(size - rank * most, 0), most) for rank in range(mesh.size()))
    shard = Ranks(mesh.get_group(), mesh.get_local_rank(), sizes, sums_hidden=False, mesh=mesh)
    rows = len(weight.to_local())
    if 0 in sizes or rows != sizes[shard.rank]:
        raise ValueError(
            f"a weight of {size} rows must be in parts of {sizes} on the {mesh.size()} ranks of its mesh, none of them "
            f"empty, as torch.chunk cuts it; this rank has {rows}. Pad the vocabulary, or use "
            "Head(rows, group=group), which takes any sizes."
        )
    return shard


@outside_graphs  # it exchanges messages
def share_vocabulary(group: dist.ProcessGroup, rows: int, device: torch.device, facts: Mapping[str, Any]) -> Ranks:
    """Learn how many rows of a head the others have, once its facts are equal on all ranks.

    Raises:
        TypeError: a group of which this rank is not a member.
        RankError: the facts differ.
    """
    check_group(group, "tp")
    text = lines_of({f"the head's {name}": value for name, value in facts.items()})
    numbers = torch.empty(dist.get_world_size(group), 2, dtype=torch.int64, device=device)
    all_gather(numbers.view(-1), numbers.new_tensor([rows, zlib.crc32(text.encode())]), group=group)
    sizes, hashes = numbers.t().tolist()
    if len(set(hashes)) > 1:
        compare(group, text)
    return Ranks(group, dist.get_rank(group), tuple(sizes))
