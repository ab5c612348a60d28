"""Rows of :mod:`tests.chunked.combinations` on a GPU: one token, many, and sizes that fill no tile."""

import functools

import pytest
import torch

from tests.chunked.combinations import DIVERGENCES, Sizes, check, rows
from tests.processes import drawn

pytestmark = pytest.mark.gpu
#: Of the vocabularies, one needs more than 16 bits, and few are multiples of what the kernels' tiles have.
SIZES = (
    Sizes((1, 1), 576, 64, 50257, 8),
    Sizes((11, 47), 576, 192, 1031, 8),
    Sizes((10, 100), 896, 128, 15163, 8),
    Sizes((3, 100), 33, 10, 77, 8),
    Sizes((1, 131), 72, 64, 50257, 8),
)
LARGEST = Sizes((10, 100), 896, 128, 151643, 8), Sizes((1, 100003), 64, 33, 1031, 8)
#: What the kernels choose by themselves, in each dtype; in large batches, no label's logit is far from the others'.
ALONE = {"backend": (None,), "labels": ("random",), "sizes": SIZES}
BLOCKS = ("default", "small workspace")
ROWS = dict.fromkeys(
    [
        *rows(**ALONE),
        *rows(
            3,
            **ALONE,
            asks=("logp", "statistics", "token loss", "selected"),
            weight=("dense", "frozen"),
            bias=("none", "trained"),
            targets=("one",),
            teacher=("model",),
            blocks=BLOCKS,
            strategy=(None, "two_pass", "resident"),
            layout=("contiguous",),
            invariant=(False,),
        ),
        *rows(
            3,
            **ALONE,
            asks=DIVERGENCES,
            weight=("dense",),
            teacher=("model", "wider"),
            blocks=BLOCKS,
            layout=("contiguous",),
            invariant=(False,),
        ),
        *rows(
            3,
            **(ALONE | {"sizes": LARGEST}),
            asks=("logp", "token loss"),
            weight=("dense", "frozen"),
            bias=("none",),
            transform=("none",),
            targets=("one",),
            blocks=("default",),
            strategy=(None,),
            dtype=("bfloat16",),
            layout=("contiguous",),
            invariant=(False,),
        ),
    ]
)


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch):
    """Tensors that name no device; random numbers are those of a CPU."""
    for name in ("rand", "randn", "randint"):
        monkeypatch.setattr(torch, name, functools.partial(drawn, getattr(torch, name)))
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_any_two_together(row):
    check(row)
