"""Replaces methods of a module by changing the module's class, so that copies and pickles are patched too."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from liger_losses.caller import warn
from liger_losses.kernels.autograd import records_nothing
from liger_losses.layers.plain import HOOKS
from liger_losses.patching import probing
from liger_losses.patching.report import LEFT_OUT, Entry

#: From a module and its name in the model to whether it may be replaced.
Filter = Callable[[nn.Module, str], bool]


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

    def in_tiles(self, tokens: bool | int) -> Replacement:
        """The same for so many tokens at a time, if it can; False leaves their number, and True chooses it."""
        return self

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        """Whether a module has the right parameters, buffers and children; nothing is run."""
        return True

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
        """The submodules, by name, that are no longer called: all but linear layers."""
        linears = probing.linears_of(module)
        return {n: part for n, part in module.named_modules() if part is not module and n.split(".")[0] not in linears}

    @classmethod
    def reason_to_leave(cls, module: nn.Module) -> str | None:
        """Why a candidate, or one of the submodules that would no longer be called, must stay as it is, or ``None``."""
        for name, part in {"": module, **cls.bypassed(module)}.items():
            called, owner = (("forward",), f"its {name}'s") if name else (cls.methods, "its")
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

    @classmethod
    def is_worth_listing(cls, module: nn.Module) -> bool:
        """Whether the report names a candidate that was not replaced."""
        return True


#: A model's own one or two operations on so few tokens take the host less time than it takes to launch a kernel.
FEW_TOKENS = 128


def is_short(x: Tensor) -> bool:
    """Whether there are few tokens ``[..., H]`` and no gradients, as in generation, where the host decides."""
    return x.numel() <= FEW_TOKENS * x.shape[-1] and records_nothing()


class Search:
    """What is found in the modules of one model.

    Attributes:
        entries: the lines of the report.
    """

    def __init__(self, filter_fn: Filter | None, tile_mlps: bool | int = False) -> None:
        self.filter_fn, self.tile_mlps, self.entries = filter_fn, tile_mlps, list[Entry]()
        self._swapped: list[tuple[nn.Module, type[nn.Module]]] = []
        # What was found for modules, a replacement or a reason, by their keys; and those modules, as keys contain
        # addresses of objects that they hold.
        self._matches: dict[Any, tuple[Replacement | str, nn.Module]] = {}

    def finds(self, kind: type[Replacement], path: str, module: nn.Module) -> bool:
        """Whether something of a kind replaces a module, from :meth:`swap` on or already."""
        present = replacement_of(module)
        if present is not None:
            if isinstance(present, kind):
                stays = reason_not_to_restore(module) is not None or self._leaves(module, path)
                self._add(path, module, present if stays else present.in_tiles(self.tile_mlps))
            return isinstance(present, kind)
        key, listed = None, True
        try:
            if not kind.is_candidate(module):
                return False
            reason, key, listed = kind.reason_to_leave(module), (kind, kind.key(module)), kind.is_worth_listing(module)
        except Exception as error:
            reason = probing.reason_of(error)
        if reason is None and self._leaves(module, path):
            reason = LEFT_OUT
        if reason is None and key not in self._matches:
            try:
                with probing.isolated():
                    self._matches[key] = kind.match(module), module
            except Exception as error:
                self._matches[key] = probing.reason_of(error), module
        match = reason or self._matches[key][0]
        if not isinstance(match, str):
            self._add(path, module, match.in_tiles(self.tile_mlps))
            return True
        if listed:
            self.entries.append(Entry(path, type(module).__name__, None, match))
        return False

    def _leaves(self, module: nn.Module, path: str) -> bool:
        return self.filter_fn is not None and not self.filter_fn(module, path)

    def _add(self, path: str, module: nn.Module, replacement: Replacement) -> None:
        self.entries.append(Entry(path, original_class(module).__name__, str(replacement)))
        if replacement != replacement_of(module):
            self._swapped.append((module, swapped_class(module, replacement)))

    def swap(self) -> None:
        """Replace what was found, in place. Nothing raises here: a model is patched as a whole or not at all."""
        for module, swapped in self._swapped:
            module.__class__ = swapped


def swapped_class(module: nn.Module, replacement: Replacement) -> type[nn.Module]:
    """The class with which a module has its methods replaced."""
    probed = {*vars(module)} - probing.TORCH_ATTRIBUTES | {*replacement.bypassed(module)}
    subclass = _subclass(original_class(module), replacement, frozenset(() if replacement.reads_module else probed))
    return _in_unit(type(module), subclass)


def swap(module: nn.Module, replacement: Replacement) -> None:
    """Replace the methods of a module, in place."""
    module.__class__ = swapped_class(module, replacement)


def restore(module: nn.Module) -> None:
    """Undo :func:`swap`, if the module was swapped."""
    if _is_ours(type(module)) or _is_unit(type(module)):
        module.__class__ = _in_unit(type(module), original_class(module))


def _in_unit(changed: type, base: type[nn.Module]) -> type[nn.Module]:
    """A class; or what ``fully_shard`` would derive from it, if it has derived one from that of a swapped module."""
    if not _is_unit(changed):
        return base
    members = {name: value for name, value in vars(changed).items() if name == "__deepcopy__"}
    unit: type[nn.Module] = type(changed)(changed.__name__, (changed.__bases__[0], base), members)
    return unit


def _is_ours(changed: type) -> bool:
    return "_liger_original" in vars(changed)


def _is_unit(changed: type) -> bool:
    """Whether ``fully_shard`` has derived a class from the class of a swapped module."""
    first, *others = changed.__bases__
    return hasattr(first, "set_reshard_after_forward") and len(others) == 1 and _is_ours(others[0])


def reason_not_to_restore(module: nn.Module) -> str | None:
    """Why :func:`swap` cannot be undone, or ``None``."""
    replacement = replacement_of(module)
    if replacement is None:
        return None
    if not _is_ours(type(module)) and not _is_unit(type(module)):
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


def hooks_of(module: nn.Module, kind: str) -> dict[int, Any]:
    """A module's hooks of a kind, by number; torch has no public name for them, and without names there may be some."""
    return getattr(module, kind, {0: None})


def _subclass(original: type[nn.Module], replacement: Replacement, probed: frozenset[str]) -> type[nn.Module]:
    """The class with methods replaced; there is one for each class, its methods, replacement and probed attributes."""
    replaced = tuple([getattr(original, name) for name in replacement.methods])
    key = replacement, probed, replaced
    for subclass in type.__subclasses__(original):
        if vars(subclass).get("_liger_key") == key:
            return subclass

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        # The class exists in memory only; a pickle names the original class and the replacement.
        reduced = super(subclass, self).__reduce_ex__(protocol)
        if type(self) is not subclass or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced  # of a subclass of it, or of a class that defines __reduce__
        return _new, (original, replacement, probed), *reduced[2:]

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        changes = name in probed and probing.fingerprint(getattr(self, name, None)) != probing.fingerprint(value)
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
    members |= {"_liger_original": original, "_liger_replacement": replacement, "_liger_key": key}
    metaclass: Any = type(original)
    subclass = metaclass(original.__name__, (original,), members)
    return subclass


def _method(original: type[nn.Module], replacement: Any, name: str, replaced: Callable[..., Any]) -> Any:
    new = replacement.new_method(replaced)

    @functools.wraps(replaced)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current = getattr(original, name)
        # Something else may have replaced the method of the class since.
        result = new(self, *args, **kwargs) if current is replaced else NotImplemented
        return current(self, *args, **kwargs) if result is NotImplemented else result

    return method


def _new(original: type[nn.Module], replacement: Replacement, probed: frozenset[str]) -> nn.Module:
    subclass = _subclass(original, replacement, probed)
    return subclass.__new__(subclass)
