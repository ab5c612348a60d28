"""Softmaxes over kept columns whose rows are read in place, against float64."""

import pytest
import torch

from liger_losses import Head, LogitTransform, TokenSupport, linear_logps
from tests.chunked.accelerators.test_exponentials import plans
from tests.reference import double, peak_bytes, problem, relative_error

pytestmark = pytest.mark.usefixtures("default_gpu")
pytest.importorskip("triton")


def kept_ids(labels, vocab, k=9):
    """Some columns of each token, with its label, and padding."""
    ids = (labels.clamp(min=0)[:, None] + 7 * torch.arange(k)) % vocab
    ids[::3, k // 2 :] = -1
    return ids


@pytest.mark.parametrize("kind", ["sparse", "a few columns of all tokens"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients(kind, dtype):
    few = kind == "a few columns of all tokens"  # whose sums go on in parts
    n = 150 if few else 40
    hidden, weight, labels, _ = problem(n, 24, 90, dtype=dtype, masked=0.05 if few else 0.2)
    bias = torch.linspace(-1, 1, 90, dtype=dtype).requires_grad_()
    labels = torch.where(labels < 0, labels, labels % 2) if few else labels
    leaves = [hidden, weight, bias]
    ids, transform = kept_ids(labels, 90), LogitTransform(0.7, 1.3, 8.0)
    support = TokenSupport(ids, sparse_grad=kind == "sparse")
    g, results = torch.linspace(-1, 1, n), []

    def call(hidden, weight, bias, **on):
        logps = linear_logps(hidden, Head(weight, bias, transform), labels, entropy=True, support=support, **on)
        results.append(
            (logps.logp, *torch.autograd.grad((logps.logp * g + logps.entropy * 0.3).sum(), (hidden, weight, bias)))
        )

    names, _ = plans(lambda: call(*leaves, backend="triton"))
    assert "kept" in names
    call(*double(*leaves))
    (logp, *ours), (right, *exact) = results
    torch.testing.assert_close(logp.double(), right, rtol=1e-4, atol=1e-4)
    for mine, right in zip(ours, exact, strict=True):
        assert relative_error(mine.to_dense(), right.to_dense()) < (1.5e-2 if dtype == torch.bfloat16 else 1e-5)


def test_no_rows_are_copied():
    hidden, weight, labels, _ = problem(32, 64, 200, masked=0.0)
    ids = kept_ids(labels, 200, 32)

    def call():
        logps = linear_logps(hidden, weight, labels, support=TokenSupport(ids), backend="triton")
        return torch.autograd.grad(logps.sum(), (hidden, weight))

    assert plans(call)[0].count("kept") == 1
    assert peak_bytes(call) - weight.nbytes - hidden.nbytes < 32 * 32 * 64 * 4
