"""The benchmarks of distillation, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_losses
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
from benchmarks.measure import Call, MiB, check_host_memory

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


def ours(beta: float, **options: Any) -> Provider:
    """This library's."""
    loss = liger_losses.LigerFusedLinearJSDLoss(0.0, 1.0, beta, **options)

    def build(inputs: DistillationInputs) -> Call:
        i = inputs
        teacher = liger_losses.Teacher(i.teacher_hidden, i.teacher_weight)
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
