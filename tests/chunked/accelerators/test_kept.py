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
    head, g = Head(weight, bias, transform), torch.linspace(-1, 1, n)
    names, found = plans(lambda: linear_logps(hidden, head, labels, entropy=True, support=support, backend="triton"))
    assert "kept" in names
    ours = torch.autograd.grad((found.logp * g + found.entropy * 0.3).sum(), leaves)

    wide = double(*leaves)
    z = wide[0] @ wide[1].t() + wide[2]
    z = 8.0 * (z * 1.3 / 8.0).tanh() / 0.7
    z = z.masked_fill(~torch.zeros(n, 90).scatter(1, ids.clamp(min=0), (ids >= 0).float(), reduce="add").bool(), -1e9)
    lp, active = z.log_softmax(-1), labels >= 0
    logp, entropy = lp.gather(1, labels.clamp(min=0)[:, None])[:, 0], -(lp.exp() * lp).sum(-1)
    torch.testing.assert_close(found.logp.double(), torch.where(active, logp, 0.0), rtol=1e-4, atol=1e-4)
    exact = torch.autograd.grad(torch.where(active, logp * g + entropy * 0.3, 0.0).sum(), wide)
    for mine, right in zip(ours, exact, strict=True):
        assert relative_error(mine.to_dense(), right) < (1.5e-2 if dtype == torch.bfloat16 else 1e-5)


def test_no_rows_are_copied():
    hidden, weight, labels, _ = problem(32, 64, 200, masked=0.0)
    ids = kept_ids(labels, 200, 32)

    def call():
        logps = linear_logps(hidden, weight, labels, support=TokenSupport(ids), backend="triton")
        return torch.autograd.grad(logps.sum(), (hidden, weight))

    assert plans(call)[0].count("kept") == 1
    assert peak_bytes(call) - weight.nbytes - hidden.nbytes < 32 * 32 * 64 * 4
