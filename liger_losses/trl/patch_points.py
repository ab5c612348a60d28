"""The attributes of TRL that :func:`liger_losses.trl.enable` replaces, and by what.

All are found before the first is replaced, as trainers need all of them. Names of other frameworks are replaced module
by module, when these are imported: ``integrations/replacements.py``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from liger_losses.patching.lazy_layers import force_lazy_head
from liger_losses.trl import experimental
from liger_losses.trl.divergences import chunked_divergence_loss, chunked_jsd_loss
from liger_losses.trl.fused_head import add_fused_lm_head

#: The versions of TRL that the tests run with.
TESTED = ("1.16",)


class Replacement(NamedTuple):
    """A function from the original to what replaces it, and the parameters that the original must take for that."""

    of: Callable[[Any], Any]
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class PatchPoint:
    """One attribute of TRL that is replaced.

    Args:
        feature: what is unavailable if the attribute is missing.
        module, name: where it is; the name is ``Class.attribute`` for one of a class.
        replacement: what replaces it.
    """

    feature: str
    module: str
    name: str
    replacement: Replacement

    def find(self) -> Target | Absent:
        """Look it up in the TRL that is installed; nothing is replaced yet."""
        where = f"{self.module}.{self.name} ({self.feature})"
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            needed = not self.module.startswith("trl.experimental.")
            return Absent(f"{where} cannot be imported: {error}", needed)
        class_name, _, name = self.name.rpartition(".")
        owner: Any = getattr(module, class_name, None) if class_name else module
        # getattr of a class would give a static method's function, which could not be put back as a static method.
        original = None if owner is None else (inspect.getattr_static if class_name else getattr)(owner, name, None)
        if original is None:
            if self.replacement is _NO_ADAPTER:
                return Absent(f"{where}: PEFT is not installed", needed=False)
            return Absent(f"{where} is not there")
        function = original.__func__ if isinstance(original, staticmethod) else original
        parameters = inspect.signature(function).parameters if self.replacement.parameters else {}
        lacking = [name for name in self.replacement.parameters if name not in parameters]
        if lacking:
            return Absent(f"{where} takes no {', '.join(lacking)}")
        value = self.replacement.of(function)
        return Target(owner, name, original, value if function is original else staticmethod(value))


class Target(NamedTuple):
    """A patch point in the TRL that is installed: a module or class, its attribute, what that is, and what it gets."""

    owner: Any
    name: str
    original: Any
    replacement: Any


class Absent(NamedTuple):
    """A patch point that this TRL lacks: why, and whether that is an error (not where an optional part is missing)."""

    reason: str
    needed: bool = True


class NoAdapter:
    """Sentinel class without instances. It disables TRL's check against LoRA on ``lm_head``, which we support."""


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD)


def _function(function: Callable[..., Any]) -> Replacement:
    """A function with the parameters of TRL's."""
    return Replacement(lambda original: function, _parameters(function))


def _answer(answer: Callable[..., Any]) -> Replacement:
    return Replacement(functools.partial(experimental.with_answer, answer), _parameters(answer))


def _experimental(name: str) -> str:
    return f"experimental.{name}.{name}_trainer"


def _head(add: Callable[..., None]) -> dict[str, Replacement]:
    parameters = ("model", "temperature", "cast_lm_head_to_fp32", "outputs")
    return {"add_fused_lm_head": Replacement(lambda original: add, parameters)}


# Attributes of a module; and of the trainer's class, whose names begin with a dot here.
_HEAD = _head(add_fused_lm_head)
_NO_ADAPTER = Replacement(lambda original: NoAdapter)
_DIVERGENCE = {"_chunked_divergence_loss": _function(chunked_divergence_loss)}
_SPARSE = {"_chunked_jsd_loss": _function(chunked_jsd_loss)}
_LOGPS = {"selective_log_softmax": _answer(experimental.selective_log_softmax)}
_LOGPS_AND_ENTROPY = {"selective_log_softmax_and_entropy": _answer(experimental.selective_log_softmax_and_entropy)}
_ENTROPY = {"entropy_from_logits": _answer(experimental.entropy_from_logits)}
_LAZY_HEADS = {".__init__": Replacement(experimental.with_lazy_heads, ("self", "model"))}
# Heads are lazy without gradients too, as for a teacher.
_FORCED = Replacement(lambda method: force_lazy_head()(method), ("self", "model"))
_JSD = {**_LAZY_HEADS, ".compute_loss": _FORCED, ".generalized_jsd_loss": _answer(experimental.generalized_jsd_loss)}
_BY_SEQUENCE = Replacement(experimental.sequence_by_sequence, ("self", "student_logits", "student_labels"))
_SEQUENCES = {"ULDLoss._compute_distillation_loss": _BY_SEQUENCE}
_LOSS_MASK = Replacement(experimental.with_loss_mask, ("self", "model", "inputs", "distillation_logits"))
_SELF_DISTILLATION = {
    **_LAZY_HEADS,
    **_LOGPS,
    "._forward_logits": _FORCED,
    "._compute_self_distillation_loss": _LOSS_MASK,
    "compute_full_logit_self_distillation_loss": _answer(experimental.full_logit_self_distillation),
    "compute_topk_self_distillation_loss": _answer(experimental.topk_self_distillation),
}

#: Feature, module of trl, trainer's class, and the replacements of their attributes.
_ROWS: tuple[tuple[str, str, str, dict[str, Replacement]], ...] = (
    # SFT's loss is the sum of the log-probabilities that the model's forward returns, so forward takes its gradient.
    ("SFT", "trainer.sft_trainer", "", _head(functools.partial(add_fused_lm_head, one_pass=True))),
    ("DPO", "trainer.dpo_trainer", "", _HEAD),
    ("KTO", "trainer.kto_trainer", "", _HEAD),
    ("GRPO", "trainer.grpo_trainer", "", _HEAD),
    ("RLOO", "trainer.rloo_trainer", "", _HEAD),
    ("async GRPO", _experimental("async_grpo"), "", _HEAD),
    ("custom trainers", "trainer", "", _HEAD),
    ("custom trainers", "trainer.utils", "", _HEAD | _LOGPS | _ENTROPY),
    *(
        ("adapters on the head", f"trainer.{name}_trainer", "", {"BaseTunerLayer": _NO_ADAPTER})
        for name in ("sft", "dpo", "kto", "grpo", "rloo")
    ),
    ("distillation", "trainer.distillation_trainer", "", _DIVERGENCE),
    ("async distillation", _experimental("async_distillation"), "", _SPARSE),
    ("server distillation", _experimental("server_distillation"), "ServerDistillationTrainer", _LAZY_HEADS),
    ("CPO", _experimental("cpo"), "CPOTrainer", _LAZY_HEADS | _LOGPS),
    ("ORPO", _experimental("orpo"), "ORPOTrainer", _LAZY_HEADS | _LOGPS),
    ("TPO", _experimental("tpo"), "TPOTrainer", _LAZY_HEADS | _LOGPS_AND_ENTROPY),
    ("A2PO", _experimental("a2po"), "A2POTrainer", _LAZY_HEADS | _LOGPS | {"._get_sequence_logps": _FORCED}),
    ("online DPO", _experimental("online_dpo"), "OnlineDPOTrainer", _LAZY_HEADS | {"._forward": _FORCED}),
    ("GKD", _experimental("gkd"), "GKDTrainer", _JSD),
    ("GOLD", _experimental("gold"), "GOLDTrainer", _JSD | _SEQUENCES),
    ("IW-OPD", _experimental("iw_opd"), "IWOPDTrainer", _JSD),
    ("SDFT", _experimental("sdft"), "SDFTTrainer", _SELF_DISTILLATION),
    ("SDFT", "experimental.sdft.loss_utils", "", _LOGPS),
    ("SDPO", _experimental("sdpo"), "SDPOTrainer", _SELF_DISTILLATION),
    ("SDPO", "experimental.sdpo.loss_utils", "", _LOGPS),
)

#: Everything that :func:`liger_losses.trl.enable` replaces.
PATCH_POINTS = tuple(
    PatchPoint(feature, f"trl.{module}", f"{trainer}{name}" if name.startswith(".") else name, replacement)
    for feature, module, trainer, attributes in _ROWS
    for name, replacement in attributes.items()
)
