"""verl's fused heads, computed by this library: with ``use_fused_kernels=True``, that is all there is to do.

verl 0.9 imports :mod:`liger_losses.integrations.verl_plugin` by itself where this package is installed, and that calls
:func:`install`. ``fused_kernel_options.impl_backend`` then makes no difference.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from liger_losses.integrations import verl_distillation
from liger_losses.integrations.replacements import Replacements
from liger_losses.integrations.verl_distillation import head_statistics
from liger_losses.places import Place


def fused_linear_for_ppo(
    self: nn.Module, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Replaces ``FusedLinearForPPO.forward``: log-probabilities and entropies in the shape of ``input_ids``."""
    return head_statistics(hidden_states, vocab_weights, input_ids, temperature)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Replaces ``linear_cross_entropy``: log-probabilities and entropies of all tokens, flat.

    Args:
        hidden, weight, labels, temperature, dist_process_group: as in
            :func:`liger_losses.integrations.token_statistics.token_statistics`.
        reduction: of the log-probabilities: ``none``, ``sum`` or ``mean``.

    Raises:
        ValueError: another reduction.
    """
    if reduction.lower() not in ("none", "sum", "mean"):
        raise ValueError(f"reduction must be none, sum or mean, got {reduction!r}.")
    hidden = hidden.reshape(-1, hidden.shape[-1])
    logps, entropy = head_statistics(hidden, weight, labels, temperature, dist_process_group)
    return {"none": logps, "sum": logps.sum(), "mean": logps.mean()}[reduction.lower()], entropy


_TORCH_HEAD = "verl.utils.experimental.torch_functional"
#: The module of the second head's function, and those that import it by name.
_TRITON_HEAD = (
    "verl.utils.kernel.linear_cross_entropy",
    *("verl.models.mcore.model_forward_fused", "verl.models.mcore.model_forward_1f1b_overlap"),
)
REPLACEMENTS = Replacements(
    "verl",
    "verl",
    "0.9",
    "the fused heads and the top-k distillation",
    Place(_TORCH_HEAD, "FusedLinearForPPO.forward", lambda original: fused_linear_for_ppo, fused_linear_for_ppo),
    *(Place(module, "linear_cross_entropy", lambda original: linear_cross_entropy) for module in _TRITON_HEAD),
    *verl_distillation.PLACES,
)


def install() -> None:
    """Replace verl's fused heads and its distillation, now or when verl imports them.

    The heads are ``FusedLinearForPPO.forward``, of the FSDP engine with the backends ``torch`` and ``liger``, and
    ``linear_cross_entropy``, of the FSDP engine with the backend ``triton`` and of the Megatron engine.
    """
    REPLACEMENTS.install()


def uninstall() -> None:
    """Restore what :func:`install` replaced."""
    REPLACEMENTS.uninstall()
