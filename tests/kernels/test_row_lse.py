"""How much of the softmax rows of projections have, and sums of tiles, against PyTorch's."""

import pytest
import torch

from liger_losses.kernels._triton import tl
from liger_losses.kernels.online_softmax import merge_sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
