"""The checks of real.py, on the packages that ``make test-integrations`` installs."""

import os
import pathlib

import pytest

from tests.processes import printed_by
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
    "swift": "ms-swift",
}


@pytest.mark.parametrize("check", CHECKS)
def test_a_framework_with_and_without_this_library(check):
    folder = FOLDER / CHECKS[check]
    if not folder.is_dir():
        pytest.skip("make test-integrations installs it")
    others = FOLDER / "megatron-core", FOLDER / "others"
    path = os.pathsep.join(map(str, (ROOT, folder, *others)))
    assert printed_by("-m", "tests.integrations.real", check, PYTHONPATH=path).splitlines()[-1] == "ok"
