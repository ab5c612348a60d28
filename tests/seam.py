"""What tests of results must know of the inside: these import nothing else of it.

Everything here makes the library take a way that calls of a test's size do not take, or counts its work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from liger_losses import checks
from liger_losses.chunked.engine import blocks, call, stream, support
from liger_losses.chunked.engine.adapters import LowRank
from liger_losses.chunked.engine.query import REGISTERED
from liger_losses.kernels import row_sums
from liger_losses.kernels._triton import INTERPRETED, triton
from tests.interpreter import faster, small_tiles

#: Of tensors on a CPU.
BACKENDS = ("torch", "triton") if INTERPRETED and triton is not None else ("torch",)

__all__ = [
    "BACKENDS",
    "REGISTERED",
    "LowRank",
    "as_on_a_gpu",
    "engine_calls",
    "faster",
    "leave_out_zero_rows",
    "many_parts",
    "read_rows_up_to",
    "small_tiles",
]


@contextmanager
def many_parts() -> Iterator[None]:
    """Statistics of tiles are merged several times; long sums over kept columns are taken in parts and slices."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blocks, "MOST_TILES", 2)
        patched.setattr(row_sums, "_PART", 4)
        patched.setattr(row_sums, "GATHERED_BYTES", 3000)
        yield


@contextmanager
def leave_out_zero_rows() -> Iterator[None]:
    """Tokens whose upstream gradients are 0 are left out, however little that saves, and rows are moved in parts."""
    with mock.patch.dict(stream.MIN_FLOPS, {"cpu": 0.0, "cuda": 0.0}), mock.patch.object(blocks, "MOVED_BYTES", 2**10):
        yield


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Labels are checked on the device."""
    with mock.patch.object(checks, "host_checks", return_value=False):
        yield


@contextmanager
def read_rows_up_to(columns: int) -> Iterator[None]:
    """Of tokens with up to so many kept columns, rows of the weight are read; with more, products are taken."""
    with mock.patch.object(support, "_COST", dict.fromkeys(("cuda", "cpu"), (columns, columns))):
        yield


@contextmanager
def engine_calls() -> Iterator[list[int]]:
    """A list that grows by one with each call of the engine."""
    calls, decide = list[int](), call.decide

    def counted(*arguments):
        calls.append(1)
        return decide(*arguments)

    with mock.patch.object(call, "decide", counted):
        yield calls
