"""Sequences without a coefficient run without a gradient: the same outputs, and gradients of any loss."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_losses import sequences, split_by_coefficient

B, T, H, V = 5, 4, 8, 11
Outputs = namedtuple("Outputs", "logps entropy missing")


def batch():
    g = torch.Generator().manual_seed(0)
    return torch.randn(B, T, H, generator=g), torch.randint(V, (B, T), generator=g)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, V))


class Model:
    """Counts the sequences that run with a gradient, and without."""

    def __init__(self, checkpointed=False):
        self.layers, self.checkpointed, self.ran = layers(), checkpointed, {True: [], False: []}
        self.hidden_states, self.labels = batch()

    def __call__(self, rows):
        self.ran[torch.is_grad_enabled()].append(rows.tolist())
        hidden_states, labels = self.hidden_states[rows], self.labels[rows]
        if self.checkpointed:
            logits = checkpoint(self.layers, hidden_states, use_reentrant=False)
        else:
            logits = self.layers(hidden_states)
        logps = logits.float().log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1)
        return {"a": Outputs(logps.gather(-1, labels[..., None])[..., 0], entropy, None), "b": [entropy]}


def evaluated(coefficients, split, checkpointed=False, **options):
    model = Model(checkpointed)
    found = split_by_coefficient(model, coefficients, **options) if split else model(torch.arange(B))
    per_token = coefficients if coefficients.dim() == 2 else coefficients[:, None]
    loss = ((found["a"].logps + found["b"][0]) * per_token).sum() / 7
    loss.backward()
    assert found["a"].missing is None
    return loss.detach(), found["a"].entropy.detach(), [p.grad for p in model.layers.parameters()], model.ran


COEFFICIENTS = {
    "some": torch.tensor([0.0, 1.0, 0.0, -2.0, 0.0]),
    "by token": torch.zeros(B, T).index_put((torch.tensor([3, 3]), torch.tensor([1, 2])), torch.tensor(0.5)),
    "none": torch.zeros(B),
    "all": torch.ones(B),
    "integers": torch.tensor([0, 1, 0, 0, 2]),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_outputs_and_gradients_are_those_of_all(name, checkpointed, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = evaluated(COEFFICIENTS[name], False, checkpointed)
        found = evaluated(COEFFICIENTS[name], True, checkpointed)
    torch.testing.assert_close(found[:3], expected[:3], **({"rtol": 0.02, "atol": 0.02} if autocast else {}))
    trained = COEFFICIENTS[name].view(B, -1).any(-1)
    trained[0] |= not trained.any()  # the first one, where none has a coefficient
    with_gradient, without = (part.nonzero()[:, 0].tolist() for part in (trained, ~trained))
    assert found[3] == {True: [with_gradient], False: [without] * (without != [])}


def test_something_small_stands_in_where_none_has_a_coefficient():
    """Its gradient is zero, and not None."""
    model = Model()
    found = split_by_coefficient(model, torch.zeros(B), stand_in=lambda: model(torch.tensor([4])))
    assert model.ran == {True: [[4]], False: [[0, 1, 2, 3, 4]]}
    torch.testing.assert_close(found["a"].logps, Model()(torch.arange(B))["a"].logps)
    (found["a"].logps * torch.zeros(B, 1)).sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.layers.parameters())


def test_without_gradients_all_run_at_once():
    model = Model()
    with torch.no_grad():
        split_by_coefficient(model, COEFFICIENTS["some"])
    assert model.ran == {True: [], False: [[0, 1, 2, 3, 4]]}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_all_gradients(value):
    """As it would if all sequences had run together, so that gradient scalers and checks see it."""
    model = Model()
    found = split_by_coefficient(model, COEFFICIENTS["some"])
    (found["a"].logps * torch.tensor([value, 1.0, 0.0, 1.0, 0.0])[:, None]).sum().backward()
    assert all(p.grad.isnan().all() for p in model.layers.parameters())


@pytest.mark.parametrize("queues", [True, False])
def test_a_gradient_where_there_is_no_coefficient_is_an_error(queues, monkeypatch):
    """At the end of backward; at once where torch has no name for that."""
    if not queues:
        monkeypatch.setattr(sequences, "queue_callback", None)
    model = Model()
    found = split_by_coefficient(model, COEFFICIENTS["some"])
    with pytest.raises(RuntimeError, match=r"a sequence whose coefficient is 0 has a gradient"):
        found["a"].logps.sum().backward()
    assert all(p.grad is None for p in model.layers.parameters())  # where the host can read the values at once


@pytest.mark.parametrize("outputs", [torch.zeros(4, T), torch.tensor(1.0), "words"], ids=["4", "scalar", "words"])
def test_another_number_of_outputs_is_an_error(outputs):
    with pytest.raises(ValueError, match=r"forward must return tensors \[2, ...\] for 2 sequences, or .*, got "):
        split_by_coefficient(lambda rows: outputs, COEFFICIENTS["some"])
