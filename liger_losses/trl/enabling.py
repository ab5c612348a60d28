"""Replace the places of TRL's :data:`~liger_losses.trl.features.FEATURES`, and put them back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from liger_losses.arguments import lists_arguments
from liger_losses.caller import warn
from liger_losses.checks import see
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.places import Missing, Replaced
from liger_losses.trl.divergences import chosen
from liger_losses.trl.features import FEATURES, TESTED, find

_replaced = Replaced()
_DEFAULTS = vars(chosen).copy()


@lists_arguments
def enable(
    *,
    kernels: bool = False,
    skip_zero_advantages: bool = True,
    divergence: Divergence | None = None,
    share_prompts: bool | None = None,
    reuse_forward: bool = False,
) -> None:
    """Make TRL's trainers compute their losses with this library. All of their options work.

    Supported are SFT, DPO, KTO, GRPO, RLOO, asynchronous GRPO and distillation, and the experimental trainers CPO and
    SimPO, ORPO, TPO, GMPO, online DPO, GKD, GOLD, IW-OPD, SDFT and SDPO. If the installed TRL lacks a name that one of
    the features replaces, TRL's code runs for this feature, and a warning names it. Of a trainer that was built before,
    losses are computed with this library, too, but its models keep TRL's head and modules. A second call changes what
    it is given: it turns kernels and reused forwards on, and sequences without advantage off.

    Args:
        kernels: also :func:`~liger_losses.patch` the models of trainers that are built from now on, for faster norms,
            MLPs and rotary embeddings that save less for backward. The models stay patched; to restore one, call
            :func:`~liger_losses.unpatch`.
        skip_zero_advantages: in GRPO, RLOO and GMPO, run sequences whose advantage is 0 without a gradient. Their
            gradient is 0 if the loss has no other term (a KL penalty, an entropy bonus). Losses, gradients and metrics
            do not change. Applies to all trainers, until :func:`disable`.
        divergence: the divergence of the distillation trainers (distillation, GKD, GOLD, IW-OPD, SDFT, SDPO), instead
            of TRL's generalized JSD with ``beta`` or ``distillation_alpha``. For example
            ``Divergence.kl_by_entropy(0.8)``, or one with a limit per vocabulary entry. Applies to all trainers, until
            :func:`disable`.
        share_prompts: in DPO, GRPO, RLOO and GMPO, compute a prompt once for all of its completions in a batch, and
            padding not at all; for the reference and the old policy too. Losses and gradients do not change, but for
            models with absolute positions, which TRL counts from the left padding. True shares prompts in all batches,
            and False in none. By default, they are shared on an NVIDIA GPU in batches whose padded tokens are more than
            1.2 times those that are computed, if the model has rotary positions, its attention is ``sdpa`` or
            ``eager``, and it runs in half precision. Models and batches for which this is not possible, such as those
            with images, run as before, and with True a warning says why. Applies to trainers that are built from now
            on, until :func:`disable`.
        reuse_forward: in GRPO, RLOO and GMPO, take the log-probabilities of the old policy from the training forward,
            instead of running the model once more without gradients, and compute vLLM's importance correction from
            them. Losses, gradients and metrics do not change, but for rounding. Trainers in which an optimizer step may
            come between a generation and the first loss of its batches, and RLOO with ``beta``, run TRL's forward, and
            a warning says why. A model with dropout is an error, at the first generation. Applies to all trainers,
            until :func:`disable`.

    Raises:
        ImportError: TRL is not installed.
        RuntimeError: this version of TRL lacks names of every feature. The error lists them, and nothing is changed.
    """
    flags = {"kernels": kernels, "skip_zero_advantages": skip_zero_advantages, "share_prompts": share_prompts}
    flags["reuse_forward"] = reuse_forward
    for name, value in flags.items():
        if not isinstance(value, bool) and (name, value) != ("share_prompts", None):
            choices = "True, False or None" if name == "share_prompts" else "True or False"
            raise TypeError(f"{name} must be {choices}, got {value!r}.")
    if divergence is not None and not isinstance(divergence, Divergence):
        raise TypeError(f"divergence must be a Divergence, such as Divergence.reverse_kl(), got {divergence!r}.")
    if not _replaced:
        _replace()
    chosen.kernels |= kernels
    chosen.skip_zero_advantages &= skip_zero_advantages
    chosen.divergence = divergence or chosen.divergence
    chosen.share_prompts = chosen.share_prompts if share_prompts is None else share_prompts
    chosen.reuse_forward |= reuse_forward


def _replace() -> None:
    try:
        import trl
    except ImportError as error:
        raise ImportError('liger_losses.trl needs TRL: pip install "trl>=1.15".') from error
    found = find(FEATURES)
    missing = {name: places for name, places in found.items() if isinstance(places, Missing) and not places.package}
    lacks = (
        f"TRL {trl.__version__} lacks names that features of liger_losses.trl replace (tested with TRL "
        f"{', '.join(TESTED)}): " + "; ".join(f"{name}: {reason}" for name, reason in missing.items())
    )
    works = [name for name, places in found.items() if not isinstance(places, Missing)]
    if not works:
        raise RuntimeError(f"{lacks}. Nothing was changed." + see("trl"))
    if missing:
        warn(f"{lacks}. These are left out; TRL's own code runs for them." + see("trl"))
    for name in works:
        _replaced.add(place.find() for place in FEATURES[name])  # again: what another feature has put there


def is_enabled() -> bool:
    """Whether TRL's trainers compute their losses with this library."""
    return bool(_replaced)


def disable() -> None:
    """Restore TRL. Models of trainers that were built in between keep their heads."""
    _restore(0, _DEFAULTS)


@contextlib.contextmanager
def enabled(**options: Any) -> Iterator[None]:
    """:func:`enable`, with its options, for the duration of a ``with`` block."""
    with contextlib.ExitStack() as stack:
        stack.callback(_restore, len(_replaced), vars(chosen).copy())
        enable(**options)
        yield


def _restore(replaced: int, options: dict[str, Any]) -> None:
    _replaced.restore(replaced)
    vars(chosen).update(options)
