"""Every warning of the package names the user's line, whatever lies between; ruff finds those of Python itself."""

import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import liger_losses
from liger_losses import patch
from liger_losses.caller import warn


def small_workspace():
    hidden, weight = (torch.randn(n, 16).bfloat16().requires_grad_() for n in (400, 203))
    loss = liger_losses.LigerFusedLinearCrossEntropyLoss(workspace=64_000)
    return partial(loss, weight, hidden, torch.zeros(400, dtype=torch.long))


def changed_norm():
    patch(norm := nn.LayerNorm(8))
    return partial(setattr, norm, "eps", 0.5)


def defined(module, code, **names):
    """What code of a module and a file defines. What it calls has no line in this file."""
    names |= {"__name__": module}
    exec(compile(code, f"{module}.py", "exec"), names)
    return names


#: Calls that are warned of, by kinds of places; Python's versions begin to walk the stack at different frames, where
#: the user's line is right above.
CALLS = {"a workspace": small_workspace, "a patched layer": changed_norm, "itself": lambda: partial(warn, "slow")}


@pytest.mark.parametrize("between", [None, "trl.trainer.base_trainer", "torch.nn.modules.module"])
@pytest.mark.parametrize("name", CALLS)
def test_a_warning_names_the_users_line(name, between, recwarn):
    call = CALLS[name]()
    if between:
        call = defined(between, "def call():\n    return inner()", inner=call)["call"]
    defined("users_own", "\n\ndef step(call):\n    call()\n")["step"](call)
    assert [(warning.filename, warning.lineno) for warning in recwarn] == [("users_own.py", 4)]


def test_a_warning_without_a_line_of_the_user(recwarn):
    """In a thread that this package, or torch, has started, the outermost line is named."""
    backward = defined("torch.autograd", "def backward():\n    warn('it is slow')", warn=warn)["backward"]
    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert [(str(warning.message), warning.filename) for warning in recwarn] == [("it is slow", threading.__file__)]


@pytest.mark.filterwarnings("ignore:it is slow")
def test_a_warning_keeps_nothing_alive():
    """What the functions on the stack hold is released as they return, without a search for garbage."""

    def function():
        held = nn.Linear(1, 1)
        warn("it is slow")
        return weakref.ref(held)

    gc.disable()
    try:
        assert function()() is None
    finally:
        gc.enable()
