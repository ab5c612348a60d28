"""Where this library goes into TRL, and how it comes out again."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from liger_losses.trl.distillation import chunked_divergence_loss
from liger_losses.trl.head import add_fused_lm_head

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
        covers: what would go without, were it missing.
        optional: whether the module may be absent.
    """

    module: str
    name: str
    replacement: Callable[..., Any]
    parameters: tuple[str, ...]
    covers: str
    optional: bool = False


_HEAD = ("model", "temperature", "cast_lm_head_to_fp32", "outputs")
_ONE_PASS = functools.partial(add_fused_lm_head, one_pass=True)
_EXPERIMENTAL = "trl.experimental."

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
)

_originals: list[tuple[Any, str, Any]] = []


def enable() -> None:
    """Give TRL's trainers this library's head: those that are built from now on, with all of their options.

    Covers SFT, DPO, KTO, GRPO, RLOO, asynchronous GRPO and distillation. A second call does nothing.

    Raises:
        ImportError: TRL is not installed.
        RuntimeError: TRL is not as it should be; nothing has been changed then.
    """
    if _originals:
        return
    try:
        import trl
    except ImportError as error:
        raise ImportError('liger_losses.trl needs TRL: pip install "liger-losses[trl]".') from error
    version = getattr(trl, "__version__", "of unknown version")
    found, missing = [], []
    for seam in SEAMS:
        try:
            module = importlib.import_module(seam.module)
        except ImportError as error:
            if not seam.optional:
                missing.append(f"{seam.module} cannot be imported ({error}): {seam.covers}")
            continue
        original = getattr(module, seam.name, None)
        if original is None:
            missing.append(f"{seam.module}.{seam.name} is not there: {seam.covers}")
            continue
        absent = [name for name in seam.parameters if name not in inspect.signature(original).parameters]
        if absent:
            missing.append(f"{seam.module}.{seam.name} takes no {', '.join(absent)}: {seam.covers}")
            continue
        found.append((module, seam.name, original, seam.replacement))
    if missing:
        raise RuntimeError(
            f"TRL {version} is not what liger_losses knows (tested with {', '.join(TESTED)}); nothing was enabled. "
            "Not covered would be: " + "; ".join(missing) + "."
        )
    for module, name, original, replacement in found:
        setattr(module, name, replacement)
        _originals.append((module, name, original))


def disable() -> None:
    """Restore TRL as it was; trainers that were built in between keep what they have."""
    while _originals:
        module, name, original = _originals.pop()
        setattr(module, name, original)


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """:func:`enable` for the duration of a ``with`` block."""
    before = bool(_originals)
    enable()
    try:
        yield
    finally:
        if not before:
            disable()
