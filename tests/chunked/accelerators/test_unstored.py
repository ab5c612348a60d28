"""Statistics by kernels that store no logits, against float64 and beside the core."""

import pytest
import torch

from liger_losses import EngineOptions, Head, LogitTransform, linear_logps, linear_statistics
from liger_losses.kernels.softmax_stats import STATISTICS
from tests.chunked.accelerators.test_exponentials import inputs, plans
from tests.reference import double, plain_logits, plain_statistics

pytestmark = pytest.mark.usefixtures("small_tiles", "default_gpu")
pytest.importorskip("triton")


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("names", [("logp",), ("logp", "lse", "entropy", "mean_logit"), STATISTICS], ids=len)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics(names, compact, dtype):
    hidden, weight, labels, _ = inputs(unlikely=False, dtype=dtype)
    bias, weights = torch.linspace(-1, 1, 90, dtype=dtype), torch.linspace(0, 2, 90)
    head, options = Head(weight, bias, LogitTransform(0.7, 1.3, 8.0)), EngineOptions(compact=compact, backend="triton")

    def call():
        with torch.no_grad():
            asked = {"statistics": {*names} - {"argmax"}, "metrics": {*names} & {"argmax"}}
            return linear_statistics(hidden, head, labels, **asked, class_weight=weights, options=options)

    used, found = plans(call)
    assert used == ["statistics"]
    exact = plain_statistics(
        *double(hidden, weight), labels, bias.double(), weights.double(), temperature=0.7, logit_scale=1.3, softcap=8.0
    )
    exact["argmax"] = plain_logits(*double(hidden, weight, bias)).argmax(-1) * (labels >= 0)
    for name in names:
        torch.testing.assert_close(getattr(found, name).double(), exact[name].double(), rtol=1e-4, atol=1e-4)


def test_the_first_of_two_passes_stores_nothing():
    """Where blocks are not kept until backward, as in a pass without gradients."""
    hidden, weight, labels, _ = inputs(unlikely=False)
    options = {"workspace": 12_000, "backend": "triton"}
    with torch.no_grad():
        alone = linear_logps(hidden, weight, labels, **options)
    used, together = plans(lambda: linear_logps(hidden, weight, labels, **options))
    assert used == ["core", "statistics"]
    assert torch.equal(alone, together)
