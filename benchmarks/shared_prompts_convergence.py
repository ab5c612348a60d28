"""Whole training runs with prompts computed once for all of their completions, and with repeated prompts.

    python -m benchmarks.shared_prompts_convergence --out benchmarks/results/shared_prompts_convergence.json
    python -m benchmarks.shared_prompts_convergence --device cuda --shots 4 --hidden-size 512 --out FILE.json  # bf16

TRL's GRPO and DPO trainers, each from several seeds, under `enable(share_prompts=False)` (`repeated`) and
`enable(share_prompts=True)` (`shared`). Prompts are some questions with answers and a last question, from
examples/data. The model is a small Llama that is trained on the same text first. GRPO's reward is the share of short
words; its reference, and the log-probabilities of its old policy, share prompts too. A seed decides the order of the
data and what is sampled. `--out FILE.json` has the curves of all runs; the summary and the picture stand beside it.
Ends are means over the last quarter of the steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.convergence import HELD_OUT, draw, make_tiny, of, read_pairs, short_words, smooth
from benchmarks.measure import environment

WAYS = ("repeated", "shared")
#: Steps in which what is sampled has hardly had a chance to differ.
FIRST = 4


class Method(NamedTuple):
    """How long and how fast a method trains, and the curves that are compared."""

    steps: int
    learning_rate: float
    batch_size: int
    curves: tuple[str, ...]


METHODS = {
    "grpo": Method(60, 1e-3, 16, ("reward", "loss", "kl")),
    "dpo": Method(32, 1e-4, 4, ("loss", "rewards/margins")),
}


def make_rows(method: str, shots: int) -> list[dict[str, Any]]:
    """Prompts of some questions with answers and a last question; for DPO, with a chosen and a rejected answer."""
    pairs, drawn, rows = read_pairs()[:-HELD_OUT], random.Random(0), []
    for pair in pairs:
        shown = [message for shot in drawn.sample(pairs, shots) for message in shot["prompt"] + shot["chosen"]]
        answers = {"chosen": pair["chosen"], "rejected": pair["rejected"]} if method == "dpo" else {}
        rows.append({"prompt": shown + pair["prompt"], **answers})
    return rows


def make_trainer(name: str, seed: int, args: argparse.Namespace, folder: Path) -> Any:
    """TRL's trainer, checkpointed as by its defaults."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    method, gpu = METHODS[name], args.device == "cuda"
    model, reference = (AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32) for _ in range(2))
    common: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "max_steps": args.steps or method.steps,
        "per_device_train_batch_size": method.batch_size,
        "learning_rate": args.learning_rate or method.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "seed": seed,
        "bf16": gpu,
        "use_cpu": not gpu,
        "dataloader_pin_memory": gpu,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    given: dict[str, Any] = {
        "model": model,
        "processing_class": AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        "train_dataset": Dataset.from_list(make_rows(name, args.shots)),
    }
    if name == "dpo":
        return trl.DPOTrainer(ref_model=reference, args=trl.DPOConfig(max_length=None, **common), **given)
    config = trl.GRPOConfig(num_generations=8, max_completion_length=24, beta=0.02, num_iterations=2, **common)
    return trl.GRPOTrainer(reward_funcs=short_words, args=config, **given)


def run(name: str, seed: int, way: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train one method one way from one seed; the curves, and the tokens of packed rows and of padded batches."""
    from transformers.trainer_callback import PrinterCallback

    import liger_losses.trl
    from liger_losses.trl import fused_head

    tokens, run_packed = {"shared": 0, "repeated": 0}, fused_head.run_packed

    def counted(model: Any, forward: Any, packed: Any, arguments: dict[str, Any]) -> Any:
        output = run_packed(model, forward, packed, arguments)
        assert output is not None, "prompts are repeated; a warning says why"
        tokens["shared"] += packed.tokens
        tokens["repeated"] += arguments["input_ids"].numel()
        return output

    fused_head.run_packed = counted  # type: ignore[assignment]
    try:
        with liger_losses.trl.enabled(share_prompts=way == "shared"):
            trainer = make_trainer(name, seed, args, folder)
            trainer.remove_callback(PrinterCallback)
            start = time.perf_counter()
            trainer.train()
            seconds = time.perf_counter() - start
    finally:
        fused_head.run_packed = run_packed
    assert bool(tokens["shared"]) == (way == "shared")
    history = [row for row in trainer.state.log_history if "loss" in row]
    for before, row in itertools.pairwise(history):
        row.setdefault("reward", before.get("reward"))  # which is logged where completions are sampled
    curves = {key: [float(row[key]) for row in history] for key in (*METHODS[name].curves, "grad_norm")}
    return {"method": name, "provider": way, "seed": seed, **curves, "tokens": tokens, "seconds": seconds}


def end(curve: list[float]) -> float:
    """The mean over the last quarter of the steps."""
    return statistics.fmean(curve[-max(1, len(curve) // 4) :])


def apart(first: list[float], second: list[float]) -> float:
    """The largest distance of two curves."""
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def summary(runs: list[dict[str, Any]]) -> list[str]:
    """How far shared and repeated prompts are apart, beside how far seeds of repeated prompts are."""
    lines = []
    for name, method in METHODS.items():
        plain, shared = (of(runs, name, way) for way in WAYS)
        pairs = [(a, b) for a in plain for b in shared if a["seed"] == b["seed"]]
        seeds = [(a, b) for a in plain for b in plain if a["seed"] < b["seed"]]
        if not pairs or not seeds:
            continue
        tokens = {way: sum(one["tokens"][way] for one in shared) for way in WAYS}
        times = [statistics.fmean(one["seconds"] for one in some) for some in (plain, shared)]
        lines.append(
            f"{name}: {len(pairs)} seeds, {len(plain[0]['loss'])} steps; {tokens['repeated'] / tokens['shared']:.2f} "
            f"times fewer tokens; {times[0]:.0f} s with repeated prompts, {times[1]:.0f} s with shared ones (with "
            "generation)"
        )
        for key in (*method.curves, "grad_norm"):
            first = max(apart(a[key][:FIRST], b[key][:FIRST]) for a, b in pairs)
            same, others = (max(apart(smooth(a[key]), smooth(b[key])) for a, b in some) for some in (pairs, seeds))
            ends = [[end(one[key]) for one in some] for some in (plain, shared)]
            between, spread = abs(statistics.fmean(ends[0]) - statistics.fmean(ends[1])), statistics.stdev(ends[0])
            lines += [
                f"  {key:16} begins at {smooth(plain[0][key])[0]:.4g}; ends at "
                + ", ".join(
                    f"{way} {statistics.fmean(some):.5g} ({min(some):.5g} to {max(some):.5g})"
                    for way, some in zip(WAYS, ends, strict=True)
                ),
                f"  {'':16} means of the ends apart {between:.3g}, standard deviation of seeds {spread:.3g}: "
                f"{'' if between <= spread else 'NOT '}within the spread",
                f"  {'':16} farthest apart: first {FIRST} steps of one seed {first:.2g}; smoothed, one seed "
                f"{same:.3g}, two seeds of repeated prompts {others:.3g}",
            ]
    return lines


def main() -> None:
    """Train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="of every run; by default what suits each method")
    parser.add_argument("--learning-rate", type=float, default=0.0, help="likewise")
    parser.add_argument("--shots", type=int, default=1, help="questions with answers before the last question")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--pretrain", type=int, default=300, help="steps before the runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes = {"hidden_size": args.hidden_size, "layers": 4}
    start, runs = time.perf_counter(), list[dict[str, Any]]()
    warnings.filterwarnings("error", message=".*prompts are repeated")
    facts = environment(torch.device(args.device))
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(Path(folder) / "model", args.pretrain, vocab_size=1024, rate=1e-3, **sizes)
        for name, seed, way in ((name, seed, way) for name in args.methods for seed in args.seeds for way in WAYS):
            runs.append(run(name, seed, way, args, Path(folder)))
            key = METHODS[name].curves[0]
            print(
                f"{name:5} seed {seed} {way:9} {runs[-1]['seconds']:5.0f} s  {key}",
                *(f"{value:.4f}" for value in smooth(runs[-1][key])[:: max(1, len(runs[-1][key]) // 10)]),
                flush=True,
            )
            if args.out:  # a study that is cut short leaves what it has
                args.out.write_text(json.dumps({"environment": facts, "sizes": sizes, "runs": runs}) + "\n")
    lines = [*summary(runs), f"{time.perf_counter() - start:.0f} s in all"]
    print("\n".join(lines))
    if args.out:
        args.out.with_suffix(".txt").write_text("\n".join([json.dumps(facts), "", __doc__ or "", *lines]) + "\n")
        panels = [(name, key, WAYS) for name in args.methods for key in METHODS[name].curves[:2]]
        draw(runs, args.out.with_suffix(".png"), panels)


if __name__ == "__main__":
    main()
