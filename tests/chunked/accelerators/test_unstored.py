"""Statistics by kernels that store no logits."""

import pytest
import torch

from liger_losses import linear_logps
from tests.chunked.accelerators.test_exponentials import inputs, plans

pytestmark = pytest.mark.usefixtures("small_tiles", "default_gpu")
pytest.importorskip("triton")


def test_the_first_of_two_passes_stores_nothing():
    """Where blocks are not kept until backward, as in a pass without gradients."""
    hidden, weight, labels, _ = inputs()
    options = {"workspace": 12_000, "backend": "triton"}
    with torch.no_grad():
        alone = linear_logps(hidden, weight, labels, **options)
    used, together = plans(lambda: linear_logps(hidden, weight, labels, **options))
    assert used == ["core", "statistics"]
    assert torch.equal(alone, together)
