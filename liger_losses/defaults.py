"""Defaults that differ from TRL's, verl's and liger-kernel's: options that code moved here must set.

``liger_losses.trl.enable()`` keeps TRL's: its trainers pass all of their options on.
"""

from __future__ import annotations

from typing import NamedTuple


class Default(NamedTuple):
    """A row of :data:`DEFAULTS`.

    Args:
        loss: whose option it is, of ``LigerFusedLinear...Loss``.
        option: its name here.
        here: its default here.
        others: by package, the name and the default there.
    """

    loss: str
    option: str
    here: object
    others: dict[str, tuple[str, object]]


#: The versions that were read.
VERSIONS = {"trl": "1.16", "verl": "0.9.1", "liger-kernel": "0.8.5"}
DEFAULTS = (
    Default("GRPO", "use_bias_correction_kl", False, {"trl": ("GRPOConfig.use_bias_correction_kl", True)}),
    Default("GRPO", "beta", 0.04, {"trl": ("GRPOConfig.beta", 0.0), "verl": ("actor.kl_loss_coef", 0.001)}),
    Default("GRPO", "delta", None, {"verl": ("actor.clip_ratio_c", 3.0)}),
    Default("GRPO", "loss_type", "dapo", {"verl": ("actor.policy_loss.loss_mode", "vanilla")}),
    Default("GRPO", "vllm_is_ratio", None, {"trl": ("GRPOConfig.vllm_importance_sampling_mode", "sequence_mask")}),
    Default("GRPO, gmpo", "epsilon_low", 0.2, {"trl": ("experimental.gmpo.GMPOConfig.epsilon", 0.4)}),
    Default(
        "GRPO, cispo",
        "epsilon_high",
        5.0,
        {
            "trl": ("GRPOConfig.epsilon", 0.2),
            "verl": ("1 + actor.clip_ratio_high", 1.2),
            "liger-kernel": ("LigerFusedLinearGRPOLoss.epsilon_high", 0.2),
        },
    ),
    Default("GRPO, cispo", "cispo_low", 0.0, {"verl": ("1 - actor.clip_ratio_low", 0.8)}),
    Default("GRPO, kl_cov", "cov_penalty", 1.0, {"verl": ("actor.policy_loss.ppo_kl_coef", 0.1)}),
    Default("JSD", "weight_hard_loss", 0.5, {"trl": ("DistillationTrainer", 0.0)}),
    Default("JSD", "beta", 0.5, {"trl": ("DistillationConfig.beta", 1.0)}),
    Default("JSD", "temperature", 1.0, {"trl": ("experimental.gkd.GKDConfig.temperature", 0.9)}),
    Default("JSD", "tail", "bucket", {"trl": ("experimental.sdft.SDFTConfig.distillation_add_tail", False)}),
    Default("CPO", "average_log_prob", None, {"liger-kernel": ("LigerFusedLinearCPOLoss.average_log_prob", False)}),
)
