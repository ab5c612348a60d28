"""Everything that a call may have, together: each row of :mod:`tests.chunked.combinations` is the plain computation."""

from pathlib import Path

import pytest
import torch

from liger_losses.chunked.engine import blocks
from liger_losses.kernels import row_sums
from tests.chunked.combinations import COLUMNS, Sizes, check, documentation, rows
from tests.kernels.cases import interpreted
from tests.processes import case_named

#: Through the kernels, which take long in Triton's interpreter: fewer values of some columns.
TRITON = {
    "asks": ("logp", "statistics", "token loss", "kept", "reverse KL", "JSD", "cosine"),
    "weight": ("dense", "frozen", "adapters"),
    "targets": ("one", "two of one head"),
    "teacher": ("model", "wider"),
    "blocks": ("default", "chunks", "small workspace"),
    "strategy": (None, "two_pass"),
    "layout": ("contiguous", "strided", "nothing trained"),
    "dtype": ("bfloat16", "float32", "float16"),
    "backend": ("triton",),
    "upstream": ("all", "some"),
}


@pytest.fixture(autouse=True)
def many_parts(monkeypatch):
    """Statistics of tiles are merged several times; long sums over kept columns are taken in parts and slices."""
    monkeypatch.setattr(blocks, "MOST_TILES", 2)
    monkeypatch.setattr(row_sums, "_PART", 4)
    monkeypatch.setattr(row_sums, "GATHERED_BYTES", 3000)


#: In so small workspaces, quantized rows are dequantized where they are needed, and statistics of tiles merged.
WALKS = {
    "asks": ("logp", "statistics", "metrics", "token loss"),
    "weight": ("quantized", "quantized with adapters"),
    "targets": ("one", "two heads"),
    "teacher": ("model",),
    "blocks": ("small workspace",),
    "strategy": (None,),
    "invariant": (False,),
    "backend": ("torch",),
}
#: Blocks that would add to a half-precision gradient of the weight dozens of times.
MANY_BLOCKS = {
    "asks": ("logp", "token loss", "selected", "reverse KL", "JSD", "cosine"),
    "weight": ("dense", "adapters"),
    "bias": ("none", "trained"),
    "transform": ("none",),
    "targets": ("one",),
    "teacher": ("model", "logits"),
    "blocks": ("small workspace", "chunks"),
    "strategy": (None,),
    "dtype": ("bfloat16", "float16"),
    "layout": ("contiguous",),
    "labels": ("random",),
    "invariant": (False,),
    "backend": ("torch",),
    "sizes": (Sizes((1, 160), 32, 24, 96),),
}
#: Beside the columns of the documentation.
BESIDE = {
    "asks": (*COLUMNS["asks"], "entropy"),
    "layout": (*COLUMNS["layout"], "nothing trained"),
    "sizes": (Sizes(), Sizes((3, 5), 33, 17, 150), Sizes((1, 1), 1, 3, 46), Sizes((2, 20), 5, 4, 61)),
    "upstream": ("all", "some"),
}
ROWS = dict.fromkeys([*rows(backend=("torch",), **BESIDE), *rows(**WALKS)])


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_any_two_together(row):
    check(row)


@pytest.mark.filterwarnings("ignore:a workspace of")
@pytest.mark.parametrize("row", rows(**MANY_BLOCKS), ids=str)
def test_many_blocks(row):
    check(row)


@interpreted
@pytest.mark.parametrize("row", rows(**TRITON), ids=str)
def test_any_two_together_in_triton(row, small_tiles):
    """Whatever torch's default dtype is: buffers of kernels do not take it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        check(row)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.slow
def test_any_three_together():
    for row in rows(3, backend=("torch",)):
        with case_named(str(row)):
            check(row)


def test_the_documentation_has_the_table():
    assert documentation() in (Path(__file__).parents[2] / "docs/support.md").read_text()


def test_every_value_meets_every_other():
    """But where they make no sense together, or are refused."""
    met = {(name, getattr(row, name)) for row in ROWS for name in COLUMNS}
    expected = {(name, value) for name, values in COLUMNS.items() for value in values if value != "triton"}
    assert met == expected | {("layout", "nothing trained"), ("asks", "entropy")}
