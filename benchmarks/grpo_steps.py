"""GRPO steps of TRL's trainer, with sequences without advantage left out of the backward and not.

python -m benchmarks.grpo_steps [--out FILE.json]
python -m benchmarks.grpo_steps --reuse [--out FILE.json]  # with old log-probabilities from the training forward

Both run in turns on one model, a share of whose sequences has an advantage: loss, backward and AdamW on sequences of
given tokens, nothing is generated. The model has real shapes and random weights, bf16 and checkpointing.

With ``--reuse``, a step begins at TRL's ``_prepare_inputs``, which gets the completions of one prompt and a sampler's
log-probabilities instead of generating: old log-probabilities, the correction of the sampler, advantages. A line has
the median of the ratios of neighbouring steps with its 95% interval.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.measure import interval, save
from benchmarks.models import MODELS, build
from benchmarks.steps import Case
from benchmarks.trainers import trainer_of

#: Shares of the sequences that have an advantage.
SHARES = (1.0, 0.5, 0.25)


def batch(case: Case, share: float, device: torch.device) -> dict[str, torch.Tensor]:
    """Random tokens, half of them prompts; the given share of the sequences has an advantage, spread evenly."""
    generator, half = torch.Generator(device).manual_seed(0), case.length // 2
    vocab = MODELS[case.model][1]["vocab_size"]
    size = (case.sequences, half)
    ids = [torch.randint(2, vocab, size, device=device, generator=generator) for _ in range(2)]
    ones = torch.ones(size, dtype=torch.int64, device=device)
    counted = torch.arange(case.sequences, device=device) * share % 1 < share
    signs = torch.where(torch.arange(case.sequences, device=device) % 3 == 0, -1.0, 1.0)
    return {
        "prompt_ids": ids[0],
        "prompt_mask": ones,
        "completion_ids": ids[1],
        "completion_mask": ones,
        "advantages": signs * counted,
        "num_items_in_batch": ones.sum(),
    }


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Milliseconds until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def measure(case: Case, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """One row for each share: the median times of both, their losses, and how far their gradients are apart."""
    from liger_losses.trl import enabled

    model = build(case.model, device, case.checkpointing)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        with enabled(kernels=True):
            trainer = trainer_of("GRPO", model, None, folder, case.length // 2)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")

        def step(inputs: dict[str, torch.Tensor], update: bool = True) -> float:
            loss = trainer._compute_loss(model, inputs)
            loss.backward()
            if update:
                optimizer.step()
                optimizer.zero_grad()
            return float(loss.detach())

        for share in SHARES:
            inputs = batch(case, share, device)
            losses, gradients = [], []
            for skip in (False, True):  # they compile, too
                with enabled(skip_zero_advantages=skip):
                    losses.append(step(inputs, update=False))
                gradients.append([p.grad for p in model.parameters()])
                optimizer.zero_grad()
            scale = torch.stack([g.float().norm() for g in gradients[0]]).norm()
            apart = torch.stack([(a.float() - b.float()).norm() for a, b in zip(*gradients, strict=True)]).norm()
            del gradients
            gc.collect()
            gc.freeze()  # to look through all that was imported takes longer than a step
            times: dict[bool, list[float]] = {False: [], True: []}
            peaks = {}
            for skip in [skip for i in range(rounds) for skip in ((True, False) if i % 2 else (False, True))]:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                with enabled(skip_zero_advantages=skip):
                    times[skip].append(timed(lambda inputs=inputs: step(inputs), device))
                if device.type == "cuda":
                    peaks[skip] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            whole, skipped = median(times[False]), median(times[True])
            rows.append(
                {
                    "share": share,
                    "milliseconds": {"all": round(whole, 2), "skipped": round(skipped, 2)},
                    "times_as_fast": round(whole / skipped, 4),
                    "expected": round(1 / (0.25 + 0.75 * share), 3),
                    "losses": losses,
                    "gradients_apart": float(apart / scale),
                    "peak_gib": {"all": peaks.get(False), "skipped": peaks.get(True)},
                    "rounds": times,
                }
            )
            print(line(rows[-1]), flush=True)
    return rows


def generated(trainer: Any, case: Case) -> list[dict[str, str]]:
    """The rows of a step, whose completions and their sampler's log-probabilities are random and given."""
    draw, half, vocab = random.Random(0), case.length // 2, MODELS[case.model][1]["vocab_size"]
    prompt, *completions = ([draw.randrange(2, vocab) for _ in range(half)] for _ in range(case.sequences + 1))
    uniform = -math.log(vocab)
    logps = [[uniform + draw.gauss(0, 0.1) for _ in range(half)] for _ in completions]
    outputs = [prompt] * case.sequences, completions, None, [""] * case.sequences, logps, {}, None, []
    trainer._generate = lambda prompts: outputs
    trainer.reward_funcs = [lambda completions, **_: list(map(float, range(len(completions))))]
    trainer.use_vllm = True
    return [{"prompt": "<eos>"}] * case.sequences


def measure_reuse(case: Case, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """One row with repeated prompts, and one with a prompt that is computed once."""
    model, rows = build(case.model, device, case.checkpointing), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")
    for share in (False, True):
        rows.append(measure_reuse_of(share, model, optimizer, case, rounds, device))
        print(reuse_line(rows[-1]), flush=True)
    return rows


def measure_reuse_of(
    share: bool, model: Any, optimizer: torch.optim.Optimizer, case: Case, rounds: int, device: torch.device
) -> dict[str, Any]:
    """The median times of steps with TRL's forward for old log-probabilities, and without it."""
    from liger_losses.trl import enabled

    options = {"per_device_train_batch_size": case.sequences, "num_generations": case.sequences}
    options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    options["vllm_importance_sampling_mode"] = "token_truncate"  # which leaves all tokens a gradient
    with tempfile.TemporaryDirectory() as folder, enabled(share_prompts=share):
        trainer = trainer_of("GRPO", model, None, folder, case.length // 2, **options)
    prompts = generated(trainer, case)
    model.train()

    def step(reuse: bool) -> float:
        with enabled(reuse_forward=reuse):
            loss = trainer.compute_loss(model, trainer._prepare_inputs(prompts))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    losses = [step(reuse) for reuse in (False, True, False, True)]  # they compile, too
    gc.collect()
    gc.freeze()
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds):
        for reuse in (False, True) if turn % 2 else (True, False):
            times[reuse].append(timed(lambda reuse=reuse: step(reuse), device))
    ratios = [a / b for a, b in zip(times[False], times[True], strict=True)]
    return {
        "share_prompts": share,
        "milliseconds": {"TRL's forward": median(times[False]), "reused": median(times[True])},
        "times_as_fast": median(ratios),
        "interval": interval(ratios),
        "losses": losses,
        "rounds": times,
    }


def reuse_line(row: dict[str, Any]) -> str:
    """One line of ``--reuse``."""
    old, reused = row["milliseconds"].values()
    return (
        f"{'a prompt once' if row['share_prompts'] else 'prompts repeated':16}  TRL's forward {old:8.2f} ms  reused "
        f"{reused:8.2f} ms  {row['times_as_fast']:.3f} times as fast ({row['interval'][0]:.3f} to "
        f"{row['interval'][1]:.3f})  losses {' '.join(f'{loss:.6g}' for loss in row['losses'])}"
    )


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    time_of, peak = row["milliseconds"], row["peak_gib"]
    return (
        f"share {row['share']:4}  all {time_of['all']:8.2f} ms / {peak['all']} GiB  "
        f"skipped {time_of['skipped']:8.2f} ms / {peak['skipped']} GiB  {row['times_as_fast']:6.3f} times as fast "
        f"(by the products alone {row['expected']})  losses {row['losses'][0]:.6g} {row['losses'][1]:.6g}  "
        f"gradients {row['gradients_apart']:.1e} apart"
    )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--reuse", action="store_true", help="old log-probabilities from the training forward, or not")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that everything runs")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiny = Case("GRPO", "tiny", 4, 32, 0.5, True)
    case = tiny if options.tiny else Case("GRPO", "Qwen2.5-1.5B", 8, 2048, 0.5, True)
    rows = (measure_reuse if options.reuse else measure)(case, options.rounds, device)
    if options.out:
        save(options.out, device, rows, map(reuse_line if options.reuse else line, rows))


if __name__ == "__main__":
    main()
