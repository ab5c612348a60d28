"""TRL's trainers with this library's head: ``liger_losses.trl.enable()``, and nothing else changes."""

from liger_losses.trl.patch_points import disable, enable, enabled

__all__ = ["disable", "enable", "enabled"]
