"""liger-kernel's losses of logits, answered by this library. V vocabulary size, B completions of T tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from liger_losses.integrations import on_logits


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Any:
    """``liger_cross_entropy``: :func:`liger_losses.integrations.on_logits.cross_entropy` by torch's arguments.

    ``size_average`` and ``reduce`` have no effect.
    """
    options = (weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap)
    outputs = (return_z_loss, return_token_accuracy, return_predicted_tokens)
    return LigerCrossEntropyLoss(*options, *outputs)(input, target)


def apply_cross_entropy(_input: Tensor, target: Tensor, *options: Any) -> tuple[Tensor | None, ...]:
    """``apply`` of the same: loss, z-loss, token accuracy, predicted tokens; ``None`` for what was not asked for."""
    found = LigerCrossEntropyLoss(*options[:9])(_input, target)
    return tuple(found) if isinstance(found, tuple) else (found, None, None, None)


class LigerCrossEntropyLoss(nn.Module):
    """Cross-entropy of logits; see :func:`liger_losses.integrations.on_logits.cross_entropy`."""

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.ignore_index, self.lse_square_scale, self.label_smoothing = ignore_index, lse_square_scale, label_smoothing
        self.reduction, self.softcap, self.return_z_loss = reduction, softcap, return_z_loss
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens

    def forward(self, _input: Tensor, target: Tensor) -> Any:
        return on_logits.cross_entropy(
            _input,
            target,
            ce_weight=self.weight,
            ignore_index=self.ignore_index,
            lse_square_scale=self.lse_square_scale,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            softcap=self.softcap,
            return_z_loss=self.return_z_loss,
            return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
        )


def triton_grpo_loss(
    logits: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool = True,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    reduce: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: Tensor | float | None = None,
    *vespo: float,
    **options: Any,
) -> Any:
    """``triton_grpo_loss``: :func:`liger_losses.integrations.on_logits.grpo_loss`.

    Args:
        logits: ``[B, T + 1, V]``; the last position predicts no token of the completion.
        inplace: no effect; the logits stay as they are.
        reduce: return the loss and a list of metrics, instead of each token's loss, KL estimate and clipping.
        vespo: by position, ``vespo_k_pos``, ``vespo_lambda_pos``, ``vespo_k_neg`` and ``vespo_lambda_neg``.
    """
    names = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    options.update(zip(names, vespo, strict=False))
    loss, *others = on_logits.grpo_loss(
        logits[:, :-1],
        completion_ids,
        advantages,
        completion_mask,
        old_logps=old_logp,
        ref_logps=ref_logp,
        is_ratio=vllm_is_ratio,
        temperature=temperature,
        per_token=not reduce,
        beta=beta,
        epsilon_low=eps_low,
        epsilon_high=eps_high,
        loss_type=loss_type,
        max_completion_length=max_completion_length or completion_ids.shape[1],
        importance_sampling_level=importance_sampling_level,
        sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg,
        delta=delta,
        use_bias_correction_kl=use_bias_correction_kl,
        num_items_in_batch=num_items_in_batch,
        **options,
    )
    if reduce:
        return loss, list(others[0])
    kl, clipped = others
    return loss, kl if beta else None, clipped
