"""Layers that return lazy logits: linear ones, quantized ones, and PEFT's trainable tokens."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_losses.caller import warn
from liger_losses.checks import see
from liger_losses.chunked import Head, QuantizedWeight, Ranks, find_quantized, is_quantized
from liger_losses.patching.lazy import LazyLogits, lazy_linear, traced_linear
from liger_losses.patching.lazy.tensor import deferred_linear
from liger_losses.patching.linear_forward import LazyProducts, local_parameters
from liger_losses.patching.probing import Mismatch
from liger_losses.patching.swap import Replacement, original_class, replacement_of


class _Forced:
    """Whether a context of :func:`force_lazy_head` is open: in this thread, or in any."""

    here = contextvars.ContextVar("forced", default=False)
    #: For compiled graphs, as torch.compile cannot read a ContextVar.
    contexts: ClassVar[list[None]] = []


@contextlib.contextmanager
def force_lazy_head() -> Iterator[None]:
    """Within this context, lazy heads return :class:`~liger_losses.patching.lazy.LazyLogits` even under ``no_grad``."""
    token = _Forced.here.set(True)
    _Forced.contexts.append(None)
    try:
        yield
    finally:
        _Forced.contexts.pop()
        _Forced.here.reset(token)


class LazyLinear(nn.Linear):
    """``nn.Linear`` that returns lazy logits; for one token per sequence without gradients (generation), ordinary ones.

    Attributes:
        only_when_forced: return lazy logits within :func:`force_lazy_head` and nowhere else, for callers that reduce
            the logits before anybody else sees them.
        own_forward: the forward that was found on the instance, if there was one.
        ranks: this rank's part of the vocabulary, where the ranks of a mesh share the layer's rows.
        computes_linear: for :class:`Head`, that weight and bias are all that the logits are made of.
    """

    computes_linear: ClassVar[bool] = True
    only_when_forced = False
    own_forward: Callable[..., Tensor] | None = None
    ranks: Ranks | None = None

    def forward(self, input: Tensor) -> Tensor:
        if not _returns_lazy_logits(self, input):
            return super().forward(input) if self.own_forward is None else self.own_forward(input)
        if not torch.compiler.is_dynamo_compiling():
            return _lazy_forward(self, input)
        # Where weights come and go, the graph ends.
        gathers = hasattr(self, "set_reshard_after_forward")
        if gathers or any(hasattr(self.weight, name) for name in ("full_tensor", "ds_id")):
            return _lazy_forward_outside(self, input)
        return _compute(self, input)


def _returns_lazy_logits(layer: Any, hidden_states: Tensor) -> bool:
    if torch.is_grad_enabled():
        lazy = layer.training or hidden_states.requires_grad
    else:
        # A graph of torch.export or torch.jit has no place for them, and fully_shard frees its units' weights.
        # (The flag itself: torch.compile of torch 2.11 takes is_exporting() for true.)
        exporting = getattr(torch.compiler, "_is_exporting_flag", None)
        recorded = torch.compiler.is_exporting() if exporting is None else exporting
        several = not (recorded or torch.jit.is_tracing()) and hidden_states.dim() > 1 and hidden_states.shape[-2] > 1
        lazy = several and not hasattr(layer, "set_reshard_after_forward")
    forced = bool(_Forced.contexts) if torch.compiler.is_dynamo_compiling() else _Forced.here.get()
    return forced or (lazy and not layer.only_when_forced)


def _compute(layer: Any, hidden_states: Tensor) -> Any:
    """The layer's forward with lazy products."""
    if layer.own_forward is None:
        return _product(hidden_states, layer.weight, layer.bias)
    with LazyProducts(_product):
        return layer.own_forward(hidden_states)


def _lazy_forward(layer: Any, hidden_states: Tensor) -> Any:
    if layer.ranks is None and hasattr(layer.weight, "full_tensor"):
        warn(
            "the head's weight became a DTensor after patch(), so all logits are computed. For tensor parallelism, "
            'load the model with DistributedConfig(tp_plan="auto") of transformers, and patch it then; '
            "torch's parallelize_module on the head is not supported." + see("models-that-cannot-be-patched"),
            RuntimeWarning,
        )
        return _compute(layer, hidden_states)
    if hasattr(layer, "set_reshard_after_forward"):  # a unit of fully_shard; its weights must stay until backward
        layer.set_reshard_after_forward(False, recurse=False)
    if layer.ranks is not None:
        parameters = layer.weight, layer.bias
        return lazy_linear(hidden_states, *local_parameters(layer), ranks=layer.ranks, parameters=parameters)
    return _compute(layer, hidden_states)


_lazy_forward_outside = torch.compiler.disable(_lazy_forward)


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """``F.linear`` in a layer's forward, lazy; with the names of its arguments."""
    if hasattr(weight, "full_tensor"):
        return F.linear(input, weight, bias)
    if torch.compiler.is_dynamo_compiling():
        return traced_linear(input, weight, bias)
    # DeepSpeed's parameters have a ds_id.
    parameters: Any = [KeepGathered.apply(p) if hasattr(p, "ds_id") else p for p in (weight, bias)]
    return lazy_linear(input, *parameters)


class KeepGathered(torch.autograd.Function):
    """A weight that DeepSpeed's ZeRO-3 has gathered for the running forward, as a tensor that stays in memory.

    DeepSpeed gathers a module's weights again for its backward, but lazy logits use them earlier, and no backward of
    the module runs. So backward gathers the weight again, and partitions it at its end unless DeepSpeed has done so or
    a submodule (tied weights) uses it.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        parameter = ctx.parameter

        def partition() -> None:
            if parameter.ds_status.name == "AVAILABLE" and not parameter.ds_active_sub_modules:
                parameter.partition(param_list=[parameter], has_been_updated=False)

        if parameter.ds_status.name != "AVAILABLE":
            parameter.all_gather(param_list=[parameter])
            engine = getattr(torch.autograd.Variable, "_execution_engine", None)
            if engine is not None:  # else it stays gathered until DeepSpeed partitions it
                engine.queue_callback(partition)
        return gradient


@dataclass(frozen=True)
class LazyTokens(Replacement):
    """The forward of PEFT's trainable tokens on a head: a product with a copy of its weight that has other rows."""

    def call(self, module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, with lazy products."""
        if not _returns_lazy_logits(module, hidden_states):
            return NotImplemented
        with LazyProducts(_product):
            return original_class(module).forward(module, hidden_states, *args, **kwargs)

    def probed_attributes(self, module: nn.Module) -> frozenset[str]:
        """None: each call reads the layer."""
        return frozenset()

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        """Whether a module is PEFT's layer."""
        return hasattr(module, "trainable_tokens_delta")

    @classmethod
    def match(cls, module: nn.Module) -> LazyTokens:
        """There is one kind."""
        return cls()


@dataclass(frozen=True)
class LazyQuantized(Replacement):
    """The forward of a quantized head, whose rows are dequantized where the logits are read."""

    def call(self, module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The product with the layer's rows; ordinary logits come from the layer's own forward."""
        if args or kwargs or hidden_states.dim() < 2 or not _returns_lazy_logits(module, hidden_states):
            return NotImplemented
        return _lazy_quantized_forward(module, hidden_states)

    def probed_attributes(self, module: nn.Module) -> frozenset[str]:
        """None: each call reads the layer."""
        return frozenset()

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        """Whether a layer has a quantized weight, of whatever kind."""
        weight = getattr(module, "weight", None)
        ordinary = type(weight) is nn.Parameter and weight.is_floating_point()
        return is_quantized(module) and not ordinary and not hasattr(module, "base_layer")

    @classmethod
    def match(cls, module: nn.Module) -> LazyQuantized:
        """Rows that can be read, and whose products the layer computes; else Mismatch."""
        try:
            found = find_quantized(module)
        except TypeError as error:
            raise Mismatch(str(error)) from None
        if found is None:
            raise Mismatch("it has not been quantized yet: move the model to its device, then patch it")
        if found.device.type == "meta":
            raise Mismatch("its weight is on the meta device, and what it computes must be compared: load it first")
        before = dict(vars(module))  # a first forward may choose the dtype to compute in
        try:
            same = _disagreement(module, found) <= _QUANTIZATION_ERROR
        except Exception as error:
            raise Mismatch(f"it fails on small hidden states ({type(error).__name__}: {str(error)[:160]})") from error
        finally:
            vars(module).update(before)
        if not same:
            raise Mismatch("it computes something else than the product with its dequantized rows")
        return cls()


#: Layers may round hidden states to 8 bits before their product, which this library does not.
_QUANTIZATION_ERROR = 0.05


def _disagreement(layer: nn.Module, found: QuantizedWeight) -> float:
    """How far what a layer computes is from the product with the rows that were read, the first and the last."""
    (vocab_size, hidden_size), size = found.shape, 64
    # The layer's own forward, also where it was patched to return lazy logits.
    own = getattr(type(layer), "_liger_original", type(layer)).forward
    forward = vars(layer).get("forward") or partial(own, layer)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, hidden_size, dtype=torch.float32, generator=generator).to(found.device, found.dtype)
    with torch.enable_grad():  # in evaluation, layers may change how their weight is laid out
        logits: Tensor = forward(hidden.requires_grad_()).float()
    if logits.shape != (2, vocab_size):
        return math.inf
    errors, bias = [], getattr(layer, "bias", None)
    with torch.no_grad():
        for start in {0, max(vocab_size - size, 0)}:
            part = slice(start, min(start + size, vocab_size))
            expected = F.linear(hidden.float(), found.rows(part.start, part.stop).float())
            expected = expected if bias is None else expected + bias[part].float()
            error = (logits[:, part] - expected).norm()
            errors.append(float(error / expected.norm()) if error != 0 else 0.0)
    return max(math.inf if math.isnan(error) else error for error in errors)


@torch.compiler.disable
def _lazy_quantized_forward(module: Any, hidden_states: Tensor) -> Tensor:
    """Lazy logits in the dtype of the hidden states, or autocast's."""
    # The layer may round hidden states before the product; its result has their own dtype then.
    compute_dtype = getattr(module, "compute_dtype", None)
    operand = compute_dtype or hidden_states.dtype
    # A copy: a bias that is trained may have changed by the time that the logits are read.
    bias = None if module.bias is None else module.bias.to(operand, copy=True)
    head = Head(find_quantized(module), bias)  # type: ignore[arg-type]
    deferred = deferred_linear(hidden_states.to(operand), head)
    return LazyLogits.make(deferred if compute_dtype is None else replace(deferred, dtype=hidden_states.dtype))


def is_lazy_layer(layer: nn.Module) -> bool:
    """Whether a layer can return lazy logits."""
    return isinstance(layer, LazyLinear) or isinstance(replacement_of(layer), (LazyTokens, LazyQuantized))
