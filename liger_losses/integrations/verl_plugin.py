"""The entry point of the group ``verl.plugins``: verl imports this module, and importing it installs our heads.

``VERL_USE_EXTERNAL_PLUGINS=none`` (or a list of other plugins' names) in the environment turns it off.
"""

from liger_losses.caller import warn
from liger_losses.integrations.verl import install

try:
    install()
except Exception as error:  # verl logs plugins' errors, of whatever kind, at the level DEBUG only
    warn(f"verl runs with its own fused heads, not with liger_losses: {error!r}")
