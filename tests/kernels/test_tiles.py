"""How tiles of matrices are loaded."""

import pytest
import torch

from liger_losses.chunked.accelerators import tiles


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_which_matrices_the_tensor_memory_accelerator_takes(dtype):
    """Rows that begin at multiples of 16 bytes, each in memory of its own."""
    in_16_bytes = 16 // dtype.itemsize
    memory = torch.empty(4096, dtype=dtype)
    assert memory.data_ptr() % 16 == 0
    assert tiles.aligned(memory.view(64, 64))
    assert tiles.aligned(memory.view(64, 64)[::2, :33])
    assert tiles.aligned(memory[in_16_bytes:][:128].view(2, 64))
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
        assert not tiles.aligned(matrix)
