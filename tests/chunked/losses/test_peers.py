"""Equality with liger-kernel and TRL, where they are installed and right."""

import pytest
import torch

from liger_losses import linear_statistics
from liger_losses.chunked.losses.dpo import DPO_LOSSES
from tests.reference import assert_close_gradients, problem

pytestmark = pytest.mark.peers


def test_every_dpo_loss_type_of_trl_is_here():
    dpo_config = pytest.importorskip("trl", reason="TRL is not installed").DPOConfig
    field = next(f for f in __import__("dataclasses").fields(dpo_config) if f.name == "loss_type")
    text = field.metadata["help"]
    named = {name for name in DPO_LOSSES if f"`'{name}'`" in text}
    assert named == set(DPO_LOSSES), set(DPO_LOSSES) - named
    mentioned = {part.split("`")[0].strip("'") for part in text.split("`'")[1:]}
    assert mentioned <= set(DPO_LOSSES), mentioned - set(DPO_LOSSES)


def test_statistics_equal_trl():
    kernels = pytest.importorskip("trl.kernels", reason="TRL is not installed")
    from liger_losses import LogitTransform

    hidden, weight, labels, bias = problem(30, masked=0.0, bias=True)
    names = ("logp", "entropy", "log_sum_sq_probs", "mean_logit")
    theirs = kernels.ChunkedLogProbFunction.apply(
        hidden, weight, bias, labels, 0.8, 16, 5.0, 1.5, ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits")
    )
    ours = linear_statistics(hidden, weight, labels, names, bias=bias, transform=LogitTransform(0.8, 1.5, 5.0))
    for name, value in zip(names, theirs, strict=False):
        torch.testing.assert_close(getattr(ours, name), value, rtol=1e-4, atol=1e-5)
    inputs = (hidden, weight, bias)
    assert_close_gradients(
        (ours.logp + 0.1 * ours.entropy).sum(), (theirs[0] + 0.1 * theirs[1]).sum(), inputs, rtol=1e-3, atol=1e-5
    )
