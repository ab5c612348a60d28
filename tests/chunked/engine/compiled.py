"""Every loss and operation, and a comparison of compiled and plain functions."""

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from liger_losses import (
    AdaptiveEntropy,
    ChunkedLoss,
    Completions,
    DistillationLoss,
    Divergence,
    Head,
    LigerFusedLinearAlphaBetaLoss,
    LigerFusedLinearBCOLoss,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearMiniLLMLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearReverseKLLoss,
    LigerFusedLinearSimPOLoss,
    LigerFusedLinearTVDLoss,
    LogitTransform,
    PreferenceLoss,
    Teacher,
    TeacherLogits,
    TeacherTopK,
    linear_divergence,
    linear_divergence_loss,
    linear_logps,
    linear_statistics,
    linear_token_loss,
)
from tests.reference import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, H, V = 4, 16, 29
TOLERANCE = {"rtol": 2e-5, "atol": 1e-6}
HALF = {"rtol": 1e-2, "atol": 1e-3}
LENGTHS = (5, 6, 8)


def compiled(function, backend="aot_eager"):
    """The compiled function, and what counts its graphs."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


def batch(length, rows=B, *, seed=0, dtype=torch.float32):
    """The tensors of one call. Some tokens carry no loss."""
    g = torch.Generator().manual_seed(100 * seed + length)
    hidden, other = (torch.randn(rows, length, H, generator=g).to(DEVICE, dtype) for _ in range(2))
    labels = torch.randint(V, (rows, length), generator=g)
    labels[torch.rand(rows, length, generator=g) < 0.3] = -100
    signs = torch.tensor([1.0, -0.5, 0.3, -1.0])[:rows]
    return {
        "h": hidden.requires_grad_(),
        "other": other,
        "y": labels.to(DEVICE),
        "signs": signs.to(DEVICE),
        "logps": -3.4 + 0.2 * torch.randn(rows, length, generator=g).to(DEVICE),
    }


def masked(d):
    """The same call without any token that carries loss."""
    return {**d, "y": torch.full_like(d["y"], -100)}


def layer(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(H, V, device=DEVICE, dtype=dtype)


def flat(result):
    """All tensors of a result."""
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else [t for part in parts_of(result) for t in flat(part)]


def parts_of(result):
    return result.values() if isinstance(result, dict) else result


def structure(result):
    """How they are arranged: the named tuples' classes, and where there is none."""
    if result is None or isinstance(result, torch.Tensor):
        return None if result is None else torch.Tensor
    return (
        type(result),
        [structure(part) for part in parts_of(result)],
        list(result) if isinstance(result, dict) else None,
    )


def gradients(result, leaves, scale=1.0):
    """Of a sum of all outputs in which no two entries count alike. (Zeros are as good as none.)"""
    outputs = [tensor for tensor in flat(result) if tensor.requires_grad]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    assert outputs, "nothing to differentiate"
    weights = [(scale * torch.arange(1.0, 1 + o.numel()).cos()).view(o.shape).to(o) for o in outputs]
    found = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def assert_same(found, expected, tolerance=TOLERANCE):
    """Results of calls: structure, values, dtypes, and what can be differentiated."""
    assert structure(found) == structure(expected)
    for a, b in zip(flat(found), flat(expected), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)
        assert a.requires_grad == b.requires_grad


def check(function, plain, batches, leaves, tolerance=TOLERANCE, scale=1.0):
    """A compiled function's results and gradients are the plain one's."""
    leaves = list(leaves)
    for d in batches:
        found, expected = function(d), plain(d)
        assert_same(found, expected, TOLERANCE)
        inputs = (d["h"], *leaves)
        for a, b in zip(gradients(found, inputs, scale), gradients(expected, inputs, scale), strict=True):
            assert a.dtype == b.dtype
            if tolerance is HALF:  # rounded once or twice
                assert relative_error(a, b) < 1e-2
            else:
                torch.testing.assert_close(a, b, equal_nan=True, **tolerance)


def pairs(loss, head, d):
    """Liger's form, half of whose rows are chosen, with a bias of its own."""
    extra = (d["other"], head.weight.detach() * 0.7) if loss.use_ref_model else ()
    return loss(head.weight, torch.tanh(d["h"]), d["y"], head.bias, *extra)


def completions(loss, head, d):
    """Two groups of completions, the second one shorter."""
    groups = [
        Completions(*[d[name][rows] for name in ("h", "y", "other")])
        for rows in (slice(2), (slice(2, 4), slice(1, None)))
    ]
    return loss(head, *groups, ref_weight=head.weight.detach() * 0.7, ref_bias=head.bias.detach())


def marked(loss, head, d):
    extra = {"kl": 0.3} if loss.loss_type == "kto" else {}
    if loss.use_ref_model:
        extra |= {"ref_input": d["other"], "ref_weight": head.weight.detach()}
    return loss(d["h"], head, d["y"], preference_labels=d["signs"] > 0, **extra)


def policy(loss, head, d):
    extra = {"ref_per_token_logps": d["logps"] * 1.1} if loss.beta else {}
    mask, ids = d["y"] >= 0, d["y"].clamp(min=0)
    return loss(torch.tanh(d["h"]), head, ids, mask, d["signs"], old_per_token_logps=d["logps"], **extra)


def teacher(head, d):
    return Teacher(d["other"], head.weight.detach() * 0.7)


def distillation(loss, head, d):
    return loss(head, d["h"], d["y"], teacher(head, d))


def from_logits(loss, head, d):
    return loss(head, d["h"], d["y"], TeacherLogits(d["other"] @ head.weight.detach().T))


def from_top_k(loss, head, d):
    logps, indices = (d["other"] @ head.weight.detach().T).log_softmax(-1).topk(4)
    return loss(head, d["h"], d["y"], TeacherTopK(logps, indices))


def like_liger(loss, head, d):
    return loss(d["h"], head.weight, d["other"], head.weight.detach() * 0.7, d["y"])


def plain_call(loss, head, d):
    return loss(head, torch.tanh(d["h"]), d["y"])


class Focal(ChunkedLoss):
    def loss(self, statistics, mask, gamma=2.0):
        p = statistics.logp.exp()
        return -((1 - p) ** gamma * statistics.logp * mask).sum() / mask.sum().clamp(min=1), p.detach()


class InADictionary(Focal):
    """A forward of its own, whose result is no tuple."""

    def forward(self, weight, hidden_states, labels):
        loss, p = super().forward(weight, hidden_states, labels)
        return {"loss": loss, "parts": [p.mean(), None]}


class Squared(PreferenceLoss):
    def __init__(self, beta=0.1, **options):
        super().__init__(beta=beta, use_ref_model=True, **options)

    def pair_loss(self, pairs):
        return (self.beta * (pairs.chosen_logratios - pairs.rejected_logratios) - 1).square()


CE = LigerFusedLinearCrossEntropyLoss
#: How to build a loss, and how to call it.
LOSSES = {
    "cross entropy": (CE, plain_call),
    "cross entropy, shifted": (
        CE,
        lambda loss, head, d: loss(head.weight, d["h"][:, :-1], d["y"][:, 1:].contiguous(), head.bias),
    ),
    "cross entropy, options": (
        lambda: CE(
            torch.linspace(0.5, 1.5, V, device=DEVICE),
            label_smoothing=0.1,
            lse_square_scale=1e-2,
            return_z_loss=True,
            return_token_accuracy=True,
            return_predicted_tokens=True,
        ),
        plain_call,
    ),
    "cross entropy, per token": (lambda: CE(reduction="none", softcap=3.0, shift=True), plain_call),
    "DPO": (lambda: LigerFusedLinearDPOLoss(beta=0.3, compute_nll_loss=True), pairs),
    "DPO, completions": (lambda: LigerFusedLinearDPOLoss(loss_type=["ipo", "sft"], ld_alpha=0.4), completions),
    "CPO": (LigerFusedLinearCPOLoss, pairs),
    "SimPO": (LigerFusedLinearSimPOLoss, pairs),
    "ORPO": (LigerFusedLinearORPOLoss, pairs),
    "user's pairs": (Squared, pairs),
    "KTO": (LigerFusedLinearKTOLoss, marked),
    "BCO": (LigerFusedLinearBCOLoss, marked),
    "GRPO": (lambda: LigerFusedLinearGRPOLoss(beta=0.1), policy),
    "GRPO, two passes": (
        lambda: LigerFusedLinearGRPOLoss(
            beta=0.0,
            importance_sampling_level="sequence",
            top_entropy_quantile=0.5,
            entropy_coef=AdaptiveEntropy(0.1, target=9.0),
        ),
        policy,
    ),
    "JSD": (lambda: LigerFusedLinearJSDLoss(beta=0.3, temperature=1.5), distillation),
    "JSD, Liger's form": (lambda: LigerFusedLinearJSDLoss(return_soft_hard_loss=True), like_liger),
    "KL, top-k": (LigerFusedLinearKLLoss, from_top_k),
    "KL, logits": (LigerFusedLinearKLLoss, from_logits),
    "reverse KL": (LigerFusedLinearReverseKLLoss, distillation),
    "TVD": (LigerFusedLinearTVDLoss, distillation),
    "alpha-beta": (lambda: LigerFusedLinearAlphaBetaLoss(0.3, 0.6), distillation),
    "cosine": (LigerFusedLinearCosineSimilarityLoss, distillation),
    "divergence": (lambda: DistillationLoss(Divergence.forward_kl()), distillation),
    "MiniLLM": (LigerFusedLinearMiniLLMLoss, distillation),
    "user's loss": (
        lambda: Focal(temperature=0.7),
        lambda loss, head, d: loss(Head(head.weight, head.bias), d["h"], d["y"], gamma=3.0),
    ),
    "user's loss, a dictionary": (InADictionary, plain_call),
    "head with a transform": (
        CE,
        lambda loss, head, d: loss(Head.of(head, transform=LogitTransform(0.5)), d["h"], d["y"]),
    ),
}


def user_function(statistics, labels, w):
    return -w * statistics.logp + 0.01 * statistics.lse.square()


OPERATIONS = {
    "logps": lambda head, d: linear_logps(d["h"], head.weight, d["y"], bias=head.bias, temperature=0.7, entropy=True),
    "logps, shifted": lambda head, d: linear_logps(torch.tanh(d["h"]), head, d["y"], shift=True, chunk_size=3),
    "statistics": lambda head, d: linear_statistics(
        d["h"], head, d["y"], ("logp", "entropy", "mean_logit"), metrics="lse"
    ),
    "statistics of several": lambda head, d: linear_statistics([d["h"], d["h"][:2] * 2], head, [d["y"], d["y"][:2]]),
    "statistics of columns": lambda head, d: linear_statistics(
        d["h"],
        head,
        d["y"],
        ("selected_logps", "lse"),
        selected=(d["y"].clamp(min=0)[..., None] + d["y"].new_ones(3)) % V,
    ),
    "divergence": lambda head, d: linear_divergence(
        d["h"], head.weight, d["y"], teacher(head, d), Divergence.forward_kl(), logp=True, temperature=1.5
    ),
    "divergence loss": lambda head, d: linear_divergence_loss(
        d["h"],
        head,
        d["y"],
        teacher(head, d),
        Divergence.reverse_kl(),
        {"divergence": d["logps"].abs(), "logp": -d["logps"].exp()},
        metrics=("entropy",),
    ),
    "token loss": lambda head, d: linear_token_loss(
        d["h"], head, d["y"], user_function, ("logp", "lse"), token_inputs={"w": d["logps"].abs()}
    ),
}
