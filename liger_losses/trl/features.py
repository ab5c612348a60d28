"""The features of :mod:`liger_losses.trl`, and the places in TRL that each of them replaces.

A feature works where the installed TRL has all of its places, whatever its version. Otherwise it is left out, and the
others work.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from liger_losses.places import Found, Missing, Place, around
from liger_losses.trl import experimental
from liger_losses.trl.divergences import chunked_divergence_loss, chunked_jsd_loss
from liger_losses.trl.fused_head import add_fused_lm_head
from liger_losses.trl.reuse import with_old_policy, without_old_policy
from liger_losses.trl.zero_advantages import without_zero_advantages

#: The versions of TRL that the tests run with.
TESTED = ("1.15", "1.16")


@dataclass(frozen=True)
class Feature:
    """What works only where all of its places are there.

    Args:
        name: in warnings and in the doctor's report.
        places: what it replaces.
        part_of: the name of a feature without which this one is of no use.
        package: a package without which nobody can use it.
    """

    name: str
    places: tuple[Place, ...]
    part_of: str = ""
    package: str = ""


def find(features: Iterable[Feature]) -> dict[str, list[Found] | Missing]:
    """For each feature, by name, its places in the installed TRL, or what is missing; nothing is replaced."""
    found: dict[str, list[Found] | Missing] = {}
    for feature in features:
        whole = found.get(feature.part_of)
        try:
            if isinstance(whole, Missing):
                raise Missing(f"{feature.part_of} is missing", whole.package)
            if feature.package and importlib.util.find_spec(feature.package) is None:
                raise Missing(f"{feature.package} is not installed", feature.package)
            found[feature.name] = [place.find() for place in feature.places]
        except Missing as missing:
            found[feature.name] = missing
    return found


class NoAdapter:
    """Sentinel class without instances. It disables TRL's check against LoRA on ``lm_head``, which we support."""


#: A place, given its module and name.
_Row = Callable[..., Place]


def _made(make: Callable[[Any], Any], *takes: str) -> _Row:
    return functools.partial(Place, make=make, takes=takes)


def _around(function: Callable[..., Any], *takes: str) -> _Row:
    return _made(around(function), *takes)


def _function(function: Callable[..., Any]) -> _Row:
    return functools.partial(Place, make=lambda original: function, function=function)


def _replaced(function: Callable[..., Any]) -> _Row:
    return functools.partial(
        Place, make=around(functools.partial(experimental.with_replacement, function)), function=function
    )


# The replaced attributes of a module; names that begin with a dot are attributes of the trainer's class.
_HEAD = {"add_fused_lm_head": _function(add_fused_lm_head)}
# Of trainers whose batches repeat a prompt for each of its completions.
_GROUPS_HEAD = {"add_fused_lm_head": _function(functools.partial(add_fused_lm_head, groups=True))}
_NO_ADAPTER = {"BaseTunerLayer": _made(lambda original: NoAdapter)}
_LOGPS = {"selective_log_softmax": _replaced(experimental.selective_log_softmax)}
_LOGPS_AND_ENTROPY = {"selective_log_softmax_and_entropy": _replaced(experimental.selective_log_softmax_and_entropy)}
_ENTROPY = {"entropy_from_logits": _replaced(experimental.entropy_from_logits)}
_HEADS = {".__init__": _around(experimental.with_heads, "self", "model")}
_PENDING = _around(experimental.with_pending_logits, "self")
_JSD = {**_HEADS, ".compute_loss": _PENDING, ".generalized_jsd_loss": _replaced(experimental.generalized_jsd_loss)}
_BY_SEQUENCE = _around(experimental.sequence_by_sequence, "self", "student_logits", "student_labels")
_LOSS_MASK = _around(experimental.with_loss_mask, "self", "distillation_logits")
_SELF_DISTILLATION = {
    **_HEADS,
    **_LOGPS,
    "._forward_logits": _PENDING,
    "._compute_self_distillation_loss": _LOSS_MASK,
    "compute_full_logit_self_distillation_loss": _replaced(experimental.full_logit_self_distillation),
    "compute_topk_self_distillation_loss": _replaced(experimental.topk_self_distillation),
}


def _places(module: str, rows: dict[str, _Row], trainer: str = "") -> tuple[Place, ...]:
    names = {name: f"{trainer}{name}" if name.startswith(".") else name for name in rows}
    return tuple(row(f"trl.{module}", names[name]) for name, row in rows.items())


def _trainer(name: str, rows: dict[str, _Row]) -> tuple[Place, ...]:
    return _places(f"trainer.{name}_trainer", rows)


def _experimental(name: str, rows: dict[str, _Row], trainer: str = "") -> tuple[Place, ...]:
    return _places(f"experimental.{name}.{name}_trainer", rows, trainer)


_SPARSE = {"_chunked_jsd_loss": _function(chunked_jsd_loss)}
_CONCATENATED = {**_HEADS, **_LOGPS, ".concatenated_forward": _PENDING}
_SERVER = {**_HEADS, ".compute_loss": _PENDING}
_ONLINE_DPO = {**_HEADS, "._forward": _PENDING}
_A2PO = {**_HEADS, **_LOGPS, "._get_sequence_logps": _PENDING}
_GOLD = {**_JSD, "ULDLoss._compute_distillation_loss": _BY_SEQUENCE}


def _zero_advantages(module: str, trainer: str, part_of: str, *terms: str) -> Feature:
    row = {"._compute_loss": _around(functools.partial(without_zero_advantages, terms), "self", "model", "inputs")}
    places = _places(module, row, f"{trainer}Trainer")
    return Feature(f"sequences without advantage in {trainer}", places, part_of)


def _reuse(module: str, trainer: str, name: str, *methods: Callable[..., Any]) -> tuple[Place, ...]:
    takes = {without_old_policy: ("inputs",), with_old_policy: ("model", "inputs")}
    places = {without_old_policy: "._generate_and_score_completions", with_old_policy: "._compute_loss"}
    rows = {places[m]: _around(functools.partial(m, name), "self", *takes[m]) for m in methods}
    return _places(module, rows, f"{trainer}Trainer")


#: The training forward computes the old log-probabilities. Replaced before what splits a batch, within which it runs.
REUSED_FORWARDS = (
    Feature(
        "reused forwards in GRPO and GMPO",
        _reuse("trainer.grpo_trainer", "GRPO", "old_per_token_logps", without_old_policy, with_old_policy)
        + _reuse("experimental.gmpo.gmpo_trainer", "GMPO", "old_per_token_logps", with_old_policy),
        part_of="GRPO",
    ),
    Feature(
        "reused forwards in RLOO",
        _reuse("trainer.rloo_trainer", "RLOO", "old_logps", without_old_policy, with_old_policy),
        part_of="RLOO",
    ),
)

#: Sequences whose advantage is zero take no part in the backward.
ZERO_ADVANTAGES = (
    _zero_advantages("trainer.grpo_trainer", "GRPO", "GRPO", "beta", "_entropy_bonus_enabled", "aux_loss_enabled"),
    _zero_advantages("trainer.rloo_trainer", "RLOO", "RLOO", "aux_loss_enabled"),  # its beta is in the rewards
    _zero_advantages("experimental.gmpo.gmpo_trainer", "GMPO", "GRPO", "beta"),
)

FEATURES = (
    *(Feature(name, _trainer(name.lower(), _HEAD)) for name in ("SFT", "KTO")),
    *(Feature(name, _trainer(name.lower(), _GROUPS_HEAD)) for name in ("DPO", "GRPO", "RLOO")),
    *(
        Feature(f"adapters on the head in {name}", _trainer(name.lower(), _NO_ADAPTER), part_of=name, package="peft")
        for name in ("SFT", "DPO", "KTO", "GRPO", "RLOO")
    ),
    Feature("asynchronous GRPO", _experimental("async_grpo", _HEAD)),
    Feature("custom trainers", _places("trainer", _HEAD) + _places("trainer.utils", {**_HEAD, **_LOGPS, **_ENTROPY})),
    Feature("distillation", _trainer("distillation", {"_chunked_divergence_loss": _function(chunked_divergence_loss)})),
    Feature("asynchronous distillation", _experimental("async_distillation", _SPARSE)),
    Feature("server distillation", _experimental("server_distillation", _SERVER, "ServerDistillationTrainer")),
    Feature("CPO", _experimental("cpo", _CONCATENATED, "CPOTrainer")),
    Feature("ORPO", _experimental("orpo", _CONCATENATED, "ORPOTrainer")),
    Feature("TPO", _experimental("tpo", {**_HEADS, **_LOGPS_AND_ENTROPY, "._compute_loss": _PENDING}, "TPOTrainer")),
    Feature("A2PO", _experimental("a2po", _A2PO, "A2POTrainer")),
    Feature("online DPO", _experimental("online_dpo", _ONLINE_DPO, "OnlineDPOTrainer")),
    Feature("GKD", _experimental("gkd", _JSD, "GKDTrainer")),
    Feature("GOLD", _experimental("gold", _GOLD, "GOLDTrainer")),
    Feature("IW-OPD", _experimental("iw_opd", _JSD, "IWOPDTrainer")),
    *(
        Feature(
            name,
            _experimental(name.lower(), _SELF_DISTILLATION, f"{name}Trainer")
            + _places(f"experimental.{name.lower()}.loss_utils", _LOGPS),
        )
        for name in ("SDFT", "SDPO")
    ),
    *REUSED_FORWARDS,
    *ZERO_ADVANTAGES,
)
