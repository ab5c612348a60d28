"""Calls that launch every kernel, with the sizes of real models and tensors without values: nothing is computed.

Each dtype, option and way through the kernels is in some call, not every combination of them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

import liger_losses as ll
from liger_losses.chunked.core.inputs import target_of as of_tokens
from liger_losses.chunked.core.stream import statistics as statistics_of
from liger_losses.kernels.divergence import Logits, square_sums
from liger_losses.kernels.logit_transform import Epilogue
from liger_losses.kernels.online_softmax import MERGED, merge
from liger_losses.kernels.reading import label_facts
from liger_losses.kernels.targets import target_of
from liger_losses.layers.glu import glu, glu_fused
from liger_losses.layers.layer_norm import layer_norm
from liger_losses.layers.rms_norm import add_rms_norm, gated_rms_norm, rms_norm
from liger_losses.layers.rope import rope
from tests.reference import DIVERGENCES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOKENS, HIDDEN, VOCAB = 4096, 4096, 128256
MiB = 2**20


def tensor(*shape, dtype=BF16, grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def problem(dtype=BF16, hidden_size=HIDDEN, transform=None, bias=False, invariant=False):
    """Hidden states, head and labels."""
    hidden, weight = (tensor(rows, hidden_size, dtype=dtype, grad=True) for rows in (TOKENS, VOCAB))
    head = ll.Head(weight, tensor(VOCAB, dtype=dtype, grad=True) if bias else None, transform, None, invariant)
    return hidden, head, tensor(TOKENS, dtype=torch.long)


def per_token():
    """A temperature for each token."""
    return tensor(TOKENS, dtype=FP32)


def backward(*outputs):
    torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])


# --- Heads ------------------------------------------------------------------------------------------------------------


def cross_entropy(*of_head, scaling="none", **options):
    hidden, head, labels = problem(*of_head, **options)
    backward(ll.LigerFusedLinearCrossEntropyLoss(compact=False, token_scaling=scaling)(head, hidden, labels))


def statistics(
    names, strategy="two_pass", dtype=BF16, transform=None, class_weight=False, invariant=False, metrics="", grad=True
):
    hidden, head, labels = problem(dtype, HIDDEN, transform, class_weight, invariant)
    options = ll.EngineOptions(compact=False, strategy=strategy, workspace=3000 * MiB)
    weights = tensor(VOCAB, dtype=FP32) if class_weight else None
    with torch.set_grad_enabled(grad):
        found = ll.linear_statistics(
            hidden, head, labels, names.split(), metrics=metrics.split(), class_weight=weights, options=options
        )
    if grad:
        backward(*(getattr(found, name) for name in names.split()))


def divergence(
    which, workspace=2000, hard=False, dtype=BF16, transform=None, temperature=1.0, softcap=None, metrics=()
):
    """With ``hard``, and the log-probabilities, at temperature 1, of a vocabulary with more columns."""
    hidden, head, labels = problem(dtype, 2048, transform, hard)
    columns = VOCAB - 256 * hard
    teacher = ll.Teacher(tensor(TOKENS, HIDDEN, dtype=dtype), tensor(columns, HIDDEN, dtype=dtype), softcap=softcap)
    weights = {name: tensor(TOKENS, dtype=FP32) for name in ("divergence", *(["logp"] if hard else []))}
    options = ll.EngineOptions(compact=False, workspace=workspace * MiB)
    loss, _ = ll.linear_divergence_loss(
        hidden, head, labels, teacher, which, weights, metrics=metrics, temperature=temperature, options=options
    )
    loss.backward()


def support(*of_head):
    """Log-probabilities over a few columns for each token."""
    hidden, head, labels = problem(*of_head)
    kept = replace(of_tokens(hidden, head, labels, kept=None), kept=tensor(TOKENS, 64, dtype=torch.long))
    backward(*statistics_of([kept], ("logp", "entropy"), ll.EngineOptions(compact=False))[0].values())


def selected(count, *of_head):
    """Log-probabilities of so many columns of each token, and of its label."""
    hidden, head, labels = problem(BF16, HIDDEN, *of_head)
    columns, options = tensor(TOKENS, count, dtype=torch.long), ll.EngineOptions(compact=False)
    names = "logp", "selected_logps"
    loss, _ = ll.linear_token_loss(
        hidden, head, labels, lambda s, y: s.logp + s.selected_logps.sum(-1), names, selected=columns, options=options
    )
    loss.backward()


def heads():
    warm, capped = ll.LogitTransform(0.7, 1.2), ll.LogitTransform(softcap=30.0)
    each, each_capped = ll.LogitTransform(per_token(), 1.2), ll.LogitTransform(per_token(), 1.2, 30.0)
    every = "logp entropy lse mean_logp log_sum_sq_probs mean_logit"
    calls = {
        "cross-entropy": lambda: cross_entropy(),
        "cross-entropy, fp16, bias and temperature": lambda: cross_entropy(FP16, bias=True, transform=warm),
        "cross-entropy, soft-cap": lambda: cross_entropy(bias=True, transform=capped),
        "cross-entropy, temperatures and soft-cap": lambda: cross_entropy(FP16, transform=each_capped),
        "cross-entropy, rows of an odd length": lambda: cross_entropy(hidden_size=1001, bias=True, transform=warm),
        "cross-entropy, rows of an odd length, soft-cap": lambda: cross_entropy(hidden_size=1001, transform=capped),
        "cross-entropy, by entropy": lambda: cross_entropy(scaling="entropy"),
        "cross-entropy, fp32": lambda: cross_entropy(FP32),
        "log-probabilities and entropy alone": lambda: statistics(
            "logp entropy", transform=each, metrics="mean_logit", grad=False
        ),
        "log-probabilities alone": lambda: statistics("logp", grad=False),
        "batch-invariant, gradients": lambda: statistics("logp entropy", None, transform=warm, invariant=True),
        "batch-invariant, all statistics": lambda: statistics(every, invariant=True, grad=False),
        "all statistics": lambda: statistics(every, metrics="argmax"),
        "all statistics, class weights, soft-cap": lambda: statistics(
            every, dtype=FP16, transform=capped, class_weight=True, metrics="argmax"
        ),
        "all statistics, temperatures": lambda: statistics(every, transform=each_capped),
        "all statistics, logits in memory": lambda: statistics(every, None, metrics="argmax"),
        "all statistics, logits in memory, class weights, soft-cap": lambda: statistics(
            every, None, transform=capped, class_weight=True
        ),
        "all statistics, logits in memory, temperatures": lambda: statistics(every, None, transform=each),
        "entropy, fp32": lambda: statistics("logp entropy", None, FP32, warm),
        "log-probabilities, logits in memory": lambda: statistics("logp", None, metrics="entropy mean_logit"),
        "log-probabilities and entropy, exponentials in memory": lambda: statistics(
            "logp entropy", None, transform=warm, metrics="argmax mean_logit"
        ),
        "log-probabilities, two passes": lambda: statistics("logp", transform=warm),
        "selected": lambda: selected(128),
        "selected, temperatures and soft-cap": lambda: selected(20, each_capped, True),
        "support": lambda: support(),
        "support, fp16": lambda: support(FP16, HIDDEN, each_capped, True),
        "support, fp32": lambda: support(FP32, HIDDEN, warm),
        "sums of squares": lambda: square_sums(
            *[Logits(tensor(TOKENS, VOCAB, dtype=FP32), tensor(TOKENS, dtype=FP32), Epilogue(each_capped))] * 2,
            backend="triton",
        ),
        "parts of the vocabulary": lambda: merge(
            {name: tensor(8, TOKENS, dtype=FP32) for name in MERGED}, [VOCAB // 8] * 8, backend="triton"
        ),
        "label facts": lambda: label_facts(
            [tensor(TOKENS, dtype=torch.long)] * 2, -100, [None, tensor(TOKENS, dtype=torch.bool)], backend="triton"
        ),
    }
    forms = {name: which for name, (which, _) in DIVERGENCES.items()}
    forms |= {f"limited {name}": forms[name].limited(0.05) for name in ("forward KL", "reverse KL", "JSD")}
    forms |= {"cosine": ll.Divergence.cosine(), "KL by entropy": ll.Divergence.kl_by_entropy(0.8)}
    for name, form in forms.items():
        calls[name] = lambda form=form: divergence(form)
    for name in ("forward KL", "JSD", "cosine"):
        form = forms[name]
        calls[f"{name}, hard loss"] = lambda form=form: divergence(
            form, hard=True, dtype=FP16, transform=capped, temperature=2.0, softcap=30.0, metrics=("entropy",)
        )
        calls[f"{name}, hard loss, small workspace"] = lambda form=form: divergence(
            form, 300, hard=True, temperature=per_token()
        )
    return calls


# --- Layers -----------------------------------------------------------------------------------------------------------


def rows(columns=4096, dtype=BF16):
    return tensor(2, 4096, columns, dtype=dtype, grad=True)


def layers():
    def of(columns=4096, dtype=BF16):
        return tensor(columns, dtype=dtype, grad=True)

    longest = target_of(torch.device("cuda")).tiling.longest_row

    def both(dtype=BF16):
        return rows(dtype=dtype), rows(dtype=dtype)

    def rotated(interleaved, dtype, angles, width, dimension):
        q, k = (
            tensor(2, *((heads, 4096) if dimension == 1 else (4096, heads)), 128, dtype=dtype, grad=True)
            for heads in (32, 8)
        )
        cos, sin = (tensor(1, 4096, width, dtype=angles) for _ in range(2))
        backward(*rope(q, k, cos, sin, interleaved=interleaved, unsqueeze_dim=dimension))

    calls = {
        "RMSNorm": lambda: backward(rms_norm(rows(), of())),
        "RMSNorm, fp32 weight": lambda: backward(rms_norm(rows(), of(dtype=FP32))),
        "RMSNorm, fp32": lambda: backward(rms_norm(rows(dtype=FP32), of(dtype=FP32))),
        "RMSNorm, no weight": lambda: backward(rms_norm(rows(), None)),
        "RMSNorm of heads": lambda: backward(rms_norm(rows(128), of(128))),
        "RMSNorm of long rows": lambda: backward(rms_norm(rows(16384), of(16384))),
        "RMSNorm of the longest rows": lambda: backward(rms_norm(rows(longest), of(longest))),
        "RMSNorm and residual": lambda: backward(*add_rms_norm(*both(), of())),
        "RMSNorm and residual, Gemma's": lambda: backward(
            *add_rms_norm(*both(FP16), of(dtype=FP16), offset=1.0, multiply="fp32")
        ),
        "gated RMSNorm": lambda: backward(gated_rms_norm(*both(), of())),
        "gated RMSNorm, gate first": lambda: backward(gated_rms_norm(*both(), of(dtype=FP32), gate_first=True)),
        "LayerNorm": lambda: backward(layer_norm(rows(), of(), of())),
        "LayerNorm, fp16, no bias": lambda: backward(layer_norm(rows(dtype=FP16), of(dtype=FP16))),
        "LayerNorm, fp32, no weight": lambda: backward(layer_norm(rows(dtype=FP32))),
        "LayerNorm of long rows": lambda: backward(layer_norm(rows(16384), of(16384), of(16384))),
        "rotations": lambda: rotated(False, BF16, BF16, 128, 1),
        "rotations, fp32 angles": lambda: rotated(False, FP16, FP32, 64, 2),
        "rotations, fp32": lambda: rotated(False, FP32, FP32, 128, 2),
        "rotations of pairs": lambda: rotated(True, BF16, FP32, 64, 2),
    }
    for dtype, activation in itertools.product((BF16, FP16, FP32), ("silu", "gelu", "gelu_tanh")):
        name = f"{activation}, {str(dtype).removeprefix('torch.')}"
        calls[f"GLU, {name}"] = lambda dtype=dtype, activation=activation: backward(glu(*both(dtype), activation))
    gpt_oss = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
    calls["GLU, gpt-oss"] = lambda: backward(glu_fused(rows(5760), interleaved=True, **gpt_oss))
    calls["GLU, clamps"] = lambda: backward(glu(*both(), limit=7.0))
    return calls


def calls():
    return {**heads(), **layers()}
