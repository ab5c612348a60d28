"""Runs a script or a module whose models are patched, without a change in it.

python -m liger_losses.run train.py --its --arguments   # patches what transformers loads in it
python -m liger_losses.run --trl -m trl.scripts.sft ...  # and gives TRL's trainers this library's heads
python -m liger_losses.run --liger train.py ...          # and answers what it imports of liger-kernel
torchrun --nproc-per-node 8 -m liger_losses.run train.py ...
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from liger_losses.integrations.loading import patch_loaded_models


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what ``arguments`` (by default the command line's) name; see the module."""
    parser = argparse.ArgumentParser(prog="python -m liger_losses.run", description=__doc__, add_help=True)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--liger", action="store_true", help="answer liger-kernel's names with this library")
    parser.add_argument("--trl", action="store_true", help="call liger_losses.trl.enable()")
    parser.add_argument("--residuals", action="store_true", help="patch(model, residuals=True)")
    parser.add_argument("--no-patch", action="store_true", help="leave the models that are loaded")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="a file, or with -m a module")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(arguments)
    if given.liger:
        from liger_losses.integrations import liger

        liger.install()
    if given.trl:
        import liger_losses.trl

        liger_losses.trl.enable()
    if not given.no_patch:
        options: dict[str, Any] = {"residuals": given.residuals}

        def announce(model: nn.Module) -> dict[str, Any]:
            if os.environ.get("RANK", "0") == "0":
                print(f"liger_losses.run patches {type(model).__name__}", file=sys.stderr)
            return options

        patch_loaded_models(announce)
    sys.argv = [given.script, *given.rest]
    if given.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(given.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(given.script)))
        runpy.run_path(given.script, run_name="__main__")


if __name__ == "__main__":
    main()
