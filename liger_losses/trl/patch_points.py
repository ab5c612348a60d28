"""The attributes of TRL that :func:`liger_losses.trl.enable` replaces, and by what."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from liger_losses.trl import experimental
from liger_losses.trl.divergences import chunked_divergence_loss, chunked_jsd_loss
from liger_losses.trl.fused_head import add_fused_lm_head

#: The versions of TRL that the tests run with.
TESTED = ("1.16",)


@dataclass(frozen=True)
class Replacement:
    """What replaces an attribute.

    Args:
        value: the new value; with ``wraps``, a function from the original to it.
        parameters: those that the original must take for the replacement to stand in for it.
    """

    value: Callable[..., Any]
    parameters: tuple[str, ...] = ()
    wraps: bool = False


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

    def find(self) -> Target:
        """Look it up in the TRL that is installed; nothing is replaced yet."""
        where = f"{self.module}.{self.name} ({self.feature})"
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            reason = f"{where} cannot be imported: {error}"
            return Target(absent=reason) if self.module.startswith("trl.experimental.") else Target(missing=reason)
        class_name, _, name = self.name.rpartition(".")
        owner: Any = getattr(module, class_name, None) if class_name else module
        # getattr of a class would give a static method's function, which could not be put back as a static method.
        original = None if owner is None else (inspect.getattr_static if class_name else getattr)(owner, name, None)
        if original is None:
            without_peft = self.replacement is _NO_ADAPTER
            return Target(absent=f"{where}: no PEFT") if without_peft else Target(missing=f"{where} is not there")
        function = original.__func__ if isinstance(original, staticmethod) else original
        parameters = inspect.signature(function).parameters if self.replacement.parameters else {}
        lacking = [name for name in self.replacement.parameters if name not in parameters]
        if lacking:
            return Target(missing=f"{where} takes no {', '.join(lacking)}")
        value = self.replacement.value(function) if self.replacement.wraps else self.replacement.value
        return Target(owner, name, original, value if function is original else staticmethod(value))


@dataclass(frozen=True)
class Target:
    """A patch point in the TRL that is installed.

    Args:
        owner, name, original: the module or class, its attribute, and the attribute's value.
        replacement: the value that it is to get; ``None`` if it was not found.
        missing: why it was not found.
        absent: why it was not found, where this is no error: an optional module or package is not installed.
    """

    owner: Any = None
    name: str = ""
    original: Any = None
    replacement: Any = None
    missing: str = ""
    absent: str = ""


class NoAdapter:
    """Sentinel class without instances. It disables TRL's check against LoRA on ``lm_head``, which we support."""


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD)


def _answer(answer: Callable[..., Any]) -> Replacement:
    return Replacement(functools.partial(experimental.with_answer, answer), _parameters(answer), wraps=True)


_HEAD = Replacement(add_fused_lm_head, ("model", "temperature", "cast_lm_head_to_fp32", "outputs"))
# SFT's loss is the sum of the log-probabilities that the model's forward returns, so forward takes its gradient.
_ONE_PASS_HEAD = Replacement(functools.partial(add_fused_lm_head, one_pass=True), _HEAD.parameters)
_NO_ADAPTER = Replacement(NoAdapter)
_DIVERGENCE = Replacement(chunked_divergence_loss, _parameters(chunked_divergence_loss))
_SPARSE = Replacement(chunked_jsd_loss, _parameters(chunked_jsd_loss))

_LAZY_HEADS = Replacement(experimental.with_lazy_heads, ("self", "model"), wraps=True)
_FORCED_LAZY_HEADS = Replacement(experimental.with_forced_lazy_heads, ("self", "model"), wraps=True)
_LOSS_MASK = Replacement(experimental.with_loss_mask, ("self", "model", "inputs", "distillation_logits"), wraps=True)
_SEQUENCES = Replacement(experimental.sequence_by_sequence, ("self", "student_logits", "student_labels"), wraps=True)
_LOGPS = _answer(experimental.selective_log_softmax)
_LOGPS_AND_ENTROPY = _answer(experimental.selective_log_softmax_and_entropy)
_ENTROPY = _answer(experimental.entropy_from_logits)
_JSD = _answer(experimental.generalized_jsd_loss)
_FULL_LOGITS = _answer(experimental.full_logit_self_distillation)
_TOP_K = _answer(experimental.topk_self_distillation)

#: Feature, module of trl, attribute, replacement.
_ROWS: tuple[tuple[str, str, str, Replacement], ...] = (
    ("SFT", "trainer.sft_trainer", "add_fused_lm_head", _ONE_PASS_HEAD),
    ("DPO", "trainer.dpo_trainer", "add_fused_lm_head", _HEAD),
    ("KTO", "trainer.kto_trainer", "add_fused_lm_head", _HEAD),
    ("GRPO", "trainer.grpo_trainer", "add_fused_lm_head", _HEAD),
    ("RLOO", "trainer.rloo_trainer", "add_fused_lm_head", _HEAD),
    ("async GRPO", "experimental.async_grpo.async_grpo_trainer", "add_fused_lm_head", _HEAD),
    ("custom trainers", "trainer.utils", "add_fused_lm_head", _HEAD),
    ("custom trainers", "trainer", "add_fused_lm_head", _HEAD),
    ("adapters on the head", "trainer.sft_trainer", "BaseTunerLayer", _NO_ADAPTER),
    ("adapters on the head", "trainer.dpo_trainer", "BaseTunerLayer", _NO_ADAPTER),
    ("adapters on the head", "trainer.kto_trainer", "BaseTunerLayer", _NO_ADAPTER),
    ("adapters on the head", "trainer.grpo_trainer", "BaseTunerLayer", _NO_ADAPTER),
    ("adapters on the head", "trainer.rloo_trainer", "BaseTunerLayer", _NO_ADAPTER),
    ("distillation", "trainer.distillation_trainer", "_chunked_divergence_loss", _DIVERGENCE),
    ("async distillation", "experimental.async_distillation.async_distillation_trainer", "_chunked_jsd_loss", _SPARSE),
    (
        "server distillation",
        "experimental.server_distillation.server_distillation_trainer",
        "ServerDistillationTrainer.__init__",
        _LAZY_HEADS,
    ),
    ("CPO", "experimental.cpo.cpo_trainer", "CPOTrainer.__init__", _LAZY_HEADS),
    ("CPO", "experimental.cpo.cpo_trainer", "selective_log_softmax", _LOGPS),
    ("ORPO", "experimental.orpo.orpo_trainer", "ORPOTrainer.__init__", _LAZY_HEADS),
    ("ORPO", "experimental.orpo.orpo_trainer", "selective_log_softmax", _LOGPS),
    ("TPO", "experimental.tpo.tpo_trainer", "TPOTrainer.__init__", _LAZY_HEADS),
    ("TPO", "experimental.tpo.tpo_trainer", "selective_log_softmax_and_entropy", _LOGPS_AND_ENTROPY),
    ("A2PO", "experimental.a2po.a2po_trainer", "A2POTrainer.__init__", _LAZY_HEADS),
    ("A2PO", "experimental.a2po.a2po_trainer", "A2POTrainer._get_sequence_logps", _FORCED_LAZY_HEADS),
    ("A2PO", "experimental.a2po.a2po_trainer", "selective_log_softmax", _LOGPS),
    ("online DPO", "experimental.online_dpo.online_dpo_trainer", "OnlineDPOTrainer.__init__", _LAZY_HEADS),
    ("online DPO", "experimental.online_dpo.online_dpo_trainer", "OnlineDPOTrainer._forward", _FORCED_LAZY_HEADS),
    ("GKD", "experimental.gkd.gkd_trainer", "GKDTrainer.__init__", _LAZY_HEADS),
    ("GKD", "experimental.gkd.gkd_trainer", "GKDTrainer.compute_loss", _FORCED_LAZY_HEADS),
    ("GKD", "experimental.gkd.gkd_trainer", "GKDTrainer.generalized_jsd_loss", _JSD),
    ("GOLD", "experimental.gold.gold_trainer", "GOLDTrainer.__init__", _LAZY_HEADS),
    ("GOLD", "experimental.gold.gold_trainer", "GOLDTrainer.compute_loss", _FORCED_LAZY_HEADS),
    ("GOLD", "experimental.gold.gold_trainer", "GOLDTrainer.generalized_jsd_loss", _JSD),
    ("GOLD", "experimental.gold.gold_trainer", "ULDLoss._compute_distillation_loss", _SEQUENCES),
    ("IW-OPD", "experimental.iw_opd.iw_opd_trainer", "IWOPDTrainer.__init__", _LAZY_HEADS),
    ("IW-OPD", "experimental.iw_opd.iw_opd_trainer", "IWOPDTrainer.compute_loss", _FORCED_LAZY_HEADS),
    ("IW-OPD", "experimental.iw_opd.iw_opd_trainer", "IWOPDTrainer.generalized_jsd_loss", _JSD),
    ("SDFT", "experimental.sdft.sdft_trainer", "SDFTTrainer.__init__", _LAZY_HEADS),
    ("SDFT", "experimental.sdft.sdft_trainer", "SDFTTrainer._forward_logits", _FORCED_LAZY_HEADS),
    ("SDFT", "experimental.sdft.sdft_trainer", "SDFTTrainer._compute_self_distillation_loss", _LOSS_MASK),
    ("SDFT", "experimental.sdft.sdft_trainer", "compute_full_logit_self_distillation_loss", _FULL_LOGITS),
    ("SDFT", "experimental.sdft.sdft_trainer", "compute_topk_self_distillation_loss", _TOP_K),
    ("SDFT", "experimental.sdft.sdft_trainer", "selective_log_softmax", _LOGPS),
    ("SDFT", "experimental.sdft.loss_utils", "selective_log_softmax", _LOGPS),
    ("SDPO", "experimental.sdpo.sdpo_trainer", "SDPOTrainer.__init__", _LAZY_HEADS),
    ("SDPO", "experimental.sdpo.sdpo_trainer", "SDPOTrainer._forward_logits", _FORCED_LAZY_HEADS),
    ("SDPO", "experimental.sdpo.sdpo_trainer", "SDPOTrainer._compute_self_distillation_loss", _LOSS_MASK),
    ("SDPO", "experimental.sdpo.sdpo_trainer", "compute_full_logit_self_distillation_loss", _FULL_LOGITS),
    ("SDPO", "experimental.sdpo.sdpo_trainer", "compute_topk_self_distillation_loss", _TOP_K),
    ("SDPO", "experimental.sdpo.sdpo_trainer", "selective_log_softmax", _LOGPS),
    ("SDPO", "experimental.sdpo.loss_utils", "selective_log_softmax", _LOGPS),
    ("custom trainers", "trainer.utils", "selective_log_softmax", _LOGPS),
    ("custom trainers", "trainer.utils", "entropy_from_logits", _ENTROPY),
)

#: Everything that :func:`liger_losses.trl.enable` replaces.
PATCH_POINTS = tuple(
    PatchPoint(feature, f"trl.{module}", name, replacement) for feature, module, name, replacement in _ROWS
)
