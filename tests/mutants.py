"""Breaks the package on purpose, one place after another, and says which breaks the tests of results catch.

``python -m tests.mutants`` makes all of them, ``python -m tests.mutants stream 41`` those whose place or number is
named. A place is a function, a method or a table of a module, so that its lines may move. Each mutant is made in a
temporary copy of the package; the checkout stays as it is.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: The longest that the tests of one mutant may take, in seconds: some make a program wait for ever.
LIMIT = 400

GOLDEN, ROWS = "tests/results/test_golden.py", "tests/results/test_combinations.py"
#: By the tests that must catch them (pytest's arguments): module, place in it, a text of the place, and another one.
MUTANTS: dict[str, list[tuple[str, str, str, str]]] = {
    f"{GOLDEN} -k DPO": [
        ("chunked.losses.pairs", "smoothed", "- label_smoothing * F", "+ label_smoothing * F"),
        ("chunked.losses.pairs", "PreferenceLoss.forward", "-self.total(nll_logps)", "self.total(nll_logps)"),
        ("chunked.losses.dpo", "_exo_pair", "+ log_not_s.exp()", "- log_not_s.exp()"),
        ("chunked.losses.dpo", "_nca_pair", "0.5", "1.5"),
        ("chunked.losses.dpo", "_robust", "/ (1 - 2", "* (1 - 2"),
        ("chunked.losses.dpo", "F_DIVERGENCES", "(alpha - 1) * u", "(alpha + 1) * u"),
        ("chunked.losses.dpo", "_losses", "margin = chosen - rejected", "margin = chosen + rejected"),
        ("chunked.losses.dpo", "LigerFusedLinearDPOLoss.token_weights", "<= shared", "< shared"),
        ("chunked.losses.base", "ChunkedLoss.labels", "if positions else", "if False else"),
    ],
    f"{GOLDEN} -k 'PO or KTO or BCO'": [
        ("chunked.losses.completion_loss", "CompletionLoss._scored", "total / lengths", "total * lengths"),
        ("chunked.losses.dpo", "_log_odds", "logps - torch.log", "logps + torch.log"),
        ("chunked.losses.dpo", "alphapo_reward", ") / a\n", ") * a\n"),
        ("chunked.losses.unpaired", "unpaired_loss", "rewards - shift", "rewards + shift"),
        ("chunked.losses.unpaired", "UnpairedPreferenceLoss.divergence", ".clamp(min=0)", ""),
    ],
    f"{GOLDEN} -k GRPO": [
        ("chunked.losses.policy_tables", "_clipped", "1 - o.epsilon_low", "1 + o.epsilon_low"),
        ("chunked.losses.policy_tables", "vespo_weights", "- rate * log_w", "+ rate * log_w"),
        ("chunked.losses.policy_tables", "_kl_cov", "advantages - penalty", "advantages + penalty"),
        ("chunked.losses.policy_estimates", "k3", "expm1(d) - d", "expm1(d) + d"),
        ("chunked.losses.policy_estimates", "binary_kl", "+ torch.where(rest_p", "- torch.where(rest_p"),
        ("chunked.losses.policy_estimates", "_sequence", "(log_ratio) / inputs", "(log_ratio) * inputs"),
        ("chunked.losses.policy_estimates", "NORMALIZERS", "s.lengths * max", "s.lengths + max"),
        ("chunked.losses.policy_objectives", "policy_terms", "objective - o.beta * kl", "objective + o.beta * kl"),
        ("chunked.losses.policy_objectives", "coupled_terms", "drift <=", "drift >"),
        ("chunked.losses.policy_objectives", "_corrected_k3", "+ (ratio * d)", "- (ratio * d)"),
    ],
    f"{GOLDEN} -k 'CE or MiniLLM or Distillation'": [
        ("chunked.losses.cross_entropy", "cross_entropy", "= 2 * lse_square_scale", "= lse_square_scale"),
        ("chunked.losses.cross_entropy", "LigerFusedLinearCrossEntropyLoss._part", "where(mask, 0)", "where(~mask, 0)"),
        ("chunked.losses.policy_estimates", "_returns", "rewards[:, 1:]", "rewards[:, 0:]"),
        ("chunked.core.buffers", "Buffer.add_product", "accumulate=holds", "accumulate=False"),
        ("chunked.core.buffers", "Buffer.add_states", "total.copy_(values)", "total"),
        ("kernels.softmax_grad", "_gradient_torch", "1.0 / vocab_size", "1.0 * vocab_size"),
        ("kernels.logit_transform", "LogitTransform.chain_", "if self.softcap is not None", "if False"),
    ],
    f"{GOLDEN} -k 'KL or JSD or AlphaBeta or linear'": [
        ("chunked.losses.distillation", "DistillationLoss.forward", "t**2", "t**3"),
        ("chunked.losses.softmax_divergences", "log_rest", "(1 - logps.exp()", "(1 + logps.exp()"),
        ("kernels.divergence_forms", "_reverse_kl", "- p", "+ p"),
        ("kernels.divergence_forms", "_alpha_beta", "p_s - both", "p_s + both"),
        ("kernels.softmax_grad", "_CLOSED_FORMS", '"p_logp_coef": -g', '"p_logp_coef": g'),
        ("chunked.core.block", "Block._of_softmax", "- selected.sum(1)", "+ selected.sum(1)"),
        ("chunked.core.block", "Block._at_selected", "terms) * transform.slope", "terms) + transform.slope"),
    ],
    f"{ROWS} -k 'two_together and registered'": [
        ("chunked.core.block", "Block._write_terms", "if s.phi is not None]", "if s.phi is None]"),
    ],
    f"{ROWS} -k 'two_together and (statistics or metrics) and small'": [
        ("kernels.online_softmax", "merge", '["entropy"] - log_share', '["entropy"] + log_share'),
        ("chunked.core.block", "statistics_by_columns", "columns.stop - start", "columns.stop + start"),
    ],
    f"{ROWS} -k 'two_together and not triton'": [
        ("chunked.core.rows", "merged", '["selected_logps"] - values', '["selected_logps"] + values'),
        ("chunked.core.stream", "Stream.masked", "if self.tokens.active is None else", "if True else"),
        ("chunked.core.stream", "Stream.spread", ".index_copy_(0, index, value)", ""),
        ("chunked.core.weights", "WithAdapters.open", "* self.scale", "/ self.scale"),
        ("chunked.core.target", "rows_of", "if active is None", "if True"),
        ("chunked.core.block", "Block._write_terms", "z += term", "z -= term"),
    ],
    f"{ROWS} -k in_triton": [
        ("chunked.accelerators.exponentials", "_scales_kernel", "lse_c - label_c", "lse_c + label_c"),
        ("chunked.accelerators.exponentials", "_scales_kernel", "lse_c -= tl.sum", "lse_c += tl.sum"),
        ("chunked.accelerators.exponentials", "add_label_terms", "if buffer is not None", "if False"),
        ("chunked.accelerators.linear_exp", "linear_exponentials", "if out is not None", "if False"),
        ("chunked.accelerators.label_rows", "_add_to_label_rows_kernel", "ordered + first - 1", "ordered - first - 1"),
        ("chunked.accelerators.linear_exp", "_merge_kernel", "part_total * scale", "part_total"),
        ("chunked.accelerators.kept", "RowsInPlace.hidden_gradient", "count + 1", "count - 1"),
        ("chunked.accelerators.kept", "_sum_terms", "value[:, None] * x", "value[:, None] - x"),
        ("kernels.softmax_grad", "gradient_block", "z - lse", "z + lse"),
        ("kernels.logit_transform", "transform_gradient", "1 - tanh * tanh", "1 + tanh * tanh"),
        ("kernels.divergence_kernels", "divergence_sums_kernel", "range(part * of_part", "range(part + of_part"),
    ],
    "tests/chunked/accelerators/test_exponentials.py -k entropies": [
        ("chunked.accelerators.exponentials", "ExponentialBlock._of_logits", "value[at]", "value * 0"),
    ],
    "tests/chunked/accelerators/test_linear_exp.py": [
        ("chunked.accelerators.linear_exp", "_row_exponentials_kernel", "tl.minimum(best, column)", "column"),
    ],
    f"{ROWS} -k within_any_workspace": [
        ("chunked.core.block", "Collected.take", "block.gradient(", "assert ("),
    ],
    "tests/results/test_life.py -k decided_in_forward": [
        ("chunked.core.stream", "_Losses.backward", "if gradients is None", "if False"),
    ],
    "tests/results/test_ranks.py -k several_processes": [
        ("chunked.losses.sums", "_Sum.forward", "dist.all_reduce(values, group=group)", "pass"),
        ("chunked.losses.sums", "_Sum.backward", "if ctx.group is not None", "if False"),
        ("chunked.core.ranks", "Ranks.sum", "dist.all_reduce(value, group=self.group)", "pass"),
        ("chunked.core.ranks", "Ranks.local", "places == here", "places >= here"),
        ("chunked.core.buffers", "Buffer.result", "if self.leaf.summed and self.leaf.ranks.sums_hidden", "if False"),
    ],
}  # fmt: skip


def changed(module: str, place: str, old: str, new: str) -> tuple[str, str]:
    """A module's file, and its text with the first such text of the place changed."""
    file = f"liger_losses/{module.replace('.', '/')}.py"
    text = (ROOT / file).read_text()
    nodes: list[ast.AST] = [ast.parse(text)]
    for name in place.split("."):
        children = [child for node in nodes for child in ast.iter_child_nodes(node)]
        nodes = [child for child in children if re.match(rf"(@.*\n)*((def|class) )?{name}\b", ast.unparse(child))]
    parts = ["".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]) for node in nodes]
    parts = [part for part in parts if old in part]
    assert parts, f"{module} has no {place}, or nothing there is {old!r}."
    return file, text.replace(parts[0], parts[0].replace(old, new, 1))


def outcome(tests: list[str], file: str = "", text: str = "") -> tuple[int | None, str]:
    """Pytest's exit status (none after the limit) and what it said, in a copy of what tests need, where a file has
    another text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__"), dirs_exist_ok=True)
        if file:
            (folder / file).write_text(text)
        command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "not slow", *tests]
        environment = {**os.environ, "PYTHONPATH": name}
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True, timeout=LIMIT)
            return done.returncode, done.stdout
        return None, f"it takes more than {LIMIT} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="numbers, or parts of places' names; all mutants by default")
    which = parser.parse_args().which
    os.environ.update(OMP_NUM_THREADS="1", TRITON_INTERPRET="1", PYTHONDONTWRITEBYTECODE="1")
    missed, caught_by = 0, set[str]()
    mutants = [(tests, place) for tests, places in MUTANTS.items() for place in places]
    for i, (tests, (module, place, *texts)) in enumerate(mutants):
        if which and not any(word == str(i) or word in f"{module}.{place}" for word in which):
            continue
        start, (status, said) = time.monotonic(), outcome(shlex.split(tests), *changed(module, place, *texts))
        failed = re.findall(r"^FAILED (.+?)(?: - |$)", said, re.MULTILINE)
        caught = status is None or (status == 1 and failed)
        caught_by |= {*failed}
        missed += not caught
        result = f"caught by {(failed or [said])[0]}" if caught else f"NOT CAUGHT ({status}): {said[-300:]}"
        print(f"{i:2} {module}.{place}: {result} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{missed} of them are not caught.")
    status, said = outcome(sorted(caught_by)) if caught_by else (0, "")
    print(said if status else "These tests pass without the breaks.")
    return int(missed > 0 or status != 0)


if __name__ == "__main__":
    sys.exit(main())
