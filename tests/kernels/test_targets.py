"""What is known of a GPU, and the tiles that it gets."""

from pathlib import Path

import pytest
import torch

from liger_losses.chunked.accelerators import tiles
from liger_losses.kernels._triton import warn_once
from liger_losses.kernels.targets import COMPILED, INTERPRETER, MEASURED, standing, target_of

pytest.importorskip("triton")
from tests.kernels import compiling

CUDA, NO_TMA = torch.device("cuda"), "no tensor memory accelerator"
#: By architecture, why no descriptors are used, columns of a tile of products, and what was done for it.
GPUS = {
    "sm_90": (None, 256, "measured on H100s and H200s"),
    "sm_100": (None, 128, "compiled, not run"),
    "sm_120": ("101376 bytes of shared memory", 128, "compiled, not run"),
    "sm_75": (NO_TMA, 128, "not tested: LIGER_LOSSES_BACKEND=torch"),
    "gfx90a": (NO_TMA, 64, "compiled, not run"),
    "gfx950": (NO_TMA, 128, "compiled, not run"),
    "gfx1201": (NO_TMA, 64, "compiled, not run"),
    "gfx1100": (NO_TMA, 64, "not tested"),
}
NOT_COMPILED = {
    "sm_75": compiling.Target(75, 32, (7, 5), 40, 64 * 1024),
    "gfx1100": compiling.Target("gfx1100", 32, (11, 0), 48, 64 * 1024),
}


@pytest.mark.parametrize("name", GPUS)
def test_what_is_known_of_a_gpu(name, monkeypatch, recwarn):
    """An AMD GPU may have the number of one of NVIDIA's. Of GPUs without descriptors, one warning says why."""
    reason, columns, known = GPUS[name]
    gpu = (compiling.TARGETS | NOT_COMPILED)[name]
    compiling.tell(gpu, monkeypatch.setattr)
    target = target_of.__wrapped__(CUDA)
    assert (target.warp, target.shared_memory, target.processors) == (gpu.warp, gpu.shared_memory, gpu.processors)
    assert target.tiling.by_pointers.columns == columns
    monkeypatch.setattr(tiles, "target_of", lambda device: target)
    warn_once.cache_clear()
    assert tiles.has_tma(CUDA) == (reason is None)
    assert [reason in str(warning.message) for warning in recwarn] == [True] * (reason is not None)
    assert standing(CUDA).startswith(f"{name}, {known}")


def test_warps_of_a_program():
    """As many threads as are asked for, at least a warp, and no more than a program has."""
    wide = INTERPRETER._replace(warp=64)
    for threads, of_32, of_64 in ((1, 1, 1), (32, 1, 1), (128, 4, 2), (1024, 32, 16), (4096, 32, 16)):
        assert (INTERPRETER.warps(threads), wide.warps(threads)) == (of_32, of_64)


def test_devices_without_a_gpu_are_the_interpreter_s():
    assert target_of(torch.device("cpu")) is INTERPRETER


def test_what_is_said_to_be_compiled_is():
    assert {*MEASURED, *COMPILED} == {*compiling.TARGETS}
    table = (Path(__file__).parents[2] / "docs/compatibility.md").read_text().partition("## torch.compile")[0]
    assert all(f"`{name}`" in table for name in compiling.TARGETS)
