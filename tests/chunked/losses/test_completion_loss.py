"""What losses on completions have in common."""

import pytest
import torch

from liger_losses import Completions, Head, LogitTransform
from tests.losses import DPO, GRPO, KTO
from tests.reference import problem


def test_ligers_chunk_size_of_completions_does_not_size_blocks():
    for loss in (DPO(chunk_size=1), GRPO(chunk_size=1)):
        assert loss.chunk_size == 1
        assert loss.options.chunk_size is None


def test_a_temperature_of_each_token_divides_policy_and_reference_in_every_form():
    """The same as hidden states that are divided by it, as there is no bias."""
    hidden, weight, labels = (part.detach() for part in problem(shape=(4, 5))[:3])
    ref = hidden.flip(0)
    t = torch.linspace(0.5, 2.0, labels.numel(), dtype=hidden.dtype).view(labels.shape)
    nll_target = torch.where(labels < 0, 1, labels)

    def halves(divided, part):
        by = t[part][..., None] if divided else 1
        given = {} if divided else {"temperature": t[part]}
        return Completions(hidden[part] / by, labels[part], ref[part] / by, **given)

    pairs, unpaired = DPO(compute_nll_loss=True), KTO(use_ref_model=True)
    marks, first, second = torch.tensor([True, False, True, False]), slice(2), slice(2, None)
    by = t[..., None]
    for ours, expected in (
        (
            pairs(weight, hidden, labels, None, ref, weight, nll_target=nll_target, temperature=t),
            pairs(weight, hidden / by, labels, None, ref / by, weight, nll_target=nll_target),
        ),
        (
            pairs(weight, halves(False, first), halves(False, second), ref_weight=weight),
            pairs(weight, halves(True, first), halves(True, second), ref_weight=weight),
        ),
        (
            unpaired(hidden, weight, labels, None, marks, ref, weight, kl=0.1, temperature=t),
            unpaired(hidden / by, weight, labels, None, marks, ref / by, weight, kl=0.1),
        ),
        (
            unpaired(weight, halves(False, first), halves(False, second), ref_weight=weight, kl=0.1),
            unpaired(weight, halves(True, first), halves(True, second), ref_weight=weight, kl=0.1),
        ),
    ):
        torch.testing.assert_close(ours[0], expected[0])
        torch.testing.assert_close(ours[1][:2], expected[1][:2])


def test_a_temperature_that_does_not_fit_completions_is_an_error():
    hidden, weight, labels = (part.detach() for part in problem(shape=(4, 5))[:3])
    t, loss = torch.ones(labels.shape, dtype=hidden.dtype), DPO(use_ref_model=False)
    one, other = Completions(hidden[:2], labels[:2], temperature=t[:2]), Completions(hidden[2:], labels[2:])
    with pytest.raises(ValueError, match="give temperature for both the chosen and the rejected"):
        loss(weight, one, other)
    with pytest.raises(ValueError, match="give the temperature in Completions"):
        loss(weight, other, other, temperature=t)
    with pytest.raises(ValueError, match="one for each hidden state"):
        loss(weight, hidden, labels, temperature=t[:, 0])
    with pytest.raises(ValueError, match="given twice: the loss was built with 2.0"):
        DPO(use_ref_model=False, temperature=2.0)(weight, hidden, labels, temperature=t)
    with pytest.raises(ValueError, match="given twice: with the completions, and by a head"):
        loss(Head(weight, transform=LogitTransform(2.0)), hidden, labels, temperature=t)
