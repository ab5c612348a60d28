"""Recognises the gates of experts whose weights are stacked in one tensor.

Their modules run grouped products and call a method of theirs, ``_apply_gate``, on what the first one gives: it is
transformers' interface for experts, whatever the model. That method is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_losses.kernels.plain import is_plain
from liger_losses.patching.gates import CASES, Case, Gate, find, inner_values
from liger_losses.patching.probing import Mismatch, attributes, children_of, copy_of, isolated, observe, shape_of

#: The size of the products in a probe; the method does not know that of the weights.
_SIZE = 64


@dataclass(frozen=True)
class GatedExperts:
    """The gate of stacked experts."""

    gate: Gate

    method: ClassVar[str] = "_apply_gate"

    def __str__(self) -> str:
        return f"experts' glu_fused ({self.gate})"

    def replace(self, original: type[nn.Module]) -> Callable[..., Any]:
        """The method of the module's new class."""

        def _apply_gate(module: Any, gate_up: Tensor) -> Tensor:
            if not is_plain(gate_up):
                return original._apply_gate(module, gate_up)  # type: ignore[attr-defined]
            return self.gate.compute(gate_up)

        return _apply_gate


REPLACEMENT = GatedExperts


def is_worth_listing(module: nn.Module) -> bool:
    """Whether a module that is not recognised belongs into the report: every candidate."""
    return True


def bypassed(module: nn.Module) -> dict[str, nn.Module]:
    """The children that the replacement does not call: the activation."""
    return {name: part for name, part in module.named_modules() if part is not module}


def key_of(module: nn.Module) -> Any:
    """Modules with the same key compute the same gate."""
    return type(module), children_of(module), attributes(module)


def is_candidate(module: nn.Module) -> bool:
    """Whether a module has the method, and weights of three dimensions for it."""
    stacked = any(parameter is not None and len(shape_of(parameter)) == 3 for parameter in module._parameters.values())
    return stacked and callable(getattr(type(module), "_apply_gate", None)) and getattr(module, "has_gate", True)


def recognise(module: nn.Module) -> GatedExperts:
    """Which gate the experts have, found on copies without their weights.

    Raises:
        Mismatch: none that there is a kernel for; the message says how the nearest one differs.
    """
    with isolated():
        return GatedExperts(find(module, [_observe(module, *case) for case in CASES]))


def _observe(module: nn.Module, name: str, leading: tuple[int, ...], dtype: torch.dtype, training: bool) -> Case:
    generator = torch.Generator().manual_seed(13)
    copy: Any = copy_of(module, generator, {}, with_parameters=False).train(training)
    before = attributes(copy), children_of(copy)
    inner = inner_values(leading, 2 * _SIZE, dtype, generator)
    observed = observe(copy._apply_gate, [inner])
    if (attributes(copy), children_of(copy)) != before:
        raise Mismatch(f"{name}: it changes its own attributes")
    return Case(name, [inner], observed)
