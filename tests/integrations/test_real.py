"""The checks of real.py, on the packages that ``make test-integrations`` installs."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.test_run import ROOT

#: Where each package is installed, in a folder of its name.
FOLDER = pathlib.Path(os.environ.get("INTEGRATIONS", ROOT / ".venv/integrations"))
CHECKS = {
    "verl_engine": "verl",
    "verl_hidden_states": "verl",
    "torchtitan": "torchtitan",
    "megatron": "megatron-core",
    "slime": "megatron-core",
    "skyrl": "skyrl",
    "openrlhf": "openrlhf",
    "axolotl": "axolotl",
    "axolotl_losses": "axolotl",
    "llamafactory_losses": "llamafactory",
    "llamafactory": "llamafactory",
    "swift": "ms-swift",
}


@pytest.mark.parametrize("check", CHECKS)
def test_a_framework_with_and_without_this_library(check):
    folder = FOLDER / CHECKS[check]
    if not folder.is_dir():
        pytest.skip("make test-integrations installs it")
    others = FOLDER / "megatron-core", FOLDER / "others"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, folder, *others)))}
    command = [sys.executable, "-m", "tests.integrations.real", check]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "ok"
