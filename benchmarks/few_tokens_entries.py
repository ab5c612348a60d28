"""Small calls: one sequence, one pair, or a small hidden size, where the time beside the products counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import liger_losses
from benchmarks.cross_entropy_entries import (
    compiled_cross_entropy,
    liger_cross_entropy,
    our_cross_entropy,
    plain_cross_entropy,
    trl_cross_entropy,
)
from benchmarks.entries import GEMMS, Benchmark, Provider, Shape, bare_gemms, needs_cuda, token_inputs
from benchmarks.logps_entries import our_logps, plain_logps, trl_logps
from benchmarks.measure import Call
from benchmarks.preference_entries import dpo_inputs, liger_dpo, our_dpo, plain_dpo, trl_dpo


def captured(provider: Provider) -> Provider:
    """The provider's call in a CUDA graph: the host only launches the graph. (It keeps its memory between calls.)"""

    def build(inputs: Any) -> Call:
        call = provider(inputs)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = call()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return outputs

        return replay

    return needs_cuda(build)


def our_dense_logps(**options: Any) -> Provider:
    """This library's, without gradients; all tokens are projected."""

    def build(inputs: Any) -> Call:
        @torch.no_grad()
        def call() -> tuple[Tensor, ...]:
            logps = liger_losses.linear_logps(inputs.hidden, inputs.weight, inputs.labels, compact=False, **options)
            return ((logps * inputs.upstream).sum(),)

        return call

    return build


BENCHMARKS = (
    Benchmark(
        name="few_cross_entropy",
        title="Cross-entropy of few tokens or a small hidden size, forward and backward",
        shapes={"cuda": (Shape(1000, 4096, 128256), Shape(16384, 576, 49152), Shape(8192, 896, 151936))},
        inputs=token_inputs,
        providers={
            GEMMS: bare_gemms(),
            "plain torch": plain_cross_entropy,
            "torch.compile": needs_cuda(compiled_cross_entropy),
            "liger-kernel": needs_cuda(liger_cross_entropy),
            "TRL": trl_cross_entropy,
            "ours": our_cross_entropy(),
            "ours, compact=False": our_cross_entropy(compact=False),
            "ours, in a CUDA graph": captured(our_cross_entropy(compact=False)),
        },
        flops=6,
    ),
    Benchmark(
        name="few_logps_no_grad",
        title="Per-token log-probabilities of few tokens, forward alone",
        shapes={"cuda": (Shape(2048, 4096, 128256), Shape(512, 4096, 128256))},
        inputs=token_inputs,
        providers={
            GEMMS: bare_gemms(grad_hidden=0, grad_weight=0),
            "plain torch": plain_logps(gradients=False),
            "TRL": trl_logps(gradients=False),
            "ours": our_logps(gradients=False),
            "ours, compact=False": our_dense_logps(),
            "ours, in a CUDA graph": captured(our_dense_logps()),
        },
        flops=2,
    ),
    Benchmark(
        name="few_dpo",
        title="DPO of one pair with a reference model, forward and backward",
        shapes={"cuda": (Shape(2 * 1024, 4096, 128256, sequences=2, masked=0.5),)},
        inputs=dpo_inputs,
        providers={
            GEMMS: bare_gemms(logits=2),
            "plain torch": plain_dpo,
            "liger-kernel": liger_dpo,
            "TRL": trl_dpo,
            "ours": our_dpo(),
            # Of all tokens, twice as many.
            "ours, in a CUDA graph": captured(our_dpo(compact=False)),
        },
        flops=8,
    ),
)
