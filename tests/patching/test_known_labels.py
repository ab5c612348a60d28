"""Patched models, TRL's fused head and loss_inputs ask about their labels before the layers run, and only then."""

import copy
import pickle

import pytest
import torch

from liger_losses import LigerFusedLinearCrossEntropyLoss, loss_inputs, patch, unpatch
from liger_losses.kernels import reading
from tests.models import small

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture
def model():
    return small(vocab_size=64, num_key_value_heads=2, pad_token_id=0)


@pytest.fixture
def events(model, monkeypatch):
    """In their order: labels that are asked about, and the first layer's runs."""
    found, facts = [], reading.label_facts
    monkeypatch.setattr(reading, "label_facts", lambda *given, **how: found.append("asked") or facts(*given, **how))
    model.model.layers[0].register_forward_pre_hook(lambda *given: found.append("layer"))
    reading._asked.clear()
    return found


def batch():
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100
    return ids, labels


def test_a_patched_model(model, events):
    ids, labels = batch()
    expected = model(input_ids=ids, labels=labels).loss
    before, attributes = model.loss_function, set(vars(model))
    patch(model)
    model.train()
    for _ in range(2):
        del events[:]
        loss = model(input_ids=ids, labels=labels).loss
        assert events == ["asked", "layer"]
        torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(copy.deepcopy(model)(input_ids=ids, labels=labels).loss, expected)
    assert pickle.loads(pickle.dumps(model.loss_function)).function is before
    del events[:]
    logits = model(input_ids=ids).logits
    torch.testing.assert_close(model.loss_function(logits, labels, 64), expected)
    given = model(input_ids=ids, labels=labels, shift_labels=labels.roll(-1, -1)).loss
    assert not torch.equal(given, expected)
    unpatch(model)
    assert model.loss_function is before
    assert set(vars(model)) == attributes
    del events[:]
    torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, expected)
    assert events == ["layer"]


def test_the_inputs_of_a_loss(model, events):
    ids, labels = batch()
    given = loss_inputs(model, input_ids=ids, labels=labels)
    LigerFusedLinearCrossEntropyLoss()(*given).backward()
    assert events == ["asked", "layer"]


def test_trls_fused_head(model, events):
    pytest.importorskip("trl", reason="TRL is not installed")
    from liger_losses.trl.fused_head import add_fused_lm_head

    ids, labels = batch()
    add_fused_lm_head(model)
    model(input_ids=ids, labels=labels, fused_lm_head=True).loss.backward()
    assert events == ["asked", "layer"]


def test_labels_that_a_hook_changes(model):
    """After the model has asked about them: the loss is of what they are by then."""
    ids, labels = batch()
    model.model.register_forward_pre_hook(lambda *given: [labels[:, :7].fill_(-100)].clear())
    patch(model)
    found = model(input_ids=ids, labels=labels).loss
    unpatch(model)
    torch.testing.assert_close(found, model(input_ids=ids, labels=labels).loss)


def test_a_loss_type_that_is_set_later(model):
    ids, labels = batch()
    patch(model)
    model.loss_type = "ForMaskedLM"
    found = model(input_ids=ids, labels=labels).loss
    unpatch(model)
    torch.testing.assert_close(found, model(input_ids=ids, labels=labels).loss)
