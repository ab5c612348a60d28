"""Cross-entropy of several heads: Medusa heads on a frozen or a trained backbone, and multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_losses
from benchmarks.entries import (
    GEMMS,
    Benchmark,
    Inputs,
    Random,
    Shape,
    bare_gemms,
    check_plain_memory,
    needs_cuda,
    optional,
    with_gradients,
)
from benchmarks.measure import Call

#: Llama-3-8B's head.
SHAPE = Shape(8192, 4096, 128256)
HEADS = (1, 3, 5)
DECAY = 0.8


@dataclass(frozen=True)
class HeadInputs(Inputs):
    """Hidden states `[tokens, H]` and weight `[V, H]` of each head; `hidden` and `weight` are the first's."""

    states: tuple[Tensor, ...]
    heads: tuple[Tensor, ...]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gradients are taken of."""
        distinct = {id(tensor): tensor for tensor in (*self.states, *self.heads) if tensor.requires_grad}
        return tuple(distinct.values())


@dataclass(frozen=True)
class Setting:
    """How many heads, and what they share."""

    count: int
    one_state: bool = False  # all heads see the same hidden states
    one_head: bool = False
    frozen: bool = False  # hidden states need no gradient

    def inputs(self, shape: Shape, device: torch.device) -> HeadInputs:
        """Random ones, of labels that every head sees from its own place."""
        random = Random(shape, device)
        states = [
            random.normal(shape.tokens, shape.hidden).requires_grad_(not self.frozen)
            for _ in range(1 if self.one_state else self.count)
        ]
        heads = [random.weight().requires_grad_() for _ in range(1 if self.one_head else self.count)]
        states, heads = (part * (self.count // len(part)) for part in (states, heads))
        labels = random.labels(1).flatten()
        return HeadInputs(shape, states[0], heads[0], labels, tuple(states), tuple(heads))


def weights(inputs: HeadInputs) -> list[float]:
    """Medusa's, of each head."""
    return [DECAY**k for k in range(len(inputs.heads))]


def plain(inputs: HeadInputs) -> Call:
    """Each head's logits, which stay until backward."""
    check_plain_memory(inputs.shape, inputs.weight.device)

    def call() -> tuple[Tensor, ...]:
        loss = inputs.weight.new_zeros((), dtype=torch.float32)
        for k, (hidden, head, scale) in enumerate(zip(inputs.states, inputs.heads, weights(inputs), strict=True)):
            logits = (hidden[: -(k + 1)] @ head.T).float()
            loss = loss + scale * F.cross_entropy(logits, inputs.labels[k + 1 :])
        return with_gradients(loss, inputs.leaves)

    return call


def liger(inputs: HeadInputs) -> Call:
    """Liger Kernel's loss of each head, as its example of Medusa heads calls it."""
    function = optional("liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss")()

    def call() -> tuple[Tensor, ...]:
        loss = inputs.weight.new_zeros((), dtype=torch.float32)
        for k, (hidden, head, scale) in enumerate(zip(inputs.states, inputs.heads, weights(inputs), strict=True)):
            loss = loss + scale * function(head, hidden[: -(k + 1)].contiguous(), inputs.labels[k + 1 :].contiguous())
        return with_gradients(loss, inputs.leaves)

    return call


def ours_each(inputs: HeadInputs) -> Call:
    """This library's loss, one call for each head."""
    losses = [liger_losses.LigerFusedLinearCrossEntropyLoss(shift=k + 1) for k in range(len(inputs.heads))]

    def call() -> tuple[Tensor, ...]:
        parts = zip(losses, inputs.heads, inputs.states, weights(inputs), strict=True)
        loss = sum([scale * loss(head, hidden, inputs.labels) for loss, head, hidden, scale in parts], 0.0)
        return with_gradients(loss, inputs.leaves)

    return call


def ours(inputs: HeadInputs) -> Call:
    """This library's loss of all heads."""
    shift = [k + 1 for k in range(len(inputs.heads))]
    loss = liger_losses.LigerFusedLinearCrossEntropyLoss(shift=shift, head_weights=weights(inputs))
    return lambda: with_gradients(loss(inputs.heads, inputs.states, inputs.labels)[0], inputs.leaves)


def _benchmark(name: str, title: str, setting: Setting) -> Benchmark:
    grad_hidden = 0 if setting.frozen else setting.count
    return Benchmark(
        name=f"{name}_{setting.count}",
        title=f"{title}, {setting.count} heads",
        shapes={"cuda": (SHAPE,)},
        inputs=setting.inputs,
        providers={
            GEMMS: bare_gemms(logits=setting.count, grad_hidden=grad_hidden, grad_weight=setting.count),
            "plain torch": plain,
            "liger-kernel, per head": needs_cuda(liger),
            "ours, per head": ours_each,
            "ours": ours,
        },
        flops=(4 if setting.frozen else 6) * setting.count,
    )


BENCHMARKS = (
    *(
        _benchmark("medusa_frozen", "Medusa heads on a frozen backbone", Setting(n, one_state=True, frozen=True))
        for n in HEADS
    ),
    *(_benchmark("medusa_all", "Medusa heads, backbone trained too", Setting(n, one_state=True)) for n in HEADS),
    *(_benchmark("mtp", "Multi-token prediction, one head for all", Setting(n, one_head=True)) for n in HEADS),
)
