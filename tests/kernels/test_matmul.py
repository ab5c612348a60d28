"""Products into memory that is there, rounded once."""

import pytest
import torch

from liger_losses.kernels import matmul
from liger_losses.kernels.matmul import matmul_into


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matmul_rounds_once(dtype, out_dtype, accumulate):
    torch.manual_seed(0)
    a, b, start = torch.randn(7, 300).to(dtype), torch.randn(300, 5).to(dtype), torch.randn(7, 5).to(out_dtype)
    exact = a.double() @ b.double() + (start.double() if accumulate else 0)
    out = matmul_into(start.clone(), a, b, accumulate=accumulate)
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(out_dtype).eps, atol=1e-4)


@pytest.mark.parametrize("sizes", [(37, 16, 24), (32, 19, 24), (32, 16, 29), (37, 19, 29), (5, 3, 7)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_products_of_odd_sizes_are_whole(sizes, accumulate, monkeypatch):
    """On a GPU, products are cut where a size is no multiple of 8: an aligned part, and the rest."""
    monkeypatch.setattr(matmul, "MIN_CUT_SIZE", 8)
    rows, terms, columns = sizes
    g = torch.Generator().manual_seed(0)
    a, b, out = (
        torch.randn(*s, generator=g, dtype=torch.float64) for s in ((rows, terms), (terms, columns), sizes[::2])
    )
    expected = a @ b + (out if accumulate else 0)
    out = out if accumulate else out.fill_(float("nan"))
    torch.testing.assert_close(matmul._aligned(out, a, b, accumulate), expected)


def test_matmul_into_strided_output():
    a, b = torch.randn(6, 4), torch.randn(4, 3)
    buffer = torch.zeros(6, 8)
    matmul_into(buffer[:, 2:5], a, b)
    torch.testing.assert_close(buffer[:, 2:5], a @ b)
    assert (buffer[:, [0, 1, 5, 6, 7]] == 0).all()
