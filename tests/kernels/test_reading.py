"""What the host asks of labels before a model runs: asked once, and read by the loss that is given them."""

import pytest
import torch

from liger_losses import LigerFusedLinearCrossEntropyLoss, linear_logps, prefetch_labels
from liger_losses.kernels import reading
from tests.reference import problem


@pytest.fixture
def asked(monkeypatch):
    """How often labels were asked about."""
    calls, facts = [], reading.label_facts
    monkeypatch.setattr(reading, "label_facts", lambda *given, **how: calls.append(1) or facts(*given, **how))
    reading._asked.clear()
    return calls


def test_a_loss_reads_what_was_asked_before(asked):
    hidden, weight, labels, _ = problem()
    expected = LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)
    assert len(asked) == 1
    prefetch_labels(labels)
    assert len(asked) == 2
    for given in (labels, labels.view(-1)):
        loss = LigerFusedLinearCrossEntropyLoss()(weight, hidden.view(*given.shape, -1), given)
        torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    assert len(asked) == 2


@pytest.mark.parametrize("change", ["copied", "changed", "a part", "another ignore_index"])
def test_other_labels_are_asked_about_again(change, asked):
    hidden, weight, labels, _ = problem()
    options = {"ignore_index": -1} if change == "another ignore_index" else {}
    labels = labels.where(labels != -100, options.get("ignore_index", -100))
    reading.ask_about_labels(labels)
    if change == "copied":
        labels = labels.clone()
    elif change == "changed":
        labels[0].fill_(-100)
    elif change == "a part":
        hidden, labels = hidden[1:], labels[1:]
    found = linear_logps(hidden, weight, labels, **options)
    assert len(asked) == 2
    torch.testing.assert_close(found, linear_logps(hidden, weight, labels.clone(), **options), rtol=0, atol=0)


def test_labels_whose_changes_are_not_counted_are_asked_about_again(asked):
    hidden, weight, labels, _ = problem()
    with torch.inference_mode():
        labels = labels.clone()
        reading.ask_about_labels(labels)
        linear_logps(hidden, weight, labels)
    assert len(asked) == 2


def test_what_was_asked_is_forgotten(asked):
    kept = [torch.zeros(3, dtype=torch.int64) for _ in range(20)]
    for labels in kept:
        reading.ask_about_labels(labels)
    reading.ask_about_labels(torch.zeros(3))
    reading.ask_about_labels(torch.zeros(3, 4, dtype=torch.int64)[:, 1:])
    assert len(asked) == 20
    assert 1 <= len(reading._asked) <= 8
    del kept, labels
    assert not reading._asked


def test_labels_that_the_loss_would_copy_are_not_prefetched():
    with pytest.raises(ValueError, match=r"labels\.contiguous\(\)"):
        prefetch_labels(torch.zeros(3, 4, dtype=torch.int64)[:, 1:])
    with pytest.raises(TypeError, match="int64"):
        prefetch_labels(torch.zeros(3))


def test_a_compiled_function_prefetches_nothing(asked):
    @torch.compile(fullgraph=True, backend="eager")
    def compiled(labels):
        prefetch_labels(labels)
        return labels + 1

    labels = torch.arange(3)
    assert torch.equal(compiled(labels), labels + 1)
    assert not asked
