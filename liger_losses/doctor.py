"""Prints what is installed, what this library does with it, and what a training step of a model takes.

python -m liger_losses.doctor            # versions, devices, the backend, TRL, defaults that differ
python -m liger_losses.doctor MODEL      # also what patch() would replace in a model, without loading its weights
python -m liger_losses.doctor MODEL --tokens 16384 --gpu 24GB  # also a step's memory, and the largest step that fits
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import liger_losses
from liger_losses.chunked.core.block import PLANNERS
from liger_losses.chunked.core.options import bytes_of
from liger_losses.chunked.core.plan import Signature, plan, usual_bytes
from liger_losses.chunked.core.weights import Dense
from liger_losses.defaults import DEFAULTS, VERSIONS
from liger_losses.kernels import LOGIT_DTYPES, choose_backend
from liger_losses.kernels._triton import BACKEND_VARIABLE, INTERPRETED
from liger_losses.kernels.targets import standing

TAKES = "Give the id or folder of a causal model that AutoModelForCausalLM.from_pretrained takes, or its config.json."
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "liger-kernel", "verl", "megatron-core", "torchtitan")


def versions() -> Iterator[str]:
    """One line for each package."""
    yield f"{'python':<14}{platform.python_version()} on {platform.platform()}"
    yield f"{'liger_losses':<14}{liger_losses.__version__}"
    for package in PACKAGES:
        yield f"{package:<14}{_version(package) or 'not installed'}"


def _version(package: str) -> str | None:
    return next((installed.version for installed in importlib.metadata.distributions(name=package)), None)


def devices() -> Iterator[str]:
    """Which kernels run on each device."""
    yield f"{BACKEND_VARIABLE} is {os.environ.get(BACKEND_VARIABLE, 'not set: the device decides')}"
    yield f"CPU, {torch.get_num_threads()} threads{', in the interpreter' * INTERPRETED}: {_kernels('cpu')}"
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        yield f"{device}, {torch.cuda.get_device_name(device)} ({standing(device)}): {_kernels(device)}"
    if not torch.cuda.is_available():
        yield "no GPU that this build of torch can use"


def _kernels(device: torch.device | str) -> str:
    try:
        backend = choose_backend(None, [(torch.device(device), torch.float32)], dtypes=LOGIT_DTYPES)
    except ValueError as error:
        return f"calls will fail: {error}"
    return {"torch": "torch operations", "triton": "Triton kernels"}[backend]


def trl_features() -> Iterator[str]:
    """What :func:`liger_losses.trl.enable` will do with the installed TRL; replaces nothing."""
    from liger_losses.places import Missing
    from liger_losses.trl.features import FEATURES, TESTED, find

    if _version("trl") is None:
        yield f'not installed; for its trainers, pip install "trl>={TESTED[0]}", and call liger_losses.trl.enable()'
        return
    for name, places in find(FEATURES).items():
        yield f"{name:<40}{f'left out: {places}' if isinstance(places, Missing) else 'works'}"


def other_defaults() -> Iterator[str]:
    """Options whose defaults differ from the installed packages'."""
    for package, read in VERSIONS.items():
        for row in DEFAULTS if _version(package) else ():
            if package in row.others:
                name, there = row.others[package]
                yield f"{row.loss}: {row.option} is {row.here!r} here; {name} of {package} {read} is {there!r}"


#: What is printed of every machine.
SECTIONS = {
    "Versions": versions,
    "Devices": devices,
    "Features of liger_losses.trl.enable()": trl_features,
    "Defaults that differ in losses that you call": other_defaults,
}


# --- A model ----------------------------------------------------------------------------------------------------------


def configuration(name: str) -> Any:
    """A model's configuration, by its id, folder or ``config.json``; the Hub is asked once.

    Raises:
        OSError: there is no such configuration, or the Hub does not answer.
        ValueError: transformers does not know the model.
        ImportError: transformers is not installed.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, local_files_only=True)
    except OSError:
        if os.path.exists(name):
            raise
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)  # transformers would try for half a minute
    except (HfHubHTTPError, HFValidationError):
        pass  # no such model, or no right to read it, which transformers says better
    except Exception as error:
        where = f"it is no folder, it is not in the local cache, and {constants.ENDPOINT}"
        raise OSError(f"{where} does not answer ({error}).") from error
    return AutoConfig.from_pretrained(name)


def model_of(config: Any, checkpointing: bool = False) -> Any:
    """The causal language model in bf16, on the meta device, in training, with :func:`_attend`."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("liger_losses", _attend)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="liger_losses")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Fused attention, which scaled_dot_product_attention would not choose on the meta device."""
    attended = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)
    return attended[0].transpose(1, 2), None


class Peak(TorchDispatchMode):
    """The most memory that tensors and the results of operations take at a time, in bytes, without values too."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()
        self._add(tensors)

    def _add(self, values: Iterable[Any]) -> None:
        for storage in [value.untyped_storage() for value in values if isinstance(value, Tensor)]:
            if storage not in self._storages:
                self._storages.add(storage)
                weakref.finalize(storage, self._add_bytes, -storage.nbytes())
                self._add_bytes(storage.nbytes())

    def _add_bytes(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._add(results if isinstance(results, (tuple, list)) else [results])
        return results


def head_plan(model: Any, tokens: int, memory: int, *, couples: bool = False) -> tuple[int, int]:
    """Bytes of the buffers of a patched head of N tokens, and its products: how many ``N H V``.

    Args:
        memory: the GPU's, in bytes.
        couples: whether the loss knows gradients only once all tokens' log-probabilities are known, as DPO's does.
    """
    columns, hidden_size = model.get_output_embeddings().weight.shape
    options: dict[str, Any] = {"kept": False, "statistics": frozenset({"logp"}), "metrics": frozenset()}
    options |= {"operand": torch.bfloat16, "device": torch.device("cuda"), "backend": "triton"}
    options |= {"trains_weight": True, "trains_hidden": True, "copied_bytes": 0, "weights": (Dense,)}
    call = Signature(tokens, tokens, hidden_size, columns, gradients_in_backward=couples, memory=memory, **options)
    chosen = plan(call, tuple(PLANNERS))
    size = tokens * chosen.row_bytes
    size = size if chosen.keeps else min(usual_bytes(call, chosen.row_bytes, collects=True), size)
    return size, 6 if chosen.keeps or not (couples or chosen.tile) else 8


def step_bytes(model: Any, tokens: int, memory: int, patched: bool) -> int:
    """The peak memory of an SFT step on one packed sequence, with AdamW; weights, gradients and states are bf16.

    Args:
        model: on the meta device, where it runs forward and backward.
        memory: the GPU's, in bytes.
    """
    inputs = {"input_ids": torch.zeros(1, tokens, dtype=torch.int64, device="meta"), "use_cache": False}
    model.zero_grad()
    with Peak(model.parameters()) as peak:
        states = [torch.empty_like(parameter) for parameter in model.parameters() for _ in range(2)]
        if patched:  # the head's gradients come in forward
            weight, hidden = model.get_output_embeddings().weight, model.base_model(**inputs).last_hidden_state
            gradient, weight.grad = torch.empty_like(hidden), torch.empty_like(weight)
            hidden.new_empty(head_plan(model, tokens, memory)[0], dtype=torch.uint8)
            hidden.backward(gradient)
        else:
            model(labels=inputs["input_ids"], **inputs).loss.backward()
        del states
    return peak.most


def most_tokens(step: Callable[[int], int], memory: int, tokens: int) -> int:
    """The most tokens whose ``step`` fits the memory, a multiple of 128, to 2 %; 0 if none do.

    Args:
        tokens: where the search begins.
    """
    fits, over = 0, max(128, tokens // 128 * 128)
    while step(over) <= memory:
        fits, over = over, 2 * over
    while over - fits > max(128, fits // 64):
        middle = (fits + over) // 256 * 128
        fits, over = (middle, over) if step(middle) <= memory else (fits, middle)
    return fits


def step_line(model: Any, tokens: int, memory: int, patched: bool) -> Iterator[str]:
    """What a step takes, and what fits ``memory`` where that is not 0."""
    fails = "this model does not run on the meta device"
    try:
        yield f"{step_bytes(model, tokens, memory, patched) / 2**30:7.1f} GiB"
        fails = "no larger step runs on the meta device"
        if memory:
            most = most_tokens(lambda size: step_bytes(model, size, memory, patched), memory, tokens)
            yield f"{most:,} tokens fit {memory / 1e9:.1f} GB"
    except Exception as error:
        yield f"{fails}: {type(error).__name__}: {error}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report for ``arguments`` (by default the command line's); return 1 if the model cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m liger_losses.doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="a model's id, folder or config.json: prints what patch() would do")
    parser.add_argument("--tokens", type=int, help="prints the memory of a step on so many tokens")
    parser.add_argument("--gpu", help="24GB, for example: prints what fits its memory")
    parser.add_argument("--checkpointing", action="store_true", help="the step has gradient checkpointing")
    args = parser.parse_args(arguments)
    try:
        memory = 0 if args.gpu is None else bytes_of(args.gpu, "--gpu")
    except ValueError as error:
        parser.error(str(error))
    tokens = 4096 if args.tokens is None and memory else args.tokens
    if tokens is not None and (tokens < 1 or args.model is None):
        parser.error(f"--tokens and --gpu need a MODEL and at least one token, got MODEL {args.model} and {tokens}")
    for title, lines in SECTIONS.items():
        if texts := list(lines()):
            print(f"\n{title}", *texts, sep="\n  ")
    if args.model is None:
        return 0
    try:
        model = model_of(configuration(args.model), args.checkpointing)
    except Exception as error:
        advice = f"pip install {error.name}" if isinstance(error, ModuleNotFoundError) else TAKES
        reason = textwrap.shorten(str(error), 800, placeholder=" ...")  # some list all models that there are
        print(f"{args.model} cannot be built: {type(error).__name__}: {reason}\n{advice}", file=sys.stderr)
        return 1
    from liger_losses.patching.patch import patch

    plain = "; ".join(step_line(model, tokens, memory, patched=False)) if tokens else ""
    print(f"\npatch() on {args.model}\n  {type(model).__name__}\n{textwrap.indent(str(patch(model)), '  ')}")
    if tokens:
        products = [head_plan(model, tokens, memory, couples=couples)[1] for couples in (False, True)]
        print(
            f"\nA step of SFT on {tokens:,} tokens in one packed sequence",
            f"gradient checkpointing: {args.checkpointing}; weights, gradients, AdamW in bf16; flash attention",
            f"without patch() {plain}",
            f"with patch()    {'; '.join(step_line(model, tokens, memory, patched=True))}",
            "the head's products: {} N H V for cross-entropy, {} for DPO; 6 are needed".format(*products),
            "not counted: CUDA's context, and what the allocator loses to fragments",
            sep="\n  ",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
