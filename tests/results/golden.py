"""Losses with gradients in float64, as an earlier commit computed them: ``golden.json``.

``python -m tests.results.golden COMMIT`` writes this file anew, from the package of that commit (23dcacfe so far; for
``grpo_loss`` one whose weights are of float64). Of every tensor there are its entries, or :data:`MOST` sums of them
with different weights.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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
#: The inputs that get a gradient.
LEAVES = ("hidden", "weight", "bias", "logps")


def wave(*shape: int, phase: float = 0.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers in [-1, 1] that look random, and are the same with every version of torch."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(i * i * 0.31 + i + phase).view(shape).to(dtype)


class Tenths(liger_losses.QuantizedWeight):
    """Rows of whole tenths."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__((len(weight), weight.shape[1]), torch.float64, weight.device)
        self.codes = (weight.detach() * 10).round()

    def rows(self, start: int, stop: int) -> Tensor:
        return self.codes[start:stop] / 10


def inputs(dtype: torch.dtype = torch.float64, size: float = 1.0, gap: float = 1.0, masked: bool = False) -> Any:
    """What calls are made of, by name: hidden states times ``size``, logarithms of ratios times ``gap``, some or all
    tokens masked. Numbers of a masked token are NaN, which must reach no result."""

    drawn = functools.partial(wave, dtype=dtype)

    def of_tokens(values: Tensor) -> Tensor:
        return values.masked_fill(~x.mask, torch.nan)

    x = SimpleNamespace(hidden=1.5 * size * drawn(B, T, H), weight=1.2 * drawn(V, H, phase=1.0))
    x.bias = 0.3 * drawn(V, phase=2.0)
    x.labels = (torch.arange(B * T) * 7 % V).view(B, T)
    for row, places in ((0, [0]), (1, [3, 4]), (3, [0, 1, 4])):
        x.labels[row, places] = -100
    x.labels = x.labels.masked_fill(torch.tensor(masked), -100)
    x.mask, x.ids = x.labels != -100, x.labels.clamp(min=0)
    x.logps = (x.hidden @ x.weight.t() + x.bias).log_softmax(-1).gather(-1, x.ids[..., None])[..., 0]
    old, ref = x.logps + 0.4 * gap * drawn(B, T, phase=3.0), x.logps + 0.6 * gap * drawn(B, T, phase=4.0)
    x.old, x.ref, x.sampler = map(of_tokens, (old, ref, old + 0.3 * gap * drawn(B, T, phase=5.0)))
    for leaf in LEAVES:
        getattr(x, leaf).requires_grad_()
    x.ref_hidden, x.ref_weight = 1.5 * drawn(B, T, H, phase=6.0), 1.2 * drawn(V, H, phase=7.0)
    x.advantages, x.token_advantages = torch.tensor([1.2, -0.7, 0.4, -1.1], dtype=dtype), of_tokens(drawn(B, T))
    x.desirable, x.prompts = torch.tensor([True, False, False, True]), torch.tensor([0, 1, 0, 1])
    x.of_both_signs = torch.tensor([0, 0, 1, 0])  # prompts; the second one's advantages have one sign
    x.some = x.mask & (torch.arange(B) < 3)[:, None]  # the last completion has no tokens
    x.token_weights, x.of_each = 1 + drawn(B, T), 1 + drawn(B)
    x.shifted_weights = x.token_weights.roll(-1, 1)
    x.weight_lists = [x.token_weights, x.shifted_weights]
    x.temperature, x.other_labels = of_tokens(1.0 + 0.3 * drawn(B, T, phase=8.0)), x.labels.roll(1, 1)
    x.two_labels, x.label_weights = torch.stack([x.labels, x.ids], -1), drawn(B, T, 2)
    x.head, x.quantized = liger_losses.Head(x.weight, x.bias), Tenths(x.weight)
    x.heads, x.biases = [x.weight, 0.5 * x.weight], [x.bias, None]
    x.states, x.label_lists = [x.hidden, 0.5 * x.hidden[:2]], [x.labels, x.labels[2:]]
    x.columns = (x.ids[..., None] + torch.tensor([0, 2, 2])) % V
    x.kept = liger_losses.TokenSupport((x.ids[..., None] + torch.arange(4)) % V)
    sums = x.ref.where(x.mask, 0.0).sum(1).detach()  # of completions; they have several lengths
    x.first = Completions(x.hidden[:2], x.labels[:2], ref_logps=sums[:2])
    x.second = Completions(x.hidden[2:, :4], x.labels[2:, :4], ref_logps=sums[2:])
    x.others, x.likely = (Completions(x.hidden.flip(0), x.labels, ref_logps=ref) for ref in (sums, 0 * sums))
    x.ref_chosen, x.ref_rejected, x.kl = ref[:2].sum(1), x.ref[2:], 0.3 + 0.3 * drawn(B)
    x.pairs, x.ref_pairs = x.logps[:, :2].unbind(1), ref[:, :2].unbind(1)
    x.teacher_hidden = 1.5 * drawn(B, T, H_TEACHER, phase=9.0)
    x.teacher_weight = 1.2 * drawn(V, H_TEACHER, phase=10.0)
    x.teacher = Teacher(x.teacher_hidden, x.teacher_weight)
    x.capped = Teacher(x.teacher_hidden, x.teacher_weight, logit_scale=1.1, softcap=2.0)
    x.narrower = Teacher(x.teacher_hidden, x.teacher_weight[: V - 2], columns_correspond=True)
    x.log_p = (x.hidden @ x.weight.t()).log_softmax(-1)
    x.log_q = (x.teacher_hidden @ x.teacher_weight.t()).log_softmax(-1)
    x.teacher_logits = liger_losses.TeacherLogits(2 * x.log_q)
    x.teachers = liger_losses.Teachers([x.teacher, Teacher(x.ref_hidden, x.ref_weight)], x.ids % 2)
    top, ids = x.log_q.topk(3)
    rest = (-torch.expm1(top.logsumexp(-1))).log()
    x.bucket, x.renormalized, x.no_tail = (
        liger_losses.TeacherTopK(top, ids, tail, rest) for tail in ("bucket", "renormalize", "none")
    )
    x.unknown_rest = liger_losses.TeacherTopK(top, ids)
    x.token_loss = lambda s, y, a: a * s.logp.exp() + s.entropy**2
    x.token_inputs, x.squares = {"a": x.old.detach()}, lambda s, y: s.selected_logps.square().sum(-1)
    return x


class Case(NamedTuple):
    """A call of a loss (of :mod:`tests.losses`) or a function: names of :func:`inputs`, also ``keyword=name``; and
    options."""

    loss: str
    call: str
    options: dict[str, Any]

    def __str__(self) -> str:
        plain = (str, float, int, tuple, list)
        words = [f"{k}={v if isinstance(v, plain) else type(v).__name__}" for k, v in self.options.items()]
        return f"{self.loss} {', '.join(words)} of {self.call}"

    def result(self, x: Any) -> Any:
        positional, keywords = [], {}
        for word in self.call.split():
            name, _, value = word.rpartition("=")
            known = getattr(x, value) if hasattr(x, value) else ast.literal_eval(value)
            if name:
                keywords[name] = known
            else:
                positional += known if isinstance(known, tuple) else [known]
        if self.loss.startswith("linear_"):
            return getattr(liger_losses, self.loss)(*positional, **keywords, **self.options)
        if hasattr(functional, self.loss):
            return getattr(functional, self.loss)(*positional, **keywords, **self.options)
        kind = getattr(losses, self.loss, None) or getattr(liger_losses, self.loss)
        return kind(**self.options)(*positional, **keywords)


CASES: dict[str, Case] = {}


def cases(loss: str, call: str, *options: dict[str, Any]) -> None:
    for each in options:
        assert str(Case(loss, call, each)) not in CASES, (loss, call, each)
        CASES[str(Case(loss, call, each))] = Case(loss, call, each)


def every(option: str, *values: Any, **others: Any) -> list[dict[str, Any]]:
    return [{option: value, **others} for value in values]


# --- Cross-entropy ----------------------------------------------------------------------------------------------------
PLAIN = "weight hidden labels bias"
ALL = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
Z, SMOOTHED, CLASSES, NONE = (
    {"lse_square_scale": 0.1},
    {"label_smoothing": 0.2},
    {"ce_weight": 1 + 0.5 * wave(V)},
    {"reduction": "none"},
)
cases("CE", PLAIN, {}, Z, SMOOTHED, CLASSES, NONE, CLASSES | Z, SMOOTHED | Z | ALL, NONE | ALL, {"reduction": "sum"})
cases("CE", PLAIN, CLASSES | SMOOTHED, CLASSES | SMOOTHED | {"reduction": "sum"}, {"label_smoothing": 1.0})
cases("CE", PLAIN, *every("shift", True, 2), {"shift": 2} | NONE, {"softcap": 3.0}, {"use_token_scaling": True})
cases("CE", PLAIN, {"logit_scale": 0.7, "temperature": 1.4, "softcap": 2.0}, *every("compact", False))
cases("CE", PLAIN, *every("chunk_size", 3), {"chunk_size": 2} | Z | SMOOTHED, {"chunk_size": 3, "compact": False})
cases("CE", "weight hidden labels num_items_in_batch=9", {}, Z)
cases("CE", "weight hidden labels token_weights=token_weights", {}, NONE, CLASSES, *every("shift", True))
cases("CE", "weight hidden labels token_weights=token_weights", *every("use_token_scaling", True))
SCALED = {"use_token_scaling": True}
cases("CE", PLAIN, SCALED | Z, SCALED | CLASSES, SCALED | NONE, SCALED | Z | {"reduction": "sum", "chunk_size": 3})
cases("CE", "heads hidden labels bias=biases", {}, NONE, {"shift": [1, 2]} | Z, {"head_weights": [0.5, 2.0]} | ALL)
cases("CE", "heads hidden labels bias=biases", *every("head_weights", [1.0, 0.0]))
cases("CE", "heads hidden labels bias=biases num_items_in_batch=[9,5]", {})
cases("CE", "heads hidden labels bias=biases token_weights=weight_lists", {})
cases("CE", "head states label_lists", {}, SMOOTHED | {"chunk_size": 4})
cases("CE", "quantized hidden labels bias", {}, Z)
cases("CE", "head hidden ids", *every("ignore_index", 3))

# --- Pairs ------------------------------------------------------------------------------------------------------------
DPO = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "nca_pair", "robust", "bco_pair", "sppo_hard")
DPO += ("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft")
F_DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
STATES = f"{PLAIN} ref_input=ref_hidden ref_weight=ref_weight"
cases("DPO", STATES, *every("loss_type", *DPO), {"loss_type": "exo_pair", "label_smoothing": 0.1})
cases("DPO", STATES, *every("loss_type", "sigmoid", "sigmoid_norm", "robust", "aot", label_smoothing=0.2, beta=0.4))
cases("DPO", STATES, *every("f_divergence_type", *F_DIVERGENCES, f_alpha_divergence_coef=0.5))
cases("DPO", STATES, *every("f_divergence_type", *F_DIVERGENCES, loss_type="ipo", f_alpha_divergence_coef=1.5))
cases("DPO", STATES, {"loss_type": ["sigmoid", "hinge", "sft"], "loss_weights": [0.5, 1.5, 0.2]}, {"ld_alpha": 0.5})
cases("DPO", STATES, {"use_weighting": True}, {"use_weighting": True, "loss_type": "apo_down", "ld_alpha": 0.2})
cases("DPO", STATES, {"compute_nll_loss": True, "alpha": 0.3}, {"average_log_prob": True}, *every("shift", True))
cases("DPO", STATES, {"temperature": 0.8, "softcap": 3.0}, *every("discopop_tau", 0.3, loss_type="discopop"))
cases("DPO", STATES, *every("f_alpha_divergence_coef", 1.0, f_divergence_type="alpha_divergence"))
cases("DPO", STATES, *every("chunk_size", 3), *every("compact", False))
cases("DPO", "weight hidden labels ref_chosen_logps=ref_chosen ref_rejected_logps=ref_rejected", {"beta": 0.5})
cases("DPO", PLAIN, *every("use_ref_model", False))
cases("DPO", "head first second", {}, {"ld_alpha": 0.5}, {"compute_nll_loss": True, "shift": True})
cases("DPO", f"{STATES} temperature=temperature", {}, *every("use_weighting", True))
cases("DPO", f"{PLAIN} nll_target=other_labels", {"compute_nll_loss": True, "use_ref_model": False})
cases("CPO", PLAIN, *every("loss_type", "sigmoid", "hinge", "ipo", "simpo"), {"label_smoothing": 0.2, "alpha": 0.4})
cases("CPO", PLAIN, {"beta": 0.3}, {"loss_type": "simpo", "gamma": 0.7})
cases("CPO", PLAIN, {"loss_type": "alphapo", "reward_alpha": 0.25}, {"compute_nll_loss": False})
cases("SimPO", PLAIN, {}, {"gamma": 1.5, "beta": 2.0}, {"label_smoothing": 0.1, "compute_nll_loss": False})
cases("ORPO", PLAIN, {}, {"beta": 0.5, "alpha": 0.2}, {"average_log_prob": False}, {"compute_nll_loss": False})

# --- Single completions -----------------------------------------------------------------------------------------------
ONES = "hidden weight labels bias desirable ref_hidden ref_weight"
WITH = {"use_ref_model": True}
cases("KTO", f"{ONES} kl=0.7", WITH, {**WITH, "beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 0.3})
cases("KTO", f"{ONES} kl=0.7", {**WITH, "average_log_prob": True}, {**WITH, "shift": True, "chunk_size": 2})
cases("KTO", "hidden weight labels bias desirable kl=0.7", {})
for MORE in ("kl=kl", "kl=0.2 sample_weights=of_each", "kl=0.2 temperature=temperature"):
    cases("KTO", f"{ONES} {MORE}", WITH)
for MORE in ("others", "likely"):
    cases("KTO", f"head first second kl_completions={MORE}", WITH)
cases("KTO", ONES, {"loss_type": "apo_zero_unpaired", **WITH, "beta": 0.4})
cases("BCO", ONES, {}, {"beta": 0.6, "undesirable_weight": 0.5}, {"average_log_prob": True}, {"softcap": 2.0})
cases("BCO", "head first second", {})

# --- Policies ---------------------------------------------------------------------------------------------------------
TOKENS = "hidden weight ids mask advantages bias old_per_token_logps=old"
POLICY = f"{TOKENS} ref_per_token_logps=ref"
SAMPLED = f"{POLICY} sampling_per_token_logps=sampler prompts=prompts"
LOSS_TYPES = ("grpo", "bnpo", "dapo", "sapo", "luspo", "vespo", "ppo", "reinforce", "dual_clip", "importance")
LOSS_TYPES += ("dppo_tv", "dppo_kl", "prime_ipo", "icepop", "kpop", "fipo", "real", "clip_cov", "kl_cov")
LOSS_TYPES += ("gmpo", "cispo")
LEVELS = ("sequence", "sequence_token", "sequence_sum", "geometric")
NORMALIZERS = ("sequence_mean", "sequence_sum", "token_mean", "items", "prompt_mean")
cases("GRPO", SAMPLED, *every("loss_type", *LOSS_TYPES), {"loss_type": "dr_grpo", "max_completion_length": 8})
cases("GRPO", SAMPLED, *every("loss_type", "clip_cov", "kl_cov", cov_share=0.3, cov_low=-1.0, beta=0.0))
cases("GRPO", SAMPLED, {"loss_type": "dro", "log_ratio_penalty": 0.5}, {"log_ratio_penalty": 0.3}, {"delta": 1.1})
cases("GRPO", SAMPLED, {"loss_type": "cispo", "epsilon_high": 0.3, "cispo_low": 0.8}, {"beta": 0.0})
cases("GRPO", SAMPLED, {"loss_type": "fipo", "fipo_half_life": 2.0, "fipo_safe_ratio": 1.1, "delta": 1.3})
cases("GRPO", SAMPLED, {"loss_type": "vespo", "vespo_k_neg": 1.0, "vespo_lambda_pos": 1.0})
cases("GRPO", SAMPLED, {"loss_type": "vespo", "vespo_k_pos": 1.0}, {"loss_type": "vespo", "vespo_lambda_neg": 1.0})
cases("GRPO", SAMPLED, *every("sapo_temperature_neg", 2.0, loss_type="sapo"))
cases("GRPO", SAMPLED, *every("cov_penalty", 0.7, loss_type="kl_cov", cov_share=0.3, cov_low=-1.0, beta=0.0))
cases(
    "GRPO", SAMPLED, {"loss_type": "real", "real_temperature": 0.2}, {"loss_type": "sapo", "sapo_temperature_pos": 2.0}
)
cases("GRPO", SAMPLED, {"loss_type": "dppo_tv", "mask_low": 0.01, "mask_high": 0.02, "delta": 1.4})
cases("GRPO", SAMPLED, {"loss_type": "dppo_kl", "mask_low": 0.005, "mask_high": 0.006})
cases("GRPO", SAMPLED, {"loss_type": "prime_ipo", "mask_high": 0.02, "log_ratio_penalty": 0.2})
cases("GRPO", SAMPLED, {"loss_type": "icepop", "mask_low": 0.8, "mask_high": 1.3})
cases("GRPO", SAMPLED, *every("mask_high", 0.001, loss_type="kpop"))
cases("GRPO", SAMPLED, *every("delta", 1.3, loss_type="dual_clip"), *every("delta", 1.1, loss_type="importance"))
BOTH = f"{POLICY} prompts=of_both_signs"
cases("GRPO", BOTH, *every("loss_type", "real"), *every("real_temperature", 0.2, loss_type="real"))
cases("GRPO", BOTH, *every("normalizer", "prompt_mean"))
SOME = "hidden weight ids some advantages old_per_token_logps=old prompts=of_both_signs"
cases(
    "GRPO", SOME, *every("loss_type", "real", "grpo", "luspo", beta=0.0), *every("normalizer", "prompt_mean", beta=0.0)
)
cases("GRPO", SAMPLED, *every("importance_sampling_level", *LEVELS, loss_type="grpo"))
cases("GRPO", SAMPLED, *every("importance_sampling_level", *LEVELS, beta=0.5, use_bias_correction_kl=True))
cases("GRPO", SAMPLED, *every("kl_estimator", "k1", "k2", "k3", "abs", "k1+", "k3+", beta=0.7))
cases("GRPO", SAMPLED, *every("kl_estimator", "k1", "k2", "k3", "k3+", beta=0.7, use_bias_correction_kl=True))
cases("GRPO", SAMPLED, *every("normalizer", *NORMALIZERS, epsilon_low=0.1))
cases("GRPO", SAMPLED, *every("token_mask", "tv", "kl", "change", "ratio", "icepop", "kpop", mask_high=0.05))
cases("GRPO", SAMPLED, *every("token_mask", "tv", "kl", "ratio", "icepop", mask_low=0.9, mask_high=1.1))
cases("GRPO", SAMPLED, *every("off_policy_mask_threshold", -0.5, 0.0, 0.2, loss_type="grpo"))
cases("GRPO", SAMPLED, *every("top_entropy_quantile", 0.5), *every("entropy_coef", 0.1, top_entropy_quantile=0.4))
cases("GRPO", SAMPLED, {"entropy_coef": 0.1}, {"entropy_coef": 0.2, "loss_type": "vespo"}, {"compact": False})
cases("GRPO", SAMPLED, {"temperature": 0.7, "softcap": 4.0}, *every("chunk_size", 3), {"use_ref_model": False})
cases("GRPO", SAMPLED, {"chunk_size": 3, "importance_sampling_level": "sequence"})
cases("GRPO", f"{POLICY} vllm_is_ratio=token_weights num_items_in_batch=20", {})
cases("GRPO", f"{POLICY} vllm_is_ratio=of_each", {}, {"loss_type": "vespo"})
cases("GRPO", f"{POLICY} temperature=temperature", {}, {"entropy_coef": 0.1})
cases("GRPO", f"{POLICY} support=kept", {}, {"entropy_coef": 0.1}, {"loss_type": "vespo", "chunk_size": 3})
OF_STATES = f"{TOKENS} ref_input=ref_hidden ref_weight=ref_weight"
cases("GRPO", OF_STATES, {"beta": 0.5}, {"beta": 0.5, "importance_sampling_level": "sequence"})
OF_TOKENS = "hidden head ids mask token_advantages old_per_token_logps=old"
cases("GRPO", OF_TOKENS, *every("loss_type", "dapo", "reinforce", beta=0.0))
cases("GRPO", OF_TOKENS, *every("fipo_safe_ratio", 0.9, loss_type="fipo", beta=0.0))
cases("GRPO", "hidden weight ids mask advantages", {"beta": 0.0})

# --- Distillation -----------------------------------------------------------------------------------------------------
TAUGHT, TEACHERS = "weight hidden labels teacher bias=bias", {"top_k": 3, "top_k_of": "teacher"}
LAST = {"top_k": 4, "top_k_of": "teacher", "tail": "renormalize"}
SQUARED = {"temperature": 2.0, "temperature_squared": True, "weight_hard_loss": 0.0}
for NAME in ("KL", "ReverseKL", "JSD", "TVD", "Cosine"):
    cases(NAME, TAUGHT, {}, SQUARED, {"weight_hard_loss": 1.0, "weight_soft_loss": 0.2, "softcap": 3.0})
    cases(NAME, TAUGHT, {"chunk_size": 3}, {"chunk_size": 3, "compact": False})
for NAME in ("KL", "ReverseKL", "JSD", "TVD"):
    cases(NAME, TAUGHT, {"top_k": 3}, LAST, *every("tail", "renormalize", "none", top_k=3), TEACHERS)
    cases(NAME, "weight hidden labels bucket bias=bias", {}, {"temperature": 2.0})
    cases(NAME, "weight hidden labels unknown_rest bias=bias", {})
    cases(NAME, "weight hidden labels renormalized bias=bias", {})
    cases(NAME, "weight hidden labels no_tail bias=bias", {"weight_hard_loss": 0.0})
cases("AlphaBeta", TAUGHT, *every("alpha", 0.2, 0.5, beta=0.7), {"alpha": 0.3}, *every("beta", 0.5, alpha=0.0))
cases("AlphaBeta", TAUGHT, {"alpha": 1.0, "beta": 1.0}, {"alpha": 0.5, "beta": 0.0}, *every("alpha", 0.0, 1.0))
cases("ReverseKL", TAUGHT, *every("temperature", 2.0, top_k=3, weight_hard_loss=0.25))
cases("KL", TAUGHT, {"skew": 0.3}, {"entry_limit": 0.05}, {"shift": True})
cases("ReverseKL", TAUGHT, {"skew": 0.3}, {"entry_limit": 0.05}, {"chunk_size": 2, "temperature": 3.0})
cases("JSD", TAUGHT, *every("beta", 0.0, 0.1, 1.0), {"beta": 0.3, "convention": "interpolated"})
cases("KL", "head hidden ids teacher", {"ignore_index": 3})
cases("KL", "head hidden labels teacher_logits", {})
cases("KL", "head hidden labels teacher num_items_in_batch=9", {})
cases("JSD", "head hidden labels teacher temperature=temperature", {}, {"temperature_squared": True})
cases("Cosine", TAUGHT, *every("beta", 0.7))
cases("JSD", "head hidden labels narrower", {})
cases("JSD", "head hidden labels capped", {}, SQUARED | {"softcap": 3.0, "logit_scale": 0.7})
cases("JSD", "hidden weight teacher_hidden teacher_weight labels bias", {}, {"return_soft_hard_loss": True})
cases("ReverseKL", "head hidden labels teachers", {})
cases("DistillationLoss", TAUGHT, *every("divergence", Divergence.kl_by_entropy(1.0)))
cases("MiniLLM", TAUGHT, {}, {"gamma": 0.5}, {"length_normalization": False}, {"single_step": False})
cases("MiniLLM", f"{TAUGHT} old_logps=old", {})

# --- Operations -------------------------------------------------------------------------------------------------------
STATISTICS = ("logp", "entropy", "lse", "mean_logp", "log_sum_sq_probs", "mean_logit")
ASKED, THREE = {"statistics": STATISTICS}, {"options": EngineOptions(chunk_size=3)}
OF_ROWS = "hidden weight labels bias=bias"
cases("linear_statistics", OF_ROWS, ASKED, ASKED | THREE, ASKED | {"class_weight": 1 + wave(V)})
cases("linear_statistics", OF_ROWS, ASKED | {"transform": LogitTransform(0.7, 1.3, 2.0)})
cases("linear_statistics", OF_ROWS, *every("statistics", *STATISTICS, metrics=("argmax", "entropy")))
cases(
    "linear_statistics", "hidden head labels selected=columns", {}, *every("statistics", ("selected_logps", "entropy"))
)
cases("linear_statistics", "hidden head labels selected=columns", {"statistics": ("selected_logps",)} | THREE)
cases("linear_logps", "hidden weight labels", {}, {"entropy": True, "lse": True, "shift": True})
cases("linear_logps", "hidden head labels support=kept", {}, {"entropy": True, "lse": True}, {"temperature": 0.5})
cases("linear_logps", "hidden head two_labels", {}, {"entropy": True})
cases("linear_topk", "hidden weight 3 bias=bias", {}, {"rest": True})
cases("linear_labels_loss", "hidden head two_labels label_weights", {})
cases("linear_divergence", "hidden head labels teacher", {"divergence": Divergence.total_variation(), "logp": True})
OF_BOTH = {"weights": {"divergence": wave(B, T), "logp": wave(B, T, phase=1.0)}}
cases("linear_divergence_loss", "hidden head labels teacher", {"divergence": Divergence.reverse_kl()} | OF_BOTH)
OF_TWO = {"statistics": ("logp", "entropy")}
cases("linear_token_loss", "hidden head labels token_loss token_inputs=token_inputs", OF_TWO, OF_TWO | THREE)
cases("linear_token_loss", "hidden head labels squares", {"statistics": ("selected_logps",), "selected": Largest(3)})

# --- Functions of log-probabilities -----------------------------------------------------------------------------------
KINDS = [f"{level}_{bound}" for level in ("token", "sequence", "geometric") for bound in ("truncate", "mask", "reject")]
OF_LOGPS = "logps advantages mask old_logps=old ref_logps=ref sampling_logps=sampler"
cases("grpo_loss", OF_LOGPS, *every("loss_type", "grpo", "gmpo", "dppo_kl", beta=0.3))
cases("grpo_loss", f"{OF_LOGPS} prompts=of_both_signs", *every("loss_type", *LOSS_TYPES[:-1], beta=0.0))
cases("sampler_weights", "old sampler mask", *every("kind", *KINDS, low=0.8, high=1.2), {"normalize": True})
cases("sequence_logps", "logps mask", *every("average", False, True))
cases("minillm_returns", "logps mask", {}, {"gamma": 0.7})
cases("dpo_loss", "pairs ref_pairs", *every("loss_type", "sigmoid", "nca_pair"))
cases("orpo_loss", "pairs", {"beta": 0.3})
for NAME in ("forward_kl", "reverse_kl", "jsd", "total_variation"):
    cases(NAME, "log_p log_q", {})


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


def computed(case: Case, **changed: Any) -> dict[str, list[list[float]]]:
    """The results of a case, and the gradients of a weighted sum of them."""
    x = inputs(**changed)
    values = tensors_of(case.result(x))
    found, trained = {"values": [*map(numbers_of, values)]}, [value for value in values if value.requires_grad]
    if trained:
        total = sum((value * wave(*value.shape, phase=1.5)).sum() for value in trained)
        gradients = torch.autograd.grad(total, [getattr(x, leaf) for leaf in LEAVES], allow_unused=True)
        found |= {f"of {leaf}": [numbers_of(g)] for leaf, g in zip(LEAVES, gradients, strict=True) if g is not None}
    return found


def main(commit: str | None) -> None:
    if commit is None:
        lines = [f"{json.dumps(name)}: {json.dumps(computed(case))}" for name, case in CASES.items()]
        print("{\n" + ",\n".join(lines) + "\n}")
        return
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["git", "archive", commit, "liger_losses"], cwd=root, check=True, capture_output=True)
        subprocess.run(["tar", "x"], cwd=folder, input=packed.stdout, check=True)
        command, paths = [sys.executable, "-m", "tests.results.golden"], os.environ | {"PYTHONPATH": str(root)}
        written = subprocess.run(command, cwd=folder, env=paths, check=True, stdout=subprocess.PIPE, text=True)
    FILE.write_text(written.stdout)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
