"""How tiles of matrices are loaded."""

from types import SimpleNamespace

import pytest
import torch

from liger_losses.kernels import _tiles
from liger_losses.kernels._triton import warn_once


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_which_matrices_the_tensor_memory_accelerator_takes(dtype):
    """Rows that begin at multiples of 16 bytes, each in memory of its own."""
    in_16_bytes = 16 // dtype.itemsize
    memory = torch.empty(4096, dtype=dtype)
    assert memory.data_ptr() % 16 == 0
    assert _tiles.aligned(memory.view(64, 64))
    assert _tiles.aligned(memory.view(64, 64)[::2, :33])
    assert _tiles.aligned(memory[in_16_bytes:][:128].view(2, 64))
    for matrix in (
        memory[:64].expand(8, 64),  # stride 0
        memory[:64][None].expand(8, 64)[:1],  # of one row too
        memory.as_strided((8, 64), (16, 1)),  # windows that overlap
        memory.view(64, 64).t(),
        memory.view(64, 64)[:, ::2],
        memory[: 4 * 65].view(4, 65),
        memory[1:129].view(2, 64),
        memory.view(64, 64)[:0],
        memory.view(64, 64)[:, :0],
    ):
        assert not _tiles.aligned(matrix)


@pytest.mark.parametrize(
    ("capability", "shared", "reason"),
    [
        ((9, 0), 232448, None),
        ((10, 0), 232448, None),
        ((12, 0), 101376, "101376 bytes of shared memory"),
        ((8, 0), 166912, "no tensor memory accelerator"),
    ],
    ids=["H200", "B200", "RTX 5090", "A100"],
)
def test_devices_whose_tensor_memory_accelerator_is_used(capability, shared, reason, monkeypatch, recwarn):
    """Those that have one, and shared memory for its tiles; of others, one warning says why not."""
    properties = SimpleNamespace(shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    warn_once.cache_clear()
    assert _tiles.has_tma.__wrapped__(torch.device("cuda")) == (reason is None)
    assert [reason in str(warning.message) for warning in recwarn] == [True] * (reason is not None)
