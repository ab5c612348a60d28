"""Each module's tests are where its name says, so that who changes a module finds them."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCE, TESTS = ROOT / "liger_losses", ROOT / "tests"
#: Modules with fewer lines need no file of their own.
SMALL = 60
#: Modules whose tests are in a file of another name, which imports them, their package, or a module that does.
ELSEWHERE = {
    "chunked/engine/autograd_functions.py": "chunked/engine/test_ops.py",
    "chunked/engine/call.py": "chunked/engine/test_workspace.py",
    "chunked/engine/divergence_block.py": "chunked/engine/test_divergence_tiles.py",
    "chunked/engine/query.py": "chunked/engine/test_head.py",
    "chunked/engine/agreement.py": "chunked/engine/test_ranks.py",
    "chunked/engine/traced.py": "chunked/engine/test_operators.py",
    "chunked/losses/policy_objectives.py": "chunked/losses/test_policy.py",
    "integrations/liger/chunked.py": "integrations/test_liger.py",
    "integrations/liger/probabilities.py": "integrations/test_liger.py",
    "integrations/liger/linear.py": "integrations/test_liger.py",
    "integrations/liger/logits.py": "integrations/test_liger.py",
    "integrations/liger/models.py": "integrations/test_liger.py",
    "integrations/liger/names.py": "integrations/test_liger.py",
    "integrations/logit_statistics.py": "integrations/test_liger.py",
    "integrations/on_logits.py": "integrations/test_liger.py",
    "integrations/token_statistics.py": "integrations/test_nemo_rl.py",
    "kernels/hopper_pipeline.py": "kernels/test_linear_exp_hopper.py",
    "kernels/activations.py": "kernels/test_glu.py",
    "kernels/logit_transform.py": "kernels/test_softmax_stats.py",
    "kernels/row_sums.py": "chunked/engine/test_support.py",
    "kernels/softmax_grad.py": "kernels/test_softmax_stats.py",
    "kernels/support_columns.py": "chunked/engine/test_support.py",
    "kernels/support_logps.py": "chunked/engine/test_support.py",
    "kernels/support_products.py": "chunked/engine/test_support.py",
    "kernels/tracing.py": "chunked/engine/test_operators_uses.py",
    "patching/lazy/reductions.py": "patching/lazy/test_tensor.py",
    "patching/lazy/shared_linear.py": "patching/lazy/test_tensor.py",
    "patching/lazy/views.py": "patching/lazy/test_tensor.py",
    "patching/lazy/weights.py": "patching/lazy/test_deferred.py",
    "patching/lazy_layers.py": "patching/test_lazy_head.py",
    "patching/probing.py": "patching/test_rotations.py",
    "patching/swap.py": "patching/test_patch.py",
    "patching/token_mlps.py": "patching/test_tiles.py",
    "trl/divergences.py": "trl/test_experimental.py",
    "trl/patch_points.py": "trl/test_enabling.py",
}


def modules():
    """Those that must have tests, as paths within the package."""
    for path in sorted(SOURCE.rglob("*.py")):
        if len(path.read_text().splitlines()) > SMALL and path.name != "__init__.py":
            yield str(path.relative_to(SOURCE))


def own_files(module):
    """``kernels/_tiles.py`` is tested in tests/kernels/test_tiles.py, and in test_tiles_*.py beside it."""
    path = TESTS / module
    name = f"test_{path.stem.lstrip('_')}"
    return [*path.parent.glob(f"{name}.py"), *path.parent.glob(f"{name}_*.py")]


def file_of(name):
    path = ROOT.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def imported(path):
    """The library's modules that a file imports, and those in which a package finds what the file takes from it."""
    return frozenset(imports(path))


def imports(path):
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join([*above, *([node.module] if node.module else [])])
            if name.startswith("tests."):
                yield from imported(file_of(name))  # what tests share
            if not name.startswith("liger_losses"):
                continue
            yield name
            if file_of(name).name != "__init__.py":
                continue
            for alias in node.names:
                if file_of(f"{name}.{alias.name}").exists():
                    yield f"{name}.{alias.name}"
                elif file_of(name) != path:
                    yield from (found for found in imported(file_of(name)) if defines(found, alias.name))


@functools.cache
def defines(module, name):
    return re.search(rf"^(def |class |)({re.escape(name)})\b", file_of(module).read_text(), re.MULTILINE) is not None


@pytest.mark.parametrize("module", modules())
def test_a_module_has_a_file_of_tests(module):
    if module not in ELSEWHERE:
        where = f"tests/{pathlib.Path(module).parent}/test_{pathlib.Path(module).stem.lstrip('_')}.py"
        assert own_files(module), f"write {where}, or name the file in ELSEWHERE here"
        return
    assert not own_files(module), "it has a file of its own: take it out of ELSEWHERE"
    file = TESTS / ELSEWHERE[module]
    assert file.exists(), f"there is no {file}"
    name = "liger_losses." + module.removesuffix(".py").replace("/", ".")
    direct = imported(file)
    package = name.rpartition(".")[0]
    through = {found for module in direct - {"liger_losses"} for found in imported(file_of(module))}
    assert {name, package} & direct or name in through, f"{file} imports neither {name}, nor a module that does"


def test_the_table_names_modules_that_there_are():
    assert set(ELSEWHERE) <= set(modules())


def test_files_for_gpus_are_marked():
    for path in TESTS.rglob("test_*_gpu.py"):
        assert re.search(r"^pytestmark = (\[\n +)?pytest\.mark\.gpu", path.read_text(), re.MULTILINE), path


def test_processes_end_by_leaving():
    """What tests start by ``start`` leaves; what they start themselves must, or torch may abort it as it ends."""
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        ends = {
            "mp.spawn(": "    leave()",
            "start_processes(": "    leave()",
            "torch.distributed.run": '"-m", "tests.processes"',
        }
        for start, end in ends.items():
            assert start not in text or end in text, f"processes of {path} must end by leave() of tests/processes.py"
