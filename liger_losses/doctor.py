"""Prints what is installed, and what this library does with it.

python -m liger_losses.doctor            # versions, devices, the backend, TRL
python -m liger_losses.doctor MODEL      # also what patch() would replace in a model, without loading its weights
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import liger_losses
from liger_losses.kernels import LOGIT_DTYPES, choose_backend
from liger_losses.kernels._tiles import has_tma
from liger_losses.kernels._triton import BACKEND_VARIABLE, INTERPRETED

PACKAGES = ("triton", "transformers", "trl", "peft", "liger-kernel")


def versions() -> Iterator[str]:
    """One line for each package."""
    yield f"{'python':<14}{platform.python_version()} on {platform.platform()}"
    yield f"{'torch':<14}{torch.__version__}"
    yield f"{'liger_losses':<14}{liger_losses.__version__}"
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        yield f"{package:<14}{version}"


def devices() -> Iterator[str]:
    """Which kernels run on each device."""
    yield f"{BACKEND_VARIABLE} is {os.environ.get(BACKEND_VARIABLE, 'not set: the device decides')}"
    if INTERPRETED:
        yield "TRITON_INTERPRET=1: Triton's kernels run in its interpreter, for tests only"
    yield f"CPU, {torch.get_num_threads()} threads: {_kernels(torch.device('cpu'))}"
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        major, minor = torch.cuda.get_device_capability(device)
        yield f"cuda:{index}, {torch.cuda.get_device_name(device)}, capability {major}.{minor}: {_kernels(device)}"
    if not torch.cuda.is_available():
        yield "no GPU that this build of torch can use"


def _kernels(device: torch.device) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report itself says what is missing
        try:
            backend = choose_backend(None, [(device, torch.float32)], dtypes=LOGIT_DTYPES)
        except ValueError as error:
            return f"calls will fail: {error}"
        tma = "used" if has_tma(device) else "none, loads through pointers: the same results, more slowly"
    if backend == "torch":
        return "torch operations"
    where = "logits in registers if hidden states and head have the same half-precision dtype"
    return f"Triton kernels, {where}" + (f"; tensor memory accelerator: {tma}" if device.type == "cuda" else "")


def trl_patch_points() -> Iterator[str]:
    """Whether the attributes that ``liger_losses.trl.enable()`` patches exist in TRL; patches nothing."""
    from liger_losses.trl.patch_points import PATCH_POINTS, TESTED

    try:
        importlib.import_module("trl")
    except ImportError as error:
        yield f'not usable ({error}); pip install "liger-losses[trl]"'
        return
    targets = [(point, point.find()) for point in PATCH_POINTS]
    found = [point.feature for point, target in targets if target.replacement is not None]
    absent = [target.absent for _, target in targets if target.absent]
    missing = [target.missing for _, target in targets if target.missing]
    yield f"{len(found)} of {len(PATCH_POINTS)} patch points are there: {', '.join(dict.fromkeys(found))}"
    yield from (f"not there, and not needed: {line}" for line in absent)
    yield from (f"MISSING: {line}" for line in missing)
    outcome = f"will refuse this version; it is tested with {', '.join(TESTED)}" if missing else "will work"
    yield f"liger_losses.trl.enable() {outcome}"


def patch_report(name: str) -> str:
    """What :func:`~liger_losses.patching.patch.patch` would replace in a model, as a table; reads no weights.

    Args:
        name: a model's id, its folder, or its ``config.json``.

    Raises:
        OSError: there is no such configuration.
        ValueError: transformers does not know the model, or it is not a causal language model.
        ImportError: transformers, or a package that the model needs, is not installed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from liger_losses.patching.patch import patch

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    return f"{type(model).__name__}\n{patch(model)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report for ``arguments`` (by default the command line's); return 1 if the model cannot be built."""
    description = "Prints what is installed, and what this library does with it."
    parser = argparse.ArgumentParser(prog="python -m liger_losses.doctor", description=description)
    parser.add_argument("model", nargs="?", help="a model's id, folder or config.json: prints what patch() would do")
    args = parser.parse_args(arguments)
    for title, lines in (("Versions", versions()), ("Devices", devices()), ("TRL", trl_patch_points())):
        print(f"\n{title}", *lines, sep="\n  ")
    if args.model is None:
        return 0
    print(f"\npatch() on {args.model}", flush=True)
    try:
        print(patch_report(args.model))
    except (OSError, ValueError, ImportError) as error:
        advice = "Give the id or folder of a causal language model that AutoModelForCausalLM.from_pretrained takes"
        print(f"{args.model} cannot be built: {error}\n{advice}, or its config.json.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
