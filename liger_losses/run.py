"""Runs a script or a module whose models are patched, without a change in it.

python -m liger_losses.run train.py --its --arguments   # patches what transformers loads in it
python -m liger_losses.run --trl -m trl.scripts.sft ...  # and gives TRL's trainers this library's heads
python -m liger_losses.run --liger train.py ...          # and replaces what it imports of liger-kernel
python -m liger_losses.run --install verl -m ...         # and calls liger_losses.integrations.verl.install()
torchrun --nproc-per-node 8 -m liger_losses.run train.py ...

Processes that the script forks are like it. Others that it starts are not prepared: call in them what this does.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from liger_losses.integrations.imports import when_imported
from liger_losses.integrations.loading import patch_loaded_models

#: Modules of ``liger_losses.integrations`` with a function ``install()``.
INSTALLABLE = ("liger", "verl")


def _announce(model: nn.Module) -> dict[str, Any]:
    """The options with which a model is patched: the defaults, which is said once per job."""
    if os.environ.get("RANK", "0") == "0":
        print(f"liger_losses.run patches {type(model).__name__}", file=sys.stderr)
    return {}


def _enable_trl() -> None:
    import liger_losses.trl

    liger_losses.trl.enable()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what ``arguments`` (by default the command line's) name; see the module."""
    parser = argparse.ArgumentParser(prog="python -m liger_losses.run", description=__doc__, add_help=True)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--liger", action="store_true", help="replace liger-kernel's names by this library")
    parser.add_argument("--install", action="append", default=[], choices=INSTALLABLE, help="call its install()")
    parser.add_argument("--trl", action="store_true", help="call liger_losses.trl.enable() when TRL is imported")
    parser.add_argument("--no-patch", action="store_true", help="leave the models that are loaded")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="a file, or with -m a module")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(arguments)
    if given.trl and importlib.util.find_spec("trl") is None:
        parser.error('--trl needs TRL: pip install "trl>=1.15"')
    # transformers and TRL are left to be imported by whoever needs them: they take seconds, and read the environment,
    # which a script may change before.
    if not given.no_patch:
        when_imported("transformers.modeling_utils", lambda module: patch_loaded_models(_announce))
    for name in ("liger",) * given.liger + tuple(given.install):
        importlib.import_module(f"liger_losses.integrations.{name}").install()
    if given.trl:
        when_imported("trl", lambda module: _enable_trl())
    sys.argv = [given.script, *given.rest]
    # As Python has it for the script or the module: ``python -m`` has put the working directory here for this one.
    if sys.path[:1] == [os.getcwd()]:
        del sys.path[0]
    if given.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(given.script, run_name="__main__", alter_sys=True)
    else:
        if not os.path.isdir(given.script):  # which runpy puts there itself
            sys.path.insert(0, os.path.dirname(os.path.realpath(given.script)))
        runpy.run_path(os.path.abspath(given.script), run_name="__main__")


if __name__ == "__main__":
    main()
