"""What is decided of a call, and kept; results that do not depend on it."""

import pytest
import torch

from liger_losses import (
    EngineOptions,
    Head,
    Teacher,
    TeacherTopK,
    linear_logps,
    linear_statistics,
    linear_token_loss,
)
from liger_losses.chunked.engine import decision, tokens
from liger_losses.chunked.engine.query import Query
from tests.losses import CE, JSD
from tests.reference import problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(dtype, bias):
    hidden, weight, labels, bias = problem(shape=(4, 7), dtype=dtype, bias=bias)
    return hidden, weight, labels, bias


def assert_close(found, expected, dtype):
    size = 2e-2 if dtype == torch.bfloat16 else 1e-5 if dtype == torch.float32 else 1e-10
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=size, atol=size * float(theirs.abs().max()))


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1, 2)])
def test_what_needs_no_gradient(frozen):
    hidden, weight, labels, bias = inputs(torch.float32, True)
    given = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate((hidden, weight, bias))]
    trained = [t for t in given if t.requires_grad]
    value = CE()(given[1], given[0], labels, given[2])
    torch.testing.assert_close(value, CE()(weight, hidden, labels, bias))
    assert value.requires_grad == bool(trained)
    if trained:
        once = torch.autograd.grad(value, trained, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(value, trained), once)  # computes again what was overwritten


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


def test_nearly_as_many_tokens_have_one_plan():
    hidden, weight, labels = torch.zeros(1200, 8), torch.zeros(9, 8), torch.zeros(1200, dtype=torch.int64)
    for options, alike in ((EngineOptions(), True), (EngineOptions(workspace=2**24), False)):
        made = decision.decide((hidden,), Head(weight), (labels,), Query(("logp",)), options)
        assert (made.run(1100, True) is made.run(1101, True)) == alike
        assert made.run(1100, True) is not made.run(1200, True)
        assert made.run(1100, True).plan.rows >= 1100


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


def test_token_inputs_of_masked_tokens_may_hold_anything():
    hidden, weight, labels, _ = inputs(torch.float32, False)
    table = torch.linspace(1.0, 2.0, 61)

    def token_loss(statistics, labels, columns):
        return -statistics.logp * table[columns]

    found = []
    for compact in (True, False):
        options = EngineOptions(compact=compact)
        loss, _ = linear_token_loss(
            hidden, weight, labels, token_loss, token_inputs={"columns": labels}, options=options
        )
        found.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    assert_close(found[1], found[0], torch.float32)


@pytest.mark.parametrize("options", [{}, {"top_k": 4}])
def test_the_divergence_over_some_columns_is_of_active_tokens(options):
    hidden, weight, labels, _ = inputs(torch.float32, False)
    states, head = hidden.detach().flip(0), weight.detach().flip(0)
    sparse = TeacherTopK(*(states @ head.T).log_softmax(-1).topk(4))
    teacher = Teacher(states, head) if options else sparse
    found = [JSD(compact=compact, **options)(weight, hidden, labels, teacher) for compact in (True, False)]
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("options", [{"top_k_of": "teacher"}, {"temperature": 2.0}])
def test_tokens_are_counted_once_for_all_passes_over_some_columns(options, monkeypatch):
    hidden, weight, labels, _ = inputs(torch.float32, False)
    teacher, counted, count = Teacher(hidden.detach().flip(0), weight.detach()), [], tokens.facts_of_labels
    with monkeypatch.context() as patched:
        patched.setattr(tokens, "facts_of_labels", lambda *given: counted.append(1) or count(*given))
        found = JSD(top_k=4, **options)(weight, hidden, labels, teacher)
    assert counted == [1]
    torch.testing.assert_close(found, JSD(top_k=4, compact=False, **options)(weight, hidden, labels, teacher))
