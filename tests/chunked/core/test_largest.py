"""The largest log-probabilities and registered statistics, streamed: against dense logits in float64."""

import pytest
import torch

import liger_losses
from liger_losses import (
    ChunkedLoss,
    Head,
    Largest,
    LogitTransform,
    linear_statistics,
    linear_token_loss,
    linear_topk,
)
from liger_losses.chunked.core.results import REGISTERED
from liger_losses.kernels import BACKENDS
from liger_losses.kernels.logit_transform import Epilogue
from liger_losses.kernels.row_lse import sum_of_probabilities
from tests.reference import assert_close_gradients, plain_logits, problem


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given", [{}, {"logit_scale": 0.7, "softcap": 3.0}, {"temperature": 0.5}], ids=str)
def test_the_rest_of_rows(given, backend):
    """Also where the largest have nearly all of the probability."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = torch.randn(13, 5003, generator=torch.Generator().manual_seed(0)).to(device)[:, :5000]
    rows[:, 7] = 40.0
    epilogue = Epilogue(LogitTransform(**given), rows[0].flip(0).contiguous() if given else None)
    logits = epilogue(rows).double()
    columns, lse = logits.topk(3, -1).indices, logits.logsumexp(-1)
    exact = (logits - lse[:, None]).exp().scatter(1, columns, 0.0).sum(1)
    marked = rows.scatter(1, columns, -torch.inf)
    found = sum_of_probabilities(marked, lse.float(), epilogue, scratch=10**5, backend=backend)
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=0)


def test_the_rest_has_projections_that_overflow():
    hidden, weight = torch.full((1, 1), 1e200, dtype=torch.float64), torch.zeros(50, 1, dtype=torch.float64)
    weight[20:] = -1e200
    head = Head(weight, transform=LogitTransform(softcap=2.0))
    found, log_p = linear_topk(hidden, head, 5, rest=True), plain_logits(hidden, weight, softcap=2.0).log_softmax(-1)
    torch.testing.assert_close(found.rest, log_p[:, 5:].logsumexp(-1))


def test_a_loss_of_the_largest_in_one_pass():
    """The entropy of the 5 largest, renormalized: the columns are found in the block that gradients are taken of."""
    hidden, weight, labels, _ = problem(v=401, dtype=torch.float64)

    def entropy(logps):
        logps = logps.log_softmax(-1)
        return -(logps.exp() * logps).sum(-1)

    def loss(s, labels):
        assert s.columns.shape == s.selected_logps.shape
        return entropy(s.selected_logps)

    found, _ = linear_token_loss(hidden, weight, labels, loss, "selected_logps", metrics="columns", selected=Largest(5))
    exact = entropy(plain_logits(hidden, weight).log_softmax(-1).topk(5, -1).values)[labels != -100].sum()
    torch.testing.assert_close(found, exact)
    assert_close_gradients(found, exact, (hidden, weight))


@pytest.mark.parametrize(("k", "message"), [(0, "positive integer"), (2.0, "positive integer"), (62, "at most the 61")])
def test_wrong_numbers_of_columns(k, message):
    hidden, weight, labels, _ = problem()
    with pytest.raises(ValueError, match=message):
        linear_topk(hidden, weight, k, labels)


# --- Registered statistics ------------------------------------------------------------------------------------------


@pytest.fixture
def second_moment():
    liger_losses.register_statistic("second_moment", lambda log_p: log_p.exp() * log_p.square())
    liger_losses.register_statistic("square_sum", lambda log_p: (2 * log_p).exp())
    yield
    del REGISTERED["second_moment"], REGISTERED["square_sum"]


class VarentropyLoss(ChunkedLoss):
    """``mean(sum p log^2 p - H^2) - 0.1 mean log p``."""

    statistics = ("second_moment", "entropy", "logp")

    def loss(self, statistics, mask):
        return (statistics.second_moment - statistics.entropy.square() - 0.1 * statistics.logp).sum() / mask.sum()


@pytest.mark.usefixtures("second_moment")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_of_a_registered_statistic(backend):
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    hidden, weight, labels, bias = (x.detach().to(device) for x in problem(v=101, bias=True))
    leaves, transform = [x.requires_grad_() for x in (hidden, weight, bias)], {"softcap": 4.0, "temperature": 0.7}
    loss = VarentropyLoss(backend=backend, workspace=60_000, **transform)(weight, hidden, labels, bias)
    log_p, mask = plain_logits(*leaves, **transform).log_softmax(-1), labels != -100
    p, logp = log_p.exp(), log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    exact = ((p * log_p**2).sum(-1) - (p * log_p).sum(-1) ** 2 - 0.1 * logp)[mask].mean()
    torch.testing.assert_close(loss, exact, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(value, leaves) for value in (loss, exact)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("second_moment")
def test_registered_statistics_have_the_order_of_the_call():
    hidden, weight, labels, _ = problem(dtype=torch.float64)
    found = linear_statistics(hidden, weight, labels, ("square_sum", "logp", "second_moment"))
    log_p, mask = plain_logits(hidden, weight).log_softmax(-1), labels != -100
    expected = torch.stack([(2 * log_p).exp().sum(-1), (log_p.exp() * log_p**2).sum(-1)], -1)
    torch.testing.assert_close(found.registered, expected * mask[:, None])

    def loss(s, labels):
        return s.square_sum * s.logp

    value, _ = linear_token_loss(hidden, weight, labels, loss, ("square_sum", "logp"))
    torch.testing.assert_close(value, (expected[:, 0] * found.logp).sum())
    grads = [torch.autograd.grad(x, (hidden, weight)) for x in (value, (found.registered[:, 0] * found.logp).sum())]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("name", "term", "message"),
    [
        ("logp", torch.exp, "already"),
        ("a b", torch.exp, "identifier"),
        ("mine", lambda x: x.exp().sum(-1), "one value per entry"),
        ("mine", lambda x: x.exp() / x.exp().sum(), "elementwise"),
        ("mine", lambda x: 1 / (x + 1e4), "not finite"),
    ],
)
def test_wrong_statistics_are_refused(name, term, message):
    with pytest.raises((TypeError, ValueError), match=message):
        liger_losses.register_statistic(name, term)
    assert "mine" not in REGISTERED
