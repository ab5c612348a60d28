"""TRL's trainers with this library's loss heads: call ``liger_losses.trl.enable()``; nothing else changes."""

from liger_losses.trl.enabling import disable, enable, enabled, is_enabled

__all__ = ["disable", "enable", "enabled", "is_enabled"]
