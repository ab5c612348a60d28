"""Where gradients add up: one buffer for each tensor that is trained, whichever targets share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.chunked.core.ranks import Ranks
from liger_losses.kernels.matmul import HALF_DTYPES, matmul_into, wide_dtype


class Leaf(NamedTuple):
    """A tensor that gets a gradient.

    ``summed`` says that every rank has a part of its gradient, which is the sum of all parts. ``sparse`` says that it
    is a sparse tensor of the rows that were read. ``accumulate`` is the dtype in which it adds up.
    """

    tensor: Tensor
    ranks: Ranks
    summed: bool = False
    sparse: bool = False
    accumulate: torch.dtype | None = None


class Buffer:
    """The sum of one tensor's gradient: its rows ``0`` to ``written`` hold numbers, the others have no value yet."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf, self.written = leaf, 0
        self.sparse: list[tuple[Tensor, Tensor]] = []  # ids and their rows
        local = local_part(leaf.tensor)
        self.shape, self.dtype = local.shape, wider(local.dtype, leaf.accumulate)
        self.total = None if leaf.sparse else torch.empty(self.shape, dtype=self.dtype, device=local.device)

    def rows(self, columns: slice) -> tuple[Tensor, bool]:
        """The memory of some rows, and whether they hold a sum already, to which more is added."""
        total = self.whole() if self.total is None else self.total
        start, stop, _ = columns.indices(len(total))
        if start > self.written:
            total[self.written : start].zero_()
        holds = start < self.written
        if holds and stop > self.written:
            total[self.written : stop].zero_()
        self.written = max(self.written, stop)
        return total[start:stop], holds

    def whole(self) -> Tensor:
        """All rows, those that nobody has written as 0."""
        if self.total is None:
            device = self.leaf.tensor.device
            self.total, self.written = torch.zeros(self.shape, dtype=self.dtype, device=device), len(self.leaf.tensor)
            for ids, values in self.sparse:
                self.total.index_put_((ids.clamp(min=0),), values.to(self.dtype), accumulate=True)
            self.sparse = []
        if self.written < len(self.total):
            self.total[self.written :].zero_()
            self.written = len(self.total)
        return self.total


class Gradients:
    """The buffers of a call. Tensors without a gradient are asked for like others, and nothing is added to them."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = leaves
        self.buffers: dict[object, Buffer] = {}
        for leaf in leaves:
            self.buffers.setdefault(key_of(leaf.tensor), Buffer(leaf))

    def wants(self, tensor: Tensor | None) -> bool:
        return tensor is not None and key_of(tensor) in self.buffers

    def add(self, tensor: Tensor, columns: slice, grad: Tensor, hidden: Tensor) -> None:
        """Add ``grad.T @ hidden`` to some rows; the product goes into the buffer, and no other of its size exists."""
        if self.wants(tensor):
            total, holds = self.buffers[key_of(tensor)].rows(columns)
            matmul_into(total, grad.t(), hidden, accumulate=holds)

    def add_rows(self, tensor: Tensor, ids: Tensor, values: Tensor) -> None:
        """Add ``values [n, ...]`` to the rows ``ids [n]``, in an order that is the same from run to run; values of the
        id -1 are 0."""
        if not self.wants(tensor):
            return
        buffer = self.buffers[key_of(tensor)]
        if self.lists_rows(tensor):
            buffer.sparse.append((ids, values))
        else:
            if buffer.dtype in HALF_DTYPES:  # what a row gets is rounded once
                ids, order = ids.sort(stable=True)
                first = torch.searchsorted(ids, ids)
                values = torch.zeros_like(values).index_put_((first,), values[order], accumulate=True)
            buffer.whole().index_put_((ids.clamp(min=0),), values.to(buffer.dtype), accumulate=True)

    def lists_rows(self, tensor: Tensor) -> bool:
        """Whether a gradient is a list of rows so far, and no matrix."""
        buffer = self.buffers[key_of(tensor)]
        return buffer.leaf.sparse and buffer.total is None

    def of(self, tensor: Tensor) -> Tensor | None:
        """The whole buffer of a tensor, to be added to in place; ``None`` for one without a gradient."""
        return self.buffers[key_of(tensor)].whole() if self.wants(tensor) else None

    def results(self) -> list[Tensor | None]:
        """The gradient of each leaf in its dtype; ``None`` for a second view of memory whose gradient went before."""
        finished: set[object] = set()
        gradients: list[Tensor | None] = []
        for leaf in self.leaves:
            key = key_of(leaf.tensor)
            gradients.append(None if key in finished else self._result(self.buffers[key], leaf))
            finished.add(key)
        return gradients

    def _result(self, buffer: Buffer, leaf: Leaf) -> Tensor:
        if leaf.sparse and buffer.total is None:
            empty = torch.empty(0, *buffer.shape[1:], device=leaf.tensor.device, dtype=buffer.dtype)
            ids = torch.cat([empty.new_empty(0, dtype=torch.int64), *(ids for ids, _ in buffer.sparse)])
            values = torch.cat([empty.to(wide_dtype(buffer.dtype)), *(values for _, values in buffer.sparse)])
            ids, values = ids[ids >= 0], values[ids >= 0]
            return (
                torch.sparse_coo_tensor(ids[None], values, buffer.shape, check_invariants=False)
                .coalesce()
                .to(buffer.dtype)
            )
        total = buffer.whole()
        if leaf.summed and leaf.ranks.sums_hidden:
            total = leaf.ranks.sum(total)
        return like(leaf.tensor, total.to(local_part(leaf.tensor).dtype))


def wider(dtype: torch.dtype, accumulate: torch.dtype | None) -> torch.dtype:
    """The dtype in which gradients of ``dtype`` add up, where ``accumulate`` was asked for."""
    return dtype if accumulate is None else torch.promote_types(dtype, accumulate)


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
    """A gradient as the tensor that it belongs to is: a DTensor of the same placements, or a plain one."""
    if not hasattr(tensor, "full_tensor"):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )
