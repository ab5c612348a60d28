"""Every row of the tables of policy losses, against its paper's formula in float64: values and gradients."""

import math

import pytest
import torch

from liger_losses import functional
from liger_losses.chunked.losses.policy_estimates import KL_ESTIMATORS, NORMALIZERS
from liger_losses.chunked.losses.policy_objectives import check_needs
from liger_losses.chunked.losses.policy_tables import LOSS_TYPES, MASKS, RATIOS, PolicyOptions
from liger_losses.chunked.losses.sampler import KINDS
from tests.losses import GRPO
from tests.reference import gradients, plain_statistics, problem

B, T, H, V = 6, 7, 16, 37
LENGTHS = [7, 3, 5, 0, 6, 2]  # one completion is empty
PROMPTS = [4, 9, 4, 9, 9, 4]
#: The options that are not a row's own, small enough that every branch of a formula is taken.
OPTIONS = {"epsilon_low": 0.15, "epsilon_high": 0.25, "max_completion_length": 9}
MORE = {
    "cispo": {"epsilon_high": 1.2, "cispo_low": 0.8},
    "dro": {"log_ratio_penalty": 0.3},
    "dppo_tv": {"mask_low": 0.01, "mask_high": 0.02, "delta": 1.4},
    "dppo_kl": {"mask_low": 0.005, "mask_high": 0.01},
    "ipo": {"mask_high": 0.02, "log_ratio_penalty": 0.2},
    "icepop": {"mask_low": 0.8, "mask_high": 1.3},
    "kpop": {"mask_high": 0.2},
    "dual_clip": {"delta": 1.3},
    "fipo": {"fipo_half_life": 3.0, "delta": 1.5, "fipo_safe_ratio": 1.3},
    "clip_cov": {"cov_share": 0.2, "cov_low": 0.0},
    "kl_cov": {"cov_share": 0.2, "cov_penalty": 0.7},
}


def inputs(extreme=None):
    """Log-probabilities, those of old policy, sampler and reference; advantages; the mask. In fp32, which is exact."""
    g = torch.Generator().manual_seed(0)
    logps = -torch.rand(B, T, generator=g) * 3 - 0.05
    others = [(logps + 0.4 * torch.randn(B, T, generator=g)).clamp(max=-0.01) for _ in range(3)]
    if extreme is not None:
        others = [torch.full_like(x, -110.0) + extreme * (-1) ** torch.arange(T) for x in others]
        logps = torch.full_like(logps, -110.0)  # whose probability is 0 in fp32
    advantages = torch.tensor([1.2, -0.7, -0.4, 1.0, 0.9, -1.5])
    return logps, others, advantages, torch.arange(T) < torch.tensor(LENGTHS)[:, None]


# --- The formulas -----------------------------------------------------------------------------------------------------


class Plain:
    """One batch in float64: lists of each completion's own tokens."""

    def __init__(self, logps, others, advantages, mask, options):
        self.p, self.old, self.sampler, self.ref = (
            [row[:n] for row, n in zip(x, LENGTHS, strict=True)] for x in (logps, *others)
        )
        self.a, self.lengths, self.o = advantages, [int(n) for n in mask.sum(1)], options
        self.r = [(p - q).exp() for p, q in zip(self.p, self.old, strict=True)]

    def bounds(self):
        return 1 - self.o["epsilon_low"], 1 + self.o["epsilon_high"]

    def clipped(self, i, delta=None):
        r, a = self.r[i], self.a[i]
        bounded = r if delta is None else r.clamp(max=delta)
        return torch.minimum(bounded * a, r.clamp(*self.bounds()) * a)

    def masked(self, i, keep):
        """min(r, delta) A of the tokens that are kept, whose weight is a constant beside the gradient of log r."""
        weight = self.r[i].detach().clamp(max=self.o.get("delta") or math.inf)
        return keep * weight * self.a[i] * (1 + self.p[i] - self.p[i].detach())

    def cispo(self, i):
        return self.r[i].clamp(self.o["cispo_low"], self.o["epsilon_high"]).detach() * self.a[i] * self.p[i]

    def sapo(self, i):
        t = 1.0 if self.a[i] > 0 else 1.05
        return 4 / t / (1 + (-t * (self.r[i] - 1)).exp()) * self.a[i]

    def vespo(self, i):
        k, rate = (2.0, 3.0) if self.a[i] >= 0 else (3.0, 2.0)
        w = (self.p[i] - self.old[i]).sum().exp().detach()
        return math.e**rate * w**k * (-rate * w).exp() * self.a[i] * self.p[i]

    def dppo_tv(self, i):
        change = (self.p[i].exp() - self.sampler[i].exp()).detach()
        sign = 1 if self.a[i] > 0 else -1
        return self.masked(i, sign * change <= self.o["mask_high" if sign > 0 else "mask_low"])

    def binary_kl(self, log_p, log_q):
        p, q = log_p.exp(), log_q.exp()
        return p * (log_p - log_q) + (1 - p) * ((1 - p) / (1 - q)).log()

    def dppo_kl(self, i):
        p, q = self.p[i].detach(), self.sampler[i]
        sign = 1 if self.a[i] > 0 else -1
        limit = self.o["mask_high" if sign > 0 else "mask_low"]
        return self.masked(i, (self.binary_kl(q, p) <= limit) | (sign * (p - q) <= 0))

    def ipo(self, i):
        change = (self.p[i].exp() - self.sampler[i].exp()).abs().detach()
        return self.masked(i, change <= self.o["mask_high"]) - 0.2 * (self.p[i] - self.sampler[i]) ** 2

    def icepop(self, i):
        k = (self.old[i] - self.sampler[i]).exp()
        return k * ((k >= self.o["mask_low"]) & (k <= self.o["mask_high"])) * self.clipped(i)

    def kpop(self, i):
        old, sampler, phi = self.old[i], self.sampler[i], self.o["mask_high"]
        keep = (self.binary_kl(old, sampler) <= phi) & (self.binary_kl(sampler, old) <= phi)
        return (old - sampler).exp() * keep * self.clipped(i)

    def dro(self, i):
        return self.a[i] * self.p[i] - 0.3 * (self.p[i] - self.sampler[i]) ** 2

    def gmpo(self, i):
        low, high = -self.o["epsilon_low"], self.o["epsilon_high"]
        sign = 1 if self.a[i] > 0 else -1
        log_r = [sign * min(sign * x, sign * min(max(x, low), high)) for x in self.p[i] - self.old[i]]
        return (sum(log_r) / len(log_r)).exp() * self.a[i] * torch.ones_like(self.p[i])

    def fipo(self, i):
        log_r, decay = (self.p[i] - self.old[i]).detach(), 2 ** (-1 / 3)
        weights = []
        for t in range(len(log_r)):
            future = sum(decay ** (u - t) * log_r[u] for u in range(t, len(log_r)) if self.r[i][u] <= 1.5)
            f = min(max(math.exp(future), 0.8), 1.2)
            weights.append(min(f, 1.0) if self.a[i] < 0 and self.r[i][t] > 1.3 else f)
        return torch.tensor(weights, dtype=torch.float64) * self.clipped(i, 1.5)

    def real(self):
        total = 0.0
        for prompt in {*PROMPTS}:
            of_prompt = [i for i in range(B) if PROMPTS[i] == prompt and self.lengths[i]]
            s = {i: (self.p[i] - self.old[i]).mean() / 0.5 for i in of_prompt}
            positive, negative = ([i for i in of_prompt if (self.a[i] > 0) == sign] for sign in (True, False))
            if positive and negative:
                total += (1 + sum(s[i].exp() for i in negative)).log() + (
                    1 + sum((-s[i]).exp() for i in positive)
                ).log()
        return total / len({*PROMPTS})

    def covariances(self):
        logps = torch.cat(self.p).detach()
        a = torch.cat([x.expand(n) for x, n in zip(self.a, self.lengths, strict=True)])
        return ((logps - logps.mean()) * (a - a.mean())).split(self.lengths)

    def kl_cov(self, i):
        cov = self.covariances()
        limit = torch.cat(cov).topk(int(0.2 * sum(self.lengths))).values[-1]
        return self.r[i] * self.a[i] - (cov[i] >= limit) * 0.7 * (self.p[i] - self.old[i]).abs()

    def objective(self, loss_type, i):
        if hasattr(self, loss_type):
            return getattr(self, loss_type)(i)
        if loss_type == "importance":
            return self.masked(i, 1)
        return self.a[i] * self.p[i] if loss_type == "reinforce" else self.clipped(i, self.o.get("delta"))

    def mean(self, name, terms):
        """The mean of all tokens' terms: see the papers' and verl's names for these."""
        tokens, sums = sum(self.lengths), [x.sum() for x in terms]
        if name == "sequence_mean":
            return sum(x.mean() for x in terms if len(x)) / B
        if name == "prompt_mean":
            prompts = [[i for i in range(B) if PROMPTS[i] == prompt] for prompt in {*PROMPTS}]
            means = [sum(sums[i] for i in each) / sum(self.lengths[i] for i in each) for each in prompts]
            return sum(means) / len(means)
        return sum(sums) / {"sequence_sum": B, "limit": B * 9}.get(name, tokens)

    def kl(self, name, i):
        d = self.ref[i] - self.p[i]
        k2 = d**2 / 2
        value = {"k1": -d, "k2": k2, "k3": d.exp() - d - 1, "abs": d.abs()}[name.rstrip("+")]
        return value.detach() + k2 - k2.detach() if name.endswith("+") else value


def compare(ours, exact, leaf, exact_leaf, rtol=1e-5):
    torch.testing.assert_close(ours.double(), exact.double(), rtol=rtol, atol=1e-6)
    first, second = torch.autograd.grad(ours, leaf)[0], torch.autograd.grad(exact, exact_leaf)[0]
    scale = float(second.abs().max())
    assert first.isfinite().all()
    torch.testing.assert_close(first.double(), second, rtol=rtol, atol=1e-6 * scale)


def both(options, beta=0.0, extreme=None):
    """The library's loss of fp32 log-probabilities and the batch in float64, with their leaves."""
    logps, others, advantages, mask = inputs(extreme)
    leaf, exact = logps.clone().requires_grad_(), logps.double().requires_grad_()
    junk = [torch.where(mask, x, math.nan) for x in others]
    names = ("old_logps", "sampling_logps", "ref_logps")
    given = dict(zip(names, junk, strict=True)) | {"prompts": torch.tensor(PROMPTS)}
    plain = Plain(exact, [x.double() for x in others], advantages.double(), mask, options)
    return functional.grpo_loss(leaf, advantages, mask, beta=beta, **given, **options), leaf, plain, exact


@pytest.mark.parametrize("extreme", [None, 30.0])
@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "clip_cov"])
def test_losses_are_their_papers(loss_type, extreme):
    options = {**OPTIONS, **MORE.get(loss_type, {}), "loss_type": loss_type}
    ours, leaf, plain, exact = both(options, extreme=extreme)
    if loss_type == "real":
        expected = plain.real()
    else:
        terms = [plain.objective(loss_type, i) if n else plain.p[i] for i, n in enumerate(LENGTHS)]
        expected = -plain.mean(LOSS_TYPES[loss_type].normalizer, terms)
    if extreme is None:
        compare(ours, expected, leaf, exact)
    else:  # the largest terms set the size of what is rounded
        compare(ours, expected, leaf, exact, rtol=1e-4)


def test_clip_cov_drops_tokens_within_bounds_and_repeats():
    options = {**OPTIONS, **MORE["clip_cov"], "loss_type": "clip_cov"}
    (ours, leaf, plain, _), (again, other, *_) = both(options), both(options)
    grad, clipped = (torch.autograd.grad(x, y)[0] for x, y in ((ours, leaf), (again, other)))
    assert torch.equal(grad, clipped)
    expected, exact = both({**OPTIONS, "loss_type": "bnpo"})[:2]
    (whole,) = torch.autograd.grad(expected, exact)
    dropped = (whole != 0) & (grad == 0)
    torch.testing.assert_close(grad, torch.where(dropped, 0.0, whole))
    assert dropped.sum() == int(0.2 * sum(LENGTHS))
    cov = plain.covariances()
    assert all((cov[i][dropped[i, :n]] > 0).all() for i, n in enumerate(LENGTHS))


@pytest.mark.parametrize("extreme", [None, 30.0])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_estimators(name, corrected, extreme):
    options = {**OPTIONS, "loss_type": "bnpo", "kl_estimator": name, "use_bias_correction_kl": corrected}
    ours, leaf, plain, exact = both(options, beta=0.7, extreme=extreme)
    terms = [0.7 * plain.kl(name, i) * (plain.r[i] if corrected else 1) - plain.clipped(i) for i in range(B)]
    compare(ours, plain.mean("token_mean", terms), leaf, exact, rtol=1e-5 if extreme is None else 1e-4)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_normalizers(name):
    options = {**OPTIONS, "loss_type": "dapo", "normalizer": name}
    ours, leaf, plain, exact = both(options)
    compare(ours, -plain.mean(name, [plain.clipped(i) for i in range(B)]), leaf, exact)


@pytest.mark.parametrize("level", RATIOS)
def test_levels(level):
    options = {**OPTIONS, "loss_type": "grpo", "importance_sampling_level": level}
    ours, leaf, plain, exact = both(options)
    for i, n in enumerate(LENGTHS):
        log_r = plain.p[i] - plain.old[i]
        if level == "geometric":
            log_r = (plain.gmpo(i)[0] / plain.a[i]).log().expand(n) if n else log_r
        elif level == "sequence_token":
            log_r = log_r.mean().detach() + log_r - log_r.detach()
        elif level != "token":
            log_r = (log_r.mean() if level == "sequence" else log_r.sum()).expand(n)
        plain.r[i] = log_r.exp()
    compare(ours, -plain.mean("sequence_mean", [plain.clipped(i) for i in range(B)]), leaf, exact)


@pytest.mark.parametrize("name", MASKS)
def test_masks_go_with_every_loss(name):
    """A mask of another loss, and its share of tokens in the metric."""
    options = {**OPTIONS, "loss_type": "reinforce", "token_mask": name, "mask_low": 0.01, "mask_high": 0.02}
    if name == "kpop":
        options |= {"mask_high": 0.2}
    if name in ("ratio", "icepop"):
        options |= {"mask_low": 0.8, "mask_high": 1.3}
    ours, leaf, plain, _ = both(options)
    (grad,) = torch.autograd.grad(ours, leaf)
    source = {"tv": "dppo_tv", "kl": "dppo_kl", "change": "ipo"}.get(name, name)
    for i, n in enumerate(LENGTHS):
        weight, a = -sum(LENGTHS) * grad[i, :n].double(), plain.a[i]
        if name == "none":
            expected = a.expand(n)
        elif name == "ratio":
            k = (plain.p[i] - plain.sampler[i]).exp()
            expected = a * ((k >= 0.8) & (k <= 1.3))
        else:
            plain.r[i], plain.o = torch.ones(n, dtype=torch.float64), {**options, "epsilon_low": 9, "epsilon_high": 9}
            value = getattr(plain, source)(i)
            expected = value + 0.2 * (plain.p[i] - plain.sampler[i]) ** 2 if name == "change" else value
        torch.testing.assert_close(weight, expected.detach().double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_old", [False, True])
def test_a_sampler_that_is_not_known_is_the_old_policy(with_old):
    """Or the current one, where the old policy is not known either; at some tokens, in values and metrics."""
    hidden, weight, ids, _ = problem(h=H, v=V, shape=(B, T), masked=0.0)
    logps = plain_statistics(hidden, weight, ids)["logp"].detach()
    _, (noise, *_), advantages, mask = inputs()
    old = logps + 0.2 * noise if with_old else logps
    known = noise > noise.median()
    sampler = torch.where(known, logps + 0.3 * noise, old)
    given = {"old_per_token_logps": old} if with_old else {}
    loss = GRPO(beta=0.0, token_mask="change", mask_high=0.02, log_ratio_penalty=0.3)
    found = [
        loss(hidden, weight, ids, mask, advantages, sampling_per_token_logps=x, **given)
        for x in (sampler, torch.where(known, sampler, math.nan))
    ]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*(gradients(x, (hidden, weight)) for x, _ in found))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_tokens_that_do_not_act_have_no_objective(loss_type):
    logps, (old, sampler, _), advantages, mask = inputs()
    options = {**OPTIONS, **MORE.get(loss_type, {}), "loss_type": loss_type, "beta": 0.0}
    if options.get("log_ratio_penalty"):  # which is no part of it
        options["log_ratio_penalty"] = 0.0
    acting, given = torch.zeros_like(mask), {"old_logps": old, "sampling_logps": sampler}
    prompts = torch.tensor(PROMPTS)
    loss = functional.grpo_loss(
        logps.requires_grad_(), advantages, mask, acting=acting, prompts=prompts, **given, **options
    )
    assert loss == 0
    assert not torch.autograd.grad(loss, logps)[0].any()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_class_equals_the_function(loss_type):
    """On logits that are never in memory, in one pass or in two."""
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(B, T, H, generator=g, dtype=torch.float64), torch.randn(V, H, generator=g).double()
    hidden, ids = (hidden * H**-0.5).requires_grad_(), torch.randint(V, (B, T), generator=g)
    _, _, advantages, mask = inputs()
    logps = plain_statistics(hidden, weight, ids)["logp"]
    old, sampler = (logps.detach().float() + 0.2 * torch.randn(B, T, generator=g) for _ in range(2))
    options = {**OPTIONS, **MORE.get(loss_type, {}), "loss_type": loss_type, "beta": 0.0}
    prompts = torch.tensor(PROMPTS)
    exact = functional.grpo_loss(
        logps, advantages, mask, old_logps=old, sampling_logps=sampler, prompts=prompts, **options
    )
    keywords = {"old_per_token_logps": old, "sampling_per_token_logps": sampler, "prompts": prompts}
    loss, _ = GRPO(**options)(hidden, weight, ids, mask, advantages, **keywords)
    torch.testing.assert_close(loss, exact.float(), rtol=1e-5, atol=1e-6)
    grads = [torch.autograd.grad(x, hidden)[0] for x in (loss, exact)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"loss_type": "icepop"}, {}, "pass the sampler's log-probabilities"),
        ({"loss_type": "dapo", "token_mask": "kpop"}, {}, "pass the sampler's log-probabilities"),
        ({"loss_type": "real"}, {}, "needs prompts="),
        ({"loss_type": "dapo", "normalizer": "prompt_mean"}, {}, "needs prompts="),
        ({"loss_type": "real"}, {"prompts": torch.zeros(2)}, "prompts must be integers"),
        ({"loss_type": "fipo"}, {"group": object()}, "pass whole completions, and no group="),
        ({"loss_type": "kl_cov"}, {"group": object()}, "pass whole completions, and no group="),
    ],
)
def test_what_a_row_needs_is_asked_for(options, given, message):
    asked = {"sampling_logps": None, "prompts": None, "group": None, **given}
    with pytest.raises(ValueError, match=message):
        check_needs(PolicyOptions(**options), torch.ones(2, 3, dtype=torch.bool), **asked)


# --- What the sampler did ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("extreme", [None, 30.0])
@pytest.mark.parametrize("kind", KINDS)
def test_sampler_weights(kind, extreme, normalize):
    logps, (sampler, *_), _, mask = inputs(extreme)
    sampler = torch.where(mask, sampler, math.nan)
    sampler[1, 1] = math.nan  # not known: a ratio of 1
    low, high = 0.75, 1.4
    found, metrics = functional.sampler_weights(logps, sampler, mask, kind, low=low, high=high, normalize=normalize)
    level, bound = kind.split("_")
    log_r = (logps.double() - sampler.double())[mask].nan_to_num().split(LENGTHS)
    level_of = {"sequence": lambda x: x.sum()[None], "geometric": lambda x: x.mean()[None]}.get(level, lambda x: x)
    ratios = [level_of(x).exp() if len(x) else x for x in log_r]
    inside = [(r >= low) & (r <= high) for r in ratios]
    of_bound = {
        "truncate": lambda r, i: r.clamp(low, high),
        "mask": lambda r, i: r * i,
        "reject": lambda r, i: i.double(),
    }
    weights = [of_bound[bound](r, i) for r, i in zip(ratios, inside, strict=True)]
    every, of_tokens = torch.cat(weights), [w.expand(n) for w, n in zip(weights, LENGTHS, strict=True) if n]
    ess = every.sum() ** 2 / (len(every) * (every**2).sum()) if (every**2).sum() else torch.tensor(0.0)
    every_ratio, flat, tokens = torch.cat(ratios), torch.cat(log_r), sum(LENGTHS)
    outside = sum((~i).sum() * (1 if level == "token" else n) for i, n in zip(inside, LENGTHS, strict=True))
    expected = [
        -flat.mean(),
        (flat.exp() - flat - 1).mean(),
        (torch.cat(of_tokens) == 0).double().mean(),
        outside / tokens,
        ess,
        *(every_ratio.mean(), every_ratio.min(), every_ratio.max()),
    ]
    torch.testing.assert_close(torch.stack(metrics).double(), torch.stack(expected).double(), rtol=1e-4, atol=1e-6)
    if normalize:
        weights = [w / every.mean() if every.mean() else w for w in weights]
    for i, n in enumerate(LENGTHS):
        mine = found[i, :n] if level == "token" else found[i]
        torch.testing.assert_close(
            mine.double(), weights[i] if n else torch.zeros_like(mine).double(), rtol=1e-4, atol=0
        )
    assert found.shape == ((B, T) if level == "token" else (B, 1))
    assert (found.expand(B, T)[~mask] == 0).all() or level != "token"


def test_sampler_weights_of_nothing_and_of_wrong_inputs():
    zeros = torch.zeros(2, 3)
    for kind in KINDS:
        found, metrics = functional.sampler_weights(zeros, zeros, zeros, kind)
        assert not found.any()
        assert not any(metrics)
    with pytest.raises(ValueError, match="unknown kind 'tis'"):
        functional.sampler_weights(zeros, zeros, zeros, "tis")
    with pytest.raises(ValueError, match="high must lie in"):
        functional.sampler_weights(zeros, zeros, zeros, low=3.0)
