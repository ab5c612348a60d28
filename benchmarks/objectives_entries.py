"""Every policy objective beside GRPO's, losses of several tokens of each position beside those of one, the largest
log-probabilities, and distillation on the student's own tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import liger_losses
from benchmarks.cross_entropy_entries import our_cross_entropy
from benchmarks.distillation_entries import DistillationInputs, bare_gemms, distillation_inputs
from benchmarks.entries import GEMMS, Benchmark, Provider, Shape, needs_cuda, token_inputs, with_gradients
from benchmarks.entries import bare_gemms as bare_products
from benchmarks.measure import Call
from benchmarks.policy_entries import grpo_inputs
from liger_losses import Divergence, Teacher, TeacherTopK
from liger_losses.chunked.losses.cross_entropy import TOKEN_SCALINGS
from liger_losses.chunked.losses.policy_tables import LOSS_TYPES

_SHAPE = Shape(8192, 4096, 128256)
GRPO = "grpo"


def policy(loss_type: str) -> Provider:
    """A policy loss of completions; its sampler is the old policy, and two completions answer a prompt."""

    def build(inputs: Any) -> Call:
        i, mask = inputs, torch.ones_like(inputs.labels)
        options = {"log_ratio_penalty": 0.1} if loss_type == "dro" else {}
        loss = liger_losses.LigerFusedLinearGRPOLoss(
            beta=0.0, loss_type=loss_type, max_completion_length=i.shape.length, **options
        )
        given = {"old_per_token_logps": i.old_logps, "sampling_per_token_logps": i.old_logps + 0.01}
        given |= {"prompts": torch.arange(len(mask), device=mask.device) // 2}
        given |= {"num_items_in_batch": mask.numel()}
        return lambda: with_gradients(loss(i.hidden, i.weight, i.labels, mask, i.advantages, **given)[0], i.leaves)

    return build


def of_several(k: int = 0, term: str = "score_centering", frequent: bool = False) -> Provider:
    """Truncated importance sampling; with a term of the sampler's k likeliest tokens, if k is not 0.

    These are any tokens, whose rows of the head come from memory; or ``frequent`` ones, as Zipf's law has them.
    """

    def build(inputs: Any) -> Call:
        i, mask, device, given = inputs, torch.ones_like(inputs.labels), inputs.weight.device, dict[str, Any]()
        if k:
            generator, places = torch.Generator(device).manual_seed(0), torch.arange(k, device=device)
            drawn = torch.rand(2, *mask.shape, k, generator=generator, device=device)
            shares, count = (places + drawn[0].double()) / k, i.shape.vocab - k
            ids = (count**shares - 1 if frequent else count * shares).long() + places
            given["sampler_topk"] = TeacherTopK((4 * drawn[1]).log_softmax(-1) - 0.1, ids)
        options = {"sampler_term": term} if k else {}
        loss = liger_losses.LigerFusedLinearGRPOLoss(beta=0.0, loss_type="importance", delta=2.0, **options)
        arguments = i.hidden, i.weight, i.labels, mask, i.advantages
        return lambda: with_gradients(loss(*arguments, old_per_token_logps=i.old_logps, **given)[0], i.leaves)

    return build


def largest(k: int, gradients: bool = False) -> Provider:
    """The k largest log-probabilities."""

    def build(inputs: Any) -> Call:
        def call() -> tuple[Tensor, ...]:
            with torch.set_grad_enabled(gradients):
                found = liger_losses.linear_topk(inputs.hidden, inputs.weight, k)
            return with_gradients(found.logps.sum(), inputs.leaves) if gradients else (found.logps.sum(),)

        return call

    return needs_cuda(build)


def distilled(**options: Any) -> Provider:
    """The reverse KL on all tokens."""

    def build(inputs: DistillationInputs) -> Call:
        i = inputs
        loss = liger_losses.DistillationLoss(Divergence.reverse_kl(), 0.0, 1.0, **options)
        teacher = Teacher(i.teacher_hidden, i.teacher_weight)
        return lambda: with_gradients(loss(i.weight, i.hidden, i.labels, teacher)[0], i.leaves)

    return needs_cuda(build)


_SIZES = tuple((tokens, hidden, 128256) for hidden in (2048, 4096) for tokens in (4096, 16384))
BENCHMARKS = (
    Benchmark(
        name="several_tokens",
        title="Policy losses with the sampler's k likeliest tokens, forward and backward, beside the same without",
        shapes={"cuda": tuple(Shape(*size, sequences=size[0] // 1024) for size in _SIZES)},
        inputs=grpo_inputs,
        providers={
            GRPO: of_several(),
            **{f"score centering, k = {k}": of_several(k) for k in (20, 128)},
            **{f"score centering, k = {k}, frequent": of_several(k, frequent=True) for k in (20, 128)},
            "KL to the sampler, k = 20": of_several(20, "reverse_kl"),
        },
        flops=6,
        baseline=GRPO,
    ),
    Benchmark(
        name="token_scaling",
        title="Cross-entropy with a factor of each token, forward and backward, beside cross-entropy",
        shapes={"cuda": tuple(Shape(*size) for size in _SIZES)},
        inputs=token_inputs,
        providers={name: our_cross_entropy(token_scaling=name) for name in ("none", *TOKEN_SCALINGS)},
        flops=6,
        baseline="none",
    ),
    Benchmark(
        name="objectives",
        title="Every policy loss, forward and backward, beside GRPO's time",
        shapes={"cuda": (Shape(8192, 4096, 128256, sequences=16),)},
        inputs=grpo_inputs,
        providers={GRPO: policy("grpo"), **{name: policy(name) for name in LOSS_TYPES if name != "grpo"}},
        flops=6,
        baseline=GRPO,
    ),
    Benchmark(
        name="largest",
        title="The k largest log-probabilities, forward alone, beside one product",
        shapes={"cuda": (_SHAPE,)},
        inputs=token_inputs,
        providers={
            GEMMS: bare_products(grad_hidden=0, grad_weight=0),
            **{f"ours, k = {k}": largest(k) for k in (8, 64, 256)},
        },
        flops=2,
    ),
    Benchmark(
        name="on_policy_distillation",
        title="Reverse KL of the student's tokens, forward and backward, beside its products",
        shapes={"cuda": (_SHAPE,)},
        inputs=distillation_inputs,
        providers={
            GEMMS: bare_gemms,
            "ours, whole vocabulary": distilled(),
            "ours, the student's 64 likeliest": distilled(top_k=64, tail="none"),
            "ours, the teacher's 64 likeliest": distilled(top_k=64, top_k_of="teacher"),
        },
        flops=10,
    ),
)
