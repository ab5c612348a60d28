"""What is known of a GPU, and the tiles that it gets."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from liger_losses.chunked.accelerators import tiles
from liger_losses.kernels._triton import warn_once
from liger_losses.kernels.targets import COMPILED, INTERPRETER, MEASURED, standing, target_of
from tests.kernels.test_compiled_for_gpus import TARGETS

CUDA = torch.device("cuda")
#: Compute capability, ROCm's version, shared memory in KiB, threads of a warp; why no descriptors are used; columns of
#: a tile of products.
GPUS = {
    "H200": ((9, 0), None, 227, 32, None, 256),
    "B200": ((10, 0), None, 227, 32, None, 128),
    "B300": ((10, 3), None, 227, 32, None, 128),
    "RTX 5090": ((12, 0), None, 99, 32, "101376 bytes of shared memory", 128),
    "A100": ((8, 0), None, 163, 32, "no tensor memory accelerator", 128),
    "MI250X": ((9, 0), "7.0", 64, 64, "no tensor memory accelerator", 64),
    "MI355X": ((9, 5), "7.0", 160, 64, "no tensor memory accelerator", 128),
    "RX 9070": ((12, 0), "7.0", 64, 32, "no tensor memory accelerator", 64),
}


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_what_is_known_of_a_gpu(gpu, monkeypatch, recwarn):
    """An AMD GPU may have the number of one of NVIDIA's. Of GPUs without descriptors, one warning says why."""
    capability, rocm, shared, warp, reason, columns = gpu
    told = {
        "shared_memory_per_block": 1024 * (48 if rocm is None else shared),
        "warp_size": warp,
        "multi_processor_count": 80,
    }
    if rocm is None:
        told["shared_memory_per_block_optin"] = 1024 * shared
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**told))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.version, "hip", rocm)
    target = target_of.__wrapped__(CUDA)
    assert (target.warp, target.shared_memory, target.processors) == (warp, 1024 * shared, 80)
    assert target.tiling.by_pointers.columns == columns
    monkeypatch.setattr(tiles, "target_of", lambda device: target)
    warn_once.cache_clear()
    assert tiles.has_tma(CUDA) == (reason is None)
    assert [reason in str(warning.message) for warning in recwarn] == [True] * (reason is not None)


def test_warps_of_a_program():
    """As many threads as are asked for, at least a warp, and no more than a program has."""
    wide = INTERPRETER._replace(warp=64)
    for threads, of_32, of_64 in ((1, 1, 1), (32, 1, 1), (128, 4, 2), (1024, 32, 16), (4096, 32, 16)):
        assert (INTERPRETER.warps(threads), wide.warps(threads)) == (of_32, of_64)


def test_devices_without_a_gpu_are_the_interpreter_s():
    assert target_of(torch.device("cpu")) is INTERPRETER


@pytest.mark.parametrize(
    ("capability", "architecture", "known"),
    [
        ((9, 0), None, "sm_90, measured on H100s and H200s"),
        ((12, 0), None, "sm_120, compiled, not run"),
        ((7, 5), None, "sm_75, not tested: LIGER_LOSSES_BACKEND=torch"),
        ((9, 4), "gfx942:sramecc+:xnack-", "gfx942, compiled, not run"),
        ((11, 0), "gfx1100", "gfx1100, not tested"),
    ],
)
def test_what_was_done_for_an_architecture(capability, architecture, known, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None if architecture is None else "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=architecture))
    assert standing(CUDA).startswith(known)


def test_what_is_said_to_be_compiled_is():
    assert {*MEASURED, *COMPILED} == {*TARGETS}
    table = (Path(__file__).parents[2] / "docs/compatibility.md").read_text().partition("## torch.compile")[0]
    assert all(f"`{name}`" in table for name in TARGETS)
