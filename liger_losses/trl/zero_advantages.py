"""TRL's policy losses, with sequences whose advantage is zero left out of the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.caller import warn
from liger_losses.checks import see
from liger_losses.sequences import split_by_coefficient
from liger_losses.trl.divergences import chosen

#: Attributes of trainers, and the options by which tokens without advantage have a gradient where they are not zero.
TERMS = {"beta": "beta", "_entropy_bonus_enabled": "entropy_coef", "aux_loss_enabled": "router_aux_loss_coef"}
#: The loss types of GRPO in which each token's loss is a multiple of its advantage.
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")
#: Layers that couple the sequences of a batch.
_COUPLING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
#: As short as this a sequence runs with a gradient of zero, where none of a process has an advantage.
_STAND_IN = 16


def without_zero_advantages(
    terms: tuple[str, ...], method: Callable[..., Tensor], self: Any, model: nn.Module, inputs: dict[str, Any]
) -> Tensor:
    """A trainer's ``_compute_loss``, with sequences without advantage run without a gradient.

    Args:
        terms: the names in :data:`TERMS` that are in this trainer's loss. If one of them is not zero, all sequences
            have gradients and run as before, with one warning.
        method: TRL's.
        self, model, inputs: its arguments.
    """
    if not (chosen.skip_zero_advantages and torch.is_grad_enabled() and _qualifies(self, model, terms)):
        return method(self, model, inputs)
    # The method that computes log-probabilities, on this trainer alone while its loss is computed.
    self._get_per_token_logps_and_entropies = functools.partial(
        _split, self._get_per_token_logps_and_entropies, _coefficients(inputs)
    )
    try:
        return method(self, model, inputs)
    finally:
        del self._get_per_token_logps_and_entropies


def _qualifies(trainer: Any, model: nn.Module, terms: tuple[str, ...]) -> bool:
    reasons = [f"{TERMS[term]} adds a term" for term in terms if getattr(trainer, term, 0)]
    if getattr(trainer, "loss_type", LOSS_TYPES[0]) not in LOSS_TYPES:
        reasons.append(f"loss_type={trainer.loss_type!r} is not known")
    if any(isinstance(module, _COUPLING) and module.training for module in model.modules()):
        reasons.append("batch normalization couples sequences")
    if reasons and not getattr(trainer, "_liger_losses_said_why", False):
        trainer._liger_losses_said_why = True
        warn(
            f"sequences whose advantage is 0 take part in the backward of this {type(trainer).__name__}: "
            f"{', '.join(reasons)}." + see("sequences-without-advantage"),
        )
    return not reasons


def _coefficients(inputs: dict[str, Any]) -> Tensor:
    """``[B, T]``, nonzero where a token's loss is multiplied by something else than zero."""
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    advantages = inputs["advantages"]
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]  # of subclasses, [B, T]
    return (advantages != 0) & (mask != 0)


def _split(
    forward: Callable[..., Any],
    coefficients: Tensor,
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    **options: Any,
) -> Any:
    """``forward``, TRL's ``_get_per_token_logps_and_entropies``, of sequences with and without a coefficient."""
    per_sequence = {name: value for name, value in options.items() if isinstance(value, (Tensor, list))}
    shared = {name: value for name, value in options.items() if name not in per_sequence}
    if 0 in (options.get("num_images") or ()):
        # A part of the batch might have no images, and would not run the vision tower.
        coefficients = torch.ones_like(coefficients)
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, **per_sequence}

    def outputs(rows: Tensor) -> Any:
        chosen = batch if len(rows) == len(input_ids) else _select(batch, rows)
        return forward(model, logits_to_keep=logits_to_keep, **chosen, **shared)

    def stand_in() -> Any:
        ids = input_ids[:1, :_STAND_IN]
        return forward(model, ids, torch.ones_like(ids), ids.shape[1] - 1, **shared)

    short = not per_sequence and input_ids.shape[1] > 1
    return split_by_coefficient(outputs, coefficients, stand_in=stand_in if short else None)


def _select(batch: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """Some sequences of a batch, with their images, as TRL shuffles them."""
    from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

    chosen = {
        name: value[rows] if isinstance(value, Tensor) else [value[i] for i in rows.tolist()]
        for name, value in split_pixel_values_by_grid(batch).items()
    }
    return unsplit_pixel_values_by_grid(chosen)
