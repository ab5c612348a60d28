"""Recognizes what a linear layer's own forward computes: one that was put on the instance, or its subclass's."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_losses.chunked.engine.ranks import VocabularyRanks, local_rows, share_mesh
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.tracing import is_weight_and_bias
from liger_losses.patching.lazy import allow_materialization, lazy_linear
from liger_losses.patching.lazy.linear import linear
from liger_losses.patching.lazy.tensor import deferred_logits
from liger_losses.patching.probing import (
    Case,
    Mismatch,
    check_close,
    first_match,
    isolated,
    observe,
    random,
    shape_of,
    unchanged,
)


@dataclass(frozen=True)
class LinearForward:
    """A forward that was found on the instance, and what it computes.

    Attributes:
        original: the function.
        in_fp32: it casts hidden states, weight and bias to fp32, as TRL's ``cast_lm_head_to_fp32`` does.
        result: what it casts its result to: ``"fp32"``, the dtype of the ``"hidden states"``, or nothing.
    """

    original: Callable[..., Tensor]
    in_fp32: bool = False
    result: str = ""

    def compute(self, linear: Callable[..., Tensor], hidden_states: Tensor, *parameters: Tensor | None) -> Tensor:
        """What it computes of hidden states, weight and bias, with ``linear`` in place of ``F.linear``."""
        if self.in_fp32:
            inputs = [None if tensor is None else tensor.float() for tensor in (hidden_states, *parameters)]
        else:
            inputs = [hidden_states, *parameters]
        logits = linear(*inputs)
        dtypes = {"fp32": torch.float32, "hidden states": hidden_states.dtype}
        return logits.to(dtypes.get(self.result, logits.dtype))


def match_forward(module: Any) -> LinearForward:
    """What the forward on a linear layer's instance computes, or Mismatch.

    It runs on small inputs with small parameters in place of the layer's own, which it must read at each call.
    """
    original = vars(module)["forward"]
    if "_hf_hook" in vars(module):
        raise Mismatch("accelerate moves the layer's inputs or weights in it")
    forms = ((False, ""), (False, "fp32"), (True, ""), (True, "hidden states"))
    candidates = [LinearForward(original, *form) for form in forms]
    with isolated(), unchanged("its forward", module):
        return first_match(candidates, _cases(module), lambda candidate: "a linear layer")


def _cases(module: Any) -> list[Case]:
    """What the forward returns for each pair of dtypes that it takes, of the hidden states and of the weight."""
    cases, reasons = [], []
    own = dict(module._parameters)
    width = shape_of(own["weight"])[1]
    for dtype, weight_dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        g = torch.Generator().manual_seed(0)
        inputs = [random((3, width), g, dtype)]
        shapes = {
            name: (5, width) if name == "weight" else (5,) for name in ("weight", "bias") if own[name] is not None
        }
        small = {name: nn.Parameter(random(shape, g, weight_dtype)) for name, shape in shapes.items()}
        try:
            module._parameters.update(small)
            output, grads = observe(vars(module)["forward"], inputs, list(small.values()))
        except Mismatch as mismatch:
            reasons.append(str(mismatch))
            continue
        finally:
            module._parameters.update(own)
        tolerance = 1e-5 if dtype == weight_dtype == torch.float32 else 2e-2
        name = f"hidden states of {dtype} and a weight of {weight_dtype}"
        function_of = functools.partial(_function_of, parameters=(small["weight"], small.get("bias")))
        cases.append(Case(name, inputs, output, grads, function_of, tolerance, tolerance, None, small, tolerance))
    if not cases:
        raise Mismatch(reasons[0])
    return cases


def _function_of(candidate: LinearForward, parameters: tuple[Tensor, Tensor | None]) -> Callable[[Tensor], Tensor]:
    return lambda hidden_states: candidate.compute(F.linear, hidden_states, *parameters)


def local_parameters(module: Any) -> tuple[Tensor, Tensor | None]:
    """This rank's rows of a linear layer's weight and bias, which are DTensors, differentiable."""
    weight, bias = module.weight, module.bias
    rows = local_rows("weight", weight, weight.device_mesh)
    return rows, None if bias is None else local_rows("bias", bias, weight.device_mesh)


def match_shared(module: Any) -> VocabularyRanks:
    """Who shares a linear layer's rows, if its forward returns the logits of all of them; else Mismatch.

    All ranks run it together, on the layer's own parameters.
    """
    try:
        weight, bias = local_parameters(module)
        # Its hidden states are plain tensors.
        ranks = dataclasses.replace(share_mesh(module.weight), mesh=None, partial_gradients=False)
    except (TypeError, ValueError) as error:
        both = module.weight.device_mesh.ndim > 1
        order = "fully_shard was called before patch: apply tensor parallelism, then patch(model), then fully_shard"
        raise Mismatch(order if both else str(error)) from None
    hidden = random((1, 3, weight.shape[1]), torch.Generator().manual_seed(0), weight.dtype).to(weight.device)
    with isolated():
        found, (gradient,) = observe(vars(module)["forward"], [hidden])
        if found.shape != (1, 3, ranks.vocab_size()):
            raise Mismatch(f"it returns {tuple(found.shape)} and not all logits")
        expected, (other,) = observe(lambda x: linear(x, weight, bias, ranks=ranks), [hidden])
    check_close("its output", found, expected, 2e-2)
    check_close("its gradient", gradient, other, 2e-2)
    return ranks


def transform_of(layer: nn.Module, hidden_states: Tensor) -> LogitTransform:
    """What the forward of a linear layer's class does to its products, or Mismatch.

    It runs on lazy logits in place of the products, so that nothing of their size is computed.

    Args:
        layer: with a weight and, where it has one, a bias.
        hidden_states: what its forward takes; they are not read.
    """
    if is_weight_and_bias(layer):
        return LogitTransform()
    inside = [name for name, _ in layer.named_children()]
    if inside:
        raise Mismatch(f"it has layers of its own ({', '.join(inside)})")
    with allow_materialization(), _LazyProduct(layer, hidden_states) as product:
        try:
            found = deferred_logits(type(layer).forward(layer, hidden_states))
        except Mismatch:
            raise
        except Exception as error:
            raise Mismatch(f"{type(error).__name__}: {str(error)[:160]}") from error
    if not product.taken:
        raise Mismatch("it does not call F.linear with its input, its weight and its bias")
    if found is None or found.normalized or found.shape != product.logits.shape:
        raise Mismatch("it does more to them than to scale and to soft-cap them")
    return found.head.transform


class _LazyProduct(TorchFunctionMode):
    """Within this context, the product of a layer's input with its weight is that of other, small tensors, and lazy."""

    def __init__(self, layer: nn.Module, hidden_states: Tensor) -> None:
        super().__init__()
        self.inputs = hidden_states, layer.weight, getattr(layer, "bias", None)
        small = [torch.zeros(size, dtype=hidden_states.dtype, device=hidden_states.device) for size in ((2, 4), (3, 4))]
        self.logits, self.taken = lazy_linear(*small), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        given = _LINEAR.bind(*args, **(kwargs or {}))
        given.apply_defaults()
        if any(a is not b for a, b in zip(given.args, self.inputs, strict=True)):
            raise Mismatch("its product is of another input, weight or bias than the layer's")
        self.taken += 1
        return self.logits


_LINEAR = inspect.signature(lambda input, weight, bias=None: None)
