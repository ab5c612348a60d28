"""What layers keep of calls of one kind."""

import pytest
import torch

from liger_losses.layers.prepared import Launcher, Prepared


def test_kinds_of_calls():
    """Each is prepared once, and those that cannot be told each time."""
    prepared, made = Prepared(most=3), []

    def of(*tensors, settings=1):
        return prepared.of(settings, tensors, lambda: made.append(1) or len(made))

    x = torch.zeros(4, 6)
    assert of(x) == of(x.clone()) == 1
    others = [x.t(), x[1:], x.double(), x.flatten()[1:].view(23), x.clone().requires_grad_(), None]
    assert [of(other) for other in others] == list(range(2, 8))
    assert of(x, settings=2) != of(x, settings=3)
    before = len(made)
    for _ in range(2):
        of(x.to_sparse())
        of(x, settings=[])
    assert len(made) == before + 4
    assert len(prepared.found) <= 3


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_triton_chooses_the_binary_of_a_launcher_once(cuda, monkeypatch):
    """And at every launch on AMD's GPUs, for which it also compiles by how much memory a tensor has."""
    chosen, launched = [], []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: (
                chosen.append((*arguments, options)) or {grid + (1, 1): launched.append}
            )

    monkeypatch.setattr(torch.version, "cuda", cuda)
    launcher = Launcher(Kernel(), 3, num_warps=4)
    for number in range(3):
        launcher(number)
    assert launched == ([1, 2] if cuda else [])
    assert chosen == [(number, {"num_warps": 4}) for number in range(1 if cuda else 3)]
