"""Patches a model: its modules and its head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from liger_losses.arguments import lists_arguments
from liger_losses.patching.loss_head import LossForward, patch_head, prepare_head, unpatch_head
from liger_losses.patching.mlps import GatedExperts, GatedMLP
from liger_losses.patching.norms import Norm
from liger_losses.patching.probing import reason_of
from liger_losses.patching.report import LEFT_OUT, Entry, PatchReport
from liger_losses.patching.rotations import Rotations, calling_methods
from liger_losses.patching.swap import (
    Replacement,
    original_class,
    reason_not_to_restore,
    replacement_of,
    restore,
    swapped_class,
)

#: From a module and its name in the model to whether it may be replaced.
Filter = Callable[[nn.Module, str], bool]


@lists_arguments
def patch(
    model: nn.Module,
    *,
    loss_head: bool = True,
    norms: bool = True,
    mlps: bool = True,
    rope: bool = True,
    keep_logits: bool = False,
    eval_logits: bool = True,
    tile_mlps: bool | int = False,
    filter_fn: Filter | None = None,
) -> PatchReport:
    """Replace modules of a model that kernels can compute, in place; results change only by rounding.

    :func:`patch` runs small copies of the modules, and replaces a module only if outputs and gradients agree with a
    kernel. Parameters, their names and the state dict do not change. If you assign a replaced module another eps or
    activation, it warns, and its own forward computes from then on. A second call only replaces new modules, and
    reports all of them. No weight is read, so models on the meta device can be patched. If the head is later resized or
    gets adapters, the model's next forward prepares it again; if it cannot, that forward warns. If :func:`patch`
    raises, the model is as before.

    Replacements belong to the model. Copies and unpickled models have them too; other models of the process, even of
    the same classes, have none. While a method that rotates queries and keys runs, the kernel is in the place of the
    function in its file.

    Args:
        model: any model of transformers, with or without adapters, or any other module.
        loss_head: compute the loss inside the model's forward without logits, where it is given labels and gradients
            are enabled; ``outputs.logits`` is then ``None``. Without labels, logits are as before.
        norms: replace normalizations over the last dimension.
        mlps: replace the computation of gated MLPs and experts between their linear layers; the layers stay.
        rope: replace rotary position embedding.
        keep_logits: compute ``outputs.logits`` there, too, once the loss is known.
        eval_logits: compute logits of calls with labels and without gradients. If False, these calls take no more
            memory than training, and their ``outputs.logits`` is ``None``, unless nothing else was computed.
        tile_mlps: compute MLPs for this number of tokens at a time, for long sequences. True chooses the number from
            the input's size. Tensors of the intermediate size then exist only for one tile.

            Backward computes each tile again up to its product. With gradient checkpointing, which recomputes anyway,
            this is no extra work. Outputs and gradients do not change; the gradients of weights are summed over the
            tiles in fp32. A second :func:`patch` with another number changes it.

            This applies to the gated MLPs that are replaced. Hooks on their layers are called for each tile. Under
            torch.compile, the graph breaks at such an MLP. With ZeRO-3, FSDP1, or a layer of the MLP as a separate
            FSDP2 unit, the MLP is computed as a whole, with a warning.
        filter_fn: a function of a module and its name in the model. If it returns False, the module is left.

    Returns:
        A report of the modules that were replaced, and of those that were left, with the reason.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``tile_mlps`` is neither a bool nor positive, or MLPs are not replaced.
    """
    _check_model(model)
    if tile_mlps is not False and not (mlps and isinstance(tile_mlps, int) and tile_mlps > 0):
        raise ValueError(
            f"tile_mlps must be True, False or a positive number of tokens, and needs mlps=True, got {tile_mlps!r}."
        )
    tile = None if tile_mlps is False else 0 if tile_mlps is True else tile_mlps
    kinds: list[type[Replacement]] = [Norm] * norms + [GatedMLP, GatedExperts] * mlps + [Rotations] * rope
    before, entries, classes = _replaced_in(model), [], []
    matches: dict[Any, tuple[Replacement | str, nn.Module]] = {}
    calling_methods.cache_clear()
    try:
        for path, module in model.named_modules():
            for kind in kinds:
                entry, replacement = _find(kind, path, module, filter_fn, matches, tile)
                entries += [] if entry is None else [entry]
                if replacement is not None:
                    classes.append((module, swapped_class(module, replacement)))
                    break
    finally:
        calling_methods.cache_clear()  # it holds classes
    heads = prepare_head(model, filter_fn) if loss_head else []
    # From here on nothing raises, so that a model is patched as a whole or not at all.
    for module, swapped in classes:
        module.__class__ = swapped
    if heads and not any(entry.reason for entry in heads):
        patch_head(model, LossForward(keep_logits, eval_logits))
    return PatchReport(entries + heads, _replaced_in(model) == before)


patch.arguments_elsewhere = {  # type: ignore[attr-defined]
    "kernels": "kernels= is an argument of liger_losses.trl.enable; patch uses kernels for norms=, mlps= and rope=."
}


def _replaced_in(model: nn.Module) -> list[Any]:
    """What is replaced in a model, to be compared."""
    return [(path, replacement_of(module)) for path, module in model.named_modules()]


def unpatch(model: nn.Module) -> None:
    """Undo :func:`patch`. The results of the model are then bitwise the same as before.

    Args:
        model: a model; one that was not patched stays as it is.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: something else has changed a patched module since (for example by sharding or parametrizing it).
            Nothing is undone then.
    """
    _check_model(model)
    for path, module in model.named_modules():
        reason = reason_not_to_restore(module)
        if reason is not None:
            raise RuntimeError(f"{path or type(module).__name__} cannot be unpatched: {reason}; undo that first.")
    unpatch_head(model)
    for module in model.modules():
        restore(module)


class _AutoLigerModel(type):
    """Gives the class all other attributes of transformers' ``AutoModelForCausalLM``."""

    def __getattr__(cls, name: str) -> Any:
        from transformers import AutoModelForCausalLM

        return getattr(AutoModelForCausalLM, name)


class AutoLigerModelForCausalLM(metaclass=_AutoLigerModel):
    """transformers' ``AutoModelForCausalLM``, patched on load. The report is the model's ``liger_report``."""

    def __init__(self) -> None:
        raise TypeError("AutoLigerModelForCausalLM has no instances; use its from_pretrained(...) or from_config(...).")

    @classmethod
    def from_pretrained(cls, *args: Any, patch_options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Load a model and patch it.

        Args:
            args, kwargs: arguments of ``AutoModelForCausalLM.from_pretrained``.
            patch_options: keyword arguments of :func:`patch`.

        Returns:
            The model; its ``liger_report`` says what was replaced.
        """
        return cls._load("from_pretrained", *args, patch_options=patch_options, **kwargs)

    @classmethod
    def from_config(cls, *args: Any, patch_options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Make a model with random weights and patch it; arguments and result are as in :meth:`from_pretrained`."""
        return cls._load("from_config", *args, patch_options=patch_options, **kwargs)

    @classmethod
    def _load(cls, method: str, *args: Any, patch_options: dict[str, Any] | None, **kwargs: Any) -> Any:
        model = cls.__getattr__(method)(*args, **kwargs)
        model.liger_report = patch(model, **(patch_options or {}))
        return model


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, such as AutoModelForCausalLM.from_pretrained returns, got "
            f"{type(model).__name__}. To load and patch by name, use AutoLigerModelForCausalLM.from_pretrained."
        )


def _find(
    kind: type[Replacement],
    path: str,
    module: nn.Module,
    filter_fn: Filter | None,
    matches: dict[Any, Any],
    tile: int | None,
) -> tuple[Entry | None, Replacement | None]:
    """A module's line of the report, if it is listed, and what of a kind replaces it from now on.

    ``matches`` holds what was found for other modules, a replacement or a reason, by their keys; and those modules, as
    keys contain addresses of objects that they hold.
    """
    name, replacement = original_class(module).__name__, replacement_of(module)
    if replacement is not None:
        if not isinstance(replacement, kind):
            return None, None
        tiled = _in_tiles(replacement, tile)
        may_change = tiled != replacement and "_liger_original" in vars(type(module))  # its class is ours
        if may_change and reason_not_to_restore(module) is None and (filter_fn is None or filter_fn(module, path)):
            return Entry(path, name, str(tiled)), tiled
        return Entry(path, name, str(replacement)), None
    try:
        if not kind.is_candidate(module):
            return None, None
        reason, key, listed = kind.reason_to_leave(module), (kind, kind.key(module)), kind.is_worth_listing(module)
    except Exception as error:
        return Entry(path, name, None, reason_of(error)), None
    if reason is None and filter_fn is not None and not filter_fn(module, path):
        reason = LEFT_OUT
    if reason is None:
        if key not in matches:
            try:
                matches[key] = kind.match(module), module
            except Exception as error:
                matches[key] = reason_of(error), module
        match, _ = matches[key]
        if not isinstance(match, str):
            replacement = _in_tiles(match, tile)
            return Entry(path, name, str(replacement)), replacement
        reason = match
    return Entry(path, name, None, reason) if listed else None, None


def _in_tiles(replacement: Any, tile: int | None) -> Any:
    return replacement if tile is None or not isinstance(replacement, GatedMLP) else replace(replacement, tile=tile)
