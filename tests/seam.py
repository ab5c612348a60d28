"""What tests of results must know of the inside: these import nothing else of it.

Everything here makes the library take a way that calls of a test's size do not take, or counts its work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from liger_losses import checks
from liger_losses.chunked import accelerators
from liger_losses.chunked.core import inputs, stream
from liger_losses.chunked.core.head import LowRank as LowRank
from liger_losses.chunked.core.statistics import STATISTICS, Statistic
from liger_losses.kernels._triton import INTERPRETED, triton
from tests.interpreter import faster as faster
from tests.interpreter import small_tiles as small_tiles

#: Of tensors on a CPU.
BACKENDS = ("torch", "triton") if INTERPRETED and triton is not None else ("torch",)


class _Registered(dict):
    """Terms by name, which are statistics once they are here."""

    def __setitem__(self, name, term):
        STATISTICS[name] = Statistic(name, lambda log_p, vocab_size: term(log_p))


REGISTERED = _Registered()


@contextmanager
def leave_out_zero_rows() -> Iterator[None]:
    """Tokens whose upstream gradients are 0 are left out, however little that saves."""
    with mock.patch.dict(stream.MIN_FLOPS, {"cpu": 0.0, "cuda": 0.0}):
        yield


@contextmanager
def train_all_rows() -> Iterator[None]:
    """Tokens whose derivatives are 0 are in the gradient products."""
    count, never = stream._count, {"cpu": float("inf"), "cuda": float("inf")}
    unmasked = mock.patch.object(stream, "_count", lambda *call: count(*call[:-1], [None] * len(call[0])))
    with mock.patch.dict(stream.MIN_FLOPS, never), unmasked:
        yield


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Labels are checked on the device."""
    with mock.patch.object(checks, "host_checks", return_value=False):
        yield


@contextmanager
def read_rows_up_to(columns: int) -> Iterator[None]:
    """Rows of the weight are read for so many kept columns, and products with all of it serve more."""
    with mock.patch.object(inputs, "most_read", return_value=columns):
        yield


#: The lines of the table of accelerators.
ACCELERATORS = tuple(accelerators.ACCELERATORS)


@contextmanager
def without_accelerators(*names: str) -> Iterator[None]:
    """These lines of the table are deleted."""
    deleted = [accelerators.ACCELERATORS.get(name) for name in names]
    with mock.patch.object(stream, "PLANNERS", [planned for planned in stream.PLANNERS if planned not in deleted]):
        yield


@contextmanager
def planned_blocks() -> Iterator[list[str]]:
    """A list that grows by the names of the blocks that are planned for each target."""
    names, plans = list[str](), stream.plans

    def named(*arguments):
        made = plans(*arguments)
        names.extend(plan.name for of in made for plan in (of, of.without_gradients) if plan is not None)
        return made

    with mock.patch.object(stream, "plans", named):
        yield names


@contextmanager
def engine_calls() -> Iterator[list[int]]:
    """A list that grows by one with each call of the core."""
    calls, check_call = list[int](), stream.check_call

    def counted(*arguments, **keywords):
        calls.append(1)
        return check_call(*arguments, **keywords)

    with mock.patch.object(stream, "check_call", counted):
        yield calls
