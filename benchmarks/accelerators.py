"""What each accelerator is worth: calls that it serves, with its line of the table and without, in turns.

``python -m benchmarks.accelerators [--only TEXT] [--rounds 8] [--out FILE.txt]``; about two minutes.
The ratio is the time with the line by the time without it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

import torch

from benchmarks.compare import DEVICE, beside, cases, importer, line, tiny
from benchmarks.measure import Call, about, header, release
from liger_losses.chunked.accelerators import ACCELERATORS
from liger_losses.chunked.core import stream

#: Beginnings of the names of cases that each serves.
SERVED = {
    "statistics": ("log-probs without gradient", "DPO"),
    "exponentials": ("cross-entropy", "log-probs", "DPO", "GRPO"),
    "kept": ("log-probs over",),
}
#: The grid of tokens x hidden size, with a vocabulary of 128256.
GRID = tuple(f" {tokens} x {size} x 128256" for size in (2048, 4096) for tokens in (1024, 4096, 16384))
KEPT = (" kept columns 8192 x 4096 x 128256",)


def serves(name: str, case: str) -> bool:
    """Whether a case of :mod:`benchmarks.compare` is one of an accelerator's."""
    sizes = KEPT if name == "kept" else GRID
    return any(case.startswith(begin) and case.endswith(size) for begin in SERVED[name] for size in sizes) and not (
        name == "exponentials" and ("without" in case or "kept" in case)
    )


def without(name: str, call: Call) -> Call:
    """The call with the accelerator's line deleted."""
    table = [planned for planned in stream.PLANNERS if planned is not ACCELERATORS[name]]

    def deleted() -> tuple[torch.Tensor, ...]:
        with mock.patch.object(stream, "PLANNERS", table):
            return call()

    return deleted


def main() -> None:
    """Print a table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", default="", help="run the accelerators whose names contain this")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU too: to see that everything runs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = list[str]()
    for name in [name for name in ACCELERATORS if arguments.only in name]:
        lines.append(
            f"{name + ', with and without it':58} {'with ms':>8} {'without':>8}  ratio (95 % interval), memory"
        )
        print(lines[-1])
        for case, make in cases():
            if serves(name, case):
                release(DEVICE)
                torch.manual_seed(0)
                call = (tiny(make) if arguments.tiny else make)(importer("liger_losses"))
                lines.append(line({"case": case, **beside([call, without(name, call)], arguments.rounds)}))
                print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join([*header(about(DEVICE)), *lines]) + "\n")


if __name__ == "__main__":
    main()
