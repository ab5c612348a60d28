"""Cross-entropy beside its golden results: weights of tokens and classes, and batches of nothing."""

import math

import pytest
import torch

from liger_losses.chunked.losses.cross_entropy import TOKEN_SCALINGS
from tests.losses import CE
from tests.reference import assert_close_gradients, double, problem
from tests.results.test_work import Work
from tests.seam import leave_out_zero_rows


def test_ce_weight_moves_with_the_module_and_is_not_saved():
    module = CE(ce_weight=torch.ones(3)).to(torch.float64)
    assert (module.ce_weight.dtype, module.replace(reduction="sum").ce_weight.dtype) == (torch.float64, torch.float64)
    assert module.state_dict() == {}
    assert module.replace(ce_weight=torch.zeros(3)).ce_weight.sum() == 0
    assert module.ce_weight.sum() == 3


def test_tokens_of_weight_0_have_no_products_of_gradients():
    hidden, weight, labels, _ = problem(masked=0.0)
    flops = []
    for least in (1.0, 0.0):
        weights = torch.where(torch.arange(labels.numel()) % 3 == 0, 1.0, least).view(labels.shape)
        with leave_out_zero_rows(), Work() as work:
            CE(return_token_accuracy=True)(weight, hidden, labels, token_weights=weights).loss.backward()
        flops.append(work.flops)
    assert flops[1] < 0.6 * flops[0]


#: What a token's loss is multiplied by (arXiv:2508.05629, 2508.11408, 2601.02151), from all log-probabilities and the
#: label's.
SCALINGS = {
    "probability": lambda log_p, logp: logp.exp(),
    "uncertainty": lambda log_p, logp: logp.exp() * (1 - logp.exp()),
    "entropy": lambda log_p, logp: (
        torch.distributions.Categorical(logits=log_p.topk(20).values).entropy() / math.log(20)
    ),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("scaling", [name for name in TOKEN_SCALINGS if name != "none"])
def test_token_scaling(scaling, reduction):
    """Of sure tokens too, and of a batch without labels."""
    for scale in (1.0, 60.0):
        hidden, weight, labels, _ = problem(dtype=torch.float64, scale=scale)
        log_p, mask = (hidden @ weight.t()).log_softmax(-1), labels >= 0
        logp = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        losses = torch.where(mask, -SCALINGS[scaling](log_p.detach(), logp.detach()) * logp, 0.0)
        expected = losses.sum() / (mask.sum() if reduction == "mean" else 1)
        loss = CE(token_scaling=scaling, reduction=reduction)(weight, hidden, labels)
        torch.testing.assert_close(
            loss if reduction == "none" else loss[None], losses if reduction == "none" else expected[None]
        )
        assert_close_gradients(loss.sum(), expected, (hidden, weight))
    nothing = CE(token_scaling=scaling)(weight, hidden, torch.full_like(labels, -100))
    assert nothing == 0
    assert not any(g.any() for g in torch.autograd.grad(nothing, (hidden, weight)))


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_smoothing_over_the_others(share):
    """Megatron-core's: the label has ``1 - share``, and each other entry an equal part of the rest."""
    hidden, weight, labels, _ = problem(dtype=torch.float64)
    log_p, mask = (hidden @ weight.t()).log_softmax(-1), labels >= 0
    soft = torch.full_like(log_p, share / (len(weight) - 1)).scatter(1, labels.clamp(min=0)[:, None], 1 - share)
    expected = -((soft * log_p).sum(1) * mask).sum() / mask.sum()
    loss = CE(label_smoothing=share, smooths_others=True)(weight, hidden, labels)
    torch.testing.assert_close(loss, expected)
    assert_close_gradients(loss, expected, (hidden, weight))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("weighted", ["tokens", "classes", "both"])
@pytest.mark.parametrize(
    ("dtype", "of_weights"),
    [(torch.float64, torch.float32), (torch.float32, torch.float64), (torch.float32, torch.float16)],
)
def test_weights_of_another_dtype(dtype, of_weights, weighted, heads):
    """What calls in fp64 divide by is fp64."""
    hidden, weight, labels, _ = problem(3000, 8, 50, dtype=dtype)
    weights = torch.rand(3000, dtype=of_weights) if weighted != "classes" else None
    classes = torch.rand(50, dtype=of_weights) if weighted != "tokens" else None
    found = []
    for h, w, *given in ((hidden, weight, classes, weights), double(hidden, weight, classes, weights)):
        loss = CE(given[0])(w, h if heads == 1 else [h] * heads, labels, token_weights=given[1])
        loss = loss if heads == 1 else loss[0]
        found.append([loss, *torch.autograd.grad(loss, (h, w))])
    assert found[0][0].dtype == dtype
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
    torch.testing.assert_close(*found, check_dtype=False, **tolerance)
