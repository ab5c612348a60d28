"""Losses of few tokens as functions of their log-probabilities: value, metrics and derivatives in one launch.

In PyTorch, such a loss is dozens of operations on a few numbers, each of which takes the host as long as a launch.
A single program computes it here. T tokens, B pairs or completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.kernels._triton import HALF_AND_SINGLE, Launcher, jit, tl
from liger_losses.kernels.label_rows import count_active
from liger_losses.kernels.masked_rows import RowStatistics

#: Tokens that a program reads at a time; and the largest exponent, beyond which ratios are constant.
_BLOCK = 1024
_MAX_EXPONENT = 80.0
#: Of the constant inputs: advantages, and log-probabilities under other policies.
INPUT_DTYPES = HALF_AND_SINGLE
#: Of more pairs, which one program takes one after another, the launches of PyTorch's operations take less time.
MOST_PAIRS = 64


class Coupled(NamedTuple):
    """A loss (0-dim fp32), its metrics, and its derivative by each token's log-probability ``[T]`` fp32."""

    loss: Tensor
    metrics: tuple[Tensor, ...]
    derivative: Tensor


class PairRows:
    """The mean over pairs of ``-(1 - e) log s(x) - e log s(-x)``, ``x = beta ((logp_w - ref_w) - (logp_l - ref_l))``:
    DPO (arXiv:2305.18290, eq. 7), of sums of log-probabilities over a completion's tokens.

    Args:
        pairs: B.
        lengths: the tokens of a chosen and of a rejected completion, masked ones included; chosen ones come first.
        ignore_index: the label of tokens without loss, whose log-probabilities and mean logits are 0.
        beta, label_smoothing: beta and e.
        backend: ``torch`` or ``triton``.
    """

    def __init__(
        self, pairs: int, lengths: Sequence[int], ignore_index: int, beta: float, label_smoothing: float, backend: str
    ) -> None:
        self.sizes = pairs, *lengths, int(ignore_index)
        self.beta, self.label_smoothing = float(beta), float(label_smoothing)
        self.triton = backend == "triton"
        self.launch, self.outputs = Launcher(_pairs_kernel, 1), list[Tensor]()

    def __call__(
        self, values: RowStatistics, labels: Tensor, chosen: Tensor | None, rejected: Tensor | None
    ) -> Coupled:
        """The loss from statistics with the mean logit, and the reference's log-probabilities ``[B]`` (or none).

        The metrics are ``[B]`` the policy's of chosen and rejected completions, 0-dim the mean logits of both sides and
        the mean negative log-likelihood of the chosen tokens, and ``[B]`` the rewards of both sides.
        """
        if not self.triton:
            return self._reference(values, labels, chosen, rejected)
        logp = values.logp
        if not self.outputs:  # memory like a tensor's takes the host less time than memory of a size
            self.outputs = [logp.new_empty(size) for size in ((), (3,), (4, self.sizes[0]))]
        loss, means, rows, derivative = map(torch.empty_like, (*self.outputs, logp))
        self.launch(
            logp, values.mean_logit, labels, chosen, rejected, derivative, loss, means, rows,
            *self.sizes, self.beta, self.label_smoothing, _BLOCK,
        )  # fmt: skip
        first, second, *rewards = rows.unbind()
        return Coupled(loss, (first, second, *means.unbind(), *rewards), derivative)

    def _reference(
        self, values: RowStatistics, labels: Tensor, chosen: Tensor | None, rejected: Tensor | None
    ) -> Coupled:
        """The reference in torch."""
        pairs, *lengths, ignore_index = self.sizes
        assert values.mean_logit is not None
        cut = [pairs * length for length in lengths]
        flat = values.logp.flatten(), values.mean_logit.flatten(), (labels != ignore_index).flatten()
        logps, logits, active = ([part.view(pairs, -1) for part in value.split(cut)] for value in flat)
        sums = [part.sum(-1, dtype=torch.float64) for part in logps]
        counts = [part.sum().clamp(min=1) for part in active]
        ratios = [total if ref is None else total - ref for total, ref in zip(sums, (chosen, rejected), strict=True)]
        x, e = self.beta * (ratios[0] - ratios[1]), self.label_smoothing
        losses = -(1 - e) * F.logsigmoid(x) - e * F.logsigmoid(-x)
        slope = (e * torch.sigmoid(x) - (1 - e) * torch.sigmoid(-x)) * self.beta / pairs
        means = [part.sum() / count for part, count in zip(logits, counts, strict=True)]
        each = zip((slope, -slope), lengths, strict=True)
        derivative = [g.float()[:, None].expand(pairs, length) for g, length in each]
        metrics = (*sums, *means, -sums[0].sum() / counts[0], *[self.beta * ratio for ratio in ratios])
        found = torch.cat([part.reshape(-1) for part in derivative]).view(values.logp.shape)
        return Coupled(losses.mean().float(), tuple([value.float() for value in metrics]), found)


class PolicyRows:
    """``1 / d sum_t (beta kl_t - min(r_t A_t, clip(r_t, low, high) A_t))`` over the tokens that carry loss: GRPO
    (arXiv:2402.03300, eq. 3) with DAPO's average (arXiv:2503.14476), ``r = exp(logp - old)``,
    ``kl = exp(ref - logp) - (ref - logp) - 1``.

    Args:
        tokens: T.
        length: the tokens that share an advantage: all of a completion, masked ones included, or 1.
        ignore_index: the label of tokens without loss.
        bounds: low and high.
        beta: the weight of the divergence.
        backend: ``torch`` or ``triton``.
    """

    def __init__(
        self, tokens: int, length: int, ignore_index: int, bounds: tuple[float, float], beta: float, backend: str
    ) -> None:
        self.sizes, self.bounds, self.beta = (tokens, length, int(ignore_index)), bounds, float(beta)
        self.triton = backend == "triton"
        self.launch, self.outputs = Launcher(_policy_kernel, 1), list[Tensor]()

    def __call__(
        self,
        values: RowStatistics,
        labels: Tensor,
        advantages: Tensor,
        old: Tensor | None,
        ref: Tensor | None,
        items: Tensor | None = None,
    ) -> Coupled:
        """The loss from the statistics, ``T / length`` advantages, ``[T]`` log-probabilities under the old policy (this
        one by default) and the reference (no divergence without one), and d ``[]``, at least 1: the number of tokens
        that carry loss by default.

        The metrics, 0-dim, are the share of clipped tokens and the mean divergence.
        """
        if not self.triton:
            return self._reference(values, labels, advantages, old, ref, items)
        logp = values.logp
        if not self.outputs:
            self.outputs = [logp.new_empty(size) for size in ((), (2,))]
        loss, means, derivative = map(torch.empty_like, (*self.outputs, logp))
        self.launch(
            logp, labels, advantages, old, ref, items, derivative, loss, means,
            *self.sizes, *self.bounds, self.beta, _BLOCK, _MAX_EXPONENT,
        )  # fmt: skip
        return Coupled(loss, means.unbind(), derivative)

    def _reference(
        self,
        values: RowStatistics,
        labels: Tensor,
        advantages: Tensor,
        old: Tensor | None,
        ref: Tensor | None,
        items: Tensor | None,
    ) -> Coupled:
        """The reference in torch."""
        (_, length, ignore_index), (low, high) = self.sizes, self.bounds
        logp, active = values.logp.flatten(), (labels != ignore_index).flatten()
        zeros, count = torch.zeros_like(logp), active.sum().clamp(min=1)
        a = advantages.float().flatten().repeat_interleave(length).where(active, zeros)
        gap = zeros if old is None else (logp - old.flatten()).where(active, zeros)
        ratio = gap.clamp(max=_MAX_EXPONENT).exp()
        gain, bound = ratio * a, ratio.clamp(low, high) * a
        away = zeros if ref is None else (ref.flatten() - logp).where(active, zeros)
        d = away.clamp(max=_MAX_EXPONENT).double()
        kl = d.expm1() - d
        terms = self.beta * kl - torch.minimum(gain, bound)
        slope = -gain.where((gain <= bound) & (gap <= _MAX_EXPONENT), zeros)
        slope = slope - self.beta * d.expm1().where(away <= _MAX_EXPONENT, zeros.double())
        cut = (ratio - ratio.clamp(low, high)) * a > 0
        metrics = (cut.sum() / count).float(), (kl.sum() / count).float()
        divisor = count if items is None else items
        loss, found = (terms.sum() / divisor).float(), (slope / divisor).float().where(active, zeros)
        return Coupled(loss, metrics, found.view(values.logp.shape))


@jit
def _sums_of_completion(logp, mean_logit, labels, start, length, ignore_index, BLOCK: tl.constexpr):
    """A completion's sums of log-probabilities (fp64) and of mean logits, and its number of tokens with loss."""
    total = tl.zeros((BLOCK,), tl.float64)
    logits = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, length, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < length
        total += tl.load(logp + start + at, mask=inside, other=0.0).to(tl.float64)
        logits += tl.load(mean_logit + start + at, mask=inside, other=0.0)
        count += (tl.load(labels + start + at, mask=inside, other=ignore_index) != ignore_index).to(tl.int32)
    return tl.sum(total, 0), tl.sum(logits, 0), tl.sum(count, 0)


@jit
def _fill(out, start, length, value, BLOCK: tl.constexpr):
    for first in range(0, length, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(out + start + at, tl.zeros((BLOCK,), tl.float32) + value, mask=at < length)


@jit(
    do_not_specialize=["pairs", "chosen_length", "rejected_length", "ignore_index"],
    do_not_specialize_on_alignment=["labels", "chosen_ref", "rejected_ref"],
)
def _pairs_kernel(
    logp, mean_logit, labels, chosen_ref, rejected_ref, derivative, loss, means, rows,
    pairs, chosen_length, rejected_length, ignore_index, beta, smoothing,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program."""
    total_loss = tl.zeros((), tl.float64)
    likelihood = tl.zeros((), tl.float64)
    chosen_logits = tl.zeros((), tl.float32)
    rejected_logits = tl.zeros((), tl.float32)
    chosen_count = tl.zeros((), tl.int32)
    rejected_count = tl.zeros((), tl.int32)
    for pair in range(pairs):
        chosen_start = pair * chosen_length
        rejected_start = pairs * chosen_length + pair * rejected_length
        chosen, logits, count = _sums_of_completion(
            logp, mean_logit, labels, chosen_start, chosen_length, ignore_index, BLOCK
        )
        likelihood += chosen
        chosen_logits += logits
        chosen_count += count
        rejected, logits, count = _sums_of_completion(
            logp, mean_logit, labels, rejected_start, rejected_length, ignore_index, BLOCK
        )
        rejected_logits += logits
        rejected_count += count
        tl.store(rows + pair, chosen.to(tl.float32))
        tl.store(rows + pairs + pair, rejected.to(tl.float32))
        if chosen_ref is not None:
            chosen -= tl.load(chosen_ref + pair).to(tl.float64)
        if rejected_ref is not None:
            rejected -= tl.load(rejected_ref + pair).to(tl.float64)
        tl.store(rows + 2 * pairs + pair, (beta * chosen).to(tl.float32))
        tl.store(rows + 3 * pairs + pair, (beta * rejected).to(tl.float32))
        x = beta * (chosen - rejected)
        log_s = tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))
        log_not_s = tl.minimum(-x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))
        total_loss -= (1.0 - smoothing) * log_s + smoothing * log_not_s
        slope = (smoothing * tl.exp(log_s) - (1.0 - smoothing) * tl.exp(log_not_s)) * beta / pairs
        _fill(derivative, chosen_start, chosen_length, slope.to(tl.float32), BLOCK)
        _fill(derivative, rejected_start, rejected_length, -slope.to(tl.float32), BLOCK)
    tl.store(loss, (total_loss / pairs).to(tl.float32))
    tl.store(means, chosen_logits / tl.maximum(chosen_count, 1))
    tl.store(means + 1, rejected_logits / tl.maximum(rejected_count, 1))
    tl.store(means + 2, (-likelihood / tl.maximum(chosen_count, 1)).to(tl.float32))


@jit(
    do_not_specialize=["tokens", "length", "ignore_index"],
    do_not_specialize_on_alignment=["labels", "advantages", "old", "ref", "items"],
)
def _policy_kernel(
    logp, labels, advantages, old, ref, items, derivative, loss, means,
    tokens, length, ignore_index, low, high, beta,
    BLOCK: tl.constexpr, MAX_EXPONENT: tl.constexpr,
):  # fmt: skip
    """One program, which counts the tokens first."""
    count = count_active(labels, tokens, ignore_index, BLOCK).to(tl.float32)
    divisor = count
    if items is not None:
        divisor = tl.load(items)
    total = tl.zeros((BLOCK,), tl.float64)
    divergence = tl.zeros((BLOCK,), tl.float64)
    clipped = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, tokens, BLOCK):
        at = first + tl.arange(0, BLOCK)
        active = tl.load(labels + at, mask=at < tokens, other=ignore_index) != ignore_index
        own = tl.load(logp + at, mask=active, other=0.0)
        a = tl.load(advantages + at // length, mask=active, other=0.0).to(tl.float32)
        gap = tl.zeros((BLOCK,), tl.float32)
        if old is not None:
            gap = own - tl.load(old + at, mask=active, other=0.0).to(tl.float32)
        ratio = tl.exp(tl.minimum(gap, MAX_EXPONENT))
        within = tl.minimum(tl.maximum(ratio, low), high)
        gain = ratio * a
        bound = within * a
        term = -tl.minimum(gain, bound).to(tl.float64)
        slope = -tl.where((gain <= bound) & (gap <= MAX_EXPONENT), gain, 0.0).to(tl.float64)
        if ref is not None:
            away = tl.load(ref + at, mask=active, other=0.0).to(tl.float32) - own
            d = tl.minimum(away, MAX_EXPONENT).to(tl.float64)
            rise = tl.exp(d) - 1.0
            term += beta * (rise - d)
            slope -= tl.where(away <= MAX_EXPONENT, beta * rise, 0.0)
            divergence += tl.where(active, rise - d, 0.0)
        total += tl.where(active, term, 0.0)
        clipped += (active & ((ratio - within) * a > 0.0)).to(tl.int32)
        tl.store(derivative + at, tl.where(active, slope / divisor, 0.0).to(tl.float32), mask=at < tokens)
    tl.store(loss, (tl.sum(total, 0) / divisor).to(tl.float32))
    tl.store(means, tl.sum(clipped, 0) / count)
    tl.store(means + 1, (tl.sum(divergence, 0) / count).to(tl.float32))
