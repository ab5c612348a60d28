"""The plain computation, with all logits in memory, in any dtype: what the library must equal."""

from __future__ import annotations

import gc
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses import Divergence, QuantizedWeight

NAMES = ("logp", "entropy", "lse", "mean_logp", "log_sum_sq_probs", "mean_logit")


def plain_logits(hidden, weight, bias=None, temperature=1.0, logit_scale=1.0, softcap=None) -> Tensor:
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def plain_statistics(hidden, weight, labels, bias=None, class_weight=None, ignore_index=-100, **transform) -> dict:
    """Every statistic per token, 0 where the label is ignored; in fp32 or fp64, of logits in the inputs' dtype."""
    logits = plain_logits(hidden, weight, bias, **transform)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    mask = labels != ignore_index
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    c = 1.0 if class_weight is None else class_weight.to(logits.dtype)
    values = {
        "logp": log_p.gather(-1, labels.masked_fill(~mask, 0)[..., None]).squeeze(-1),
        "entropy": -(p * log_p).sum(-1),
        "lse": logits.logsumexp(-1),
        "mean_logp": (c * log_p).mean(-1),
        "log_sum_sq_probs": (p * p).sum(-1).log(),
        "mean_logit": logits.mean(-1),
    }
    return {name: value * mask for name, value in values.items()}


def problem(n=13, h=24, v=61, *, dtype=torch.float32, masked=0.3, bias=False, seed=0, scale=1.0, shape=None):
    """Random hidden states, weight, labels and bias (or None), all that can require a gradient requiring one."""
    g = torch.Generator().manual_seed(seed)
    shape = shape or (n,)
    hidden = (torch.randn(*shape, h, generator=g, dtype=torch.float64) * scale).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, generator=g, dtype=torch.float64) / h**0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, v, shape, generator=g)
    labels[torch.rand(shape, generator=g) < masked] = -100
    b = torch.randn(v, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    return hidden, weight, labels, b


def on_gpu(*sizes, **options):
    """A problem's tensors on a GPU."""
    hidden, weight, labels, bias = problem(*sizes, **options)
    leaves = [None if t is None else t.detach().cuda().requires_grad_() for t in (hidden, weight, bias)]
    return leaves[0], leaves[1], labels.cuda(), leaves[2]


def double(*tensors):
    """fp64 copies that require gradients where the originals do."""
    return tuple(None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors)


def tensors_of(result) -> list[Tensor]:
    """All tensors of a result: the loss, and metrics in any nesting."""
    if result is None or isinstance(result, Tensor):
        return [] if result is None else [result]
    return [t for part in (result.values() if isinstance(result, dict) else result) for t in tensors_of(part)]


def total(values, names):
    """Of statistics with a weight each."""
    return sum((values[name] * (0.5 + i)).sum() for i, name in enumerate(names))


def weighted(values, seed=3):
    """A fixed random linear function of tensors, so that every statistic and token has its own upstream gradient."""
    g = torch.Generator().manual_seed(seed)
    return sum((v * torch.randn(v.shape, generator=g, dtype=torch.float64).to(v)).sum() for v in values)


def gradients(loss, inputs):
    """Of the inputs that require them; they may be asked for again."""
    return torch.autograd.grad(loss, [t for t in inputs if t is not None and t.requires_grad], retain_graph=True)


def assert_close_gradients(found, expected, inputs, **tolerances):
    torch.testing.assert_close(gradients(found, inputs), gradients(expected, inputs), **tolerances)


def relative_error(value: Tensor, exact: Tensor) -> float:
    value, exact = value.detach().double(), exact.detach().double()
    return float((value - exact).norm() / exact.norm().clamp(min=1e-30))


def rounding(dtype: torch.dtype) -> float:
    """The relative error of rounding every entry once, for half precision; of a sum's order, for the others."""
    return torch.finfo(dtype).eps * (0.25 if dtype in (torch.float16, torch.bfloat16) else 4)


def assert_as_exact_as_plain(ours, plain, exact, what="value", slack=2.0, floor=None, scale=0.0):
    """Our error against float64 is at most twice the plain computation's in the same dtype, or rounding itself.

    ``scale`` is the size of the terms that make up the value, where they may cancel (1 - p at a sure label, say).
    """
    allowed = max(slack * relative_error(plain, exact), floor or rounding(ours.dtype)) * float(exact.double().norm())
    allowed = max(allowed, rounding(ours.dtype) * scale)
    error = float((ours.detach().double() - exact.detach().double()).norm())
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e} ({ours.dtype})"


def peak_bytes(function) -> int:
    """Peak of what ``function`` allocates on the CPU beyond what was there before, temporaries inside ops included."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    del result
    return peak


class Int8Weight(QuantizedWeight):
    """``W[v] = codes[v] scales[v]``, a format of a user's own; notes how many rows were asked for, and at once."""

    def __init__(self, weight):
        super().__init__(tuple(weight.shape), torch.float32, weight.device)
        self.scales = weight.detach().abs().amax(1, keepdim=True).float() / 127
        self.codes = (weight.detach() / self.scales).round().to(torch.int8)
        self.most = self.total = 0

    def rows(self, start, stop):
        self.most, self.total = max(self.most, stop - start), self.total + stop - start
        return self.codes[start:stop] * self.scales[start:stop]


# --- Divergences ------------------------------------------------------------------------------------------------------


def kl(a, b):
    """``KL(a || b)`` of log-probabilities."""
    return (a.exp() * (a - b)).sum(-1)


def mixed(weight, log_q, log_p):
    return torch.logsumexp(torch.stack([log_q + math.log(weight), log_p + math.log1p(-weight)]), 0)


def jsd(beta, of_teacher, of_student):
    def formula(log_p, log_q):
        m = mixed(beta, log_q, log_p)
        return of_teacher * kl(log_q, m) + of_student * kl(log_p, m)

    return formula


def alpha_beta(a, b):
    def formula(log_p, log_q):
        s = a + b
        if a == 0:
            terms = ((b * log_p).exp() * (b * (log_p - log_q) - 1) + (b * log_q).exp()) / b**2
        elif b == 0:
            terms = ((a * log_p).exp() - (a * log_q).exp() * (1 + a * (log_p - log_q))) / a**2
        else:
            terms = (a / s * (s * log_q).exp() + b / s * (s * log_p).exp() - (a * log_q + b * log_p).exp()) / (a * b)
        return terms.sum(-1)

    return formula


#: A divergence, and the textbook's formula of (log p, log q).
DIVERGENCES = {
    "forward KL": (Divergence.forward_kl(), lambda p, q: kl(q, p)),
    "reverse KL": (Divergence.reverse_kl(), kl),
    "JSD": (Divergence.jsd(), jsd(0.5, 0.5, 0.5)),
    "JSD 0.1": (Divergence.jsd(0.1), jsd(0.1, 0.1, 0.9)),
    "interpolated JSD 0.3": (Divergence.jsd(0.3, "interpolated"), jsd(0.3, 0.7, 0.3)),
    "skewed KL": (Divergence.mixture(0.1, 1.0, 0.0), lambda p, q: kl(q, mixed(0.1, q, p))),
    "skewed reverse KL": (Divergence.mixture(0.9, 0.0, 1.0), lambda p, q: kl(p, mixed(0.9, q, p))),
    "total variation": (Divergence.total_variation(), lambda p, q: (p.exp() - q.exp()).abs().sum(-1) / 2),
    "alpha-beta 0.2 0.7": (Divergence.alpha_beta(0.2, 0.7), alpha_beta(0.2, 0.7)),
    "alpha-beta 1.2 0.8": (Divergence.alpha_beta(1.2, 0.8), alpha_beta(1.2, 0.8)),
    "alpha-beta 0 0.5": (Divergence.alpha_beta(0, 0.5), alpha_beta(0, 0.5)),
    "alpha-beta 0.5 0": (Divergence.alpha_beta(0.5, 0), alpha_beta(0.5, 0)),
}


def formula(name, student, teacher):
    """The divergence ``[...]`` of logits."""
    if name == "cosine":
        return 1 - F.cosine_similarity(student, teacher, dim=-1)
    return DIVERGENCES[name][1](student.log_softmax(-1), teacher.log_softmax(-1))


def divergence(name):
    return Divergence.cosine() if name == "cosine" else DIVERGENCES[name][0]
