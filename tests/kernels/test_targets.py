"""What is known of a GPU, and the tiles that it gets."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from liger_losses.kernels import _tiles, targets
from liger_losses.kernels._triton import warn_once
from liger_losses.kernels.targets import COMPILED, INTERPRETER, MEASURED, Order, order_of, standing, target_of
from tests.kernels.test_compiled_for_gpus import TARGETS

CUDA = torch.device("cuda")
#: Compute capability, ROCm's version, shared memory in KiB, threads of a warp; why no descriptors are used; columns of
#: a tile of products, and whether the kernels for Hopper run.
GPUS = {
    "H200": ((9, 0), None, 227, 32, None, 256, True),
    "B200": ((10, 0), None, 227, 32, None, 128, False),
    "B300": ((10, 3), None, 227, 32, None, 128, False),
    "RTX 5090": ((12, 0), None, 99, 32, "101376 bytes of shared memory", 128, False),
    "A100": ((8, 0), None, 163, 32, "no tensor memory accelerator", 128, False),
    "MI250X": ((9, 0), "7.0", 64, 64, "no tensor memory accelerator", 64, False),
    "MI355X": ((9, 5), "7.0", 160, 64, "no tensor memory accelerator", 128, False),
    "RX 9070": ((12, 0), "7.0", 64, 32, "no tensor memory accelerator", 64, False),
}


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_what_is_known_of_a_gpu(gpu, monkeypatch, recwarn):
    """An AMD GPU may have the number of one of NVIDIA's. Of GPUs without descriptors, one warning says why."""
    capability, rocm, shared, warp, reason, columns, warp_groups = gpu
    told = {"shared_memory_per_block": 1024 * (48 if rocm is None else shared), "warp_size": warp}
    told["multi_processor_count"] = 132
    if rocm is None:
        told["shared_memory_per_block_optin"] = 1024 * shared
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**told))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.version, "hip", rocm)
    target = target_of.__wrapped__(CUDA)
    assert (target.warp, target.shared_memory, target.warp_groups) == (warp, 1024 * shared, warp_groups)
    assert target.tiling.by_pointers.columns == columns
    monkeypatch.setattr(_tiles, "target_of", lambda device: target)
    warn_once.cache_clear()
    assert _tiles.has_tma.__wrapped__(CUDA) == (reason is None)
    assert [reason in str(warning.message) for warning in recwarn] == [True] * (reason is not None)


H100 = {"memory_clock_rate": 2619000, "memory_bus_width": 5120, "L2_cache_size": 50 * 2**20}
H200 = {"memory_clock_rate": 3201000, "memory_bus_width": 6144, "L2_cache_size": 60 * 2**20}
IN_TURN, WHOLE = {True: Order(True, 4), False: Order(True, 4, of_tiles=True)}, Order(False, 33)


@pytest.mark.parametrize(
    ("gpu", "size", "stored", "alone"),
    [
        (H200, (16384, 4096, 128256), Order(True, 8), Order(True, 4)),
        (H100, (1024, 4096, 128256), IN_TURN[True], IN_TURN[False]),
        (H100, (2048, 2560, 151936), IN_TURN[True], IN_TURN[False]),
        (H100, (2048, 3072, 128256), WHOLE, IN_TURN[False]),  # a fifth of the cache does not hold them
        (H100, (4096, 4096, 128256), WHOLE, IN_TURN[False]),
        (H100, (4096, 4096, 32000), IN_TURN[True], IN_TURN[False]),  # a short product
        (H100, (16384, 2048, 128256), WHOLE, WHOLE),
        (H100, (16384, 896, 128256), IN_TURN[True], IN_TURN[False]),  # exponentials take long beside it
        (H100, (16384, 576, 128256), Order(True, 8), IN_TURN[False]),
        (H100, (0, 4096, 128256), IN_TURN[True], IN_TURN[False]),
        ({}, (16384, 4096, 128256), WHOLE, WHOLE),
    ],
)
def test_the_order_of_tiles_follows_memory_and_cache(monkeypatch, gpu, size, stored, alone):
    """Of an H100, an H200, and where torch does not tell them."""
    told = {"shared_memory_per_block_optin": 227 * 1024, "multi_processor_count": 132, **gpu}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**told))
    monkeypatch.setattr(targets, "target_of", target_of.__wrapped__)
    assert [order_of(CUDA, kind, *size) for kind in (True, False)] == [stored, alone]


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
    table = (Path(__file__).parents[2] / "docs/support.md").read_text().partition("## torch.compile")[0]
    assert all(f"`{name}`" in table for name in TARGETS)
