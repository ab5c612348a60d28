"""Every warning of the package names the user's line, whatever lies between."""

import ast
import gc
import importlib
import sys
import threading
import types
import warnings
import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import liger_losses
from liger_losses import Divergence, EngineOptions, Teacher, linear_divergence, patch
from liger_losses.caller import warn
from liger_losses.integrations import axolotl, liger
from liger_losses.integrations.replacements import Replacements, announce
from liger_losses.kernels._triton import warn_once
from liger_losses.patching import lazy_head, lazy_layers, loss_inputs
from liger_losses.patching.lazy import lazy_linear
from liger_losses.places import Place
from liger_losses.prompts import attention
from tests.losses import GRPO

ROOT = Path(liger_losses.__file__).parent


def divergence(columns, **options):
    student, teacher = torch.randn(256, 48).bfloat16().requires_grad_(), torch.randn(columns, 48).bfloat16()
    hidden, labels = torch.randn(400, 48).bfloat16().requires_grad_(), torch.zeros(400).long()
    given = hidden, student, labels, Teacher(hidden.detach(), teacher), Divergence.reverse_kl()
    return partial(linear_divergence, *given, options=EngineOptions(**options))


def policy(monkeypatch):
    hidden, weight, ids = torch.randn(2, 3, 8), torch.randn(11, 8), torch.zeros(2, 3).long()
    given = {"ref_per_token_logps": torch.zeros(2, 3), "ref_input": hidden, "ref_weight": weight}
    return partial(GRPO(), hidden, weight, ids, torch.ones(2, 3), torch.ones(2), **given)


def fails(*arguments, **options):
    raise RuntimeError("not today")


def plugin_of_axolotl(monkeypatch):
    pytest.importorskip("trl", reason="trl is not installed")
    monkeypatch.setitem(sys.modules, "axolotl", types.ModuleType("axolotl"))
    monkeypatch.setitem(sys.modules, "axolotl.integrations", types.ModuleType("axolotl.integrations"))
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", types.SimpleNamespace(BasePlugin=object))
    monkeypatch.setattr(liger_losses.trl, "enable", fails)
    plugin = axolotl._plugin_class.__wrapped__()()
    return partial(plugin.pre_model_load, types.SimpleNamespace(rl="dpo"))


def install_of_liger(monkeypatch):
    monkeypatch.setattr(liger, "is_installed", lambda: False)
    monkeypatch.setattr(liger, "find_spec", lambda name: name)
    monkeypatch.setattr(liger, "announce", lambda *arguments: None)
    monkeypatch.setattr(liger, "_modules", list)
    monkeypatch.setitem(sys.modules, next(iter(liger.REPLACEMENTS)), types.ModuleType("early"))
    return liger.install


def a_framework_without_a_place(monkeypatch):
    monkeypatch.setitem(sys.modules, "fw", types.ModuleType("fw"))
    found = Replacements("Pytest", pytest.__version__, "everything", Place("fw", "head", lambda original: original))
    return found.install


def constant_that_requires_a_gradient(monkeypatch):
    weights = torch.ones(4, requires_grad=True)
    loss, labels = liger_losses.LigerFusedLinearCrossEntropyLoss(), torch.zeros(4, dtype=torch.long)
    return partial(loss, torch.ones(8, 2), torch.ones(4, 2), labels, token_weights=weights)


def changed_head(monkeypatch):
    left = [types.SimpleNamespace(path="lm_head", reason="changed")]
    monkeypatch.setattr(lazy_head, "make_head_lazy", lambda model: left)
    return partial(lazy_head._make_lazy_again, nn.Linear(2, 2))


def head_that_became_a_dtensor(monkeypatch):
    weight = types.SimpleNamespace(full_tensor=None)
    layer = types.SimpleNamespace(ranks=None, weight=weight, own_forward=lambda hidden_states: hidden_states)
    return partial(lazy_layers._lazy_forward, layer, torch.ones(2))


def of_trl(name, trigger):
    """A row about a module of ``liger_losses.trl``, which is imported where TRL is installed."""

    def prepare(monkeypatch):
        pytest.importorskip("trl", reason="trl is not installed")
        return trigger(importlib.import_module(f"liger_losses.trl.{name}"), monkeypatch)

    return prepare


def lacking_feature(enabling, monkeypatch):
    missing = enabling.Missing("trl.nowhere is not there")
    monkeypatch.setattr(enabling, "find", lambda features: {"a feature": missing})
    return partial(enabling._add, [types.SimpleNamespace(name="a feature")])


def trainer_that_was_built_early(enabling, monkeypatch):
    place = types.SimpleNamespace(module=__name__, name="add_fused_lm_head")
    feature = types.SimpleNamespace(places=[place])
    monkeypatch.setattr(enabling, "_enabled", [feature])
    monkeypatch.setattr(enabling, "FEATURES", [feature])
    trainer = type("Trainer", (), {"model": nn.Linear(2, 2)})()
    return partial(enabling._warns_if_built_early, lambda self: None, trainer)


def teacher_that_is_not_lazy(experimental, monkeypatch):
    left = [types.SimpleNamespace(path="lm_head", reason="it is quantized")]
    monkeypatch.setattr(experimental, "make_head_lazy", lambda model: left)
    trainer = types.SimpleNamespace(teacher_model=nn.Linear(2, 2))
    return partial(experimental.with_lazy_heads, lambda self: None, trainer)


def mask_of_tokens(monkeypatch):
    rows = types.SimpleNamespace(rows=torch.empty(4, 2, device="meta"))
    monkeypatch.setattr(attention, "_now", lambda: types.SimpleNamespace(packed=None))
    monkeypatch.setattr(attention, "RowMask", lambda *arguments: rows)
    options = {"mask_function": None, "q_length": 2, "kv_length": 2, "config": types.SimpleNamespace(head_dim=64)}
    return partial(attention._mask, "sdpa", lambda **options: None, **options)


def model_that_cannot_share(packed_batches, monkeypatch):
    model = types.SimpleNamespace(_liger_losses_head=types.SimpleNamespace(share_prompts=True))
    return partial(packed_batches._say, model, "prompts are repeated")


def kernels_twice(enabling, monkeypatch):
    config = types.SimpleNamespace(use_liger_kernel=True)
    return partial(enabling._with_kernels, lambda *arguments: None, config)


def changed_norm(monkeypatch):
    patch(norm := nn.LayerNorm(8))
    return partial(setattr, norm, "eps", 0.5)


def split_that_is_left_out(zero_advantages, monkeypatch):
    return partial(zero_advantages._qualifies, types.SimpleNamespace(beta=0.1), nn.Linear(2, 2), ("beta",))


#: By the file that warns: from pytest's monkeypatch to a call that is warned of.
CALLS = [
    ("chunked/engine/decision.py", lambda monkeypatch: divergence(256, workspace=60_000)),
    ("chunked/engine/operators.py", constant_that_requires_a_gradient),
    ("chunked/engine/teachers.py", lambda monkeypatch: divergence(250)),
    ("chunked/losses/policy.py", policy),
    ("integrations/axolotl.py", plugin_of_axolotl),
    ("integrations/liger/__init__.py", install_of_liger),
    ("integrations/replacements.py", lambda monkeypatch: partial(announce.__wrapped__, "pytest", "0.1", "everything")),
    ("integrations/replacements.py", a_framework_without_a_place),
    ("kernels/_triton.py", lambda monkeypatch: partial(warn_once.__wrapped__, "a slower kernel")),
    ("patching/lazy/warning.py", lambda monkeypatch: lazy_linear(torch.ones(1, 2), torch.ones(3, 2)).sigmoid),
    ("patching/lazy_head.py", changed_head),
    ("patching/lazy_layers.py", head_that_became_a_dtensor),
    ("patching/loss_inputs.py", lambda monkeypatch: partial(loss_inputs._check_names, nn.Identity(), {"inputs": None})),
    ("trl/enabling.py", of_trl("enabling", lacking_feature)),
    ("trl/enabling.py", of_trl("enabling", kernels_twice)),
    ("trl/enabling.py", of_trl("enabling", trainer_that_was_built_early)),
    ("trl/experimental.py", of_trl("experimental", teacher_that_is_not_lazy)),
    ("patching/swap.py", changed_norm),
    ("prompts/attention.py", mask_of_tokens),
    ("trl/packed_batches.py", of_trl("packed_batches", model_that_cannot_share)),
    ("trl/zero_advantages.py", of_trl("zero_advantages", split_that_is_left_out)),
]


def through(module, call):
    """A call that goes through a function of another package. What is called has no line in this file."""
    names = {"__name__": module, "call": call}
    exec(compile("def between():\n    return call()", f"{module}.py", "exec"), names)
    return names["between"]


@pytest.mark.parametrize("between", ["trl.trainer.base_trainer", "torch.nn.modules.module"])
@pytest.mark.parametrize(("file", "prepare"), CALLS, ids=[f"{i} {file}" for i, (file, _) in enumerate(CALLS)])
def test_a_warning_names_the_users_line(file, prepare, between, monkeypatch):
    monkeypatch.setattr("liger_losses.chunked.engine.decision._decisions", {})
    monkeypatch.setattr("liger_losses.patching.lazy.warning._WARNED", set())
    call, names = through(between, prepare(monkeypatch)), {"__name__": "users_own"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile("\n\ndef step(call):\n    call()", "users_own.py", "exec"), names)
        names["step"](call)
    assert [(warning.filename, warning.lineno) for warning in caught] == [("users_own.py", 4)], caught


def test_all_warnings_are_in_the_table():
    """They come from one function, as those of Python itself name a line of this package."""
    found, direct = Counter(), set()
    for path in ROOT.rglob("*.py"):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "warn":
                found[name] += 1
            elif isinstance(node, ast.Attribute) and node.attr in ("warn", "warn_explicit"):
                direct.add(name)
    assert direct == {"caller.py"}
    assert found == Counter(file for file, _ in CALLS)


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
