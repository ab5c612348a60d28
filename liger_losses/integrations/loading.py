"""Patches the models that transformers loads from now on: for scripts and frameworks that stay as they are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from liger_losses.integrations.replacements import Replacements
from liger_losses.patching.loss_head import pending_logits
from liger_losses.patching.patch import patch
from liger_losses.places import Place, around

#: From a model that was loaded to the options of :func:`liger_losses.patch`; ``None`` leaves the model.
Options = Callable[[nn.Module], dict[str, Any] | None]

_wanted: list[Options] = []
#: Whether this thread is in one of these methods.
_thread = threading.local()


def patch_loaded_models(options: Options | None = None, **same_for_all: Any) -> Options:
    """Patch every language model that transformers' ``from_pretrained`` or ``from_config`` returns from now on.

    Models without a head for tokens, such as encoders, are left. The report of each is its ``liger_report``. In the
    training steps of a Trainer with a ``compute_loss_func``, its patched models return pending logits.
    If several calls give options for a model, the last options apply.

    Args:
        options: from a model to the keyword arguments of :func:`liger_losses.patch`, ``None`` to leave the model.
        same_for_all: or these arguments, for all models.

    Returns:
        The options, for :func:`leave_loaded_models`.

    Raises:
        ImportError: transformers is not installed.
    """
    import transformers  # noqa: F401

    options = options or (lambda model: same_for_all)
    _wanted.append(options)
    _REPLACEMENTS.install()
    return options


def leave_loaded_models(options: Options | None = None) -> None:
    """Undo :func:`patch_loaded_models`; models that were loaded in between stay patched.

    Args:
        options: the result of one call, to undo only this call; by default all calls.
    """
    if options is None:
        _wanted.clear()
    elif options in _wanted:  # the last one, where the same options were given several times
        del _wanted[len(_wanted) - 1 - _wanted[::-1].index(options)]
    if not _wanted:
        _REPLACEMENTS.uninstall()


@contextlib.contextmanager
def patched_loading(options: Options | None = None, **same_for_all: Any) -> Iterator[None]:
    """:func:`patch_loaded_models` for the duration of a ``with`` block."""
    options = patch_loaded_models(options, **same_for_all)
    try:
        yield
    finally:
        leave_loaded_models(options)


def _with_loss_function(step: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """A step of a Trainer with a loss function of its own: its models return pending logits, given labels or not."""
    models = [value for value in vars(trainer).values() if isinstance(value, nn.Module)]
    with pending_logits(*models if trainer.compute_loss_func is not None else ()):
        return step(trainer, *args, **kwargs)


def _patching(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Construct a model, and patch it. Constructors may call each other: the outermost one patches."""
    outer = getattr(_thread, "loading", False)
    _thread.loading = True
    try:
        loaded = method(*args, **kwargs)
    finally:
        _thread.loading = outer
    if not outer:
        _patch(loaded[0] if isinstance(loaded, tuple) else loaded)  # with output_loading_info=True
    return loaded


def _patch(model: Any) -> None:
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        return
    chosen = next((found for options in reversed(_wanted) if (found := options(model)) is not None), None)
    if chosen is not None:
        model.liger_report = patch(model, **chosen)


_MODEL = "transformers.modeling_utils"
_REPLACEMENTS = Replacements(
    "transformers",
    "5",
    Place(_MODEL, "PreTrainedModel.from_pretrained", around(_patching)),
    Place(_MODEL, "PreTrainedModel._from_config", around(_patching)),
    Place("transformers.trainer", "Trainer.training_step", around(_with_loss_function)),
)
