"""Equality with liger-kernel and TRL, where they are installed and right."""

import pytest
import torch

from liger_losses import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
    linear_statistics,
)
from liger_losses.chunked.losses.dpo import DPO_LOSSES
from tests.reference import problem

pytestmark = pytest.mark.peers


def stacked():
    hidden, weight, labels, _ = problem(shape=(6, 9), masked=0.3)
    ref_hidden, ref_weight, _, _ = problem(shape=(6, 9), seed=1)
    return hidden, weight, labels, ref_hidden.detach(), ref_weight.detach()


def assert_same(ours, theirs, arguments, hidden, weight):
    results = []
    for module in (ours, theirs):
        loss, metrics = module(*arguments)
        results.append((loss, metrics, torch.autograd.grad(loss, (hidden, weight))))
    (a, a_metrics, a_grads), (b, b_metrics, b_grads) = results
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a_grads, b_grads, rtol=1e-4, atol=1e-5)
    assert len(a_metrics) == len(b_metrics)
    for i, (x, y) in enumerate(zip(a_metrics, b_metrics, strict=True)):
        if i not in (2, 3):  # mean logits: theirs also average over prompts and padding
            torch.testing.assert_close(x, torch.as_tensor(y, dtype=x.dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss_type", sorted(set(DPO_LOSSES) - {"ipo", "aot", "aot_unpaired", "sft", "sigmoid_norm"}))
def test_dpo_equals_liger_kernel(loss_type):
    chunked = pytest.importorskip("liger_kernel.chunked_loss", reason="liger-kernel is not installed")
    hidden, weight, labels, ref_hidden, ref_weight = stacked()
    options = {
        "loss_type": loss_type,
        "label_smoothing": 0.0 if loss_type == "sigmoid" else 0.1,  # there, sigmoid ignores it
        "compute_nll_loss": True,
        "compiled": False,
    }
    assert_same(
        LigerFusedLinearDPOLoss(**options),
        chunked.LigerFusedLinearDPOLoss(**options),
        (weight, hidden, labels, None, ref_hidden, ref_weight, None),
        hidden,
        weight,
    )


@pytest.mark.parametrize("ours", [LigerFusedLinearCPOLoss, LigerFusedLinearSimPOLoss, LigerFusedLinearORPOLoss])
def test_reference_free_losses_equal_liger_kernel(ours):
    chunked = pytest.importorskip("liger_kernel.chunked_loss", reason="liger-kernel is not installed")
    hidden, weight, labels, _, _ = stacked()
    theirs = getattr(chunked, ours.__name__)
    bias = torch.randn(61)
    assert_same(ours(), theirs(compiled=False), (weight, hidden, labels, bias), hidden, weight)


def test_same_constructor_keywords_as_liger_kernel():
    import inspect

    chunked = pytest.importorskip("liger_kernel.chunked_loss", reason="liger-kernel is not installed")
    for ours in (
        LigerFusedLinearDPOLoss,
        LigerFusedLinearCPOLoss,
        LigerFusedLinearSimPOLoss,
        LigerFusedLinearORPOLoss,
    ):
        theirs = list(inspect.signature(getattr(chunked, ours.__name__)).parameters)
        assert list(inspect.signature(ours).parameters)[: len(theirs)] == theirs


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
    torch.testing.assert_close(
        torch.autograd.grad((ours.logp + 0.1 * ours.entropy).sum(), inputs),
        torch.autograd.grad((theirs[0] + 0.1 * theirs[1]).sum(), inputs),
        rtol=1e-3,
        atol=1e-5,
    )
