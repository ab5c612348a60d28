"""Every warning of the package names the user's line, whatever lies between."""

import gc
import threading
import warnings
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import liger_losses
from liger_losses import patch
from liger_losses.caller import warn
from tests.losses import GRPO

ROOT = Path(liger_losses.__file__).parent


def within(workspace):
    hidden, weight = (torch.randn(n, 16).bfloat16().requires_grad_() for n in (400, 203))
    loss = liger_losses.LigerFusedLinearCrossEntropyLoss(workspace=workspace)
    return partial(loss, weight, hidden, torch.zeros(400, dtype=torch.long))


def policy():
    hidden, weight, ids = torch.randn(2, 3, 8), torch.randn(11, 8), torch.zeros(2, 3).long()
    given = {"ref_per_token_logps": torch.zeros(2, 3), "ref_input": hidden, "ref_weight": weight}
    return partial(GRPO(), hidden, weight, ids, torch.ones(2, 3), torch.ones(2), **given)


def changed_norm():
    patch(norm := nn.LayerNorm(8))
    return partial(setattr, norm, "eps", 0.5)


#: Calls that are warned of, by kinds of places: the core, losses, layers that a model calls. All take one function, and
#: tests of each place have its words.
CALLS = {"a workspace": lambda: within(64_000), "a policy": policy, "a patched layer": changed_norm}


def through(module, call):
    """A call that goes through a function of another package. What is called has no line in this file."""
    names = {"__name__": module, "call": call}
    exec(compile("def between():\n    return call()", f"{module}.py", "exec"), names)
    return names["between"]


@pytest.mark.parametrize("between", ["trl.trainer.base_trainer", "torch.nn.modules.module"])
@pytest.mark.parametrize("name", CALLS)
def test_a_warning_names_the_users_line(name, between):
    call, names = through(between, CALLS[name]()), {"__name__": "users_own"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile("\n\ndef step(call):\n    call()", "users_own.py", "exec"), names)
        names["step"](call)
    assert [(warning.filename, warning.lineno) for warning in caught] == [("users_own.py", 4)], caught


def test_all_warnings_come_from_one_function():
    """Those of Python itself name a line of this package."""
    texts = {path.name: path.read_text() for path in ROOT.rglob("*.py")}
    direct = {name for name, text in texts.items() if "warnings.warn" in text or "from warnings import" in text}
    assert direct == {"caller.py"}


def test_a_warning_right_below_the_users_line():
    """Python's versions begin to walk the stack at different frames."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile("\nwarn('it is slow')", "users_own.py", "exec"), {"__name__": "users_own", "warn": warn})
    assert [(warning.filename, warning.lineno) for warning in caught] == [("users_own.py", 2)]


def test_a_warning_without_a_line_of_the_user():
    """In a thread that this package, or torch, has started, the outermost line is named."""
    names = {"__name__": "torch.autograd", "warn": warn}
    exec(compile("def backward():\n    warn('it is slow')", "torch_autograd.py", "exec"), names)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        thread = threading.Thread(target=names["backward"])
        thread.start()
        thread.join()
    assert [(str(w.message), w.filename) for w in found] == [("it is slow", threading.__file__)]


def test_a_warning_keeps_nothing_alive():
    """What the functions on the stack hold is released as they return, without a search for garbage."""

    def function():
        held = nn.Linear(1, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warn("it is slow")
        return weakref.ref(held)

    gc.disable()
    try:
        assert function()() is None
    finally:
        gc.enable()
