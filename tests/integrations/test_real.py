"""The checks of real.py, on the packages that ``make test-integrations`` installs."""

import os
import pathlib

import pytest

from tests.processes import printed_by
from tests.test_run import ROOT

#: Where each package is installed, in a folder of its name.
FOLDER = pathlib.Path(os.environ.get("INTEGRATIONS", ROOT / ".venv/integrations"))
CHECKS = ("verl_engine", "verl_hidden_states", "torchtitan", "megatron", "slime", "skyrl", "openrlhf", "axolotl")
CHECKS += ("axolotl_losses", "llamafactory_losses", "swift")
#: The packages of checks that do not begin with their names.
PACKAGES = {"megatron": "megatron-core", "slime": "megatron-core", "swift": "ms-swift"}


@pytest.mark.parametrize("check", CHECKS)
def test_a_framework_with_and_without_this_library(check):
    folder = FOLDER / PACKAGES.get(check, check.partition("_")[0])
    if not folder.is_dir():
        pytest.skip("make test-integrations installs it")
    others = FOLDER / "megatron-core", FOLDER / "others"
    path = os.pathsep.join(map(str, (ROOT, folder, *others)))
    assert printed_by("-m", "tests.integrations.real", check, PYTHONPATH=path).splitlines()[-1] == "ok"
