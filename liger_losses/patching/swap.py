"""Replaces methods of a module by changing the module's class, so that copies and pickles are patched too."""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from liger_losses.caller import warn
from liger_losses.kernels.autograd import records_nothing
from liger_losses.patching import probing


class Replacement:
    """What replaces methods of some modules: a hashable value, which modules share and pickles of them contain.

    The class holds how modules of its kind are recognized.

    Attributes:
        methods: the names of the methods.
        may_be_wrapped: whether what is put on the instance in their place calls them, also once they are restored.
        reads_module: whether the new method reads what the old one did, so that its attributes may change.
    """

    methods: tuple[str, ...] = ("forward",)
    may_be_wrapped: bool = False
    reads_module: bool = False

    def call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """The new method; ``NotImplemented`` for calls that were not probed, which go to the original method."""
        return NotImplemented

    def new_method(self, replaced: Callable[..., Any]) -> Callable[..., Any]:
        """What replaces a method; by default :meth:`call`."""
        return self.call

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        """Whether a module has the right parameters, buffers and children; nothing is run."""
        return False

    @classmethod
    def match(cls, module: nn.Module) -> Replacement:
        """What a candidate computes, found by running copies; or Mismatch, with how the nearest kernel differs."""
        raise NotImplementedError

    @classmethod
    def key(cls, module: nn.Module) -> Any:
        """Candidates with equal keys compute the same, so that only one of them is run."""
        shapes = tuple((name, probing.shape_of(p)) for name, p in module.named_parameters(recurse=False))
        return type(module), shapes, probing.children_of(module), probing.attributes(module)

    @classmethod
    def bypassed(cls, module: nn.Module) -> dict[str, nn.Module]:
        """The submodules, by name, that are no longer called."""
        return {name: part for name, part in module.named_modules() if part is not module}

    @classmethod
    def reason_to_leave(cls, module: nn.Module) -> str | None:
        """Why a candidate must stay as it is, or ``None``."""
        return reason_not_to_swap(module, cls.bypassed(module), cls.methods)

    @classmethod
    def is_worth_listing(cls, module: nn.Module) -> bool:
        """Whether the report names a candidate that was not replaced."""
        return True


#: A model's own one or two operations on so few tokens take the host less time than it takes to launch a kernel.
FEW_TOKENS = 128


def is_short(x: Tensor) -> bool:
    """Whether there are few tokens ``[..., H]`` and no gradients, as in generation, where the host decides."""
    return x.numel() <= FEW_TOKENS * x.shape[-1] and records_nothing()


def swapped_class(module: nn.Module, replacement: Replacement) -> type[nn.Module]:
    """The class with which a module has its methods replaced."""
    probed = {*vars(module)} - probing.TORCH_ATTRIBUTES | {*replacement.bypassed(module)}
    return _subclass(original_class(module), replacement, frozenset(() if replacement.reads_module else probed))


def swap(module: nn.Module, replacement: Replacement) -> None:
    """Replace the methods of a module, in place."""
    module.__class__ = swapped_class(module, replacement)


def restore(module: nn.Module) -> None:
    """Undo :func:`swap`, if the module was swapped."""
    changed: Any = type(module)
    if "_liger_original" in vars(changed):
        module.__class__ = original_class(module)
    elif _is_unit(changed):
        members = {name: value for name, value in vars(changed).items() if name == "__deepcopy__"}
        bases = (changed.__bases__[0], original_class(module))
        module.__class__ = type(changed)(changed.__name__, bases, members)


def _is_unit(changed: type) -> bool:
    """Whether ``fully_shard`` has derived a class from the class of a swapped module."""
    first, *others = changed.__bases__
    is_fsdp = hasattr(first, "set_reshard_after_forward") and not issubclass(first, nn.Module)
    return is_fsdp and len(others) == 1 and "_liger_original" in vars(others[0])


def reason_not_to_restore(module: nn.Module) -> str | None:
    """Why :func:`swap` cannot be undone, or ``None``."""
    replacement = replacement_of(module)
    if replacement is None:
        return None
    if "_liger_original" not in vars(type(module)) and not _is_unit(type(module)):
        return f"its class was changed to {type(module).__name__} after patching"
    replaced = None if replacement.may_be_wrapped else replaced_on_instance(module, replacement.methods)
    return None if replaced is None else f"{replaced} after patching"


def replacement_of(module: nn.Module) -> Any:
    """The replacement that a module was swapped for, or ``None``."""
    return getattr(type(module), "_liger_replacement", None)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before :func:`swap`."""
    return getattr(type(module), "_liger_original", type(module))


def replaced_on_instance(module: nn.Module, methods: Iterable[str], owner: str = "its") -> str | None:
    """A sentence on the first of the methods that was replaced on the module itself, or ``None``."""
    return next((f"{owner} {name} was replaced on the instance" for name in methods if name in vars(module)), None)


#: Kinds of hooks on modules.
HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def hooks_of(module: nn.Module, kind: str) -> dict[int, Any]:
    """A module's hooks of a kind, by number; torch has no public name for them, and without names there may be some."""
    return getattr(module, f"_{kind}", {0: None})


def reason_not_to_swap(
    module: nn.Module, bypassed: Mapping[str, nn.Module], methods: tuple[str, ...] = ("forward",)
) -> str | None:
    """Why a module, or one of the submodules that would no longer be called, must stay as it is, or ``None``."""
    for name, part in {"": module, **bypassed}.items():
        called, owner = (("forward",), f"its {name}'s") if name else (methods, "its")
        replaced = replaced_on_instance(part, called, owner)
        if replaced is not None:
            return replaced
        if any(hooks_of(part, kind) for kind in HOOKS):
            return f"its {name} has hooks" if name else "it has hooks"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "it was compiled separately; patch before compiling"
    for name, parameter in module.named_parameters(recurse=False):
        sharded = hasattr(parameter, "full_tensor")  # gathered for the forward; if not, the original runs
        if type(parameter) is not nn.Parameter and not sharded:
            return f"its {name} is a {type(parameter).__name__}"
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            return f"its {name} is of {parameter.dtype}"
        if 0 in probing.shape_of(parameter):
            return f"its {name} is empty, as FSDP1 leaves it on some processes; patch before sharding"
    return None


def _subclass(original: type[nn.Module], replacement: Any, probed: frozenset[str]) -> type[nn.Module]:
    """The class with methods replaced; there is one for each class, its methods, replacement and probed attributes."""
    replaced = tuple([getattr(original, name) for name in replacement.methods])
    key = original, replacement, probed, replaced
    subclass = _subclasses.get(key)
    if subclass is None:
        subclass = _subclasses[key] = _make_subclass(*key)
    return subclass


#: The classes with methods replaced, as long as a module has them.
_subclasses: weakref.WeakValueDictionary[Any, type[nn.Module]] = weakref.WeakValueDictionary()


def _make_subclass(
    original: type[nn.Module], replacement: Any, probed: frozenset[str], replaced: tuple[Any, ...]
) -> type[nn.Module]:
    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        # The class exists in memory only; a pickle names the original class and the replacement.
        reduced = super(subclass, self).__reduce_ex__(protocol)
        if type(self) is not subclass or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced  # of a subclass of it, or of a class that defines __reduce__
        return _new, (original, replacement, probed), *reduced[2:]

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        changes = name in probed and _differ(getattr(self, name, None), value)
        reason = reason_not_to_restore(self) if changes else None
        if reason is not None:
            raise RuntimeError(
                f"{name} of a patched {original.__name__} cannot change: {reason}. Change it before patch(model), or "
                "undo that and call unpatch(model) first."
            )
        super(subclass, self).__setattr__(name, value)
        if changes:
            restore(self)
            warn(
                f"{name} of a {original.__name__} was changed after patch(): its own forward computes from now on. "
                "Call liger_losses.patch(model) again to replace it.",
                RuntimeWarning,
            )

    members = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    for name, old in zip(replacement.methods, replaced, strict=True):
        members[name] = _method(original, replacement, name, old)
    members |= {"__reduce_ex__": __reduce_ex__, "__setattr__": __setattr__}
    members |= {"_liger_original": original, "_liger_replacement": replacement}
    metaclass: Any = type(original)
    subclass: type[nn.Module] = metaclass(original.__name__, (original,), members)
    return subclass


def _differ(old: Any, new: Any) -> bool:
    """Whether a probe may see other values; equal numbers are the same."""
    return old is not new and probing.fingerprint(old) != probing.fingerprint(new)


def _method(original: type[nn.Module], replacement: Any, name: str, replaced: Callable[..., Any]) -> Any:
    new = replacement.new_method(replaced)

    @functools.wraps(replaced)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current = getattr(original, name)
        # Something else may have replaced the method of the class since.
        result = new(self, *args, **kwargs) if current is replaced else NotImplemented
        return current(self, *args, **kwargs) if result is NotImplemented else result

    return method


def _new(original: type[nn.Module], replacement: Replacement, probed: frozenset[str] = frozenset()) -> nn.Module:
    subclass = _subclass(original, replacement, probed)
    return subclass.__new__(subclass)
