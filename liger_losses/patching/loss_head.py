"""The loss head: inside a forward that computes its loss, a model's output embedding returns pending logits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_losses.caller import warn
from liger_losses.checks import is_weight_and_bias, see
from liger_losses.chunked import Head, find_quantized, is_quantized
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.tracing import outside_graphs
from liger_losses.layers.plain import PLAIN
from liger_losses.patching import probing
from liger_losses.patching.pending import PendingLogits, autocast_of, linear, pending_product
from liger_losses.patching.probing import Mismatch
from liger_losses.patching.report import Entry
from liger_losses.patching.swap import (
    Filter,
    Replacement,
    Search,
    hooks_of,
    original_class,
    replacement_of,
    restore,
    swap,
)
from liger_losses.sequences import queue_callback

#: The attribute of a prepared head that says whether the model's loss shifts the labels, once that is known.
SHIFTS = "_liger_losses_shifts"
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_BACKWARD_HOOKS_OF_ALL = ("_global_backward_hooks", "_global_backward_pre_hooks")
_PARALLELIZED = (
    "torch's parallelize_module has split its weight, and takes DTensors from it: load the model with transformers' "
    'DistributedConfig(tp_plan="auto"), or take the loss from the last hidden states and a Head with group='
)
#: The function that layers call; one that replaces it in torch calls it, too.
_LINEAR = F.linear
#: Layers may round hidden states to 8 bits before their product, which this library does not.
_QUANTIZATION_ERROR = 0.05
#: From this size on, logits that nobody may need are worth a warning.
_MANY_BYTES = 2**30


class _Thread(threading.local):
    """The layers that return pending logits to this thread."""

    def __init__(self) -> None:  # in each thread; torch.compile would guard that a default is not set yet
        self.pending: tuple[nn.Module, ...] = ()


_thread = _Thread()


# --- Layers -----------------------------------------------------------------------------------------------------------


class Products(TorchFunctionMode):
    """Within this context, the products of linear layers are pending."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_product if func is _LINEAR else func)(*args, **(kwargs or {}))


@contextlib.contextmanager
def _of_zero(head: nn.Module) -> Iterator[None]:
    """Within this context, DeepSpeed's ZeRO-3 can gather and free the weights of a head with pending products.

    It replaces ``F.linear`` by an autograd function, and applies others to the tensors that layers take and return.
    """
    with contextlib.ExitStack() as stack:
        for layer in head.modules():
            stack.enter_context(layer.register_forward_hook(_show_states, prepend=True))
            stack.enter_context(layer.register_forward_hook(_take_states))
        stack.callback(setattr, F, "linear", F.linear)
        F.linear = _LINEAR
        yield


def _show_states(layer: nn.Module, args: Any, output: Any) -> Any:
    return [output, output.hidden_states] if isinstance(output, PendingLogits) else None


def _take_states(layer: nn.Module, args: Any, output: Any) -> Any:
    if type(output) is not list or not isinstance(output[0], PendingLogits):
        return None
    return output[0].with_changes(hidden_states=output[1])


def _product(input: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    """``F.linear`` with its arguments' names, pending where a head can express it."""
    hidden_states = input.values() if isinstance(input, PendingLogits) else input
    if type(weight) not in PLAIN and is_quantized(weight):
        return _quantized_product(hidden_states, weight, bias)
    mixed = hidden_states.dtype != weight.dtype and autocast_of(hidden_states) is None
    fits = weight.dim() == 2 and hidden_states.dim() > 1 and hidden_states.shape[-1] == weight.shape[-1]
    fits = fits and weight.is_floating_point() and not mixed and type(weight) in PLAIN
    if not fits or hidden_states.is_meta or (bias is not None and bias.shape != weight.shape[:1]):
        return _LINEAR(hidden_states, weight, bias)
    # DeepSpeed's parameters have a ds_id.
    weight, bias = (KeepGathered.apply(p) if hasattr(p, "ds_id") else p for p in (weight, bias))  # type: ignore
    return pending_product(hidden_states, Head(weight, bias, LogitTransform()))


@outside_graphs
def _quantized_product(hidden_states: Tensor, weight: Any, bias: Tensor | None, operand: Any = None) -> PendingLogits:
    """The product with a quantized weight, or a layer that has one, in the dtype of the hidden states."""
    dtype, operand = hidden_states.dtype, operand or hidden_states.dtype
    head = Head(find_quantized(weight), None if bias is None else bias.to(operand))  # type: ignore[arg-type]
    logits = pending_product(hidden_states.to(operand), head)
    return logits if operand == dtype else logits.with_changes(dtype=dtype)


class KeepGathered(torch.autograd.Function):
    """A weight that DeepSpeed's ZeRO-3 has gathered for the running forward, as a tensor that stays in memory.

    DeepSpeed gathers a module's weights again for its backward, but the backward of the loss runs before that and uses
    them. So this backward gathers the weight, and partitions it at its end unless DeepSpeed has done so or a submodule
    (tied weights) uses it.
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
            if queue_callback is not None:  # else it stays gathered until DeepSpeed partitions it
                queue_callback(partition)
        return gradient


@dataclass(frozen=True)
class LossHead(Replacement):
    """Layers that return pending logits where :func:`pending_logits` says so.

    They do all that their call does: adapters, hooks, and a forward that was put on the instance. Of a quantized layer,
    whose rows are dequantized where the logits are read, the forward is replaced.
    """

    methods: tuple[str, ...] = ("__call__",)
    quantized: bool = False
    reads_module = True
    key = staticmethod(id)  # type: ignore[assignment]  # each is looked at by itself

    def __str__(self) -> str:
        return "QuantizedHead" if self.quantized else "LossHead"

    @classmethod
    def match(cls, module: Any) -> LossHead:
        if _is_quantized_layer(module):
            _match_quantized(module)
            return cls(("forward",), quantized=True)
        forward = vars(module).get("forward")
        if forward is not None and hasattr(getattr(module, "weight", None), "full_tensor"):
            like = torch.empty((), dtype=torch.float32)
            try:  # of small weights, as fully_shard gathers them
                _small_logits(module, lambda layer, x: forward(x), like, like.dtype)
            except Mismatch:  # it exchanges messages, because its rows are on several processes
                _match_shared(module, forward)
                module.forward = partial(_shared_forward, forward, module)
        return cls()

    @classmethod
    def reason_to_leave(cls, module: nn.Module) -> str | None:
        """Why a head must compute its logits, or ``None``."""
        if isinstance(module, nn.Embedding) or type(module).forward is nn.Module.forward:
            return "it is no layer that multiplies hidden states"
        hooks_of_all = [getattr(nn.modules.module, name, None) for name in _BACKWARD_HOOKS_OF_ALL]
        for layer in module.modules():
            if any(hooks_of_all) or any(hooks_of(layer, kind) for kind in _BACKWARD_HOOKS):
                return "it has backward hooks, which a gradient that is taken elsewhere would pass by"
            if type(layer).__name__ == "FullyShardedDataParallel":
                return "it is a unit of FSDP1, which frees its weight after its forward: leave it in the model's unit"
            if getattr(layer, "weight", None).__class__.__name__ == "DTensor":
                hooks = [*hooks_of(layer, "_forward_pre_hooks").values(), *hooks_of(layer, "_forward_hooks").values()]
                if any(getattr(hook, "__module__", "").startswith("torch.distributed.tensor.") for hook in hooks):
                    return _PARALLELIZED
        return None

    def call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Pending logits; or ``NotImplemented``, and the layer's own method computes."""
        if module not in _thread.pending:
            return NotImplemented
        reason, logits = self.reason_to_leave(module), NotImplemented
        if not reason and self.quantized:
            logits = _quantized_logits(module, *args, **kwargs)
        elif not reason:
            split = any(hasattr(parameter, "ds_id") for parameter in module.parameters())
            with Products(), _of_zero(module) if split else contextlib.nullcontext():
                logits = original_class(module).__call__(module, *args, **kwargs)
        if logits is not NotImplemented and not isinstance(logits, PendingLogits):
            reason = "it does more than to multiply by a weight, and to cast and scale the result"
        if reason:
            warn(
                f"the output embedding, a {type(module).__name__}, computes its logits, [tokens, vocab]: {reason}."
                + see("models-that-cannot-be-patched"),
                RuntimeWarning,
            )
        return logits


def _quantized_logits(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The product with a quantized layer's rows."""
    if kwargs or len(args) != 1 or args[0].dim() < 2:
        return NotImplemented
    # The layer may round hidden states before the product; its result has their own dtype then.
    return _quantized_product(args[0], layer, layer.bias, getattr(layer, "compute_dtype", None))


def _match_quantized(module: Any) -> None:
    """Raise Mismatch unless a quantized layer computes what its rows say, as far as one can see."""
    weight = find_quantized(module)
    if weight is None:
        raise Mismatch("it has not been quantized yet: move the model to its device, then patch it")
    if weight.device.type == "meta":
        raise Mismatch("its weight is on the meta device, and what it computes must be compared: load it first")
    if "forward" in vars(module):
        raise Mismatch("it is quantized, and its forward was replaced on the instance")
    head = Head(weight, getattr(module, "bias", None))
    hidden, before = _random_states(head, 2), dict(vars(module))  # a first forward may choose the dtype
    try:
        # With gradients: without, layers may change how their weight is laid out.
        logits = type(module).forward(module, hidden.detach().requires_grad_()).detach()
    finally:
        vars(module).update(before)
    for part in (slice(0, 64), slice(max(head.vocab_size - 64, 0), head.vocab_size)):
        expected, fits = linear(hidden, head.columns(part)).float(), logits.shape == (2, head.vocab_size)
        if not (fits and (logits[:, part].float() - expected).norm() <= _QUANTIZATION_ERROR * expected.norm()):
            raise Mismatch("it computes something else than the product with its dequantized rows")


def _random_states(head: Head, *shape: int) -> Tensor:
    states = probing.random((*shape, head.hidden_size), torch.Generator().manual_seed(0), head.weight.dtype)
    return states.to(head.weight.device)


def _shared_forward(forward: Callable[[Tensor], Tensor], layer: Any, hidden_states: Tensor) -> Any:
    """The forward of a layer whose rows the ranks of a mesh share, and which returns the logits of all of them."""
    if layer not in _thread.pending:
        return forward(hidden_states)
    return pending_product(hidden_states, _shared_head(layer)).with_changes(product=forward)


def _shared_head(layer: Any) -> Head:
    """The head of a linear layer whose weight and bias are DTensors, and whose hidden states are plain tensors."""
    head = Head(layer.weight, layer.bias)
    return head.with_fields(ranks=dataclasses.replace(head.ranks, mesh=None, sums_hidden=True))


def _match_shared(module: Any, forward: Callable[[Tensor], Tensor]) -> None:
    """Raise Mismatch unless a linear layer's forward returns the logits of all ranks that share its rows.

    All ranks run it together, on the layer's own parameters.
    """
    try:
        head = _shared_head(module)
    except (TypeError, ValueError) as error:
        both = module.weight.device_mesh.ndim > 1
        order = "fully_shard was called before patch: apply tensor parallelism, then patch(model), then fully_shard"
        raise Mismatch(order if both else str(error)) from None
    hidden = _random_states(head, 1, 3)
    logits: Any = probing.observe(forward, [hidden])[0]
    if logits.shape != (1, 3, head.vocab_size):
        raise Mismatch(f"it returns {tuple(logits.shape)} and not all logits")
    lse, gradient = probing.observe(lambda x: forward(x).logsumexp(-1), [hidden])
    expected, other = probing.observe(lambda x: pending_product(x, head).logsumexp(-1), [hidden])
    columns = logits[..., head.ranks.columns(logits.shape[-1])]
    probing.check_close("its output", columns, linear(hidden, head).detach(), 2e-2)
    probing.check_close("its log-sum-exp", lse, expected, 2e-2)
    probing.check_close("its gradient", gradient, other, 2e-2)


def _is_quantized_layer(module: nn.Module) -> bool:
    """Whether a layer has a quantized weight that its own forward, and no ``F.linear``, multiplies by."""
    weight = getattr(module, "weight", None)
    by_linear = isinstance(module, nn.Linear) and isinstance(weight, Tensor) and is_quantized(weight)
    ordinary = type(weight) is nn.Parameter and weight.is_floating_point()
    return is_quantized(module) and not (ordinary or by_linear) and not hasattr(module, "base_layer")


# --- Heads ------------------------------------------------------------------------------------------------------------


def owner_of_head(model: nn.Module) -> Any:
    """The model that has the head, inside wrappers such as an adapter's or DistributedDataParallel; or ``None``."""
    return next((module for module in model.modules() if head_of(module) is not None), None)


def head_of(model: Any) -> nn.Module | None:
    """The output embedding of a model, or ``None``."""
    if not hasattr(type(model), "get_output_embeddings"):
        return None
    head = model.get_output_embeddings()
    return head if isinstance(head, nn.Module) else None


def prepare_head(model: nn.Module, filter_fn: Filter | None = None) -> list[Entry]:
    """Let the output embedding return pending logits, within :func:`pending_logits` and nowhere else.

    Args:
        model: a model with ``get_output_embeddings``, as transformers' models have it, or that contains one.
        filter_fn: ``(module, path) -> bool``; layers for which it returns False are left as they are.

    Returns:
        An entry for each layer, also if it was prepared before, or was left with the reason.
    """
    owner = owner_of_head(model)
    if owner is None:
        without = "it has no output embedding; for token losses, pass the model with its lm_head (AutoModelForCausalLM)"
        return [Entry("", type(model).__name__, None, without)]
    head, search = owner.get_output_embeddings(), Search(filter_fn)
    paths = {layer: path for path, layer in model.named_modules()}
    for layer in dict.fromkeys([*filter(_is_quantized_layer, head.modules()), head]):
        search.finds(LossHead, paths.get(layer, ""), layer)
    search.swap()
    return search.entries


def reason_against_head(model: Any) -> str:
    """Prepare the last layer of a model, or return why that is not possible."""
    entries = [] if _layers(head_of(owner_of_head(model))) else prepare_head(model)
    reasons = [f"{entry.path or 'the head'}: {entry.reason}" for entry in entries if entry.reason]
    return f"the last layer of {type(model).__name__} cannot be a Head ({'; '.join(reasons)})" if reasons else ""


def _layers(head: Any) -> list[Any]:
    """The layers of a head that were prepared, the head itself among them; none if it was not."""
    if not isinstance(replacement_of(head), LossHead):
        return []
    return [layer for layer in head.modules() if layer is head or getattr(replacement_of(layer), "quantized", False)]


@contextlib.contextmanager
def _pending(layers: list[Any]) -> Iterator[None]:
    """Within this context, layers return pending logits to this thread."""
    for layer in layers:
        for unit in layer.modules():
            if hasattr(unit, "set_reshard_after_forward"):
                _do_not_reshard(unit)
    _thread.pending += tuple(layers)
    try:
        yield
    finally:  # contexts need not end in the order in which they began: each removes its own layers
        _thread.pending = tuple([layer for layer in _thread.pending if layer not in layers])


@outside_graphs
def _do_not_reshard(unit: Any) -> None:
    """A unit of ``fully_shard`` keeps its weights from its forward to its backward."""
    unit.set_reshard_after_forward(False, recurse=False)


@contextlib.contextmanager
def pending_logits(*models: nn.Module) -> Iterator[None]:
    """Within this context, the prepared heads of models return :class:`PendingLogits`."""
    layers = [layer for model in models for layer in _layers_of(owner_of_head(model)) if layer not in _thread.pending]
    inner = {getattr(model, "module", model) for model in models if layers and _is_distributed()}
    with contextlib.ExitStack() as stack:
        for model in inner:
            stack.enter_context(model.register_forward_hook(_show_tensors, prepend=True))
        stack.enter_context(_pending(layers))
        yield


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _show_tensors(model: nn.Module, args: Any, output: Any) -> None:
    """Add to an output with pending logits tensors in their graph, where DistributedDataParallel and fully_shard look.

    The first waits for gradients of what it finds there, the second registers hooks. None of them may be a view.
    """
    if isinstance(output, dict) and torch.is_grad_enabled() and _is_distributed():
        for logits in [value for value in output.values() if isinstance(value, PendingLogits)]:
            logits.hidden_states = logits.hidden_states.clone()
            weights = [weight.flatten()[:1].sum() for weight in logits.tensors[1:]]
            # A field of transformers' outputs: fully_shard looks for no others.
            key = "hidden_states" if output.get("hidden_states") is None else "of_logits"
            output[key] = (logits.hidden_states, *weights)


# --- Models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossForward(Replacement):
    """The forward of a model that has the head: where it is given labels, its head returns pending logits.

    Attributes:
        keep_logits: compute the logits of forwards with labels and gradients, too.
        eval_logits: the same without gradients.
    """

    keep_logits: bool = False
    eval_logits: bool = True
    may_be_wrapped = reads_module = True

    def new_method(self, replaced: Callable[..., Any]) -> Callable[..., Any]:
        """The forward, with the loss computed inside it."""
        return lambda model, *args, **kwargs: _with_loss(partial(replaced, model), model, *args, **kwargs)


def _has_labels(forward: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if len(args) > 1 and not torch.compiler.is_dynamo_compiling():
        kwargs = inspect.signature(forward).bind_partial(*args).arguments | kwargs
    return kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None


def _with_loss(forward: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a patched model."""
    options = replacement_of(model)
    if not isinstance(options, LossForward):  # it was unpatched, and what is around it calls this
        return forward(*args, **kwargs)
    layers, training, labeled = _layers_of(model), torch.is_grad_enabled(), _has_labels(forward, args, kwargs)
    # A Trainer that keeps the labels back passes their number.
    kept_back = training and kwargs.get("num_items_in_batch") is not None
    wanted = kept_back or (labeled and (training or not options.eval_logits))
    if not wanted or any(layer in _thread.pending for layer in layers):
        output = forward(*args, **kwargs)
        _warn_of_many(model, output)
        return output
    with _pending(layers):
        output = forward(*args, **kwargs)
    if not labeled:
        _show_tensors(model, args, output)
        return output
    return _finished(output, options.keep_logits if training else options.eval_logits)


def _layers_of(model: Any) -> list[Any]:
    """The prepared layers of a model's head. If it is patched, and its head was replaced or has got adapters, they are
    prepared again; if they cannot be, that is said once."""
    patched = isinstance(replacement_of(model), LossForward) and not torch.compiler.is_dynamo_compiling()
    if patched and (reason := reason_against_head(model)):
        unpatch_head(model)
        warn(
            f"the output embedding of {type(model).__name__} was changed after patch(), and its logits, "
            f"[tokens, vocab], are computed from now on: {reason}. If you can undo that change, do so and call "
            "liger_losses.patch(model) again." + see("models-that-cannot-be-patched"),
            RuntimeWarning,
        )
    return _layers(head_of(model))


def _finished(output: Any, keep: bool) -> Any:
    """A forward's output, with the values of pending logits, or, where it has a loss, without them."""
    if isinstance(output, PendingLogits):
        return output.values()
    if type(output) is tuple:
        return tuple([_finished(x, keep) for x in output if keep or not isinstance(x, PendingLogits)])
    if not isinstance(output, dict) or not any(isinstance(value, PendingLogits) for value in output.values()):
        return output
    keep = keep or output.get("loss") is None
    entries = {name: _finished(x, keep) for name, x in output.items() if keep or not isinstance(x, PendingLogits)}
    return type(output)(**entries)


def _warn_of_many(model: nn.Module, output: Any) -> None:
    if not model.training or torch.compiler.is_dynamo_compiling():
        return
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor) and logits.requires_grad and logits.nbytes > _MANY_BYTES:
        warn(
            f"{type(model).__name__} returned {logits.nbytes / 2**30:.1f} GiB of logits: "
            "without labels, a patched model computes them. Pass it labels=, or give its hidden states to a loss with "
            "liger_losses.loss_inputs(model, ...)." + see("logits-that-were-computed"),
            RuntimeWarning,
        )


def patch_head(model: nn.Module, options: LossForward) -> None:
    """Let a model whose head is prepared compute its loss without logits."""
    owner = owner_of_head(model)
    swap(owner, options)  # again, too: the class of the model may have another forward since
    forward = vars(owner).get("forward")
    if forward is not None and getattr(forward, "func", None) is not _with_loss:
        owner.forward = functools.update_wrapper(partial(_with_loss, forward, owner), forward)


def unpatch_head(model: nn.Module) -> None:
    """Undo :func:`patch_head` and :func:`prepare_head`."""
    for module in model.modules():
        forward: Any = vars(module).get("forward")
        if getattr(forward, "func", None) in (_with_loss, _shared_forward):
            module.forward = forward.args[0]
        vars(module).pop(SHIFTS, None)
        if isinstance(replacement_of(module), (LossForward, LossHead)):
            restore(module)


# --- Transforms -------------------------------------------------------------------------------------------------------


def transform_of(layer: nn.Module, hidden_states: Tensor) -> LogitTransform:
    """What the forward of a linear layer's class does to the product of its input, weight and bias, or Mismatch.

    Args:
        layer: with a weight and, where it has one, a bias.
        hidden_states: what its forward takes, of which dtype and device are read.
    """
    if is_weight_and_bias(layer):
        return LogitTransform()
    weight: Any = layer.weight
    logits, arguments = _small_logits(layer, type(layer).forward, hidden_states, weight.dtype)
    if [tensor.data_ptr() for tensor in logits.tensors] != [tensor.data_ptr() for tensor in arguments]:
        raise Mismatch("its product is of another input, weight or bias than the layer's")
    return logits.head.transform


def _small_logits(
    layer: Any, forward: Callable[[Any, Tensor], Any], like: Tensor, weight_dtype: torch.dtype
) -> tuple[PendingLogits, list[Tensor]]:
    """What ``forward(layer, hidden states)`` returns of small ones and of small parameters, and these."""
    # Autocast may be on for the device of ``like``, and for no other.
    hidden = torch.zeros(1, 3, probing.shape_of(layer.weight)[1], dtype=like.dtype, device=like.device)
    shapes = {"weight": (5, hidden.shape[-1])} | ({} if getattr(layer, "bias", None) is None else {"bias": (5,)})
    small = {name: torch.zeros(shape, dtype=weight_dtype, device=like.device) for name, shape in shapes.items()}
    with Products():
        try:
            logits = probing.call_with(small, forward, layer, hidden)
        except Exception as error:
            raise Mismatch(f"{type(error).__name__}: {str(error)[:160]}") from error
    if not isinstance(logits, PendingLogits) or logits.computed or logits.shape != (1, 3, 5):
        raise Mismatch("it does more than to call F.linear with its parameters, and to cast and scale the result")
    return logits, [hidden, *small.values()]
