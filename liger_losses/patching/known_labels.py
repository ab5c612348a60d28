"""A patched model asks how many of its labels carry loss when its forward begins, so that its loss waits for nobody.

transformers' losses shift the labels themselves. They take labels that are shifted as well, and so get those that were
asked about.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine.tokens import shift_labels
from liger_losses.kernels.reading import ask_about_labels, version_of

_IGNORE_INDEX = -100


class LossOfKnownLabels:
    """A model's loss function, which is given shifted labels where the model's hook has asked about them.

    Attributes:
        function: the model's own.
        kind: the model's ``loss_type``, which names the function.
        added: the names of the model's attributes that are there because of this one.
        shifted: the labels of the forward that is running, their version, and these labels shifted.
    """

    def __init__(self, function: Callable[..., Any], kind: Any) -> None:
        self.function, self.kind, self.added = function, kind, frozenset[str]()
        self.shifted: tuple[Tensor, int, Tensor] | None = None

    def __call__(self, logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
        known = None if torch.compiler.is_dynamo_compiling() else self.shifted
        if known is not None:
            (given, version, shifted), self.shifted = known, None
            usual = kwargs.get("ignore_index", _IGNORE_INDEX) == _IGNORE_INDEX
            same = given is labels and version_of(labels) == version >= 0  # they may have been changed in place
            if same and usual and kwargs.get("shift_labels") is None:
                kwargs["shift_labels"] = shifted
        return self.function(logits, labels, *args, **kwargs)


def know_labels(model: Any) -> None:
    """Let a model of transformers, whose loss takes shifted labels, ask about them when its forward begins."""
    function = getattr(model, "loss_function", None)
    if not inspect.isfunction(function) or not str(function.__globals__.get("__name__")).startswith("transformers."):
        return  # a user's function may do more than shift the labels
    if not {"labels", "shift_labels"} <= set(inspect.signature(function).parameters):
        return
    wrapper = LossOfKnownLabels(function, getattr(model, "loss_type", None))
    try:
        wrapper.added = set_loss(model, wrapper)
    except AttributeError:  # a property that cannot be set
        return
    model.register_forward_pre_hook(ask_for_loss, with_kwargs=True)


def ask_for_loss(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """The hook of :func:`know_labels`."""
    labels, loss = kwargs.get("labels"), getattr(model, "loss_function", None)
    if torch.compiler.is_dynamo_compiling() or not isinstance(loss, LossOfKnownLabels):
        return
    loss.shifted = None
    if getattr(model, "loss_type", None) != loss.kind:  # another function, which was chosen since
        forget_labels(model)
    elif type(labels) is Tensor and labels.dtype == torch.int64 and labels.dim() == 2:
        shifted = shift_labels(labels, _IGNORE_INDEX)
        ask_about_labels(shifted, _IGNORE_INDEX)
        loss.shifted = labels, version_of(labels), shifted


def forget_labels(model: Any) -> None:
    """Undo :func:`know_labels`."""
    loss = getattr(model, "loss_function", None)
    if isinstance(loss, LossOfKnownLabels):
        set_loss(model, loss.function, loss.added)


def set_loss(model: Any, function: Callable[..., Any], added: frozenset[str] = frozenset()) -> frozenset[str]:
    """Give a model a loss function; or give it back its own, without the attributes that the other one ``added``.

    Returns the names of the attributes that are there because of this function.
    """
    before = set(vars(model))
    model.loss_function = function
    for name in added:
        vars(model).pop(name, None)
    return frozenset(set(vars(model)) - before)
