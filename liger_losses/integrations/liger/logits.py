"""liger-kernel's losses of logits, computed by this library. V vocabulary size, B completions of T tokens."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from liger_losses.integrations import on_logits
from liger_losses.integrations.liger.chunked import with_arguments


def cross_entropy(*arguments: Any, **keywords: Any) -> Any:
    """``liger_cross_entropy``: :func:`liger_losses.integrations.on_logits.cross_entropy` by torch's arguments.

    ``size_average`` and ``reduce`` have no effect.
    """
    given = dict(zip(inspect.signature(cross_entropy).parameters, arguments, strict=False)) | keywords
    options = {name: value for name, value in given.items() if name not in ("size_average", "reduce")}
    logits, target = options.pop("input"), options.pop("target")
    return LigerCrossEntropyLoss(**options)(logits, target)


with_arguments(
    cross_entropy,
    "input target weight size_average ignore_index reduce reduction label_smoothing lse_square_scale softcap "
    "return_z_loss return_token_accuracy return_predicted_tokens",
)


def apply_cross_entropy(_input: Tensor, target: Tensor, *options: Any) -> tuple[Tensor | None, ...]:
    """``apply`` of the same: loss, z-loss, token accuracy, predicted tokens; ``None`` for what was not asked for."""
    found = LigerCrossEntropyLoss(*options[:9])(_input, target)
    return tuple(found) if isinstance(found, tuple) else (found, None, None, None)


class LigerCrossEntropyLoss(on_logits.CrossEntropyOfLogits):
    """Cross-entropy of logits; see :func:`liger_losses.integrations.on_logits.cross_entropy`."""

    def __init__(self, weight: Tensor | None = None, *arguments: Any, **options: Any) -> None:
        super().__init__(weight, *arguments, **options)

    @property
    def weight(self) -> Tensor | None:
        """The class weights ``[V]``."""
        return self.ce_weight

    def forward(self, _input: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        """The loss, and the z-loss, in the dtype of the logits, as in liger-kernel."""
        found = super().forward(_input, target)
        if isinstance(found, Tensor):
            return found.to(_input.dtype)
        z_loss = None if found.z_loss is None else found.z_loss.to(_input.dtype)
        return found._replace(loss=found.loss.to(_input.dtype), z_loss=z_loss)


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
