"""Statistics and losses of tokens: derivatives by every strategy, dtypes, several heads, and which tokens count."""

from types import SimpleNamespace

import pytest
import torch

from liger_losses import EngineOptions, TokenSupport, linear_logps, linear_statistics, linear_token_loss
from liger_losses.chunked.core import inputs
from liger_losses.chunked.core.weights import Dense
from liger_losses.integrations import megatron, verl
from tests.losses import CE
from tests.reference import assert_as_exact_as_plain, double, gradients, peak_bytes, plain_statistics, problem


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
    hidden, weight, labels, _ = problem(v=300, masked=0.0)
    read, rows = [], Dense.rows
    monkeypatch.setattr(Dense, "rows", lambda self, columns: read.append(columns) or rows(self, columns))
    linear_logps(hidden, weight, labels, support=TokenSupport(torch.arange(300).expand(*labels.shape, 300)))
    assert all(isinstance(columns, slice) for columns in read)


@pytest.mark.parametrize("some_uncut", [False, True])
def test_where_all_tokens_are_cut_there_is_no_target_of_others(some_uncut, monkeypatch):
    hidden, weight, labels, _ = problem(masked=0.0)
    ids = torch.stack([labels, (labels + 1) % len(weight)], -1)
    ids[0] = -1 if some_uncut else ids[0]
    counts, statistics = [], inputs.statistics
    monkeypatch.setattr(inputs, "statistics", lambda t, *rest: counts.append(len(t)) or statistics(t, *rest))
    linear_logps(hidden, weight, labels, support=TokenSupport(ids))
    assert counts == [1 + some_uncut]


# --- Several heads ----------------------------------------------------------------------------------------------------

K, H, V, SHAPE = 3, 24, 131, (2, 11)  # of calls with several heads


@pytest.mark.parametrize("name", ["weight", "bias", "shift", "transform", "heads"])
def test_token_inputs_of_any_name(name):
    hidden, weight, labels, _ = problem(0, H, V, shape=SHAPE)
    scale = torch.rand(SHAPE)
    loss, found = linear_token_loss(
        hidden, [weight] * K, labels, lambda s, labels, **given: -given[name] * s.logp, token_inputs={name: scale}
    )
    torch.testing.assert_close(loss, -sum((scale * values.logp).sum() for values in found))


# --- Temperatures of tokens -------------------------------------------------------------------------------------------


def temperatures(shape):
    return 0.4 + 1.6 * torch.rand(shape, generator=torch.Generator().manual_seed(5))


def test_in_the_places_of_other_heads():
    hidden, weight, labels, _ = problem(6, 8, 31, shape=(2, 3))
    t = temperatures((2, 3))
    expected = linear_logps(hidden, weight, labels, temperature=t)
    logps, _ = verl.linear_cross_entropy(hidden, weight, labels.flatten(), t)
    torch.testing.assert_close(logps.view(2, 3), expected)
    layer = SimpleNamespace(weight=weight, bias=None, tp_group=SimpleNamespace(size=lambda: 1))
    losses = megatron.output_processor(
        hidden_states=hidden.transpose(0, 1), output_layer=layer, output_weight=None, labels=labels,
        context=megatron.OutputOptions(temperature=t),
    )  # fmt: skip
    torch.testing.assert_close(-losses, expected)


def test_a_changed_temperature_does_not_reach_backward():
    hidden, weight, labels, _ = problem(6, 8, 31, masked=0.0)
    t = temperatures(6)
    (expected,) = gradients(linear_logps(hidden, weight, labels, temperature=t.clone()).sum(), (weight,))
    logps = linear_logps(hidden, weight, labels, temperature=t)
    t.fill_(3.0)
    torch.testing.assert_close(gradients(logps.sum(), (weight,))[0], expected)


# --- Which tokens are computed ----------------------------------------------------------------------------------------


def test_strided_hidden_states_are_not_copied_whole():
    hidden, weight, labels, _ = problem(shape=(4, 2000), h=256, v=512, masked=0.0)
    workspace = 4 * 2**20
    shifted, targets = hidden[:, :-1], labels[:, 1:]
    assert shifted.numel() * 4 > workspace
    with torch.no_grad():
        assert peak_bytes(lambda: linear_logps(shifted, weight, targets, workspace=workspace)) <= workspace
    expected = linear_logps(hidden, weight, labels, shift=True)[:, :-1]
    torch.testing.assert_close(linear_logps(shifted, weight, targets), expected)


def test_a_column_that_no_token_can_have():
    """Tokens without loss count as tokens of column 0, whose log-probability may be -inf."""
    hidden, weight, labels, bias = problem(shape=(4, 7), bias=True)
    labels[labels == 0] = 1
    with torch.no_grad():
        bias[0] = -torch.inf
    loss = CE(compact=False)(weight, hidden, labels, bias=bias)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(
        (loss, *gradients(loss, (hidden, weight))), (expected, *gradients(expected, (hidden, weight)))
    )
