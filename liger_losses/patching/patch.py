"""Patches a model: its modules and its head."""

from __future__ import annotations

from typing import Any

from torch import nn

from liger_losses.arguments import lists_arguments
from liger_losses.patching.loss_head import LossForward, patch_head, prepare_head, unpatch_head
from liger_losses.patching.mlps import GatedExperts, GatedMLP
from liger_losses.patching.norms import Norm
from liger_losses.patching.report import PatchReport
from liger_losses.patching.rotations import Rotations
from liger_losses.patching.swap import Filter, Replacement, Search, reason_not_to_restore, restore


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
    kinds: list[type[Replacement]] = [Norm] * norms + [GatedMLP, GatedExperts] * mlps + [Rotations] * rope
    before, search = [*map(type, model.modules())], Search(filter_fn, tile_mlps)
    for path, module in model.named_modules():
        for kind in kinds:
            if search.finds(kind, path, module):
                break
    heads = prepare_head(model, filter_fn) if loss_head else []
    search.swap()
    if heads and not any(entry.reason for entry in heads):
        patch_head(model, LossForward(keep_logits, eval_logits))
    return PatchReport(search.entries + heads, [*map(type, model.modules())] == before)


patch.arguments_elsewhere = {  # type: ignore[attr-defined]
    "kernels": "kernels= is an argument of liger_losses.trl.enable; patch uses kernels for norms=, mlps= and rope=."
}


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
