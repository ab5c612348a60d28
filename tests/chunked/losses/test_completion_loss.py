"""What losses on completions have in common."""

import pytest
import torch

from liger_losses import Completions
from tests.losses import DPO, GRPO
from tests.reference import problem


def test_ligers_chunk_size_of_completions_does_not_size_blocks():
    for loss in (DPO(chunk_size=1), GRPO(chunk_size=1)):
        assert loss.chunk_size == 1
        assert loss.options.chunk_size is None


@pytest.mark.parametrize("per", ["sequence", "token"])
def test_a_reference_has_no_gradient(per):
    hidden, weight, labels, _ = problem(shape=(4, 5))
    shape = labels.shape if per == "token" else labels.shape[:1]
    refs = [torch.zeros(2, *shape[1:], dtype=hidden.dtype, requires_grad=True) for _ in range(2)]
    sides = [
        Completions(hidden[at], labels[at], ref_logps=ref)
        for at, ref in zip((slice(2), slice(2, 4)), refs, strict=True)
    ]
    with pytest.warns(UserWarning, match="ref_logps requires a gradient"):
        DPO()(weight, *sides)[0].backward()
    assert weight.grad.any()
    assert [ref.grad for ref in refs] == [None, None]
