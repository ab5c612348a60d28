"""Training steps whose prompts are computed once for all of their completions, by the share of the prompt.

``python -m benchmarks.shared_prompts [--only GRPO] [--rounds 3] [--out FILE.json]``; a picture is written beside the
file. Loss and backward of GRPO, and of DPO with a reference, on random tokens of given lengths: both ways take turns on
one model with real shapes and random weights, bf16 and checkpointing. ``first`` is the first step's time, compilation
included.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Timed, extra_bytes, in_turns, interval, save
from benchmarks.models import IGNORED, build

WAYS = ("repeated", "shared")
GiB = 2**30


@dataclass(frozen=True)
class Groups:
    """Prompts of a task, each with some completions, and their tokens."""

    task: str
    prompts: int
    completions: int
    prompt: int
    completion: int

    @property
    def fewer_tokens(self) -> float:
        """How many times fewer tokens a batch has with shared prompts."""
        group = self.completions * self.completion
        return (self.completions * self.prompt + group) / (self.prompt + group)


#: Shares of the prompt among the tokens of a prompt and one completion; how many prompts, and completions of each.
SHARES = {"GRPO": (0.1, 0.25, 0.4, 0.5, 0.75, 0.9), "DPO": (0.1, 0.4, 0.65, 0.9)}
SIZES = {"GRPO": (1, 8), "DPO": (4, 2)}


def step(way: str, model: Any, reference: Any, case: Groups, device: torch.device) -> tuple[Tensor, ...]:
    """Loss and backward."""
    from liger_losses import LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss, loss_inputs, pack_sequences

    generator, rows = torch.Generator(device).manual_seed(0), case.prompts * case.completions
    draw = functools.partial(torch.randint, 3, model.config.vocab_size, device=device, generator=generator)
    which = torch.arange(rows, device=device) % case.prompts
    ids = torch.cat([draw((case.prompts, case.prompt))[which], draw((rows, case.completion))], 1)
    mask, labels = torch.ones_like(ids), ids.clone()
    labels[:, : case.prompt] = IGNORED

    def inputs_of(model: Any) -> Any:
        if way == "shared":
            return loss_inputs(model, pack_sequences(ids, mask, labels))
        return loss_inputs(model, input_ids=ids, attention_mask=mask, labels=labels)

    head, hidden_states, labels_of_states = inputs_of(model)
    if case.task == "GRPO":
        counts, advantages = labels_of_states != IGNORED, torch.linspace(-1, 1, rows, device=device)
        loss = LigerFusedLinearGRPOLoss(beta=0.0)(hidden_states, head, labels_of_states, counts, advantages)[0]
    else:
        with torch.no_grad():
            theirs = inputs_of(reference)
        of_reference = {"ref_input": theirs.hidden_states, "ref_weight": theirs.head}
        loss = LigerFusedLinearDPOLoss()(head, hidden_states, labels_of_states, **of_reference)[0]
    loss.backward()
    model.zero_grad()
    return (loss.detach(),)


def measure(case: Groups, model: Any, reference: Any, rounds: int, device: torch.device) -> dict[str, Any]:
    """One row: times, memory and losses of both ways."""
    first, losses, peaks, timed = {}, {}, {}, {}
    for way in WAYS:
        timed[way] = Timed(functools.partial(step, way, model, reference, case, device))
        start = time.perf_counter()
        losses[way] = float(timed[way].call()[0])
        first[way] = time.perf_counter() - start
        resident = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        peaks[way] = (resident + extra_bytes(timed[way].call, device)) / GiB
    gc.collect()
    gc.freeze()
    times = in_turns(timed, rounds, device)
    ratios = [a / b for a, b in zip(*times.values(), strict=True)]
    return {
        **asdict(case),
        "fewer_tokens": case.fewer_tokens,
        "milliseconds": {way: median(found) for way, found in times.items()},
        "times_as_fast": median(ratios),
        "interval": interval(ratios),
        "peak_gib": peaks,
        "first_seconds": first,
        "losses": losses,
        "rounds": times,
    }


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    ways = "  ".join(
        f"{way} {row['milliseconds'][way]:8.1f} ms, {row['peak_gib'][way]:.1f} GiB, first {seconds:.1f} s"
        for way, seconds in row["first_seconds"].items()
    )
    case = f"{row['task']} {row['prompts']} x {row['completions']} x ({row['prompt']} + {row['completion']})"
    return (
        f"{case:28}  {row['fewer_tokens']:.2f} times fewer tokens  {ways}  {row['times_as_fast']:.3f} times as fast "
        f"({row['interval'][0]:.3f} to {row['interval'][1]:.3f})  "
        f"losses {row['losses']['repeated']:.6g} {row['losses']['shared']:.6g}"
    )


def draw(rows: list[dict[str, Any]], device: str, file: Path) -> None:
    """Against the share of the prompt, how many times as fast a step is, and how many times fewer tokens it has."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = pyplot.figure(figsize=(4 * len(tasks), 3.4), layout="constrained")
    for panel, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        some = [row for row in rows if row["task"] == task]
        shares = [100 * row["prompt"] / (row["prompt"] + row["completion"]) for row in some]
        panel.plot(shares, [row["fewer_tokens"] for row in some], "--", color="tab:gray", label="fewer tokens")
        panel.plot(shares, [row["times_as_fast"] for row in some], marker="o", color="tab:blue", label="as fast")
        panel.fill_between(shares, *zip(*(row["interval"] for row in some), strict=True), color="tab:blue", alpha=0.2)
        panel.axhline(1, color="black", lw=0.8)
        panel.set(xlabel="prompt, % of prompt and completion", ylabel="times", ylim=(0.8, None))
        panel.set_title(f"{task}, {some[0]['completions']} completions of a prompt")
        panel.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.suptitle(device, fontsize=9)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Measure, print, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="the tasks whose names contain this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=2048, help="of a prompt and a completion")
    parser.add_argument("--draw", action="store_true", help="only draw the file")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that everything runs")
    options = parser.parse_args()
    if options.draw:
        made = json.loads(options.out.read_text())
        return draw(made["rows"], made["environment"]["device"], options.out.with_suffix(".png"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name, length = ("tiny", 64) if options.tiny else ("Qwen2.5-1.5B", options.length)
    model, reference = (build(name, device, checkpointing=True) for _ in range(2))
    reference.gradient_checkpointing_disable()
    rows: list[dict[str, Any]] = []
    for task in (task for task in SHARES if options.only in task):
        for prompt in (round(share * length) for share in SHARES[task]):
            case = Groups(task, *SIZES[task], prompt, length - prompt)
            rows.append(measure(case, model, reference.eval(), options.rounds, device))
            print(line(rows[-1]), flush=True)
            if options.out:
                save(options.out, device, rows, map(line, rows))
    if options.out:
        draw(rows, torch.cuda.get_device_name() if device.type == "cuda" else "CPU", options.out.with_suffix(".png"))
    return None


if __name__ == "__main__":
    main()
