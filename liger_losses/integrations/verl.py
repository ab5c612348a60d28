"""verl's fused heads, answered by this library: with ``use_fused_kernels=True``, that is all there is to do.

verl imports :mod:`liger_losses.integrations.verl_plugin` by itself where this package is installed, and that installs
this. ``fused_kernel_options.impl_backend`` then makes no difference. N tokens, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import importlib

import torch.distributed as dist
from torch import Tensor, nn

from liger_losses.integrations import verl_distillation
from liger_losses.integrations.replacements import Replacement, Replacements
from liger_losses.integrations.verl_distillation import answer

_TORCH_HEAD, _TRITON_HEAD = "verl.utils.experimental.torch_functional", "verl.utils.kernel.linear_cross_entropy"


def fused_linear_for_ppo(
    self: nn.Module, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Answers ``FusedLinearForPPO.forward``: log-probabilities and entropies in the shape of ``input_ids``."""
    return answer(hidden_states, vocab_weights, input_ids, temperature)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Answers ``linear_cross_entropy``: log-probabilities and entropies of all tokens, flat, as verl's own.

    Args:
        hidden, weight, labels, temperature, dist_process_group: as in
            :func:`liger_losses.integrations.token_statistics.logps_and_entropy`.
        reduction: of the log-probabilities: ``none``, ``sum`` or ``mean``.

    Raises:
        ValueError: another reduction.
    """
    if reduction.lower() not in ("none", "sum", "mean"):
        raise ValueError(f"reduction must be none, sum or mean, got {reduction!r}.")
    hidden = hidden.reshape(-1, hidden.shape[-1])
    logps, entropy = answer(hidden, weight, labels, temperature, dist_process_group)
    return {"none": logps, "sum": logps.sum(), "mean": logps.mean()}[reduction.lower()], entropy


_TESTED = "0.9.1"
_HEADS = (
    Replacement(_TORCH_HEAD, "FusedLinearForPPO.forward", lambda original, module: fused_linear_for_ppo),
    Replacement(_TRITON_HEAD, "linear_cross_entropy", lambda original, module: linear_cross_entropy),
)
_REPLACEMENTS = Replacements("verl", _TESTED, *_HEADS)


def install() -> None:
    """Replace verl's fused heads; a second call has no effect.

    These are ``FusedLinearForPPO.forward``, of its FSDP engine with the backends ``torch`` and ``liger``, and
    ``linear_cross_entropy``, of its FSDP engine with the backend ``triton`` and of its Megatron engine, also in modules
    that have imported it already.

    Raises:
        ImportError: verl is not installed.
        RuntimeError: this version of verl lacks one of them; nothing is changed then.
    """
    for head in _HEADS:
        if head.find(importlib.import_module(head.module)) is None:
            missing = f"{head.module}.{head.name}"
            raise RuntimeError(
                f"this version of verl has no {missing}, which liger_losses replaces (tested with {_TESTED})."
            )
    verl_distillation.REPLACEMENTS.install()
    _REPLACEMENTS.install()


def uninstall() -> None:
    """Put verl's own heads and distillation losses back."""
    verl_distillation.REPLACEMENTS.uninstall()
    _REPLACEMENTS.uninstall()
