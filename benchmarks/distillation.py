"""The benchmarks of distillation, as data; errors by distance; and times within small workspaces.

`python -m benchmarks.distillation` has the errors; with `--beside FOLDER...`, it measures this checkout and those in
the folders (`git worktree add FOLDER COMMIT`) in turns within 250 MiB, beside the bare products.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_losses
from benchmarks.compare import OTHER, import_other
from benchmarks.entries import (
    GEMM_BLOCK_BYTES,
    GEMMS,
    Benchmark,
    Inputs,
    Provider,
    Random,
    Shape,
    needs_cuda,
    optional,
    with_gradients,
)
from benchmarks.measure import Call, MiB, NotRun, check_host_memory, environment, extra_bytes, milliseconds, release

#: The teacher's hidden size, in the student's.
TEACHER = 2
#: The betas by which Liger's and TRL's functions tell the JSD from the forward KL.
JSD, FORWARD_KL = 0.5, 0.0


@dataclass(frozen=True)
class DistillationInputs(Inputs):
    """A student's inputs, and the teacher's hidden states `[tokens, Ht]` and head `[V, Ht]`."""

    teacher_hidden: Tensor
    teacher_weight: Tensor


def distillation_inputs(shape: Shape, device: torch.device) -> DistillationInputs:
    """Two models that know nothing of one another."""
    random, wide = Random(shape, device), TEACHER * shape.hidden
    return DistillationInputs(
        shape,
        random.normal(shape.tokens, shape.hidden).requires_grad_(),
        random.weight().requires_grad_(),
        random.labels(1).flatten(),
        random.normal(shape.tokens, wide),
        random.normal(shape.vocab, wide, scale=wide**-0.5),
    )


def bare_gemms(inputs: DistillationInputs) -> Call:
    """Three products of the student's sizes and one of the teacher's, into buffers that are there."""
    i, weight = inputs, inputs.weight.detach()
    hidden = i.hidden.detach()
    rows = max(1, min(len(hidden), GEMM_BLOCK_BYTES // (len(weight) * weight.element_size())))
    buffer, hidden_out, weight_out = hidden.new_empty(rows, len(weight)), torch.empty_like(hidden), weight.clone()

    def call() -> tuple[Tensor, ...]:
        for start in range(0, len(hidden), rows):
            block, out = hidden[start : start + rows], buffer[: len(hidden) - start]
            torch.mm(i.teacher_hidden[start : start + rows], i.teacher_weight.t(), out=out)
            torch.mm(block, weight.t(), out=out)
            torch.mm(out, weight, out=hidden_out[start : start + rows])
            weight_out.addmm_(out.t(), block, beta=0 if start == 0 else 1)
        return ()

    return call


def generalized_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Per token, from logits, as the formula says."""
    log_p, log_q = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    if beta == FORWARD_KL:
        return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    log_m = torch.logaddexp(log_p + torch.tensor(1 - beta).log(), log_q + torch.tensor(beta).log())
    of_teacher, of_student = (F.kl_div(log_m, part, reduction="none", log_target=True) for part in (log_q, log_p))
    return (beta * of_teacher + (1 - beta) * of_student).sum(-1)


def plain(beta: float) -> Provider:
    """Logits of all tokens, of both models."""

    def build(inputs: DistillationInputs) -> Call:
        i = inputs
        check_host_memory(40 * i.shape.tokens * i.shape.vocab, i.weight.device)
        return lambda: with_gradients(
            generalized_jsd(i.hidden @ i.weight.T, i.teacher_hidden @ i.teacher_weight.T, beta).mean(), i.leaves
        )

    return build


def liger(beta: float) -> Provider:
    """Liger Kernel's chunked loss; compiling it is for GPUs."""

    def build(inputs: DistillationInputs) -> Call:
        i, loss = inputs, optional("liger_kernel.chunked_loss", "LigerFusedLinearJSDLoss")
        torch._dynamo.reset()
        module = loss(0.0, 1.0, beta, compiled=i.weight.device.type == "cuda")
        return lambda: with_gradients(
            module(i.hidden, i.weight, i.teacher_hidden, i.teacher_weight, i.labels), i.leaves
        )

    return build


def trl(beta: float) -> Provider:
    """TRL's chunked divergence, as its distillation trainer calls it."""

    def build(inputs: DistillationInputs) -> Call:
        i, function = inputs, optional("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction")
        return lambda: with_gradients(
            function.apply(i.hidden, i.weight, None, i.teacher_hidden, i.teacher_weight, None, beta)[0].mean(),
            i.leaves,
        )

    return build


def ours(beta: float, package: Any = liger_losses, **options: Any) -> Provider:
    """This library's, or that of another checkout."""
    loss = package.LigerFusedLinearJSDLoss(0.0, 1.0, beta, **options)

    def build(inputs: DistillationInputs) -> Call:
        i = inputs
        teacher = package.Teacher(i.teacher_hidden, i.teacher_weight)
        return lambda: with_gradients(loss(i.weight, i.hidden, i.labels, teacher)[0], i.leaves)

    return build


def benchmark(name: str, title: str, beta: float) -> Benchmark:
    """One divergence's."""
    return Benchmark(
        name=name,
        title=f"{title}, forward and backward, the teacher's hidden size {TEACHER} x H",
        shapes={
            "cuda": (Shape(8192, 2048, 151936), Shape(6144, 1536, 151936)),
            "cpu": (Shape(1024, 576, 49152, torch.float32),),
        },
        inputs=distillation_inputs,
        providers={
            GEMMS: bare_gemms,
            "plain torch": plain(beta),
            "liger-kernel": needs_cuda(liger(beta)),
            "TRL": trl(beta),
            "ours": ours(beta),
            "ours, 256 MiB workspace": ours(beta, workspace=256 * MiB),
        },
        flops=6 + 2 * TEACHER,
    )


BENCHMARKS = (
    benchmark("jsd", "Jensen-Shannon divergence (beta 0.5)", JSD),
    benchmark("forward_kl", "KL(teacher || student)", FORWARD_KL),
)

# --- Errors by distance ---------------------------------------------------------------------------------------------

#: Relative noise in the student's hidden states, and the share of dimensions that has it: JSD from 1e-1 to 1e-6.
DISTANCES = ((0.6, 1.0), (0.16, 1.0), (0.05, 1.0), (0.016, 1.0), (2**-6, 0.1), (2**-6, 0.01))


def close_inputs(noise: float, share: float, shape: Shape, device: torch.device) -> DistillationInputs:
    """A teacher of the student's size and with its head, and a student next to it; logits of standard deviation 2."""
    random = Random(shape, device)
    weight = random.normal(shape.vocab, shape.hidden, scale=2 * shape.hidden**-0.5)
    teacher = random.normal(shape.tokens, shape.hidden)
    factor = 1 + noise * random.normal(*teacher.shape)
    factor[:, int(share * shape.hidden) :] = 1
    student = (teacher * factor).requires_grad_()
    return DistillationInputs(
        shape, student, weight.clone().requires_grad_(), random.labels(1).flatten(), teacher, weight
    )


def exact(inputs: DistillationInputs, beta: float) -> tuple[Tensor, ...]:
    """Loss and gradients in float64, from the closed form, some tokens at a time."""
    weight, loss = inputs.weight.detach().double(), []
    grad_weight, grad_hidden = torch.zeros_like(weight), []
    for rows in torch.arange(inputs.shape.tokens, device=weight.device).split(128):
        hidden = inputs.hidden.detach()[rows].double()
        log_p = (hidden @ weight.T).log_softmax(-1)
        log_q = (inputs.teacher_hidden[rows].double() @ inputs.teacher_weight.double().T).log_softmax(-1)
        log_m = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).double().log()
        term = log_p.exp() * (log_p - log_m)
        kl = term.sum(-1, keepdim=True)
        loss.append(0.5 * kl[:, 0] + 0.5 * (log_q.exp() * (log_q - log_m)).sum(-1))
        grad = 0.5 * (term - log_p.exp() * kl) / inputs.shape.tokens
        grad_hidden.append(grad @ weight)
        grad_weight += grad.T @ hidden
    return torch.cat(loss).mean(), torch.cat(grad_hidden), grad_weight


def errors(device: torch.device, shape: Shape) -> list[dict[str, object]]:
    """Relative errors of loss and gradients of the JSD, by provider and distance; printed as they come."""
    providers: dict[str, Callable[[Any], Call]] = {
        "plain torch": plain(JSD),
        "liger-kernel": liger(JSD),
        "TRL": trl(JSD),
        "ours": ours(JSD),
        "ours, 12 blocks": ours(JSD, chunk_size=-(-shape.tokens // 12)),
        "ours, 64 MiB": ours(JSD, workspace=64 * MiB),
    }
    rows = []
    print(f"{'JSD':>9} {'provider':16} {'found':>10} {'loss':>10} {'grad_hidden':>12} {'grad_weight':>12}")
    for noise, share in DISTANCES:
        inputs = close_inputs(noise, share, shape, device)
        reference = exact(inputs, JSD)
        for name, provider in providers.items():
            try:
                found = provider(inputs)()
            except NotRun as reason:
                print(f"{float(reference[0]):9.1e} {name:16} {reason}")
                continue
            relative = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, reference, strict=True)]
            names = ("loss", "grad_hidden", "grad_weight")
            rows.append(
                {"jsd": float(reference[0]), "provider": name, "found": float(found[0])}
                | dict(zip(names, relative, strict=True))
            )
            numbers = f"{relative[0]:10.1e} {relative[1]:12.1e} {relative[2]:12.1e}"
            print(f"{float(reference[0]):9.1e} {name:16} {float(found[0]):10.2e} {numbers}", flush=True)
            del found
            release(device)
    return rows


# --- Within small workspaces, beside other checkouts ------------------------------------------------------------------

WORKSPACE = 250 * MiB
LEAN_SHAPES = (Shape(8192, 2048, 151936), Shape(6144, 1536, 151936), Shape(4096, 4096, 128256))


def beside(
    folders: list[Path], device: torch.device, rounds: int, shapes: tuple[Shape, ...], workspace: int
) -> list[dict[str, Any]]:
    """Of each shape and divergence, medians of each checkout and of the bare products; printed as they come.

    `host ms` is how long the host takes to queue a call, of which the device is idle for what it waits; `same bits` is
    whether three more calls, queued without a pause, have the results of the first.
    """
    packages, rows = {"this": liger_losses}, []
    for number, folder in enumerate(folders):
        import_other(folder, f"{OTHER}_{number}")
        packages[str(folder)] = importlib.import_module(f"{OTHER}_{number}")
    print(f"{'':45} {'ms':>9} {'x GEMMs':>8} {'min':>8} {'host ms':>8} {'MiB':>6}  loss")
    for shape in shapes:
        inputs = distillation_inputs(shape, device)
        for divergence, beta in (("KL", FORWARD_KL), ("JSD", JSD)):
            calls = {GEMMS: bare_gemms(inputs)}
            for name, package in packages.items():
                calls[name] = ours(beta, package, workspace=workspace)(inputs)
            for name, times in in_turns(calls, device, rounds).items():
                row = {"shape": f"{shape.tokens} x {shape.hidden} x {shape.vocab}", "divergence": divergence}
                row |= {"call": name, **times}
                beside_products = ""
                if name != GEMMS:
                    row["MiB"], first = extra_bytes(calls[name], device) / MiB, calls[name]()
                    again = [calls[name]() for _ in range(3)]
                    same = all(torch.equal(a, b) for result in again for a, b in zip(first, result, strict=True))
                    row |= {"loss": float(first[0]), "same bits": same}
                    beside_products = f" {row['MiB']:6.0f}  {row['loss']:.6f}{'' if same else '  NOT THE SAME BITS'}"
                    del first, again
                rows.append(row)
                numbers = f"{row['ms']:9.2f} {row['x GEMMs']:8.3f} {row['min']:8.2f} {row['host ms']:8.2f}"
                print(f"{row['shape']} {divergence:3} {name[-20:]:20} {numbers}{beside_products}", flush=True)
                release(device)
            del calls
        del inputs
    return rows


def in_turns(calls: dict[str, Call], device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Times of each call; the order is turned round in every other round, as a GPU's clock falls under load."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    host: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name in calls if round_ % 2 else reversed(calls):
            elapsed = milliseconds(calls[name], device)  # calls it twice on a GPU
            start = time.perf_counter()
            calls[name]()
            queued = (time.perf_counter() - start) * 1e3
            if round_:
                times[name].append(elapsed)
                host[name].append(queued)
    medians = {name: statistics.median(part) for name, part in times.items()}
    return {
        name: {
            "ms": medians[name],
            "x GEMMs": medians[name] / medians[GEMMS],
            "min": min(times[name]),
            "host ms": statistics.median(host[name]),
        }
        for name in calls
    }


def main() -> None:
    """Print the table of errors, or of times, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where to write JSON")
    parser.add_argument(
        "--beside", type=Path, nargs="*", metavar="FOLDER", help="measure times, beside these checkouts"
    )
    parser.add_argument("--rounds", type=int, default=6, help="of times")
    parser.add_argument("--tiny", action="store_true", help="times of small sizes, to see that everything runs")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.beside is not None:
        shapes, workspace = LEAN_SHAPES, WORKSPACE
        if options.tiny:
            shapes, workspace = tuple(shape.tiny() for shape in shapes), WORKSPACE // 64
        rows = beside(options.beside, device, options.rounds, shapes, workspace)
    else:
        rows = errors(device, Shape(2048, 1024, 32000) if device.type == "cuda" else Shape(256, 128, 2000))
    if options.out:
        options.out.write_text(json.dumps({"environment": environment(device), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
