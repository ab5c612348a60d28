"""Where this library goes into TRL, and how it comes out again."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from liger_losses.patching.patch import patch
from liger_losses.trl.divergences import chunked_divergence_loss, chunked_jsd_loss
from liger_losses.trl.experimental import (
    entropy_from_logits,
    full_logit_self_distillation,
    generalized_jsd_loss,
    lazy_head,
    selective_log_softmax,
    selective_log_softmax_and_entropy,
    topk_self_distillation,
    uld_loss,
    with_loss_mask,
    within_lazily,
)
from liger_losses.trl.fused_head import add_fused_lm_head

#: What it is tested with.
TESTED = ("1.16",)


@dataclass(frozen=True)
class Seam:
    """One name in TRL that is replaced.

    Args:
        module: where it is looked up.
        name: what is replaced.
        replacement: by what.
        parameters: what the original must take for the replacement to stand in for it.
        wraps: whether the replacement is made from the original.
        covers: what would go without, were it missing.
        optional: whether the module, or (with PEFT absent) the name, may be missing.
    """

    module: str
    name: str
    replacement: Callable[..., Any]
    parameters: tuple[str, ...]
    covers: str
    optional: bool = False
    wraps: bool = False

    @property
    def is_head(self) -> bool:
        """Whether the replacement gives a model its head."""
        return self.name == "add_fused_lm_head"

    def find(self) -> Place:
        """Where it is in the TRL that is installed; nothing is replaced yet."""
        where = f"{self.module}.{self.name} ({self.covers})"
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            words = f"{where} cannot be imported: {error}"
            return Place(absent=words) if self.optional else Place(missing=words)
        owner, _, name = self.name.rpartition(".")
        holder: Any = getattr(module, owner, None) if owner else module
        # Of a class, the attribute itself: a static method is put back as one.
        look = inspect.getattr_static if owner else getattr
        original = None if holder is None else look(holder, name, None)
        if original is None:
            without_peft = self.replacement is NoAdapter
            return (
                Place(absent=f"{where}: PEFT is not installed")
                if without_peft
                else Place(missing=f"{where} is not there")
            )
        function = original.__func__ if isinstance(original, staticmethod) else original
        takes = inspect.signature(function).parameters if self.parameters else {}
        lacks = [parameter for parameter in self.parameters if parameter not in takes]
        if lacks:
            return Place(missing=f"{where} takes no {', '.join(lacks)}")
        made = self.replacement(function) if self.wraps else self.replacement
        return Place(holder, name, original, staticmethod(made) if function is not original else made)


@dataclass(frozen=True)
class Place:
    """What :meth:`Seam.find` found: an attribute and what it is to become, or in words why there is none."""

    holder: Any = None
    name: str = ""
    original: Any = None
    replacement: Any = None
    missing: str = ""
    absent: str = ""


_HEAD = ("model", "temperature", "cast_lm_head_to_fp32", "outputs")
_ONE_PASS = functools.partial(add_fused_lm_head, one_pass=True)
_EXPERIMENTAL = "trl.experimental."
_DIVERGENCE = ("student_logits", "teacher_logits", "labels", "beta", "temperature", "reduction", "num_items_in_batch")


class NoAdapter:
    """Nothing is an instance of it: TRL refuses adapters on the head, which its own would leave out. These are in."""


def _lazy_trainer(name: str, trainer: str) -> Seam:
    """An experimental trainer that takes its loss of logits."""
    module = f"{_EXPERIMENTAL}{name}.{name}_trainer"
    return Seam(module, f"{trainer}.__init__", lazy_head, ("self", "model"), trainer, optional=True, wraps=True)


def _answered(module: str, name: str, wrapper: Callable[..., Any], optional: bool = True) -> Seam:
    """A helper that is given logits."""
    return Seam(module, name, wrapper, ("logits",), f"{name} in {module}", optional=optional, wraps=True)


def _wrapped(module: str, name: str, wrapper: Callable[..., Any], parameters: tuple[str, ...]) -> Seam:
    """A part of an experimental trainer, which its replacement may call."""
    return Seam(_EXPERIMENTAL + module, name, wrapper, parameters, f"{name} in {module}", optional=True, wraps=True)


SEAMS = (
    # The loss of SFT is the sum of log-probabilities that its forward returns: its gradient is taken there and then.
    Seam("trl.trainer.sft_trainer", "add_fused_lm_head", _ONE_PASS, _HEAD, "SFT"),
    Seam("trl.trainer.dpo_trainer", "add_fused_lm_head", add_fused_lm_head, _HEAD, "DPO"),
    Seam("trl.trainer.kto_trainer", "add_fused_lm_head", add_fused_lm_head, _HEAD, "KTO"),
    Seam("trl.trainer.grpo_trainer", "add_fused_lm_head", add_fused_lm_head, _HEAD, "GRPO"),
    Seam("trl.trainer.rloo_trainer", "add_fused_lm_head", add_fused_lm_head, _HEAD, "RLOO"),
    Seam(
        _EXPERIMENTAL + "async_grpo.async_grpo_trainer",
        "add_fused_lm_head",
        add_fused_lm_head,
        _HEAD,
        "asynchronous GRPO",
        optional=True,
    ),
    Seam("trl.trainer.utils", "add_fused_lm_head", add_fused_lm_head, _HEAD, "trainers of your own"),
    Seam("trl.trainer", "add_fused_lm_head", add_fused_lm_head, _HEAD, "trainers of your own"),
    Seam(
        "trl.trainer.distillation_trainer",
        "_chunked_divergence_loss",
        chunked_divergence_loss,
        tuple(inspect.signature(chunked_divergence_loss).parameters),
        "distillation",
    ),
    Seam(
        _EXPERIMENTAL + "async_distillation.async_distillation_trainer",
        "_chunked_jsd_loss",
        chunked_jsd_loss,
        tuple(inspect.signature(chunked_jsd_loss).parameters),
        "asynchronous distillation",
        optional=True,
    ),
    *(
        Seam(f"trl.trainer.{name}_trainer", "BaseTunerLayer", NoAdapter, (), "adapters on the head", optional=True)
        for name in ("sft", "dpo", "kto", "grpo", "rloo")
    ),
    _lazy_trainer("cpo", "CPOTrainer"),
    _lazy_trainer("orpo", "ORPOTrainer"),
    _lazy_trainer("tpo", "TPOTrainer"),
    _lazy_trainer("a2po", "A2POTrainer"),
    _lazy_trainer("online_dpo", "OnlineDPOTrainer"),
    _wrapped("a2po.a2po_trainer", "A2POTrainer._get_sequence_logps", within_lazily, ("self", "model")),
    _wrapped("online_dpo.online_dpo_trainer", "OnlineDPOTrainer._forward", within_lazily, ("self", "model")),
    _lazy_trainer("server_distillation", "ServerDistillationTrainer"),
    *(
        seam
        for name, trainer in (("gkd", "GKDTrainer"), ("gold", "GOLDTrainer"), ("iw_opd", "IWOPDTrainer"))
        for seam in (
            _lazy_trainer(name, trainer),
            _wrapped(f"{name}.{name}_trainer", f"{trainer}.compute_loss", within_lazily, ("self", "model")),
            _wrapped(f"{name}.{name}_trainer", f"{trainer}.generalized_jsd_loss", generalized_jsd_loss, _DIVERGENCE),
        )
    ),
    _wrapped(
        "gold.gold_trainer",
        "ULDLoss._compute_distillation_loss",
        uld_loss,
        (
            "student_logits",
            "teacher_logits",
            "student_labels",
            "teacher_labels",
            "student_input_ids",
            "teacher_input_ids",
            "student_byte_offsets",
            "teacher_byte_offsets",
        ),
    ),
    *(
        seam
        for name, trainer in (("sdft", "SDFTTrainer"), ("sdpo", "SDPOTrainer"))
        for seam in (
            _lazy_trainer(name, trainer),
            _wrapped(f"{name}.{name}_trainer", f"{trainer}._forward_logits", within_lazily, ("self", "model")),
            _wrapped(
                f"{name}.{name}_trainer",
                f"{trainer}._compute_self_distillation_loss",
                with_loss_mask,
                ("self", "model", "inputs", "distillation_logits"),
            ),
            _wrapped(
                f"{name}.{name}_trainer",
                "compute_full_logit_self_distillation_loss",
                full_logit_self_distillation,
                ("student_logits", "teacher_logits", "distillation_alpha"),
            ),
            _wrapped(
                f"{name}.{name}_trainer",
                "compute_topk_self_distillation_loss",
                topk_self_distillation,
                (
                    "student_logits",
                    "teacher_logits",
                    "distillation_topk",
                    "distillation_alpha",
                    "distillation_add_tail",
                ),
            ),
            _answered(f"{_EXPERIMENTAL}{name}.{name}_trainer", "selective_log_softmax", selective_log_softmax),
            _answered(f"{_EXPERIMENTAL}{name}.loss_utils", "selective_log_softmax", selective_log_softmax),
        )
    ),
    *(
        _answered(f"{_EXPERIMENTAL}{name}.{name}_trainer", "selective_log_softmax", selective_log_softmax)
        for name in ("cpo", "orpo", "a2po")
    ),
    _answered(
        _EXPERIMENTAL + "tpo.tpo_trainer", "selective_log_softmax_and_entropy", selective_log_softmax_and_entropy
    ),
    _answered("trl.trainer.utils", "selective_log_softmax", selective_log_softmax, optional=False),
    _answered("trl.trainer.utils", "entropy_from_logits", entropy_from_logits, optional=False),
)


def _with_kernels(function: Callable[..., None]) -> Callable[..., None]:
    """A function that is given a model, which is patched before."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        for given in (*args, *kwargs.values()):
            if isinstance(given, nn.Module):
                patch(given, loss_head=False)
        function(*args, **kwargs)

    return wrapped


def _seams(kernels: bool) -> list[Seam]:
    """:data:`SEAMS`; with kernels, models are patched where they get their head, and where all trainers come by."""
    if not kernels:
        return list(SEAMS)
    own = [replace(s, replacement=_with_kernels(s.replacement)) if s.is_head else s for s in SEAMS]
    init = "_BaseTrainer.__init__"
    return [*own, Seam("trl.trainer.base_trainer", init, _with_kernels, (), "kernels in the models", wraps=True)]


_originals: list[tuple[Any, str, Any]] = []
#: The options of :func:`enable`, while it holds.
_enabled_with: dict[str, bool] = {}


def enable(*, kernels: bool = False) -> None:
    """Give TRL's trainers this library's head: those that are built from now on, with all of their options.

    Covers SFT, DPO, KTO, GRPO, RLOO, asynchronous GRPO, distillation (from a server and asynchronous too); of the
    experimental ones CPO and SimPO, ORPO, TPO, A2PO, online DPO, GKD, GOLD, IW-OPD, SDFT and SDPO. Adapters on the head
    train. A second call does nothing but to bring the kernels, if only it asks for them.

    Args:
        kernels: also :func:`~liger_losses.patch` the models, for faster norms, MLPs and rotary embeddings that keep
            less for backward. They stay patched; :func:`~liger_losses.unpatch` restores them.

    Raises:
        ImportError: TRL is not installed.
        RuntimeError: TRL is not as it should be; nothing has been changed then.
    """
    if _originals and (_enabled_with["kernels"] or not kernels):
        return
    try:
        import trl
    except ImportError as error:
        raise ImportError('liger_losses.trl needs TRL: pip install "liger-losses[trl]".') from error
    before = dict(_enabled_with) if _originals else None
    disable()
    version = getattr(trl, "__version__", "of unknown version")
    places = [seam.find() for seam in _seams(kernels)]
    missing = [place.missing for place in places if place.missing]
    if missing:
        if before is not None:
            enable(**before)
        raise RuntimeError(
            f"TRL {version} is not what liger_losses knows (tested with {', '.join(TESTED)}); nothing was changed. "
            "Not covered would be: " + "; ".join(missing) + "."
        )
    for place in places:
        if place.replacement is not None:
            setattr(place.holder, place.name, place.replacement)
            _originals.append((place.holder, place.name, place.original))
    _enabled_with["kernels"] = kernels


def disable() -> None:
    """Restore TRL as it was; trainers that were built in between keep what they have."""
    while _originals:
        module, name, original = _originals.pop()
        setattr(module, name, original)
    _enabled_with.clear()


@contextlib.contextmanager
def enabled(*, kernels: bool = False) -> Iterator[None]:
    """:func:`enable` for the duration of a ``with`` block."""
    before = dict(_enabled_with) if _originals else None
    enable(kernels=kernels)
    try:
        yield
    finally:
        if before != _enabled_with:
            disable()
            if before is not None:
                enable(**before)
