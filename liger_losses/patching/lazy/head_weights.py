"""The weights of a lazy head in its forward: whether they are still the same when its logits are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from liger_losses.kernels.reading import version_of
from liger_losses.patching.lazy.warning import cannot_compute

#: Entries of a weight, in each of its dimensions, that are compared with their values in the forward.
_SAMPLED = (64, 32)

#: Gathers weights whose memory was freed, in the dtypes of the forward; or returns ``None``.
Gather = Callable[[], "list[Tensor] | None"]
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
        gather: Gather | None = None,
        parameters: Sequence[Tensor | None] = (),
        samples: Sequence[Tensor] | None = None,
    ) -> None:
        self.tokens, self.gather = tokens, gather
        self.given = [t for t in (weight, bias) if t is not None]
        self.tensors = [t.detach() for t in self.given]  # their memory, which a new .data would not share
        self.parameters = [t for t in parameters if t is not None] or self.given
        self.versions = [version_of(t) for t in self.parameters]
        self.was_read = samples is not None or self._have_gradients()
        self.samples = samples_of(self.tensors) if samples is None else samples
        self.gathered: list[Tensor] | None = None
        _FORWARDS[0] += 1
        self.forward = _FORWARDS[0]

    @property
    def are_there(self) -> bool:
        """Whether the weights are where they were."""
        freed = any(t.numel() and t.untyped_storage().size() == 0 for t in self.tensors)
        return self.gathered is None and not freed

    def check(self, values: bool = False) -> None:
        """Raise RuntimeError if the weights have changed; with ``values``, also if some of their values have."""
        if self.are_there and (self._changed() or (values and self._may_be_written() and self._differ(self.tensors))):
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

    def _differ(self, tensors: list[Tensor]) -> bool:
        return not all(_sample(tensor).equal(sample) for tensor, sample in zip(tensors, self.samples, strict=True))

    def gather_tensor(self, tensor: Tensor | None) -> Tensor | None:
        """A weight whose memory was freed, or a slice of one, gathered again; other tensors as they are.

        Raises:
            RuntimeError: nobody can gather them, or they have changed.
        """
        if tensor is None:
            return tensor
        if self.gathered is None:
            whole = None if self.gather is None else self.gather()
            self.gathered = None if whole is None or self._differ(whole) else whole
        if self.gathered is None:
            raise cannot_compute(
                "the head's weights were freed after its forward or backward (for example by fully_shard), so "
                "these lazy logits cannot be computed any more. Compute what you need from them, such as "
                "logits.argmax(-1), before loss.backward(); or keep the weights with "
                "model.set_reshard_after_backward(False)."
            )
        for original, found in zip(self.tensors, self.gathered, strict=True):
            offset = tensor.storage_offset() - original.storage_offset()
            shared = tensor.untyped_storage().data_ptr() == original.untyped_storage().data_ptr()
            if shared and 0 <= offset < original.numel():
                again = found.as_strided(tensor.shape, tensor.stride(), offset).requires_grad_(tensor.requires_grad)
                if again.requires_grad:
                    again.register_hook(_refuse_gradient)
                return again
        return tensor


def _refuse_gradient(gradient: Tensor) -> None:
    """The hook of a gathered weight, whose gradient would not reach the parameter."""
    raise cannot_compute(
        "the head's weights were freed before these lazy logits were read, so there is no gradient of the weights. "
        "Compute the loss before any backward(), or keep the weights with model.set_reshard_after_backward(False)."
    )


def samples_of(tensors: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Some entries of each weight, copied."""
    return tuple([_sample(tensor.detach()).clone() for tensor in tensors if tensor is not None])


def _sample(tensor: Tensor) -> Tensor:
    """Some of a weight's entries, a view."""
    steps = (max(1, size // sampled) for size, sampled in zip(tensor.shape, _SAMPLED, strict=False))
    return tensor[tuple(slice(None, None, step) for step in steps)]
