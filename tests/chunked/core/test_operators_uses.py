"""Uses of losses and patched models in compiled functions that are not a plain call of a loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import liger_losses
import liger_losses as ll
from liger_losses.chunked.core import buffers, weights
from liger_losses.chunked.core.compiled import _NAMES
from liger_losses.kernels.matmul import matmul_into
from tests.losses import CE
from tests.reference import Int8Weight, tensors_of
from tests.results import compiled as calls


def _head_and_batch(tokens=5):
    torch.manual_seed(tokens)
    head = nn.Linear(8, 13)
    labels = torch.randint(13, (4, tokens))
    labels[0, 2:] = -100
    return head, torch.randn(4, tokens, 8, requires_grad=True), labels.t().contiguous().t()  # of any strides


def _divergence(teacher):
    return lambda h, head, y: ll.linear_divergence(h, head, y, teacher(h, head), ll.Divergence.forward_kl()).divergence


FUNCTION = ll.TeacherLogits(lambda positions: torch.ones(len(positions), 13), columns=13)
#: What a graph cannot hold, and calls that have it.
ENDING = [
    ("functions of a teacher's logits", _divergence(lambda h, head: FUNCTION)),
    (
        "functions of a teacher's logits",
        _divergence(lambda h, head: ll.Teachers([ll.Teacher(h, head), FUNCTION], torch.arange(4) % 2)),
    ),
    ("registered statistics", lambda h, head, y: ll.linear_statistics(h, head, y, "sum_of_squares").registered),
    ("quantized heads", lambda h, head, y: ll.linear_logps(h, ll.Head(Int8Weight(head.weight.detach())), y)),
]


@pytest.mark.parametrize(("reason", "call"), ENDING)
def test_what_a_graph_cannot_hold_ends_it(reason, call):
    liger_losses.register_statistic("sum_of_squares", lambda log_p: (2 * log_p).exp())
    head, hidden, labels = _head_and_batch()
    compiled = torch.compile(lambda hidden: call(hidden * 2, head, labels) * 3, backend="eager")
    with pytest.warns(UserWarning, match=f"cannot hold {reason}"):
        torch.testing.assert_close(compiled(hidden), call(hidden * 2, head, labels) * 3)


#: Products with the head, of all tokens, in a call and its backward.
PRODUCTS = {
    "cross entropy": 3,
    "GRPO": 3,
    "JSD": 4,  # one is the teacher's
    "logps": 4,  # backward computes logits again
    "user's loss": 4,
    "DPO, several": 10,  # two groups, and the reference's
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("GRPO", "user's loss"))) for n in PRODUCTS]
)
def test_products(name, monkeypatch):
    """One pass stays one pass."""
    products = []
    for module in (buffers, weights):
        monkeypatch.setattr(module, "matmul_into", lambda *a, **k: products.append(1) or matmul_into(*a, **k))
    build, call = calls.LOSSES.get(name) or (lambda: None, lambda loss, *inputs: calls.OPERATIONS[name](*inputs))
    loss, head = build(), calls.layer()
    function, _ = calls.compiled(lambda d: call(loss, head, d))
    d = calls.batch(6)
    calls.gradients(function(d), (d["h"], *head.parameters()))
    assert len(products) == PRODUCTS[name]


class _ReadsWhatThereIs(ll.ChunkedLoss):
    def loss(self, statistics, mask):
        assert not hasattr(statistics, "entropy")
        return -statistics.logp.sum() + (getattr(statistics, "lse", None) or 0.0)


class _Scaled(ll.ChunkedLoss):
    """A loss with an argument that others do not have."""

    def loss(self, statistics, mask, scale=1.0):
        return -scale * statistics.logp.sum()


#: Results of which one has a gradient, by what is compiled.
USES = {
    "no statistics": lambda head, h, y: (h.sum(), ll.linear_statistics(h, head, y, ())),
    "a loss of no statistics": lambda head, h, y: (
        h.sum(),
        ll.linear_token_loss(h, head, y, lambda s, labels: torch.ones(labels.shape), ()),
    ),
    "a loss of the labels": lambda head, h, y: ll.linear_token_loss(h, head, y, lambda s, y: -s.logp * y)[0],
    "a loss that asks what there is": lambda head, h, y, loss=_ReadsWhatThereIs(): loss(head, h, y),
    "a loss made in the function": lambda head, h, y: CE(label_smoothing=0.1)(head, h, y),
    "documented names": lambda head, h, y, loss=CE(): loss(head=head, hidden_states=h, labels=y),
    "documented names of a user's loss": lambda head, h, y, loss=_Scaled(): loss(head=head, hidden_states=h, labels=y),
    "a preference of log-probabilities": lambda head, h, y: ll.functional.dpo_loss(
        *h[..., 0], loss_type="hinge", beta=0.2
    ),
    "a policy of log-probabilities": lambda head, h, y: ll.functional.grpo_loss(
        h[..., 0], h.detach()[:, 0, 1], y >= 0, old_logps=h.detach()[..., 2], loss_type="gmpo", beta=0.0
    ),
}


@pytest.mark.parametrize("name", USES)
def test_uses(name):
    head, hidden, labels = _head_and_batch()
    torch._dynamo.reset()
    results, fullgraph = [], name != "a loss made in the function"
    for call in (torch.compile(USES[name], backend="eager", fullgraph=fullgraph), USES[name]):
        found = call(head, hidden, labels)
        results.append((tensors_of(found), calls.gradients(found, (hidden, *head.parameters()))))
    torch.testing.assert_close(*results)


class _Hooked(CE):
    """Cross-entropy times a parameter, with hooks that change what it gets and returns."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_forward_pre_hook(lambda module, args: (args[0], args[1] * 0.5, *args[2:]))
        self.register_forward_hook(lambda module, args, loss: 2 * module.scale * loss)


def test_a_loss_with_hooks_and_a_parameter_is_compiled():
    loss, plain, (head, *inputs) = _Hooked(), _Hooked(), _head_and_batch()
    torch._dynamo.reset()
    loss.compile(backend="eager", fullgraph=True)
    found, expected = (
        torch.autograd.grad(each(head, *inputs), [inputs[0], *head.parameters(), *each.parameters()])
        for each in (loss, plain)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("names", [("logp", "entropy"), ("logp", "selected_logps")])
def test_backward_by_tiles_of_columns(names):
    """In half precision, a gradient of many blocks is written once: of statistics that forward knows, or again."""
    (_, hidden, labels), head = _head_and_batch(9), nn.Linear(8, 500).bfloat16()
    hidden = hidden.detach().bfloat16().requires_grad_()
    options = ll.EngineOptions(chunk_size=1, workspace=2**16, strategy="two_pass")

    def call(hidden):
        columns = labels.clamp(min=0)[..., None] if "selected_logps" in names else None
        found = ll.linear_statistics(hidden, head, labels, names, selected=columns, options=options)
        return found.logp.square().sum() + sum(getattr(found, name).sum() for name in names)

    results = []
    for function in (torch.compile(call, backend="eager", fullgraph=True), call):
        loss = function(hidden)
        results.append([loss.detach(), *torch.autograd.grad(loss, [hidden, *head.parameters()])])
    torch.testing.assert_close(*results)


def test_no_object_of_a_graph_has_an_object_by_default():
    """torch 2.11 traces constructors of dataclasses, and of their defaults only numbers, text and tuples."""
    traced = [made for made in _NAMES.values() if isinstance(made, type) and dataclasses.is_dataclass(made)]
    objects = {
        (made.__name__, field.name)
        for made in traced
        for field in dataclasses.fields(made)
        if not isinstance(field.default, (bool, int, float, str, tuple, type(None), type(dataclasses.MISSING)))
    }
    assert len(traced) > 6
    assert not objects
