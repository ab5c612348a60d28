"""Logits of which only the loss is needed: an object that stands for them between a model's head and its loss.

Inside a forward that computes its loss, the head returns :class:`PendingLogits`. Operations on tokens (views, slices)
are applied to the hidden states, casts, scales and soft-caps to the head, and losses and reductions over the vocabulary
are computed by the engine (``operations.py``). Anything else computes the logits, with one warning that names the
operation and its caller. H hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from liger_losses.caller import calling_line, warn
from liger_losses.checks import see
from liger_losses.chunked import Head, Teacher, linear_divergence, linear_statistics
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.nested import map_nested
from liger_losses.patching.operations import NeedsValues, compute

#: What shape and dtype say.
_OF_SHAPE = {"dim", "element_size", "is_floating_point", "ndim", "nelement", "numel", "size"}


class PendingLogits:  # no dataclass: fully_shard would look for tensors in it, hook and cast them
    """Hidden states, the head that multiplies them, and what was done to the logits since.

    Made without gradients, it has none.

    Args:
        hidden_states: ``[..., H]``. Operations on the token dimensions of the logits are applied to these.
        head: slices of the vocabulary are applied to its weight and bias; its transform is the scale and soft-cap of
            the logits so far, as the engine applies them.
        dtype: of the logits, as the model computes them.
        autocast: the autocast dtype under which the head ran, or ``None``.
        steps: casts, scales and the soft-cap as the model wrote them, in order, then a softmax, or a log-softmax and
            its negation or the terms of its divergence from a teacher: the name of a tensor's method, or of a function,
            and its arguments. The values are computed by these, with the model's rounding.
        product: computes the product of hidden states, where that is not the head's matrix and bias times them.
        aliases: one entry for each view of the same memory that torch would have made; shared by these.

    Attributes:
        shape: ``[..., V]``.
        device: of the hidden states.
        last_step: the name of the last step, or an empty string.
        normalized: whether they are log-probabilities, or probabilities.
        negated: whether they are log-probabilities times -1.
        computed: their values, once an operation has needed them.
    """

    _FIELDS = ("hidden_states", "head", "dtype", "autocast", "steps", "product")

    def __init__(
        self,
        hidden_states: Tensor,
        head: Head,
        dtype: torch.dtype,
        autocast: torch.dtype | None = None,
        steps: tuple[tuple[Any, ...], ...] = (),
        product: Callable[[Tensor], Tensor] | None = None,
        aliases: list[None] | None = None,
    ) -> None:
        if not torch.is_grad_enabled():  # here, and not where the loss is computed
            hidden_states, head = hidden_states.detach(), head.detach()
        self.hidden_states, self.head, self.dtype, self.autocast = hidden_states, head, dtype, autocast
        self.steps, self.product = steps, product
        self.aliases: list[None] = [] if aliases is None else aliases
        self.computed: list[Tensor] = []
        self.shape = torch.Size((*hidden_states.shape[:-1], head.vocab_size))
        self.device = hidden_states.device
        self.last_step: str = steps[-1][0] if steps else ""
        self.normalized = ("log_softmax", -1) in steps or self.last_step == "softmax"
        self.negated = steps.count(("neg",)) % 2 == 1

    def __repr__(self) -> str:
        return f"PendingLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @property
    def tensors(self) -> list[Tensor]:
        """Hidden states, weight, and bias if there is one."""
        return [x for x in (self.hidden_states, self.head.weight, self.head.bias) if x is not None]

    @property
    def requires_grad(self) -> bool:
        """Whether one of the tensors requires a gradient."""
        return any(tensor.requires_grad for tensor in self.tensors)

    def with_rows(self, hidden_states: Tensor, **changes: Any) -> PendingLogits:
        """The logits of other tokens, a view: an operation on the token dimensions, applied to the hidden states."""
        self.aliases.append(None)
        return self.with_changes(hidden_states=hidden_states, aliases=self.aliases, **changes)

    def with_changes(self, **changes: Any) -> PendingLogits:
        """Logits with other fields, in memory of their own."""
        return PendingLogits(**{name: getattr(self, name) for name in self._FIELDS} | changes)

    def with_step(self, *step: Any, **transform: Any) -> PendingLogits:
        """The logits after one more operation; ``transform`` holds the changed fields of the head's transform."""
        head = self.head.with_fields(transform=replace(self.head.transform, **transform)) if transform else self.head
        return self.with_changes(steps=(*self.steps, step), head=head)

    def forward_autocast(self) -> torch.autocast:
        """The autocast state of the head's forward, which may have ended by now, once :meth:`check` has passed."""
        self.check()
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    def check(self) -> None:
        """Raise RuntimeError if the head's weight was freed."""
        weights = () if torch.compiler.is_dynamo_compiling() else self.tensors[1:]
        if any(weight.numel() and weight.untyped_storage().size() == 0 for weight in weights):
            raise RuntimeError(
                "the weight or bias of the last layer was freed when that layer's own forward ended; it must stay "
                "until the loss is computed. Shard with torch.distributed.fsdp.fully_shard, or leave the last layer in "
                "the model's own unit." + see("models-that-cannot-be-patched")
            )

    def values(self, operation: str = "") -> Tensor:
        """The logits as an ordinary, differentiable tensor ``[..., V]``, computed once by the model's own operations.

        With an ``operation``, the first call of each caller warns that it needs them, unless they are fewer than the
        hidden states, as inside of adapters.
        """
        if not self.computed:
            several = self.shape[-1] > self.hidden_states.shape[-1]
            if operation and several and not torch.compiler.is_dynamo_compiling():
                _warn_computed(operation)
            # Those of logits that were made without gradients require none.
            with torch.set_grad_enabled(self.requires_grad), self.forward_autocast():
                logits = self.product(self.hidden_states) if self.product else linear(self.hidden_states, self.head)
                for name, *args in self.steps:
                    logits = (getattr(Tensor, name, None) or getattr(torch.nn.functional, name))(logits, *args)
            self.computed.append(logits.to(self.dtype))
        return self.computed[0]

    def statistics(self, labels: Tensor | None, *names: str, **options: Any) -> Any:
        """:func:`linear_statistics` of these hidden states and this head, or their divergence, if these are its terms;
        ``labels=None`` for those without labels."""
        if labels is None:
            labels = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
        with self.forward_autocast():
            if self.last_step != "kl_div":
                return linear_statistics(self.hidden_states, self.head, labels, names, **options)
            logits = self.steps[-1][1]
            logits.check()
            teacher = Teacher(logits.hidden_states, logits.head)
            return linear_divergence(self.hidden_states, self.head, labels, teacher, Divergence.forward_kl())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"PendingLogits has no attribute {name!r}")
        if name in _OF_SHAPE:
            return getattr(torch.empty(self.shape, dtype=self.dtype, device="meta"), name)
        function = getattr(Tensor, name)
        if not callable(function):
            return getattr(self.values(name), name)
        return lambda *args, **kwargs: _call(name, function, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func.__name__, func, args, kwargs or {})


_IN_PLACE = [f"__{name}__" for name in "setitem iadd isub imul itruediv ifloordiv imod ipow".split()]  # noqa: SIM905
# Python looks for operators in the class alone, and does not call __getattr__.
_OPERATORS = """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos
    abs eq ne lt le gt ge and or xor invert bool float int len iter contains getitem""".split()  # noqa: SIM905


def _call(name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on pending logits; on their values, if the table has none that computes it."""
    first = args[0] if args else None
    if isinstance(first, PendingLogits):
        try:
            return compute(name, first, *args[1:], **kwargs)
        except NeedsValues:
            if first.aliases and (name in _IN_PLACE or name[-1] == "_" != name[0]):
                raise RuntimeError(
                    f"{name} changes logits in place that have views, or are one, and these would not change with "
                    "them: compute new logits instead, as in logits = logits / temperature, or make them ordinary "
                    "ones first with logits.values()."
                ) from None
    args, kwargs = map_nested(lambda x: x.values(name) if isinstance(x, PendingLogits) else x, (args, kwargs))
    return func(*args, **kwargs)


def _operator(name: str) -> Any:
    return lambda self, *others: _call(name, getattr(Tensor, name), (self, *others), {})


for _name in [*_IN_PLACE, *(f"__{name}__" for name in _OPERATORS)]:
    setattr(PendingLogits, _name, _operator(_name))


def _warn_computed(operation: str) -> None:
    frame, line = calling_line()
    warn(
        f"{operation}, called in {frame.f_globals.get('__name__', '?')}:{line}, needs the values of pending logits: "
        "all [tokens, vocab] of them are computed now. The losses of liger_losses do not need them, nor do "
        "cross_entropy, log_softmax with gather, and logsumexp." + see("logits-that-were-computed"),
        RuntimeWarning,
    )


def autocast_of(hidden_states: Tensor) -> torch.dtype | None:
    """The dtype to which autocast would cast these; it leaves fp64 alone."""
    return None if hidden_states.dtype == torch.float64 else autocast_dtype(hidden_states.device)


def pending_product(hidden_states: Tensor, head: Head) -> PendingLogits:
    """The product with a head, under the autocast that is on, inside of a layer's forward."""
    autocast = autocast_of(hidden_states)
    return PendingLogits(hidden_states, head, autocast or hidden_states.dtype, autocast)


def is_pending(logits: Any) -> TypeGuard[PendingLogits]:
    """Whether these are pending logits whose values nobody has needed, and no probabilities."""
    return isinstance(logits, PendingLogits) and not logits.computed and not logits.normalized


def linear(hidden_states: Tensor, head: Head) -> Tensor:
    """What ``F.linear`` computes of a head's matrix and bias, under autocast too; a head's forward replaces that."""
    weight, bias = head.weight, head.bias
    if head.quantized is not None:
        weight = torch.cat(
            [head.quantized.rows(0, len(weight)).to(hidden_states.dtype), weight.to(hidden_states.dtype)], 1
        )
        bias = None if bias is None else bias.to(hidden_states.dtype)
    return torch.ops.aten.linear(hidden_states, weight, bias)
