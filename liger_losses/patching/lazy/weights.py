"""The weights of a lazy head as they were in its forward, however late its logits are read."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from liger_losses.chunked.engine.documentation import see
from liger_losses.chunked.engine.shard import VocabularyShard

#: Entries of a weight, in each of its dimensions, that are compared with their values in the forward.
_SAMPLED = (64, 32)

#: Gathers weights whose memory was freed, in the dtypes of the forward; or returns ``None``.
Gather = Callable[[], "list[Tensor] | None"]
#: Those of lazy logits that are alive.
_ALIVE: weakref.WeakSet[HeadWeights] = weakref.WeakSet()
#: Counts the forwards of lazy heads and the optimizers' steps.
_EVENTS = [0]


class HeadWeights:
    """Weight and bias of one forward of ``tokens`` tokens; shared by all lazy logits that were made of its logits.

    Before an optimizer's step, weights that it may change are copied, if lazy logits that need them are alive. The
    next forward of the head in training frees the copies, so that they are not there when a step needs most memory.
    Changes by anybody else are noticed: from the in-place version and, as writes to ``parameter.data`` do not count
    there, from some of the values. On a GPU the host would wait for these, so they are compared only after a loss, an
    optimizer's step or another forward.

    With ``shard``, weight and bias are views of this rank's part of parameters whose rows the ranks share.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        tokens: int,
        gather: Gather | None = None,
        shard: VocabularyShard | None = None,
    ) -> None:
        self.tokens, self.gather = tokens, gather
        self.parameters = [t for t in (weight, bias) if t is not None]
        self.tensors = [t.detach() for t in self.parameters]  # their memory, which a new .data would not share
        self.versions = [version_of(t) for t in self.parameters]
        self.samples = [_sample(t).clone() for t in self.tensors]
        self.copies: list[Tensor] | None = None
        self.with_gradients = torch.is_grad_enabled()
        self.was_read = False
        _EVENTS[0] += 1
        self.made_at = _EVENTS[0]
        trained = any(t.requires_grad and (t.is_leaf or shard is not None) for t in self.parameters)
        if trained:
            if self.with_gradients:
                for other in _ALIVE:
                    if other.with_gradients and other.tensors[0].data_ptr() == self.tensors[0].data_ptr():
                        other.copies = None
            _ALIVE.add(self)
            _watch_optimizers()

    @property
    def are_there(self) -> bool:
        """Whether the weights are where they were."""
        return self.copies is None and not self.freed

    @property
    def freed(self) -> bool:
        """Whether the memory of the weights was freed."""
        return any(t.numel() and t.untyped_storage().size() == 0 for t in self.tensors)

    def check(self, values: bool = False) -> None:
        """Raise RuntimeError if the weights have changed; with ``values``, also if some of their values have."""
        if self.are_there and (self._changed() or (values and self._written())):
            raise RuntimeError(
                "the weight or bias of lazy logits has changed since the forward, so these logits cannot be computed "
                "any more. Compute what you need of them before that: predictions = outputs.logits.argmax(-1) before "
                "the weights change, say. (Steps of a torch.optim.Optimizer that is not compiled do not matter until "
                "the next forward.)" + see("lazy-logits-that-cannot-be-computed-any-more")
            )

    def _changed(self) -> bool:
        """Whether a parameter was changed in place, or has other memory now."""
        pairs = zip(self.parameters, self.tensors, self.versions, strict=True)
        return any(version_of(p) != version or p.data_ptr() != t.data_ptr() for p, t, version in pairs)

    def _written(self) -> bool:
        """Whether some of the values have changed, if they may have."""
        if self.tensors[0].device.type != "cpu" and not self.was_read and self.made_at == _EVENTS[0]:
            return False
        return not all(torch.equal(_sample(t), s) for t, s in zip(self.tensors, self.samples, strict=True))

    def _gather_again(self) -> list[Tensor] | None:
        """The weights of the forward, gathered from all processes; ``None`` if they are not what they were."""
        found = None if self.gather is None else self.gather()
        if found is None or not all(_sample(t).equal(s) for t, s in zip(found, self.samples, strict=True)):
            return None
        return found

    def as_in_forward(self, tensor: Tensor | None) -> Tensor | None:
        """A copy of a weight, or of a slice of one; other tensors as they are.

        Raises:
            RuntimeError: there is no copy, and the memory of the weights was freed.
        """
        if tensor is None:
            return tensor
        if self.copies is None:
            self.copies = self._gather_again()
        if self.copies is None:
            raise RuntimeError(
                "the head's weights were freed after its forward or backward (by fully_shard, say), so these lazy "
                "logits cannot be computed any more. Compute what you need of them, such as logits.argmax(-1), "
                "before loss.backward(); or keep the weights with model.set_reshard_after_backward(False)."
                + see("lazy-logits-that-cannot-be-computed-any-more")
            )
        for original, kept in zip(self.tensors, self.copies, strict=True):
            offset = tensor.storage_offset() - original.storage_offset()
            shared = tensor.untyped_storage().data_ptr() == original.untyped_storage().data_ptr()
            if shared and 0 <= offset < original.numel():
                return kept.as_strided(tensor.shape, tensor.stride(), offset)
        return tensor


def version_of(tensor: Tensor) -> int:
    """Counts the in-place operations on a tensor's memory, where torch does."""
    return 0 if tensor.is_inference() else tensor._version


def _sample(tensor: Tensor) -> Tensor:
    """Some of a weight's entries, a view."""
    steps = (max(1, size // sampled) for size, sampled in zip(tensor.shape, _SAMPLED, strict=False))
    return tensor[tuple(slice(None, None, step) for step in steps)]


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_keep_copies)


def _keep_copies(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Copy the weights of lazy logits, once for all that share them."""
    if torch.compiler.is_compiling():
        return
    _EVENTS[0] += 1
    made: dict[int, list[Tensor]] = {}
    for weights in _ALIVE:
        contiguous = all(t.is_contiguous() for t in weights.tensors)
        if not contiguous or not weights.are_there or weights._changed():
            continue
        key = weights.tensors[0].data_ptr()
        made.setdefault(key, [])
        weights.copies = made[key] = made[key] or [t.clone() for t in weights.tensors]
