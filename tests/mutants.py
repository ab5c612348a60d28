"""Breaks the package on purpose, one place after another, and says which breaks the tests catch.

``python -m tests.mutants`` makes all of them (half an hour on two cores), ``python -m tests.mutants softmax_grad 41``
those whose file or number is named. Each is made in a temporary copy of the package; the checkout stays as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: The longest that the tests of one mutant may take, in seconds: some make a program wait for ever.
LIMIT = 400

#: By the tests that must catch them (pytest's arguments): file of the package, what it has once, and what that becomes.
MUTANTS: dict[str, list[tuple[str, str, str]]] = {
    "tests/chunked/test_combinations.py -k 'together and not triton'": [
        ("chunked/engine/many_heads.py", '"bias", "quantized", "adapters")', '"quantized", "adapters")'),
        ("kernels/softmax_grad.py", '"p_logp_coef": -g}', '"p_logp_coef": g}'),
        ("kernels/softmax_grad.py", "2 * g * torch.exp(-values", "g * torch.exp(-values"),
        ("chunked/engine/accumulation.py", " grad.t(), hidden, accumulate=not first", " grad.t(), hidden"),
        ("chunked/engine/accumulation.py", "{type(None)} else torch.zeros", "{type(None)} else torch.ones"),
        ("chunked/engine/stream.py", "unit_gradient[rows] * g[rows, None]", "unit_gradient[rows]"),
        ("chunked/engine/tokens.py", "values = self.masked(values)\n            elif", "pass\n            elif"),
        ("chunked/engine/logit_block.py", "else _sum_repeated(columns, upstream)", "else upstream"),
        ("kernels/online_softmax.py", 'share * (parts["entropy"] - log_share)', 'share * parts["entropy"]'),
        ("kernels/online_softmax.py", "(totals[ends] - totals[ends - sizes])", "totals[ends]"),
        ("kernels/online_softmax.py", ".long() + (ends - sizes)[:, None]", ".long()"),
        ("chunked/engine/blocks.py", "(part.here - columns.start)", "part.here"),
        ("chunked/engine/blocks.py", "[self._merge(part, found, sizes)], [columns.stop]", "found[:1], sizes[:1]"),
        ("kernels/given_ids.py", "zeros_like(columns, dtype=dtype)", "ones_like(columns, dtype=dtype)"),
        ("kernels/row_sums.py", "torch.where(rows >= 0, values[at], 0.0)", "torch.where(rows >= 0, 1.0, 0.0)"),
        ("chunked/engine/tokens.py", "found.masked_fill_(self.ignored, 1.0)", "found.clamp_(max=9.0)"),
        ("chunked/engine/weights.py", "accumulate=accumulate or part.start > 0)", "accumulate=accumulate)"),
        ("chunked/engine/adapters.py", ", adapter.a) * adapter.scale, ", ", adapter.a), "),
        ("chunked/engine/stream.py", "call.transform.temperature[index])", "call.transform.temperature + 0)"),
        ("chunked/engine/stream.py", "call.query.subset(index, losses)", "call.query"),
        ("chunked/engine/stream.py", "{name: value[index] for", "{name: value for"),
    ],
    "tests/chunked/test_combinations.py -k 'in_triton and statistics'": [
        ("kernels/softmax_grad.py", "p * p_squared_value * p", "p * p_squared_value"),
    ],
    "tests/prompts -k 'repeated_prompts and llama'": [
        ("prompts/masks.py", "(key >= starts[query]) & (key <= query)", "(key >= prompt_ends[query]) & (key <= query)"),
        ("prompts/packing.py", "behind + within)[None]", "behind + within + 1)[None]"),
        ("prompts/packing.py", "torch.where(within == 0, stops - 1, first + within - 1)", "first + within - 1"),
    ],
    "tests/trl/test_shared_prompts.py -k unasked": [
        ("trl/packed_batches.py", "options.share_prompts or first or saves", "options.share_prompts or saves"),
        ("trl/packed_batches.py", "_LEAST_SAVING * packed.input_ids.numel()", "_LEAST_SAVING * packed.tokens"),
        ("trl/packed_batches.py", "    if model._liger_losses_head.share_prompts:", "    if True:"),
        ("trl/packed_batches.py", 'device.type == "cuda" and half', "half"),
    ],
    "tests/chunked/engine/test_largest.py -k rows": [
        ("chunked/engine/logit_block.py", "ids.append(at + columns.start)", "ids.append(at)"),
        ("chunked/engine/logit_block.py", "torch.cat(values, -1).topk", "torch.cat(values, -1)[:, :k].topk"),
    ],
    "tests/chunked/test_combinations.py -k 'in_triton and trained'": [
        ("kernels/softmax_grad.py", "grad_bias += projected.sum(0, ", "grad_bias += 0 * projected.sum(0, "),
    ],
    "tests/chunked/engine/test_tokens.py -k never_leak": [
        ("chunked/engine/call.py", "tokens.masked(g.detach().to(dtype), rows)", "g.detach().to(dtype)"),
    ],
    "tests/kernels/test_online_softmax.py tests/kernels/test_linear_stats.py": [
        ("kernels/online_softmax.py", "(moments + totals * below) * scale", "moments * scale"),
    ],
    "tests/kernels/test_divergence.py tests/kernels/test_divergence_forms.py": [
        ("kernels/divergence_forms.py", "return exp(log_q) - p + h, h", "return exp(log_q) - p + h, p"),
        ("kernels/divergence_forms.py", "(b * (1 - a) - c * a) * (1 - a)", "(b * (1 - a) - c * a) * a"),
        ("kernels/divergence_terms.py", "radius = 0.5 / max(power, 1.0)", "radius = 2.0 / max(power, 1.0)"),
        ("kernels/divergence_kernels.py", "grad = row_coef * (h - p * total)", "grad = row_coef * h"),
        ("kernels/divergence_forms.py", "(difference - unit * distance[:, None])", "difference"),
    ],
    "tests/kernels/test_linear_exp.py": [
        ("kernels/linear_exp.py", "total / columns", "total / (columns + 1)"),
        ("kernels/linear_exp.py", "((rest <= limit) == 0)", "(rest < 0)"),
        ("kernels/linear_exp.py", '(z > float("-inf"), 1 - tanh * tanh, 0.0)', '(z > float("-inf"), 1.0, 0.0)'),
        ("kernels/exponential_scales.py", "(p_coef + label_coef) + p_coef * logp.expm1()", "label_coef * 1.0"),
    ],
    "tests/kernels/test_linear_grad.py": [
        ("kernels/linear_grad.py", "first_of_tile + half * (BLOCK_V // 2)", "first_of_tile"),
    ],
    "tests/kernels/test_softmax_stats.py": [
        ("kernels/logit_transform.py", "grad *= 1 - tanh * tanh", "grad *= 1 - tanh"),
    ],
    "tests/kernels/test_label_rows.py": [
        ("kernels/label_rows.py", "(s * value + c * w)", "(s * value)"),
        ("kernels/label_rows.py", "(before != label) & (label < past_end)", "(label < past_end)"),
        ("kernels/label_rows.py", "tl.store(source + place, row,", "tl.store(source + place, at.to(tl.int64),"),
    ],
    "tests/chunked/engine/test_support.py -k shifted": [
        ("chunked/engine/support.py", "shift_labels(labels, options.ignore_index, shift) if shift else", ""),
    ],
    "tests/layers/test_rms_norm.py tests/layers/test_layer_norm.py tests/layers/test_rope.py": [
        ("layers/rms_norm.py", "(centered - xhat * (g * xhat).mean(-1, keepdim=True))", "g"),
        ("layers/rms_norm.py", "None if bias_dtype is None else g.", "None if bias_dtype is None else xhat."),
        ("layers/rope.py", "turned = -_turn(", "turned = _turn("),
    ],
    "tests/layers/test_rows.py -k are_the_same": [
        ("layers/prepared.py", "t.shape, t.stride(), t.dtype", "t.shape, t.dtype"),
        ("layers/rows.py", "_arguments(inputs, vectors) if self.copies else ", ""),
    ],
    "tests/patching/test_patch.py -k few_tokens": [
        ("patching/norms.py", "if self.of_torch and is_short(x):", "if False:"),
    ],
    "tests/layers/test_glu.py": [
        ("layers/glu_kernels.py", "d_up.masked_fill_(", "d_up.masked_fill("),
        ("layers/glu.py", "if node.overwritten:", "if False:"),
        ("layers/glu.py", "torch.addmm(out, grad, weight, out=out)", "out.add_(0)"),
        ("layers/glu.py", "inner = [tensor.data for tensor in inner]", "pass"),
    ],
    "tests/chunked/engine/test_many_heads.py": [
        ("chunked/engine/tokens.py", "beyond = min(positions, labels.shape[-1])", "beyond = 1"),
        ("chunked/engine/autograd_functions.py", "grad if before is None else before.add_(grad)", "grad"),
        ("chunked/engine/many_heads.py", "if kept and kept + size > call.plan.kept", "if False"),
        ("chunked/engine/many_heads.py", "accum_dtype=torch.float32", "accum_dtype=None"),
    ],
    "tests/chunked/engine/test_stream.py": [
        ("chunked/engine/autograd_functions.py", "ctx.gradients = ctx.gradients, None", "_ = ctx.gradients, None"),
        ("chunked/engine/plan.py", "MAX_HALF_PRECISION_BLOCKS = 8", "MAX_HALF_PRECISION_BLOCKS = 8000"),
    ],
    "tests/chunked/engine/test_plan.py tests/chunked/engine/test_workspace.py": [
        ("chunked/engine/plan.py", "resident=tokens * work.row_bytes <= budget.kept and", "resident="),
        ("chunked/engine/workspace.py", "context.reset(before)", "before.old_value"),
        ("chunked/engine/decision.py", "return taller, self", "return plan, self"),
        ("chunked/engine/decision.py", "return plan, torch.float32", "return plan, self.grad_weight_dtype"),
    ],
    "tests/chunked/engine/test_batch_invariance.py -k 'not triton'": [
        ("chunked/engine/weights.py", "hidden.new_zeros(most, size", "hidden.new_zeros(most := count, size"),
    ],
    "tests/chunked/engine/test_head.py": [
        ("chunked/engine/head.py", "ours if _differ(ours, default) else theirs", "theirs"),
    ],
    "tests/chunked/engine/test_ranks.py": [
        ("chunked/engine/blocks.py", "torch.where(others, logit_here - lse, logp)", "logp"),
        ("chunked/engine/ranks.py", "columns, inside, inside != labels", "columns, inside, inside != inside"),
    ],
    "tests/chunked/engine/test_agreement.py": [
        ("chunked/engine/agreement.py", "if len(set(texts)) == 1:", "if True:"),
        ("chunked/engine/agreement.py", "hash(text) in signatures and", "False and"),
        ("chunked/engine/agreement.py", 'os.environ.get(CHECK_VARIABLE) != "1"', "True"),
    ],
    "tests/chunked/losses/test_distillation.py tests/chunked/engine/test_teachers.py": [
        ("chunked/engine/decision.py", '"logp" in outputs and (other or vocab_size >', "False and (vocab_size >"),
        ("chunked/engine/two_models.py", "self.grad_bias += student_logits.sum(0)", "self.grad_bias += 0"),
        ("chunked/losses/distillation.py", "return self.temperature**2 if self", "return self.temperature if self"),
        ("chunked/engine/teachers.py", "(ordered[:, 1:] == ordered[:, :-1]).any()", "outside"),
    ],
    "tests/chunked/losses/test_policy.py tests/chunked/losses/test_policy_tables.py": [
        ("chunked/losses/policy_tables.py", "torch.minimum(ratio.clamp(max=delta) * adv", "torch.minimum(ratio * adv"),
        ("chunked/losses/policy_estimates.py", "return torch.expm1(d) - d", "return torch.expm1(d)"),
        ("chunked/losses/policy_objectives.py", "(drift <= o.off_policy", "(drift >= o.off_policy"),
        ("chunked/losses/policy_objectives.py", "at = (1 - share) *", "at = share *"),
        ("chunked/losses/policy_objectives.py", "torch.where(acting, objective, 0.0)", "objective"),
        ("chunked/losses/policy_objectives.py", "where(sampler.isnan(), old,", "where(sampler.isnan(), 0.0,"),
    ],
    "tests/chunked/losses/test_context_parallel.py": [
        ("chunked/losses/policy_objectives.py", "total, sum_gradients=True)[0]", "total)[0]"),
        ("chunked/losses/cross_entropy.py", "[self.total(total) for total in totals]", "totals"),
    ],
    "tests/chunked/losses/test_cross_entropy.py": [
        ("kernels/softmax_grad.py", "-g * c.mean()", "-g"),
        ("chunked/engine/tokens.py", "if self.ignored is None else self.masked(weights)", ""),
        ("chunked/engine/tokens.py", "if total is None and self.ignored is not None:", "if False:"),
        ("chunked/losses/cross_entropy_terms.py", "scales.append(values.logp.detach().exp())", "pass"),
    ],
    "tests/chunked/losses/test_dpo.py tests/test_functional.py": [
        ("chunked/losses/dpo.py", "(margin - 1 / (2 * o.beta))", "(margin - 1 / o.beta)"),
        ("chunked/losses/dpo.py", "-torch.expm1((-u)", "torch.expm1((-u)"),
    ],
    "tests/chunked/losses/test_pairs.py tests/chunked/losses/test_reference_free.py": [
        ("chunked/losses/pairs.py", "where(same, 0.0) + found.logp", "where(same, 0.0)"),
        ("chunked/losses/reference_free.py", "return logps - torch.log(-torch.expm1(logps))", "return logps"),
    ],
    "tests/chunked/losses/test_unpaired.py": [
        ("chunked/losses/completion_loss.py", "logps = sums[0] / lengths.clamp(min=1) if", "logps = sums[0] if"),
        ("chunked/losses/unpaired.py", "scored.ref_logps).clamp(min=0)", "scored.ref_logps)"),
        ("chunked/losses/unpaired.py", "batches + counts", "batches + 1"),
    ],
    "tests/chunked/losses/test_minillm.py": [
        ("chunked/losses/policy_estimates.py", "values + discount**length * later", "values + discount * later"),
    ],
    "tests/patching/test_probing.py": [
        ("patching/probing.py", "if not torch.equal(state, torch.get_rng_state()):", "if False:"),
        ("patching/rotations.py", " and cos[0] in (1, q[0])", ""),
    ],
    "tests/patching/test_rotations.py -k replaced_stays": [
        ("patching/swap.py", "if current is replaced else NotImplemented", "if True else NotImplemented"),
    ],
    "tests/patching/test_norms.py": [
        ("patching/probing.py", "if off and (rare is None or largest > rare or", "if off and (False and"),
    ],
    "tests/kernels/test_autograd.py": [
        ("kernels/autograd.py", "_scale(second, f, second_count,", "_scale(second, 1.0, second_count,"),
    ],
    "tests/chunked/engine/test_zero_rows.py -k 'separable or left_out'": [
        ("chunked/engine/stream.py", "index_copy_(0, rest, others[name])", "index_copy_(0, rest, few[name][:1])"),
        ("chunked/engine/stream.py", "return loss, values, gradients", "return loss, few, gradients"),
        ("chunked/engine/blocks.py", "matrix[rows] = matrix[index[rows]]", "matrix[rows] = matrix[rows]"),
        ("chunked/engine/blocks.py", "(value[index] for value in self", "(value[: len(index)] for value in self"),
    ],
    "tests/chunked/engine/test_zero_rows.py -k masked": [
        ("chunked/engine/tokens.py", "None if self.ignored is None else self.ignored[order]", "None"),
    ],
    "tests/test_sequences.py": [
        ("sequences.py", "            check()\n", "            pass\n"),
    ],
    "tests/patching/test_tiles.py": [
        ("patching/tiles.py", "ctx.random_states = None if same else before", "ctx.random_states = None"),
        ("patching/tiles.py", "sums[i] = _sum(sums[i], of_weight)", "sums[i] = of_weight"),
    ],
    "tests/patching/test_patch.py -k 'changed_since or choosing or outlives'": [
        ("patching/swap.py", 'return f"its class was changed to', 'return None and f"its class was changed to'),
        ("patching/swap.py", "= weakref.WeakValueDictionary()", "= {}  # type: ignore"),
        ("patching/patch.py", "and filter_fn is not None and not filter_fn(", "and False and not filter_fn("),
    ],
    "tests/patching/test_lazy_head.py tests/patching/test_linear_forward.py tests/patching/test_loss_inputs.py": [
        ("patching/lazy_layers.py", "hidden_states.shape[-2] > 1", "hidden_states.shape[-2] > 0"),
        ("patching/lazy_layers.py", "(lazy and not layer.only_when_forced)", "lazy"),
        ("patching/lazy_head.py", "        _forget_head(model)\n        warn", "        warn"),
        ("patching/lazy_head.py", "own_forward = module.forward", "own_forward = None"),
        ("patching/loss_inputs.py", "active & active.roll(-1, -1)", "active"),
        ("patching/loss_inputs.py", "losses[0] if losses else", "None if losses else"),
        ("patching/loss_inputs.py", "return output if _SHIFTS[type(inner)] else None", "return output"),
    ],
    "tests/patching/lazy/test_traced_logits.py -k 'nobody_needs or one_graph'": [
        ("patching/lazy/operations.py", "= transform.softcap * by", "= transform.softcap"),
        ("patching/lazy/operations.py", '"__getitem__", of_tokens=True, in_graphs', '"__getitem__", of_tokens'),
    ],
    "tests/patching/lazy/test_gradients.py": [
        ("patching/lazy/gradients.py", "if gradient.source is not source:", "if False:"),
        ("patching/lazy/gradients.py", "or not any(source.needs_grad)", ""),
        ("patching/lazy/tensor.py", "if self.inputs is None or self.inputs[0] is not self.grad_fn", "if True"),
        ("patching/lazy/tensor.py", " or self.inputs[0] is not self.grad_fn", ""),
        ("patching/lazy/tensor.py", "is not None and same:", "is not None:"),
    ],
    "tests/patching/lazy/test_tensor.py tests/patching/lazy/test_deferred.py": [
        ("patching/lazy/tensor.py", "part.memory = lazy.memory", "pass"),
        ("patching/lazy/tensor.py", " and (version >= 0 or values is not origin.materialized)", ""),
        ("patching/lazy/tensor.py", "[True] * self.requires_grad", "[True]"),
        ("patching/lazy/gradients.py", "p is None else func(p, *args[1:])", "p is None else p"),
        ("patching/lazy/operations.py", "if deferred.normalized or stop <= start or", "if stop <= start or"),
        ("patching/lazy/deferred.py", "and self._differ()", "and False"),
        ("patching/lazy/warning.py", "(operation, caller) if training", "(operation, caller) if True"),
        ("patching/lazy/operations.py", "= 1.0 / other if", "= other if"),
        ("patching/lazy/operations.py", "(part.values(), name", "(part.values().bfloat16(), name"),
    ],
    "tests/trl/test_fused_head.py": [
        ("trl/fused_head.py", '(per_token["is_top1"] == target)', '(per_token["is_top1"] != target)'),
        ("patching/lazy/gradients.py", "autograd.grad(logits, needed, g", "autograd.grad(2 * logits, needed, g"),
    ],
    "tests/trl/test_experimental.py -k vocabularies": [
        ("trl/divergences.py", "if len(weight) > student.vocab_size:", "if False:"),
    ],
    "tests/trl/test_divergences.py": [
        ("trl/divergences.py", "completion_mask != 0", "completion_mask == completion_mask"),
    ],
    "tests/trl/test_enabling.py": [
        ("trl/enabling.py", "    if missing:", "    if False:"),
        ("trl/enabling.py", "_restore(0, 0, {", "_restore(1, 1, {"),
        ("trl/features.py", 'raise Missing(f"{feature.part_of} is missing"', 'Missing(f"{feature.part_of} is missing"'),
    ],
    "tests/integrations/test_liger.py": [
        ("integrations/liger/chunked.py", "hidden.shape[1] * bias", "bias"),
        ("integrations/liger/losses.py", "== self.ignore_index, self.ignore", "== 0, self.ignore"),
    ],
    "tests/integrations/test_loading.py tests/integrations/test_verl.py": [
        ("integrations/loading.py", "if not outer:", "if True:"),
        ("integrations/verl.py", "_Tie.apply(found.logp, found.sel", "(found.logp, found.sel"),
    ],
    "tests/integrations/test_torchtitan.py -k 'class or shard'": [
        ("integrations/torchtitan.py", "        replaced.restore()", "        pass"),
        ("integrations/torchtitan.py", "loss / global_valid_tokens, {}", "loss, {}"),
    ],
    "tests/integrations/test_megatron.py tests/integrations/test_serving.py tests/integrations/test_replacements.py": [
        ("integrations/megatron.py", "labels.masked_fill(loss_mask == 0, options.ignore_index)", "labels"),
        ("integrations/serving.py", "sorted(_pairs(entry), reverse=True)[:k]", "_pairs(entry)[:k]"),
        ("integrations/replacements.py", "setdefault(place.module, [])", "__setitem__(place.module, []) or []"),
        ("integrations/replacements.py", "        self._replaced.restore()", "        pass"),
        ("places.py", "else staticmethod(value))", "else value)"),
    ],
}  # fmt: skip


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    tests: str

    def applied(self) -> str:
        """The file's text with one place changed.

        Raises:
            ValueError: the place is not there once.
        """
        text = (ROOT / "liger_losses" / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {text.count(self.old)} times, and not once.")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    return [Mutant(*place, tests) for tests, places in MUTANTS.items() for place in places]


def copy_with(mutant: Mutant, folder: Path) -> None:
    """A copy of what tests need, with one place changed."""
    for name in os.listdir(ROOT):
        if name in ("liger_losses", "tests", "benchmarks", "examples"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not name.startswith(".") and not name.endswith(".egg-info"):
            (folder / name).symlink_to(ROOT / name)
    (folder / "liger_losses" / mutant.file).write_text(mutant.applied())


def run(mutant: Mutant, folder: str, log: Path) -> int:
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
        import shlex

        status = pytest.main(["-qx", "-p", "no:cacheprovider", "-m", "not slow", *shlex.split(mutant.tests)])
    os._exit(int(status))


def result_of(mutant: Mutant) -> str:
    """``caught``, ``NOT CAUGHT``, or what pytest said where no test ran."""
    with tempfile.TemporaryDirectory() as folder:
        copy_with(mutant, Path(folder))
        status, said = run(mutant, folder, log := Path(folder) / "log"), log.read_text().splitlines()
    if status == -signal.SIGKILL:
        return f"caught: it takes more than {LIMIT} s"
    failed = [line.split()[1] for line in said if line.startswith(("FAILED", "ERROR "))]
    if status == 1 or (status == 2 and failed):
        return f"caught by {failed[0] if failed else '?'}"
    return "NOT CAUGHT" if status == 0 else f"no test ran ({status}): {said[-3:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="numbers, or parts of files' names; all mutants by default")
    which = parser.parse_args().which
    os.environ.update(OMP_NUM_THREADS="1", TRITON_INTERPRET="1", PYTHONDONTWRITEBYTECODE="1")
    with contextlib.redirect_stderr(io.StringIO()):
        import hypothesis  # noqa: F401
        import torch._dynamo  # noqa: F401
        import triton  # noqa: F401
    missed, chosen = 0, list(enumerate(mutants()))
    chosen = [pair for pair in chosen if not which or any(w == str(pair[0]) or w in pair[1].file for w in which)]
    for number, mutant in chosen:
        start, result = time.monotonic(), result_of(mutant)
        missed += not result.startswith("caught")
        seconds = time.monotonic() - start
        print(f"{number:2} {mutant.file}: {mutant.old.strip()[:50]!r}: {result} ({seconds:.0f} s)", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} are caught.")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
