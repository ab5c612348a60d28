"""What rounding logits to bf16 costs, on real text: `python -m benchmarks.mismatch --save benchmarks/results/mismatch`.

Hidden states and head of SmolLM2-135M-Instruct in bf16 (see `benchmarks/real_text.py`). For each way to compute the
log-probabilities of the next tokens: their distance from those of fp64 logits of the same hidden states and head, as a
log-ratio, and for how many tokens the largest logit is another column's. A policy ratio exp(logp - old_logp) has this
error if one side of it was computed so, and in a serving engine a greedy token is another one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.real_text import FILE, real_text
from liger_losses import linear_statistics

ROWS = 256
Scores = tuple[Tensor, Tensor]


def plain(logits_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Scores]:
    """Log-probabilities and argmax from materialized logits."""

    def score(hidden: Tensor, labels: Tensor) -> Scores:
        logits = logits_of(hidden)
        wide = logits.to(torch.promote_types(torch.float32, logits.dtype))
        return wide.log_softmax(-1).gather(1, labels[:, None])[:, 0], logits.argmax(-1)

    return score


def measure(hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, dict[str, float]]:
    """The distances of each provider."""

    def ours(hidden: Tensor, labels: Tensor) -> Scores:
        found = linear_statistics(hidden, weight, labels, "logp", metrics="argmax")
        return found.logp, found.argmax

    wide = weight.double()
    exact = plain(lambda h: h.double() @ wide.T)
    providers = {
        "plain bf16 head": plain(lambda h: h @ weight.T),
        "plain bf16 head, log_softmax in bf16": lambda h, y: (
            (h @ weight.T).log_softmax(-1).gather(1, y[:, None])[:, 0],
            (h @ weight.T).argmax(-1),
        ),
        "ours, bf16 hidden states and head": ours,
    }
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in providers}
    for start in range(0, len(labels), ROWS):
        h, y = hidden[start : start + ROWS], labels[start : start + ROWS]
        logp, top = exact(h, y)
        for name, score in providers.items():
            ours_logp, ours_top = score(h, y)
            found[name].append((ours_logp.double() - logp, ours_top != top))
    results = {}
    for name, parts in found.items():
        error, flips = (torch.cat(values) for values in zip(*parts, strict=True))
        results[name] = {
            "argmax_flips_percent": 100 * float(flips.double().mean()),
            "mean_abs_log_ratio": float(error.abs().mean()),
            "max_abs_log_ratio": float(error.abs().max()),
            "tokens_above_1_percent": 100 * float((error.abs() > 0.01).double().mean()),
        }
    return results


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    tensors = torch.load(FILE) if FILE.exists() else real_text(arguments.tokens)
    count = arguments.tokens
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, labels = tensors["hidden"][:count].to(device), tensors["labels"][:count].long().to(device)
    weight = tensors["weight"].to(device)
    results = measure(hidden, weight, labels)
    head = f"{len(labels)} tokens x {weight.shape[1]} x {weight.shape[0]}, {device}, torch {torch.__version__}"
    lines = [
        head,
        f"{'':40}{'other argmax':>14}{'mean |log-ratio|':>18}{'max |log-ratio|':>17}{'|log-ratio| > 1 %':>19}",
    ]
    for name, r in results.items():
        lines.append(
            f"{name:40}{r['argmax_flips_percent']:>12.2f} %{r['mean_abs_log_ratio']:>18.2e}"
            f"{r['max_abs_log_ratio']:>17.2e}{r['tokens_above_1_percent']:>17.2f} %"
        )
    print("\n".join(lines))
    if arguments.save is not None:
        arguments.save.with_suffix(".txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        text = json.dumps({"setup": head, "results": results}, indent=1) + "\n"
        arguments.save.with_suffix(".json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
