"""The options of a call, and how its active tokens are cut into blocks that fit the workspace.

N active tokens, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from numbers import Integral
from typing import NamedTuple

import torch

from liger_losses.checks import check_names, see
from liger_losses.chunked.core.workspace import WORKSPACE_VARIABLE, default_bound
from liger_losses.kernels import BACKENDS
from liger_losses.kernels._tiles import processors
from liger_losses.kernels.matmul import wide_dtype

MiB = 2**20

#: Default sizes of the fused kernels' buffers. Products with fewer rows or columns leave processors idle; and a block
#: should take milliseconds, as the host takes one to queue its kernels, unless its buffer would be large.
FULL_ROWS = 2048
FULL_BLOCK_FLOPS = 3e12
MAX_SMALL_BLOCK = 1024 * MiB
#: What ranks that share a vocabulary take, by what one takes that has it whole. (Two H100s, cross-entropy of 8192 x
#: 4096 x 128256: 21.8 ms in three blocks, 21.1 in two, 20.0 in one; the bare products and all-reduces, 18.3 to 19.5.)
MORE_OF_RANKS = 2.25
DEFAULT_TILES = 248 * MiB
MIN_TILE_COLUMNS = 4096

#: A loss that couples tokens may by default take this part of the device's memory to keep its logits until backward.
MEMORY_PARTS = 32
#: That saves a product. But where the kernel of the statistics would write no logits, they must be written and read in
#: fp32: on an H200, this takes as long as the product at a hidden size of 2048.
MIN_KEPT_HIDDEN_SIZE = 2560

#: Adding up B blocks in half precision rounds B times: at 8 the error of grad_weight is 1.9 times the error of plain
#: PyTorch, at 16 it is 2.5 times. Beyond 8, a second pass writes each part of grad_weight once instead; with a teacher,
#: blocks are taller. Where these do not fit, parts are added up in fp32. Exponential blocks add the labels' terms, most
#: of grad_weight, once at the end: at 32 blocks the error of the whole is at most the error of plain PyTorch, and twice
#: as large on rows of the vocabulary that are no token's label.
MAX_HALF_PRECISION_BLOCKS = 8
MAX_EXPONENTIAL_BLOCKS = 32
#: A block whose gradient of hidden states has fewer entries leaves most processors idle in that product; a second
#: pass, whose blocks are taller, is faster then.
MIN_BLOCK_OUTPUTS = 2**20

#: With a teacher: the default number of tokens whose gradients share a product, the parts that their logits are
#: computed in, the default workspace, and the tokens and columns of a product's tile.
TEACHER_ROWS = 2048
TEACHER_PARTS = 4
TEACHER_WORKSPACE = 1228 * MiB
TILE, TILE_COLUMNS = 128, 256
#: What is left free of a workspace that was given, where it has room. CUDA's caching allocator may hand out a block
#: of memory that is up to 1 MiB larger than a large buffer, and counts all of it; a few such buffers exist at a time.
LARGER_BUFFERS = {"cuda": 3 * MiB}
#: The part of a workspace that holds copies of a head's rows (cast, or dequantized): one n-th. Where each copy serves
#: all tokens of a tile, more of it.
COPIES, COPIES_OF_TILES = 8, 4
#: The part of what is left for tiles that goes to their tokens; more where each tile's rows are copied for all of them.
TILE_TOKENS, TILE_TOKENS_OF_COPIES = 5 / 8, 3 / 4


#: Each strategy, with its cost in N H V floating-point operations (with a frozen head in brackets).
STRATEGIES = {
    "statistics": "nothing needs a gradient: statistics only. 2",
    "one_pass": "separable loss: loss and gradients of a block while its logits exist. 6 (4)",
    "resident": "coupled loss whose logits fit the workspace: they stay there until backward. 6 (4)",
    "frozen_head": "coupled loss of one statistic, frozen head: its gradient per token, [N, H], saved for backward. 4",
    "two_pass": "coupled loss: statistics first, then every block again, once the upstream gradients are known. 8 (6)",
}


@dataclass(frozen=True)
class EngineOptions:
    """Options of the engine. They change results only by rounding.

    Args:
        ignore_index: the label of masked tokens.
        compact: drop masked tokens before the projection, at the cost of one host synchronization. With False, they
            are projected, and their results are 0.
        workspace: bytes for everything beyond inputs and outputs. By default chosen from the shapes, the device's
            memory and :func:`liger_losses.set_default_workspace`.
        chunk_size: the largest number of tokens whose logits one block of the forward pass holds.
        accum_dtype: dtype in which the gradient of the weight is accumulated: ``torch.float32``, which takes a buffer
            of the weight's size, or ``None`` for the weight's dtype where that is as exact as plain PyTorch.
        backend: ``torch`` or ``triton`` for the work between the products; chosen from the device by default, or by
            the environment variable ``LIGER_LOSSES_BACKEND``.
        strategy: force one of :data:`STRATEGIES` (for tests and measurements).

    Raises:
        TypeError, ValueError: an option of the wrong type or out of its range.
    """

    ignore_index: int = -100
    compact: bool = True
    workspace: int | None = None
    chunk_size: int | None = None
    accum_dtype: torch.dtype | None = None
    backend: str | None = None
    strategy: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, Integral):
            raise TypeError(f"ignore_index must be an integer, got {self.ignore_index!r}.")
        if isinstance(self.compact, (str, float)):  # all texts would be true
            raise TypeError(f"compact must be True or False, got {self.compact!r}.")
        for name in ("workspace", "chunk_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}.")
        if self.accum_dtype not in (None, torch.float32):
            raise ValueError(f"accum_dtype must be torch.float32 or None, got {self.accum_dtype!r}.")
        if self.backend is not None:
            check_names([self.backend], BACKENDS, "backend")
        if self.strategy is not None:
            check_names([self.strategy], STRATEGIES, "strategy")


@dataclass(frozen=True)
class Workload:
    """What the sizes of blocks depend on."""

    tokens: int
    hidden_size: int
    vocab_size: int
    operand_dtype: torch.dtype  # of the products' operands
    device: torch.device
    temporaries: int = 4  # of one row, that the elementwise work needs; 0 for fused kernels
    gathers: bool = True  # whether hidden states are copied before they are multiplied, and their gradients scattered
    fused: bool = False  # whether products and softmax share a kernel, so that no fp32 logits reach memory
    exponentials: bool = False  # whether blocks of whole rows hold exponentials in half precision, not fp32 logits
    fused_products: bool = False  # with a teacher, whether the student's product runs in a Triton kernel
    teacher_row_bytes: int = 0  # with a teacher, the bytes that it adds to a row of its logits
    ranks: int = 1  # that share the vocabulary, of which each has `vocab_size` columns or fewer
    device_memory: int | None = None  # bytes of the smallest device of ranks that share the vocabulary
    least_rows: int = 0  # what a tile, or with a teacher a block, should have so that few are added up: see `taller`
    copied_row_bytes: int = 0  # of a row of both heads while it is copied, where the heads are not read as they are
    dequantized_bytes: int = 0  # of quantized weights, of both models, that are dequantized at once for each pass
    walks: bool = False  # whether rows of the head are dequantized where they are needed, for all tokens of a tile

    @cached_property
    def logits_dtype(self) -> torch.dtype:
        """fp32, or fp64 for fp64 inputs: logits are never rounded to half precision."""
        return wide_dtype(self.operand_dtype)

    @cached_property
    def tile_hidden_bytes(self) -> int:
        """Bytes of a token's hidden state in the gradient pass (gathered, cast or scaled), and of its gradient."""
        item, operand = self.logits_dtype.itemsize, self.operand_dtype.itemsize
        return self.hidden_size * (item + 2 * operand * self.gathers if self.fused else 8 + operand + 2 * item)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one token in a block of whole rows: its logits, exponentials or gradient, and its hidden state."""
        columns, operand = padded(self.vocab_size), self.operand_dtype.itemsize
        if self.teacher_row_bytes:
            return columns * operand + (
                self.hidden_size * 3 * operand if self.fused_products else self.tile_hidden_bytes
            )
        if self.exponentials:
            sums = columns // 32  # a sum for each tile of columns
            return columns * operand + self.tile_hidden_bytes + self.hidden_size * operand + sums
        item = self.logits_dtype.itemsize
        return columns * item + self.hidden_size * (8 + operand + 2 * item)

    @cached_property
    def part_bytes(self) -> int:
        """With a teacher, bytes of one token's logits of both models."""
        logits = 2 * padded(self.vocab_size) * self.logits_dtype.itemsize
        return logits + self.teacher_row_bytes + 4096 if self.teacher_row_bytes else 0

    def taller(self) -> Workload:
        """The same, in tiles (with a teacher, blocks) that are few enough to add up in half precision, if they fit."""
        rows = -(-self.tokens // MAX_HALF_PRECISION_BLOCKS)
        return replace(self, least_rows=rows if rows < TILE else -(-rows // TILE) * TILE)

    def default_workspace(self) -> int:
        """Bytes that keep the device busy.

        Ranks that share a vocabulary take larger blocks, because they wait for one another in each of them.
        """
        if self.ranks > 1:
            whole = replace(self, vocab_size=self.vocab_size * self.ranks, ranks=1).default_workspace()
            return min(int(MORE_OF_RANKS * whole), 1536 * MiB) if self.exponentials else whole
        if self.teacher_row_bytes:
            largest = TEACHER_ROWS * self.row_bytes + TEACHER_ROWS // TEACHER_PARTS * self.part_bytes
            return min(largest, TEACHER_WORKSPACE)
        if not self.exponentials:
            return default_workspace(self.vocab_size, self.logits_dtype.itemsize, self.device)
        long_enough = int(FULL_BLOCK_FLOPS / (6 * self.hidden_size * self.vocab_size))
        full_rows = max(FULL_ROWS, min(long_enough, MAX_SMALL_BLOCK // self.row_bytes))
        return min(full_rows * self.row_bytes, 1536 * MiB)


@dataclass(frozen=True)
class Plan:
    """Sizes of the blocks."""

    rows: int  # tokens in a block of whole rows (the statistics pass, the one-pass strategies)
    part_rows: int  # of them, tokens whose logits exist at a time; fewer than `rows` with a teacher, 0 if too few fit
    tile_rows: int  # tokens in a tile of the gradient pass
    tile_columns: int  # columns of the vocabulary in such a tile
    scratch: int  # bytes for elementwise temporaries; blocks are worked on in slices of that size where they need any
    weight_chunk: int  # rows of the weight that are cast at once; V when none need it
    kept: int  # bytes for logits that stay until backward
    resident: bool  # whether the logits of all tokens fit there
    few_blocks: bool  # one pass may add up grad_weight in half precision: its blocks are no more than the error allows
    few_tiles: bool  # the second of two passes may: its tiles add to each entry no more often than that
    tall_blocks: bool  # one pass comes before two: a block has enough rows to keep the device busy


def padded(columns: int) -> int:
    """A row length that keeps products aligned whatever the vocabulary size."""
    return -(-columns // 64) * 64


def blocks(total: int, size: int) -> list[slice]:
    """Slices of at most ``size`` that cover ``range(total)``."""
    size = max(size, 1)
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def default_workspace(vocab_size: int, itemsize: int, device: torch.device) -> int:
    """Bytes: room for 2048 rows of logits on an accelerator, 1024 on a CPU, between 64 MiB and 1.5 GiB."""
    rows = 1024 if device.type == "cpu" else 2048
    return min(max(rows * padded(vocab_size) * itemsize * 5 // 4, 64 * MiB), 1536 * MiB)


@cache
def device_memory(device: torch.device) -> int:
    """Bytes of a GPU, in use or not; 0 for other devices."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def bound_of(workspace: int | None) -> int | None:
    """The bytes that a call may take: its own ``workspace``, or what the user has set; ``None`` where neither is."""
    return default_bound() if workspace is None else workspace


def make_plan(work: Workload, workspace: int | None = None, chunk_size: int | None = None) -> Plan:
    """Cut the tokens of a workload into blocks.

    Args:
        work: what the sizes depend on.
        workspace: bytes for everything beyond inputs and outputs. By default, the blocks take what keeps the device
            busy, and logits are kept until backward if they fit into a part of the device's memory. What the user has
            set by :func:`liger_losses.set_default_workspace` bounds both.
        chunk_size: the largest number of tokens in a block of whole rows.

    Raises:
        ValueError: the workspace cannot hold even one row.
    """
    workspace, chunk_size = [n if n is None else int(n) for n in (workspace, chunk_size)]  # torch rejects NumPy's
    bound, by_default = bound_of(workspace), workspace is None
    budget, tokens = _budget(work, bound, by_default), work.tokens
    teacher = work.teacher_row_bytes > 0
    part = _part_rows(work, budget.blocks) if teacher else 0
    share = TILE_TOKENS_OF_COPIES if work.walks else TILE_TOKENS
    tile_rows, tile_columns = _tile(tokens, *_tile_bytes(work, budget.blocks, by_default), share)
    rows = max(1, min((budget.blocks - part * work.part_bytes) // work.row_bytes, max(tokens, 1)))
    most = max(chunk_size or rows, work.least_rows * teacher)
    rows = min(_whole_tiles(rows) if teacher else rows, most)
    rows = even(tokens, rows)
    tile_columns = min(tile_columns, budget.weight_chunk if work.walks else padded(work.vocab_size))
    if work.walks and work.fused and tile_columns < work.vocab_size:
        tile_columns = _full_waves(tile_rows, tile_columns, processors(work.device))
    most_blocks = MAX_EXPONENTIAL_BLOCKS if work.exponentials else MAX_HALF_PRECISION_BLOCKS
    return Plan(
        rows=rows,
        part_rows=even(rows, min(part, rows, chunk_size or rows)) if teacher else rows,
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        scratch=budget.scratch,
        weight_chunk=budget.weight_chunk,
        kept=budget.kept,
        resident=tokens * work.row_bytes <= budget.kept and chunk_size is None and not teacher,
        few_blocks=tokens <= rows * most_blocks,
        few_tiles=tokens <= tile_rows * MAX_HALF_PRECISION_BLOCKS,
        tall_blocks=rows >= tokens or rows * work.hidden_size >= MIN_BLOCK_OUTPUTS or not work.exponentials,
    )


class _Budget(NamedTuple):
    """How the workspace is divided."""

    blocks: int  # bytes for a block, or a tile, at a time
    kept: int  # bytes for the logits of all tokens, if they are kept until backward
    scratch: int
    weight_chunk: int  # rows


def _budget(work: Workload, bound: int | None, by_default: bool) -> _Budget:
    """Divide ``bound``, the call's own workspace or ``by_default`` what the user has set for all calls; where there is
    none, the workspace of the workload and the device."""
    memory = device_memory(work.device) if work.device_memory is None else work.device_memory
    usual = work.default_workspace()
    if work.least_rows and work.teacher_row_bytes:
        taller = work.least_rows * work.row_bytes + TEACHER_ROWS // TEACHER_PARTS * work.part_bytes
        usual = max(usual, min(taller, memory // MEMORY_PARTS))
    item, teacher = work.logits_dtype.itemsize, work.teacher_row_bytes > 0
    # Per-token vectors (labels, positions, statistics and their gradients) are small, but not nothing.
    numbers = 32 if work.fused else 16
    vectors = 0 if bound is None else work.tokens * numbers * item
    least_scratch = work.temporaries * padded(work.vocab_size) * item
    least = work.row_bytes + work.part_bytes + least_scratch + vectors + work.copied_row_bytes + work.dequantized_bytes
    if bound is not None and bound < least:
        models = "a student and a teacher over" if teacher else f"a hidden size of {work.hidden_size} and"
        given, advice = f"workspace={bound} bytes is", "or leave it out"
        if by_default:
            given = f"the default workspace that was set is {bound} bytes, which is"
            advice = f"by liger_losses.set_default_workspace, liger_losses.workspace or {WORKSPACE_VARIABLE}"
        raise ValueError(
            f"{given} too small for {work.tokens} tokens of {models} a vocabulary of {work.vocab_size}: give at least "
            f"{least} bytes, {advice}." + see("workspace")
        )
    if bound is None:
        most = max(usual, memory // MEMORY_PARTS)
    else:
        most = bound - min(LARGER_BUFFERS.get(work.device.type, 0), (bound - least) // 4)
    most, least = max(most, least) - vectors - work.dequantized_bytes, least - work.dequantized_bytes
    size = most if not by_default else max(min(usual, most), least - vectors)
    scratch_limit = (4 if work.device.type == "cpu" else 96) * MiB
    scratch = max(min(size // 8, scratch_limit), least_scratch) if work.temporaries else 0
    copies = size // (COPIES_OF_TILES if work.walks else COPIES)
    chunk = min(max(1, copies // max(work.copied_row_bytes, 1)), work.vocab_size) if work.copied_row_bytes else 0
    chunk = chunk // 64 * 64 or chunk  # aligned products
    taken = scratch + chunk * work.copied_row_bytes
    # Whether it is faster to keep the logits of all tokens until backward than to compute them again.
    keeps = work.exponentials or not work.fused or work.hidden_size >= MIN_KEPT_HIDDEN_SIZE
    return _Budget(size - taken, (most if keeps else size) - taken, scratch, chunk or work.vocab_size)


def _part_rows(work: Workload, size: int) -> int:
    """With a teacher, the number of tokens whose logits of both models ``size`` bytes hold, beside gradients."""
    part = _whole_tiles(size // (TEACHER_PARTS * work.row_bytes + work.part_bytes))
    if part < TILE <= size // (2 * work.part_bytes):
        part = TILE  # with fewer rows, loading the heads would take longer than multiplying by them
    left = _whole_tiles((size - work.least_rows * work.row_bytes) // work.part_bytes)
    return max(min(part, left) if work.least_rows else part, 1)


def _tile_bytes(work: Workload, size: int, by_default: bool) -> tuple[int, int, int]:
    """Of the gradient pass's tiles: all bytes, the bytes of a token's hidden states, and of one entry."""
    item, operand = work.logits_dtype.itemsize, work.operand_dtype.itemsize
    if work.fused and by_default and not work.least_rows:
        statistics = 32 if work.ranks == 1 else 96  # numbers per token; the other ranks' numbers are gathered
        size = min(size, max(DEFAULT_TILES - work.tokens * statistics * item, 16 * MiB))
    return size, work.tile_hidden_bytes, operand if work.fused else item


def _whole_tiles(rows: int) -> int:
    """``rows``, rounded down to a multiple of the kernels' tiles where there is at least one."""
    return rows if rows < TILE else rows // TILE * TILE


def _tile(tokens: int, budget: int, hidden_bytes: int, item: int, share: float) -> tuple[int, int]:
    """Tokens and columns of the gradient pass's tiles.

    Most of the budget goes to tokens, so that grad_weight is written once or a few times; but a tile needs enough
    columns to keep the device busy.
    """
    rows = max(1, min(int(budget * share) // (hidden_bytes + 64 * item), max(tokens, 1)))
    while True:
        rows = even(tokens, rows)
        columns = max(1, (budget - rows * hidden_bytes) // (rows * item))
        if columns >= MIN_TILE_COLUMNS or rows <= MIN_TILE_COLUMNS // 2:
            # Aligned tiles, and none that is mostly padding.
            return rows, columns // 64 * 64 or columns
        rows = rows * 3 // 4


def _full_waves(rows: int, columns: int, programs: int) -> int:
    """At most ``columns``, in whole tiles of a product, of which the last ones leave the fewest programs idle."""
    row_tiles, most = -(-rows // TILE), columns // TILE_COLUMNS

    def waste(column_tiles: int) -> float:
        tiles = row_tiles * column_tiles
        return -tiles % programs / tiles

    return TILE_COLUMNS * min(range(most, max(most // 2, 0), -1), key=waste) if most > 1 else columns


def even(total: int, most: int) -> int:
    """The size of as few, equally large parts as ``most`` allows, rounded up to a multiple of 128."""
    even = -(-total // max(-(-total // most), 1))
    return max(1, min(most, -(-even // 128) * 128))
