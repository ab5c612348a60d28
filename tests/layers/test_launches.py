"""What is kept of launches."""

import pytest
import torch

from liger_losses.layers.launches import Launches


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_triton_is_asked_once_for_the_compiled_kernel_of_a_kind(cuda, monkeypatch):
    """And at every launch on AMD's GPUs, for which it also compiles by how much memory a tensor has."""
    asked, launched = [], []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: (
                asked.append((grid, options)) or {(*grid, 1, 1): lambda *these: launched.append(these)}
            )

    monkeypatch.setattr(torch.version, "cuda", cuda)
    kernel, launch, x = Kernel(), Launches(most=6), torch.zeros(24)
    for tensor in (x, x.clone(), x[4:], x.view(4, 6)):  # of one kind, as strides are arguments
        launch(kernel, 3, tensor, 6, None, num_warps=4)
    assert len(launched) == (3 if cuda else 0)
    assert asked == [((3,), {"num_warps": 4})] * (1 if cuda else 4)
    asked.clear()
    others = [(3, x[1:], 6, None), (3, x.double(), 6, None), (3, x, 7, None), (3, x, 6, x), (4, x, 6, None)]
    for arguments in others * 2:
        launch(kernel, *arguments, num_warps=4)
    assert len(asked) == (5 if cuda else 10)
    launch(kernel, 5, x, 6, None, num_warps=4)
    assert len(launch.compiled) == bool(cuda)
