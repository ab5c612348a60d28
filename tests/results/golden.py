"""Losses with gradients in float64, as an earlier commit computed them: ``golden.json``.

``python -m tests.results.golden COMMIT`` writes this file anew, from the package of that commit (a208ac57 so far). Of
every tensor there are its entries, or :data:`MOST` sums of them with different weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import liger_losses
from liger_losses import Completions, Divergence, EngineOptions, Largest, LogitTransform, Teacher, functional
from tests import losses

FILE = Path(__file__).with_suffix(".json")
#: Completions, tokens, hidden sizes of student and teacher, vocabulary.
B, T, H, H_TEACHER, V = 4, 5, 6, 7, 11
#: The most numbers of a tensor that are in the file.
MOST = 4


def wave(*shape: int, phase: float = 0.0) -> Tensor:
    """Numbers in [-1, 1] that look random, and are the same with every version of torch."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(i * i * 0.31 + i + phase).view(shape)


class Inputs:
    """The tensors of the calls; those in ``leaves`` get a gradient."""

    def __init__(self) -> None:
        self.hidden, self.weight = 1.5 * wave(B, T, H), 1.2 * wave(V, H, phase=1.0)
        self.bias, self.labels = 0.3 * wave(V, phase=2.0), (torch.arange(B * T) * 7 % V).view(B, T)
        for row, masked in ((0, [0]), (1, [3, 4]), (3, [0, 1, 4])):
            self.labels[row, masked] = -100
        self.mask, self.ids = self.labels != -100, self.labels.clamp(min=0)
        self.plain = (self.hidden @ self.weight.t() + self.bias).log_softmax(-1)
        self.logps = self.plain.gather(-1, self.ids[..., None])[..., 0]
        self.old, self.ref = (self.logps + s * wave(B, T, phase=p) for s, p in ((0.4, 3.0), (0.6, 4.0)))
        self.sampler = self.old + 0.3 * wave(B, T, phase=5.0)
        self.advantages = torch.tensor([1.2, -0.7, 0.4, -1.1], dtype=torch.float64)
        self.ref_hidden, self.ref_weight = 1.5 * wave(B, T, H, phase=6.0), 1.2 * wave(V, H, phase=7.0)
        self.temperature = 1.0 + 0.3 * wave(B, T, phase=8.0)
        self.desirable = torch.tensor([True, False, False, True])
        self.teacher_hidden = 1.5 * wave(B, T, H_TEACHER, phase=9.0)
        self.teacher_weight = 1.2 * wave(V, H_TEACHER, phase=10.0)
        self.leaves = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias, "logps": self.logps}
        for leaf in self.leaves.values():
            leaf.requires_grad_()

    @property
    def teacher(self) -> Teacher:
        return Teacher(self.teacher_hidden, self.teacher_weight)

    @property
    def teacher_logps(self) -> Tensor:
        return (self.teacher_hidden @ self.teacher_weight.t()).log_softmax(-1)

    @property
    def head(self) -> liger_losses.Head:
        return liger_losses.Head(self.weight, self.bias)

    @property
    def sides(self) -> list[Completions]:
        """Two completions each, of different lengths, with the log-probabilities of a reference."""
        shorter, sums = slice(None, T - 1), self.ref.where(self.mask, 0.0).sum(1)
        first = Completions(self.hidden[:2], self.labels[:2], ref_logps=sums[:2])
        return [first, Completions(self.hidden[2:, shorter], self.labels[2:, shorter], ref_logps=sums[2:])]


class Tenths(liger_losses.QuantizedWeight):
    """Rows of whole tenths."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(tuple(weight.shape), torch.float64, weight.device)  # type: ignore[arg-type]
        self.codes = (weight.detach() * 10).round()

    def rows(self, start: int, stop: int) -> Tensor:
        return self.codes[start:stop] / 10


Call = Callable[..., Any]
#: Of each case, its name, the loss (of :mod:`tests.losses`, or a function), its call, and the options.
CASES: dict[str, tuple[str, Call, dict[str, Any]]] = {}


def cases(loss: str, how: str, call: Call, *options: dict[str, Any]) -> None:
    """Add the cases of a loss that are called alike; ``how`` says how, in their names."""
    for given in options:
        plain = (str, float, int, tuple, list)
        words = [f"{k}={v if isinstance(v, plain) else type(v).__name__}" for k, v in given.items()]
        name = " ".join([loss, *filter(None, (how, ", ".join(words)))])
        assert name not in CASES, name
        CASES[name] = loss, call, given


def each(option: str, *values: Any, **others: Any) -> list[dict[str, Any]]:
    return [{option: value, **others} for value in values]


# --- Cross-entropy ----------------------------------------------------------------------------------------------------
def cross_entropy(loss: Any, x: Inputs) -> Any:
    return loss(x.weight, x.hidden, x.labels, x.bias)


def of_two_heads(loss: Any, x: Inputs) -> Any:
    return loss([x.weight, 0.5 * x.weight], x.hidden, x.labels, bias=[x.bias, None])


ALL = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
cases(
    *("CE", "", cross_entropy, {}),
    *each("reduction", "sum", "none"),
    *each("label_smoothing", 0.2, 1.0),
    *({"lse_square_scale": 0.1}, {"lse_square_scale": 0.1, "label_smoothing": 0.1, **ALL}),
    *({"softcap": 3.0}, {"logit_scale": 0.7, "temperature": 1.4, "softcap": 2.0}),
    *({"shift": True}, {"shift": 2, "reduction": "none"}, {"use_token_scaling": True}, {**ALL, "reduction": "none"}),
    *({"ce_weight": 1 + 0.5 * wave(V)}, {"ce_weight": 1 + 0.5 * wave(V), "label_smoothing": 0.3, "reduction": "sum"}),
    *({"ce_weight": 1 + 0.5 * wave(V), "lse_square_scale": 0.1}, {"chunk_size": 3}, {"compact": False}),
    *({"chunk_size": 2, "label_smoothing": 0.2, "lse_square_scale": 0.1}, {"chunk_size": 3, "compact": False}),
)
cases(
    "CE",
    "divided by 9",
    lambda loss, x: loss(x.weight, x.hidden, x.labels, num_items_in_batch=9),
    {},
    {"lse_square_scale": 0.1},
)
cases(
    "CE",
    "with token weights",
    lambda loss, x: loss(x.weight, x.hidden, x.labels, token_weights=1 + wave(B, T)),
    *({}, {"shift": True}, {"use_token_scaling": True}, {"reduction": "none"}, {"ce_weight": 1 + 0.5 * wave(V)}),
)
cases(
    *(
        "CE",
        "two heads",
        of_two_heads,
        {},
        {"head_weights": [0.5, 2.0], **ALL},
        {"shift": [1, 2], "lse_square_scale": 0.1},
    ),
    *({"reduction": "none"}, {"head_weights": [1.0, 0.0]}),
)
cases(
    "CE",
    "two hidden states",
    lambda loss, x: loss(x.head, [x.hidden, 0.5 * x.hidden[:2]], [x.labels, x.labels[2:]]),
    *({}, {"label_smoothing": 0.2, "chunk_size": 4}),
)
cases(
    "CE", "quantized", lambda loss, x: loss(Tenths(x.weight), x.hidden, x.labels, x.bias), {}, {"lse_square_scale": 0.1}
)


# --- Pairs ------------------------------------------------------------------------------------------------------------
def pairs(loss: Any, x: Inputs) -> Any:
    return loss(x.weight, x.hidden, x.labels, x.bias)


def with_reference(loss: Any, x: Inputs) -> Any:
    return loss(x.weight, x.hidden, x.labels, x.bias, ref_input=x.ref_hidden, ref_weight=x.ref_weight)


def with_logps(loss: Any, x: Inputs) -> Any:
    return loss(x.weight, x.hidden, x.labels, ref_chosen_logps=x.ref[:2].sum(1), ref_rejected_logps=x.ref[2:])


DPO = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "nca_pair", "robust", "bco_pair", "sppo_hard")
DPO += ("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft")
F_DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
cases(
    *("DPO", "", with_reference, *each("loss_type", *DPO), {"loss_type": "exo_pair", "label_smoothing": 0.1}),
    *each("loss_type", "sigmoid", "sigmoid_norm", "robust", "aot", label_smoothing=0.2, beta=0.4),
    *each("f_divergence_type", *F_DIVERGENCES, f_alpha_divergence_coef=0.5),
    *each("f_divergence_type", *F_DIVERGENCES, loss_type="ipo", f_alpha_divergence_coef=1.5),
    *({"loss_type": ["sigmoid", "hinge", "sft"], "loss_weights": [0.5, 1.5, 0.2]}, {"ld_alpha": 0.5}),
    *({"use_weighting": True}, {"use_weighting": True, "loss_type": "apo_down", "ld_alpha": 0.2}),
    *({"compute_nll_loss": True, "alpha": 0.3}, {"average_log_prob": True}, {"shift": True}, {"chunk_size": 3}),
    *({"temperature": 0.8, "softcap": 3.0}, {"discopop_tau": 0.3, "loss_type": "discopop"}, {"compact": False}),
)
cases("DPO", "reference logps", with_logps, {"beta": 0.5})
cases("DPO", "alone", pairs, {"use_ref_model": False})
cases(
    "DPO",
    "two sides",
    lambda loss, x: loss(x.head, *x.sides),
    {},
    {"ld_alpha": 0.5},
    {"compute_nll_loss": True, "shift": True},
)
cases(
    "DPO",
    "of tokens' temperatures",
    lambda loss, x: loss(
        x.head, x.hidden, x.labels, ref_input=x.ref_hidden, ref_weight=x.ref_weight, temperature=x.temperature
    ),
    *({}, {"use_weighting": True}),
)
cases(
    "DPO",
    "with nll_target",
    lambda loss, x: loss(x.head, x.hidden, x.labels, nll_target=x.labels.roll(1, 1)),
    *each("compute_nll_loss", True, use_ref_model=False),
)
cases(
    *("CPO", "", pairs, *each("loss_type", "sigmoid", "hinge", "ipo", "simpo"), {"label_smoothing": 0.2, "alpha": 0.4}),
    *({"loss_type": "alphapo", "reward_alpha": 0.25}, {"compute_nll_loss": False, "average_log_prob": True}),
)
cases("SimPO", "", pairs, {}, {"gamma": 1.5, "beta": 2.0}, {"label_smoothing": 0.1, "compute_nll_loss": False})
cases("ORPO", "", pairs, {}, {"beta": 0.5, "alpha": 0.2}, {"average_log_prob": False}, {"compute_nll_loss": False})


# --- Single completions -----------------------------------------------------------------------------------------------
def completions(loss: Any, x: Inputs, **arguments: Any) -> Any:
    given = {"ref_input": x.ref_hidden, "ref_weight": x.ref_weight, "preference_labels": x.desirable}
    return loss(x.hidden, x.weight, x.labels, x.bias, **given | arguments)


REFERENCE = {"use_ref_model": True}
cases(
    "KTO",
    "",
    lambda loss, x: completions(loss, x, kl=0.7),
    *(REFERENCE, {**REFERENCE, "beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 0.3}),
    *({**REFERENCE, "average_log_prob": True}, {**REFERENCE, "shift": True, "chunk_size": 2}),
)
cases("KTO", "alone", lambda loss, x: loss(x.hidden, x.weight, x.labels, None, x.desirable, kl=0.7), {})
cases("KTO", "a kl each", lambda loss, x: completions(loss, x, kl=torch.tensor([0.1, 0.5, 0.0, 2.0])), REFERENCE)
cases(
    "KTO",
    "with kl_completions",
    lambda loss, x: loss(
        x.head, *x.sides, kl_completions=Completions(x.hidden.flip(0), x.labels, ref_logps=x.ref.sum(1))
    ),
    REFERENCE,
)
cases("KTO", "with sample_weights", lambda loss, x: completions(loss, x, kl=0.2, sample_weights=1 + wave(B)), REFERENCE)
cases(
    "KTO", "of tokens' temperatures", lambda loss, x: completions(loss, x, kl=0.2, temperature=x.temperature), REFERENCE
)
cases("KTO", "", completions, {"loss_type": "apo_zero_unpaired", **REFERENCE, "beta": 0.4})
cases(
    "BCO", "", completions, {}, {"beta": 0.6, "undesirable_weight": 0.5}, {"average_log_prob": True}, {"softcap": 2.0}
)
cases("BCO", "two sides", lambda loss, x: loss(x.head, *x.sides), {})


# --- Policies ---------------------------------------------------------------------------------------------------------
def policy(loss: Any, x: Inputs, **arguments: Any) -> Any:
    given = {"old_per_token_logps": x.old, "ref_per_token_logps": x.ref} | arguments
    return loss(x.hidden, x.weight, x.ids, x.mask, x.advantages, x.bias, **given)


def with_sampler(loss: Any, x: Inputs) -> Any:
    return policy(loss, x, sampling_per_token_logps=x.sampler, prompts=torch.tensor([0, 1, 0, 1]))


LOSS_TYPES = ("grpo", "bnpo", "dapo", "sapo", "luspo", "vespo", "ppo", "reinforce", "dual_clip", "importance")
LOSS_TYPES += ("dppo_tv", "dppo_kl", "ipo", "icepop", "kpop", "fipo", "real", "clip_cov", "kl_cov", "gmpo", "cispo")
LEVELS = ("sequence", "sequence_token", "sequence_sum", "geometric")
cases(
    *("GRPO", "", with_sampler, *each("loss_type", *LOSS_TYPES), {"loss_type": "dr_grpo", "max_completion_length": 8}),
    *({"loss_type": "dro", "log_ratio_penalty": 0.5}, {"loss_type": "cispo", "epsilon_high": 0.3, "cispo_low": 0.8}),
    *each("loss_type", "clip_cov", "kl_cov", cov_share=0.3, cov_low=-1.0, beta=0.0),
    *({"loss_type": "fipo", "fipo_half_life": 2.0, "fipo_safe_ratio": 1.1, "delta": 1.3},),
    *({"loss_type": "vespo", "vespo_k_neg": 1.0, "vespo_lambda_pos": 1.0}, {"sapo_temperature_pos": 2.0}),
    *({"loss_type": "real", "real_temperature": 0.2}, {"log_ratio_penalty": 0.3}, {"delta": 1.1}, {"beta": 0.0}),
    *each("importance_sampling_level", *LEVELS, loss_type="grpo"),
    *each("importance_sampling_level", *LEVELS, loss_type="bnpo", beta=0.5, use_bias_correction_kl=True),
    *each("kl_estimator", "k1", "k2", "k3", "abs", "k1+", "k3+", beta=0.7),
    *each("kl_estimator", "k1", "k2", "k3+", beta=0.7, use_bias_correction_kl=True),
    *each("normalizer", "sequence_mean", "sequence_sum", "token_mean", "items", "prompt_mean", epsilon_low=0.1),
    *each("token_mask", "tv", "kl", "change", "ratio", "icepop", "kpop", mask_high=0.05),
    *each("token_mask", "tv", "kl", "ratio", "icepop", mask_low=0.9, mask_high=1.1, loss_type="grpo"),
    *each("off_policy_mask_threshold", -0.5, 0.0, loss_type="grpo"),
    *({"top_entropy_quantile": 0.5}, {"entropy_coef": 0.1}, {"entropy_coef": 0.1, "top_entropy_quantile": 0.4}),
    *({"entropy_coef": 0.2, "loss_type": "vespo"}, {"temperature": 0.7, "softcap": 4.0}, {"chunk_size": 3}),
    *({"chunk_size": 3, "importance_sampling_level": "sequence"}, {"use_ref_model": False}, {"compact": False}),
)
cases(
    "GRPO",
    "with is_ratio and items",
    lambda loss, x: policy(loss, x, vllm_is_ratio=1 + 0.5 * wave(B, T), num_items_in_batch=20),
    {},
)
cases(
    "GRPO",
    "with is_ratio of sequences",
    lambda loss, x: policy(loss, x, vllm_is_ratio=1 + 0.5 * wave(B)),
    {"loss_type": "vespo"},
    {},
)
cases(
    "GRPO",
    "with ref_input",
    lambda loss, x: policy(loss, x, ref_per_token_logps=None, ref_input=x.ref_hidden, ref_weight=x.ref_weight),
    *({"beta": 0.5}, {"beta": 0.5, "importance_sampling_level": "sequence"}),
)
cases(
    "GRPO",
    "advantages of tokens",
    lambda loss, x: loss(x.hidden, x.head, x.ids, x.mask, wave(B, T), old_per_token_logps=x.old),
    *({"beta": 0.0}, {"beta": 0.0, "loss_type": "reinforce"}, {"beta": 0.0, "importance_sampling_level": "sequence"}),
)
cases("GRPO", "alone", lambda loss, x: loss(x.hidden, x.weight, x.ids, x.mask, x.advantages), {"beta": 0.0})
cases(
    "GRPO",
    "of tokens' temperatures",
    lambda loss, x: policy(loss, x, temperature=x.temperature),
    {},
    {"entropy_coef": 0.1},
)
cases(
    "GRPO",
    "kept columns",
    lambda loss, x: policy(loss, x, support=liger_losses.TokenSupport((x.ids[..., None] + torch.arange(4)) % V)),
    *({}, {"entropy_coef": 0.1}, {"loss_type": "vespo", "chunk_size": 3}),
)


# --- Distillation -----------------------------------------------------------------------------------------------------
def distillation(loss: Any, x: Inputs) -> Any:
    return loss(x.weight, x.hidden, x.labels, x.teacher, bias=x.bias)


def of_topk(tail: str, logps: bool = True) -> Call:
    def call(loss: Any, x: Inputs) -> Any:
        values, ids = (x.teacher_logps / 1.0).topk(3)
        rest = -torch.expm1(values.logsumexp(-1)) if logps else None
        tails = None if rest is None else rest.log()
        return loss(x.weight, x.hidden, x.labels, liger_losses.TeacherTopK(values, ids, tail, tails), bias=x.bias)

    return call


for NAME in ("KL", "ReverseKL", "JSD", "TVD", "Cosine"):
    cases(
        *(NAME, "", distillation, {}, {"temperature": 2.0, "temperature_squared": True, "weight_hard_loss": 0.0}),
        *({"weight_hard_loss": 1.0, "weight_soft_loss": 0.2, "softcap": 3.0}, {"chunk_size": 3, "compact": False}),
    )
cases("AlphaBeta", "", distillation, *each("alpha", 0.2, 0.5, beta=0.7), {"alpha": 0.3}, {"alpha": 0.0, "beta": 0.5})
cases("AlphaBeta", "", distillation, {"alpha": 1.0, "beta": 1.0})
cases("KL", "", distillation, {"skew": 0.3}, {"entry_limit": 0.05}, {"shift": True})
cases("ReverseKL", "", distillation, {"skew": 0.3}, {"entry_limit": 0.05}, {"chunk_size": 2, "temperature": 3.0})
cases("JSD", "", distillation, *each("beta", 0.0, 0.1, 1.0), {"beta": 0.3, "convention": "interpolated"})
for NAME in ("KL", "ReverseKL", "JSD", "TVD"):
    cases(NAME, "bucket", of_topk("bucket"), {}, {"temperature": 2.0})
    cases(NAME, "bucket, rest unknown", of_topk("bucket", logps=False), {})
    cases(NAME, "renormalize", of_topk("renormalize"), {})
    cases(NAME, "none", of_topk("none"), {"weight_hard_loss": 0.0})
    cases(NAME, "", distillation, {"top_k": 3}, {"top_k": 4, "top_k_of": "teacher", "tail": "renormalize"})
cases(
    "KL",
    "of logits",
    lambda loss, x: loss(x.head, x.hidden, x.labels, liger_losses.TeacherLogits(2 * x.teacher_logps)),
    {},
)
cases(
    "JSD",
    "of tokens' temperatures",
    lambda loss, x: loss(x.head, x.hidden, x.labels, x.teacher, temperature=x.temperature),
    {},
)
for NAME in ("CE", "KL", "ReverseKL"):
    cases(
        NAME,
        "another ignore_index",
        lambda loss, x: loss(x.head, x.hidden, x.ids, *([] if isinstance(loss, losses.CE) else [x.teacher])),
        {"ignore_index": 3},
    )
cases("KL", "divided by 9", lambda loss, x: loss(x.head, x.hidden, x.labels, x.teacher, num_items_in_batch=9), {})
cases(
    "ReverseKL",
    "two teachers",
    lambda loss, x: loss(
        x.head, x.hidden, x.labels, liger_losses.Teachers([x.teacher, Teacher(x.ref_hidden, x.ref_weight)], x.ids % 2)
    ),
    {},
)
cases(
    "JSD",
    "narrower teacher",
    lambda loss, x: loss(
        x.head, x.hidden, x.labels, Teacher(x.teacher_hidden, x.teacher_weight[: V - 2], columns_correspond=True)
    ),
    {},
)
DIVERGENCES = {
    "by entropy": Divergence.kl_by_entropy(1.0),
    "mixture": Divergence.mixture(0.3, 0.5, 0.4),
    "cosine": Divergence.cosine(),
    "alpha-beta": Divergence.alpha_beta(0.2, 0.7),
    "limited": Divergence.reverse_kl().limited(0.1),
}
for NAME, WHICH in DIVERGENCES.items():
    cases("DistillationLoss", NAME, distillation, {"divergence": WHICH})
    cases(
        "linear_divergence",
        NAME,
        lambda f, x: f(x.hidden, x.head, x.labels, x.teacher),
        {"divergence": WHICH, "logp": True},
    )
cases(
    "JSD",
    "liger-kernel's call",
    lambda loss, x: loss(x.hidden, x.weight, x.teacher_hidden, x.teacher_weight, x.labels, x.bias),
    *({}, {"return_soft_hard_loss": True}),
)
cases("MiniLLM", "", distillation, {}, {"gamma": 0.5}, {"length_normalization": False}, {"single_step": False})
cases("MiniLLM", "older policy", lambda loss, x: loss(x.head, x.hidden, x.labels, x.teacher, old_logps=x.old), {})

# --- Operations -------------------------------------------------------------------------------------------------------
STATISTICS = ("logp", "entropy", "lse", "mean_logp", "log_sum_sq_probs", "mean_logit")
THREE = EngineOptions(chunk_size=3)
cases(
    "linear_statistics",
    "",
    lambda f, x: f(x.hidden, x.weight, x.labels, bias=x.bias),
    *({"statistics": STATISTICS}, {"statistics": STATISTICS, "transform": LogitTransform(0.7, 1.3, 2.0)}),
    *({"statistics": STATISTICS, "class_weight": 1 + wave(V)}, {"statistics": STATISTICS, "options": THREE}),
    *each("statistics", *STATISTICS, metrics=("argmax", "entropy")),
)
cases(
    "linear_statistics",
    "selected",
    lambda f, x: f(x.hidden, x.head, x.labels, selected=(x.ids[..., None] + torch.tensor([0, 2, 2])) % V),
    *({}, {"statistics": ("selected_logps", "entropy")}, {"statistics": ("selected_logps",), "options": THREE}),
)
cases(
    "linear_logps", "", lambda f, x: f(x.hidden, x.weight, x.labels), {}, {"entropy": True, "lse": True, "shift": True}
)
cases(
    "linear_logps",
    "kept columns",
    lambda f, x: f(
        x.hidden, x.head, x.labels, support=liger_losses.TokenSupport((x.ids[..., None] + torch.arange(3)) % V)
    ),
    *({}, {"entropy": True, "lse": True}, {"temperature": 0.5, "chunk_size": 2}),
)
cases("linear_logps", "two labels", lambda f, x: f(x.hidden, x.head, torch.stack([x.labels, x.ids], -1)), {})
cases("linear_topk", "", lambda f, x: f(x.hidden, x.weight, 3, bias=x.bias), {}, {"rest": True})
cases(
    "linear_labels_loss",
    "two labels",
    lambda f, x: f(x.hidden, x.head, torch.stack([x.labels, x.ids], -1), wave(B, T, 2)),
    {},
)
cases(
    "linear_divergence_loss",
    "",
    lambda f, x: f(x.hidden, x.head, x.labels, x.teacher),
    {"divergence": Divergence.reverse_kl(), "weights": {"divergence": wave(B, T), "logp": wave(B, T, phase=1.0)}},
)
cases(
    "linear_token_loss",
    "",
    lambda f, x: f(
        x.hidden, x.head, x.labels, lambda s, y, a: a * s.logp.exp() + s.entropy**2, token_inputs={"a": x.old}
    ),
    {"statistics": ("logp", "entropy")},
    {"statistics": ("logp", "entropy"), "options": THREE, "metrics": ("lse",)},
)
cases(
    "linear_token_loss",
    "of the largest",
    lambda f, x: f(x.hidden, x.head, x.labels, lambda s, y: s.selected_logps.square().sum(-1)),
    {"statistics": ("selected_logps",), "selected": Largest(3)},
)


# --- Functions of log-probabilities -----------------------------------------------------------------------------------
def of_tokens(f: Call, x: Inputs) -> Any:
    return f(x.logps, x.advantages, x.mask, old_logps=x.old, ref_logps=x.ref, sampling_logps=x.sampler)


KINDS = [f"{level}_{bound}" for level in ("token", "sequence", "geometric") for bound in ("truncate", "mask", "reject")]
cases("grpo_loss", "", of_tokens, *each("loss_type", "grpo", "gmpo", "dppo_kl", beta=0.3))
cases(
    "sampler_weights",
    "",
    lambda f, x: f(x.old, x.sampler, x.mask),
    *each("kind", *KINDS, low=0.8, high=1.2),
    {"normalize": True},
)
cases("sequence_logps", "", lambda f, x: f(x.logps, x.mask), *each("average", False, True))
cases("minillm_returns", "", lambda f, x: f(x.logps.where(x.mask, 0.0), x.mask), {}, {"gamma": 0.7})
cases("dpo_loss", "", lambda f, x: f(*x.logps[:, :2].t(), *x.ref[:, :2].t()), *each("loss_type", "sigmoid", "nca_pair"))
cases("orpo_loss", "", lambda f, x: f(*x.logps[:, :2].t()), {"beta": 0.3})
cases("kto_loss", "", lambda f, x: f(x.logps[0, :4], x.ref[0, :4], x.desirable), {"kl": 0.3})
for NAME in ("forward_kl", "reverse_kl", "jsd", "total_variation"):
    cases(NAME, "", lambda f, x: f((x.hidden @ x.weight.t()).log_softmax(-1), x.teacher_logps), {})
cases("k3", "", lambda f, x: f(x.logps - x.ref), {})


#: Cases whose results this version changed on purpose, and with what the earlier commit has the new ones.
CHANGED: dict[str, tuple[str, Call, dict[str, Any]]] = {
    # epsilon_high is 5.0 for cispo where it is not given, as in TRL; it was 0.2.
    "GRPO loss_type=cispo": ("GRPO", with_sampler, {"loss_type": "cispo", "epsilon_high": 5.0}),
    # A shift moves the labels' weights too.
    "CE with token weights shift=True": (
        "CE",
        lambda loss, x: loss(x.weight, x.hidden, x.labels, token_weights=(1 + wave(B, T)).roll(-1, 1)),
        {"shift": True},
    ),
    # Built without a reference, the loss ignores one that it is given; this was an error.
    "GRPO use_ref_model=False": ("GRPO", lambda loss, x: policy(loss, x, ref_per_token_logps=x.logps.detach()), {}),
}


def tensors_of(result: Any) -> list[Tensor]:
    """All tensors of a result, in any nesting."""
    if isinstance(result, Tensor):
        return [result]
    return [] if result is None else [tensor for part in result for tensor in tensors_of(part)]


def numbers_of(tensor: Tensor) -> list[float]:
    """The entries, or weighted sums of them."""
    values = tensor.detach().double().flatten()
    if len(values) > MOST:
        values = torch.stack([(values * wave(len(values), phase=float(p))).sum() for p in range(MOST)])
    return values.tolist()


def computed(loss: str, call: Call, options: dict[str, Any]) -> dict[str, list[list[float]]]:
    """The results of a case, and the gradients of a weighted sum of them."""
    torch.manual_seed(0)
    x = Inputs()
    if loss.startswith("linear_") or hasattr(functional, loss):
        function = getattr(liger_losses if loss.startswith("linear_") else functional, loss)
        result = call(lambda *a, **k: function(*a, **k, **options), x)
    else:
        result = call((getattr(losses, loss, None) or getattr(liger_losses, loss))(**options), x)
    values = tensors_of(result)
    found = {"values": [numbers_of(value) for value in values]}
    trained = [value for value in values if value.requires_grad]
    if trained:
        total = sum((value * wave(*value.shape, phase=1.5)).sum() for value in trained)
        gradients = torch.autograd.grad(total, list(x.leaves.values()), allow_unused=True)
        found |= {f"of {k}": [numbers_of(g)] for k, g in zip(x.leaves, gradients, strict=True) if g is not None}
    return found


def main(commit: str | None) -> None:
    if commit is None:
        results = {name: computed(*CHANGED.get(name, case)) for name, case in CASES.items()}
        print("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in results.items()) + "\n}")
        return
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["git", "archive", commit, "liger_losses"], cwd=root, check=True, capture_output=True)
        subprocess.run(["tar", "x"], cwd=folder, input=packed.stdout, check=True)
        command = [sys.executable, "-m", "tests.results.golden"]
        environment = os.environ | {"PYTHONPATH": str(root)}
        text = subprocess.run(
            command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
    FILE.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
