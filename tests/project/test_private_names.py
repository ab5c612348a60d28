"""The package without the private names of torch that it uses: it is imported, patches a model, and trains it right.

``python -m tests.project.test_private_names`` prints a line of JSON for each case, and one with all names: whether
``patch`` replaced the model's head (or the error), the reasons of what it left, and numbers. It imports the package
once names are absent.
"""

import ast
import importlib
import itertools
import json
import os
import pathlib
import re
import sys
import traceback

import pytest
import torch
from torch import nn

from tests.processes import printed_by

#: Where modules keep their hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Where names are, and the names. The package reads these while it is imported: most are absent together.
AT_IMPORT = [
    [
        ("torch", "_VF"),
        ("torch", "_assert_async"),
        ("torch._C", "_are_functorch_transforms_active"),
        ("torch._C._functorch", "is_legacy_batchedtensor"),
        ("torch.autograd.Variable", "_execution_engine"),
        ("torch.nn.modules.module", "_has_any_global_hook"),
        ("torch.utils._python_dispatch", "_disable_current_modes"),
    ],
    [("torch", "_dynamo")],
]
#: The package reads these in calls; in the last case, none is absent.
IN_CALLS = [
    [("torch.Tensor", "_base")],
    [("torch.Tensor", "_version")],
    [("torch.autograd.forward_ad", "_current_level")],
    [("torch.nn.Module", "_compiled_call_impl")],
    [("torch.nn.Module", name) for name in HOOKS],
    [],
]


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.mlp, self.head = nn.Embedding(13, 8), nn.LayerNorm(8), MLP(), nn.Linear(8, 13)

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids, labels):
        x = self.embed(ids)
        logits = self.head(x + self.mlp(self.norm(x)))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss + logits.log_softmax(-1).gather(-1, labels[..., None]).mean()


def absent(*_):
    raise AttributeError("a private name")


def take_away(place, name, patched):
    """Make a name absent, and replace what torch itself needs it for."""
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


def load():
    """Import the package, and what it imports when it is used."""
    import liger_losses
    from liger_losses.layers import glu_kernels  # noqa: F401

    return liger_losses, liger_losses.patch, liger_losses.linear_divergence, liger_losses.split_by_coefficient


def run(names):
    """Patch a model and train it, and call functions: whether the head was replaced, what was left, and all numbers."""
    import liger_losses as liger
    from liger_losses import checks
    from liger_losses.kernels import divergence_terms, reading

    torch.manual_seed(0)
    model, ids = Model(), torch.randint(13, (3, 7))
    report = liger.patch(model, tile_mlps=4)
    loss = model(ids, labels=ids)
    found = [loss, *torch.autograd.grad(loss, model.parameters())]
    hidden, weight = torch.randn(3, 7, 8, requires_grad=True), model.head.weight.detach()
    coefficients = torch.tensor([1.0, 0.0, 2.0])
    outputs = liger.split_by_coefficient(lambda rows: hidden[rows], coefficients) * coefficients[:, None, None]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checks, "host_checks", lambda device: "_assert_async" not in names)
        logps = liger.linear_logps(hidden, weight, ids, temperature=torch.rand(3, 7) + 0.5)
    found += [logps, *torch.autograd.grad(outputs.sum() + logps.sum(), hidden)]
    which, teacher = liger.Divergence.forward_kl(), liger.Teacher(hidden.detach().flip(0), weight)
    found.append(liger.linear_divergence(hidden, weight, ids, teacher, which).divergence)
    assert divergence_terms.series_of(which).radius
    with pytest.raises(RuntimeError):
        reading.assert_on_device(torch.tensor(False))
    numbers = torch.cat([value.detach().flatten() for value in found]).tolist()
    return "head" in [entry.path for entry in report.replaced], [entry.reason for entry in report.left], numbers


def result_of(names, at_import):
    try:
        with pytest.MonkeyPatch.context() as patched:
            for place, name in names:
                take_away(place, name, patched)
            load()
            found = None if at_import else run([name for _, name in names])
        return json.dumps(found or run([name for _, name in names]))
    except BaseException as error:
        traceback.print_exc()
        return json.dumps([f"{type(error).__name__}: {error}", [], []])


def main():
    """A process for each case of the import, which starts with what others import too."""
    import torch._dynamo
    import torch.fx.experimental.symbolic_shapes  # noqa: F401
    import triton.language  # noqa: F401

    for names in AT_IMPORT:
        reader, writer = os.pipe()
        if not os.fork():
            os.write(writer, result_of(names, at_import=True).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as found:
            print(found.read(), flush=True)
        os.wait()
    for names in IN_CALLS:
        print(result_of(names, at_import=False), flush=True)


#: Of transformers and accelerate, which modules need not have; of named tuples; and the package's own.
OTHERS = {"_C", "_apply_gate", "_hf_hook", "_original_forward", "_fields", "_make", "_replace", "_asdict", "_input"}
OTHERS |= {"_attn_implementation", "_can_set_attn_implementation", "_is_stateful"}
OTHERS |= {"_buffers", "_global_backward_hooks", "_global_backward_pre_hooks"}  # without which torch does not run
OTHERS |= {"_backward", "_ce_weight"}  # the end of an operator's name, and a buffer of a loss
OTHERS |= {"_scaled_dot_product_cudnn_attention"}  # torch's operator, by which the doctor knows what attention keeps
LISTED = [*itertools.chain.from_iterable(AT_IMPORT + IN_CALLS)]


def test_without_private_names():
    """In one process, as starting it takes longer than a name does."""
    printed = printed_by("-W", "ignore", "-m", "tests.project.test_private_names")
    results = [json.loads(line) for line in printed.splitlines()]
    for names, (replaced, reasons, numbers) in zip(AT_IMPORT + IN_CALLS, results, strict=True):
        has_hooks = names != IN_CALLS[-2]
        assert replaced == has_hooks, f"{names}: {replaced}"
        assert ["hooks" in reason for reason in reasons] == [True] * (0 if has_hooks else 3), names
        assert numbers == pytest.approx(results[-1][2], rel=1e-4, abs=1e-5), names


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
    from liger_losses.layers.plain import HOOKS as KINDS

    used, own, text = set(), set(), ""
    folder = pathlib.Path(__file__).parents[2] / "liger_losses"
    for path in folder.rglob("*.py"):
        if path.relative_to(folder).parts[0] in ("trl", "integrations"):
            continue
        text += path.read_text()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                (own if isinstance(node.ctx, ast.Store) else used).add(name)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
                own |= {alias.asname for alias in node.names if alias.asname}
                if not str(node.module).startswith("liger_losses"):
                    used |= {alias.name for alias in node.names} | {*str(node.module).split(".")}
            elif isinstance(node, ast.Constant) and re.fullmatch(r"[a-zA-Z_.]*\b_[a-z]\w+", str(node.value)):
                used |= {*str(node.value).split(".")}
    listed = {part for place, name in LISTED for part in f"{place}.{name}".split(".")}
    private = {name for name in used - own if re.match("_[^_]", name) and not name.startswith("_liger")}
    assert HOOKS == KINDS
    assert private - OTHERS <= listed
    assert not [name for _, name in LISTED if name not in text]


if __name__ == "__main__":
    main()
