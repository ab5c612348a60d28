"""The features of :mod:`liger_losses.trl`, and the places in TRL that each of them replaces.

A feature works where the installed TRL has all of its places, whatever its version. Otherwise it is left out, and the
others work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import nn

from liger_losses.patching.patch import patch
from liger_losses.places import Found, Missing, Place, around
from liger_losses.trl import experimental
from liger_losses.trl.divergences import chosen, chunked_divergence_loss
from liger_losses.trl.fused_head import add_fused_lm_head, chunked_log_probs
from liger_losses.trl.reuse import with_old_policy, without_old_policy
from liger_losses.trl.zero_advantages import without_zero_advantages

#: The versions of TRL that the tests run with.
TESTED = ("1.15", "1.16")


def find(features: Mapping[str, Iterable[Place]]) -> dict[str, list[Found] | Missing]:
    """For each feature, by name, its places in the installed TRL, or what is missing; nothing is replaced."""
    found: dict[str, list[Found] | Missing] = {}
    for name, places in features.items():
        try:
            found[name] = [place.find() for place in places]
        except Missing as missing:
            found[name] = missing
    return found


def _with_kernels(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Build a trainer whose models are patched, if ``enable`` was given ``kernels=True``."""
    for argument in (*args, *kwargs.values()) if chosen.kernels else ():
        if isinstance(argument, nn.Module):
            patch(argument, loss_head=False)
    init(self, *args, **kwargs)


def _with_log_probs(function: Any) -> Any:
    """In place of TRL's autograd function, whose ``apply`` gets what its ``forward`` takes."""
    theirs, ours = (list(inspect.signature(f).parameters) for f in (function.forward, chunked_log_probs))
    if theirs[1:] != ours:
        raise Missing(f"trl.trainer.utils._ChunkedLogProbFunction has other parameters, {', '.join(theirs[1:])}")
    return SimpleNamespace(apply=chunked_log_probs)


#: A place, given its module and name.
_Row = Callable[..., Place]


def _around(function: Callable[..., Any], *takes: str) -> _Row:
    return partial(Place, make=around(function), takes=takes)


def _replaced(function: Callable[..., Any]) -> _Row:
    return partial(Place, make=around(partial(experimental.with_replacement, function)), function=function)


def _places(module: str, rows: dict[str, _Row], trainer: str = "") -> tuple[Place, ...]:
    names = {name: f"{trainer}{name}" if name.startswith(".") else name for name in rows}
    return tuple(row(f"trl.{module}", names[name]) for name, row in rows.items())


def _experimental(trainer: str, rows: dict[str, _Row], helpers: dict[str, _Row] | None = None) -> tuple[Place, ...]:
    name = trainer.lower().replace(" ", "_").replace("-", "_")
    kind = f"{trainer[0].upper()}{trainer[1:]}Trainer".replace(" ", "").replace("-", "")
    places = _places(f"experimental.{name}.{name}_trainer", rows, kind)
    return places + _places(f"experimental.{name}.loss_utils", helpers or {})


# The replaced attributes of a module; names that begin with a dot are attributes of the trainer's class.
_HEAD = {"add_fused_lm_head": _replaced(add_fused_lm_head)}
# Of trainers whose batches repeat a prompt for each of its completions.
_GROUPS = {"add_fused_lm_head": _replaced(partial(add_fused_lm_head, groups=True))}
_DIVERGENCE = _replaced(chunked_divergence_loss)
_LOGPS = {"selective_log_softmax": _replaced(experimental.selective_log_softmax)}
_LOGPS_AND_ENTROPY = {"selective_log_softmax_and_entropy": _replaced(experimental.selective_log_softmax_and_entropy)}
_PENDING = _around(experimental.with_pending_logits, "self")
_CONCATENATED = {**_LOGPS, ".concatenated_forward": _PENDING}
_JSD = {".compute_loss": _PENDING, ".generalized_jsd_loss": _replaced(experimental.generalized_jsd_loss)}
_SELF_DISTILLATION = {
    **_LOGPS,
    "._forward_logits": _PENDING,
    "._compute_self_distillation_loss": _around(experimental.with_loss_mask, "self", "distillation_logits"),
    "compute_full_logit_self_distillation_loss": _replaced(experimental.full_logit_self_distillation),
    "compute_topk_self_distillation_loss": _replaced(experimental.topk_self_distillation),
}


def _reuse(module: str, trainer: str, name: str, *methods: Callable[..., Any]) -> tuple[Place, ...]:
    takes = {without_old_policy: ("inputs",), with_old_policy: ("model", "inputs")}
    places = {without_old_policy: "._generate_and_score_completions", with_old_policy: "._compute_loss"}
    rows = {places[m]: _around(partial(m, name), "self", *takes[m]) for m in methods}
    return _places(module, rows, f"{trainer}Trainer")


def _without_zero_advantages(module: str, trainer: str, *terms: str) -> tuple[Place, ...]:
    row = _around(partial(without_zero_advantages, terms), "self", "model", "inputs")
    return _places(module, {"._compute_loss": row}, f"{trainer}Trainer")


#: By name, the places that each feature replaces.
FEATURES = {
    "log-probabilities": (Place("trl.trainer.utils", "_ChunkedLogProbFunction", _with_log_probs),),
    **{f"any head in {name}": _places(f"trainer.{name.lower()}_trainer", _HEAD) for name in ("SFT", "KTO")},
    **{f"any head in {name}": _places(f"trainer.{name.lower()}_trainer", _GROUPS) for name in ("DPO", "GRPO", "RLOO")},
    "any head in asynchronous GRPO": _places("experimental.async_grpo.async_grpo_trainer", _HEAD),
    "any head in custom trainers": _places("trainer", _HEAD) + _places("trainer.utils", _HEAD),
    "distillation": _places("trainer.distillation_trainer", {"_chunked_divergence_loss": _DIVERGENCE}),
    **{name: _experimental(name, _CONCATENATED) for name in ("CPO", "ORPO")},
    "TPO": _experimental("TPO", {**_LOGPS_AND_ENTROPY, "._compute_loss": _PENDING}),
    "online DPO": _experimental("online DPO", {"._forward": _PENDING}),
    **{name: _experimental(name, _JSD) for name in ("GKD", "GOLD", "IW-OPD")},
    **{name: _experimental(name, _SELF_DISTILLATION, _LOGPS) for name in ("SDFT", "SDPO")},
    # The training forward computes the old log-probabilities. Before what splits a batch, within which it runs.
    "reused forwards in GRPO and GMPO": (
        *_reuse("trainer.grpo_trainer", "GRPO", "old_per_token_logps", without_old_policy, with_old_policy),
        *_reuse("experimental.gmpo.gmpo_trainer", "GMPO", "old_per_token_logps", with_old_policy),
    ),
    "reused forwards in RLOO": _reuse("trainer.rloo_trainer", "RLOO", "old_logps", without_old_policy, with_old_policy),
    "sequences without advantage in GRPO": _without_zero_advantages(
        "trainer.grpo_trainer", "GRPO", "beta", "_entropy_bonus_enabled", "aux_loss_enabled"
    ),
    # Its beta is in the rewards.
    "sequences without advantage in RLOO": _without_zero_advantages("trainer.rloo_trainer", "RLOO", "aux_loss_enabled"),
    "sequences without advantage in GMPO": _without_zero_advantages("experimental.gmpo.gmpo_trainer", "GMPO", "beta"),
    # Where trainers get their models.
    "kernels": _places("trainer.base_trainer", {"_BaseTrainer.__init__": _around(_with_kernels, "self")}),
}
