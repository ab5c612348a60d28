"""DPO's loss on one pair whose completions grow: peak memory and time, plain PyTorch beside this library.

Plain PyTorch is ``hidden_states @ lm_head.T``, its log-softmax and the labels' log-probabilities, for policy and
reference. It measures everything after a model's last hidden states, forward and backward, on random tensors of the
model's sizes (SmolLM2-135M by default). Each side runs in a separate process. It prints a table and draws a plot.

    python examples/longer_pairs.py
    python examples/longer_pairs.py --hidden-size 2048 --vocab-size 128256 --lengths 1024 4096 16384
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import time

import torch
from torch import Tensor
from torch.nn import functional

SIDES = ("plain PyTorch", "liger_losses")
LENGTHS = [512, 1024, 2048]


def plain_loss(head: Tensor, hidden_states: Tensor, reference: Tensor, labels: Tensor) -> Tensor:
    """DPO's loss (arXiv:2305.18290, eq. 7) of the pair's two rows, with all logits in memory."""

    def logps(states: Tensor) -> Tensor:
        logits = states @ head.T
        return logits.float().log_softmax(-1).gather(-1, labels[..., None]).double().sum((1, 2))

    with torch.no_grad():
        ref_logps = logps(reference)
    chosen, rejected = logps(hidden_states) - ref_logps
    return -functional.logsigmoid(0.1 * (chosen - rejected))


def our_loss(head: Tensor, hidden_states: Tensor, reference: Tensor, labels: Tensor) -> Tensor:
    """The same with this library, chosen row first."""
    from liger_losses import LigerFusedLinearDPOLoss

    loss_function = LigerFusedLinearDPOLoss(beta=0.1)
    return loss_function(head, hidden_states, labels, ref_input=reference, ref_weight=head.detach())[0]


def peak_mib() -> float:
    """Of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    status = pathlib.Path("/proc/self/status")  # of this process alone; ru_maxrss starts at the parent's value
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def measure(side: str, hidden_size: int, vocab_size: int, lengths: list[int]) -> list[dict[str, float]]:
    """Peak MiB beyond weight and inputs, seconds, and the loss, for each length, the shortest first."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    compute, before = plain_loss if side == SIDES[0] else our_loss, 0.0
    rows: list[dict[str, float]] = []
    torch.manual_seed(0)
    head = torch.empty(vocab_size, hidden_size, device=device, dtype=dtype).normal_(std=0.01).requires_grad_()
    for length in [16, *sorted(lengths)]:  # the first length warms up
        states, reference = torch.randn(2, 2, length, hidden_size).to(device, dtype)
        labels = torch.randint(vocab_size, (2, length)).to(device)
        states.requires_grad_()
        head.grad = None
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if device == "cuda" or not rows:  # a process has one peak, which grows with the length
            before = peak_mib()
        started = time.perf_counter()
        loss = compute(head, states, reference, labels)
        loss.backward()
        value = loss.item()  # waits for the device
        seconds = time.perf_counter() - started
        rows.append({"mib": peak_mib() - before, "seconds": seconds, "loss": value})
        print(f"{side}: {length} tokens took {seconds:.1f} s", file=sys.stderr, flush=True)
    return rows[1:]


def run(lengths: list[int], hidden_size: int, vocab_size: int, plot: pathlib.Path) -> str:
    """Both sides, each in a process of its own, a table of them, and a plot; what the longest pair's memory is."""
    lengths, measured = sorted(lengths), {}
    sizes = [f"--hidden-size={hidden_size}", f"--vocab-size={vocab_size}"]
    for side in SIDES:
        command = [sys.executable, __file__, f"--side={side}", *sizes, "--lengths", *map(str, lengths)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{side} failed with exit code {done.returncode}; its error is above.")
        measured[side] = json.loads(done.stdout.splitlines()[-1])
    print(f"\nDPO's loss on one pair, from hidden states [2, tokens, {hidden_size}] to gradients,")
    print(f"with a vocabulary of {vocab_size}; memory is the peak beyond the inputs\n")
    print(f"{'tokens':>8}" + "".join(f"{side + ', MiB':>22}{'seconds':>10}{'loss':>10}" for side in SIDES))
    for number, length in enumerate(lengths):
        cells = (measured[side][number] for side in SIDES)
        print(f"{length:8}" + "".join(f"{c['mib']:22.0f}{c['seconds']:10.2f}{c['loss']:10.4f}" for c in cells))
    draw(plot, lengths, measured)
    memory = " and ".join(f"{measured[side][-1]['mib']:.0f} MiB with {side}" for side in SIDES)
    return f"DPO's loss on one pair of {lengths[-1]} tokens each takes {memory}."


def draw(path: pathlib.Path, lengths: list[int], measured: dict[str, list[dict[str, float]]]) -> None:
    """Memory and time against the length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, key, label in zip(axes, ("mib", "seconds"), ("peak memory, MiB", "seconds"), strict=True):
        for side, color in zip(SIDES, ("tab:orange", "tab:blue"), strict=True):
            axis.plot(lengths, [row[key] for row in measured[side]], "o-", label=side, color=color)
        axis.set(xlabel="tokens of each completion", ylabel=label, title="DPO's loss on one pair", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of each completion")
    parser.add_argument("--output", default="runs/longer_pairs.png", help="where the plot goes (default: %(default)s)")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse_arguments()
    if args.side:
        print(json.dumps(measure(args.side, args.hidden_size, args.vocab_size, args.lengths)))
    else:
        longest = run(args.lengths, args.hidden_size, args.vocab_size, pathlib.Path(args.output))
        print(f"\nPlot: {args.output}\n{longest}")
