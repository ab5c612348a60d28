"""The benchmarks of cross-entropy, as data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_losses
from benchmarks.entries import (
    GEMMS,
    IGNORED,
    LARGE,
    SMALL,
    Benchmark,
    Inputs,
    Provider,
    bare_gemms,
    check_plain_memory,
    needs_cuda,
    optional,
    token_inputs,
    with_gradients,
)
from benchmarks.logps_entries import _trl_logps
from benchmarks.measure import Call, MiB


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


def our_cross_entropy(**options: Any) -> Provider:
    """This library's."""
    loss = liger_losses.LigerFusedLinearCrossEntropyLoss(**options)
    return cross_entropy_by(lambda hidden, weight, labels: loss(weight, hidden, labels))


BENCHMARKS = (
    Benchmark(
        name="cross_entropy",
        title="Cross-entropy, forward and backward",
        shapes={"cuda": LARGE, "cpu": (SMALL,)},
        inputs=token_inputs,
        providers={
            GEMMS: bare_gemms(),
            "plain torch": plain_cross_entropy,
            "torch.compile": needs_cuda(compiled_cross_entropy),
            "liger-kernel": needs_cuda(liger_cross_entropy),
            "TRL": trl_cross_entropy,
            "ours": our_cross_entropy(),
            "ours, 128 MiB workspace": our_cross_entropy(workspace=128 * MiB),
        },
        flops=6,
    ),
)
