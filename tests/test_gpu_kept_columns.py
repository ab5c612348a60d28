"""Log-probabilities over kept columns on a GPU: as exact as plain PyTorch, the same bits every time, little memory."""

import pytest
import torch

from liger_losses import TokenSupport, linear_logps
from tests.reference import problem
from tests.test_kept_columns import compare, gradients, kept, ragged

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MiB = 2**20


def on_gpu(*sizes, **options):
    hidden, weight, labels, bias = problem(*sizes, **options)
    leaves = [None if t is None else t.detach().cuda().requires_grad_() for t in (hidden, weight, bias)]
    return leaves, labels


def to_gpu(support):
    offsets = None if support.offsets is None else support.offsets.cuda()
    return TokenSupport(support.ids.cuda(), offsets, support.add_label)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("n", "h", "v", "k"), [(1, 64, 5021, 3), (517, 576, 1031, 40), (300, 33, 77, 9), (9, 1032, 3001, 700)]
)
def test_as_exact_as_plain_pytorch(n, h, v, k, dtype):
    leaves, labels = on_gpu(n, h, v, dtype=dtype, bias=True, masked=0.3 if n > 1 else 0.0)
    ids = kept(labels, v, k, uncut=() if n == 1 else (3,))
    for support in (TokenSupport(ids), ragged(ids)):
        compare(leaves, labels.cuda(), ids.cuda(), to_gpu(support))


def test_popular_columns_and_long_rows():
    leaves, labels = on_gpu(3000, 128, 5000, dtype=torch.bfloat16)
    ids = kept(labels, 5000, 4, cuts=0.0)
    ids = torch.cat([ids, torch.full((3000, 1500), -1)], 1)
    ids[7, 4:] = torch.tensor(sorted({*range(2000)} - {*ids[7].tolist()}))[:1500]
    leaves[2] = None
    _, first = compare(leaves, labels.cuda(), ids.cuda(), to_gpu(ragged(ids)))
    for _ in range(3):
        _, again = compare(leaves, labels.cuda(), ids.cuda(), to_gpu(ragged(ids)))
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_memory():
    leaves, labels = on_gpu(4096, 1024, 50257, dtype=torch.bfloat16, masked=0.0)
    hidden, weight, _ = leaves
    support, labels = to_gpu(TokenSupport(kept(labels, 50257, 32))), labels.cuda()

    def call():
        return gradients(linear_logps(hidden, weight, labels, support=support).sum(), (hidden, weight))

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = call()
    peak = torch.cuda.max_memory_allocated() - before
    # The rows alone would be 256 MiB, logits 393 MiB.
    assert peak < sum(g.numel() * 2 for g in found) + 48 * MiB
