"""The benchmarks of cross-entropy, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_losses
from benchmarks import real_text
from benchmarks.entries import (
    GEMMS,
    IGNORED,
    LARGE,
    SMALL,
    WIDE,
    Benchmark,
    Inputs,
    Provider,
    Shape,
    TokenInputs,
    bare_gemms,
    check_plain_memory,
    needs_cuda,
    optional,
    token_inputs,
    with_gradients,
)
from benchmarks.logps_entries import _trl_logps
from benchmarks.measure import Call, MiB, NotRun


def real_text_inputs(shape: Shape, device: torch.device) -> TokenInputs:
    """Hidden states of real text and the head of the model they come from, as `benchmarks.real_text` left them."""
    if not real_text.FILE.exists():
        raise NotRun("run python -m benchmarks.real_text first")
    tensors = torch.load(real_text.FILE, map_location=device)
    hidden, weight = (tensors[name][:size] for name, size in (("hidden", shape.tokens), ("weight", shape.vocab)))
    labels = tensors["labels"][: shape.tokens].long() % shape.vocab
    hidden, weight = (t[:, : shape.hidden].to(shape.dtype).contiguous().requires_grad_() for t in (hidden, weight))
    return TokenInputs(shape, hidden, weight, labels, torch.ones(shape.tokens, device=device))


def _plain_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Logits in the inputs' dtype, the loss in fp32, as models compute it."""
    return F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=IGNORED)


def cross_entropy_by(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Provider:
    """A provider from `loss(hidden, weight, labels)`."""
    return lambda i: lambda: with_gradients(loss(i.hidden, i.weight, i.labels), i.leaves)


def plain_cross_entropy(inputs: Inputs) -> Call:
    """Logits of all tokens, then `F.cross_entropy`."""
    check_plain_memory(inputs.shape, inputs.weight.device)
    return cross_entropy_by(_plain_cross_entropy)(inputs)


def compiled_cross_entropy(inputs: Inputs) -> Call:
    """The plain one under `torch.compile`."""
    # Each shape is compiled for itself, and none is refused for having been compiled too often.
    torch._dynamo.reset()
    return cross_entropy_by(torch.compile(_plain_cross_entropy, dynamic=False))(inputs)


def liger_cross_entropy(inputs: Inputs) -> Call:
    """Liger Kernel's chunked loss on a Triton kernel."""
    loss = optional("liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss")()
    return cross_entropy_by(lambda hidden, weight, labels: loss(weight, hidden, labels))(inputs)


def trl_cross_entropy(inputs: Inputs) -> Call:
    """TRL's per-token log-probabilities, averaged."""
    logps = _trl_logps(inputs)
    return lambda: with_gradients(-logps().mean(), inputs.leaves)


def cce_cross_entropy(**options: Any) -> Provider:
    """Cut Cross-Entropy, which by default leaves out small gradients."""

    def build(inputs: Inputs) -> Call:
        loss = optional("cut_cross_entropy", "linear_cross_entropy")
        return cross_entropy_by(lambda hidden, weight, labels: loss(hidden, weight, labels, **options))(inputs)

    return build


def torch_cross_entropy(inputs: Inputs) -> Call:
    """PyTorch's own chunked function."""
    function, options = (
        getattr(at, name, None) for at, name in ((F, "linear_cross_entropy"), (torch.nn, "LinearCrossEntropyOptions"))
    )
    if function is None or options is None:
        raise NotRun(f"torch {torch.__version__} has no linear_cross_entropy")
    return cross_entropy_by(lambda hidden, weight, labels: function(hidden, weight, labels, options=options()))(inputs)


def quack_cross_entropy(inputs: Inputs) -> Call:
    """QuACK's chunked loss on CuTe kernels."""
    return cross_entropy_by(optional("quack.linear_cross_entropy", "chunked_linear_cross_entropy"))(inputs)


def our_cross_entropy(**options: Any) -> Provider:
    """This library's."""
    loss = liger_losses.LigerFusedLinearCrossEntropyLoss(**options)
    return cross_entropy_by(lambda hidden, weight, labels: loss(weight, hidden, labels))


#: Providers of the benchmarks that vary one size.
SWEPT: Mapping[str, Provider] = {
    GEMMS: bare_gemms(),
    "plain torch": plain_cross_entropy,
    "liger-kernel": needs_cuda(liger_cross_entropy),
    "TRL": trl_cross_entropy,
    "cut_cross_entropy, exact": needs_cuda(cce_cross_entropy(filter_eps=None)),
    "ours": our_cross_entropy(),
    "ours, 128 MiB workspace": our_cross_entropy(workspace=128 * MiB),
}

BENCHMARKS = (
    Benchmark(
        name="cross_entropy",
        title="Cross-entropy, forward and backward",
        shapes={"cuda": LARGE},
        inputs=token_inputs,
        providers={
            GEMMS: bare_gemms(),
            "plain torch": plain_cross_entropy,
            "torch.compile": needs_cuda(compiled_cross_entropy),
            "liger-kernel": needs_cuda(liger_cross_entropy),
            "TRL": trl_cross_entropy,
            "cut_cross_entropy": needs_cuda(cce_cross_entropy()),
            "cut_cross_entropy, exact": needs_cuda(cce_cross_entropy(filter_eps=None)),
            "quack": needs_cuda(quack_cross_entropy),
            "torch linear_cross_entropy": torch_cross_entropy,
            "ours": our_cross_entropy(),
            "ours, 128 MiB workspace": our_cross_entropy(workspace=128 * MiB),
        },
        flops=6,
    ),
    Benchmark(
        name="wide_cross_entropy",
        title="Cross-entropy of a large hidden size, forward and backward",
        shapes={"cuda": WIDE},
        inputs=token_inputs,
        providers={
            GEMMS: bare_gemms(),
            "torch.compile": needs_cuda(compiled_cross_entropy),
            "TRL": trl_cross_entropy,
            "ours": our_cross_entropy(),
        },
        flops=6,
    ),
    Benchmark(
        name="cross_entropy_over_tokens",
        title="Cross-entropy, forward and backward, of ever more tokens",
        shapes={"cuda": tuple(Shape(1024 * 2**i, 2048, 151936) for i in range(6))},
        inputs=token_inputs,
        providers=SWEPT,
        flops=6,
        axis="tokens",
    ),
    Benchmark(
        name="cross_entropy_over_vocab",
        title="Cross-entropy, forward and backward, over ever larger vocabularies",
        shapes={"cuda": tuple(Shape(8192, 2048, 16384 * 2**i) for i in range(5))},
        inputs=token_inputs,
        providers=SWEPT,
        flops=6,
        axis="vocab",
    ),
    Benchmark(
        name="real_text",
        title="Cross-entropy, forward and backward, of real text through SmolLM2-135M",
        shapes={"cuda": (Shape(8192, 576, 49152),), "cpu": (Shape(8192, 576, 49152, torch.float32),)},
        inputs=real_text_inputs,
        providers={
            GEMMS: bare_gemms(),
            "plain torch": plain_cross_entropy,
            "liger-kernel": needs_cuda(liger_cross_entropy),
            "TRL": trl_cross_entropy,
            "cut_cross_entropy": needs_cuda(cce_cross_entropy()),
            "cut_cross_entropy, exact": needs_cuda(cce_cross_entropy(filter_eps=None)),
            "ours": our_cross_entropy(),
        },
        flops=6,
    ),
    Benchmark(
        name="cross_entropy_cpu",
        title="Cross-entropy, forward and backward",
        shapes={"cpu": (SMALL,)},
        inputs=token_inputs,
        providers={
            GEMMS: bare_gemms(),
            "plain torch": plain_cross_entropy,
            "liger-kernel": needs_cuda(liger_cross_entropy),
            "TRL": trl_cross_entropy,
            "ours": our_cross_entropy(),
            "ours, 64 MiB workspace": our_cross_entropy(workspace=64 * MiB),
        },
        flops=6,
    ),
)
