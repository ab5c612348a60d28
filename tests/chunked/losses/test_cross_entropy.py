"""Cross-entropy beside its golden results: weights of tokens and classes."""

import pytest
import torch

from tests.losses import CE
from tests.reference import double, problem
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
