"""Every loss and operation: how each is built and called, and what the losses are, from whole logits.

A call gets a loss, the head, the head of another model (reference or teacher), and the tensors of a batch by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import liger_losses as ll
from tests.losses import BCO, CE, CPO, DPO, GRPO, JSD, KL, KTO, ORPO, TVD, AlphaBeta, Cosine, MiniLLM, ReverseKL, SimPO
from tests.reference import formula, kl, relative_error, tensors_of

ROWS, LENGTH, HIDDEN, VOCAB = 4, 6, 16, 30


def batch(dtype=torch.float64, rows=ROWS, length=LENGTH, hidden_size=HIDDEN, vocab_size=VOCAB, seed=0):
    g = torch.Generator().manual_seed(seed)

    def tensor(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    labels = torch.randint(vocab_size, (rows, length), generator=g)
    labels[torch.rand(rows, length, generator=g) < 0.3] = -100
    d = {
        "h": tensor(rows, length, hidden_size),
        "other": tensor(rows, length, hidden_size),
        "y": labels,
        "weight": tensor(vocab_size, hidden_size) / hidden_size**0.5,
        "bias": tensor(vocab_size) / 2,
        "ref_weight": tensor(vocab_size, hidden_size) / hidden_size**0.5,
    }
    return d | extras(labels, d["other"], d["ref_weight"], g)


def extras(labels: Tensor, other: Tensor, ref_weight: Tensor, g: torch.Generator) -> dict[str, Tensor]:
    """What losses get beside hidden states and heads, which needs no gradient."""
    vocab = len(ref_weight)
    columns = (labels.clamp(min=0)[..., None] + torch.tensor([0, 7, 19, 20])) % vocab
    teacher = (other.double() @ ref_weight.double().t()).log_softmax(-1).gather(-1, columns)
    return {
        "signs": torch.tensor([1.0, -0.5, 0.3, -1.0], dtype=torch.float32).repeat(len(labels) // 4 + 1)[: len(labels)],
        "logps": -3.4 + 0.2 * torch.randn(labels.shape, generator=g, dtype=torch.float32),
        "columns": columns,
        "top_logps": teacher.float().to(torch.promote_types(other.dtype, torch.float32)),
        "class_weight": (torch.linspace(64, 192, vocab).round() / 128).to(ref_weight.dtype),  # exact in every dtype
    }


# --- Calls ------------------------------------------------------------------------------------------------------------


def pairs(loss, head, ref, d):
    return loss(head, d["h"], d["y"], None, *((d["other"], ref) if loss.use_ref_model else ()))


def completions(loss, head, ref, d, start=0):
    """Those of the second group begin at a later position."""
    half = len(d["y"]) // 2
    parts = slice(half), (slice(half, None), slice(start, None))
    groups = [ll.Completions(*[d[name][part] for name in ("h", "y", "other")]) for part in parts]
    return loss(head, *groups, ref_weight=ref)


def marked(loss, head, ref, d):
    extra = {"kl": 0.3} if loss.loss_type == "kto" else {}
    if loss.use_ref_model:
        extra |= {"ref_input": d["other"], "ref_weight": ref}
    return loss(d["h"], head, d["y"], preference_labels=d["signs"] > 0, **extra)


def policy(loss, head, ref, d, **extra):
    extra |= {"ref_per_token_logps": d["logps"] * 1.1} if loss.beta else {}
    mask, ids = d["y"] >= 0, d["y"].clamp(min=0)
    return loss(d["h"], head, ids, mask, d["signs"], old_per_token_logps=d["logps"], **extra)


def policy_of_sampler(loss, head, ref, d):
    return policy(loss, head, ref, d, sampler_topk=ll.TeacherTopK(d["top_logps"], d["columns"]))


def policy_of_prompts(loss, head, ref, d):
    prompts = torch.arange(len(d["y"]), device=d["y"].device) // 2
    return policy(loss, head, ref, d, prompts=prompts, sampling_per_token_logps=d["logps"] * 0.9)


def taught(teacher_of):
    return lambda loss, head, ref, d: loss(head, d["h"], d["y"], teacher_of(ref, d))


distilled = taught(lambda ref, d: ll.Teacher(d["other"], ref))
from_smaller_teacher = taught(lambda ref, d: ll.Teacher(d["other"], d["ref_weight"][:25]))


def plain_call(loss, head, ref, d):
    return loss(head, d["h"], d["y"])


# --- What losses are --------------------------------------------------------------------------------------------------


class Plain:
    """Log-probabilities of a model and of another one, from whole logits; B sequences of T tokens."""

    def __init__(self, logits: Tensor, others: Tensor, d: dict[str, Tensor]) -> None:
        self.logits, self.others, self.d, self.mask = logits, others, d, d["y"] >= 0
        self.log_p, self.log_q = logits.log_softmax(-1), others.log_softmax(-1)
        self.logp, self.ref = map(self.of_labels, (self.log_p, self.log_q))
        self.lengths = self.mask.sum(1).clamp(min=1)

    def of_labels(self, log_probs: Tensor) -> Tensor:
        return log_probs.gather(-1, self.d["y"].clamp(min=0)[..., None])[..., 0].where(self.mask, 0.0)

    def mean(self, values: Tensor) -> Tensor:
        """Over all tokens with loss."""
        return values.where(self.mask, 0.0).sum() / self.mask.sum().clamp(min=1)

    @property
    def margin(self) -> Tensor:
        """Of the chosen completions' log-ratios over the rejected ones'."""
        chosen, rejected = (self.logp - self.ref).sum(1).chunk(2)
        return chosen - rejected

    @property
    def nll(self) -> Tensor:
        """Of the chosen completions' tokens."""
        half = len(self.logp) // 2
        return -self.logp[:half].sum() / self.mask[:half].sum().clamp(min=1)


def cross_entropy_with_options(p: Plain) -> Tensor:
    weights = p.d["class_weight"].to(p.logits.dtype)
    total = weights[p.d["y"].clamp(min=0)].where(p.mask, 0.0).sum()
    given = p.logits.flatten(0, 1), p.d["y"].flatten(), weights
    ce = F.cross_entropy(*given, reduction="sum", label_smoothing=0.1) / torch.where(total == 0, 1.0, total)
    return ce + 1e-2 * p.mean(p.logits.logsumexp(-1).square())


def by_entropy(p: Plain) -> Tensor:
    k = min(20, p.log_p.shape[-1])
    largest = p.log_p.detach().topk(k).values.log_softmax(-1)
    return p.mean((largest.exp() * largest).sum(-1) / math.log(k) * p.logp)


def orpo(p: Plain) -> Tensor:
    means = p.logp.sum(1) / p.lengths
    chosen, rejected = (means - torch.log(-torch.expm1(means))).chunk(2)
    return -0.1 * F.logsigmoid(chosen - rejected).mean() + p.nll


def clipped(p: Plain, log_ratio: Tensor) -> Tensor:
    ratio, advantages = log_ratio.exp(), p.d["signs"][:, None]
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def grpo(p: Plain) -> Tensor:
    gap = p.d["logps"] * 1.1 - p.logp
    return p.mean(clipped(p, p.logp - p.d["logps"]) + 0.1 * (gap.exp() - gap - 1))


def centered(p: Plain) -> Tensor:
    """Truncated importance sampling less its mean over the whole vocabulary: of columns that the sampler has not said,
    its probabilities are a multiple of the policy's."""
    said, at = p.d["top_logps"].to(p.log_p.dtype).exp(), p.d["columns"]
    p_said = p.log_p.detach().exp().gather(-1, at)
    rest = (1 - said.sum(-1, keepdim=True)) / (1 - p_said.sum(-1, keepdim=True))
    q = (p.log_p.detach().exp() * rest).scatter(-1, at, said)

    def objective(log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Tensor:
        weight = (log_p.detach() - log_q).exp().clamp(max=1.1)
        return weight * advantages * (1 + log_p - log_p.detach())

    a = p.d["signs"][:, None]
    return -p.mean(objective(p.logp, p.d["logps"], a) - (q * objective(p.log_p, q.log(), a[..., None])).sum(-1))


def near_sampler(p: Plain) -> Tensor:
    teacher, student = of_buckets(p)
    return p.mean(clipped(p, p.logp - p.d["logps"]) + 0.2 * kl(student, teacher))


def of_buckets(p: Plain) -> list[Tensor]:
    """The teacher's and the student's log-probabilities of columns, and of all others together."""
    both = p.d["top_logps"].to(p.log_p.dtype), p.log_p.gather(-1, p.d["columns"])
    return [torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True))], -1) for x in both]


def top_k(p: Plain) -> Tensor:
    return 0.5 * (p.mean(-p.logp) + p.mean(kl(*of_buckets(p))))


def renormalized(p: Plain) -> Tensor:
    student, teacher = (x.log_softmax(-1) for x in (p.log_p.gather(-1, p.d["columns"]), p.d["top_logps"]))
    return 0.5 * p.mean(kl(teacher.to(student.dtype), student))


def soft(name: str, temperature: float = 1.0, scale: float = 1.0) -> Callable[[Plain], Tensor]:
    def loss(p: Plain) -> Tensor:
        return 0.5 * (p.mean(-p.logp) + scale * p.mean(formula(name, p.logits / temperature, p.others / temperature)))

    return loss


def anchored(p: Plain) -> Tensor:
    """ASFT (arXiv:2509.23753): DFT and the divergence from another model, with weights of tokens."""
    return p.mean(p.d["logps"].exp() * (-p.logp.exp().detach() * p.logp + 0.1 * kl(p.log_q, p.log_p)))


def minillm(p: Plain) -> Tensor:
    reward = (p.ref - p.logp).detach()
    later, count = (x.flip(1).cumsum(1).flip(1) - x for x in (reward, p.mask.to(reward.dtype)))
    return p.mean(kl(p.log_p, p.log_q) - later / count.clamp(min=1) * p.logp)


class Loss(NamedTuple):
    """``build(**options)``, of the class weights first where it is ``weighted``; ``formula`` is the loss from whole
    logits."""

    build: Callable[..., Any]
    call: Callable[..., Any]
    formula: Callable[[Plain], Tensor] | None = None

    def __call__(self, head: ll.Head, ref: ll.Head, d: dict[str, Tensor], **options: Any) -> Any:
        return self.call(self.made(d, **options), head, ref, d)

    def made(self, d: dict[str, Tensor], **options: Any) -> Any:
        return self.build(d["class_weight"], **options) if self.build is weighted else self.build(**options)


def weighted(class_weight: Tensor, **options: Any) -> CE:
    flags = dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), True)
    return CE(class_weight, label_smoothing=0.1, lse_square_scale=1e-2, **flags, **options)


LOSSES = {
    "cross entropy": Loss(CE, plain_call, lambda p: p.mean(-p.logp)),
    "cross entropy, options": Loss(weighted, plain_call, cross_entropy_with_options),
    "cross entropy, per token": Loss(partial(CE, reduction="none"), plain_call, lambda p: -p.logp),
    "cross entropy, by entropy": Loss(partial(CE, token_scaling="entropy"), plain_call, by_entropy),
    "cross entropy, many heads": Loss(
        partial(CE, head_weights=[1.0, 0.5, 0.8], return_token_accuracy=True),
        lambda loss, head, ref, d: loss([head, ref, head], [d["h"], d["h"], d["h"] + d["other"]], d["y"]),
    ),
    "DPO": Loss(
        partial(DPO, beta=0.3, compute_nll_loss=True), pairs, lambda p: -F.logsigmoid(0.3 * p.margin).mean() + p.nll
    ),
    "DPO, several": Loss(partial(DPO, loss_type=["ipo", "sft"]), completions),
    "CPO": Loss(CPO, pairs),
    "SimPO": Loss(SimPO, pairs),
    "ORPO": Loss(ORPO, pairs, orpo),
    "KTO": Loss(partial(KTO, use_ref_model=True), marked),
    "BCO": Loss(BCO, marked),
    "GRPO": Loss(partial(GRPO, beta=0.1), policy, grpo),
    "GRPO, by items": Loss(
        partial(GRPO, beta=0.0, loss_type="dapo"),
        # The ranks of one head have one share of the items; processes with whole heads have one each.
        lambda loss, head, ref, d: policy(loss, head, ref, d, num_items_in_batch=40.0 / head.vocabulary_ranks),
    ),
    "GRPO, sequences": Loss(partial(GRPO, beta=0.0, importance_sampling_level="sequence"), policy),
    "GRPO, two passes": Loss(
        # A quantile between two tokens, however many processes have copies of them.
        partial(GRPO, beta=0.0, importance_sampling_level="sequence", top_entropy_quantile=0.3, entropy_coef=0.1),
        policy,
    ),
    "GRPO, kept columns": Loss(
        partial(GRPO, beta=0.0), lambda loss, head, ref, d: policy(loss, head, ref, d, support=support(d))
    ),
    **{
        f"GRPO, {name}": Loss(partial(GRPO, loss_type=name, max_completion_length=7), call)
        for name, call in (
            *((name, policy) for name in ("grpo", "bnpo", "dr_grpo", "luspo", "cispo", "vespo", "gmpo")),
            *((name, policy_of_prompts) for name in ("real", "icepop")),
        )
    },
    "GRPO, score centering": Loss(
        partial(GRPO, beta=0.0, loss_type="importance", delta=1.1, sampler_term="score_centering"),
        policy_of_sampler,
        centered,
    ),
    "GRPO, near the sampler": Loss(
        partial(GRPO, beta=0.0, sampler_term="reverse_kl", sampler_coef=0.2), policy_of_sampler, near_sampler
    ),
    "GRPO, off-policy mask": Loss(partial(GRPO, off_policy_mask_threshold=0.3), policy),
    "JSD": Loss(partial(JSD, beta=0.1, temperature=1.5), distilled, soft("JSD 0.1", 1.5)),
    "KL, anchored": Loss(
        partial(KL, weight_hard_loss=1.0, weight_soft_loss=0.1, token_scaling="probability"),
        lambda loss, head, ref, d: loss(
            head, d["h"], d["y"], ll.Teacher(d["other"], ref), token_weights=d["logps"].exp()
        ),
        anchored,
    ),
    "JSD, whole teacher": Loss(JSD, taught(lambda ref, d: ll.Teacher(d["other"], d["ref_weight"]))),
    "JSD, smaller teacher": Loss(partial(JSD, temperature=1.5), from_smaller_teacher),
    "soft loss of a smaller teacher": Loss(partial(JSD, weight_hard_loss=0.0), from_smaller_teacher),
    "KL": Loss(KL, distilled, soft("forward KL")),
    "KL, top-k": Loss(KL, taught(lambda ref, d: ll.TeacherTopK(d["top_logps"], d["columns"])), top_k),
    "KL, renormalized": Loss(
        partial(KL, weight_hard_loss=0.0),
        taught(lambda ref, d: ll.TeacherTopK(d["top_logps"], d["columns"], "renormalize")),
        renormalized,
    ),
    "KL, logits": Loss(
        KL, taught(lambda ref, d: ll.TeacherLogits(d["other"] @ d["ref_weight"].t())), soft("forward KL")
    ),
    "reverse KL": Loss(partial(ReverseKL, 0.5, 0.5), distilled, soft("reverse KL")),
    "TVD": Loss(TVD, distilled, soft("total variation")),
    "alpha-beta": Loss(partial(AlphaBeta, 0.2, 0.7), distilled, soft("alpha-beta 0.2 0.7")),
    "cosine": Loss(Cosine, distilled, soft("cosine", scale=0.5)),
    "mixture": Loss(partial(ll.DistillationLoss, ll.Divergence.mixture(0.2, 0.7, 0.6)), distilled),
    "MiniLLM": Loss(MiniLLM, distilled, minillm),
}


#: Losses that differ from another one by a formula alone, which has no part in how they are computed or compiled.
ALIKE = {
    *("DPO", "KTO", "CPO", "SimPO", "KL", "reverse KL", "TVD", "alpha-beta", "mixture", "JSD, whole teacher"),
    *(
        f"GRPO, {name}"
        for name in ("sequences", "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "vespo", "gmpo", "icepop")
    ),
    *("GRPO, off-policy mask", "soft loss of a smaller teacher", "GRPO, by items", "cross entropy, many heads"),
    "JSD, smaller teacher",
}


def of_statistics(statistics, labels, w):
    return -w * statistics.logp + 0.01 * statistics.lse.square()


def columns(d):
    """Some columns twice, and the label's among them."""
    return (d["y"].clamp(min=0)[..., None] + torch.tensor([0, 7, 7, 19], device=d["y"].device)) % VOCAB


def support(d, **options):
    """Kept columns: the label's among them, fewer of some tokens, none of others."""
    ids, labels = d["columns"].clone(), d["y"].clamp(min=0)
    ids[..., 2:] = ids[..., 2:].masked_fill((labels % 2 == 0)[..., None], -1)
    return ll.TokenSupport(ids.masked_fill((labels % 7 == 3)[..., None], -1), **options)


OPERATIONS = {
    "kept columns, sparse": lambda head, ref, d: ll.linear_logps(
        d["h"], head, d["y"], support=support(d, sparse_grad=True), shift=True
    ),
    "logps": lambda head, ref, d, **on: ll.linear_logps(
        d["h"], head, d["y"], entropy=True, lse=True, temperature=0.7, **on
    ),
    "statistics": lambda head, ref, d: ll.linear_statistics(
        d["h"], head, d["y"], ("logp", "entropy", "mean_logp", "log_sum_sq_probs"), metrics=("mean_logit", "argmax")
    ),
    "statistics of several": lambda head, ref, d: ll.linear_statistics(
        [d["h"], d["h"][:2] * 2], head, [d["y"], d["y"][:2]]
    ),
    "statistics of columns": lambda head, ref, d, **on: ll.linear_statistics(
        d["h"], head, d["y"], ("selected_logps", "logp"), selected=columns(d), options=ll.EngineOptions(**on)
    ),
    "largest, two passes": lambda head, ref, d: ll.linear_topk(
        d["h"], head, 5, d["y"], options=ll.EngineOptions(chunk_size=5, compact=False)
    ),
    "not compact": lambda head, ref, d: ll.linear_logps(d["h"], head, d["y"], compact=False, shift=True),
    "divergence": lambda head, ref, d: ll.linear_divergence(
        d["h"], head, d["y"], ll.Teacher(d["other"], ref), ll.Divergence.reverse_kl(), logp=True, temperature=1.5
    ),
    "divergence loss": lambda head, ref, d: ll.linear_divergence_loss(
        d["h"],
        head,
        d["y"],
        ll.Teacher(d["other"], ref),
        ll.Divergence.reverse_kl(),
        {"divergence": d["logps"].abs(), "logp": -d["logps"].exp()},
        metrics=("entropy",),
        options=ll.EngineOptions(chunk_size=5),
    ),
    "token loss": lambda head, ref, d: ll.linear_token_loss(
        d["h"], head, d["y"], of_statistics, ("logp", "lse"), token_inputs={"w": d["logps"].abs()}
    ),
    "token loss, teacher": lambda head, ref, d: ll.linear_token_loss(
        d["h"],
        head,
        d["y"],
        lambda s, labels, w: w * s.logp + s.logp.detach().exp() * s.divergence,
        ("logp", "divergence"),
        metrics=("entropy",),
        token_inputs={"w": d["logps"].abs()},
        teacher=ll.Teacher(d["other"], ref),
        divergence=ll.Divergence.reverse_kl(),
        temperature=1.5,
    ),
    "logps of many heads": lambda head, ref, d: ll.linear_logps(d["h"], [head, ref, head], d["y"], shift=[1, 2, 3]),
}


def case_of(name):
    return OPERATIONS[name] if name in OPERATIONS else LOSSES[name]


@dataclass(frozen=True)
class Variant:
    """What the head is like."""

    bias: bool = False
    frozen: bool = False
    transform: ll.LogitTransform = ll.LogitTransform()


VARIANTS = {
    "plain": Variant(),
    "frozen": Variant(frozen=True),
    "bias": Variant(bias=True),
    "soft-cap and scale": Variant(bias=True, transform=ll.LogitTransform(logit_scale=1.3, softcap=2.0)),
}


@dataclass(frozen=True)
class Part:
    """This rank's rows of a vocabulary."""

    group: dist.ProcessGroup
    rows: slice

    @classmethod
    def of(cls, group, sizes):
        start = sum(sizes[: dist.get_rank(group)])
        return cls(group, slice(start, start + sizes[dist.get_rank(group)]))


def gradients(result, leaves, scale=1.0, **options):
    """Of a sum of all results in which no two entries of one count alike. (Zeros are as good as none.)"""
    outputs = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    weights = [(scale * torch.arange(o.numel(), dtype=torch.float64).cos()).view(o.shape).to(o) for o in outputs]
    found = torch.autograd.grad(outputs, leaves, weights, allow_unused=True, **options)
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(dense, leaves, strict=True)]


def run(call, d, variant, part=None):
    """Results, and gradients of hidden states, weight and bias, of a whole head or of one that is shared."""
    rows, group = (slice(None), None) if part is None else (part.rows, part.group)
    hidden = d["h"].clone().requires_grad_()
    weight = d["weight"][rows].clone().requires_grad_(not variant.frozen)
    bias = d["bias"][rows].clone().requires_grad_(not variant.frozen) if variant.bias else None
    head = ll.Head(weight, bias, variant.transform, group)
    ref = ll.Head(d["ref_weight"][rows], None, variant.transform, group)
    found = tensors_of(call(head, ref, {**d, "h": hidden}))
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None and leaf.requires_grad]
    grads, again = gradients(found, leaves, retain_graph=True), gradients(found, leaves)
    for first, second in zip(grads, again, strict=True):
        # A second backward computes again what the first one had in memory.
        assert relative_error(first, second) < (1e-6 if hidden.dtype == torch.float64 else 2e-2)
    return found, grads


def compare(call, d, variant, part):
    found, grads = run(call, d, variant, part)
    expected, expected_grads = run(call, d, variant)
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a, b, msg=lambda m, i=i: f"result {i}: {m}")
        assert a.requires_grad == b.requires_grad
    for name, a, b in zip(("hidden states", "weight", "bias"), grads, expected_grads, strict=False):
        torch.testing.assert_close(a, b if name == "hidden states" else b[part.rows], msg=lambda m, n=name: f"{n}: {m}")
