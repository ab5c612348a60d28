"""The package itself: what importing it brings, and which way imports run."""

import ast
import inspect
import pathlib
import re

import pytest

import liger_losses
from tests.processes import printed_by

ROOT = pathlib.Path(liger_losses.__file__).parent
LAYERS = ["caller", "nested", "places", "kernels", "checks", "arguments", "sequences", "chunked.core"]
LAYERS += ["chunked.accelerators", "chunked", "chunked.losses", "layers", "modules", "prompts", "patching", "trl"]
HEAVY = ("transformers", "trl", "triton", "numpy", "matplotlib", "peft", "datasets", "liger_kernel")
#: Every module can be imported without the packages that it integrates with.
MODULES = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in ROOT.rglob("*.py")]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_importing_it_needs_torch_alone_and_imports_little_more():
    """Names are imported when they are read, and bring no heavy package then, nor do ``trl`` and ``modules``.

    ``torch.compiler.disable`` imports the compiler, for seconds: a loss does not. A fork of the process, which has
    imported torch, lacks all heavy packages.
    """
    modules = ", ".join(module.removesuffix(".__init__") for module in MODULES)
    code = f"""
import os, sys, torch
if not os.fork():
    sys.modules.update(dict.fromkeys({HEAVY}))
    import {modules}
    os._exit(0)
assert os.wait()[1] == 0, "a heavy package is needed"
"""
    code += """
before = set(sys.modules)
import liger_losses
print(len(set(sys.modules) - before))
from liger_losses import ChunkedLoss, LigerFusedLinearCrossEntropyLoss, LigerFusedLinearDPOLoss, Teacher, linear_logps
assert not {"torch._dynamo", "sympy"} & set(sys.modules), "imported"
loss = LigerFusedLinearCrossEntropyLoss()(torch.ones(3, 2), torch.ones(4, 2), torch.ones(4, dtype=torch.long))
assert "torch._dynamo" not in sys.modules, "a call imports it"

from liger_losses import *
assert linear_logps is liger_losses.linear_logps
assert "torch._dynamo" not in sys.modules, "loss_inputs or patch imports it"
lazy = {"trl", "modules"}
assert not {f"liger_losses.{name}" for name in lazy} & set(sys.modules)
assert lazy <= {*dir(liger_losses)}
liger_losses.trl.enable, liger_losses.modules.RMSNorm
assert not hasattr(liger_losses, "trainers")
import liger_losses.integrations.liger
print(sorted({m.split(".")[0] for m in set(sys.modules) - before}))
"""
    count, names = map(ast.literal_eval, printed_by("-c", code).splitlines())
    assert count < 5
    assert not set(names) & (set(HEAVY) - {"triton", "numpy"})


def test_type_checkers_see_the_names_that_are_imported_when_they_are_read():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    imported = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {*liger_losses.__all__} | {"modules", "trl"} == imported - {None}
    assert {*dir(liger_losses)} == {*liger_losses.__all__, *liger_losses._SUBMODULES, "__version__"}


@pytest.mark.parametrize("name", [name for name in liger_losses.__all__ if name.startswith("Liger")])
def test_options_that_type_checkers_take_by_position_are_those_that_a_loss_takes(name):
    """The first of them; they ask for keywords beyond these."""
    loss = getattr(liger_losses, name)
    first = inspect.signature(loss.options_type).parameters.values()
    names = [each.name for each in first if each.kind == each.POSITIONAL_OR_KEYWORD]
    names = names[:1] if name == "LigerFusedLinearGRPOLoss" else names
    assert names == [*loss.positions[: len(names)]]


def layer_of(parts):
    """The place in :data:`LAYERS` of a module, given as the names below the package; ``None`` on top of all layers."""
    name = ".".join(parts[: 2 if parts[0] == "chunked" else 1]).removesuffix(".__init__")
    return LAYERS.index(name) if name in LAYERS else None


def test_imports_run_one_way():
    allowed = {"transformers": ("prompts", "patching", "trl"), "trl": ("trl",)}
    for path in ROOT.rglob("*.py"):
        layer = layer_of(path.relative_to(ROOT).with_suffix("").parts)
        for package, *parts in (module.split(".") for module in (imports(path) if layer is not None else ())):
            if package == "liger_losses" and parts:
                assert layer_of(parts) in range(layer + 1), f"{path} imports {parts}"
            assert LAYERS[layer] in allowed.get(package, LAYERS), f"{path} imports {package}"


def test_public_names_exist_and_are_documented():
    for name in liger_losses.__all__:
        assert getattr(liger_losses, name).__doc__, name


def test_only_the_engine_sees_logits():
    # A loss says which transform and which divergence it wants.
    names = "logit_transform", "divergence_forms", "divergence_terms", "autograd", "tracing"
    for path in (*(ROOT / "chunked" / "losses").glob("*.py"), ROOT / "functional.py"):
        reached = {module for module in imports(path) if "kernels" in module}
        assert reached <= {f"liger_losses.kernels.{name}" for name in names}, path


def test_the_engine_is_imported_from_its_package_alone():
    """``liger_losses.chunked`` has all names that others use, so that the engine can change."""
    folders = [ROOT, *(ROOT.parent / name for name in ("kernels", "docs", "examples", "benchmarks"))]
    paths = [path for folder in folders for path in folder.rglob("*.*") if ROOT / "chunked" not in path.parents]
    paths = [path for path in paths if path.suffix in (".py", ".md", ".ipynb")]
    assert len(paths) > 100
    # What adds an accelerator, what measures them without one, and what says how the engine would plan reach inside.
    inside = {ROOT.parent / "docs" / "extending.md", ROOT.parent / "benchmarks" / "accelerators.py", ROOT / "doctor.py"}
    assert {path for path in paths if re.search(r"chunked(\.| import )core", path.read_text())} == inside


def test_no_tensor_takes_the_default_dtype():
    """Users may set it to bf16: what kernels write there would be rounded. (Options may pass on a dtype.)"""
    makers = {"empty", "zeros", "ones", "full", "rand", "randn", "linspace"}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in makers}:
                assert {"dtype", None} & {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"
