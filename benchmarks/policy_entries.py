"""The benchmarks of GRPO, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import liger_losses
from benchmarks.entries import (
    GEMMS,
    Benchmark,
    Inputs,
    Provider,
    Random,
    Shape,
    bare_gemms,
    check_plain_memory,
    optional,
    with_gradients,
)
from benchmarks.logps_entries import _plain_logps
from benchmarks.measure import Call


@dataclass(frozen=True)
class GRPOInputs(Inputs):
    """Completions `[sequences, T]` (as labels), advantages `[sequences]`, and what the old policy made of them."""

    advantages: Tensor
    old_logps: Tensor


def grpo_inputs(shape: Shape, device: torch.device) -> GRPOInputs:
    """Completions without padding, and an old policy close to this one."""
    random = Random(shape, device)
    hidden, weight = random.normal(shape.sequences, shape.length, shape.hidden), random.weight()
    labels = random.labels(shape.sequences)
    advantages = random.normal(shape.sequences, dtype=torch.float32)
    with torch.no_grad():
        old = liger_losses.linear_logps(hidden, weight, labels) + random.normal(*labels.shape, scale=0.1).float()
    return GRPOInputs(shape, hidden.requires_grad_(), weight.requires_grad_(), labels, advantages, old)


def plain_grpo(inputs: GRPOInputs) -> Call:
    """Logits of all tokens."""
    check_plain_memory(inputs.shape, inputs.weight.device)

    def call() -> tuple[Tensor, ...]:
        ratio = (_plain_logps(inputs.hidden, inputs.weight, inputs.labels) - inputs.old_logps).exp()
        advantages = inputs.advantages[:, None]
        objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return with_gradients(-objective.mean(), inputs.leaves)

    return call


def grpo_by(loss: Any) -> Provider:
    """A provider from a loss that takes Liger's call form."""

    def build(inputs: GRPOInputs) -> Call:
        i, mask = inputs, torch.ones_like(inputs.labels)
        return lambda: with_gradients(
            loss(i.hidden, i.weight, i.labels, mask, i.advantages, old_per_token_logps=i.old_logps)[0], i.leaves
        )

    return build


def liger_grpo(inputs: GRPOInputs) -> Call:
    """Liger Kernel's chunked loss; compiling it is for GPUs."""
    loss = optional("liger_kernel.chunked_loss", "LigerFusedLinearGRPOLoss")
    torch._dynamo.reset()
    on_gpu = inputs.weight.device.type == "cuda"
    return grpo_by(loss(beta=0.0, loss_type="bnpo", compiled=on_gpu, use_ref_model=False))(inputs)


def our_grpo(**options: Any) -> Provider:
    """This library's."""
    return grpo_by(liger_losses.LigerFusedLinearGRPOLoss(beta=0.0, loss_type="bnpo", **options))


BENCHMARKS = (
    Benchmark(
        name="grpo",
        title="GRPO's clipped loss per token, forward and backward",
        shapes={"cuda": (Shape(16 * 1024, 4096, 128256, sequences=16),)},
        inputs=grpo_inputs,
        providers={
            GEMMS: bare_gemms(),
            "plain torch": plain_grpo,
            "liger-kernel": liger_grpo,
            "ours": our_grpo(),
            "ours, a completion's ratio": our_grpo(importance_sampling_level="sequence"),
        },
        flops=6,
    ),
)
