"""A kernel plugin of LLaMA-Factory's v1: ``register()``, then ``kernel_config: {name: liger_losses}`` in the YAML file.

Its v0 calls liger-kernel with ``enable_liger_kernel: true``; :func:`liger_losses.integrations.liger.install` answers.
"""

from __future__ import annotations

from typing import Any

from liger_losses.patching.patch import patch


class Kernel:
    """What LLaMA-Factory calls: patches the model, whose lazy logits serve stages that need logits, too."""

    @classmethod
    def apply(cls, *, model: Any, config: dict[str, Any] | None = None, **_others: Any) -> Any:
        """Patch a model and return it; ``config["patch_options"]`` are options of :func:`liger_losses.patch`."""
        model.liger_report = patch(model, **(config or {}).get("patch_options", {}))
        return model


def register(name: str = "liger_losses") -> None:
    """Make the kernel known to LLaMA-Factory by a name.

    Raises:
        ImportError: LLaMA-Factory is not installed, or has no v1.
    """
    from llamafactory.v1.plugins.model_plugins.kernels.base import KernelPlugin

    KernelPlugin(name).register()(Kernel)
