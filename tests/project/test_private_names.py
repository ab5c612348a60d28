"""The package with each private name of torch made absent: it is imported, patches a model, and trains it right."""

import json
import pathlib
import subprocess
import sys

import pytest
from torch import nn

import liger_losses
from liger_losses.kernels.plain import _HOOKS, is_plain_linear

#: Where the name is, the name, and whether torch itself needs it, so that it is absent during the import alone.
NAMES = [
    ("torch._C", "_are_functorch_transforms_active", True),
    ("torch.fx.experimental.symbolic_shapes", "has_static_value", True),
    ("torch.nn.modules.module", "_has_any_global_hook", False),
    ("torch.Tensor", "_version", False),
    ("torch.Tensor", "_make_wrapper_subclass", False),
]

#: Runs a case for each name, in a process of its own that starts with torch imported.
SCRIPT = """
import importlib, json, os, sys, torch, torch.fx.experimental.symbolic_shapes
from torch import nn

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
    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.mlp(self.norm(x)))

def absent(*_):
    raise AttributeError("a private name")

def run(place, name, needed):
    owner = torch.Tensor if place == "torch.Tensor" else importlib.import_module(place)
    had = getattr(owner, name, None)
    if place == "torch.Tensor":
        setattr(torch.Tensor, name, property(absent) if name == "_version" else None)  # a C type has them
    elif had is not None:
        delattr(owner, name)
    from liger_losses import patch
    if needed and had is not None:
        setattr(owner, name, had)
    torch.manual_seed(0)
    model, ids = Model(), torch.randint(13, (3, 7))
    results = []
    for patched in (False, True):
        if patched:
            report = patch(model, tile_mlps=4)
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss = loss + logits.log_softmax(-1).gather(-1, ids[..., None]).mean()
        results.append([loss, *torch.autograd.grad(loss, model.parameters())])
    torch.testing.assert_close(*results)
    return type(logits).__name__, [entry.reason for entry in report.left]

for case in json.loads(sys.argv[1]):
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        print(os.fdopen(reader).read(), flush=True)
        os.wait()
    else:
        try:
            found = run(*case)
        except BaseException as error:
            found = f"{type(error).__name__}: {error}", []
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
"""


def test_without_private_names():
    """In one process, as starting it takes longer than a name does."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(NAMES)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    for (_, name, _), line in zip(NAMES, lines, strict=True):
        kind, reasons = json.loads(line)
        lazy = name != "_make_wrapper_subclass"
        assert kind == ("LazyLogits" if lazy else "Tensor"), name
        assert [name in reason for reason in reasons] == [True] * (not lazy), name


@pytest.mark.parametrize("name", _HOOKS)
def test_a_layer_whose_hooks_cannot_be_told_is_called(name):
    layer = nn.Linear(2, 3)
    assert is_plain_linear(layer)
    delattr(layer, name)
    assert not is_plain_linear(layer)


def test_the_list_has_names_that_the_package_uses():
    text = "".join(path.read_text() for path in pathlib.Path(liger_losses.__file__).parent.rglob("*.py"))
    assert not [name for _, name, _ in NAMES if name not in text]
