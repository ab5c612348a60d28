"""Every kernel compiles for every GPU, on any machine: the interpreter takes code that Triton's compiler refuses.

Of each target what is most at risk is compiled here, and everything by ``make test-targets``, which sets
``COMPILED=all``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
from tests.kernels import compiling  # noqa: E402

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

#: Bytes that a thread may have in memory for want of registers, with Triton 3.9 (others compile the kernels to other
#: instructions).
MOST_SPILLED = 64
#: More, where a smaller tile is slower or there is none: on Hopper, as it was measured; and elsewhere for whole rows of
#: more than 8192 entries, of which backward holds four to nine values in the registers of one program, where reading
#: the rows twice would move more bytes.
SPILLED = {
    "sm_90": {"linear_exp._hard_rows_kernel": 232, "rms_norm._backward_kernel": 1264, "rms_norm._forward_kernel": 456}
}
#: The same of one call, which was not measured.
SPILLED_BY_CALL = {
    ("sm_90", "linear_exp._hard_rows_kernel", "all statistics, class weights, soft-cap"): 784,
    ("sm_103", "linear_exp._hard_rows_kernel", "all statistics, class weights, soft-cap"): 72,
    ("gfx1201", "linear_exp._hard_rows_kernel", "selected, temperatures and soft-cap"): 956,
    ("gfx1201", "linear_exp._exponentials_kernel", "selected, temperatures and soft-cap"): 760,
}
LONG_ROWS = {"rms_norm._backward_kernel": 256}


def bound(target: str, line: dict) -> int:
    """The bytes that a launch may spill."""
    most = SPILLED.get(target, LONG_ROWS if "long" in line["call"] else {}).get(line["kernel"], MOST_SPILLED)
    return SPILLED_BY_CALL.get((target, line["kernel"], line["call"]), most)


@pytest.mark.parametrize("target", compiling.TARGETS)
def test_every_kernel_compiles(target, tmp_path):
    """None needs more shared memory or threads than there are, or spills more than what is written down. Bits do not
    depend on Triton's default of contraction, as every launch says that multiplications and additions are contracted.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "0"}
    command = [sys.executable, "-m", "tests.kernels.compiling", target, os.environ.get("COMPILED", "riskiest")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    *lines, last = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert last == {"not launched": [], "not contracted": []}, "add a call to tests/kernels/launches.py"
    assert not [line for line in lines if "error" in line]
    has_shared = compiling.TARGETS[target].shared_memory
    assert not [line for line in lines if line["shared"] > has_shared or line["threads"] > 1024]
    if triton.__version__.startswith("3.9."):
        assert not [line for line in lines if line["spilled"] > bound(target, line)]
    if target in ("sm_100", "sm_103"):  # the products of half precision
        kernels = "linear_exp._exponentials_kernel", "linear_exp._hard_rows_kernel"
        products = [line for line in lines if line["kernel"].startswith(kernels) and "odd" not in line["call"]]
        assert products
        assert all(line["tcgen05"] for line in products)
