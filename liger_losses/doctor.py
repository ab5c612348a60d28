"""Prints what is installed, what this library does with it, and what a training step of a model takes.

python -m liger_losses.doctor            # versions, devices, the backend, TRL, defaults that differ
python -m liger_losses.doctor MODEL      # also what patch() would replace in a model, without loading its weights
python -m liger_losses.doctor MODEL --tokens 16384 --gpu 24GB  # also a step's memory, and the largest step that fits
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import textwrap
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import liger_losses
from liger_losses.chunked.core.block import PLANNERS
from liger_losses.chunked.core.plan import Signature, plan, usual_bytes
from liger_losses.chunked.core.weights import Dense
from liger_losses.chunked.core.workspace import bytes_of
from liger_losses.defaults import DEFAULTS, VERSIONS
from liger_losses.kernels import LOGIT_DTYPES, choose_backend
from liger_losses.kernels._triton import BACKEND_VARIABLE, INTERPRETED
from liger_losses.kernels.targets import standing

PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "liger-kernel", "verl", "megatron-core", "torchtitan")


def versions() -> Iterator[str]:
    """One line for each package."""
    yield f"{'python':<14}{platform.python_version()} on {platform.platform()}"
    yield f"{'liger_losses':<14}{liger_losses.__version__}"
    for package in PACKAGES:
        yield f"{package:<14}{_version(package) or 'not installed'}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
    with warnings.catch_warnings(record=True) as missing:
        try:
            backend = choose_backend(None, [(device, torch.float32)], dtypes=LOGIT_DTYPES)
        except ValueError as error:
            return f"calls will fail: {error}"
    why = "".join(f": {warning.message}" for warning in missing)
    return f"torch operations{why}" if backend == "torch" else "Triton kernels"


def trl_features() -> Iterator[str]:
    """Which features of :mod:`liger_losses.trl` the installed TRL has the places for; replaces nothing."""
    from liger_losses.places import Missing
    from liger_losses.trl.features import FEATURES, TESTED, find

    try:
        importlib.import_module("trl")
    except ImportError as error:
        yield f'not usable ({error}); for its trainers, pip install "trl>={TESTED[0]}"'
        return
    found = find(FEATURES)
    missing = {name: places for name, places in found.items() if isinstance(places, Missing)}
    works = [name for name in found if name not in missing]
    if not works:
        yield f"liger_losses.trl.enable() will refuse this version; install trl=={TESTED[-1]}.*"
        return
    yield f"liger_losses.trl.enable() will work for {len(works)} of {len(found)} features; call it first"
    yield f"features: {', '.join(works)}"
    for name, reason in missing.items():
        yield f"{f'NEEDS {reason.package}' if reason.package else 'LEFT OUT'}: {name}: {reason}"


def other_defaults() -> Iterator[str]:
    """Options whose defaults differ from the installed packages'."""
    for package, read in VERSIONS.items():
        for row in DEFAULTS if _version(package) else ():
            if package in row.others:
                name, there = row.others[package]
                yield f"{row.loss}: {row.option} is {row.here!r} here; {name} of {package} {read} is {there!r}"


def configuration(name: str) -> Any:
    """A model's configuration, by its id, folder or ``config.json``; from the Hub, if that answers at once.

    Raises:
        OSError: there is no such configuration, or the Hub does not answer.
        ValueError: transformers does not know the model.
        ImportError: transformers is not installed.
    """
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


def model_of(config: Any, **options: Any) -> Any:
    """The causal language model, on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **options)


# --- What a step takes ------------------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """The most memory that the results of operations take at a time, in bytes, of tensors without values too."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, tensor: Any) -> None:
        storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
        if storage is not None and storage not in self._storages:
            self._storages.add(storage)
            weakref.finalize(storage, self._add_bytes, -storage.nbytes())
            self._add_bytes(storage.nbytes())

    def _add_bytes(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in results if isinstance(results, (tuple, list)) else [results]:
            self.add(tensor)
        return results


class _Attention(torch.autograd.Function):
    """What flash attention allocates and saves."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, tokens, _ = query.shape
        out = query.new_empty(batch, tokens, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(batch, heads, tokens, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return _Attention.apply(query, key, value), None


def head_plan(tokens: int, weight: Tensor, memory: int, *, couples: bool = False) -> tuple[int, int]:
    """Bytes of the buffers of a patched head ``[V, H]``, and its products of N tokens: how many ``N H V``.

    Args:
        memory: the GPU's, in bytes.
        couples: whether the loss knows gradients only once all tokens' log-probabilities are known, as DPO's does.
    """
    sizes: dict[str, Any] = {"columns": len(weight), "hidden_size": weight.shape[1]}
    asked: dict[str, Any] = {"kept": False, "statistics": ("logp",), "metrics": (), "of_kernels": True}
    where: dict[str, Any] = {"operand": torch.bfloat16, "device": torch.device("cuda"), "backend": "triton"}
    head: dict[str, Any] = {"trains_weight": True, "trains_hidden": True, "copied_bytes": 0, "weights": (Dense,)}
    call = Signature(tokens, tokens, **sizes, **asked, **where, **head, couples=couples, memory=memory)
    chosen = plan(call, tuple(PLANNERS))
    size = tokens * chosen.row_bytes
    size = size if chosen.keeps else min(usual_bytes(call, chosen.row_bytes, collects=True), size)
    return size, 6 if chosen.keeps or not (couples or chosen.tile) else 8


def step_memory(config: Any, memory: int, *, patched: bool, checkpointing: bool = False) -> Callable[[int], int]:
    """From a number of tokens, of one packed sequence, to the peak memory of an SFT step in bf16 with AdamW, in bytes.

    The model runs forward and backward on the meta device. Weights, gradients and AdamW's two states are bf16.
    """
    from transformers import AttentionInterface

    from liger_losses.patching.patch import patch

    AttentionInterface.register("liger_losses_doctor", _attend)
    model = model_of(config, dtype=torch.bfloat16, attn_implementation="liger_losses_doctor").train()
    weight, parameters = model.get_output_embeddings().weight, list(model.parameters())
    if patched:
        patch(model, loss_head=False)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    @functools.cache
    def step(tokens: int) -> int:
        inputs = {"input_ids": torch.zeros(1, tokens, dtype=torch.int64, device="meta"), "use_cache": False}
        for parameter in parameters:
            parameter.grad = None
        with Peak() as peak:
            states = [torch.empty_like(parameter) for parameter in parameters for _ in range(2)]
            for parameter in parameters:
                peak.add(parameter)
            if patched:  # the head's gradients come in forward
                hidden = model.base_model(**inputs).last_hidden_state
                gradient, weight.grad = torch.empty_like(hidden), torch.empty_like(weight)
                hidden.new_empty(head_plan(tokens, weight, memory)[0], dtype=torch.uint8)
                hidden.backward(gradient)
            else:
                model(labels=inputs["input_ids"], **inputs).loss.backward()
            del states
        return peak.most

    return step


def largest_step(step: Callable[[int], int], memory: int, tokens: int) -> int:
    """The most tokens that fit, a multiple of 128, to 2 %; 0 if none do. The search begins at ``tokens``."""
    low, high = 0, max(tokens, 128)
    while step(high) <= memory:
        low, high = high, 2 * high
    while high - low > max(128, high // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if step(middle) <= memory else (low, middle)
    return low // 128 * 128


def step_report(config: Any, tokens: int, memory: int | None, checkpointing: bool) -> Iterator[str]:
    """What a step takes with and without ``patch``, and what fits."""
    yield f"SFT of {tokens:,} tokens in one packed sequence, {'with' if checkpointing else 'without'} " + (
        "gradient checkpointing; weights, gradients and AdamW's states in bf16, flash attention"
    )
    for name, patched in (("without patch()", False), ("with patch()", True)):
        try:
            step = step_memory(config, memory or 0, patched=patched, checkpointing=checkpointing)
            fits = (
                "" if memory is None else f"; {largest_step(step, memory, tokens):,} tokens fit {memory / 1e9:.1f} GB"
            )
            yield f"{name:<16}{step(tokens) / 2**30:7.1f} GiB{fits}"
        except Exception as error:
            yield f"{name:<16}this model does not run on the meta device: {type(error).__name__}: {error}"
    weight = model_of(config).get_output_embeddings().weight
    products = [head_plan(tokens, weight, memory or 0, couples=couples)[1] for couples in (False, True)]
    yield "the head's products: {} N H V for cross-entropy, {} for DPO; 6 are needed".format(*products)
    yield "not counted: CUDA's context, and what the allocator loses to fragments"


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
    parser = argparse.ArgumentParser(prog="python -m liger_losses.doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="a model's id, folder or config.json: prints what patch() would do")
    parser.add_argument("--tokens", type=int, help="prints the memory of a step on so many tokens")
    parser.add_argument("--gpu", help="24GB, for example: prints what fits its memory")
    parser.add_argument("--checkpointing", action="store_true", help="the step has gradient checkpointing")
    args = parser.parse_args(arguments)
    try:
        memory = None if args.gpu is None else bytes_of(args.gpu, "--gpu")
    except ValueError as error:
        parser.error(str(error))
    tokens = args.tokens if args.tokens is not None or memory is None else 4096
    if tokens is not None and (args.model is None or tokens < 1):
        parser.error(f"--tokens and --gpu need a MODEL and at least one token, got MODEL {args.model} and {tokens}")
    for title, lines in (("Versions", versions()), ("Devices", devices()), ("TRL", trl_features())):
        show(title, lines)
    show("Defaults that differ in losses that you call", other_defaults())
    if args.model is None:
        return 0
    from liger_losses.patching.patch import patch

    try:
        config = configuration(args.model)
        model = model_of(config)
    except (OSError, ValueError, ImportError) as error:
        takes = "Give the id or folder of a causal language model that AutoModelForCausalLM.from_pretrained takes"
        print(f"{args.model} cannot be built: {error}\n{takes}, or its config.json.", file=sys.stderr, flush=True)
        return 1
    show(f"patch() on {args.model}", [type(model).__name__])
    print(textwrap.indent(str(patch(model)), "  "))  # a table's rows stay whole
    if tokens is not None:
        show("A step", step_report(config, tokens, memory, args.checkpointing))
    return 0


if __name__ == "__main__":
    sys.exit(main())
