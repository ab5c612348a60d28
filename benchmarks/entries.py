"""What a benchmark is made of: shapes, inputs, and the bare matrix products beside which all are measured."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import liger_losses
from benchmarks.measure import Call, MiB, NotRun, check_host_memory

GEMMS = "bare GEMMs"
IGNORED = -100
#: Width of TRL's vocabulary tiles, as its trainers set it.
TRL_CHUNK = 32768
#: Holds the tiles of a second pass.
LEAN_WORKSPACE = 300 * MiB
#: The bare GEMMs go through blocks of at most this size, so that they fit next to the largest weights.
GEMM_BLOCK_BYTES = 4 * 2**30

Provider = Callable[[Any], Call]


@dataclass(frozen=True)
class Shape:
    """Sizes of a benchmark's inputs.

    Args:
        tokens: all of them, over all sequences.
        hidden: hidden size.
        vocab: vocabulary size.
        dtype: of hidden states and weights.
        sequences: what the tokens are divided into.
        masked: share of each sequence, from its start, that carries no loss.
    """

    tokens: int
    hidden: int
    vocab: int
    dtype: torch.dtype = torch.bfloat16
    sequences: int = 1
    masked: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.tokens // self.sequences

    @property
    def prompt(self) -> int:
        """Tokens of a sequence that carry no loss."""
        return int(self.masked * self.length)

    @property
    def kept(self) -> int:
        """Tokens that carry loss."""
        return self.sequences * (self.length - self.prompt)

    def tiny(self) -> Shape:
        """The same with every size divided by 64, to see that everything runs."""
        sizes = {"tokens": self.tokens // 64, "hidden": max(self.hidden // 64, 8), "vocab": self.vocab // 64}
        return replace(self, **sizes)


@dataclass(frozen=True)
class Benchmark:
    """One table.

    Args:
        name: what to call it on the command line.
        title: what it measures.
        shapes: for each kind of device (`cpu`, `cuda`) that it suits.
        inputs: makes the tensors.
        providers: each takes the inputs and returns a call, which returns the loss and the gradients.
        flops: multiples of tokens that carry loss * hidden size * vocabulary size that the work takes.
        baseline: the provider that the others' times are divided by.
    """

    name: str
    title: str
    shapes: Mapping[str, tuple[Shape, ...]]
    inputs: Callable[[Shape, torch.device], Any]
    providers: Mapping[str, Provider]
    flops: float
    baseline: str | None = GEMMS


@dataclass(frozen=True)
class Inputs:
    """What all but pairs need.

    Args:
        hidden: `[tokens, H]`, or `[sequences, T, H]` for preference losses.
        weight: `[V, H]`.
        labels: as `hidden` without its last dimension.
    """

    shape: Shape
    hidden: Tensor
    weight: Tensor
    labels: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gradients are taken of."""
        return tuple(tensor for tensor in (self.hidden, self.weight) if tensor.requires_grad)


@dataclass(frozen=True)
class TokenInputs(Inputs):
    """Inputs of losses on tokens; `upstream` `[tokens]` weights log-probabilities before they are summed."""

    upstream: Tensor


class Random:
    """Seeded random tensors of a shape's sizes."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *size: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers of standard deviation `scale`, in the shape's dtype by default."""
        dtype = self.shape.dtype if dtype is None else dtype
        return torch.randn(*size, dtype=dtype, device=self.device, generator=self.generator).mul_(scale)

    def weight(self) -> Tensor:
        """`[V, H]`, such that logits have a standard deviation of 1."""
        return self.normal(self.shape.vocab, self.shape.hidden, scale=self.shape.hidden**-0.5)

    def labels(self, sequences: int) -> Tensor:
        """`[sequences, T]`, with prompts masked."""
        size = (sequences, self.shape.length)
        labels = torch.randint(self.shape.vocab, size, device=self.device, generator=self.generator)
        labels[:, : self.shape.prompt] = IGNORED
        return labels


def token_inputs(shape: Shape, device: torch.device) -> TokenInputs:
    """Inputs of losses on tokens."""
    random = Random(shape, device)
    return TokenInputs(
        shape,
        random.normal(shape.tokens, shape.hidden).requires_grad_(),
        random.weight().requires_grad_(),
        random.labels(shape.sequences).flatten(),
        random.normal(shape.tokens, dtype=torch.float32),
    )


def with_gradients(loss: Tensor, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The loss and its gradients, by the same call for every provider."""
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def optional(module: str, name: str) -> Any:
    """Something from a package that need not be there."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise NotRun(f"not installed: {(error.name or module).partition('.')[0]}") from None


def needs_cuda(provider: Provider) -> Provider:
    """The provider, where there is a GPU."""

    def build(inputs: Any) -> Call:
        if inputs.weight.device.type != "cuda":
            raise NotRun("needs CUDA")
        return provider(inputs)

    return build


def check_plain_memory(shape: Shape, device: torch.device) -> None:
    """Refuse logits, their log-softmax and the gradients of both, in fp32, where they would not fit."""
    check_host_memory(4 * shape.tokens * shape.vocab * 4, device)


def bare_gemms(logits: int = 1, grad_hidden: int = 1, grad_weight: int = 1) -> Provider:
    """So many products of each kind over the tokens that carry loss, into buffers that are there: the limit."""

    def build(inputs: Inputs) -> Call:
        kept = inputs.hidden.detach()[inputs.labels != IGNORED]
        weight = inputs.weight.detach()
        rows = max(1, min(len(kept), GEMM_BLOCK_BYTES // (len(weight) * weight.element_size())))
        buffer = kept.new_empty(rows, len(weight))
        hidden_out = torch.empty_like(kept) if grad_hidden else kept
        weight_out = torch.zeros_like(weight) if grad_weight else weight

        def call() -> tuple[Tensor, ...]:
            for start in range(0, len(kept), rows):
                block = kept[start : start + rows]
                out = buffer[: len(block)]
                for _ in range(logits):
                    torch.mm(block, weight.t(), out=out)
                for _ in range(grad_hidden):
                    torch.mm(out, weight, out=hidden_out[start : start + rows])
                for _ in range(grad_weight):
                    weight_out.addmm_(out.t(), block, beta=0 if start == 0 else 1)
            return ()

        return call

    return build


def lean(provider: Provider) -> Provider:
    """The provider within the default workspace of devices with little memory: no logits are kept until backward."""

    def build(inputs: Any) -> Call:
        call = provider(inputs)

        def within() -> tuple[Tensor, ...]:
            with liger_losses.workspace(LEAN_WORKSPACE):
                return call()

        return within

    return build


#: Llama 3 8B, Qwen 3 1.7B, Qwen 2.5 7B, Gemma 3 1B.
LARGE = (
    Shape(8192, 4096, 128256),
    Shape(8192, 2048, 151936),
    Shape(16384, 3584, 152064),
    Shape(32768, 1024, 262144),
)
#: SmolLM2 135M, half of each sequence a prompt.
SMALL = Shape(4096, 576, 49152, torch.float32, sequences=4, masked=0.5)
