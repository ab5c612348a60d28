"""Every kernel compiles for every GPU, on any machine: the interpreter takes code that Triton's compiler refuses.

Of each target what is most at risk is compiled here, and everything by ``make test-targets``, which sets
``COMPILED=all``.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cases import triton_or_skip

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

#: Bytes that a thread may have in memory for want of registers, with Triton 3.9 (others compile the kernels to other
#: instructions).
MOST_SPILLED = 64
#: More, where a smaller tile is slower or there is none: on Hopper, as it was measured; and elsewhere for whole rows of
#: more than 8192 entries, of which backward holds four to nine values in the registers of one program, where reading
#: the rows twice would move more bytes.
SPILLED = {
    "sm_90": {
        "hard_rows._hard_rows_kernel": 232,
        "rms_norm._backward_kernel": 1264,
        "rms_norm._forward_kernel": 456,
    }
}
#: The same of one call, which was not measured.
SPILLED_BY_CALL = {
    ("sm_90", "hard_rows._hard_rows_kernel", "all statistics, class weights, soft-cap"): 784,
    ("sm_103", "hard_rows._hard_rows_kernel", "all statistics, class weights, soft-cap"): 72,
    ("gfx1201", "hard_rows._hard_rows_kernel", "selected, temperatures and soft-cap"): 956,
    ("gfx1201", "linear_exp._exponentials_kernel", "selected, temperatures and soft-cap"): 760,
}
LONG_ROWS = {"rms_norm._backward_kernel": 256}
TARGETS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1201"]


def compiled(target: str, choice: str, folder: Path, *text: str, fusion: str = "1") -> list[dict]:
    """The lines of :mod:`tests.kernels.compiling`."""
    triton_or_skip()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "TRITON_DEFAULT_FP_FUSION": fusion}
    command = [sys.executable, "-m", "tests.kernels.compiling", target, choice, *text]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def bound(target: str, line: dict) -> int:
    """The bytes that a launch may spill."""
    most = SPILLED.get(target, LONG_ROWS if "long" in line["call"] else {}).get(line["kernel"], MOST_SPILLED)
    return SPILLED_BY_CALL.get((target, line["kernel"], line["call"]), most)


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target, tmp_path):
    """None needs more shared memory or threads than there are, or spills more than what is written down."""
    choice = os.environ.get("COMPILED", "riskiest")
    *lines, last = compiled(target, choice, tmp_path)
    assert last == {"not launched": []}, "add a call to tests/kernels/launches.py"
    assert not [line for line in lines if "error" in line]
    assert not [line for line in lines if line["shared"] > line["has_shared"] or line["threads"] > 1024]
    import triton

    if triton.__version__.startswith("3.9."):
        assert not [line for line in lines if line["spilled"] > bound(target, line)]
    if target in ("sm_100", "sm_103"):  # the products of half precision
        products = [line for line in lines if line["kernel"].startswith(PRODUCTS) and "odd" not in line["call"]]
        assert products
        assert all(line["tcgen05"] for line in products)


#: Kernels over tiles of products.
PRODUCTS = ("linear_exp._exponentials_kernel", "hard_rows._hard_rows_kernel")


OPTIONS = """
from tests.kernels import compiling
compiling.pretend(compiling.TARGETS["sm_90"])
from tests.kernels import launches
found = compiling.recorded(launches.calls())
print(sorted({(launch.name, launch.options["enable_fp_fusion"]) for launch in found}))
"""


def test_bits_do_not_depend_on_triton_s_default_of_contraction(tmp_path):
    """Every launch says that multiplications and additions are contracted."""
    triton_or_skip()
    options, codes = [], []
    for fusion in ("0", "1"):
        codes.append([line.get("code") for line in compiled("sm_90", "all", tmp_path, "RMSNorm, no w", fusion=fusion)])
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": fusion}
        command = [sys.executable, "-W", "ignore", "-c", OPTIONS]
        options.append(subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True))
    assert codes[0] == codes[1]
    assert options[0].stdout == options[1].stdout
    assert all(contracted for _, contracted in ast.literal_eval(options[0].stdout))
