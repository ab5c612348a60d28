"""The weights of a lazy head in its forward: whether they are still the same when its logits are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from liger_losses.kernels.reading import version_of
from liger_losses.patching.lazy.warning import cannot_compute

#: Entries of a weight, in each of its dimensions, that are compared with their values in the forward.
_SAMPLED = (64, 32)

#: Counts the forwards of lazy heads.
_FORWARDS = [0]


class HeadWeights:
    """Weight and bias of one forward of ``tokens`` tokens; shared by all lazy logits that were made of its logits.

    The weights are not copied, so logits can only be computed while they are the same. Changes are noticed: from the
    in-place version and, as torch's fused optimizers and writes to ``parameter.data`` do not count there, from some of
    the values. On a GPU the host would wait for these, so they are compared only after a loss or another forward, or if
    a parameter has a gradient, with which an optimizer may have changed it.

    ``parameters`` are those that count in-place operations, if weight and bias are parts of them (DTensors).
    ``samples`` are :func:`samples_of` the weights in a forward that was not just now, with which they are compared.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        tokens: int,
        parameters: Sequence[Tensor | None] = (),
        samples: Sequence[Tensor] | None = None,
    ) -> None:
        self.tokens = tokens
        self.given = [t for t in (weight, bias) if t is not None]
        self.tensors = [t.detach() for t in self.given]  # their memory, which a new .data would not share
        self.parameters = [t for t in parameters if t is not None] or self.given
        self.versions = [version_of(t) for t in self.parameters]
        self.was_read = samples is not None or self._have_gradients()
        self.samples = samples_of(self.tensors) if samples is None else samples
        _FORWARDS[0] += 1
        self.forward = _FORWARDS[0]

    def check(self, values: bool = False) -> None:
        """Raise RuntimeError if the weights have changed; with ``values``, also if they were freed or written to."""
        freed = any(t.numel() and t.untyped_storage().size() == 0 for t in self.tensors)
        if freed and values:
            raise cannot_compute(
                "the head's weights were freed after its forward or backward (for example by fully_shard), so "
                "these lazy logits cannot be computed any more. Compute what you need from them, such as "
                "logits.argmax(-1), before loss.backward(); or keep the weights with "
                "model.set_reshard_after_backward(False)."
            )
        if not freed and (self._changed() or (values and self._may_be_written() and self._differ())):
            raise cannot_compute(
                "the weight or bias of lazy logits has changed since the forward, by an in-place operation such "
                "as an optimizer's step, so these logits and their gradients cannot be computed any more. Call "
                "loss.backward() before optimizer.step(). Compute other results from the logits before it too, "
                "such as logits.argmax(-1); liger_losses.patching.lazy.true_values(logits) computes all of them."
            )

    def _changed(self) -> bool:
        """Whether a parameter was changed in place, or has other memory now."""
        moved = any(a.data_ptr() != b.data_ptr() for a, b in zip(self.given, self.tensors, strict=True))
        return moved or self.versions != [version_of(p) for p in self.parameters]

    def _have_gradients(self) -> bool:
        return any(p.is_leaf and p.grad is not None for p in self.parameters)

    def _may_be_written(self) -> bool:
        on_host = self.tensors[0].device.type == "cpu"
        return on_host or self.was_read or self.forward != _FORWARDS[0] or self._have_gradients()

    def _differ(self) -> bool:
        return not all(_sample(t).equal(sample) for t, sample in zip(self.tensors, self.samples, strict=True))


def samples_of(tensors: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Some entries of each weight, copied."""
    return tuple([_sample(tensor.detach()).clone() for tensor in tensors if tensor is not None])


def _sample(tensor: Tensor) -> Tensor:
    """Some of a weight's entries, a view."""
    steps = (max(1, size // sampled) for size, sampled in zip(tensor.shape, _SAMPLED, strict=False))
    return tensor[tuple(slice(None, None, step) for step in steps)]
