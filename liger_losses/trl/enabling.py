"""Replace TRL's attributes (:data:`~liger_losses.trl.patch_points.PATCH_POINTS`), and put them back."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from liger_losses.chunked.engine.documentation import see
from liger_losses.patching.lazy_layers import is_lazy_layer
from liger_losses.patching.patch import patch
from liger_losses.trl.patch_points import PATCH_POINTS, TESTED, Absent, PatchPoint, Replacement, Target

#: What is replaced now, in the order of the replacements.
_replaced: list[tuple[PatchPoint, Target]] = []


def _with_kernels(function: Callable[..., None]) -> Callable[..., None]:
    """A function that patches the models among its arguments before it runs."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, nn.Module):
                patch(argument, loss_head=False)
            if getattr(argument, "use_liger_kernel", False):  # of the trainer's configuration
                warnings.warn(
                    "use_liger_kernel=True and liger_losses.trl.enable(kernels=True) each replace norms, MLPs and "
                    "rotary embeddings; liger-kernel's will run. Leave one of them out.",
                    stacklevel=2,
                )
        function(*args, **kwargs)

    return wrapped


#: Replaced besides, where the models are to have the kernels: the constructor of all trainers, and our fused heads.
KERNELS = PatchPoint("kernels", "trl.trainer.base_trainer", "_BaseTrainer.__init__", Replacement(_with_kernels))
_HEADS = [replace(p, replacement=KERNELS.replacement) for p in PATCH_POINTS if p.name == "add_fused_lm_head"]


def enable(*, kernels: bool = False) -> None:
    """Give the TRL trainers that are built from now on this library's loss heads. All of their options work.

    Covers SFT, DPO, KTO, GRPO, RLOO, asynchronous GRPO, distillation (also asynchronous and from a server); of the
    experimental trainers CPO and SimPO, ORPO, TPO, A2PO, GMPO, online DPO, GKD, GOLD, IW-OPD, SDFT and SDPO. LoRA on
    ``lm_head`` works. A second call adds the kernels if it is the first to ask for them, and changes nothing else.
    Trainers that exist already and keep TRL's heads are named in a warning.

    Args:
        kernels: also :func:`~liger_losses.patch` the models, for faster norms, MLPs and rotary embeddings that save
            less for backward. The models stay patched; :func:`~liger_losses.unpatch` restores them.

    Raises:
        ImportError: TRL is not installed.
        RuntimeError: this TRL version lacks an attribute that we patch; the error lists them, and nothing is changed.
    """
    if not isinstance(kernels, bool):
        raise TypeError(f"kernels must be True or False, got {kernels!r}.")
    try:
        import trl
    except ImportError as error:
        raise ImportError('liger_losses.trl needs TRL: pip install "trl>=1.16".') from error
    before = len(_replaced)
    if not _replaced:
        _warn_of_trainers()
    add_kernels = kernels and all(point is not KERNELS for point, _ in _replaced)
    for points in ([] if _replaced else PATCH_POINTS, [KERNELS, *_HEADS] if add_kernels else []):
        found = [(point, point.find()) for point in points]
        missing = [target.reason for _, target in found if isinstance(target, Absent) and target.needed]
        if missing:
            _restore(before)
            raise RuntimeError(
                f"TRL {getattr(trl, '__version__', 'of unknown version')} lacks attributes that liger_losses patches "
                f"(tested with TRL {', '.join(TESTED)}): {'; '.join(missing)}. Nothing was changed." + see("trl")
            )
        for point, target in found:
            if isinstance(target, Target):
                setattr(target.owner, target.name, target.replacement)
                _replaced.append((point, target))


def is_enabled() -> bool:
    """Whether trainers that are built now get this library's loss heads."""
    return bool(_replaced)


def disable() -> None:
    """Restore TRL. Trainers that were built in between keep their heads."""
    _restore(0)


@contextlib.contextmanager
def enabled(*, kernels: bool = False) -> Iterator[None]:
    """:func:`enable` for the duration of a ``with`` block."""
    before = len(_replaced)
    enable(kernels=kernels)
    try:
        yield
    finally:
        _restore(before)


def _restore(count: int) -> None:
    """Put back what was replaced, the last first, except for the first ``count`` attributes."""
    while len(_replaced) > count:
        _, target = _replaced.pop()
        setattr(target.owner, target.name, target.original)


def _warn_of_trainers() -> None:
    """Warn of trainers that were built too early: their heads are made when they are built."""
    names = _trainers_with_own_heads()
    if names:
        gc.collect()
        names = _trainers_with_own_heads()
    if names:
        warnings.warn(
            "liger_losses.trl.enable() was called after these trainers were built, which keep TRL's own heads: "
            f"{', '.join(sorted(names))}. Build them again now." + see("trl"),
            stacklevel=3,
        )


def _trainers_with_own_heads() -> set[str]:
    """The classes of trainers that have not trained yet, and whose models have none of our heads."""
    from trl.trainer.base_trainer import _BaseTrainer

    made_early = {p.module for p in PATCH_POINTS if p.name == "add_fused_lm_head" or p.name.endswith(".__init__")}
    names = set()
    for trainer in gc.get_referrers(*_subclasses(_BaseTrainer)):
        if isinstance(trainer, _BaseTrainer) and made_early.intersection(
            cls.__module__ for cls in type(trainer).__mro__
        ):
            model, state = (vars(trainer).get(name) for name in ("model", "state"))  # absent if it was not built
            if model and state and not state.global_step and not any(map(is_lazy_layer, model.modules())):
                names.add(type(trainer).__name__)
    return names


def _subclasses(cls: Any) -> set[Any]:
    return {cls}.union(*map(_subclasses, cls.__subclasses__()))
