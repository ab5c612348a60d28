"""How much of the softmax rows of projections have, and sums of tiles, against PyTorch's."""

import pytest
import torch

from liger_losses.kernels import row_lse
from liger_losses.kernels._triton import tl
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.online_softmax import merge_sums
from liger_losses.kernels.row_lse import sum_of_probabilities

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


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_groups_of_columns_that_are_infinite(softcap, backend, monkeypatch):
    """Columns of -inf are left out, all of a group's too; the sum of a row with one of inf is inf without a cap."""
    if backend == "triton" and tl is None:
        pytest.skip("needs triton")
    monkeypatch.setattr(row_lse, "_COLUMNS", 32)
    z = 10 * torch.randn(3, 150, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    z[1, 20:100], z[2, 40] = float("-inf"), float("inf")
    lse, epilogue = torch.full((3,), 4.0, device=DEVICE), Epilogue(LogitTransform(softcap=softcap))
    found = sum_of_probabilities(z, lse, epilogue, scratch=2**20, backend=backend)
    capped = z.double() if softcap is None else softcap * (z.double() / softcap).tanh()
    expected = (capped.masked_fill(z == float("-inf"), float("-inf")) - 4).exp().sum(1)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=0)
