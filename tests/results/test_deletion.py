"""Each accelerator serves some calls; with its line deleted, and with all lines, results stay the same."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from liger_losses import TokenSupport, linear_logps
from tests.losses import CE
from tests.reference import problem, tensors_of
from tests.results.combinations import check
from tests.results.test_combinations import IN_TRITON
from tests.seam import ACCELERATORS, BACKENDS, planned_blocks, without_accelerators

#: A call that each line of the table serves.
SERVED = {
    "statistics": lambda h, w, y, **on: linear_logps(h.detach(), w.detach(), y, **on),
    "exponentials": lambda h, w, y, **on: CE(**on)(w, h, y),
    "kept": lambda h, w, y, **on: linear_logps(h, w, y, support=TokenSupport(y[:, None]), **on),
}
DELETED = [*[(name,) for name in ACCELERATORS], ACCELERATORS]


INTERPRETED = pytest.mark.skipif("triton" not in BACKENDS, reason="needs Triton's interpreter")


@pytest.mark.parametrize(
    "backend", [pytest.param("triton", marks=INTERPRETED), pytest.param(None, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("name", [name for name in ACCELERATORS if name not in os.environ.get("WITHOUT", "")])
def test_calls_are_served(name, backend, small_tiles, default_gpu):
    hidden, weight, labels, _ = problem(20, 16, 40, dtype=torch.bfloat16, masked=0.0)
    found = []
    for deleted in ((), (name,)):
        with without_accelerators(*deleted), planned_blocks() as names:
            found.append(tensors_of(SERVED[name](hidden, weight, labels, backend=backend)))
        assert (name in names) == (not deleted)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@INTERPRETED
@pytest.mark.parametrize("deleted", DELETED, ids=str)
def test_some_results_without_them(deleted, small_tiles):
    """All are in ``test_results_without_them``, which takes long."""
    with without_accelerators(*deleted):
        for row in random.Random(str(deleted)).sample(IN_TRITON, 10):
            if row.ranks == "alone":
                check(row)


@pytest.mark.slow
@pytest.mark.parametrize("deleted", DELETED, ids=str)
def test_results_without_them(deleted):
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", str(folder)]
    if not torch.cuda.is_available():
        command += ["-k", "triton"]  # no other call on a CPU is served
    done = subprocess.run(
        command, cwd=folder.parents[1], env={**os.environ, "WITHOUT": ",".join(deleted)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:]
