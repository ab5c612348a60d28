"""Tokens whose upstream gradients are zero take no part in the gradient products, and all others do."""

import pytest
import torch

from liger_losses import linear_logps
from liger_losses.chunked.engine import blocks, stream
from tests.reference import problem

N, H, V = 37, 16, 53


@pytest.fixture(autouse=True)
def counts(monkeypatch):
    """Calls of any size are looked at; how many tokens each of them has multiplied."""
    found, few = [], stream._few

    def counted(counts):
        index = few(counts)
        found.append(None if index is None else len(index))
        return index

    monkeypatch.setattr(stream, "MIN_FLOPS", {"cpu": 0.0, "cuda": 0.0})
    monkeypatch.setattr(blocks, "MOVED_BYTES", 2**10)  # a few rows at a time
    monkeypatch.setattr(stream, "_few", counted)
    return found


@pytest.mark.parametrize(("zeros", "multiplied"), [(0, None), (3, None), (4, 196), (200, 0)])
def test_a_few_zeros_are_multiplied(zeros, multiplied, counts, monkeypatch):
    hidden, weight, labels, _ = problem(200, H, V, dtype=torch.float64, masked=0.0)
    upstream = torch.ones(200, dtype=torch.float64).index_fill(0, torch.arange(200)[:zeros], 0.0)
    found = torch.autograd.grad(linear_logps(hidden, weight, labels), [hidden, weight], upstream)
    assert counts == [multiplied]
    monkeypatch.setattr(stream, "MIN_FLOPS", {})
    expected = torch.autograd.grad(linear_logps(hidden, weight, labels), [hidden, weight], upstream)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
