"""How the active tokens are cut into blocks that fit the workspace.

N active tokens, H hidden size, V vocabulary size.
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

#: Adding up B blocks in half precision rounds B times: at 8 the error of grad_weight is 1.9 times that of plain
#: PyTorch, at 16 it is 2.5 times. Beyond 8, a second pass writes each part of grad_weight once instead.
#: Exponential blocks add the labels' terms, most of grad_weight, once at the end: at 32 blocks the error of the whole
#: is that of plain PyTorch or below, and twice that on rows of the vocabulary that are no token's label.
MAX_HALF_PRECISION_BLOCKS = 8
MAX_EXPONENTIAL_BLOCKS = 32
#: A block whose gradient of hidden states has fewer entries leaves most processors idle in that product; a second
#: pass, whose blocks are taller, is faster then.
MIN_BLOCK_OUTPUTS = 2**20

#: Two heads: the default number of tokens whose gradients share a product, the parts that their logits are computed
#: in, the default workspace, and the tokens of a kernel's tile.
TWO_HEADS_ROWS = 2048
TWO_HEADS_PARTS = 4
TWO_HEADS_WORKSPACE = 1228 * MiB
TILE = 128


@dataclass(frozen=True)
class Workload:
    """What a plan depends on.

    Args:
        tokens, hidden_size, vocab_size: N, H, V.
        operand_dtype: dtype of the products' operands.
        weight_dtype: dtype of the weight, whose rows are cast where it differs.
        device: where everything is.
        temporaries: how many temporaries of one row each the elementwise work needs, 0 for fused kernels.
        gathers: whether hidden states are copied before they are multiplied, and their gradients scattered.
        fused: whether tiles of the gradient pass hold half-precision gradients only.
        exponentials: whether blocks of whole rows hold half-precision exponentials only.
        fused_products: with two heads, whether the student's product runs in a Triton kernel.
        teacher_row_bytes: with two heads, the bytes that the teacher adds to a row of its logits; 0 for one head.
    """

    tokens: int
    hidden_size: int
    vocab_size: int
    operand_dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    temporaries: int = 4
    gathers: bool = True
    fused: bool = False
    exponentials: bool = False
    fused_products: bool = False
    teacher_row_bytes: int = 0

    @property
    def operand_bytes(self) -> int:
        return self.operand_dtype.itemsize

    @property
    def logit_bytes(self) -> int:
        return torch.promote_types(torch.float32, self.operand_dtype).itemsize

    @property
    def columns(self) -> int:
        """Columns of a row in memory."""
        return padded(self.vocab_size)

    @property
    def casts(self) -> bool:
        """Whether rows of the weight are cast before they are multiplied."""
        return self.operand_dtype != self.weight_dtype

    @property
    def least_scratch(self) -> int:
        """Bytes of one row's temporaries."""
        return self.temporaries * self.columns * self.logit_bytes


@dataclass(frozen=True)
class Plan:
    """Sizes of the blocks.

    Args:
        rows: tokens in a block of whole rows (the statistics pass, the one-pass strategies).
        part_rows: with two heads, tokens of a block whose logits exist at the same time.
        tile_rows: tokens in a tile of the gradient pass.
        tile_columns: columns of the vocabulary in such a tile.
        scratch: bytes for elementwise temporaries; blocks are worked on in slices of that size where they need any.
        weight_chunk: rows of the weight that are cast at once; V when none need it.
        resident: whether all logits fit the workspace at once.
        few_blocks: whether grad_weight may be accumulated block by block in half precision.
        tall_blocks: whether blocks of whole rows are tall enough to keep the device busy.
    """

    rows: int
    part_rows: int
    tile_rows: int
    tile_columns: int
    scratch: int
    weight_chunk: int
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


def make_plan(work: Workload, workspace: int | None = None, chunk_size: int | None = None) -> Plan:
    """Cut the tokens of a workload into blocks.

    Args:
        work: what the sizes depend on.
        workspace: bytes for everything beyond inputs and outputs; chosen from the workload by default.
        chunk_size: the largest number of tokens in a block of whole rows.

    Raises:
        ValueError: the workspace cannot hold even one row.
    """
    return (_plan_two_heads if work.teacher_row_bytes else _plan_one_head)(work, workspace, chunk_size)


def _plan_one_head(work: Workload, workspace: int | None, chunk_size: int | None) -> Plan:
    item, operand, tokens, hidden_size = work.logit_bytes, work.operand_bytes, work.tokens, work.hidden_size
    # Each row's hidden state (gathered, cast or scaled), its gradient, and that gradient in the result's dtype.
    hidden_bytes = hidden_size * (8 + operand + 2 * item)
    tile_hidden_bytes = hidden_size * (item + 2 * operand * work.gathers) if work.fused else hidden_bytes
    row_bytes = work.columns * item + hidden_bytes
    if work.exponentials:
        # 1024: the partial sums of the kernel's programs.
        row_bytes = work.columns * operand + tile_hidden_bytes + hidden_size * operand + 1024
    given = workspace is not None
    if workspace is None:
        workspace = default_workspace(work.vocab_size, item, work.device)
        if work.exponentials:
            long_enough = int(FULL_BLOCK_FLOPS / (6 * hidden_size * work.vocab_size))
            full_rows = max(FULL_ROWS, min(long_enough, MAX_SMALL_BLOCK // row_bytes))
            workspace = min(full_rows * row_bytes, 1536 * MiB)

    # Per-token vectors (labels, positions, statistics and their gradients) are small, but not nothing.
    vectors = tokens * (32 if work.fused else 16) * item
    least = row_bytes + work.least_scratch + vectors + work.casts * hidden_size * (operand + item)
    if given and workspace < least:
        raise ValueError(
            f"workspace={workspace} bytes is too small for {tokens} tokens over a vocabulary of {work.vocab_size} and "
            f"a hidden size of {hidden_size}: give at least {least} bytes, or leave it out."
        )
    budget = max(workspace, least) - vectors if given else max(workspace, least)
    scratch, weight_chunk = _scratch_and_weight_chunk(work, budget)
    budget -= scratch + (weight_chunk * hidden_size * (operand + item) if work.casts else 0)

    rows = max(1, min(budget // row_bytes, max(tokens, 1)))
    if chunk_size is not None:
        rows = min(rows, chunk_size)
    resident = tokens * row_bytes <= budget and chunk_size is None

    if work.fused and not given:
        budget = max(min(budget, DEFAULT_TILES - vectors), 16 * MiB)
    tile_rows, tile_columns = _tile(tokens, budget, tile_hidden_bytes, operand if work.fused else item)
    rows = _even(tokens, rows)
    return Plan(
        rows=rows,
        part_rows=rows,
        tile_rows=tile_rows,
        tile_columns=min(tile_columns, work.columns),
        scratch=scratch,
        weight_chunk=weight_chunk,
        resident=resident,
        few_blocks=tokens <= rows * (MAX_EXPONENTIAL_BLOCKS if work.exponentials else MAX_HALF_PRECISION_BLOCKS),
        tall_blocks=rows >= tokens or rows * hidden_size >= MIN_BLOCK_OUTPUTS or not work.exponentials,
    )


def _scratch_and_weight_chunk(work: Workload, budget: int) -> tuple[int, int]:
    """Bytes for temporaries, and rows of the weight to cast at once, for up to an eighth of the budget each."""
    limit = (4 if work.device.type == "cpu" else 96) * MiB
    scratch = max(min(budget // 8, limit), work.least_scratch) if work.temporaries else 0
    if not work.casts:
        return scratch, work.vocab_size
    # A chunk is cast once, and its part of grad_weight is computed wide before it is rounded.
    bytes_per_row = work.hidden_size * (work.operand_bytes + work.logit_bytes)
    return scratch, min(max(1, budget // 8 // bytes_per_row), work.vocab_size)


def _plan_two_heads(work: Workload, workspace: int | None, chunk_size: int | None) -> Plan:
    """Blocks that hold half-precision gradients ``[rows, V]``, and both models' logits ``[part_rows, V]``."""
    item, operand, tokens, hidden_size = work.logit_bytes, work.operand_bytes, work.tokens, work.hidden_size
    # Hidden states (gathered or cast), their gradient, and that once more where it is accumulated wide or cast.
    row_bytes = work.columns * operand
    row_bytes += hidden_size * (3 * operand if work.fused_products else 8 + operand + 2 * item)
    part_bytes = 2 * work.columns * item + work.teacher_row_bytes + 4096  # 4096: the partial sums of the programs
    available = workspace or default_workspace(work.vocab_size, item, work.device)
    scratch, weight_chunk = _scratch_and_weight_chunk(work, available)
    fixed = scratch
    if work.casts:
        fixed += 2 * weight_chunk * hidden_size * (operand + item)
    if workspace is not None:
        fixed += tokens * 16 * item  # labels, positions, statistics and their weights
    least = row_bytes + part_bytes + fixed
    if workspace is not None and workspace < least:
        raise ValueError(
            f"workspace={workspace} bytes is too small for {tokens} tokens of a student and a teacher over a "
            f"vocabulary of {work.vocab_size}: give at least {least} bytes, or leave it out."
        )
    largest = TWO_HEADS_ROWS * row_bytes + TWO_HEADS_ROWS // TWO_HEADS_PARTS * part_bytes + fixed
    budget = max(workspace or min(largest, TWO_HEADS_WORKSPACE), least) - fixed
    part = _whole_tiles(budget // (TWO_HEADS_PARTS * row_bytes + part_bytes))
    if part < TILE <= budget // (2 * part_bytes):
        part = TILE  # with fewer rows, loading the heads would take longer than multiplying by them
    rows = _whole_tiles(max(1, min((budget - part * part_bytes) // row_bytes, max(tokens, 1))))
    if chunk_size is not None:
        rows = min(rows, chunk_size)
    rows = _even(tokens, rows)
    part = _even(rows, max(1, min(part, rows)))
    return Plan(
        rows=rows,
        part_rows=part,
        tile_rows=rows,
        tile_columns=work.columns,
        scratch=scratch,
        weight_chunk=weight_chunk,
        resident=False,
        few_blocks=True,
        tall_blocks=True,
    )


def _whole_tiles(rows: int) -> int:
    """``rows``, rounded down to a multiple of the kernels' tiles where there is at least one."""
    return rows if rows < TILE else rows // TILE * TILE


def _tile(tokens: int, budget: int, hidden_bytes: int, item: int) -> tuple[int, int]:
    """Tokens and columns of the gradient pass's tiles.

    Most of the budget goes to tokens, so that grad_weight is written once or a few times; but a tile needs enough
    columns to keep the device busy.
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
    """The size of as few, equally large parts as ``most`` allows, rounded up to a multiple of 128."""
    even = -(-total // max(-(-total // most), 1))
    return max(1, min(most, -(-even // 128) * 128))
