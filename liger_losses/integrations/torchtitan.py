"""Cross-entropy of torchtitan models without the logits, in the place of ``ChunkedLossWrapper``.

``from liger_losses.integrations.torchtitan import LinearCrossEntropyLoss``, and in the trainer's configuration
``loss=LinearCrossEntropyLoss.Config()``. T tokens, H hidden size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from liger_losses.chunked import Head
from liger_losses.chunked.losses.cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_losses.integrations.replacements import announce
from liger_losses.patching.loss_head import transform_of
from liger_losses.patching.probing import Mismatch
from liger_losses.places import Found, Replaced


def cross_entropy_in_forward(lm_head: Any, hidden_states: Tensor, labels: Tensor) -> Tensor:
    """The summed cross-entropy, computed in the forward of ``lm_head``, so that FSDP2's hooks on it do their work.

    Args:
        lm_head: a linear layer, ``fully_shard``-ed or not; its class may scale and soft-cap its logits.
        hidden_states: ``[T, H]``; with tensor parallelism, a DTensor on the mesh of the weight.
        labels: ``[T]`` int64; -100 for tokens without loss.

    Raises:
        TypeError: a layer that does something else to its logits, or has adapters.
    """
    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")

    def forward(hidden: Tensor) -> Tensor:
        try:
            transform = transform_of(lm_head, hidden)
        except Mismatch as mismatch:
            raise TypeError(
                f"the head, a {type(lm_head).__name__}, does not compute scaled or soft-capped products with its "
                f"weight: {mismatch}; keep torchtitan's ChunkedLossWrapper for this model."
            ) from None
        return loss(Head(lm_head.weight, getattr(lm_head, "bias", None), transform), hidden, labels)

    replaced = Replaced()
    replaced.add([Found(lm_head, "forward", forward)])
    try:
        return lm_head(hidden_states)
    finally:
        replaced.restore()


@functools.cache
def __getattr__(name: str) -> Any:
    """The loss, whose base class is imported here."""
    if name != "LinearCrossEntropyLoss":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchtitan.components.loss import ChunkedLossWrapper

    announce("torchtitan", "0.3", "cross-entropy")

    class LinearCrossEntropyLoss(ChunkedLossWrapper):  # the trainer gives heads to subclasses of it
        """``ChunkedLossWrapper`` with this library's cross-entropy instead of chunks and their loss function."""

        @dataclass(kw_only=True, slots=True)
        class Config(ChunkedLossWrapper.Config):
            pass

        def __init__(self, config: Any, *, compile_config: Any = None) -> None:
            self.lm_head: nn.Module | None = None

        def __call__(
            self, pred: Tensor, labels: Tensor, global_valid_tokens: Any = None, **loss_inputs: Any
        ) -> tuple[Tensor, dict[str, Tensor]]:
            """The loss over ``global_valid_tokens``, and no metrics; ``pred`` are the hidden states."""
            if self.lm_head is None:
                raise ValueError("the loss has no lm_head yet; call its set_lm_head(...) before the first loss.")
            loss = cross_entropy_in_forward(self.lm_head, pred, labels)
            return loss if global_valid_tokens is None else loss / global_valid_tokens, {}

    return LinearCrossEntropyLoss
