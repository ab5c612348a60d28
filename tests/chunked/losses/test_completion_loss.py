"""What losses on completions have in common."""

import pytest
import torch

from liger_losses import (
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
)
from liger_losses.chunked.engine.tokens import Counting
from tests.reference import problem


def test_ligers_chunk_size_of_completions_does_not_size_blocks():
    for loss in (LigerFusedLinearDPOLoss(chunk_size=1), LigerFusedLinearGRPOLoss(chunk_size=1)):
        assert loss.chunk_size == 1
        assert loss.options.chunk_size is None


def dpo(hidden, weight, labels):
    return LigerFusedLinearDPOLoss()(weight, hidden, labels, None, hidden, weight)


def orpo(hidden, weight, labels):
    return LigerFusedLinearORPOLoss()(weight, hidden, labels)


def kto(hidden, weight, labels):
    loss, marks = LigerFusedLinearKTOLoss(use_ref_model=True), torch.tensor([True, False])
    return loss(hidden, weight, labels, None, marks, hidden, weight, kl=0.3)


def grpo(hidden, weight, labels):
    loss, ids, mask = LigerFusedLinearGRPOLoss(), labels.clamp(min=0), labels >= 0
    return loss(hidden, weight, ids, mask, torch.tensor([1.0, -1.0]), ref_input=hidden, ref_weight=weight)


@pytest.mark.parametrize("call", [dpo, orpo, kto, grpo])
def test_policy_and_reference_share_one_selection_of_tokens(call, monkeypatch):
    """It costs a host synchronization."""
    selected, count = [], Counting.__init__

    def counted(counting, *arguments):
        selected.append(arguments)
        return count(counting, *arguments)

    monkeypatch.setattr(Counting, "__init__", counted)
    call(*problem(shape=(2, 5))[:3])
    assert len(selected) == 1
