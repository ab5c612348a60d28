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


def check_rows(rows, columns, every_option, backend):
    """In several parts, of which some have only logits of -inf; rows of a wider matrix."""
    g = torch.Generator(DEVICE).manual_seed(0)
    projected = 30 * torch.randn(rows, columns + 7, device=DEVICE, generator=g)[:, :columns]
    projected[1:2, columns // 4 :] = float("-inf")
    epilogue, wide = Epilogue(), Epilogue()
    if every_option:
        bias = torch.randn(columns, device=DEVICE, generator=g)
        bias[columns // 4 : columns * 3 // 4] = float("-inf")
        transform = LogitTransform(torch.linspace(0.5, 2.0, rows, device=DEVICE), 1.2)
        epilogue, wide = Epilogue(transform, bias), Epilogue(transform, bias.double())
    lse = wide(projected.double()).logsumexp(1)
    found = sum_of_probabilities(projected, (lse - 1).float(), epilogue, scratch=2**20, backend=backend)
    torch.testing.assert_close(found.log(), torch.ones_like(found), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("every_option", [False, True])
def test_rows_that_exist(every_option, backend, monkeypatch):
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(row_lse, "_COLUMNS", 32)
    check_rows(5, 150, every_option, backend)
