"""The package without the private names of torch that it uses: it is imported, patches a model, and trains it right.

``python -m tests.project.test_private_names 0`` prints whether ``patch`` replaced the model's head, the reasons of what
it left, and numbers, without the names of the first case of the import.
"""

import ast
import importlib
import itertools
import json
import pathlib
import re
import sys

import pytest
import torch
from torch import nn

from tests.models import small
from tests.processes import printed_by

#: Where modules keep their hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: The package reads these names while it is imported: most are absent together.
AT_IMPORT = [["torch._VF", "torch._assert_async", "torch._C._are_functorch_transforms_active"], ["torch._dynamo"]]
AT_IMPORT[0] += ["torch._C._functorch.is_legacy_batchedtensor", "torch.autograd.Variable._execution_engine"]
AT_IMPORT[0] += ["torch.nn.modules.module._has_any_global_hook", "torch.utils._python_dispatch._disable_current_modes"]
#: The package reads these in calls.
IN_CALLS = [["torch.Tensor._base"], ["torch.Tensor._version"], ["torch.autograd.forward_ad._current_level"]]
IN_CALLS += [["torch.nn.Module._compiled_call_impl"], [f"torch.nn.Module.{name}" for name in HOOKS]]


def absent(*_):
    raise AttributeError("a private name")


def take_away(path, patched):
    """Make a name absent, and replace what torch itself needs it for."""
    place, _, name = path.rpartition(".")
    if place == "torch.Tensor":
        patched.setattr(torch.Tensor, name, property(absent))
    elif place == "torch.nn.Module":
        get = nn.Module.__getattribute__
        patched.setattr(nn.Module, "__getattribute__", lambda self, key: absent() if key == name else get(self, key))
        patched.setattr(nn.Module, "__call__", lambda self, *args, **kwargs: self.forward(*args, **kwargs))
        for register in ("register_forward_hook", "register_forward_pre_hook"):
            patched.setattr(nn.Module, register, lambda self, hook, **kwargs: None)
    elif name == "_dynamo":
        for mark in ("disable", "assume_constant_result"):
            patched.setattr(torch.compiler, mark, lambda function=None, **_: function)
        patched.setitem(sys.modules, f"{place}.{name}", None)
    else:
        owner = torch.autograd.Variable if place.endswith("Variable") else importlib.import_module(place)
        patched.delattr(owner, name, raising=False)
        patched.setattr(torch.compiler, "is_exporting", lambda: False)


def run(names):
    """Patch a model and train it, and call functions, without names."""
    model = small(vocab_size=13, num_hidden_layers=2)
    torch.manual_seed(0)
    ids, hidden, weight = torch.randint(13, (3, 7)), torch.randn(3, 7, 16, requires_grad=True), torch.randn(13, 16)
    with pytest.MonkeyPatch.context() as patched:
        for name in names:
            take_away(name, patched)
        import liger_losses as liger
        from liger_losses.kernels import divergence_terms, reading

        report = liger.patch(model, tile_mlps=4)
        loss = model(ids, labels=ids).loss
        numbers = [loss, *torch.autograd.grad(loss, model.parameters())]
        coefficients = torch.tensor([1.0, 0.0, 2.0])
        outputs = liger.split_by_coefficient(lambda rows: hidden[rows], coefficients) * coefficients[:, None, None]
        logps = liger.linear_logps(hidden, weight, ids, temperature=torch.rand(3, 7) + 0.5)
        numbers += [logps, *torch.autograd.grad(outputs.sum() + logps.sum(), hidden)]
        which, teacher = liger.Divergence.forward_kl(), liger.Teacher(hidden.detach().flip(0), weight)
        numbers.append(liger.linear_divergence(hidden, weight, ids, teacher, which).divergence)
        assert divergence_terms.series_of(which).radius
        with pytest.raises(RuntimeError):
            reading.assert_on_device(torch.tensor(False))
    numbers = torch.cat([value.detach().flatten() for value in numbers]).tolist()
    return "lm_head" in [entry.path for entry in report.replaced], [entry.reason for entry in report.left], numbers


@pytest.mark.parametrize("case", range(len(AT_IMPORT) + len(IN_CALLS)))
def test_without_private_names(case):
    names, expected = (AT_IMPORT + IN_CALLS)[case], run([])
    if names in AT_IMPORT:
        replaced, reasons, numbers = json.loads(printed_by("-W", "ignore", "-m", __name__, case))
    else:
        replaced, reasons, numbers = run(names)
    assert replaced == (names != IN_CALLS[-1])
    assert not replaced or reasons == expected[1]
    assert replaced or all("hooks" in reason for reason in reasons)
    assert numbers == pytest.approx(expected[-1], rel=1e-4, abs=1e-5)


#: Of transformers and accelerate, which modules need not have; of named tuples; and the package's own.
OTHERS = {"_C", "_apply_gate", "_hf_hook", "_original_forward", "_fields", "_make", "_replace", "_asdict", "_input"}
OTHERS |= {"_attn_implementation", "_can_set_attn_implementation", "_is_stateful"}
OTHERS |= {"_buffers", "_global_backward_hooks", "_global_backward_pre_hooks"}  # without which torch does not run
OTHERS |= {"_backward", "_ce_weight"}  # the end of an operator's name, and a buffer of a loss
OTHERS |= {"_scaled_dot_product_cudnn_attention"}  # torch's operator, by which the doctor knows what attention keeps
LISTED = [*itertools.chain.from_iterable(AT_IMPORT + IN_CALLS)]


@pytest.mark.parametrize("name", HOOKS)
def test_a_layer_whose_hooks_cannot_be_told_is_called(name):
    from liger_losses.layers.plain import plain_linear

    layer = nn.Linear(2, 3)
    assert plain_linear(layer) == (layer.weight, layer.bias)
    delattr(layer, name)
    assert plain_linear(layer) is None


def test_the_list_has_the_names_that_the_package_uses():
    """Private names that are read, imported or written as words, and that it defines nowhere; all of the list are used.

    Places in packages that it integrates with are names too, and have tests of their own.
    """
    used, own = set(), set()
    folder = pathlib.Path(__file__).parents[2] / "liger_losses"
    paths = [path for path in folder.rglob("*.py") if path.parent.name not in ("trl", "integrations", "liger")]
    text = "".join(path.read_text() for path in paths)
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text()))):
        match node:
            case ast.Name(id=name, ctx=context) | ast.Attribute(attr=name, ctx=context):
                (own if isinstance(context, ast.Store) else used).add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(asname=str(name)):
                own.add(name)
            case ast.Constant(value=str(value)) if re.fullmatch(r"[a-zA-Z_.]*\b_[a-z]\w+", value):
                used |= {*value.split(".")}
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith(("liger_losses", "__future__")):
            used |= {alias.name for alias in node.names} | {*str(node.module).split(".")}
    listed = {part for name in LISTED for part in name.split(".")}
    private = {name for name in used - own if re.match("_[^_]", name) and not name.startswith("_liger")}
    assert private - OTHERS <= listed
    assert not [name for name in LISTED if name.rpartition(".")[2] not in text]


if __name__ == "__main__":
    import torch._dynamo
    import triton.language  # noqa: F401

    small(vocab_size=13, num_hidden_layers=2)  # transformers is imported before names are absent
    assert "liger_losses" not in sys.modules
    with pytest.MonkeyPatch.context() as patch:
        for name in AT_IMPORT[int(sys.argv[1])]:
            take_away(name, patch)
        from liger_losses import *  # noqa: F403
        from liger_losses.layers import glu_kernels  # noqa: F401
    print(json.dumps(run([])))
