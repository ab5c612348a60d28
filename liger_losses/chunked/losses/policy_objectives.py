"""Policy optimization as pure functions of log-probabilities: the GRPO family, PPO, RLOO, REINFORCE.

B completions, T tokens of the longest. Every loss is ``sum_t weight_t (-objective_t + beta kl_t)`` over completion
tokens, and a row of the tables in ``policy_tables.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from liger_losses import checks
from liger_losses.arguments import options_of, typed_as
from liger_losses.chunked.core.agreement import agree
from liger_losses.chunked.losses.completion_loss import MAX_EXPONENT, wide_dtype
from liger_losses.chunked.losses.policy_estimates import KL_ESTIMATORS, NORMALIZERS, ratio_of
from liger_losses.chunked.losses.policy_tables import RATIOS, PolicyOptions
from liger_losses.chunked.losses.softmax_divergences import distribution, divergence, log_rest
from liger_losses.chunked.losses.sums import gather_over_processes, sum_over_group, sum_over_processes, wide, world_size
from liger_losses.kernels.divergence_forms import finite_logs

#: Log-probabilities of tokens under other policies.
_LOGPS = ("old_logps", "sampling_logps", "ref_logps")


@dataclass(frozen=True)
class PolicyTensors:
    """What :func:`grpo_loss` takes beside log-probabilities and options; errors have these ``names`` of arguments."""

    advantages: Tensor
    mask: Tensor
    _: KW_ONLY
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    sampling_logps: Tensor | None = None
    is_ratio: Tensor | None = None
    acting: Tensor | None = None
    topk_logps: Tensor | None = None
    sampler_topk_logps: Tensor | None = None
    num_items_in_batch: Tensor | float | None = None
    prompts: Tensor | None = None
    group: dist.ProcessGroup | None = None

    def check(self, o: PolicyOptions) -> None:
        """Raise TypeError or ValueError unless a loss has the inputs that its row needs."""
        loss, prompts = f"loss_type={o.loss_type!r}", self.prompts
        checks.check_tensor("advantages", self.advantages)
        if self.group is not None and o.objective.whole:
            raise ValueError(f"{loss} reads the tokens of whole completions: pass whole completions, and no group=.")
        if (o.sampler_term == "none") != (self.sampler_topk_logps is None):
            raise ValueError(
                f"{loss} with sampler_term={o.sampler_term!r} and the sampler's most likely tokens (sampler_topk= of "
                "losses, topk_logps= and sampler_topk_logps= of functions): give both, or none."
            )
        if self.sampler_topk_logps is not None and not self.sampler_topk_logps.is_floating_point():
            raise TypeError(f"sampler_topk_logps must be floating point, got {self.sampler_topk_logps.dtype}.")
        if o.centers and (self.old_logps is None or self.sampling_logps is not None):
            raise ValueError(
                f"sampler_term={o.sampler_term!r} needs ratios to the sampler: pass its log-probabilities as the old "
                "policy's (old_logps= of functions, old_per_token_logps= of losses), and no other ones of the sampler."
            )
        if o.row.of_old and self.old_logps is None:
            raise ValueError(
                f"{loss} learns from log-ratios to an old policy: pass its log-probabilities (old_logps= of functions, "
                "old_per_token_logps= of losses)."
            )
        if o.mask.of_sampler and self.sampling_logps is None:
            raise ValueError(
                f"{loss} with this token_mask compares the old policy with the sampler: pass the sampler's "
                "log-probabilities (sampling_logps= of functions, sampling_per_token_logps= of losses)."
            )
        if prompts is None:
            if o.row.normalizer == "prompt_mean" or o.objective.of_prompts:
                raise ValueError(f"{loss}, normalizer={o.row.normalizer!r} needs prompts=, int64 [B].")
            return
        checks.check_shaped("prompts", prompts, "completion", self.mask.device, self.mask.shape[:1])
        if prompts.is_floating_point():
            raise ValueError(f"prompts must be integers, which prompt each completion answers, got {prompts.dtype}.")


class PolicyInputs:
    """What a policy loss reads besides the policy's log-probabilities: constants ``[B, T]``.

    Checks shapes, drops what padding holds, which may be NaN, and counts the tokens, of all ranks and processes where
    the loss needs these. The mask is bool.

    ``copies`` are the ranks that share the policy's vocabulary, which have the same completions. ``common_options`` are
    those of the loss, which all ranks of the group have in common; ``names`` are those of arguments in error messages.
    ``counted []`` is the number of all tokens over the group, at least 1. ``items []`` are the tokens that losses are
    divided by: ``counted``, or the share of those of all processes that falls on the ranks which compute one loss
    together.
    """

    def __init__(
        self,
        options: PolicyOptions,
        tensors: PolicyTensors,
        copies: int = 1,
        common_options: Mapping[str, Any] | None = None,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        mask, group, number = tensors.mask, tensors.group, tensors.num_items_in_batch
        tensors.check(options)
        self.options, self.mask, self.group, self.prompts = options.values, mask, group, tensors.prompts
        self.tensors: dict[str, Tensor] = {}  # [B, T], 0 at padding
        self.is_ratio: Tensor | None = None  # as it was passed, [B, 1] or [B, T]
        shape, padding = mask.shape, ~mask
        for argument in ("advantages", "is_ratio", *_LOGPS):
            name, of_completions = names.get(argument, argument), argument not in _LOGPS
            if (value := getattr(tensors, argument)) is None:
                continue
            of, columns = ("completion or token", (shape[:1], (shape[0], 1))) if of_completions else ("token", ())
            checks.check_shaped(name, value, of, mask.device, *columns, shape)
            if value.is_complex() or (not of_completions and not value.is_floating_point()):
                raise TypeError(f"{name} must be floating point, got {value.dtype}.")
            value = value[:, None] if value.dim() == 1 else value
            value = (value.detach() if value.requires_grad else value).to(wide(value.dtype))
            self.is_ratio = value if argument == "is_ratio" else self.is_ratio
            # Of a probability of 0, the ratio is as large as the largest, and no difference is infinite.
            value = value.masked_fill(padding, 0.0)
            self.tensors[argument] = value if of_completions else finite_logs(value)
        self.advantages, self._sampler_topk = self.tensors["advantages"], tensors.sampler_topk_logps
        divides, count = options.row.normalizer == "items", None
        if number is not None and (divides or group is not None):
            count = checks.checked_items(number, mask.device)
        if group is not None:
            whole = None if self.is_ratio is None else self.is_ratio.shape[1] == 1
            items = "not given" if number is None else "given"
            facts = {"sequences": len(mask), "is_ratio_of_whole_sequences": whole, "num_items_in_batch": items}
            agree(group, {**(common_options or vars(options)), **facts})
        (self.own_lengths,) = sum_over_group(group, mask.sum(-1, keepdim=True))
        tokens = self.own_lengths.sum(dtype=torch.float32)
        self.items = self.counted = tokens.clamp(min=1)
        if divides and count is not None:
            # Each process has added the tokens of all ranks that compute one loss with it.
            ranks = copies * (1 if group is None else dist.get_world_size(group))
            self.items = (count * (ranks / world_size())).clamp(min=1)
        elif divides and world_size() > 1:  # only these losses synchronize all processes
            self.items = (sum_over_processes(tokens) * (1 / world_size())).clamp(min=1)
        self.divisor = NORMALIZERS[options.row.normalizer](self)

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights of terms in the loss, ``[]`` or ``[B, T]``, by the names of :func:`weighted`."""
        shares = self.mask.new_full([1] * getattr(self.divisor, "ndim", 0), -1.0, dtype=wide(dtype)) / self.divisor
        weights = {"weights": shares.expand_as(self.mask) if shares.dim() else shares}
        if self.options.positive_nll:
            positive = self.mask & (self.advantages > 0)
            share = self.options.positive_nll * positive.to(wide(dtype))
            weights["nll_weights"] = share / self.total(positive).clamp(min=1)
        return weights

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each completion, ``[B, 1]``, over the group, at least 1."""
        return self.own_lengths.clamp(min=1)

    def of_tokens(self) -> dict[str, Tensor]:
        """What the terms of tokens read, by the names of :func:`policy_terms`."""
        reads_sampler = self.options.mask.weights is not None or self.options.log_ratio_penalty
        unread = () if reads_sampler else ("sampling_logps",)
        return {name: value for name, value in self.tensors.items() if name not in unread} | self._of_columns()

    def _of_columns(self) -> dict[str, Tensor]:
        """``sampler_topk``, the sampler's log-probabilities of all columns; of centered objectives after the old
        policy's of the label, and ``shares``, the factors of all of them."""
        if (topk := self._sampler_topk) is None:
            return {}
        logs = topk.detach().to(wide(topk.dtype)).masked_fill(~self.mask[..., None], 0.0)
        if not self.options.centers:
            return {"sampler_topk": distribution(finite_logs(logs), "bucket")}
        q = logs.exp()
        q = torch.cat([q, (1 - q.sum(-1, keepdim=True)).clamp(min=0.0)], -1)
        # Where the sampler's probability is 0, the ratio has no influence, and may be anything finite.
        of_columns = torch.cat([self.tensors["old_logps"][..., None], q.clamp(min=1e-30).log()], -1)
        return {"sampler_topk": of_columns, "shares": pad(-self.options.sampler_coef * q, (1, 0), value=1.0)}

    def of_one_prompt(self) -> tuple[Tensor, Tensor]:
        """Which completions with tokens answer the same prompt, ``[B, B]`` bool, and how many, ``[B]``."""
        assert self.prompts is not None
        has_tokens = self.own_lengths > 0
        same = (self.prompts[:, None] == self.prompts) & has_tokens & has_tokens[:, 0]
        return same, same.sum(1)

    @staticmethod
    def number_of_prompts(of_prompt: Tensor) -> Tensor:
        """The number of prompts, 0-dim, from the number of completions of each completion's prompt ``[B]``."""
        return torch.where(of_prompt > 0, of_prompt.clamp(min=1).float().reciprocal(), 0.0).sum()

    def tokens_of_prompts(self) -> Tensor:
        """The number of tokens of each completion's prompt, times the number of prompts, ``[B, 1]``."""
        same, of_prompt = self.of_one_prompt()
        return (same * self.own_lengths[:, 0]).sum(1, keepdim=True) * self.number_of_prompts(of_prompt)

    def sequence_sums(self, values: Tensor) -> Tensor:
        """Each completion's sum of values ``[B, T]`` over its tokens, ``[B, 1]``, for functions of each token."""
        return sum_over_group(self.group, (values * self.mask).sum(-1, keepdim=True), sum_gradients=True)[0]

    def total(self, values: Tensor) -> Tensor:
        """The sum of values ``[B, T]`` over all tokens, 0-dim, for what is the same on all ranks."""
        return sum_over_group(self.group, values.sum() if values.dim() else values)[0]


def _corrected_k3(d: Tensor, kl: Tensor, ratio: Tensor) -> Tensor:
    """``r k3(d)`` with ``r = p / p_old`` of the same token, whose derivative by ``log p`` is ``-r d``.

    The product rule gives it as a difference of terms of size ``r e^d``, which has no digits left in fp32 for large d.
    """
    d = d.clamp(-1e3, MAX_EXPONENT)
    return (ratio * kl).detach() + (ratio * d).detach() * (d - d.detach())


def _compared(logps: Tensor, tensors: Mapping[str, Tensor], o: PolicyOptions) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities of the old policy, by default the current one, and of the sampler, by default and where
    they are NaN the old one; and what weighs the objective: advantages, of loss types ``of_reference`` times
    ``log p_ref - log p``, a constant."""
    current = logps.detach() if logps.requires_grad else logps
    advantages, ref = tensors["advantages"], tensors.get("ref_logps")
    old, sampler = tensors.get("old_logps", current), tensors.get("sampling_logps")
    sampler = old if sampler is None else torch.where(sampler.isnan(), old, sampler)
    if not o.row.of_reference:
        return old, sampler, advantages
    if ref is None:
        raise ValueError(f"loss_type={o.loss_type!r} learns from a reference: pass its log-probabilities, ref_logps=.")
    return old, sampler, advantages * (ref - current)


def policy_terms(
    logps: Tensor,
    tensors: Mapping[str, Tensor],
    o: PolicyOptions,
    inputs: PolicyInputs | None = None,
    acting: Tensor | None = None,
    topk: Any = None,
) -> Tensor:
    """``objective_t - beta kl_t`` of tokens, elementwise, with the ``tensors`` of :meth:`PolicyInputs.of_tokens`.

    Ratios of completions, and objectives that couple tokens, read ``inputs``. ``topk [..., k]`` are log-probabilities
    of the sampler's most likely tokens."""
    batch = [inputs] if o.objective.coupled else []
    old, sampler, advantages = _compared(logps, tensors, o)
    log_ratio = RATIOS[o.row.level](logps - old, inputs)
    ref, is_ratio = tensors.get("ref_logps"), tensors.get("is_ratio")

    def objective_of(logps: Tensor, log_ratio: Tensor, advantages: Tensor, old: Tensor, sampler: Tensor) -> Tensor:
        value = o.objective.value(log_ratio, logps, advantages, o, *batch, **o.declared)
        weights = o.mask_weights(logps, old, sampler, advantages)
        return value if weights is None else torch.where(weights != 0, value * weights, 0.0)

    if o.centers:  # the label and the sampler's columns in one call, which launches half as many operations as two
        p, q = torch.cat([logps[..., None], topk, log_rest(topk)], -1), tensors["sampler_topk"]
        objective = (tensors["shares"] * objective_of(p, p - q, advantages[..., None], q, q)).sum(-1)
    else:
        objective = objective_of(logps, log_ratio, advantages, old, sampler)
    if acting is not None:
        objective = torch.where(acting, objective, 0.0)
    if is_ratio is not None and not o.row.corrected:
        objective = objective * is_ratio
    if o.divergence is not None:
        of_columns = divergence(distribution(topk, "bucket"), tensors["sampler_topk"], o.divergence)
        objective = objective - o.sampler_coef * of_columns
    if o.log_ratio_penalty:
        objective = objective - o.log_ratio_penalty * (logps - sampler).square()
    if not o.beta or ref is None:
        return objective
    log_ref_ratio = ref - logps
    kl = KL_ESTIMATORS[o.kl_estimator](log_ref_ratio)
    if o.use_bias_correction_kl and o.row.level == "token" and o.kl_estimator == "k3":
        kl = _corrected_k3(log_ref_ratio, kl, ratio_of(log_ratio))
    elif o.use_bias_correction_kl:
        kl = kl * ratio_of(log_ratio)
    return objective - o.beta * kl


def coupled_terms(
    logps: Tensor, inputs: PolicyInputs, acting: Tensor | None = None, topk: Tensor | None = None
) -> Tensor:
    """:func:`policy_terms` ``[B, T]`` of checked inputs."""
    o, tensors, dtype = inputs.options, inputs.tensors, logps.dtype
    if o.beta and "ref_logps" in tensors and o.use_bias_correction_kl and o.row.level != "token":
        # By log p, the derivatives of a completion's ratio and of its tokens' kl are of size e^d, and cancel to -d in a
        # completion of one token, or of one unlikely one: fp32 has no digits of it left from a gap of 17 nats on.
        logps = logps.to(wide_dtype(logps.device))
    if o.off_policy_mask_threshold is not None:
        sampler = tensors.get("sampling_logps", tensors.get("old_logps", logps.detach()))
        drift = (torch.nan_to_num(sampler, nan=0.0) - logps.detach()) * ~sampler.isnan() * inputs.mask
        drift = inputs.sequence_sums(drift) / inputs.lengths
        near = (inputs.advantages >= 0) | (drift <= o.off_policy_mask_threshold)
        acting = near if acting is None else acting & near
    return policy_terms(logps, inputs.of_tokens(), o, inputs, acting, topk).to(dtype)


def coupled_losses(
    logps: Tensor, inputs: PolicyInputs, acting: Tensor | None = None, topk: Tensor | None = None
) -> Tensor:
    """The losses ``[B, T]`` whose sum :func:`grpo_loss` is, of checked inputs; 0 at padding."""
    losses = weighted(logps, coupled_terms(logps, inputs, acting, topk), **inputs.weights(logps.dtype))
    return torch.where(inputs.mask, losses, 0.0)


def weighted(logps: Tensor, terms: Tensor, weights: Tensor, nll_weights: Tensor | None = None) -> Tensor:
    """The losses of tokens with these terms, elementwise."""
    return weights * terms if nll_weights is None else weights * terms - nll_weights * logps


@dataclass(frozen=True)
class _Logps:
    logps: Tensor


@dataclass(frozen=True)
class _GRPOArguments(PolicyOptions, PolicyTensors, _Logps):
    """What :func:`grpo_loss` takes."""


@typed_as(_GRPOArguments)
def grpo_loss(logps: Tensor, advantages: Tensor, mask: Tensor, **others: Any) -> Tensor:
    """GRPO and its variants: ``sum_t weight_t (-objective_t + beta kl_t)``.

    For ``loss_type="grpo"`` (arXiv:2402.03300, eq. 3), ``objective = min(r A, clip(r, 1 - e_low, 1 + e_high) A)`` with
    ``r = exp(logp - old_logp)``, ``kl`` is :func:`k3`, and the weights average over the tokens of a completion, then
    over completions. :data:`LOSS_TYPES` has the other loss types with their sources.

    Args:
        logps: ``[B, T]``, the policy's log-probability of each completion token.
        advantages: ``[B]`` or ``[B, T]``.
        mask: ``[B, T]``, 0 for padding. The values of other tensors at padding have no influence; ``logps`` must be
            finite there.
        old_logps, ref_logps, sampling_logps: ``[B, T]``, log-probabilities under other policies. ``old_logps`` is the
            denominator of the ratio (by default the current policy). ``ref_logps`` is the reference; without it, there
            is no KL divergence. ``sampling_logps`` is the sampler (by default the old policy; NaN if unknown), for
            masks and for the penalty on its log-ratio.
        is_ratio: ``[B]``, ``[B, 1]`` or ``[B, T]``, importance weights that correct for the sampler's probabilities.
        acting: ``[B, T]`` bool, the tokens that have an objective (:func:`high_entropy_mask`); by default all.
        topk_logps, sampler_topk_logps: ``[B, T, k]``, log-probabilities of the sampler's k most likely tokens at each
            position, over the whole vocabulary: the policy's, which has a gradient, and the sampler's. For
            ``sampler_term``.
        num_items_in_batch: the divisor of ``dapo``, ``cispo`` and ``vespo``: the number of completion tokens over all
            processes and accumulated batches; by default the number in this batch.
        prompts: ``[B]`` integers that say which prompt each completion answers, for ``real`` and the normalizer
            ``prompt_mean``.
        group: the ranks that hold slices ``[B, T]`` of the same completions. Each rank gets the loss of the whole
            completions, and the gradient of its log-probabilities. With ratios of completions, backward is a
            collective.
        options: the fields of :class:`PolicyOptions`, ``loss_type="dapo"``, ``beta=0.04``, ``epsilon_low=0.2`` ..., and
            those of a registered objective.

    Returns:
        0-dim.

    Raises:
        TypeError, ValueError: shapes that do not fit together, or options out of their range.
    """
    known = {name: others.pop(name) for name in PolicyTensors.__dataclass_fields__ if name in others}
    o = options_of(PolicyOptions, grpo_loss, PolicyOptions.folded(others))
    checks.check_tensor("logps", logps)
    checks.check_tensor("mask", mask)
    if logps.dim() != 2 or logps.shape != mask.shape:
        raise ValueError(f"logps and mask must both be [B, T], got {tuple(logps.shape)} and {tuple(mask.shape)}.")
    tensors = PolicyTensors(advantages, mask != 0, **known)
    if tensors.group is not None:
        checks.check_group(tensors.group, "cp")
    acting = None if tensors.acting is None else checks.checked_mask("acting", tensors.acting, "mask", mask)
    topk = tensors.topk_logps
    if topk is not None or tensors.sampler_topk_logps is not None:
        checks.check_tensor("topk_logps", topk)
        assert topk is not None
        shape, of = (*logps.shape, topk.shape[-1]), "token and column"
        checks.check_shaped("topk_logps", topk, of, logps.device, shape)
        checks.check_shaped("sampler_topk_logps", tensors.sampler_topk_logps, of, logps.device, shape)
        topk = torch.where(tensors.mask[..., None], topk, 0.0)
    inputs = PolicyInputs(o, tensors)
    return inputs.total(coupled_losses(logps, inputs, acting, topk))


@torch.no_grad()
def token_metrics(logps: Tensor, inputs: PolicyInputs, kl: bool) -> list[Tensor]:
    """``[B, T]``: estimates of the divergence, and which tokens' gradients clipping removed, as bool; 0 at padding."""
    o, mask = inputs.options, inputs.mask
    old, sampler, advantages = _compared(logps, inputs.tensors, o)
    ratio, cut = ratio_of(RATIOS[o.row.level](logps - old, inputs)), o.objective.cut
    dropped = torch.zeros_like(mask) if cut is None else cut(ratio, advantages, o)
    if (weights := o.mask_weights(logps, old, sampler, advantages)) is not None:
        dropped = dropped | (weights == 0)
    if not kl:
        return [dropped & mask]
    ref = inputs.tensors.get("ref_logps")
    estimates = torch.zeros_like(logps) if ref is None else KL_ESTIMATORS[o.kl_estimator](ref - logps)
    return [torch.where(mask, estimates * ratio if o.use_bias_correction_kl else estimates, 0.0), dropped & mask]


def high_entropy_mask(entropy: Tensor, mask: Tensor, share: float, *, copies: int = 1) -> Tensor:
    """The tokens with the highest entropy, a ``share`` of the tokens of all processes (arXiv:2506.01939).

    Args:
        entropy, mask: ``[B, T]``; the mask is bool.
        share: in (0, 1].
        copies: the number of processes that have the same tokens, such as the ranks of a vocabulary-parallel head.

    Returns:
        ``[B, T]`` bool; the mask itself if no process has a token. A collective.
    """
    checks.check_alike(entropy=entropy)
    mask = checks.checked_mask("mask", mask, "entropy", entropy)
    checks.check_range("share", share, 0.0, 1.0, open_low=True)
    return _high_entropy_mask(entropy.detach(), mask, share, copies)


@torch.library.custom_op("liger_losses::high_entropy_mask", mutates_args=())
def _high_entropy_mask(entropy: Tensor, mask: Tensor, share: float, copies: int) -> Tensor:
    """An operator, as the number of tokens depends on values."""
    values = gather_over_processes(entropy[mask])
    if not values.numel():
        return mask.clone()
    # The quantile 1 - share; torch.quantile takes no more than 16 million values.
    ordered = values.sort().values[::copies]
    at = (1 - share) * (ordered.numel() - 1)
    low, high = math.floor(at), math.ceil(at)
    return mask & (entropy >= torch.lerp(ordered[low], ordered[high], at - low))


@_high_entropy_mask.register_fake
def _(entropy: Tensor, mask: Tensor, share: float, copies: int) -> Tensor:
    return torch.empty_like(mask)
