"""Breaks the package on purpose, one place after another, and says which breaks the tests of results catch.

``python -m tests.mutants`` makes all of them, ``python -m tests.mutants stream 41`` those whose place or number is
named. A place is a function, a method or a table of a module, and an operation in it: its text and its lines may
change. Each mutant is made in a temporary copy of the package; the checkout stays as it is.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: The longest that the tests of one mutant may take, in seconds: some make a program wait for ever.
LIMIT = 400

#: The new node of one that changes, ``None`` of another.
Change = Callable[[ast.AST], "ast.AST | None"]
OPERATORS: dict[str, type[ast.AST]] = {
    "+": ast.Add,
    "-": ast.Sub,
    "*": ast.Mult,
    "/": ast.Div,
    "<": ast.Lt,
    "<=": ast.LtE,
    ">": ast.Gt,
    "==": ast.Eq,
    "!=": ast.NotEq,
    "is": ast.Is,
    "is not": ast.IsNot,
}
#: What functions are called of that are no methods of what they are given.
MODULES = ("torch", "dist", "F", "math", "tl")


def swap(old: str, new: str) -> Change:
    """Another operator, also of ``+=``; ``-`` of one operand is none."""

    def change(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, OPERATORS[old]):
            return type(node)(**{**_fields(node), "op": OPERATORS[new]()})
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], OPERATORS[old]):
            return ast.Compare(node.left, [OPERATORS[new]()], node.comparators)
        return None

    return change


def positive(node: ast.AST) -> ast.AST | None:
    """``x`` for ``-x``."""
    return node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else None


def number(old: float, new: float) -> Change:
    """Another number."""
    return lambda node: (
        ast.Constant(new)
        if isinstance(node, ast.Constant) and type(node.value) is type(old) and node.value == old
        else None
    )


def without(name: str) -> Change:
    """``x`` for ``x.name(...)``, and for ``name(x, ...)``."""

    def change(node: ast.AST) -> ast.AST | None:
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", getattr(node.func, "id", "")) != name:
            return None
        subject = getattr(node.func, "value", None)
        return node.args[0] if subject is None or getattr(subject, "id", "") in MODULES else subject

    return change


def condition(value: bool) -> Change:
    """A condition that always holds, or never."""

    def change(node: ast.AST) -> ast.AST | None:
        is_condition = isinstance(node, ast.If | ast.IfExp)
        return type(node)(**{**_fields(node), "test": ast.Constant(value)}) if is_condition else None

    return change


def keyword(name: str, value: object) -> Change:
    """Another value of a keyword argument."""
    return lambda node: (
        ast.keyword(name, ast.Constant(value)) if isinstance(node, ast.keyword) and node.arg == name else None
    )


def _fields(node: ast.AST) -> dict[str, object]:
    return dict(ast.iter_fields(node))


GOLDEN, ROWS = "tests/results/test_golden.py", "tests/results/test_combinations.py"
#: By the tests that must catch them (pytest's arguments): module, place in it, change, and how many such operations of
#: the place stay as they are before it.
MUTANTS: dict[str, list[tuple[str, str, Change, int]]] = {
    f"{GOLDEN} -k DPO": [
        ("chunked.losses.pairs", "smoothed", swap("-", "+"), 1),
        ("chunked.losses.pairs", "PreferenceLoss.forward", positive, 0),
        ("chunked.losses.dpo", "_exo_pair", swap("+", "-"), 0),
        ("chunked.losses.dpo", "_nca_pair", number(0.5, 1.5), 0),
        ("chunked.losses.dpo", "_robust", swap("/", "*"), 0),
        ("chunked.losses.dpo", "F_DIVERGENCES", swap("-", "+"), 1),
        ("chunked.losses.dpo", "_losses", swap("-", "+"), 1),
        ("chunked.losses.dpo", "LigerFusedLinearDPOLoss.token_weights", swap("<=", "<"), 0),
        ("chunked.losses.base", "ChunkedLoss.each_labels", condition(False), 0),
    ],
    f"{GOLDEN} -k 'PO or KTO or BCO'": [
        ("chunked.losses.completion_loss", "CompletionLoss._scored", swap("/", "*"), 0),
        ("chunked.losses.reference_free", "_log_odds", swap("-", "+"), 0),
        ("chunked.losses.reference_free", "alphapo_reward", swap("/", "*"), 0),
        ("chunked.losses.unpaired", "unpaired_loss", swap("-", "+"), 0),
        ("chunked.losses.unpaired", "UnpairedPreferenceLoss.divergence", without("clamp"), 0),
    ],
    f"{GOLDEN} -k GRPO": [
        ("chunked.losses.policy_tables", "_clipped", swap("-", "+"), 0),
        ("chunked.losses.policy_tables", "vespo_weights", swap("-", "+"), 0),
        ("chunked.losses.policy_tables", "_kl_cov", swap("-", "+"), 0),
        ("chunked.losses.policy_estimates", "k3", swap("-", "+"), 0),
        ("chunked.losses.policy_estimates", "binary_kl", swap("+", "-"), 0),
        ("chunked.losses.policy_estimates", "_sequence", swap("/", "*"), 0),
        ("chunked.losses.policy_estimates", "NORMALIZERS", swap("/", "*"), 0),
        ("chunked.losses.policy_objectives", "policy_terms", swap("-", "+"), 3),
        ("chunked.losses.policy_objectives", "coupled_terms", swap("<=", ">"), 0),
        ("chunked.losses.policy_objectives", "_corrected_k3", swap("+", "-"), 0),
    ],
    f"{GOLDEN} -k 'CE or MiniLLM or Distillation'": [
        ("chunked.losses.cross_entropy_terms", "cross_entropy", number(2, 1), 0),
        ("chunked.losses.cross_entropy", "LigerFusedLinearCrossEntropyLoss._part", condition(False), 6),
        ("chunked.losses.minillm", "_returns", number(1, 0), 0),
        ("chunked.core.buffers", "Gradients.add", keyword("accumulate", False), 0),
        ("chunked.core.buffers", "Buffer.add_states", without("copy_"), 0),
        ("kernels.softmax_grad", "_gradient_torch", swap("/", "*"), 0),
        ("kernels.logit_transform", "LogitTransform.chain_", condition(False), 0),
    ],
    f"{GOLDEN} -k 'KL or JSD or AlphaBeta or linear'": [
        ("chunked.losses.distillation", "DistillationLoss.forward", number(2, 3), 0),
        ("chunked.losses.softmax_divergences", "distribution", positive, 7),
        ("kernels.divergence_forms", "_reverse_kl", swap("-", "+"), 1),
        ("kernels.divergence_forms", "_alpha_beta", swap("-", "+"), 1),
        ("kernels.softmax_grad", "_CLOSED_FORMS", positive, 2),
        ("chunked.core.block", "_Gradient.of", swap("-", "+"), 0),
        ("chunked.core.block", "_Gradient._add_selected", swap("*", "+"), 1),
    ],
    f"{ROWS} -k 'two_together and registered'": [
        ("chunked.core.block", "_Gradient.write_exactly", condition(False), 0),
    ],
    f"{ROWS} -k 'two_together and (statistics or metrics) and small'": [
        ("kernels.online_softmax", "merge", swap("-", "+"), 3),
        ("chunked.core.block", "statistics_by_columns", swap("-", "+"), 0),
    ],
    f"{ROWS} -k 'two_together and not triton'": [
        ("chunked.core.rows", "merged", swap("-", "+"), 0),
        ("chunked.core.stream", "Stream.masked", condition(True), 0),
        ("chunked.core.stream", "Stream.spread", without("index_copy"), 0),
        ("chunked.core.weights", "WithAdapters.open", swap("*", "/"), 0),
        ("chunked.core.target", "Target.neutral", condition(False), 0),
        ("chunked.core.block", "_Gradient.write_exactly", swap("+", "-"), 0),
    ],
    f"{ROWS} -k in_triton": [
        ("chunked.accelerators.exponential_scales", "_scales_kernel", swap("-", "+"), 0),
        ("chunked.accelerators.exponentials", "add_label_terms", condition(False), 0),
        ("chunked.accelerators.linear_exp", "linear_exponentials", condition(False), 6),
        ("chunked.accelerators.label_rows", "_add_to_label_rows_kernel", swap("+", "-"), 1),
        ("chunked.accelerators.unstored", "StatisticsBlock.of", condition(True), 0),
        ("chunked.accelerators.kept", "RowsInPlace.hidden_gradient", swap("+", "-"), 0),
        ("chunked.accelerators.row_sums", "_sum_terms", swap("*", "-"), 1),
        ("kernels.softmax_grad", "gradient_block", swap("-", "+"), 0),
        ("kernels.logit_transform", "transform_gradient", swap("-", "+"), 0),
        ("kernels.divergence_kernels", "divergence_kernel", swap("-", "+"), 1),
    ],
    f"{ROWS} -k within_any_workspace": [
        ("chunked.core.block", "Collected.take", without("gradient"), 0),
    ],
    "tests/results/test_life.py -k twice": [
        ("chunked.core.stream", "_Losses.backward", condition(False), 1),
    ],
    "tests/results/test_ranks.py -k 'several_processes and 2'": [
        ("chunked.losses.context_parallel", "_Sum.forward", without("all_reduce"), 0),
        ("chunked.losses.context_parallel", "_Sum.backward", condition(False), 0),
        ("chunked.core.ranks", "Ranks.sum", without("all_reduce"), 0),
        ("chunked.core.ranks", "Ranks.local", swap("<", "<="), 0),
        ("chunked.core.buffers", "Buffer.result", condition(False), 1),
    ],
}  # fmt: skip


class Mutant(NamedTuple):
    module: str
    place: str
    change: Change
    before: int
    tests: str

    @property
    def file(self) -> str:
        return f"liger_losses/{self.module.replace('.', '/')}.py"

    def applied(self) -> str:
        """The module's text with one operation changed.

        Raises:
            LookupError: the module has no such place, or the place no such operation.
        """
        tree = ast.parse((ROOT / self.file).read_text())
        found: list[ast.AST] = [tree]
        for name in self.place.split("."):
            found = [child for node in found for child in ast.iter_child_nodes(node) if name in _names(child)]
        changed = _Changed(self.change, self.before)
        for node in found:
            changed.visit(node)
        if changed.left >= 0:
            raise LookupError(f"{self.module} has no {self.place}, or it has too few such operations.")
        return ast.unparse(ast.fix_missing_locations(tree))


def _names(node: ast.AST) -> list[str]:
    """What a statement defines."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [getattr(node, "name", ""), *(getattr(target, "id", "") for target in targets)]


class _Changed(ast.NodeTransformer):
    """Changes one node: the first that can change, after ``left`` others."""

    def __init__(self, change: Change, left: int) -> None:
        self.change, self.left = change, left

    def visit(self, node: ast.AST) -> ast.AST:
        changed = self.change(node) if self.left >= 0 else None
        if changed is not None:
            self.left -= 1
            if self.left < 0:
                return changed
        return self.generic_visit(node)


def mutants() -> list[Mutant]:
    return [Mutant(*place, tests) for tests, places in MUTANTS.items() for place in places]


def outcome(tests: list[str], file: str = "", text: str = "") -> tuple[int, list[str]]:
    """Pytest's exit status and what it said, in a copy of what tests need, where a file has another text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in os.listdir(ROOT):
            if each in ("liger_losses", "tests"):
                shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("__pycache__"))
            elif not each.startswith(".") and not each.endswith(".egg-info"):
                (folder / each).symlink_to(ROOT / each)
        if file:
            (folder / file).write_text(text)
        return run(tests, name, log := folder / "log"), log.read_text().splitlines()


def run(tests: list[str], folder: str, log: Path) -> int:
    """Pytest's exit status, from a fork of this process, which has imported what takes long."""
    child = os.fork()
    if child:
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
        signal.alarm(LIMIT)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        signal.alarm(0)
        return status
    os.setpgid(0, 0)
    import pytest

    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder
    sys.path[:] = [folder, *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "liger_losses")]:
        del sys.modules[name]
    with log.open("w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = pytest.main(["-qx", "-p", "no:cacheprovider", "-m", "not slow", *tests])
    os._exit(int(status))


def result_of(mutant: Mutant) -> str:
    """``caught`` by a test that passes without the break, ``NOT CAUGHT``, or what pytest said where no test ran."""
    try:
        text = mutant.applied()
    except LookupError as error:
        return f"NOT MADE: {error}"
    status, said = outcome(shlex.split(mutant.tests), mutant.file, text)
    if status == -signal.SIGKILL:
        return f"caught: it takes more than {LIMIT} s"
    failed = [line.removeprefix("FAILED ").partition(" - ")[0] for line in said if line.startswith("FAILED ")]
    if status != 1 or not failed:
        return "NOT CAUGHT" if status == 0 else f"no test ran ({status}): {said[-3:]}"
    if outcome(failed)[0]:
        return f"UNKNOWN: {failed[0]} fails without it"
    return f"caught by {failed[0].partition('::')[2][:100]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="numbers, or parts of places' names; all mutants by default")
    which = parser.parse_args().which
    os.environ.update(OMP_NUM_THREADS="1", TRITON_INTERPRET="1", PYTHONDONTWRITEBYTECODE="1")
    with contextlib.redirect_stderr(io.StringIO()):
        import torch._dynamo  # noqa: F401
        import triton  # noqa: F401
    missed, chosen = 0, list(enumerate(mutants()))
    chosen = [(i, m) for i, m in chosen if not which or any(w == str(i) or w in f"{m.module}.{m.place}" for w in which)]
    for i, mutant in chosen:
        start, result = time.monotonic(), result_of(mutant)
        missed += not result.startswith("caught")
        print(f"{i:2} {mutant.module}.{mutant.place}: {result} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} are caught.")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
