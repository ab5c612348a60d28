"""Types for checkers and editors, written by tests/project/stubs.py (`make stubs`): do not edit."""

# mypy: disable-error-code="override, misc, overload-overlap, overload-cannot-match"
# pyright: reportIncompatibleMethodOverride=false, reportOverlappingOverload=false
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from liger_losses.chunked.losses.completion_loss import sequence_logps as sequence_logps
from liger_losses.chunked.losses.cross_entropy_terms import cross_entropy as cross_entropy
from liger_losses.chunked.losses.minillm import minillm_returns as minillm_returns
from liger_losses.chunked.losses.policy_estimates import k3 as k3
from liger_losses.chunked.losses.policy_objectives import high_entropy_mask as high_entropy_mask
from liger_losses.chunked.losses.policy_tables import PolicyOptions as PolicyOptions
from liger_losses.chunked.losses.policy_tables import fipo_weights as fipo_weights
from liger_losses.chunked.losses.policy_tables import vespo_weights as vespo_weights
from liger_losses.chunked.losses.reference_free import cpo_loss as cpo_loss
from liger_losses.chunked.losses.reference_free import orpo_loss as orpo_loss
from liger_losses.chunked.losses.reference_free import simpo_loss as simpo_loss
from liger_losses.chunked.losses.sampler import SamplerMetrics as SamplerMetrics
from liger_losses.chunked.losses.sampler import SamplerWeights as SamplerWeights
from liger_losses.chunked.losses.sampler import sampler_weights as sampler_weights
from liger_losses.chunked.losses.softmax_divergences import alpha_beta_divergence as alpha_beta_divergence
from liger_losses.chunked.losses.softmax_divergences import divergence as divergence
from liger_losses.chunked.losses.softmax_divergences import forward_kl as forward_kl
from liger_losses.chunked.losses.softmax_divergences import jsd as jsd
from liger_losses.chunked.losses.softmax_divergences import reverse_kl as reverse_kl
from liger_losses.chunked.losses.softmax_divergences import sparse_divergence as sparse_divergence
from liger_losses.chunked.losses.softmax_divergences import total_variation as total_variation
from liger_losses.chunked.losses.unpaired import bco_loss as bco_loss
from liger_losses.chunked.losses.unpaired import kto_loss as kto_loss
from liger_losses.chunked.losses.unpaired import unpaired_loss as unpaired_loss

__all__ = [
    "PolicyOptions",
    "SamplerMetrics",
    "SamplerWeights",
    "alpha_beta_divergence",
    "bco_loss",
    "cpo_loss",
    "cross_entropy",
    "divergence",
    "dpo_loss",
    "fipo_weights",
    "forward_kl",
    "grpo_loss",
    "high_entropy_mask",
    "jsd",
    "k3",
    "kto_loss",
    "minillm_returns",
    "orpo_loss",
    "reverse_kl",
    "sampler_weights",
    "sequence_logps",
    "simpo_loss",
    "sparse_divergence",
    "total_variation",
    "unpaired_loss",
    "vespo_weights",
]

def dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    chosen_lengths: Tensor | None = ...,
    rejected_lengths: Tensor | None = ...,
    chosen_nll: Tensor | None = ...,
    beta: float = ...,
    label_smoothing: float = ...,
    discopop_tau: float = ...,
    loss_type: str | Sequence[str] = ...,
    loss_weights: Sequence[float] | None = ...,
    f_divergence_type: str = ...,
    f_alpha_divergence_coef: float = ...,
) -> Tensor: ...
def grpo_loss(
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logps: Tensor | None = ...,
    ref_logps: Tensor | None = ...,
    sampling_logps: Tensor | None = ...,
    is_ratio: Tensor | None = ...,
    acting: Tensor | None = ...,
    num_items_in_batch: Tensor | float | None = ...,
    prompts: Tensor | None = ...,
    group: dist.ProcessGroup | None = ...,
    loss_type: str = ...,
    beta: float = ...,
    epsilon_low: float = ...,
    epsilon_high: float | None = ...,
    delta: float | None = ...,
    importance_sampling_level: str = ...,
    max_completion_length: int | None = ...,
    use_bias_correction_kl: bool = ...,
    off_policy_mask_threshold: float | None = ...,
    sapo_temperature_pos: float = ...,
    sapo_temperature_neg: float = ...,
    vespo_k_pos: float = ...,
    vespo_lambda_pos: float = ...,
    vespo_k_neg: float = ...,
    vespo_lambda_neg: float = ...,
    kl_estimator: str = ...,
    normalizer: str = ...,
    token_mask: str = ...,
    mask_low: float | None = ...,
    mask_high: float | None = ...,
    log_ratio_penalty: float | None = ...,
    cispo_low: float = ...,
    fipo_half_life: float = ...,
    fipo_low: float = ...,
    fipo_high: float = ...,
    fipo_safe_ratio: float = ...,
    real_temperature: float = ...,
    cov_share: float = ...,
    cov_low: float = ...,
    cov_high: float = ...,
    cov_penalty: float = ...,
    objective_options: Mapping[str, float] | None = ...,
) -> Tensor: ...
