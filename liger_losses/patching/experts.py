"""Finds the gates of experts whose weights are stacked in one tensor.

In transformers, such modules run grouped matrix products and call their method ``_apply_gate`` on the output of the
first, whatever the model. That method is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_losses.kernels.plain import is_plain
from liger_losses.patching.gates import CASES, Gate, case_of, inner_values, match_gate
from liger_losses.patching.kinds import PatchKind
from liger_losses.patching.probing import Case, copy_of, isolated, observe, shape_of, unchanged

#: The size of gate and up in a probe; the method does not depend on that of the weights.
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


class _Experts(PatchKind):
    """Experts with stacked weights."""

    replacement = GatedExperts

    def is_candidate(self, module: nn.Module) -> bool:
        """Weights of three dimensions, and the method."""
        stacked = any(p is not None and len(shape_of(p)) == 3 for p in module._parameters.values())
        return stacked and callable(getattr(type(module), "_apply_gate", None)) and getattr(module, "has_gate", True)

    def match(self, module: nn.Module) -> GatedExperts:
        """Runs the method on copies without weights."""
        with isolated():
            return GatedExperts(match_gate(module, [_observe(module, *case) for case in CASES]))


EXPERTS = _Experts()


def _observe(module: nn.Module, name: str, leading: tuple[int, ...], dtype: torch.dtype, training: bool) -> Case:
    generator = torch.Generator().manual_seed(13)
    copy: Any = copy_of(module, generator, with_parameters=False).train(training)
    inner = inner_values(leading, 2 * _SIZE, dtype, generator)
    with unchanged(name, copy):
        observed = observe(copy._apply_gate, [inner])
    return case_of(name, [inner], observed)
