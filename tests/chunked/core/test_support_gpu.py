"""Log-probabilities over kept columns on a GPU: those of a CPU in float64, the same bits every time, little memory."""

import pytest
import torch

from liger_losses import TokenSupport, linear_logps
from tests.chunked.core.test_support import choose_above, gradients, kept, ragged, total
from tests.reference import double, problem, relative_error

pytestmark = pytest.mark.gpu
MiB = 2**20


def on_gpu(*sizes, **options):
    hidden, weight, labels, bias = problem(*sizes, **options)
    leaves = [None if t is None else t.detach().cuda().requires_grad_() for t in (hidden, weight, bias)]
    return leaves, labels


def to_gpu(support):
    offsets = None if support.offsets is None else support.offsets.cuda()
    return TokenSupport(support.ids.cuda(), offsets, support.add_label, support.sparse_grad)


#: Relative errors that each dtype may have.
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}


def compare(leaves, labels, support):
    """Values and gradients are those of a CPU in float64."""
    results, dtype = [], leaves[0].dtype
    for inputs, y, given in ((leaves, labels.cuda(), to_gpu(support)), ([*double(*leaves)], labels, support)):
        inputs = inputs if y.is_cuda else [None if t is None else t.detach().cpu().requires_grad_() for t in inputs]
        hidden, weight, bias = inputs
        options = {"bias": bias, "entropy": True, "lse": True, "temperature": 0.7, "softcap": 4.0}
        found = linear_logps(hidden, weight, y, support=given, **options)
        results.append([*found[:3], *gradients(total(found._asdict()), inputs)])
    for ours, exact in zip(*results, strict=True):
        assert relative_error(ours.cpu(), exact) < BOUNDS[dtype]
    return results[0]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("n", "h", "v", "k"), [(1, 64, 5021, 3), (517, 576, 1031, 40), (300, 33, 77, 9), (9, 1032, 3001, 700)]
)
def test_values_and_gradients(n, h, v, k, dtype, monkeypatch):
    leaves, labels = on_gpu(n, h, v, dtype=dtype, bias=True, masked=0.3 if n > 1 else 0.0)
    ids = kept(labels, v, k, uncut=() if n == 1 else (3,))
    for support in (TokenSupport(ids), ragged(ids)):
        for cost in (1, v // 20, v):  # rows are read for all tokens, for some, for none with more than one column
            choose_above(monkeypatch, max(cost, 1))
            compare(leaves, labels, support)


@pytest.mark.parametrize("form", ["padded", "ragged"])
def test_wrong_ids_are_found_and_not_read(form):
    leaves, labels = on_gpu(300, 64, 1000, dtype=torch.bfloat16, masked=0.0)
    ids = kept(labels, 1000, 40, cuts=0.0)
    for value, match in ((10**12, "must be in"), (-2, "must be in"), (int(ids[7, 1]), "twice")):
        wrong = ids.clone()
        at = 2 if ids[7, 2] != labels[7] else 3
        wrong[7, at] = value
        support = TokenSupport(wrong)
        if form == "ragged":
            support = TokenSupport(wrong.flatten(), torch.arange(301) * 40)
        with pytest.raises(ValueError, match=match):
            linear_logps(leaves[0], leaves[1], labels.cuda(), support=to_gpu(support))
    if form == "ragged":
        for place, value in ((0, 5), (3, 10**9), (300, 10**9), (300, 7)):
            offsets = torch.arange(301) * 40
            offsets[place] = value
            with pytest.raises(ValueError, match="rise from 0 to 12000"):
                linear_logps(leaves[0], leaves[1], labels.cuda(), support=to_gpu(TokenSupport(ids.flatten(), offsets)))
    assert linear_logps(leaves[0], leaves[1], labels.cuda(), support=to_gpu(TokenSupport(ids))).isfinite().all()


def test_sparse_gradients():
    leaves, labels = on_gpu(700, 256, 5000, dtype=torch.bfloat16)
    ids = kept(labels, 5000, 9).cuda()
    dense, sparse = (
        gradients(
            linear_logps(leaves[0], leaves[1], labels.cuda(), support=TokenSupport(ids, sparse_grad=choice)).sum(),
            leaves[:2],
        )
        for choice in (False, True)
    )
    assert sparse[1].is_sparse
    assert all(torch.equal(a, b.to_dense()) for a, b in zip(dense, sparse, strict=True))


def test_popular_columns_and_long_rows(monkeypatch):
    choose_above(monkeypatch, 1)
    leaves, labels = on_gpu(3000, 128, 5000, dtype=torch.bfloat16)
    ids = kept(labels, 5000, 4, cuts=0.0)
    ids = torch.cat([ids, torch.full((3000, 1500), -1)], 1)
    ids[7, 4:] = torch.tensor(sorted({*range(2000)} - {*ids[7].tolist()}))[:1500]
    leaves[2] = None
    first = compare(leaves, labels, ragged(ids))
    for _ in range(3):
        again = compare(leaves, labels, ragged(ids))
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


@pytest.mark.parametrize("form", ["padded", "ragged"])
def test_a_call_waits_for_its_numbers_alone(form):
    leaves, labels = on_gpu(300, 64, 20000, dtype=torch.bfloat16)
    ids, labels = kept(labels, 20000, 9), labels.cuda()
    support = to_gpu(TokenSupport(ids) if form == "padded" else ragged(ids))
    for mode in ("default", "error"):  # the first call compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            gradients(linear_logps(leaves[0], leaves[1], labels, support=support).sum(), leaves[:2])
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_nan_is_not_hidden():
    leaves, labels = on_gpu(5, 64, 1000, masked=0.0)
    ids = kept(labels, 1000, 4, cuts=0.0)
    with torch.no_grad():
        leaves[0][2] = float("nan")
    found = linear_logps(leaves[0], leaves[1], labels.cuda(), support=to_gpu(TokenSupport(ids)), entropy=True, lse=True)
    for value in (found.logp, found.entropy, found.lse):
        assert value.isnan().tolist() == [False, False, True, False, False]
