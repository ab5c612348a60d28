"""Training steps whose prompts are computed once for all of their completions, and steps with repeated prompts.

python -m benchmarks.shared_prompts [--out FILE.json]
python -m benchmarks.shared_prompts --series --out FILE.json  # by the share of the prompt, with a picture beside it
python -m benchmarks.shared_prompts --draw --out benchmarks/results/FILE.json  # its picture, and the page's table

Both ways run in one process on one model with real shapes and random weights, bf16 and checkpointing, in turns (ABBA):
loss and backward of GRPO, and of DPO with a reference, on random tokens of given lengths. A line has both medians with
their 95% intervals, and the median of the ratios of neighbouring steps. ``first`` is the first step's time, compilation
included. ``compiled`` are the graphs that torch.compile had made after the first step, and after steps with drawn
lengths.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.grpo_steps import timed
from benchmarks.measure import environment, interval, save
from benchmarks.models import build

WAYS = ("repeated", "shared")
PAGE = Path(__file__).parent.parent / "docs" / "shared_prompts.md"


@dataclass(frozen=True)
class Groups:
    """Prompts of a task, each with some completions, and their tokens."""

    task: str
    prompts: int
    completions: int
    prompt: int
    completion: int


CASES = (Groups("GRPO", 2, 8, 1024, 1024), Groups("GRPO", 2, 8, 2048, 512), Groups("DPO", 8, 2, 1024, 1024))
TINY = (Groups("GRPO", 2, 4, 48, 16), Groups("DPO", 2, 2, 32, 32))
#: By the share of the prompt among the tokens of a prompt and one completion, of a constant length.
SHARES = {"GRPO": (0.1, 0.25, 0.4, 0.5, 0.75, 0.9), "DPO": (0.1, 0.4, 0.65, 0.9)}


def series(length: int) -> tuple[Groups, ...]:
    """One group of eight completions, and four pairs, by the share of the prompt."""
    sizes = {"GRPO": (1, 8), "DPO": (4, 2)}
    prompts = {task: [round(share * length) for share in shares] for task, shares in SHARES.items()}
    return tuple(Groups(task, *sizes[task], n, length - n) for task, tokens in prompts.items() for n in tokens)


class Batch:
    """Prompts and completions of random tokens, as trainers have them: padded, each completion with its prompt."""

    def __init__(self, case: Groups, vocab: int, device: torch.device, seed: int | None = None) -> None:
        drawn, of = random.Random(seed), [i % case.prompts for i in range(case.prompts * case.completions)]

        def lengths(count: int, longest: int) -> torch.Tensor:
            full = [longest if seed is None else drawn.randint(longest // 4, longest) for _ in range(count)]
            return torch.tensor(full, device=device)[:, None]

        def ids(count: int, longest: int) -> torch.Tensor:
            return torch.randint(3, vocab, (count, longest), device=device)

        prompt_lengths, completion_lengths = lengths(case.prompts, case.prompt), lengths(len(of), case.completion)
        prompt_mask = torch.arange(case.prompt, device=device).flip(0) < prompt_lengths[of]
        mask = torch.arange(case.completion, device=device) < completion_lengths
        self.task = case.task
        self.input_ids = torch.cat([ids(case.prompts, case.prompt)[of], ids(len(of), case.completion)], 1)
        self.attention_mask = torch.cat([prompt_mask, mask], 1)
        behind = torch.arange(self.input_ids.shape[1], device=device) >= case.prompt
        self.labels = self.input_ids.where(self.attention_mask & behind, -100)
        self.advantages = torch.randn(len(of), device=device)


def inputs_of(way: str, model: Any, batch: Batch) -> Any:
    """The arguments of a loss."""
    from liger_losses import loss_inputs, pack_sequences

    if way == "shared":
        return loss_inputs(model, pack_sequences(batch.input_ids, batch.attention_mask, batch.labels))
    return loss_inputs(model, input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels)


def step(way: str, model: Any, reference: Any, batch: Batch) -> float:
    """Loss and backward."""
    from liger_losses import LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss

    head, hidden_states, labels = inputs_of(way, model, batch)
    if batch.task == "GRPO":
        counts = labels != -100
        loss = LigerFusedLinearGRPOLoss(beta=0.0)(hidden_states, head, labels, counts, batch.advantages)[0]
    else:
        with torch.no_grad():
            theirs = inputs_of(way, reference, batch)
        ref = {"ref_input": theirs.hidden_states, "ref_weight": theirs.head}
        loss = LigerFusedLinearDPOLoss()(head, hidden_states, labels, **ref)[0]
    loss.backward()
    model.zero_grad()
    return float(loss.detach())


def compiled() -> int:
    """The graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def measure(
    case: Groups, model: Any, reference: Any, rounds: int, device: torch.device, drawn: int = 4
) -> dict[str, Any]:
    """One row: times, memory and compilations of both ways; the latter with so many batches of drawn lengths."""
    vocab = model.config.vocab_size
    batch = Batch(case, vocab, device)
    first, losses, times, peaks = {}, {}, dict[str, list[float]](), {}
    for way in WAYS:
        start = time.perf_counter()
        losses[way] = step(way, model, reference, batch)
        first[way] = time.perf_counter() - start
        times[way] = []
        step(way, model, reference, batch)
    graphs = [compiled()]
    gc.collect()
    gc.freeze()
    for turn in range(rounds):
        for way in WAYS if turn % 2 else WAYS[::-1]:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times[way].append(timed(lambda way=way: step(way, model, reference, batch), device))
            if device.type == "cuda":
                peaks[way] = torch.cuda.max_memory_allocated() / 2**30
    for seed in range(drawn):
        step("shared", model, reference, Batch(case, vocab, device, seed))
    graphs.append(compiled())
    ratios = [a / b for a, b in zip(*(times[way] for way in WAYS), strict=True)]
    return {
        **asdict(case),
        "case": f"{case.task} {case.prompts} x {case.completions} x ({case.prompt} + {case.completion})",
        "milliseconds": {way: median(times[way]) for way in WAYS},
        "intervals": {way: interval(times[way]) for way in WAYS},
        "times_as_fast": median(ratios),
        "interval": interval(ratios),
        "peak_gib": peaks,
        "first_seconds": first,
        "compiled": graphs,
        "losses": losses,
        "rounds": times,
    }


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    ways = "  ".join(
        f"{way} {row['milliseconds'][way]:8.1f} ms ({row['intervals'][way][0]:.1f} to {row['intervals'][way][1]:.1f}), "
        f"{row['peak_gib'].get(way, float('nan')):.1f} GiB, first {row['first_seconds'][way]:.1f} s"
        for way in WAYS
    )
    return (
        f"{row['case']:28}  {ways}  {row['times_as_fast']:.3f} times as fast ({row['interval'][0]:.3f} to "
        f"{row['interval'][1]:.3f})  compiled {row['compiled'][0]}, {row['compiled'][1]}  "
        f"losses {row['losses']['repeated']:.6g} {row['losses']['shared']:.6g}"
    )


def fewer_tokens(row: dict[str, Any]) -> float:
    """How many times fewer tokens a batch of full lengths has with shared prompts."""
    group = row["completions"] * row["completion"]
    return (row["completions"] * row["prompt"] + group) / (row["prompt"] + group)


def draw(rows: list[dict[str, Any]], device: str, file: Path) -> None:
    """Against the share of the prompt, how many times as fast a step is, and how many times fewer tokens it has."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(8, 3.4), layout="constrained")
    for panel, task in zip(figure.subplots(1, 2), SHARES, strict=True):
        some = [row for row in rows if row["task"] == task]
        shares = [100 * row["prompt"] / (row["prompt"] + row["completion"]) for row in some]
        panel.plot(shares, [fewer_tokens(row) for row in some], "--", color="tab:gray", label="fewer tokens")
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


def fill_page(rows: list[dict[str, Any]], device: str, picture: Path) -> None:
    """Put a series' picture and table into the page, between the two comments that name this benchmark."""
    before, comment, rest = PAGE.read_text().partition("<!-- benchmarks.shared_prompts -->\n")
    _, end, behind = rest.partition("<!-- end of benchmarks.shared_prompts -->")
    shown = f"![Speed by the share of the prompt](../{picture.resolve().relative_to(PAGE.parents[1])})"
    said = f"Loss and backward of a Qwen2.5-1.5B in bf16 with gradient checkpointing, on one {device}:"
    PAGE.write_text("\n".join([before + comment, shown, "", said, "", *page_table(rows), "", end]) + behind)


def page_table(rows: list[dict[str, Any]]) -> list[str]:
    """The page's table of a series."""
    head = "| | tokens of the prompt and of each completion | fewer tokens | ms, repeated / shared | as fast |"
    return [head, "| --- | --- | --- | --- | --- |"] + [
        f"| {row['task']} | {row['prompt']} + {row['completion']} | {fewer_tokens(row):.2f} times | "
        f"{row['milliseconds']['repeated']:.0f} / {row['milliseconds']['shared']:.0f} | "
        f"{row['times_as_fast']:.2f} times |"
        for row in rows
    ]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, help="of both ways; by default 14, and 3 of a series")
    parser.add_argument("--series", action="store_true", help="by the share of the prompt")
    parser.add_argument("--length", type=int, default=2048, help="of a prompt and a completion of the series")
    parser.add_argument("--draw", action="store_true", help="only draw the series in the file, and fill the page")
    parser.add_argument("--kernels", action="store_true", help="with patched norms, MLPs and rotary embeddings")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that everything runs")
    options = parser.parse_args()
    if options.draw:
        made = json.loads(options.out.read_text())
        draw(made["rows"], made["environment"]["device"], options.out.with_suffix(".png"))
        return fill_page(made["rows"], made["environment"]["device"], options.out.with_suffix(".png"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, reference = (build("tiny" if options.tiny else "Qwen2.5-1.5B", device, checkpointing=True) for _ in range(2))
    reference.gradient_checkpointing_disable()
    if options.kernels:
        from liger_losses import patch

        for one in (model, reference):
            patch(one, loss_head=False)
    rows = []
    cases, rounds, drawn = TINY if options.tiny else CASES, options.rounds or 14, 4
    if options.series:
        cases, rounds, drawn = series(options.length), options.rounds or 3, 0
    for case in cases:
        rows.append(measure(case, model, reference.eval(), rounds, device, drawn))
        print(line(rows[-1]), flush=True)
        if options.out:
            save(options.out, device, rows, map(line, rows))
    if options.series and options.out:
        draw(rows, environment(device)["device"], options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
