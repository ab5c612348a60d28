"""GRPO steps of TRL's trainer, with old log-probabilities from the training forward, and from TRL's own.

``python -m benchmarks.reuse [--rounds 9] [--out FILE.json]``. A step begins at TRL's ``_prepare_inputs``, which gets
the completions of one prompt and a sampler's log-probabilities instead of generating: old log-probabilities, the
correction of the sampler, advantages, then loss, backward and AdamW. Both take turns on one model with real shapes and
random weights, bf16 and checkpointing. A line has the median of the ratios of neighbouring steps.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import random
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Timed, in_turns, interval, save
from benchmarks.models import MODELS, build
from benchmarks.steps import Case
from benchmarks.trainers import trainer_of


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


def measure(
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

    def step() -> tuple[Tensor, ...]:
        loss = trainer.compute_loss(model, trainer._prepare_inputs(prompts))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss.detach(),)

    ways = {reuse: Timed(step, functools.partial(enabled, reuse_forward=reuse)) for reuse in (False, True)}
    losses = []
    for way in [*ways.values()] * 2:  # they compile, too
        with way.within():
            losses.append(float(step()[0]))
    gc.collect()
    gc.freeze()
    times = in_turns(ways, rounds, device)  # type: ignore[arg-type]
    ratios = [a / b for a, b in zip(times[False], times[True], strict=True)]
    return {
        "share_prompts": share,
        "milliseconds": {"TRL's forward": median(times[False]), "reused": median(times[True])},
        "times_as_fast": median(ratios),
        "interval": interval(ratios),
        "losses": losses,
        "rounds": times,
    }


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    old, reused = row["milliseconds"].values()
    return (
        f"{'a prompt once' if row['share_prompts'] else 'prompts repeated':16}  TRL's forward {old:8.2f} ms  reused "
        f"{reused:8.2f} ms  {row['times_as_fast']:.3f} times as fast ({row['interval'][0]:.3f} to "
        f"{row['interval'][1]:.3f})  losses {' '.join(f'{loss:.6g}' for loss in row['losses'])}"
    )


def main() -> None:
    """Measure with repeated prompts and with a prompt that is computed once, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that everything runs")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = Case("GRPO", "tiny", 4, 32) if options.tiny else Case("GRPO", "Qwen2.5-1.5B", 8, 2048)
    model, rows = build(case.model, device, checkpointing=True), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")
    for share in (False, True):
        rows.append(measure(share, model, optimizer, case, options.rounds, device))
        print(line(rows[-1]), flush=True)
        if options.out:
            save(options.out, device, rows, map(line, rows))


if __name__ == "__main__":
    main()
