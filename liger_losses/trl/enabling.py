"""Replace the places of TRL's :data:`~liger_losses.trl.features.FEATURES`, and put them back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from liger_losses.arguments import lists_arguments
from liger_losses.caller import warn
from liger_losses.checks import see
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.patching.loss_head import is_head
from liger_losses.patching.patch import patch
from liger_losses.places import Missing, Place, Replaced, around
from liger_losses.trl.divergences import chosen
from liger_losses.trl.features import FEATURES, TESTED, ZERO_ADVANTAGES, Feature, find

_BASE = "trl.trainer.base_trainer"
_replaced = Replaced()
#: The features that are enabled now.
_enabled: list[Feature] = []


@lists_arguments
def enable(
    *,
    kernels: bool = False,
    skip_zero_advantages: bool = True,
    divergence: Divergence | None = None,
    share_prompts: bool | None = None,
    reuse_forward: bool = False,
) -> None:
    """Make TRL's trainers use this library's loss heads, if they are built from now on. All of their options work.

    Supported are SFT, DPO, KTO, GRPO, RLOO, asynchronous GRPO and distillation (also asynchronous and from a server),
    and the experimental trainers CPO and SimPO, ORPO, TPO, A2PO, GMPO, online DPO, GKD, GOLD, IW-OPD, SDFT and SDPO.
    LoRA on ``lm_head`` works. If the installed TRL lacks a name that one of these features replaces, TRL's code runs
    for this feature, and a warning names it. A second call can add the kernels and ``reuse_forward``, and set
    ``share_prompts``, and changes nothing else. A trainer that was built before keeps TRL's head, and warns when it
    trains.

    Args:
        kernels: also :func:`~liger_losses.patch` the models, for faster norms, MLPs and rotary embeddings that save
            less for backward. The models stay patched; to restore one, call :func:`~liger_losses.unpatch`.
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
        RuntimeError: this version of TRL lacks names of every feature. The error lists them, and nothing is changed. Or
            an earlier call enabled another value of ``skip_zero_advantages`` or another divergence.
    """
    flags = {"kernels": kernels, "skip_zero_advantages": skip_zero_advantages, "share_prompts": share_prompts}
    flags["reuse_forward"] = reuse_forward
    for name, value in flags.items():
        if not isinstance(value, bool) and (name, value) != ("share_prompts", None):
            choices = "True, False or None" if name == "share_prompts" else "True or False"
            raise TypeError(f"{name} must be {choices}, got {value!r}.")
    if not skip_zero_advantages and any(feature in ZERO_ADVANTAGES for feature in _enabled):
        raise RuntimeError("skip_zero_advantages is enabled already: call liger_losses.trl.disable() first.")
    if divergence is not None and not isinstance(divergence, Divergence):
        raise TypeError(f"divergence must be a Divergence, such as Divergence.reverse_kl(), got {divergence!r}.")
    if _enabled and divergence is not None and chosen.divergence not in (None, divergence):
        raise RuntimeError("another divergence is enabled already: call liger_losses.trl.disable() first.")
    if not _enabled:
        left_out = () if skip_zero_advantages else ZERO_ADVANTAGES
        _add((*(feature for feature in FEATURES if feature not in left_out), BUILT_EARLY))
    if kernels and all(feature.name != "kernels" for feature in _enabled):
        heads = [place for feature in _enabled for place in feature.places if place.name == "add_fused_lm_head"]
        # A trainer loads models itself, and gives them their head.
        _add((Feature("kernels", (KERNELS, *(Place(p.module, p.name, around(_with_kernels)) for p in heads))),))
    chosen.divergence = divergence or chosen.divergence
    chosen.share_prompts = chosen.share_prompts if share_prompts is None else share_prompts
    chosen.reuse_forward = chosen.reuse_forward or reuse_forward


def _add(features: Sequence[Feature]) -> None:
    try:
        import trl
    except ImportError as error:
        raise ImportError('liger_losses.trl needs TRL: pip install "trl>=1.15".') from error
    version = getattr(trl, "__version__", "of unknown version")
    found = find(features)
    missing = {name: places for name, places in found.items() if isinstance(places, Missing) and not places.package}
    lacks = (
        f"TRL {version} lacks names that features of liger_losses.trl replace (tested with TRL {', '.join(TESTED)}): "
        + "; ".join(f"{name}: {reason}" for name, reason in missing.items())
    )
    if len(features) > 1 and all(isinstance(found[f.name], Missing) for f in features if f is not BUILT_EARLY):
        raise RuntimeError(f"{lacks}. Nothing was changed." + see("trl"))
    if missing:
        warn(f"{lacks}. These are left out; TRL's own code runs for them." + see("trl"))
    for feature in features:
        if not isinstance(found[feature.name], Missing):
            _replaced.add(place.find() for place in feature.places)  # again: what another feature has put there
            _enabled.append(feature)


def is_enabled() -> bool:
    """Whether trainers that are built now get this library's loss heads."""
    return bool(_enabled)


def disable() -> None:
    """Restore TRL. Trainers that were built in between keep their heads."""
    _restore(0, 0, {"divergence": None, "share_prompts": None, "reuse_forward": False})


@contextlib.contextmanager
def enabled(**options: Any) -> Iterator[None]:
    """:func:`enable`, with its options, for the duration of a ``with`` block."""
    with contextlib.ExitStack() as stack:
        stack.callback(_restore, len(_replaced), len(_enabled), vars(chosen).copy())
        enable(**options)
        yield


def _restore(replaced: int, features: int, options: dict[str, Any]) -> None:
    _replaced.restore(replaced)
    del _enabled[features:]
    vars(chosen).update(options)


def _with_kernels(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Patch the models among a function's arguments before it runs."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, nn.Module):
            patch(argument, loss_head=False)
        if getattr(argument, "use_liger_kernel", False):  # of the trainer's configuration
            warn(
                "use_liger_kernel=True and liger_losses.trl.enable(kernels=True) each replace norms, MLPs and "
                "rotary embeddings; liger-kernel's will run. Leave one of them out.",
            )
    function(*args, **kwargs)


def _warns_if_built_early(train: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Warn where a trainer trains whose head was made, when it was built, before ``enable``."""
    places = (place for feature in _enabled if feature in FEATURES for place in feature.places)
    made_early = {p.module for p in places if p.name == "add_fused_lm_head" or p.name.endswith(".__init__")}
    ours = any(map(is_head, self.model.modules()))
    if not ours and made_early.intersection(cls.__module__ for cls in type(self).__mro__):
        warn(
            f"this {type(self).__name__} was built before liger_losses.trl.enable(), and keeps TRL's own head. "
            "Build it again to train with this library's." + see("trl"),
        )
    return train(self, *args, **kwargs)


#: Replaced with the kernels, where trainers get their models.
KERNELS = Place(_BASE, "_BaseTrainer.__init__", around(_with_kernels))
BUILT_EARLY = Feature("warning of early trainers", (Place(_BASE, "_BaseTrainer.train", around(_warns_if_built_early)),))
