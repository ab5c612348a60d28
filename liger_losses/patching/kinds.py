"""What a kind of module that kernels can replace must say about itself; norms, gated MLPs and experts each do."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from torch import nn

from liger_losses.patching.probing import attributes, children_of, shape_of
from liger_losses.patching.swap import Replacement


class PatchKind(Protocol):
    """A kind of module, and how to recognize it.

    Attributes:
        replacement: the class of what :meth:`match` returns.
    """

    replacement: ClassVar[type]

    def is_candidate(self, module: nn.Module) -> bool:
        """Whether a module has the right parameters, buffers and children; nothing is run."""
        ...

    def match(self, module: nn.Module) -> Replacement:
        """What a candidate computes, found by running copies of it.

        Raises:
            Mismatch: there is no kernel for it; the message says how the nearest one differs.
        """
        ...

    def key(self, module: nn.Module) -> Any:
        """Candidates with equal keys compute the same, so that only one of them is run."""
        shapes = tuple((name, None if p is None else shape_of(p)) for name, p in module._parameters.items())
        return type(module), shapes, children_of(module), attributes(module)

    def bypassed(self, module: nn.Module) -> dict[str, nn.Module]:
        """The submodules, by name, that the replacement would no longer call."""
        return {name: part for name, part in module.named_modules() if part is not module}

    def is_worth_listing(self, module: nn.Module) -> bool:
        """Whether the report names a candidate that was not replaced."""
        return True
