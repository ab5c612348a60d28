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


@pytest.fixture(autouse=True)
def rows_are_read(monkeypatch):
    """Vocabularies of tests are so small that products would be taken."""
    choose_above(monkeypatch, 1)


def choose_above(monkeypatch, cost):
    """Tokens with more than V / ``cost`` columns are scored by products."""
    monkeypatch.setattr(engine_support, "_COST", {"cuda": (cost, cost), "cpu": (cost, cost)})


@pytest.mark.parametrize("uncut", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_gradients(backend, uncut, monkeypatch):
    hidden, weight, labels, bias = problem(5, 5, 9, masked=0.2, bias=True)
    ids = (labels.clamp(min=0)[:, None] + torch.tensor([2, 0, 5, 4])) % 9
    ids[2, 0], ids[3, 2:] = -1, -1
    if uncut:
        ids[2] = -1

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
    support = TokenSupport(labels[:, None], sparse_grad=True)
    with pytest.raises(RuntimeError, match="a compiled function cannot return sparse gradients"):
        torch.compile(lambda: linear_logps(hidden, weight, labels, support=support), backend="eager", fullgraph=True)()
    with torch.no_grad():  # where they need no parameter
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
    for value in (found.logp, found.entropy, found.lse):
        assert value.isnan().tolist() == [True, True, False, False]
