"""Log-probabilities over kept columns, against the plain computation with all other logits at minus infinity."""

import pytest
import torch

from liger_losses import EngineOptions, Head, LogitTransform, TokenSupport, linear_logps
from liger_losses.chunked.engine import support as engine_support
from liger_losses.chunked.engine.support import linear_support_statistics
from liger_losses.kernels._triton import INTERPRETED
from tests.reference import gradients, plain_logits, problem

NEEDS_TRITON = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
BACKENDS = ["torch", pytest.param("triton", marks=NEEDS_TRITON)]
NAMES = ("logp", "entropy", "lse")
TRANSFORM = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 4.0}


@pytest.fixture(autouse=True)
def rows_are_read(monkeypatch):
    """Vocabularies of tests are so small that products would be taken."""
    choose_above(monkeypatch, 1)


def choose_above(monkeypatch, cost):
    """Tokens with more than V / ``cost`` columns are scored by products."""
    monkeypatch.setattr(engine_support, "_COST", {"cuda": (cost, cost), "cpu": (cost, cost)})


def kept(labels, vocab_size, k, *, seed=0, uncut=(), cuts=0.4):
    """``[..., k]`` ids, each row different columns and the label, some of them -1."""
    g = torch.Generator().manual_seed(seed)
    flat = labels.flatten().clamp(min=0)
    scores = torch.rand(len(flat), vocab_size, generator=g)
    scores[:, 1] = 1.5  # a popular column
    ids = scores.scatter_(1, flat[:, None], 2.0).topk(k).indices
    ids[:, 1:][torch.rand(len(flat), k - 1, generator=g) < cuts] = -1
    ids = ids.gather(1, torch.rand(len(flat), k, generator=g).argsort(1))  # the label at any place
    ids[list(uncut)] = -1
    return ids.view(*labels.shape, k)


@pytest.mark.parametrize(("backend", "uncut"), [("torch", ()), ("torch", (2,)), ("triton", ())])
def test_sparse_gradients(backend, uncut, monkeypatch):
    if backend == "triton" and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    hidden, weight, labels, bias = problem(5, 5, 9, masked=0.2, bias=True)
    ids = kept(labels, 9, 4, uncut=uncut)
    labels[2] = 3
    ids[2] = torch.tensor([3, -1, -1, -1]) if not uncut else -1

    def call(**options):
        return linear_logps(hidden, weight, labels, support=TokenSupport(ids, **options), bias=bias, backend=backend)

    dense = gradients(call().square().sum(), (hidden, weight, bias))
    choose_above(monkeypatch, 9)  # would make them dense
    found = gradients(call(sparse_grad=True).square().sum(), (hidden, weight, bias))
    assert found[1].is_sparse == (not uncut)
    if not uncut:
        assert found[1].is_coalesced()
        touched = ids[(labels != -100)[:, None] & (ids >= 0)].unique()
        assert torch.equal(found[1].indices()[0], touched)
    for a, b in zip(found, dense, strict=True):
        assert torch.equal(a.to_dense(), b)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_logit_of_minus_infinity_is_no_empty_place(softcap, backend):
    hidden, weight, labels, bias = problem(5, 6, 30, bias=True, masked=0.3)
    bias.data[[3, 4]] = -torch.inf
    ids = torch.arange(8).repeat(len(labels), 1)
    ids[:, 4:6] = -1
    head, options = Head(weight, bias, LogitTransform(softcap=softcap)), EngineOptions(backend=backend)
    found = linear_support_statistics(hidden, head, labels, TokenSupport(ids), ("selected_logps",), options)
    logits = plain_logits(hidden, weight, bias, softcap=softcap)[:, :8]
    expected = logits.masked_fill(ids < 0, -torch.inf).log_softmax(-1)
    expected = torch.where((labels != -100)[:, None] & (ids >= 0), expected, 0.0)
    torch.testing.assert_close(found.selected_logps, expected)
    # Of probabilities, as the logarithm of 0 has no derivative.
    ours, theirs = ((logps.exp() * torch.arange(8.0)).sum() for logps in (found.selected_logps, expected))
    torch.testing.assert_close(*(gradients(each, (hidden, weight)) for each in (ours, theirs)))


def test_sparse_gradients_that_cannot_be():
    hidden, weight, labels, _ = problem(4, 5, 20, masked=0.0)
    support = TokenSupport(kept(labels, 20, 4), sparse_grad=True)
    with pytest.raises(RuntimeError, match="a compiled function cannot return sparse gradients"):
        torch.compile(lambda: linear_logps(hidden, weight, labels, support=support), backend="eager", fullgraph=True)()
    with pytest.raises(ValueError, match="sparse_grad=True.* needs a weight that is a parameter"):
        linear_logps(hidden.double(), weight.double(), labels, support=support)
    with torch.no_grad():
        linear_logps(hidden.double(), weight.double(), labels, support=support)


@pytest.mark.parametrize("cost", [1, 20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_is_not_hidden(backend, cost, monkeypatch):
    choose_above(monkeypatch, cost)
    hidden, weight, _, _ = problem(4, 4, 20)
    labels = torch.tensor([1, 2, 3, 4])
    with torch.no_grad():
        hidden[0] = weight[6] = float("nan")  # a token; a column that another keeps
    ids = torch.stack([labels, torch.tensor([7, 6, 9, 10]), torch.full((4,), -1)], 1)
    found = linear_logps(hidden, weight, labels, support=TokenSupport(ids), entropy=True, lse=True, backend=backend)
    for name in NAMES:
        assert getattr(found, name).isnan().tolist() == [True, True, False, False], name
