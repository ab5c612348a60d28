"""Whatever multiplies hidden states into logits is a :class:`Head`. H hidden size, V vocabulary size."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor, nn

from liger_losses.chunked.engine.checks import check_weight
from liger_losses.kernels.logit_transform import LogitTransform


@dataclass(frozen=True, eq=False)
class Head:
    """A language model's last layer: ``logits = transform(hidden_states @ weight.T + bias)``.

    Every operation and every loss takes one in place of a weight; policy, reference and teacher each have their own.
    A head is checked once, when it is made.

    Args:
        weight: ``[V, H]``, floating point, as in ``nn.Linear``.
        bias: ``[V]`` or ``None``.
        transform: temperature, scale and soft-cap of the logits.

    Raises:
        TypeError: not tensors, or not floating point.
        ValueError: shapes or devices that do not fit together.
    """

    weight: Tensor
    bias: Tensor | None = None
    transform: LogitTransform = LogitTransform()

    def __post_init__(self) -> None:
        check_weight(self.weight, self.bias)

    @classmethod
    def of(
        cls, weight: Tensor | nn.Module | Head, bias: Tensor | None = None, transform: LogitTransform | None = None
    ) -> Head:
        """A head from what there is: tensors, a module such as ``model.lm_head``, or a head.

        Args:
            weight: ``[V, H]``; or an ``nn.Linear`` (or ``nn.Embedding``, for tied weights) that holds it and the bias;
                or a head, which is returned.
            bias: ``[V]``, for a weight without one of its own.
            transform: joined with the head's own: what one of the two leaves at its default comes from the other.

        Raises:
            TypeError: a module that is no linear layer: a whole model, an adapter, a quantised layer.
            ValueError: a bias, temperature, scale or soft-cap that is given twice.
        """
        if isinstance(weight, (nn.Linear, nn.Embedding)):
            weight = cls(weight.weight, getattr(weight, "bias", None))
        if not isinstance(weight, Head):
            if isinstance(weight, nn.Module):
                raise TypeError(_say_what_to_pass(weight))
            return cls(weight, bias, transform or LogitTransform())
        if bias is not None:
            if weight.bias is not None:
                raise ValueError("the bias was given twice: the head has one, and bias= is another; leave bias= out.")
            weight = replace(weight, bias=bias)
        if transform is None or transform == weight.transform:
            return weight
        return weight.with_fields(transform=_joined(weight.transform, transform))

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.weight.shape[1]

    def with_fields(self, **changes: Any) -> Head:
        """This head with other fields that follow from its own, so that nothing is checked again."""
        made = copy.copy(self)
        made.__dict__.update(changes)
        return made

    def columns(self, columns: slice) -> Head:
        """The head of some columns of the vocabulary."""
        return self.with_fields(weight=self.weight[columns], bias=None if self.bias is None else self.bias[columns])

    def detach(self) -> Head:
        """The same head as a constant."""
        bias = None if self.bias is None else self.bias.detach()
        return self.with_fields(weight=self.weight.detach(), bias=bias)


def _joined(own: LogitTransform, given: LogitTransform) -> LogitTransform:
    values = {}
    for field in fields(LogitTransform):
        ours, theirs = getattr(own, field.name), getattr(given, field.name)
        if ours != field.default and theirs not in (field.default, ours):
            raise ValueError(
                f"{field.name} was given twice: the head has {ours!r}, and {theirs!r} was given beside it; give one."
            )
        values[field.name] = theirs if ours == field.default else ours
    return LogitTransform(**values)


def _say_what_to_pass(module: nn.Module) -> str:
    kind = type(module).__name__
    if hasattr(module, "get_output_embeddings"):
        return f"got the whole model, {kind}; pass its head, model.get_output_embeddings(), or that layer's weight."
    if hasattr(module, "base_layer"):
        return (
            f"got {kind}, an adapter around the head, whose weight alone is not what it computes; pass "
            "Head(merged_weight, bias), or patch the model (liger_losses.patch), which keeps adapters."
        )
    return f"got {kind}, which is no nn.Linear; pass a floating-point weight [vocab_size, hidden_size] instead."
