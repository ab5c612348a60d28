"""Where gradients add up: one buffer for each tensor that is trained, whichever targets share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.core.ranks import Ranks
from liger_losses.kernels.matmul import HALF_DTYPES, matmul_into, wide_dtype


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor that gets a gradient.

    ``summed`` says that every rank has a part of its gradient, which is the sum of all parts. ``sparse`` says that it
    is a sparse tensor of the rows that were read. ``accumulate`` is the dtype in which it adds up; ``None`` leaves that
    to the plan.
    """

    tensor: Tensor
    ranks: Ranks
    summed: bool = False
    sparse: bool = False
    accumulate: torch.dtype | None = None


class Buffer:
    """The sum of one tensor's gradient, ``[rows, ...]``: those up to ``written`` hold numbers, others no value yet."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf, self.local = leaf, local_part(leaf.tensor)
        self.shape, self.dtype = self.local.shape, self.local.dtype
        if len(self.shape) > 2:
            self.shape = torch.Size((self.shape[:-1].numel(), self.shape[-1]))
        if leaf.accumulate is not None:
            self.dtype = torch.promote_types(self.dtype, leaf.accumulate)
        self.total: Tensor | None = None
        self.written = 0
        self.sparse: list[tuple[Tensor, Tensor]] = []  # ids and their rows, while there is no matrix

    def rows(self, rows: slice) -> tuple[Tensor, bool]:
        """The memory of some rows, and whether they hold a sum already, to which more is added."""
        if self.total is None:
            self.total = torch.empty(self.shape, dtype=self.dtype, device=self.local.device)
            for ids, values in self.sparse:
                self.add_rows(ids, values)
        total, (start, stop, _) = self.total, rows.indices(len(self.total))
        holds = start < self.written
        first = stop if holds else start
        if first > self.written:
            total[self.written : first].zero_()
        self.written = max(self.written, stop)
        return (total if stop - start == len(total) else total[start:stop]), holds

    def whole(self) -> Tensor:
        """All rows, those that nobody has written as 0."""
        total, holds = self.rows(slice(None))
        return total if holds else total.zero_()

    def add_product(self, rows: slice, grad: Tensor, hidden: Tensor) -> None:
        """Add ``grad.T @ hidden`` to some rows; the product goes into the buffer, and no other of its size exists."""
        total, holds = self.rows(rows)
        matmul_into(total, grad.t(), hidden, accumulate=holds)

    def add_states(self, rows: slice | Tensor, values: Tensor) -> None:
        """Add ``values [R, H]`` to some rows, none of which is there twice; values that are all of them so far become
        the sum."""
        if not isinstance(rows, slice):
            self.whole().index_add_(0, rows, values.to(self.dtype))
        elif self.total is None and values.dtype == self.dtype and values.shape == self.shape:
            self.total, self.written = values, len(values)
        else:
            total, holds = self.rows(rows)
            total.add_(values) if holds else total.copy_(values)

    def add_rows(self, ids: Tensor, values: Tensor) -> None:
        """Add ``values [n, ...]`` to the rows ``ids [n]``, in an order that is the same from run to run; values of the
        id -1 are 0."""
        if self.lists_rows:
            self.sparse.append((ids, values))
            return
        if self.dtype in HALF_DTYPES:  # what a row gets is rounded once
            ids, order = ids.sort(stable=True)
            first = torch.searchsorted(ids, ids)
            values = torch.zeros_like(values).index_put_((first,), values[order], accumulate=True)
        self.whole().index_put_((ids.clamp(min=0),), values.to(self.dtype), accumulate=True)

    @property
    def lists_rows(self) -> bool:
        """Whether this is a list of rows so far, and no matrix."""
        return self.leaf.sparse and self.total is None

    def result(self) -> Tensor:
        """The gradient in the dtype and shape of its tensor."""
        dtype = self.local.dtype
        if self.lists_rows:
            empty = torch.empty(0, *self.shape[1:], device=self.local.device, dtype=wide_dtype(self.dtype))
            ids = torch.cat([empty.new_empty(0, dtype=torch.int64), *(ids for ids, _ in self.sparse)])
            values = torch.cat([empty, *(values for _, values in self.sparse)])
            there = ids >= 0
            made = torch.sparse_coo_tensor(ids[None, there], values[there], self.shape, check_invariants=False)
            return made.coalesce().to(self.dtype)
        total = self.whole()
        if self.leaf.summed and self.leaf.ranks.sums_hidden:
            total = self.leaf.ranks.sum(total)
        total = total if total.dtype == dtype else total.to(dtype)
        total = total if total.shape == self.local.shape else total.view(self.local.shape)
        return total if self.local is self.leaf.tensor else like(self.leaf.tensor, total)


class Gradients:
    """The buffers of a call, by the trained tensors' ids."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = leaves
        self.buffers: dict[int, Buffer] = {}
        known = dict[object, Buffer]()
        for leaf in leaves:
            key = key_of(leaf.tensor)
            if key not in known:
                known[key] = Buffer(leaf)
            self.buffers[id(leaf.tensor)] = known[key]

    def of(self, tensor: Tensor | None) -> Buffer | None:
        """``None`` for a tensor that is not trained."""
        return self.buffers.get(id(tensor))

    def results(self) -> list[Tensor | None]:
        """The gradient of each leaf; ``None`` for a second view of memory whose gradient went before."""
        buffers = [self.buffers[id(leaf.tensor)] for leaf in self.leaves]
        return [of.result() if of.leaf is leaf else None for leaf, of in zip(self.leaves, buffers, strict=True)]


def key_of(tensor: Any) -> object:
    """What tensors have in common that get one gradient: the same object, or equal views of the same tensor."""
    if hasattr(tensor, "full_tensor"):
        return id(tensor)
    base = None if tensor.is_leaf else getattr(tensor, "_base", None)
    return id(tensor if base is None else base), tensor.shape, tensor.stride(), tensor.storage_offset()


def local_part(tensor: Any) -> Tensor:
    """This rank's rows of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "full_tensor") else tensor


def like(tensor: Any, local: Tensor) -> Tensor:
    """A gradient as the DTensor that it belongs to is, of the same placements."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )
