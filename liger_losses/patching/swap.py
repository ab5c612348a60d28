"""Replaces a method of a module by changing the module's class, so that copies and pickles are patched too."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from torch import nn


class Replacement(Protocol):
    """What replaces a method: a hashable value, which modules share and pickles of them contain.

    Attributes:
        method: the name of the method, ``forward`` in most cases.
    """

    method: ClassVar[str]

    def replace(self, original: type[nn.Module]) -> Callable[..., Any]:
        """The new method; ``original`` is the class whose method takes the calls that the new one does not support."""


def swap(module: nn.Module, replacement: Replacement) -> None:
    """Replace a method of a module, in place."""
    module.__class__ = _subclass(type(module), replacement)


def restore(module: nn.Module) -> None:
    """Undo :func:`swap`, if the module was swapped."""
    if "_liger_original" in vars(type(module)):
        module.__class__ = original_class(module)


def reason_not_to_restore(module: nn.Module) -> str | None:
    """Why :func:`swap` cannot be undone, or ``None``."""
    replacement = replacement_of(module)
    if replacement is None:
        return None
    if "_liger_original" not in vars(type(module)):
        return f"its class was changed to {type(module).__name__} after patching"
    if replacement.method in vars(module):
        return f"its {replacement.method} was replaced on the instance after patching"
    return None


def replacement_of(module: nn.Module) -> Any:
    """The replacement that a module was swapped for, or ``None``."""
    return getattr(type(module), "_liger_replacement", None)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before :func:`swap`."""
    return getattr(type(module), "_liger_original", type(module))


def reason_not_to_swap(module: nn.Module, bypassed: Mapping[str, nn.Module]) -> str | None:
    """Why a module must keep its class, whatever it computes, or ``None``.

    Args:
        module: the module.
        bypassed: its submodules, by name, that the replacement would no longer call.
    """
    for name, part in {"": module, **bypassed}.items():
        whose = f"its {name}'s " if name else "its "
        if "forward" in vars(part):
            return f"{whose}forward was replaced on the instance"
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return f"its {name} has hooks" if name else "it has hooks"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "it was compiled on its own; patch before compiling"
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        sharded = hasattr(parameter, "full_tensor")  # gathered for the forward; if not, the original runs
        if type(parameter) is not nn.Parameter and not sharded:
            return f"its {name} is a {type(parameter).__name__}"
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            return f"its {name} is of {parameter.dtype}"
    return None


#: One subclass per class and replacement.
_SUBCLASSES: dict[tuple[type[nn.Module], Replacement], type[nn.Module]] = {}


def _subclass(original: type[nn.Module], replacement: Replacement) -> type[nn.Module]:
    if (original, replacement) not in _SUBCLASSES:
        _SUBCLASSES[original, replacement] = _make_subclass(original, replacement)
    return _SUBCLASSES[original, replacement]


def _make_subclass(original: type[nn.Module], replacement: Replacement) -> type[nn.Module]:
    method = functools.wraps(getattr(original, replacement.method))(replacement.replace(original))

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        # The class exists in memory only; a pickle names the original class and the replacement.
        reduced = super(subclass, self).__reduce_ex__(protocol)
        if type(self) is not subclass or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced  # of a subclass of it, or of a class with a __reduce__ of its own
        return _new, (original, replacement), *reduced[2:]

    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    metaclass: Any = type(original)
    subclass = metaclass(
        original.__name__,
        (original,),
        {
            **names,
            replacement.method: method,
            "__reduce_ex__": __reduce_ex__,
            "_liger_original": original,
            "_liger_replacement": replacement,
        },
    )
    return subclass


def _new(original: type[nn.Module], replacement: Replacement) -> nn.Module:
    subclass = _subclass(original, replacement)
    return subclass.__new__(subclass)
