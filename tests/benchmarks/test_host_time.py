"""The host's time: who stands in for the driver, and a run of two rounds."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="kernels are compiled by Triton")
def test_a_run_prints_a_line_for_each_case():
    """Of a size whose cross-entropy takes the kernels of exponentials, which only GPUs launch otherwise."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.host_time", "--rounds", "1", "--size", "512", "4096", "128256"]
    root = Path(__file__).parents[2]
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    _, *lines = found.stdout.splitlines()
    assert len(lines) == 10
    assert all("512 x 4096 x 128256" in line for line in lines)
    times = [[float(part) for part in re.findall(r"\d+\.\d", line)] for line in lines]
    assert all(0 < least_product < least_end for _, least_product, _, least_end in times)
