"""A callback for transformers' Trainer: ``Trainer(..., callbacks=[PatchCallback()])`` patches its model."""

from __future__ import annotations

import functools
from typing import Any

from liger_losses.patching.patch import patch


@functools.cache
def _callback_class() -> type:
    from transformers import TrainerCallback

    class PatchCallback(TrainerCallback):
        """Patches the trainer's model when the trainer is built.

        A model that the trainer makes later (``model_init=``), or that it had when the callback was added to it, is
        patched when training begins.

        Args:
            options: those of :func:`liger_losses.patch`. The report is the model's ``liger_report``.
        """

        def __init__(self, **options: Any) -> None:
            self.options = options

        def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_others: Any) -> None:
            model.liger_report = patch(model, **self.options)

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_others: Any) -> None:
            if not hasattr(model, "liger_report"):
                model.liger_report = patch(model, **self.options)

    PatchCallback.__qualname__ = "PatchCallback"  # pickled by the name that this module answers
    return PatchCallback


def __getattr__(name: str) -> Any:
    if name == "PatchCallback":
        return _callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
