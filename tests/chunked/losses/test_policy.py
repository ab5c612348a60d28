"""The GRPO family beside its golden results: identities, padding and extreme ratios."""

import math
from functools import partial

import pytest
import torch

from liger_losses import AdaptiveEntropy, functional
from liger_losses.chunked.losses.policy_estimates import KINDS, KL_ESTIMATORS
from liger_losses.chunked.losses.policy_tables import LOSS_TYPES, SAMPLER_TERMS
from tests.losses import GRPO
from tests.reference import plain_statistics
from tests.results.losses import batch

B, T, H, V = 4, 7, 16, 37


D = batch(torch.float32, B, T, H, V)
TENSORS = [D[name].requires_grad_() for name in ("h", "weight", "bias")]
IDS, MASK = D["y"].clamp(min=0), (torch.arange(T) < torch.tensor([7, 3, 5, 1])[:, None]).long()
LOGPS = plain_statistics(*TENSORS[:2], IDS, TENSORS[2])["logp"].detach()
ADVANTAGES, NOISE = torch.tensor([1.2, -0.7, 0.4, -1.5]), D["other"][..., 0]


def run(loss, ids=IDS, mask=MASK, **keywords):
    value, metrics = loss(*TENSORS[:2], ids, mask, ADVANTAGES, TENSORS[2], **keywords)
    return value, metrics, torch.autograd.grad(value, TENSORS)


def arguments(loss_type, others):
    """All that a loss may need beside the current log-probabilities, advantages and the mask."""
    given = dict.fromkeys(("old_logps", "ref_logps", "sampling_logps"), others) | {"max_completion_length": 9}
    of_loss = {"dro": {"log_ratio_penalty": 0.1}, "real": {"prompts": torch.tensor([0, 1, 1, 0])}}
    return {"loss_type": loss_type, **given, **of_loss.get(loss_type, {})}


@pytest.mark.parametrize("term", SAMPLER_TERMS)
def test_terms_of_the_sampler_are_finite(term):
    """Where its columns are impossible, for it or for the policy, or all that there is; 0 without tokens."""
    columns = torch.tensor([[-math.inf, 0.0], [-1e4, -1e4], [0.0, -math.inf], [-0.7, -0.6931472]]).expand(T, B, 2).mT
    columns = columns.movedim(-1, 0).contiguous()
    mine = columns.flip(0).clamp(min=-1e4).requires_grad_()
    options = {"old_logps": LOGPS - 200, "sampler_topk_logps": columns, "loss_type": "importance", "sampler_term": term}
    call = partial(functional.grpo_loss, LOGPS, ADVANTAGES, topk_logps=mine, beta=0.0, **options)
    nothing = call(torch.zeros_like(MASK))
    assert nothing == 0
    assert not torch.autograd.grad(nothing, mine)[0].any()
    loss = call(MASK)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, mine)[0].isfinite().all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_tokens_that_do_not_act_have_no_objective(loss_type):
    given = arguments(loss_type, LOGPS + 0.2 * NOISE)
    if loss_type in ("dro", "prime_ipo", "ref_kl"):
        given["log_ratio_penalty"] = 0.0  # which is no part of it
    acting = torch.zeros_like(MASK)
    logps = LOGPS.clone().requires_grad_()
    loss = functional.grpo_loss(logps, ADVANTAGES, MASK, acting=acting, beta=0.0, **given)
    assert loss == 0
    assert not torch.autograd.grad(loss, logps)[0].any()


def test_tokens_without_advantage_are_not_imitated():
    options = {"loss_type": "reinforce", "beta": 0.0, "positive_nll": 0.3}
    assert functional.grpo_loss(LOGPS, torch.zeros_like(ADVANTAGES), MASK, **options) == 0


@pytest.mark.parametrize("with_old", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"token_mask": "change", "mask_high": 0.02, "log_ratio_penalty": 0.3}, {"off_policy_mask_threshold": 0.02}],
    ids=str,
)
def test_a_sampler_that_is_not_known_is_the_old_policy(options, with_old):
    """Or the current one, where the old policy is not known either; at some tokens, in values and metrics."""
    old = LOGPS + 0.2 * NOISE if with_old else LOGPS
    known = NOISE.median() < NOISE
    sampler = torch.where(known, LOGPS + 0.3 * NOISE, old)
    call = partial(run, GRPO(beta=0.0, **options))
    call = partial(call, old_per_token_logps=old) if with_old else call
    found = [call(sampling_per_token_logps=x) for x in (sampler, torch.where(known, sampler, math.nan))]
    torch.testing.assert_close(*found)


def test_adaptive_entropy_follows_its_target():
    adaptive = AdaptiveEntropy(0.1, target=1.0, delta=0.05, high=0.2)
    assert adaptive.coef == 0.0  # nothing is known of the entropy yet
    for entropy, coef in ((0.5, 0.15), (0.5, 0.2), (0.5, 0.2), (2.0, 0.0), (0.5, 0.2)):
        adaptive.observe(torch.tensor(entropy * 4), torch.tensor(4))
        adaptive.observe(torch.tensor(entropy * 6), torch.tensor(6))
        adaptive.step()
        assert adaptive.coef == pytest.approx(coef)
    loss = GRPO(beta=0.0, entropy_coef=AdaptiveEntropy(0.1, target=1.0))
    run(loss)
    loss.entropy_coef.step()
    entropy = plain_statistics(*TENSORS[:2], IDS, TENSORS[2])["entropy"][MASK.bool()].mean()
    assert loss.entropy_coef.last_entropy == pytest.approx(float(entropy), rel=1e-4)
    restored = GRPO(beta=0.0).replace(entropy_coef=AdaptiveEntropy(0.5, target=1.0))
    restored.load_state_dict(loss.state_dict())
    assert restored.entropy_coef.state_dict() == loss.entropy_coef.state_dict()


@pytest.mark.parametrize("gap", [12.0, 19.0, 22.0, 30.0])
@pytest.mark.parametrize("level", ["sequence", "sequence_sum"])
def test_the_corrected_divergence_of_sequences_keeps_its_digits(level, gap):
    """Of one token, the derivative of ``r (e^d - d - 1)`` is ``-r d``: a difference of terms of size ``e^d``."""
    logps, options = torch.full((2, 3), -gap - 1), {"importance_sampling_level": level, "beta": 1.0}
    logps[:, 1:] = -2.0
    ref, mask, zeros = logps.clone(), torch.tensor([[1, 0, 0], [1, 1, 1]]), torch.zeros(2)
    ref[:, 0] += gap
    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = logps.to(dtype, copy=True).requires_grad_()
        given = {"ref_logps": ref.to(dtype), "old_logps": logps.to(dtype) - 0.1}
        loss = functional.grpo_loss(
            leaf, zeros, mask, loss_type="bnpo", use_bias_correction_kl=True, **given, **options
        )
        assert loss.dtype == dtype
        loss.backward()
        found.append(leaf.grad)
    assert float(found[0][0, 0]) == pytest.approx(-gap * math.exp(0.1) / 4, rel=1e-3)
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-3, atol=1e-3)


def test_ids_that_stand_for_no_token_are_masked():
    marked, masked = IDS.clone(), MASK.clone()
    marked[1, 2] = -100
    masked[1, 2] = 0
    for level in ("token", "sequence"):
        loss = GRPO(beta=0.2, loss_type="bnpo", importance_sampling_level=level)
        keywords = {"ref_per_token_logps": LOGPS, "old_per_token_logps": LOGPS + 0.1 * NOISE}
        torch.testing.assert_close(run(loss, marked, **keywords), run(loss, mask=masked, **keywords))


ESTIMATORS = [
    ("bnpo", {"kl_estimator": name, "use_bias_correction_kl": corrected})
    for name in KL_ESTIMATORS
    for corrected in (False, True)
]


@pytest.mark.parametrize(("loss_type", "estimator"), [*((name, {}) for name in LOSS_TYPES), *ESTIMATORS])
def test_extreme_ratios_keep_their_digits(loss_type, estimator):
    """Of tokens whose probability is 0 in fp32."""
    found = []
    for dtype in (torch.float32, torch.float64):
        logps = torch.full((B, T), -110.0, dtype=dtype, requires_grad=True)
        others = -110.0 + 30.0 * (-1) ** torch.arange(T, dtype=dtype).expand(B, T)
        given = arguments(loss_type, others) | estimator
        loss = functional.grpo_loss(logps, ADVANTAGES, MASK, beta=0.7, **given)
        found.append((loss.double(), torch.autograd.grad(loss, logps)[0].double()))
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-6 * float(exact.abs().max()))


def test_log_probabilities_of_a_reference_are_used_before_its_hidden_states():
    hidden, weight, _ = TENSORS
    call = partial(GRPO(), hidden, weight, IDS, MASK, ADVANTAGES, ref_per_token_logps=LOGPS)
    with pytest.warns(UserWarning, match="are used"):
        found = call(ref_input=hidden, ref_weight=weight)
    torch.testing.assert_close(found, call())


# --- What the sampler did ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_sampler_weights(kind):
    """A token whose sampler is not known has a ratio of 1; a completion without tokens has no weight."""
    mask = MASK.index_fill(0, torch.tensor(3), 0)
    sampler = LOGPS - 0.4 * NOISE
    sampler[1, 1], unknown = LOGPS[1, 1], sampler.clone()
    unknown[1, 1] = math.nan
    for normalize in (False, True):
        given = {"low": 0.75, "high": 1.4, "normalize": normalize}
        expected, found = (functional.sampler_weights(LOGPS, x, mask, kind, **given) for x in (sampler, unknown))
        torch.testing.assert_close(found, expected)
        assert not found[0][3].any()
        assert found[0].shape == ((B, T) if kind.startswith("token") else (B, 1))


@pytest.mark.parametrize("loss_type", ["grpo", "vespo"])
def test_ratios_of_masked_tokens_may_be_anything(loss_type):
    ratios = (NOISE.exp().masked_fill(MASK == 0, of_masked) for of_masked in (1.0, math.nan))
    options = {"loss_type": loss_type, "beta": 0.0}
    first, second = (functional.grpo_loss(LOGPS, ADVANTAGES, MASK, is_ratio=r, **options) for r in ratios)
    assert first == second


@pytest.mark.parametrize("kind", KINDS)
def test_one_forward_has_the_old_policy(kind):
    """The weights of log-probabilities with a gradient, and no old ones: as from a forward without gradients."""
    found = []
    for twice in (True, False):
        policy = LOGPS.clone().requires_grad_()
        old = policy.detach().clone() if twice else policy
        weights, _ = functional.sampler_weights(old, LOGPS - 0.4 * NOISE, MASK, kind, low=0.75, high=1.4)
        options = {"old_logps": old} if twice else {}
        loss = functional.grpo_loss(policy, ADVANTAGES, MASK, is_ratio=weights, beta=0.0, **options)
        found.append((loss.detach(), *torch.autograd.grad(loss, policy)))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert found[0][1].any()
