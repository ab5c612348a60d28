"""Rows of exponentials, some of tokens without loss: the kernels compute what their reference does, exactly."""

import pytest
import torch

from liger_losses.kernels._triton import INTERPRETED
from liger_losses.kernels.exponential_rows import ExponentialRows
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.masked_rows import Derivatives
from tests.kernels.cases import DEVICE, ONE_COLUMN_MORE, SEVERAL_TILES, asserts_or_skip, triton_or_skip
from tests.reference import assert_as_exact_as_plain

TRANSFORM = LogitTransform(0.7, 1.2)


@pytest.fixture(params=["tma", "pointers"])
def loads(request, monkeypatch, small_tiles):
    """How a GPU's product loads its tiles."""
    triton_or_skip()
    monkeypatch.setattr("liger_losses.kernels._tiles.has_tma", lambda device: request.param == "tma")


def problem(tokens, hidden_size, columns, extreme, wrong=False):
    """The second token has no loss, and NaN; if ``extreme``, the third label is hopeless and the fourth sure."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, hidden_size, generator=g).bfloat16() for n in (tokens, columns))
    labels = torch.randint(columns, (tokens,), generator=g)
    labels[0], labels[1], labels[-1] = 0, -100, columns if wrong else columns - 1
    hidden[1] = float("nan")
    if extreme:
        hidden[2:4] *= 50
        for i, pick in ((2, torch.argmin), (3, torch.argmax)):
            labels[i] = pick(hidden[i].float() @ weight.float().t())
    return [tensor.to(DEVICE) for tensor in (hidden, weight, labels)]


def computed(rows, hidden, weight, labels, upstream):
    """Log-probabilities, losses, and the gradients of both."""
    block, found = rows.project(hidden, weight, labels), []
    for gradients in (
        rows.gradients(block, labels, hidden, torch.empty(0), None, Derivatives(logp=upstream)),
        rows.loss(block, labels, hidden, (-1.5, None), True),
    ):
        of_hidden = torch.empty_like(hidden)
        rows.hidden_gradient_into(of_hidden, gradients, weight)
        found += [of_hidden, rows.weight_gradient(gradients, weight.dtype)]
    statistics = rows.statistics(block, labels)
    return [statistics.logp, statistics.mean_logit, gradients.loss, *found]


def expected(hidden, weight, labels, upstream, dtype):
    """The same, by autograd."""
    active, found = labels != -100, []
    hidden, weight = (t.detach().to(dtype).requires_grad_() for t in (hidden.where(active[:, None], 0), weight))
    logits = TRANSFORM(hidden @ weight.t()).to(torch.promote_types(dtype, torch.float32))
    logp = logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0].where(active, 0)
    losses = -1.5 * logp / active.sum()
    for value in ((logp * upstream.where(active, 0)).sum(), losses.sum()):
        found += torch.autograd.grad(value, (hidden, weight), retain_graph=True)
    return [logp.detach(), logits.mean(1).where(active, 0).detach(), losses.sum().detach(), *found]


@pytest.mark.parametrize(
    ("tokens", "hidden_size", "columns", "extreme"), [(*SEVERAL_TILES, True), (*ONE_COLUMN_MORE, False)]
)
@pytest.mark.usefixtures("loads")
def test_log_probabilities_losses_and_gradients(tokens, hidden_size, columns, extreme):
    hidden, weight, labels = problem(tokens, hidden_size, columns, extreme)
    upstream = torch.linspace(-1.0, 2.0, tokens, device=DEVICE)
    upstream[1] = float("nan")
    exact, plain = (expected(hidden, weight, labels, upstream, dtype) for dtype in (torch.float64, torch.bfloat16))
    for backend in ("torch", "triton"):
        right = torch.ones((), dtype=torch.bool, device=DEVICE)
        rows = ExponentialRows(weight, tokens, -100, TRANSFORM, right, backend, mean_logit=True)
        found, again = (computed(rows, hidden, weight, labels, upstream) for _ in range(2))
        assert right.item()
        for ours, same, theirs, wanted in zip(found, again, plain, exact, strict=True):
            assert torch.equal(ours, same)
            # The interpreter truncates where a GPU rounds to bfloat16.
            assert_as_exact_as_plain(ours, theirs, wanted, backend, slack=4.0 if INTERPRETED else 2.0)
        assert not any(value[1].any() for value in (found[0], found[1], found[3]))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("wrong", [False, True])
def test_labels_outside_of_the_vocabulary(wrong, backend):
    triton_or_skip()
    asserts_or_skip(wrong, backend)
    hidden, weight, labels = problem(5, 16, 40, False, wrong)
    right = torch.ones((), dtype=torch.bool, device=DEVICE)
    ExponentialRows(weight, 5, -100, LogitTransform(), right, backend).project(hidden, weight, labels)
    assert right.item() != wrong
