"""A plugin of Axolotl: ``plugins: [liger_losses.integrations.axolotl.Plugin]`` in the YAML file.

It patches the model that is trained, and gives TRL's trainers this library's heads. ``liger_losses:`` in the YAML file
may hold options of :func:`liger_losses.patch`, ``tile_mlps: true`` for example.
"""

from __future__ import annotations

import functools
from typing import Any

from liger_losses.caller import warn
from liger_losses.integrations.replacements import announce
from liger_losses.patching.patch import patch


@functools.cache
def __getattr__(name: str) -> Any:
    """``Plugin`` and ``Args``, whose base classes are imported when they are first asked for."""
    if name == "Args":
        from pydantic import create_model

        return create_model("Args", liger_losses=(dict[str, Any] | None, None))
    if name != "Plugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from axolotl.integrations.base import BasePlugin

    class Plugin(BasePlugin):
        """Patches the model after adapters are in it, before the trainer is built."""

        def get_input_args(self) -> str:
            return f"{__name__}.Args"

        def pre_model_load(self, cfg: Any) -> None:
            """For training on preferences and rewards, TRL's trainers get this library's heads."""
            if not getattr(cfg, "rl", None):
                return
            import liger_losses.trl

            try:
                liger_losses.trl.enable()
            except RuntimeError as error:
                warn(f"the trainers keep TRL's own heads, and the model is patched: {error}")

        def post_model_load(self, cfg: Any, model: Any) -> None:
            announce("Axolotl", "0.21", "loss, norms, MLPs and rotations of the model")
            model.liger_report = patch(model, **(getattr(cfg, "liger_losses", None) or {}))

    return Plugin
