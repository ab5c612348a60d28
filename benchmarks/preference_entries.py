"""The benchmarks of DPO, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_losses
from benchmarks.entries import (
    GEMMS,
    IGNORED,
    SMALL,
    TRL_CHUNK,
    Benchmark,
    Inputs,
    Provider,
    Random,
    Shape,
    bare_gemms,
    check_plain_memory,
    lean,
    optional,
    with_gradients,
)
from benchmarks.logps_entries import _plain_logps
from benchmarks.measure import Call

BETA = 0.1


@dataclass(frozen=True)
class DPOInputs(Inputs):
    """Stacked pairs, chosen sequences first, and the reference model's hidden states and head."""

    ref_hidden: Tensor
    ref_weight: Tensor


def dpo_inputs(shape: Shape, device: torch.device) -> DPOInputs:
    """Pairs, and a reference model close to the policy."""
    random = Random(shape, device)
    hidden, weight = random.normal(shape.sequences, shape.length, shape.hidden), random.weight()
    ref_hidden = hidden + random.normal(*hidden.shape, scale=0.05)
    labels = random.labels(shape.sequences)
    return DPOInputs(
        shape, hidden.requires_grad_(), weight.requires_grad_(), labels, ref_hidden, weight.detach().clone()
    )


def _dpo(logratios: Tensor) -> Tensor:
    """DPO's loss of `[2 * pairs]` log-ratios, chosen ones first."""
    chosen, rejected = logratios.chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def plain_dpo(inputs: DPOInputs) -> Call:
    """Logits of all tokens of policy and reference."""
    check_plain_memory(inputs.shape, inputs.weight.device)

    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            reference = _plain_logps(inputs.ref_hidden, inputs.ref_weight, inputs.labels).sum(-1)
        policy = _plain_logps(inputs.hidden, inputs.weight, inputs.labels).sum(-1)
        return with_gradients(_dpo(policy - reference), inputs.leaves)

    return call


def _dpo_by(inputs: DPOInputs, loss: Callable[..., Any]) -> Call:
    """A call of a loss that takes the stacked form."""
    i = inputs
    return lambda: with_gradients(loss(i.weight, i.hidden, i.labels, None, i.ref_hidden, i.ref_weight)[0], i.leaves)


def liger_dpo(inputs: DPOInputs) -> Call:
    """Liger Kernel's chunked loss; compiling it is for GPUs."""
    loss = optional("liger_kernel.chunked_loss", "LigerFusedLinearDPOLoss")
    torch._dynamo.reset()
    return _dpo_by(inputs, loss(beta=BETA, compiled=inputs.weight.device.type == "cuda"))


def trl_dpo(inputs: DPOInputs) -> Call:
    """TRL's chunked log-probabilities of the tokens that carry loss, summed over each sequence."""
    apply = optional("trl.kernels", "ChunkedLogProbFunction").apply
    mask = inputs.labels != IGNORED
    labels, sequence = inputs.labels[mask], mask.nonzero()[:, 0]

    def sums(hidden: Tensor, weight: Tensor) -> Tensor:
        logps = apply(hidden[mask], weight, None, labels, 1.0, TRL_CHUNK, None, 1.0, ())[0]
        return logps.new_zeros(len(mask)).index_add(0, sequence, logps)

    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            reference = sums(inputs.ref_hidden, inputs.ref_weight)
        return with_gradients(_dpo(sums(inputs.hidden, inputs.weight) - reference), inputs.leaves)

    return call


def our_dpo(**options: Any) -> Provider:
    """This library's."""
    return lambda inputs: _dpo_by(inputs, liger_losses.LigerFusedLinearDPOLoss(beta=BETA, **options))


BENCHMARKS = (
    Benchmark(
        name="dpo",
        title="DPO with a reference model, forward and backward",
        shapes={
            "cuda": (
                Shape(8 * 2048, 4096, 128256, sequences=8, masked=0.5),
                Shape(8 * 4096, 4096, 128256, sequences=8, masked=0.5),
                Shape(8 * 2048, 2048, 151936, sequences=8, masked=0.5),
            ),
            "cpu": (SMALL,),
        },
        inputs=dpo_inputs,
        providers={
            # One more pass over the logits is the reference model's.
            GEMMS: bare_gemms(logits=2),
            "plain torch": plain_dpo,
            "liger-kernel": liger_dpo,
            "TRL": trl_dpo,
            "ours": our_dpo(),
            "ours, 300 MiB by default": lean(our_dpo()),
        },
        flops=8,
    ),
)
