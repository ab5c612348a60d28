"""Prints what is installed, what this library does with it, and in three lines what to do.

python -m liger_losses.doctor            # versions, devices, the backend, TRL
python -m liger_losses.doctor MODEL      # also what patch() would replace in a model, without loading its weights
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

import liger_losses
from liger_losses.checks import DOCUMENTATION, see
from liger_losses.defaults import DEFAULTS, VERSIONS
from liger_losses.kernels import LOGIT_DTYPES, choose_backend
from liger_losses.kernels._tiles import has_tma
from liger_losses.kernels._triton import BACKEND_VARIABLE, INTERPRETED, triton
from liger_losses.kernels.targets import standing
from liger_losses.patching.report import PatchReport

PACKAGES = ("triton", "transformers", "trl", "peft", "liger-kernel")
#: What :func:`trl_features` says first if all is well.
WILL_WORK = "will work"


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
        yield f"cuda:{index}, {torch.cuda.get_device_name(device)} ({standing(device)}): {_kernels(device)}"
    if not torch.cuda.is_available():
        yield "no GPU that this build of torch can use"


def _kernels(device: torch.device) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report itself says what is missing
        try:
            backend = choose_backend(None, [(device, torch.float32)], dtypes=LOGIT_DTYPES)
        except ValueError as error:
            return f"calls will fail: {error}"
        tma = "used" if has_tma(device) else "not used, loads through pointers: the same results, more slowly"
    if backend == "torch":
        return "torch operations"
    where = "logits in registers if hidden states and head have the same half-precision dtype"
    return f"Triton kernels, {where}" + (f"; tensor memory accelerator: {tma}" if device.type == "cuda" else "")


def trl_features() -> Iterator[str]:
    """Which features of :mod:`liger_losses.trl` the installed TRL has the places for; replaces nothing."""
    from liger_losses.places import Missing
    from liger_losses.trl.features import FEATURES, TESTED, find

    try:
        importlib.import_module("trl")
    except ImportError as error:
        yield f'not usable ({error}); pip install "trl>={TESTED[0]}"'
        return
    found = find(FEATURES)
    missing = {name: places for name, places in found.items() if isinstance(places, Missing)}
    works = [name for name in found if name not in missing]
    if not works:
        yield f"liger_losses.trl.enable() will refuse this version; it is tested with {', '.join(TESTED)}"
    else:
        yield f"liger_losses.trl.enable() {WILL_WORK} for {len(works)} of {len(found)} features"
        yield f"features: {', '.join(works)}"
    for name, reason in missing.items():
        yield f"{f'NEEDS {reason.package}' if reason.package else 'LEFT OUT'}: {name}: {reason}"


def other_defaults() -> Iterator[str]:
    """Options whose defaults differ from the installed packages'."""
    for package, read in VERSIONS.items():
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        for row in DEFAULTS:
            if package in row.others:
                name, there = row.others[package]
                yield f"{row.loss}: {row.option} is {row.here!r} here; {name} of {package} {read} is {there!r}"


def patch_report(name: str) -> tuple[str, PatchReport]:
    """A model's class, and what :func:`~liger_losses.patching.patch.patch` would replace in it; reads no weights.

    Args:
        name: a model's id, its folder, or its ``config.json``.

    Raises:
        OSError: there is no such configuration, or the Hub does not answer.
        ValueError: transformers does not know the model, or it is not a causal language model.
        ImportError: transformers, or a package that the model needs, is not installed.
    """
    from transformers import AutoModelForCausalLM

    from liger_losses.patching.patch import patch

    config = _configuration(name)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    return type(model).__name__, patch(model)


def _configuration(name: str) -> Any:
    """A model's configuration, from a file or the local cache; else from the Hub, if that answers at once."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, local_files_only=True)
    except OSError:
        if os.path.exists(name):
            raise
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)  # transformers would try for half a minute
    except (HfHubHTTPError, HFValidationError):
        pass  # no such model, or no right to read it, which transformers says better
    except Exception as error:
        reason = f"{constants.ENDPOINT} does not answer ({error})"
        raise OSError(f"it is no folder, it is not in the local cache, and {reason}.") from error
    return AutoConfig.from_pretrained(name)


def kernels_advice() -> str:
    """What to do about devices and backends."""
    asked = os.environ.get(BACKEND_VARIABLE)
    if not torch.cuda.is_available():
        if asked == "triton" and not INTERPRETED:
            return f"Unset {BACKEND_VARIABLE}: without a GPU, calls with it fail." + see("backends")
        return "Nothing about kernels: without a GPU, torch operations run, with the same results."
    if asked == "torch":
        return f"Unset {BACKEND_VARIABLE}: torch operations run on the GPU, more slowly than Triton kernels."
    if triton is None:
        return "Install triton: without it, torch operations run on the GPU, more slowly." + see("backends")
    return "Nothing about kernels: Triton's run on the GPU."


def trl_advice(lines: Sequence[str]) -> str:
    """What to do about TRL, given the lines of :func:`trl_features`."""
    from liger_losses.trl.features import TESTED

    if len(lines) == 1 and WILL_WORK not in lines[0]:
        return f'For trainers of TRL, pip install "trl>={TESTED[0]}"; without it, use losses and patch().'
    if any(line.startswith("LEFT OUT") for line in lines):
        return f"For the features that are left out, install trl=={TESTED[-1]}.*." + see("trl")
    return "Before you build a trainer of TRL, call liger_losses.trl.enable(kernels=True)."


def model_advice(report: PatchReport | None) -> str:
    """What to do about a model, given what ``patch`` would replace in it."""
    if report is None:
        return f"Run python -m liger_losses.doctor MODEL to see what patch() does to a model; then read {DOCUMENTATION}"
    if any((entry.replaced_by or "").startswith("Lazy") for entry in report.replaced):
        return (
            "Call liger_losses.patch(model), unless a trainer of TRL does it after enable(kernels=True): its loss then "
            "makes no [tokens, vocab] logits."
        )
    return "Train this model without patch(): its head cannot be lazy." + see("models-that-cannot-be-patched")


def show(title: str, lines: Iterable[str]) -> None:
    """Print lines under a title, broken at the terminal's width; COLUMNS sets another one."""
    width = max(shutil.get_terminal_size().columns, 40)
    print(f"\n{title}")
    for line in lines:
        # No link is broken, and columns of a table keep their spaces.
        wrapper = textwrap.TextWrapper(width, "  ", "      ", break_long_words=False, break_on_hyphens=False)
        print(wrapper.fill(line))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report for ``arguments`` (by default the command line's); return 1 if the model cannot be built."""
    description = "Prints what is installed, what this library does with it, and in three lines what to do."
    parser = argparse.ArgumentParser(prog="python -m liger_losses.doctor", description=description)
    parser.add_argument("model", nargs="?", help="a model's id, folder or config.json: prints what patch() would do")
    args = parser.parse_args(arguments)
    report, wrong = None, False
    if args.model is not None:
        try:
            kind, report = patch_report(args.model)
        except (OSError, ValueError, ImportError) as error:
            takes = "Give the id or folder of a causal language model that AutoModelForCausalLM.from_pretrained takes"
            print(f"{args.model} cannot be built: {error}\n{takes}, or its config.json.", file=sys.stderr, flush=True)
            wrong = True
    points = list(trl_features())
    for title, lines in (("Versions", versions()), ("Devices", devices()), ("TRL", points)):
        show(title, lines)
    if wrong:
        return 1
    show("Defaults that differ in losses that you call", other_defaults())
    if report is not None:
        show(f"patch() on {args.model}", [kind])
        print(textwrap.indent(str(report), "  "))  # a table's rows stay whole
    advice = (kernels_advice(), trl_advice(points), model_advice(report))
    show("What to do", (f"{number}. {line}" for number, line in enumerate(advice, 1)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
