"""Statistics and losses of tokens: their derivatives by every strategy, and their dtypes."""

import pytest
import torch

from liger_losses import EngineOptions, TokenSupport, linear_logps, linear_statistics, linear_token_loss
from liger_losses.chunked.core import support
from liger_losses.chunked.core.weights import Dense
from tests.reference import assert_as_exact_as_plain, double, gradients, plain_statistics, problem


def test_derivatives_that_come_along_replace_autograd():
    hidden, weight, labels, _ = problem(13, dtype=torch.float64)
    built = []

    def by_autograd(s, labels):
        return s.logp * s.logp + 0.3 * s.lse

    def given(s, labels):
        with torch.no_grad():
            built.append(len(labels))
            return by_autograd(s, labels), {"logp": 2 * s.logp, "lse": torch.full_like(s.lse, 0.3)}

    losses = []
    for token_loss in (by_autograd, given):
        for extra in ({}, {"compact": False}, {"strategy": "two_pass"}, {"strategy": "two_pass", "compact": False}):
            options = EngineOptions(chunk_size=4, **extra)
            loss, _ = linear_token_loss(hidden, weight, labels, token_loss, ("logp", "lse"), options=options)
            losses.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    assert built
    for other in losses[1:]:
        torch.testing.assert_close(losses[0], other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", [None, "two_pass", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("brings_derivatives", [False, True])
def test_fp64_token_inputs_leave_the_dtypes_of_loss_and_gradients(strategy, brings_derivatives):
    hidden, weight, labels, _ = problem(dtype=torch.float32)
    weights = torch.rand(13, dtype=torch.float64)

    def token_loss(s, labels, weights):
        return (-weights * s.logp, {"logp": -weights}) if brings_derivatives else -weights * s.logp

    def function(hidden, weight):
        options = EngineOptions(strategy=None if strategy == "compiled" else strategy)
        return linear_token_loss(
            hidden, weight, labels, token_loss, token_inputs={"weights": weights}, options=options
        )[0]

    if strategy == "compiled":
        function = torch.compile(function, backend="eager")
    loss = function(hidden, weight)
    exact_inputs = double(hidden, weight)
    exact = -(weights * plain_statistics(*exact_inputs, labels)["logp"]).sum()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0.0)
    pairs = zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(exact, exact_inputs), strict=True)
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected.float(), rtol=1e-4, atol=1e-5)


def test_a_derivative_by_the_log_sum_exp_may_come_along():
    """Also where ``statistics`` does not name it: every call computes it."""
    hidden, weight, labels, _ = problem(5, 4, 11, dtype=torch.float64)
    inputs = [x.detach().requires_grad_() for x in (hidden, weight)]
    linear_token_loss(
        *inputs, labels, lambda s, _: (-s.logp, {"logp": -torch.ones_like(s.logp), "lse": torch.ones_like(s.logp)})
    )[0].backward()
    exact = [x.detach().requires_grad_() for x in (hidden, weight)]
    values = plain_statistics(*exact, labels)
    (values["lse"] - values["logp"]).sum().backward()
    for ours, expected in zip(inputs, exact, strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def test_a_compiled_loss_of_argmax_alone():
    hidden, weight, labels, _ = problem(5, 4, 11)

    def function(hidden):
        right = lambda s, labels: (s.argmax == labels).float()  # noqa: E731
        return linear_token_loss(hidden, weight, labels, right, (), metrics=("argmax",))[0]

    found = torch.compile(function, fullgraph=True, backend="eager")(hidden)
    assert found == ((hidden @ weight.t()).argmax(-1) == labels).sum()


def test_fp16_gradients_survive_a_loss_scale():
    # Mean over many tokens: each token's gradient is far below fp16's smallest number until it is scaled.
    hidden, weight, labels, _ = problem(512, 16, 4096, dtype=torch.float16, masked=0.0)
    exact_in = double(hidden, weight)
    exact = gradients(-plain_statistics(*exact_in, labels)["logp"].sum() / 1e6 * 65536, exact_in)
    loss, _ = linear_token_loss(hidden, weight, labels, lambda s, y: -s.logp / 1e6)
    plain = gradients(-plain_statistics(hidden, weight, labels)["logp"].sum() / 1e6 * 65536, (hidden, weight))
    for g, p, e in zip(gradients(loss * 65536, (hidden, weight)), plain, exact, strict=True):
        assert_as_exact_as_plain(g, p, e)


def test_hidden_states_of_different_dtypes_under_autocast():
    (a, weight, y, _), (b, _, z, _) = problem(seed=1), problem(seed=2)
    weight.requires_grad_(False)
    half = a.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = linear_statistics([half, b], weight, [y, z])[1].logp.sum()
        alone = linear_statistics(b, weight, z, options=EngineOptions(strategy="two_pass")).logp.sum()
    torch.testing.assert_close(gradients(mixed, (b,)), gradients(alone, (b,)), rtol=1e-5, atol=1e-6)


def test_of_tokens_that_keep_very_many_columns_no_rows_are_read(monkeypatch):
    """Products with the whole head take less time."""
    hidden, weight, labels, _ = problem(v=300, dtype=torch.float64)
    dropped = torch.arange(300) % 3 == 1
    labels = labels.where(labels % 3 != 1, -100)
    read, rows = [], Dense.rows
    monkeypatch.setattr(Dense, "rows", lambda self, columns: read.append(columns) or rows(self, columns))
    ids = torch.arange(300).masked_fill(dropped, -1).expand(*labels.shape, 300)
    logps = linear_logps(hidden, weight, labels, support=TokenSupport(ids))
    logits = (hidden @ weight.t()).masked_fill(dropped, -torch.inf)
    expected = -torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    grads = [torch.autograd.grad(values.sum(), (hidden, weight)) for values in (logps, expected)]
    torch.testing.assert_close((logps, *grads[0]), (expected, *grads[1]))
    assert all(isinstance(columns, slice) for columns in read)


@pytest.mark.parametrize("some_uncut", [False, True])
def test_where_all_tokens_are_cut_there_is_no_target_of_others(some_uncut, monkeypatch):
    hidden, weight, labels, _ = problem(masked=0.0)
    ids = torch.stack([labels, (labels + 1) % len(weight)], -1)
    ids[0] = -1 if some_uncut else ids[0]
    counts, statistics = [], support.statistics
    monkeypatch.setattr(support, "statistics", lambda t, *rest: counts.append(len(t)) or statistics(t, *rest))
    linear_logps(hidden, weight, labels, support=TokenSupport(ids))
    assert counts == [1 + some_uncut]


class WithoutGradient(torch.autograd.Function):
    """Asks for the gradient of its input, and then has none for it."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return None


@pytest.mark.parametrize("frozen", [False, True])
def test_no_upstream_gradient_makes_gradients_of_zero(frozen):
    """And not what was in memory before."""
    hidden, weight, labels, _ = problem(50, 24, 61, masked=0.0)
    weight.requires_grad_(not frozen)
    filled = [torch.full_like(hidden, 7.0) for _ in range(100)]
    del filled
    WithoutGradient.apply(linear_logps(hidden, weight, labels)).sum().backward()
    assert not hidden.grad.any()
    assert frozen or not weight.grad.any()
