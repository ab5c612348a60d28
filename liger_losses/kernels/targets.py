"""What kernels find on a GPU, and the tiles that fit there.

The only module that asks which kind of GPU it is: the others ask for what they need of it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch


class Tile(NamedTuple):
    """Tokens, columns of the vocabulary and hidden dimensions of a product's tile; a program's warps, and the stages in
    which it loads."""

    tokens: int
    columns: int
    depth: int
    warps: int
    stages: int


class Tiling(NamedTuple):
    """How work is divided: tiles of products, by how they are loaded; entries of a row for each thread of a norm's
    backward; and the longest row that one program of a norm takes."""

    by_descriptors: Tile
    by_pointers: Tile
    row_entries: int
    longest_row: int


#: Measured on H100s and H200s. A program multiplies from shared memory (wgmma), and a thread's part of a tile takes 128
#: registers of 255: what does not fit beside it is spilled, up to 352 bytes.
_HOPPER = Tiling(Tile(128, 256, 64, 8, 3), Tile(128, 256, 32, 8, 3), row_entries=32, longest_row=65536)
#: Compiled, not measured. Half as many columns: beside 128 registers of a tile, the epilogues spill up to 840 bytes on
#: Blackwell's data-centre cards (tcgen05, whose results come into registers too), up to 4720 on Ampere and on
#: RTX cards (mma.sync, whose operands are in registers as well), and up to 512 on AMD's. So 96 KiB of shared memory by
#: descriptors; by pointers 48 KiB at most, which 64 hold. Norms: 5 to 9 values for each entry of a row, and no rows
#: that take more than all registers of a multiprocessor.
_OTHERS = Tiling(Tile(128, 128, 64, 8, 3), Tile(128, 128, 32, 8, 3), row_entries=16, longest_row=16384)

#: Compiled, not measured: AMD's CDNA with 64 KiB of shared memory. The fp32 projections of 128 columns take all of it
#: on their way to memory; tiles of 64 columns take 32, and loads 24 beside them.
_SMALL = _OTHERS._replace(by_pointers=Tile(128, 64, 32, 8, 3))

#: Compiled, not measured: AMD's RDNA, whose warps of 32 threads have half as many registers for a tile as warps of 64,
#: and whose products (WMMA) take their operands from them. With 128 columns, up to 368 bytes are spilled.
_NARROW = Tiling(Tile(128, 64, 64, 8, 3), Tile(128, 64, 32, 8, 3), row_entries=16, longest_row=16384)


class Target(NamedTuple):
    """A GPU: threads of a warp, bytes of shared memory that a program can take, its multiprocessors, and its tiles.

    ``no_descriptors`` says why matrices are not loaded by descriptors (the tensor memory accelerator), ``None`` where
    they are.
    """

    warp: int
    shared_memory: int
    processors: int
    tiling: Tiling
    no_descriptors: str | None = None

    def warps(self, threads: int) -> int:
        """The warps of a program of about so many threads; no GPU runs more than 1024."""
        return max(1, min(1024, threads) // self.warp)


#: Triton's interpreter computes what an H200 would.
INTERPRETER = Target(32, 227 * 1024, 4, _HOPPER)
#: Whether Triton's code may call NVIDIA's fast functions.
HAS_LIBDEVICE = torch.version.hip is None


@cache
def target_of(device: torch.device) -> Target:
    """What kernels find on a device."""
    if device.type != "cuda":
        return INTERPRETER
    properties: Any = torch.cuda.get_device_properties(device)  # torch does not declare all of them
    reason: str | None = None
    if torch.version.hip is not None:  # an AMD GPU, whose architecture may have the number of one of NVIDIA's
        reason = "has no tensor memory accelerator (NVIDIA's Hopper and later have)"
        wide = _SMALL if properties.shared_memory_per_block <= 64 * 1024 else _OTHERS
        tiling = _NARROW if properties.warp_size == 32 else wide
        return Target(
            properties.warp_size, properties.shared_memory_per_block, properties.multi_processor_count, tiling, reason
        )
    capability, shared = torch.cuda.get_device_capability(device), properties.shared_memory_per_block_optin
    needed, tiling = 216 * 1024, _HOPPER if capability == (9, 0) else _OTHERS
    if capability[0] < 9:
        reason = "has no tensor memory accelerator (Hopper and later have)"
    elif shared < needed:
        reason = f"has {shared} bytes of shared memory, and the tensor memory accelerator's tiles take {needed}"
    return Target(32, shared, properties.multi_processor_count, tiling, reason)


#: What is known of an architecture. Of those that are compiled for, ``make test-targets`` compiles every kernel, and
#: none was run.
MEASURED = {"sm_90": "measured on H100s and H200s, November 2026"}
COMPILED = ("sm_80", "sm_86", "sm_89", "sm_100", "sm_103", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1201")


def standing(device: torch.device) -> str:
    """An architecture's name, and whether the kernels were measured there, or compiled for it."""
    if torch.version.hip is None:
        name = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    else:
        properties: Any = torch.cuda.get_device_properties(device)
        name = properties.gcnArchName.partition(":")[0]
    known = "compiled, not run" if name in COMPILED else "not tested: LIGER_LOSSES_BACKEND=torch leaves Triton out"
    return f"{name}, {MEASURED.get(name, known)}"
