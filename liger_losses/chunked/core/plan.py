"""How a call runs: what decides, and the one function that decides.

H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.checks import see
from liger_losses.chunked.core.buffers import Leaf
from liger_losses.chunked.core.options import WORKSPACE_VARIABLE, EngineOptions, default_bound
from liger_losses.chunked.core.statistics import OF_KERNELS, Statistic
from liger_losses.chunked.core.target import Target
from liger_losses.chunked.core.weights import STEPS, Concatenated, Products, Quantized, WithAdapters
from liger_losses.kernels import choose_backend
from liger_losses.kernels._triton import LOGIT_DTYPES
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.matmul import HALF_DTYPES, wide_dtype

MiB = 2**20
#: A half-precision gradient of a weight is a sum of at most so many parts.
MOST_PARTS = 8
#: By default, a call keeps logits until backward in this part of a GPU's memory, or dequantizes a head there.
MEMORY_PARTS = 32
#: The tokens of a block whose products keep a GPU busy.
USUAL_TOKENS = 1024
#: The columns of a tile of the second pass that keep a device busy.
MIN_TILE_COLUMNS = 4096
#: What is left free of a workspace, where it has room. CUDA's caching allocator may hand out a block of memory that is
#: up to 1 MiB larger than a large buffer, and counts all of it; a few such buffers exist at a time.
LARGER_BUFFERS = {"cuda": 3 * MiB}
#: The part of a workspace in which rows of a head are copied, where not all are.
COPIES = 8
#: Rows of logits that work takes beside a block: of softmaxes in torch, of divergences and rows of the table in torch,
#: and where several kernels write a gradient.
TEMPORARIES, TEMPORARIES_OF_TERMS, TEMPORARIES_OF_KERNELS = 4, 16, 2


@dataclass(frozen=True)
class Signature:
    """All that may decide how a call runs. Hashable: the plan is a pure function of it."""

    tokens: int
    trained: int  # of them, those that may have a gradient
    hidden_size: int
    columns: int  # of the softmax, on the rank that has most
    kept: bool
    statistics: frozenset[str]  # with a gradient, if anything has one
    metrics: frozenset[str]  # without
    operand: torch.dtype  # of products
    device: torch.device
    backend: str
    trains_weight: bool
    trains_hidden: bool
    copied_bytes: int  # of a row of the heads, while it is cast or dequantized
    weights: tuple[type, ...]  # the forms of the head's matrix, from the outside in
    copy_bytes: int = 0  # of a row that was cast or dequantized, for as long as it is read
    quantized_teacher: bool = False
    teacher_columns: int = 0
    teacher_size: int = 0
    in_torch: bool = False  # whether torch computes terms of whole rows
    linear: bool = True  # whether logits are projections, times a positive number, and a bias
    several_terms: bool = False  # whether a bias or the teacher adds to what a kernel writes as a gradient
    ranks: int = 1  # that have parts of the vocabulary
    largest: int = 0  # how many of the largest columns are selected
    batch_invariant: bool = False
    gradients_in_backward: bool = True  # once all statistics are known
    others_bytes: int = 0  # of blocks of the call's other targets, which live until backward together
    targets_of_many_parts: int = 0  # that share a head which would get more than MOST_PARTS parts by blocks
    memory: int = 0  # bytes of the smallest device
    bound: int | None = None  # the default workspace that was set
    options: EngineOptions = field(default_factory=EngineOptions)

    @property
    def of_kernels(self) -> bool:
        """Whether statistics of parts of the vocabulary can be merged."""
        return not self.kept and not self.teacher_columns and self.statistics | self.metrics <= {*OF_KERNELS}

    @property
    def trains(self) -> bool:
        return self.trains_weight or self.trains_hidden

    @property
    def quantized(self) -> bool:
        return Quantized in self.weights

    @property
    def workspace(self) -> int | None:
        """Bytes that the call may take, if anybody has said how many."""
        return self.options.workspace or self.bound


def signature(
    target: Target,
    leaves: Sequence[Leaf],
    asked: tuple[Statistic, ...],
    options: EngineOptions,
    *,
    gradients_in_backward: bool,
) -> Signature:
    """All that decides how the tokens of a target are computed that have a label."""
    head, hidden, teacher, tokens = target.head, target.hidden, target.teacher, target.counted
    assert tokens is not None
    dtype, device, bias = computed_dtype(hidden), hidden.device, head.bias
    backend = choose_backend(options.backend, [(device, wide_dtype(dtype))], dtypes=LOGIT_DTYPES)
    # Half precision on CUDA and in Triton, fp32 where CPUs would round products.
    rounds = dtype in HALF_DTYPES and device.type != "cuda" and backend != "triton"
    operand = torch.float32 if rounds else dtype
    columns = head.ranks.most(head.weights.columns)
    matrices = [head.weights]
    of_teacher = dict[str, Any]()
    several_terms, copied, copy = bias is not None and bias.requires_grad, 0, 0
    statistics, metrics, in_torch = list[str](), list[str](), False
    for s in asked:
        (statistics if s.differentiable else metrics).append(s.name)
        in_torch |= s.phi is not None or (s.divergence is not None and not s.divergence.has_kernel)
    if teacher is not None:
        of_teacher["teacher_columns"] = min(teacher.vocab_size, columns)
        at_one = isinstance(target.temperature, float) and target.temperature == 1.0
        several_terms |= teacher.vocab_size < target.vocab_size or (len(asked) > 1 and not at_one)
    if isinstance(teacher, Target):
        matrices.append(teacher.head.weights)
        of_teacher["quantized_teacher"] = Quantized in forms(teacher.head.weights)
        of_teacher["teacher_size"] = teacher.head.weights.hidden_size
    for matrix in matrices:
        if size := matrix.copied_bytes(operand):
            copied, copy = copied + size, copy + operand.itemsize * matrix.hidden_size
    trains_hidden = hidden.requires_grad and bool(leaves)
    return Signature(
        tokens=tokens.count,
        trained=tokens.trained,
        hidden_size=hidden.shape[-1],
        columns=columns if target.kept is None else target.kept.shape[-1],
        kept=target.kept is not None,
        statistics=frozenset(statistics),
        metrics=frozenset(metrics),
        in_torch=in_torch,
        linear=head.transform.softcap is None and head.transform.logit_scale > 0,
        operand=operand,
        backend=backend,
        device=device,
        trains_weight=len(leaves) > trains_hidden,
        trains_hidden=trains_hidden,
        copied_bytes=copied,
        copy_bytes=copy,
        weights=forms(head.weights),
        ranks=head.ranks.size,
        largest=target.selected if isinstance(target.selected, int) else 0,
        several_terms=several_terms,
        batch_invariant=head.batch_invariant,
        gradients_in_backward=gradients_in_backward,
        memory=head.ranks.least_memory(device_memory(device), device),
        bound=default_bound(),
        options=options,
        **of_teacher,
    )


def computed_dtype(hidden: Tensor) -> torch.dtype:
    """That of hidden states under autocast, which leaves fp64 as it is."""
    return hidden.dtype if hidden.dtype == torch.float64 else autocast_dtype(hidden.device) or hidden.dtype


def scales_late(hidden: Tensor, leaves: Sequence[Leaf]) -> bool:
    """Whether gradients underflow before they are multiplied by the loss's scale, which is known in backward."""
    return torch.float16 in [computed_dtype(hidden), *[leaf.tensor.dtype for leaf in leaves]]


def forms(weights: Any) -> tuple[type, ...]:
    """The types of a matrix and of those that it is made of, from the outside in."""
    types: tuple[type, ...] = (type(weights),)
    while isinstance(weights, (WithAdapters, Concatenated)):
        weights = weights.base
        types += (type(weights),)
    return types


class Tile(NamedTuple):
    """How many tokens and columns of logits exist at a time, where a pass goes by columns for many tokens."""

    tokens: int
    columns: int


class Plan(NamedTuple):
    """How one pass over the tokens of a target runs."""

    name: str
    block: Callable[..., Any]  # computes some tokens
    collected: Callable[..., Any] | None  # takes what the blocks of ``tokens`` add to gradients, where they are several
    tokens: int  # whose gradients are added to those of weights together
    block_tokens: int  # of them, those of a block, whose logits exist at a time
    row_bytes: int  # of one of these
    keeps: bool  # the block of all tokens lives until backward; otherwise that computes logits again
    tile: Tile | None  # where the pass goes by columns; None where it goes by blocks
    share: float  # parts that it adds to a weight's half-precision gradient, over the most that there may be
    accumulate: torch.dtype | None  # in which the gradient of the weight adds up, where not its own
    products: Products
    scratch: int  # bytes of temporaries
    scratch_of_terms: int  # the same as `row_slices` reads them, where several terms of a gradient are written
    backend: str
    trains: bool  # whether anything gets a gradient
    hidden: bool  # whether hidden states do
    gradients_in_backward: bool  # once all statistics are known
    beyond_workspace: bool  # whether a gradient adds up in fp32 because the workspace has no room for few parts
    without_gradients: Any = None  # the plan of a first pass, or of tokens without a gradient, where that is another

    @property
    def of_kernels(self) -> dict[str, Any]:
        """What every row kernel is told."""
        return {"scratch": self.scratch, "backend": self.backend}


#: A way to run some calls: its plan of a call, or None for one that it does not serve. The core's serves every call.
#: Of an accelerator, the file can be deleted, with its line in the table: results stay the same.
Planner = Callable[[Signature], "Plan | None"]


def padded(columns: int) -> int:
    """A row length that keeps products aligned whatever the vocabulary size."""
    return -(-columns // 64) * 64


def even(total: int, most: int) -> int:
    """The size of as few, equally large parts as ``most`` allows, rounded up to a multiple of 128."""
    size = -(-total // max(-(-total // most), 1))
    return max(1, min(most, -(-size // 128) * 128))


def slices(start: int, stop: int, most: int) -> list[slice]:
    """As few, equally large slices as ``most`` allows; an empty one of nothing."""
    if stop - start <= most:
        return [slice(start, stop)]
    size = even(stop - start, most)
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


def device_memory(device: torch.device) -> int:
    """Bytes of a GPU, in use or not; 0 for other devices."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def row_bytes(call: Signature) -> int:
    """Of a token in the core's block: logits of both models, hidden states and their gradients, kept rows."""
    item = wide_dtype(call.operand).itemsize
    operand = call.operand.itemsize
    logits = item * (padded(call.columns + 1) + padded(call.teacher_columns))
    gathered = call.columns * call.hidden_size * (2 * operand + item) if call.kept else 0
    return logits + call.hidden_size * (operand + 2 * item) + call.teacher_size * operand + gathered


def usual_bytes(call: Signature, row: int, collects: bool, most_parts: int = MOST_PARTS) -> int:
    """Room for blocks that keep a device busy: of 512 tokens without a gradient, or with a teacher, else of 1024; of
    twice as many, or so many that they are few parts, whose rows are shorter than the core's; or of the gradients of up
    to 2048, if these are collected, by which that of the weight is a sum of few parts. Ranks that share a vocabulary
    wait for each other in each block, so each block has as many times the tokens. Between 64 MiB and 1.5 GiB."""
    tokens = USUAL_TOKENS * call.ranks
    most = 1536 * MiB
    if call.device.type != "cpu" and (call.teacher_columns or not call.trains):
        tokens //= 2
    size = tokens * row_bytes(call)
    if row < row_bytes(call):
        few = -(-call.trained // most_parts) if call.trains_weight and not call.kept else 0
        size = max(size, 2 * tokens * row, few * row)
    if collects and has_many_parts(call, tokens):
        together = 2 * USUAL_TOKENS
        few = -(-call.trained // MOST_PARTS // 128) * 128
        if call.teacher_columns:  # all logits again would be twice as many products
            together, most = min(max(together, few), call.tokens), max(most, call.memory // MEMORY_PARTS)
        else:
            together = min(together, few)
        collected = together * collected_bytes(call) + USUAL_TOKENS // 2 * row_bytes(call)
        size = max(size, min(together * row, collected))
    return min(max(size + 8 * MiB, 64 * MiB), most)


def has_many_parts(call: Signature, tokens: int) -> bool:
    """Whether losses of single tokens train a weight in half precision, and blocks of so many tokens would be too many
    parts of its gradient. With a teacher, these are few, and fewer parts faster."""
    few = 2 if call.teacher_columns else MOST_PARTS
    half = call.operand in HALF_DTYPES and call.trains_weight and call.options.chunk_size is None
    blocks = not call.kept and not call.gradients_in_backward and call.targets_of_many_parts != 1
    return half and blocks and call.trained > few * tokens


def collected_bytes(call: Signature) -> int:
    """Of a token whose gradient is collected, its hidden state and the gradient of that."""
    item = wide_dtype(call.operand).itemsize
    operand = call.operand.itemsize
    return padded(call.columns) * operand + call.hidden_size * (operand + 2 * item)


@lru_cache(maxsize=1024)
def plans(
    calls: tuple[Signature, ...], heads: tuple[tuple[int, ...], ...], table: tuple[Planner, ...]
) -> tuple[Plan, ...]:
    """The plans of the targets of a call, each of which knows what it must of the others.

    Args:
        calls: of each target.
        heads: numbers of the tensors that each trains in half precision, of which targets may share some.
        table: the planners.

    Raises:
        ValueError: the workspace cannot hold one row.
    """
    made = [plan(call, table) for call in calls]
    sizes = [call.tokens * of.row_bytes if may_keep(call) else 0 for call, of in zip(calls, made, strict=True)]
    again = [replace(call, others_bytes=sum(sizes) - size) for call, size in zip(calls, sizes, strict=True)]
    made = [plan(call, table) for call in again]
    if calls[0].options.accum_dtype is None:
        sharing = dict[int, list[float]]()
        for of_target, of in zip(heads, made, strict=True):
            for head in of_target:
                sharing.setdefault(head, []).append(of.share)
        counts = [max([0, *[len(sharing[n]) for n in of_target if sum(sharing[n]) > 1]]) for of_target in heads]
        again = [replace(call, targets_of_many_parts=n) for call, n in zip(again, counts, strict=True)]
        made = [plan(call, table) for call in again]
    if any(of.tile is not None and not call.gradients_in_backward for call, of in zip(again, made, strict=True)):
        again = [replace(call, gradients_in_backward=True, options=replace(call.options, keep=0)) for call in again]
        made = [plan(call, table) for call in again]
    for i, (call, of) in enumerate(zip(again, made, strict=True)):
        one_pass = not call.gradients_in_backward and call.trained == call.tokens
        if of.trains and not of.keeps and not one_pass:
            fewer = replace(call, trains_weight=False, trains_hidden=False, targets_of_many_parts=0)
            made[i] = of._replace(without_gradients=plan(fewer, table))
    return tuple(made)


def plan(call: Signature, table: tuple[Planner, ...]) -> Plan:
    """Decide: how many tokens at a time, what lives until backward, which block: the table's first that serves the
    call."""
    return next(made for planner in table if (made := planner(call)) is not None)


def by_blocks(
    call: Signature,
    name: str,
    block: Callable[..., Any],
    row: int,
    collected: Callable[..., Any] | None = None,
    most_parts: int = MOST_PARTS,
) -> Plan:
    """A plan with blocks that take so many bytes a row, whose gradients may be ``collected``; and the gradient of a
    weight may be a sum of ``most_parts`` of them in half precision.

    Raises:
        ValueError: the workspace cannot hold one row.
    """
    options, (size, most, scratch, copied) = call.options, _budget(call, row, collected is not None, most_parts)
    by_steps = copied < call.columns
    if call.batch_invariant:
        _check_invariant(call, by_steps and not call.kept)
    keep = max(size, most) if options.keep is None else options.keep
    keeps = may_keep(call) and call.tokens * row + call.others_bytes <= keep
    tokens = block_tokens = max(call.tokens, 1)
    if not keeps:
        tokens, block_tokens = _tokens(call, row, size, collected is not None)
    merges = call.of_kernels and call.ranks == 1 and call.quantized
    dequantizes = merges and by_steps and call.tokens > 2 * tokens
    # Of losses of single tokens of several targets, a buffer in fp32 is faster than all of their logits again.
    targets = call.targets_of_many_parts
    few_parts = targets and not (call.kept or (targets > 1 and not call.gradients_in_backward))
    tile = None
    parts = -(-call.trained // tokens)
    if not keeps and (dequantizes or few_parts):
        copied_bytes = call.copied_bytes if by_steps else 0
        tile = _tile(call, size + copied * copied_bytes, copied_bytes)
        copied = tile.columns if by_steps else copied
        parts = -(-call.tokens // tile.tokens)
    wide = targets * parts > most_parts
    return Plan(
        name=name,
        block=block,
        collected=collected if block_tokens < tokens else None,
        tokens=tokens,
        block_tokens=block_tokens,
        row_bytes=row,
        keeps=keeps,
        tile=tile,
        share=parts / most_parts,
        accumulate=torch.float32 if wide else options.accum_dtype,
        products=Products(call.operand, copied, call.batch_invariant),
        scratch=scratch,
        scratch_of_terms=scratch * 2 if call.backend == "triton" and not call.in_torch else scratch // 2,
        backend=call.backend,
        trains=call.trains,
        hidden=call.trains_hidden,
        gradients_in_backward=call.gradients_in_backward,
        beyond_workspace=wide and call.workspace is not None,
    )


def may_keep(call: Signature) -> bool:
    """Whether blocks live until backward if they fit."""
    return call.gradients_in_backward and call.trains and call.options.chunk_size is None


def least_bytes(call: Signature, row: int) -> int:
    """In which one row of so many bytes fits."""
    return row + sum(_temporaries(call)) + call.copied_bytes


def _budget(call: Signature, row: int, collects: bool, most_parts: int) -> tuple[int, int, int, int]:
    """Divide the workspace; by default, what the shapes and the device ask for.

    Returns:
        Bytes for a block at a time, for blocks that are kept, and for temporaries; and how many rows of the head are
        copied at a time.
    """
    bound, least = call.workspace, least_bytes(call, row)
    scratch_row, vectors = _temporaries(call)
    if bound is not None and bound < least:
        models = "a student and a teacher over" if call.teacher_columns else f"a hidden size of {call.hidden_size} and"
        given, advice = f"workspace={bound} bytes is", "or leave it out"
        if call.options.workspace is None:
            given = f"the default workspace that was set is {bound} bytes, which is"
            advice = f"by liger_losses.set_default_workspace, liger_losses.workspace or {WORKSPACE_VARIABLE}"
        raise ValueError(
            f"{given} too small for {call.tokens} tokens of {models} a vocabulary of {call.columns}: give at least "
            f"{least} bytes, {advice}." + see("workspace")
        )
    if bound is None:
        size = max(usual_bytes(call, row, collects, most_parts), least)
    else:
        size = bound - vectors - min(LARGER_BUFFERS.get(call.device.type, 0), (bound - least) // 4)
    most = size
    if bound is None:  # of logits; gradients of hidden states come on top
        gradients = call.tokens * call.hidden_size * wide_dtype(call.operand).itemsize
        most = max(size, call.memory // MEMORY_PARTS + gradients)
    copied, live, peak = _copies(call, size, most)
    if bound is not None or copied < call.columns:
        size -= peak
    limit = (4 if call.device.type == "cpu" else 96) * MiB
    scratch = max(min(size // 8, limit), scratch_row) if scratch_row else 0
    return max(size - scratch, row), most - live, scratch, copied


def _tokens(call: Signature, row: int, size: int, collects: bool) -> tuple[int, int]:
    """The tokens whose gradients are added together, and of them, those whose logits exist at a time."""
    most = size // row
    tokens = even(call.tokens, max(1, min(most, call.options.chunk_size or most)))
    if not (collects and has_many_parts(call, tokens)):
        return tokens, tokens
    of_block = max(1, min(USUAL_TOKENS // 2, size // (4 * collected_bytes(call) + row)))
    return max(tokens, even(call.tokens, max(1, (size - of_block * row) // collected_bytes(call)))), of_block


def _check_invariant(call: Signature, by_steps: bool) -> None:
    """Raise ValueError for a call whose sums depend on the number of tokens or on the workspace."""
    if call.quantized and by_steps:
        raise ValueError(
            "batch_invariant=True needs a quantized head dequantized as a whole, but half of the workspace cannot hold "
            "it; give a larger workspace=, pass Head(dequantized_weight), or leave batch_invariant out."
        )
    if call.device.type != "cpu" and call.backend == "torch":
        raise ValueError(
            f"batch_invariant=True needs Triton's kernels on {call.device.type}, because torch's sums depend on the "
            "number of tokens, but this call runs in torch (backend='torch', or fp64, which Triton's kernels do not "
            "compute); leave backend= or batch_invariant out."
        )


def _temporaries(call: Signature) -> tuple[int, int]:
    """Bytes of a row's temporaries, and of the numbers of all tokens."""
    item, count = wide_dtype(call.operand).itemsize, 0
    if call.in_torch or call.kept or call.backend == "torch" or ("rest" in call.metrics and not call.linear):
        count = TEMPORARIES_OF_TERMS if call.in_torch or call.teacher_columns else TEMPORARIES
    elif call.trains and (call.several_terms or call.statistics & {"selected_logps", "selected_logits"}):
        count = TEMPORARIES_OF_KERNELS
    return count * padded(call.columns) * item, call.tokens * 32 * item


def _copies(call: Signature, size: int, most: int) -> tuple[int, int, int]:
    """Rows of the heads that are copied at a time, the bytes of the copies, and the bytes while these are made."""
    if not call.copied_bytes:
        return call.columns, 0, 0
    whole = call.columns * call.copy_bytes
    peak = whole + -(-call.columns // STEPS) * call.copied_bytes
    fits, quantized = peak + 64 * row_bytes(call) <= most, call.quantized or call.quantized_teacher
    # Plain PyTorch casts all of it under autocast, too; never in fp32, in which CPUs multiply half precision.
    if (quantized and fits) or (not quantized and call.operand in HALF_DTYPES and (fits or call.workspace is None)):
        return call.columns, whole, peak
    columns = max(1, min(size // COPIES // call.copied_bytes, call.columns))
    columns = columns // 64 * 64 or columns
    return columns, columns * call.copied_bytes, columns * call.copied_bytes


def _tile(call: Signature, size: int, copied: int) -> Tile:
    """Where a pass goes by columns, each of which takes so many bytes while it is copied: most of the memory goes to
    tokens, so that each part of the weight's gradient is written, and each row of the head copied, once or a few times;
    but a tile needs enough columns to keep the device busy."""
    item = wide_dtype(call.operand).itemsize
    operand = call.operand.itemsize
    token = call.hidden_size * (item * call.trains + operand) + call.teacher_size * operand
    entry = item * (2 if call.teacher_columns else 1)
    columns = min(MIN_TILE_COLUMNS, call.columns, isqrt(size // (4 * entry)), size // 4 // max(copied, 1)) or 1
    tokens = even(call.tokens, max(1, (size - columns * copied) // (token + columns * entry)))
    columns = max(1, min((size - tokens * token) // (copied + tokens * entry), call.columns))
    return Tile(tokens, columns // 64 * 64 or columns)
