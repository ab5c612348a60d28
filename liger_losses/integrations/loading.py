"""Patches the models that transformers loads from now on: for scripts and frameworks that stay as they are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from liger_losses.patching.patch import patch

#: From a model that was loaded to the options of :func:`liger_losses.patch`; ``None`` leaves the model.
Options = Callable[[nn.Module], dict[str, Any] | None]

_METHODS = ("from_pretrained", "_from_config")
_wanted: list[Options] = []
_originals: dict[str, Any] = {}


def patch_loaded_models(options: Options | None = None, **same_for_all: Any) -> None:
    """Patch every language model that transformers' ``from_pretrained`` or ``from_config`` returns from now on.

    Models without a head for tokens, such as encoders, are left. The report of each is its ``liger_report``.
    Called again, the last options that are given for a model count.

    Args:
        options: from a model to the keyword arguments of :func:`liger_losses.patch`, ``None`` to leave the model.
        same_for_all: or these arguments, for all models.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import PreTrainedModel

    _wanted.append(options or (lambda model: same_for_all))
    if not _originals:
        for name in _METHODS:
            _originals[name] = PreTrainedModel.__dict__[name]
            setattr(PreTrainedModel, name, classmethod(_patching(_originals[name].__func__)))


def leave_loaded_models() -> None:
    """Undo :func:`patch_loaded_models`; models that were loaded in between stay patched."""
    if not _originals:
        return
    from transformers import PreTrainedModel

    _wanted.clear()
    while _originals:
        setattr(PreTrainedModel, *_originals.popitem())


@contextlib.contextmanager
def patched_loading(options: Options | None = None, **same_for_all: Any) -> Iterator[None]:
    """:func:`patch_loaded_models` for the duration of a ``with`` block."""
    patch_loaded_models(options, **same_for_all)
    try:
        yield
    finally:
        leave_loaded_models()


def _patching(method: Callable[..., Any]) -> Callable[..., Any]:
    """A class's constructor that patches the model. Constructors may call each other: the outermost one patches."""
    depth = 0

    @functools.wraps(method)
    def wrapped(cls: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            loaded = method(cls, *args, **kwargs)
        finally:
            depth -= 1
        if not depth:
            _patch(loaded[0] if isinstance(loaded, tuple) else loaded)  # with output_loading_info=True
        return loaded

    return wrapped


def _patch(model: Any) -> None:
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        return
    for options in reversed(_wanted):
        chosen = options(model)
        if chosen is not None:
            model.liger_report = patch(model, **chosen)
            return
