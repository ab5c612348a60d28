"""How a stream is cut into blocks so that it fits its workspace.

N tokens that carry loss, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

MiB = 2**20

#: Default sizes of the fused kernels' buffers. Products with fewer rows or columns leave processors idle; and a block
#: should take milliseconds, as the host takes one to queue its kernels, unless its buffer would be large.
FULL_ROWS = 2048
FULL_BLOCK_FLOPS = 3e12
MAX_SMALL_BLOCK = 1024 * MiB
DEFAULT_TILES = 248 * MiB
MIN_TILE_COLUMNS = 4096

#: Adding up B blocks in half precision rounds B times: at 8 the error of grad_weight is 1.9 times the plain
#: computation's, at 16 it is 2.5 times. Beyond 8, a second pass writes each part of it once instead.
#: Blocks of exponentials leave the labels' terms, most of it, to the end, where they are added at once: at 32 blocks
#: the error of the whole is then the plain computation's or below it, and twice that on rows that are no token's label.
MAX_HALF_PRECISION_BLOCKS = 8
MAX_EXPONENTIAL_BLOCKS = 32
#: Entries of a block's gradient of hidden states below which that product leaves most processors idle; a second pass,
#: whose blocks are taller, is faster then.
MIN_BLOCK_OUTPUTS = 2**20


@dataclass(frozen=True)
class Plan:
    """Sizes of the blocks.

    Args:
        rows: tokens in a block of whole rows of logits (the statistics pass, the one-pass strategies).
        tile_rows: tokens in a tile of the gradient pass.
        tile_columns: columns of the vocabulary in such a tile.
        scratch: bytes for elementwise temporaries; blocks are worked on in slices of that size where they need any.
        slab: rows of the weight that are cast at once; V when none need it.
        resident: whether all logits fit the workspace at once.
        few_blocks: whether grad_weight may be added up block by block in half precision.
        tall_blocks: whether blocks of whole rows are tall enough to keep the device busy.
    """

    rows: int
    tile_rows: int
    tile_columns: int
    scratch: int
    slab: int
    resident: bool
    few_blocks: bool
    tall_blocks: bool


def padded(columns: int) -> int:
    """A row length that keeps products aligned whatever the vocabulary size."""
    return -(-columns // 64) * 64


def blocks(total: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size`` that cover ``range(total)``."""
    size = max(size, 1)
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def default_workspace(vocab_size: int, itemsize: int, device: torch.device) -> int:
    """Bytes: room for 2048 rows of logits on an accelerator, 1024 on a CPU, between 64 MiB and 1.5 GiB."""
    rows = 1024 if device.type == "cpu" else 2048
    return min(max(rows * padded(vocab_size) * itemsize * 5 // 4, 64 * MiB), 1536 * MiB)


def make_plan(
    *,
    tokens: int,
    hidden_size: int,
    vocab_size: int,
    logits_dtype: torch.dtype,
    operand_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
    workspace: int | None = None,
    chunk_size: int | None = None,
    temporaries: bool = True,
    gathered: bool = True,
    fused: bool = False,
    exponentials: bool = False,
) -> Plan:
    """Cut a stream of ``tokens`` into blocks.

    Args:
        workspace: bytes that everything beyond inputs and outputs must fit; chosen from the shapes by default.
        chunk_size: tokens per block of whole rows, instead of as many as fit.
        temporaries: whether elementwise work needs scratch space.
        gathered: whether hidden states are gathered before they are multiplied, and their gradients scattered.
        fused: whether tiles of the gradient pass hold half-precision gradients only.
        exponentials: whether blocks of whole rows hold half-precision exponentials only.

    Raises:
        ValueError: the workspace cannot hold even one row.
    """
    item, operand = logits_dtype.itemsize, operand_dtype.itemsize
    columns = padded(vocab_size)
    # What goes with a row: its hidden state (gathered, cast or scaled), its gradient, then in the result's dtype.
    hidden_bytes = hidden_size * (8 + operand + 2 * item)
    tile_hidden_bytes = hidden_size * (item + 2 * operand * gathered) if fused else hidden_bytes
    row_bytes = columns * item + hidden_bytes
    if exponentials:
        # The sums that every lane of the kernel leaves are a small matter beside these.
        row_bytes = columns * operand + tile_hidden_bytes + hidden_size * operand + 1024
    given = workspace is not None
    if workspace is None:
        workspace = default_workspace(vocab_size, item, device)
        if exponentials:
            long_enough = int(FULL_BLOCK_FLOPS / (6 * hidden_size * vocab_size))
            full_rows = max(FULL_ROWS, min(long_enough, MAX_SMALL_BLOCK // row_bytes))
            workspace = min(full_rows * row_bytes, 1536 * MiB)

    # Per-token vectors (labels, positions, statistics and their gradients) are small, but they are not nothing.
    vectors = tokens * (32 if fused else 16) * item
    cast = operand_dtype != weight_dtype
    least_scratch = 4 * columns * item if temporaries else 0
    least = row_bytes + least_scratch + vectors + cast * hidden_size * (operand + item)
    if given and workspace < least:
        raise ValueError(
            f"workspace={workspace} bytes is too small for {tokens} tokens over a vocabulary of {vocab_size} and a "
            f"hidden size of {hidden_size}: give at least {least} bytes, or leave it out."
        )
    budget = max(workspace, least) - vectors if given else max(workspace, least)

    scratch_limit = (4 if device.type == "cpu" else 96) * MiB
    scratch = max(min(budget // 8, scratch_limit), least_scratch) if temporaries else 0
    # A slab is cast once, and its part of grad_weight is computed wide before it is rounded.
    slab = max(1, budget // 8 // (hidden_size * (operand + item))) if cast else vocab_size
    slab = min(slab, vocab_size)
    budget -= scratch + (slab * hidden_size * (operand + item) if cast else 0)

    rows = max(1, min(budget // row_bytes, max(tokens, 1)))
    if chunk_size is not None:
        rows = min(rows, chunk_size)
    resident = tokens * row_bytes <= budget and chunk_size is None

    if fused and not given:
        budget = max(min(budget, DEFAULT_TILES - vectors), 16 * MiB)
    tile_rows, tile_columns = _tile(tokens, budget, tile_hidden_bytes, operand if fused else item)
    rows = _even(tokens, rows)
    return Plan(
        rows,
        tile_rows,
        min(tile_columns, columns),
        scratch,
        slab,
        resident,
        few_blocks=tokens <= rows * (MAX_EXPONENTIAL_BLOCKS if exponentials else MAX_HALF_PRECISION_BLOCKS),
        tall_blocks=rows >= tokens or rows * hidden_size >= MIN_BLOCK_OUTPUTS or not exponentials,
    )


def _tile(tokens: int, budget: int, hidden_bytes: int, item: int) -> tuple[int, int]:
    """Tokens and columns of the gradient pass's tiles.

    As many tokens as go with half of the budget and a little more, so that grad_weight is written once or a few times;
    but columns enough for its product to keep the device busy.
    """
    rows = max(1, min(budget * 5 // 8 // (hidden_bytes + 64 * item), max(tokens, 1)))
    while True:
        rows = _even(tokens, rows)
        columns = max(1, (budget - rows * hidden_bytes) // (rows * item))
        if columns >= MIN_TILE_COLUMNS or rows <= MIN_TILE_COLUMNS // 2:
            # Aligned tiles, and none that is mostly padding.
            return rows, columns // 64 * 64 or columns
        rows = rows * 3 // 4


def _even(total: int, most: int) -> int:
    """The size of as few parts as ``most`` allows, all about as large, and a multiple of what kernels take at once."""
    even = -(-total // max(-(-total // most), 1))
    return max(1, min(most, -(-even // 128) * 128))
