"""Recognizes a forward that was put on the instance of a linear layer, if a linear layer is what it computes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_losses.patching.probing import Case, Mismatch, first_match, isolated, observe, random, shape_of, unchanged


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
