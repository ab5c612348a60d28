"""Statistics of parts of the vocabulary make those of the whole."""

import pytest
import torch

from liger_losses.kernels._triton import tl
from liger_losses.kernels.online_softmax import merge, merge_sums, places
from tests.kernels.cases import DEVICE
from tests.reference import relative_error


def test_confident_tokens_keep_their_digits():
    """Where 1 - p is far below fp32's rounding of 1."""
    others = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    lse = torch.stack([torch.full((20,), 1000.0), 960 + others[:, 0], 970 + others[:, 1]])
    parts = {"lse": lse, "logp": torch.tensor([[0.0], [torch.inf], [torch.inf]]).expand(3, 20)}
    found = merge(parts, [1, 7, 9])["logp"]
    exact = -(lse[1:].double() - 1000).exp().sum(0).log1p()
    assert found.abs().max() < 1e-11
    assert relative_error(found, exact) < 1e-6


def test_two_statistics_of_one_place_are_refused():
    with pytest.raises(ValueError, match="one is there twice: lse, logp, lse"):
        places(("lse", "logp", "lse"))


def test_sums_of_tiles():
    """More tiles than are read at once; tiles whose logits are all -inf."""
    if tl is None:
        pytest.skip("needs triton")
    z = 30 * torch.randn(1100, 4, 11, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    z[700:, :, 3] = float("-inf")
    tops = z.amax(1).clamp(min=-3.0e38)
    partial, lse = torch.stack([tops, (z - tops[:, None]).exp().sum(1)]), torch.empty(11, device=DEVICE)
    merge_sums({"lse": lse}, partial, 4400)
    torch.testing.assert_close(lse, z.flatten(0, 1).logsumexp(0))
