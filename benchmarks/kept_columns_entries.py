"""Per-token log-probabilities over kept columns, beside the products that the whole vocabulary takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import liger_losses
from benchmarks.entries import GEMMS, Benchmark, Provider, Shape, TokenInputs, bare_gemms, token_inputs
from benchmarks.logps_entries import our_logps
from benchmarks.measure import Call

#: The most columns of a token; some places in the second half are padding.
KEPT = (8, 20, 64, 256, 1024)
_SHAPES = (Shape(8192, 4096, 128256), Shape(8192, 2048, 151936))


@dataclass(frozen=True)
class SupportInputs(TokenInputs):
    """Inputs of losses on tokens, and `ids` `[tokens, k]`, in which some columns are far more frequent than others."""

    ids: dict[int, Tensor]


def support_inputs(shape: Shape, device: torch.device) -> SupportInputs:
    """Kept columns by a power law: a few are kept by most tokens, many by none."""
    inputs = token_inputs(shape, device)
    generator = torch.Generator(device).manual_seed(1)
    ids = {}
    for k in KEPT:
        k = min(k, shape.vocab // 4)
        drawn = torch.rand(shape.tokens, k, device=device, generator=generator)
        # One column from each of k intervals of a power law, so that all of a token's differ.
        at = (torch.arange(k, device=device) + drawn) / k
        columns = (at**4 * (shape.vocab - k)).long() + torch.arange(k, device=device)
        columns[:, k // 2 :][torch.rand(shape.tokens, k - k // 2, device=device, generator=generator) < 0.3] = -1
        label = inputs.labels.clamp(min=0)[:, None]
        columns = torch.where(columns == label, -1, columns)
        columns[:, :1] = label
        ids[k] = columns
    return SupportInputs(shape, inputs.hidden, inputs.weight, inputs.labels, inputs.upstream, ids)


def _weighted(inputs: SupportInputs, logps: Any, gradients: bool) -> tuple[Tensor, ...]:
    with torch.set_grad_enabled(gradients):
        loss = (logps() * inputs.upstream).sum()
    if not gradients:
        return (loss,)
    found = torch.autograd.grad(loss, inputs.leaves)
    return (loss.detach(), *(grad._values() if grad.is_sparse else grad for grad in found))


def kept_logps(k: int, gradients: bool = True, sparse: bool = False) -> Provider:
    """This library's, over `k` columns of each token."""

    def build(inputs: SupportInputs) -> Call:
        ids = inputs.ids[min(inputs.ids, key=lambda size: abs(size - k))]
        support = liger_losses.TokenSupport(ids, sparse_grad=sparse)

        def logps() -> Tensor:
            return liger_losses.linear_logps(inputs.hidden, inputs.weight, inputs.labels, support=support)

        return lambda: _weighted(inputs, logps, gradients)

    return build


BENCHMARKS = (
    Benchmark(
        name="kept_columns",
        title="Per-token log-probabilities over kept columns, forward and backward",
        shapes={"cuda": _SHAPES},
        inputs=support_inputs,
        providers={
            # The whole vocabulary's: logits twice, and both gradients.
            GEMMS: bare_gemms(logits=2),
            "ours, whole vocabulary": our_logps(),
            **{f"ours, {k} columns": kept_logps(k) for k in KEPT},
            "ours, 20 columns, sparse gradient": kept_logps(20, sparse=True),
        },
        flops=8,
    ),
    Benchmark(
        name="kept_columns_no_grad",
        title="Per-token log-probabilities over kept columns, forward alone",
        shapes={"cuda": _SHAPES[:1]},
        inputs=support_inputs,
        providers={
            GEMMS: bare_gemms(grad_hidden=0, grad_weight=0),
            "ours, whole vocabulary": our_logps(gradients=False),
            **{f"ours, {k} columns": kept_logps(k, gradients=False) for k in KEPT},
        },
        flops=2,
    ),
)
