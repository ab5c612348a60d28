"""The host's time: who stands in for the driver, and a run of two rounds."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.host_time import Launcher, measure
from liger_losses.kernels.reading import label_facts


def launcher(name):
    return Launcher(SimpleNamespace(name=name), None)


def launch(kernel, *arguments):
    kernel(1, 1, 1, 0, 0, None, None, None, None, *arguments)


def test_times_are_those_of_the_first_product():
    before, product = launcher("_label_logits_kernel"), launcher("_exponentials_kernel")
    with pytest.raises(RuntimeError, match="no product was launched"):
        measure([lambda: launch(before)], 1)

    def call():
        launch(product)
        sum(range(100_000))
        launch(product)

    (times,) = measure([call], 3)
    assert times.least_product < times.least_end / 2


def test_the_host_reads_how_many_labels_are_active(monkeypatch):
    monkeypatch.setattr(Launcher, "counting", 0)
    labels, out = torch.tensor([-100, 3, 5]), torch.zeros(3, dtype=torch.int64)
    launch(launcher("_label_facts_kernel"), out, labels, 3, -100)
    assert out.tolist() == label_facts([labels], -100)[0].tolist()
    assert out[0] == 2
    assert Launcher.counting > 0  # what times leave out


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
