"""What is decided of a call, and kept; results that do not depend on it."""

from contextlib import nullcontext

import pytest
import torch

from liger_losses import (
    Divergence,
    EngineOptions,
    Head,
    Teacher,
    linear_divergence,
    linear_logps,
    linear_statistics,
)
from liger_losses.chunked.engine import decision
from liger_losses.chunked.engine.query import Query
from tests.losses import CE
from tests.reference import problem


def inputs(dtype, bias):
    hidden, weight, labels, bias = problem(shape=(4, 7), dtype=dtype, bias=bias)
    return hidden, weight, labels, bias


def assert_close(found, expected, dtype):
    size = 2e-2 if dtype == torch.bfloat16 else 1e-5 if dtype == torch.float32 else 1e-10
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=size, atol=size * float(theirs.abs().max()))


def test_a_column_that_no_token_can_have():
    """Tokens without loss count as tokens of column 0, whose log-probability may be -inf."""
    hidden, weight, labels, bias = inputs(torch.float32, True)
    labels[labels == 0] = 1
    with torch.no_grad():
        bias[0] = -torch.inf
    loss = CE(compact=False)(weight, hidden, labels, bias=bias)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert_close(
        [loss, *torch.autograd.grad(loss, (hidden, weight))],
        [expected, *torch.autograd.grad(expected, (hidden, weight))],
        torch.float32,
    )


def test_what_is_decided_is_kept_by_all_that_it_depends_on():
    """Another shape, layout, dtype, option or setting is decided anew, and what is wrong raises every time."""
    hidden, weight, labels, _ = inputs(torch.float32, False)

    def count():
        return len(decision._decisions)

    decision._decisions.clear()
    logps = linear_logps(hidden, weight, labels)
    for _ in range(2):
        torch.testing.assert_close(linear_logps(hidden.detach().clone().requires_grad_(), weight, labels), logps)
    assert count() == 1
    others = [
        lambda: linear_logps(hidden[:2], weight, labels[:2]),
        lambda: linear_logps(hidden.transpose(0, 1), weight, labels.t()),
        lambda: linear_logps(hidden.detach(), weight, labels),
        lambda: linear_logps(hidden, weight, labels, softcap=3.0),
        lambda: linear_logps(hidden, weight, labels, ignore_index=-1),
        lambda: linear_logps(hidden, weight, labels, entropy=True),
        lambda: linear_logps(hidden, weight, labels, workspace=2**20),
        lambda: linear_logps(hidden.double(), weight.double(), labels),
        lambda: linear_statistics(hidden, weight, labels, "logp", options=EngineOptions(compact=False)),
    ]
    for i, other in enumerate(others):
        if i == 4:
            labels = labels.clamp(min=0)
        other()
        assert count() == i + 2
    with torch.no_grad():
        linear_logps(hidden, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        linear_logps(hidden, weight, labels)
    assert count() == len(others) + 3
    for _ in range(2):
        with pytest.raises(ValueError, match="hidden_states must be"):
            linear_logps(hidden[..., 1:], weight, labels)
        with pytest.raises(TypeError, match="share a dtype"):
            linear_logps(hidden.double(), weight, labels)
        with pytest.raises(RuntimeError, match=r"torch\.func"):
            torch.func.grad(lambda h: linear_logps(h, weight, labels).sum())(hidden)


def test_decisions_do_not_pile_up(monkeypatch):
    hidden, weight, labels, _ = inputs(torch.float32, False)
    monkeypatch.setattr(decision, "MOST_DECISIONS", 2)
    for i in range(1, 7):
        linear_logps(hidden[:, :i], weight, labels[:, :i])
    assert len(decision._decisions) <= 2


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


def test_nearly_as_many_tokens_have_one_plan():
    hidden, weight, labels = torch.zeros(1200, 8), torch.zeros(9, 8), torch.zeros(1200, dtype=torch.int64)
    for options, alike in ((EngineOptions(), True), (EngineOptions(workspace=2**24), False)):
        made = decision.decide((hidden,), Head(weight), (labels,), Query(("logp",)), options)
        assert (made.run(1100, True) is made.run(1101, True)) == alike


def test_sums_beyond_the_workspace_warn(monkeypatch):
    hidden, weight, labels, _ = problem(160, 32, 96, dtype=torch.bfloat16, masked=0.0)
    teacher = Teacher(hidden.detach() / 2, weight.detach())
    for workspace, warns in ((30_000, True), (50_000, False)):
        monkeypatch.setattr(decision, "_decisions", {})
        options = EngineOptions(workspace=workspace)
        with pytest.warns(UserWarning, match="accum_dtype") if warns else nullcontext():
            linear_divergence(hidden, weight, labels, teacher, Divergence.reverse_kl(), options=options)
