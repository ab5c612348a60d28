"""Who has which columns of a vocabulary, and what the processes (ranks) that share it exchange.

W ranks, R tokens, V columns of the whole vocabulary.

A rank computes the statistics of its columns' softmax. Those of the whole vocabulary follow from all ranks' (see
:func:`merge`), and the gradient of a rank's columns then needs no more than the log-sum-exp of all columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.checks import check_group, check_tensor, check_vector, check_weight, see
from liger_losses.chunked.engine.agreement import agree, all_gather, compare, known_of, lines_of
from liger_losses.chunked.engine.weights import QuantizedWeight
from liger_losses.kernels.online_softmax import merge
from liger_losses.kernels.reading import assert_on_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Ranks:
    """The processes that have the columns of a head's vocabulary: here this process alone, and nothing is exchanged.

    :class:`VocabularyRanks` are several that share it. Who calls these methods need not know which.
    """

    #: Whether somebody else sums the hidden states' gradients over the ranks.
    partial_gradients: bool = False

    def __reduce__(self) -> Any:
        return "ALONE" if type(self) is Ranks else super().__reduce__()  # a copy is the same object

    @property
    def size(self) -> int:
        """W."""
        return 1

    @property
    def signature(self) -> tuple[Any, ...]:
        """Everything about the ranks that determines how a call runs."""
        return ()

    @property
    def of_gradients(self) -> Ranks:
        """The ranks over which the hidden states' gradients are summed here."""
        return ALONE if self.partial_gradients else self

    @property
    def vocab_size(self) -> int:
        """V, where several ranks share it."""
        raise NotImplementedError

    def most_columns(self, vocab_size: int) -> int:
        """How many of the first ``vocab_size`` columns a rank has at most."""
        return vocab_size

    def columns(self, vocab_size: int) -> slice:
        """This rank's columns among the first ``vocab_size`` of the vocabulary."""
        return slice(0, vocab_size)

    def share(self, labels: Tensor, vocab_size: int) -> tuple[slice, Tensor, Tensor | None]:
        """This rank's :meth:`columns`, labels as numbers of these, and which labels other ranks have, whose numbers are
        any and differ from each other; ``None`` stands for none."""
        return slice(0, vocab_size), labels, None

    def local(self, hidden_states: Tensor) -> Tensor:
        """This rank's hidden states, of all tokens."""
        return hidden_states

    def least_memory(self, own: int, device: torch.device) -> int:
        """The smallest of the ranks' device memories."""
        return own

    def check_columns(self, vocab_size: int) -> None:
        """Raise ValueError if this rank has none of the first ``vocab_size`` columns, which a divergence compares."""

    def check_selected(self, selected: Tensor) -> None:
        """Raise ValueError (on a GPU, a device-side assertion) for columns that no rank has, as indexing would."""

    def agree(self, signature: Mapping[str, Any], values: Mapping[str, Callable[[], Any]]) -> None:
        """Raise on all ranks unless they are about to make the same call; see :func:`agree`."""

    def merge_(self, labels: Tensor, *softmaxes: Mapping[str, Tensor], class_weight: Tensor | None = None) -> None:
        """Merge this rank's statistics into statistics of the whole vocabulary, for several softmaxes at once; see
        :func:`merge`."""

    def sum_(self, values: Tensor) -> Tensor:
        """Replace values by their sum over the ranks."""
        return values

    def sum_each_(self, *values: Tensor) -> None:
        """As :meth:`sum_`, for several tensors of one shape at once."""

    def start_sum_(self, values: Tensor) -> Any:
        """As :meth:`sum_`, beside other work: the values are valid after ``wait()`` of what is returned."""

    def whole(self, rows: Tensor) -> Tensor:
        """``[V, ...]``: the rows of all ranks."""
        return rows

    def largest(self, logits: Tensor, columns: Tensor, k: int) -> Tensor:
        """The columns ``[R, k]`` of the largest logits of the whole vocabulary.

        ``logits`` and ``columns`` are the k largest of this rank's part, or all of a part with fewer columns.
        """
        return columns


#: One process.
ALONE = Ranks()


@dataclass(frozen=True, eq=False)
class VocabularyRanks(Ranks):
    """The rows of a head that this rank has, and the group whose ranks have the others, in the order of the ranks.

    Args:
        group: the process group.
        rank: this rank's number in it.
        sizes: rows of each rank.
        mesh: of a weight that is a DTensor.
        partial_gradients: each rank gets its columns' part of the hidden states' gradients, which somebody else sums
            (DTensor, where there is a mesh). Otherwise they are summed over the group.
    """

    group: dist.ProcessGroup
    rank: int
    sizes: tuple[int, ...]
    mesh: DeviceMesh | None = None
    partial_gradients: bool = False

    @property
    def size(self) -> int:
        return len(self.sizes)

    @property
    def signature(self) -> tuple[Any, ...]:
        return self.group.group_name, self.rank, self.sizes, self.partial_gradients

    @property
    def vocab_size(self) -> int:
        return sum(self.sizes)

    def most_columns(self, vocab_size: int) -> int:
        return min(vocab_size, max(self.sizes))

    def columns(self, vocab_size: int) -> slice:
        first = min(sum(self.sizes[: self.rank]), vocab_size)
        return slice(first, min(first + self.sizes[self.rank], vocab_size))

    def share(self, labels: Tensor, vocab_size: int) -> tuple[slice, Tensor, Tensor | None]:
        columns = self.columns(vocab_size)
        labels = labels - columns.start
        # Spread over the columns: the gradients of tokens that have one label are summed one after another.
        inside = labels.remainder(columns.stop - columns.start)
        return columns, inside, inside != labels

    def local(self, hidden_states: Tensor) -> Tensor:
        """This rank's hidden states, of all tokens.

        Raises:
            TypeError, ValueError: hidden states that are no DTensor on the mesh of a weight that is one.
        """
        if self.mesh is None:
            return hidden_states
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if not isinstance(hidden_states, DTensor):
            raise TypeError(
                "the weight is a DTensor, of which this rank has some rows, and hidden_states is a plain tensor. "
                "For tensor parallelism (the ranks share the vocabulary), pass hidden_states as a DTensor on the "
                "mesh of the weight, or Head(weight.to_local(), group=weight.device_mesh.get_group()). For FSDP2 "
                "(each rank has different tokens), patch the model (liger_losses.patch), or call the loss inside "
                "the forward of the root module, where the weight is gathered; if no gradient is needed, pass "
                "weight.full_tensor()." + see("sharded-weights")
            )
        if hidden_states.device_mesh != self.mesh:
            raise ValueError(
                f"hidden_states must be on the weight's device mesh, {self.mesh}, got {hidden_states.device_mesh}."
            )
        if hidden_states.placements != (Replicate(),):  # otherwise the gradient would be summed here already
            hidden_states = hidden_states.redistribute(placements=[Replicate()])
        return hidden_states.to_local(grad_placements=[Partial()])

    def least_memory(self, own: int, device: torch.device) -> int:
        # Exchanged once per group and type of device, by whichever head comes first.
        known = known_of(self.group).least_memory
        if device.type not in known:
            known[device.type] = int(self.gather(torch.tensor(own, device=device)).min())
        return known[device.type]

    def check_columns(self, vocab_size: int) -> None:
        columns = self.columns(vocab_size)
        if columns.start == columns.stop:
            first = sum(self.sizes[: self.rank])
            raise ValueError(
                f"this rank's rows of the head begin at {first}, beyond the {vocab_size} columns that student "
                "and teacher have in common; split the vocabulary so that each rank has some of these."
            )

    def check_selected(self, selected: Tensor) -> None:
        inside = ((selected >= 0) & (selected < self.vocab_size)).all()
        if selected.device.type != "cpu":
            assert_on_device(inside)
        elif not inside:
            found = f"{int(selected.min())} to {int(selected.max())}"
            raise ValueError(
                f"selected columns must be in [0, {self.vocab_size}), the whole vocabulary, found {found}."
            )

    # --- What the ranks exchange --------------------------------------------------------------------------------------

    def agree(self, signature: Mapping[str, Any], values: Mapping[str, Callable[[], Any]]) -> None:
        agree(self.group, signature, values)

    def gather(self, values: Tensor) -> Tensor:
        """``[W, *]``: the values of all ranks, which have one shape and dtype."""
        values = values.contiguous()
        out = values.new_empty(len(self.sizes), *values.shape)
        all_gather(out.view(-1), values.view(-1), group=self.group)
        return out

    def sum_(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    def sum_each_(self, *values: Tensor) -> None:
        for value, total in zip(values, self.sum_(torch.stack(values)), strict=True):
            value.copy_(total)

    def start_sum_(self, values: Tensor) -> Any:
        return dist.all_reduce(values, group=self.group, async_op=True)

    def whole(self, rows: Tensor) -> Tensor:
        padded = rows.new_zeros(max(self.sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = self.gather(padded)
        return torch.cat([part[:size] for part, size in zip(gathered, self.sizes, strict=True)])

    def largest(self, logits: Tensor, columns: Tensor, k: int) -> Tensor:
        width = min(k, max(self.sizes))  # a rank may have fewer columns
        every, ids = (
            torch.cat([part[:, :size] for part, size in zip(self.gather(padded), self.sizes, strict=True)], 1)
            for padded in (torch.nn.functional.pad(own, (0, width - own.shape[1])) for own in (logits, columns))
        )
        return ids.gather(1, every.topk(k, -1).indices)

    def merge_(self, labels: Tensor, *softmaxes: Mapping[str, Tensor], class_weight: Tensor | None = None) -> None:
        # In an order that all ranks have: the order of a set of names differs from process to process.
        named = [(i, name, values[name]) for i, values in enumerate(softmaxes) for name in sorted(values)]
        rows = [value.t() if value.dim() == 2 else value[None] for _, _, value in named]
        gathered = self.gather(torch.cat([row.to(softmaxes[0]["lse"].dtype) for row in rows]))
        parts: list[dict[str, Tensor]] = [{} for _ in softmaxes]
        for (i, name, value), part in zip(named, gathered.split([len(row) for row in rows], dim=1), strict=True):
            parts[i][name] = part.mT if value.dim() == 2 else part[:, 0]
        sizes = on_device(self.sizes, labels.device)
        for values, parts_of_one in zip(softmaxes, parts, strict=True):
            for name, value in merge(parts_of_one, sizes, labels, class_weight).items():
                values[name].copy_(value)


@lru_cache(64)
def on_device(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept, because the host waits for a copy to a GPU."""
    return torch.tensor(sizes, device=device)


def check_teacher_ranks(student: Ranks, teacher: Ranks) -> None:
    """Raise ValueError for a teacher whose vocabulary is shared in another way than the student's."""
    if not isinstance(teacher, VocabularyRanks):
        return
    if not isinstance(student, VocabularyRanks):
        raise ValueError(
            "the teacher's head is vocabulary-parallel, and the student's is not; make both vocabulary-parallel, "
            "or gather the teacher's weight first."
        )
    common = min(student.vocab_size, teacher.vocab_size)
    both = [[dist.get_process_group_ranks(ranks.group), ranks.columns(common)] for ranks in (student, teacher)]
    if both[0] != both[1]:
        raise ValueError(
            f"each rank must hold the same part of the {common} columns that student and teacher have in common, "
            f"but the student has {both[0][1]} of ranks {both[0][0]} here and the teacher {both[1][1]} of ranks "
            f"{both[1][0]}."
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


def share_mesh(weight: Any) -> VocabularyRanks:
    """The shard of a DTensor that :func:`local_rows` has checked: it follows from shape and mesh, without exchange."""
    mesh, size = weight.device_mesh, weight.shape[0]
    most = -(-size // mesh.size())
    sizes = tuple(min(max(size - rank * most, 0), most) for rank in range(mesh.size()))
    shard = VocabularyRanks(mesh.get_group(), mesh.get_local_rank(), sizes, mesh, partial_gradients=True)
    rows = len(weight.to_local())
    if 0 in sizes or rows != sizes[shard.rank]:
        raise ValueError(
            f"a weight of {size} rows must be in parts of {sizes} on the {mesh.size()} ranks of its mesh, none of them "
            f"empty, as torch.chunk cuts it; this rank has {rows}. Pad the vocabulary, or use "
            "Head(rows, group=group), which takes any sizes."
        )
    return shard


def share_vocabulary(
    group: dist.ProcessGroup, weight: Tensor, bias: Tensor | None, quantized: QuantizedWeight | None = None
) -> VocabularyRanks:
    """Check this rank's rows, and learn how many the others have. Beside a quantized weight, ``weight`` is ``[V, 0]``.

    Raises:
        TypeError, ValueError, RuntimeError: see :class:`liger_losses.Head`.
    """
    check_group(group, "tp")
    check_tensor("weight", weight)
    kind, hidden_size = str(weight.dtype), weight.shape[-1]
    if quantized is None:
        check_weight(weight, bias)
    else:
        check_vector("bias", bias, weight)
        kind, hidden_size = f"{type(quantized).__name__} for {weight.dtype}", quantized.shape[1]
    biased = "none" if bias is None else "given"
    text = lines_of({"the head's weight": kind, "the head's hidden size": hidden_size, "its bias": biased})
    found = torch.empty(dist.get_world_size(group), 2, dtype=torch.int64, device=weight.device)
    all_gather(found.view(-1), found.new_tensor([len(weight), zlib.crc32(text.encode())]), group=group)
    sizes, hashes = found.t().tolist()
    if len(set(hashes)) > 1:
        compare(group, text)
    return VocabularyRanks(group, dist.get_rank(group), tuple(sizes))
