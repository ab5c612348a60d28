"""Every loss and operation on a head whose vocabulary processes share, and on the whole head."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from liger_losses import (
    Completions,
    DistillationLoss,
    Divergence,
    EngineOptions,
    Head,
    LogitTransform,
    Teacher,
    TeacherLogits,
    TeacherTopK,
    TokenSupport,
    linear_divergence,
    linear_divergence_loss,
    linear_logps,
    linear_statistics,
    linear_token_loss,
    linear_topk,
)
from tests.losses import BCO, CE, CPO, DPO, GRPO, JSD, KL, KTO, ORPO, TVD, AlphaBeta, Cosine, MiniLLM, ReverseKL, SimPO
from tests.processes import case_named
from tests.reference import relative_error, tensors_of

WORLD, ROWS, LENGTH, HIDDEN, VOCAB = 4, 4, 6, 16, 30
#: How many rows each rank of a group has.
CUTS = {"two even": (15, 15), "two uneven": (23, 7), "four": (9, 1, 12, 8)}


def batch(dtype=torch.float64, rows=ROWS, length=LENGTH, hidden_size=HIDDEN, vocab_size=VOCAB, seed=0):
    g = torch.Generator().manual_seed(seed)

    def tensor(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64, device="cpu").to(dtype)

    labels = torch.randint(vocab_size, (rows, length), generator=g, device="cpu")
    labels[torch.rand(rows, length, generator=g, device="cpu") < 0.3] = -100
    found = {
        "h": tensor(rows, length, hidden_size),
        "other": tensor(rows, length, hidden_size),
        "y": labels,
        "signs": torch.tensor([1.0, -0.5, 0.3, -1.0])[:rows],
        "logps": -3.4 + 0.2 * tensor(rows, length).float(),
        "weight": tensor(vocab_size, hidden_size) / hidden_size**0.5,
        "bias": tensor(vocab_size) / 2,
        "ref_weight": tensor(vocab_size, hidden_size) / hidden_size**0.5,
    }
    return {name: value.to(torch.get_default_device()) for name, value in found.items()}


def pairs(loss, head, ref, d):
    return loss(head, d["h"], d["y"], None, *((d["other"], ref) if loss.use_ref_model else ()))


def completions(loss, head, ref, d):
    groups = [Completions(*[d[name][part] for name in ("h", "y", "other")]) for part in (slice(2), slice(2, 4))]
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


def distilled(loss, head, ref, d):
    return loss(head, d["h"], d["y"], Teacher(d["other"], ref))


def from_whole_teacher(loss, head, ref, d):
    return loss(head, d["h"], d["y"], Teacher(d["other"], d["ref_weight"]))


def from_logits(loss, head, ref, d):
    return loss(head, d["h"], d["y"], TeacherLogits(d["other"] @ d["ref_weight"].t()))


def from_smaller_teacher(loss, head, ref, d):
    return loss(head, d["h"], d["y"], Teacher(d["other"], d["ref_weight"][:25]))


def from_top_k(loss, head, ref, d):
    logps, indices = (d["other"] @ d["ref_weight"].t()).log_softmax(-1).topk(4)
    return loss(head, d["h"], d["y"], TeacherTopK(logps, indices))


def plain_call(loss, head, ref, d):
    return loss(head, d["h"], d["y"])


LOSSES = {
    "cross entropy": (CE, plain_call),
    "cross entropy, options": (
        lambda: CE(
            torch.linspace(0.5, 1.5, VOCAB, dtype=torch.float64),
            label_smoothing=0.1,
            lse_square_scale=1e-2,
            return_z_loss=True,
            return_token_accuracy=True,
            return_predicted_tokens=True,
        ),
        plain_call,
    ),
    "cross entropy, per token": (lambda: CE(reduction="none"), plain_call),
    "cross entropy, many heads": (
        lambda: CE(head_weights=[1.0, 0.5, 0.8], shift=[0, 1, 2], return_token_accuracy=True),
        lambda loss, head, ref, d: loss([head, ref, head], [d["h"], d["h"], d["h"] + d["other"]], d["y"]),
    ),
    "DPO": (lambda: DPO(beta=0.3, compute_nll_loss=True), pairs),
    "DPO, several": (lambda: DPO(loss_type=["ipo", "sft"], ld_alpha=0.4), completions),
    "CPO": (CPO, pairs),
    "SimPO": (SimPO, pairs),
    "ORPO": (ORPO, pairs),
    "KTO": (KTO, marked),
    "BCO": (BCO, marked),
    "GRPO": (lambda: GRPO(beta=0.1), policy),
    "GRPO, by items": (
        lambda: GRPO(beta=0.0, loss_type="dapo"),
        # The ranks of one head have one share of the items; processes with whole heads have one each.
        lambda loss, head, ref, d: policy(loss, head, ref, d, num_items_in_batch=40.0 / head.vocabulary_ranks),
    ),
    "GRPO, two passes": (
        lambda: GRPO(
            # A quantile between two tokens, however many processes have copies of them.
            beta=0.0,
            importance_sampling_level="sequence",
            top_entropy_quantile=0.3,
            entropy_coef=0.1,
        ),
        policy,
    ),
    "JSD": (lambda: JSD(beta=0.3, temperature=1.5), distilled),
    "JSD, whole teacher": (JSD, from_whole_teacher),
    "JSD, smaller teacher": (lambda: JSD(temperature=1.5), from_smaller_teacher),
    "soft loss of a smaller teacher": (lambda: JSD(weight_hard_loss=0.0), from_smaller_teacher),
    "KL": (KL, distilled),
    "KL, top-k": (KL, from_top_k),
    "KL, logits": (KL, from_logits),
    "reverse KL": (ReverseKL, distilled),
    "TVD": (TVD, distilled),
    "alpha-beta": (lambda: AlphaBeta(0.3, 0.6), distilled),
    "cosine": (Cosine, distilled),
    "mixture": (lambda: DistillationLoss(Divergence.mixture(0.2, 0.7, 0.6)), distilled),
    "MiniLLM": (MiniLLM, distilled),
}


def of_statistics(statistics, labels, w):
    return -w * statistics.logp + 0.01 * statistics.lse.square()


def columns(d):
    """Some columns twice, and the label's among them."""
    return (d["y"].clamp(min=0)[..., None] + torch.tensor([0, 7, 7, 19], device=d["y"].device)) % VOCAB


def support(d, **options):
    """Kept columns: the label's among them, fewer of some tokens, none of one."""
    ids = (d["y"].clamp(min=0)[..., None] + torch.tensor([0, 7, 19, 20], device=d["y"].device)) % VOCAB
    ids[:2, :, 2:], ids[3, 4] = -1, -1
    return TokenSupport(ids, **options)


OPERATIONS = {
    "kept columns, sparse": lambda head, ref, d: linear_logps(
        d["h"], head, d["y"], support=support(d, sparse_grad=True), shift=True
    ),
    "kept columns, GRPO": lambda head, ref, d: policy(GRPO(beta=0.0), head, ref, d, support=support(d)),
    "logps": lambda head, ref, d: linear_logps(d["h"], head, d["y"], entropy=True, lse=True, temperature=0.7),
    "statistics": lambda head, ref, d: linear_statistics(
        d["h"], head, d["y"], ("logp", "entropy", "mean_logp", "log_sum_sq_probs"), metrics=("mean_logit", "argmax")
    ),
    "statistics of several": lambda head, ref, d: linear_statistics(
        [d["h"], d["h"][:2] * 2], head, [d["y"], d["y"][:2]]
    ),
    "statistics of columns": lambda head, ref, d: linear_statistics(
        d["h"], head, d["y"], ("selected_logps", "logp"), selected=columns(d)
    ),
    "largest, two passes": lambda head, ref, d: linear_topk(
        d["h"], head, 5, d["y"], options=EngineOptions(chunk_size=5, compact=False)
    ),
    "not compact": lambda head, ref, d: linear_logps(d["h"], head, d["y"], compact=False, shift=True),
    "divergence": lambda head, ref, d: linear_divergence(
        d["h"], head, d["y"], Teacher(d["other"], ref), Divergence.reverse_kl(), logp=True, temperature=1.5
    ),
    "divergence loss": lambda head, ref, d: linear_divergence_loss(
        d["h"],
        head,
        d["y"],
        Teacher(d["other"], ref),
        Divergence.reverse_kl(),
        {"divergence": d["logps"].abs(), "logp": -d["logps"].exp()},
        metrics=("entropy",),
        options=EngineOptions(chunk_size=5),
    ),
    "token loss": lambda head, ref, d: linear_token_loss(
        d["h"], head, d["y"], of_statistics, ("logp", "lse"), token_inputs={"w": d["logps"].abs()}
    ),
    "logps of many heads": lambda head, ref, d: linear_logps(d["h"], [head, ref, head], d["y"], shift=[1, 2, 3]),
}


def case_of(name):
    if name in OPERATIONS:
        return OPERATIONS[name]
    build, call = LOSSES[name]
    return lambda head, ref, d: call(build(), head, ref, d)


@dataclass(frozen=True)
class Variant:
    """What the head is like."""

    bias: bool = False
    frozen: bool = False
    transform: LogitTransform = LogitTransform()


VARIANTS = {
    "plain": Variant(),
    "frozen": Variant(frozen=True),
    "bias": Variant(bias=True),
    "soft-cap and scale": Variant(bias=True, transform=LogitTransform(logit_scale=1.3, softcap=2.0)),
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


def run(call, d, variant, part=None):
    """Results, and gradients of hidden states, weight and bias, of a whole head or of one that is shared."""
    rows, group = (slice(None), None) if part is None else (part.rows, part.group)
    hidden = d["h"].clone().requires_grad_()
    weight = d["weight"][rows].clone().requires_grad_(not variant.frozen)
    bias = d["bias"][rows].clone().requires_grad_(not variant.frozen) if variant.bias else None
    head = Head(weight, bias, variant.transform, group)
    ref = Head(d["ref_weight"][rows], None, variant.transform, group)
    found = tensors_of(call(head, ref, {**d, "h": hidden}))
    outputs = [tensor for tensor in found if tensor.requires_grad]
    upstream = [torch.arange(1.0, 1 + o.numel()).cos().view(o.shape).to(o) for o in outputs]
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None and leaf.requires_grad]
    grads = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True, retain_graph=True)
    again = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    for first, second in zip(grads, again, strict=True):
        # A second backward computes again what the first one had in memory.
        assert relative_error(first, second) < (1e-6 if hidden.dtype == torch.float64 else 2e-2)
    return found, [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True)]


def compare(call, d, variant, part):
    found, grads = run(call, d, variant, part)
    expected, expected_grads = run(call, d, variant)
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a, b, msg=lambda m, i=i: f"result {i}: {m}")
        assert a.requires_grad == b.requires_grad
    for name, a, b in zip(("hidden states", "weight", "bias"), grads, expected_grads, strict=False):
        torch.testing.assert_close(a, b if name == "hidden states" else b[part.rows], msg=lambda m, n=name: f"{n}: {m}")


def all_cases(parts):
    """The variants of the head take turns with the cases, and with the ways to cut the vocabulary."""
    d = batch()
    for j, (cut, part) in enumerate(parts.items()):
        for i, name in enumerate([*LOSSES, *OPERATIONS]):
            variant = list(VARIANTS)[(i + 2 * j) % len(VARIANTS)]
            with case_named(f"{name}, {variant}, {cut}"):
                compare(case_of(name), d, VARIANTS[variant], part)
