"""The GRPO family against Liger, against TRL's parts, and against what it is defined as."""

import math

import pytest
import torch

from liger_losses import AdaptiveEntropy, functional
from liger_losses.chunked.losses import policy_objectives
from liger_losses.chunked.losses.policy_tables import LOSS_TYPES, PolicyOptions, vespo_weights
from tests.losses import GRPO
from tests.reference import plain_statistics

B, T, H, V = 4, 7, 16, 37


def problem(seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64).to(dtype)

    hidden, weight, bias = normal(B, T, H).requires_grad_(), normal(V, H).requires_grad_(), normal(V).requires_grad_()
    with torch.no_grad():
        weight.mul_(H**-0.5)
    ids = torch.randint(V, (B, T), generator=g)
    mask = (torch.arange(T) < torch.tensor([7, 3, 5, 1])[:, None]).long()
    advantages = torch.tensor([1.2, -0.7, 0.4, -1.5])
    logps = plain_statistics(hidden, weight, ids, bias)["logp"].detach().float()
    return hidden, weight, bias, ids, mask, advantages, logps, normal(B, T).float()


def run(loss, tensors, *arguments, **keywords):
    hidden, weight, bias = tensors
    value, metrics = loss(hidden, weight, *arguments, bias, **keywords)
    return value, metrics, torch.autograd.grad(value, tensors)


def close(first, second, rtol=1e-4, atol=1e-5):
    torch.testing.assert_close(first[0].float(), second[0].float(), rtol=rtol, atol=atol)
    torch.testing.assert_close(first[2], second[2], rtol=1e-3, atol=1e-5)


def needed(loss_type, sampling_logps):
    """The options and inputs without which a loss raises."""
    options = {"max_completion_length": 9, **({"log_ratio_penalty": 0.1} if loss_type == "dro" else {})}
    inputs = {"sampling_per_token_logps": sampling_logps} if loss_type in ("icepop", "kpop") else {}
    return options, inputs | ({"prompts": torch.tensor([0, 1, 1, 0])} if loss_type == "real" else {})


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name not in ("real", "clip_cov")])
def test_on_policy_gradients_are_the_policy_gradient(loss_type):
    """Without an old policy the ratio is 1, and every objective's gradient is the advantage's (SAPO's too: 4 / 4)."""
    hidden, weight, bias, ids, mask, advantages, *_ = problem(dtype=torch.float64)
    logps = plain_statistics(hidden, weight, ids, bias)["logp"]
    options, inputs = needed(loss_type, logps.detach())
    loss = GRPO(beta=0.0, loss_type=loss_type, **options)
    _, _, grads = run(loss, (hidden, weight, bias), ids, mask, advantages, **inputs)
    number = mask.double()
    scales = {"sequence_mean": 1 / number.sum(-1) / B, "sequence_sum": torch.full((B,), 1 / B)}
    scales["limit"] = torch.full((B,), 1 / (B * 9))
    scale = scales.get(LOSS_TYPES[loss_type].normalizer, torch.full((B,), 1 / number.sum()))
    expected = -(logps * number * (advantages * scale)[:, None]).sum()
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (hidden, weight, bias)), rtol=1e-5, atol=1e-8)


def test_the_upper_bound_of_the_ratio_goes_with_the_loss_until_it_is_a_number():
    hidden, weight, _, ids, mask, advantages, logps, noise = problem()
    loss = GRPO(beta=0.0, loss_type="cispo")

    def value(loss):
        return loss(hidden, weight, ids, mask, advantages, old_per_token_logps=logps - noise)[0]

    def bounded(loss_type, bound):
        return value(GRPO(beta=0.0, loss_type=loss_type, epsilon_high=bound))

    torch.testing.assert_close(value(loss), bounded("cispo", 5.0))
    loss.loss_type = "dapo"
    torch.testing.assert_close(value(loss), bounded("dapo", 0.2))
    loss.epsilon_high, loss.loss_type = 0.3, "cispo"
    torch.testing.assert_close(value(loss), bounded("cispo", 0.3))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_padding_never_leaks(loss_type):
    hidden, weight, bias, ids, mask, advantages, logps, noise = problem()
    results = []
    for junk in (0.0, float("nan"), float("inf")):
        poisoned = [torch.where(mask.bool(), t, junk) for t in (logps + 0.2 * noise, logps - 0.3 * noise, noise.exp())]
        h = torch.where(mask[..., None].bool(), hidden.detach(), 1e4 if junk else 0.0).requires_grad_()
        other_ids = torch.where(mask.bool(), ids, 10**6 if junk else 0)
        keywords = {
            "ref_per_token_logps": poisoned[0],
            "old_per_token_logps": poisoned[1],
            "vllm_is_ratio": poisoned[2],
        }
        options, inputs = needed(loss_type, poisoned[0])
        loss = GRPO(beta=0.1, loss_type=loss_type, **options)
        results.append(run(loss, (h, weight, bias), other_ids, mask, advantages, **keywords, **inputs))
    for other in results[1:]:
        close(results[0], other, atol=1e-7)
        assert (other[2][0][~mask.bool()] == 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_correction_of_a_completion_without_tokens_never_leaks(loss_type):
    hidden, weight, bias, ids, mask, advantages, logps, _ = problem()
    mask[2], (options, inputs) = 0, needed(loss_type, logps)
    given = {"beta": 0.0, "use_ref_model": False, "loss_type": loss_type, **options}
    ratios = [torch.tensor([0.9, 1.1, of_none, 1.3]) for of_none in (1.0, math.nan)]
    results = [
        run(GRPO(**given), (hidden, weight, bias), ids, mask, advantages, vllm_is_ratio=ratio, **inputs)
        for ratio in ratios
    ]
    close(*results)


@pytest.mark.peers
@pytest.mark.parametrize("threshold", [-1.0, 0.02, 5.0])
def test_off_policy_mask(threshold):
    trainer = pytest.importorskip("trl", reason="TRL is not installed").GRPOTrainer
    hidden, weight, bias, ids, mask, advantages, logps, noise = problem()
    old, sampler = logps - 0.3 * noise, logps + 0.1 * noise
    sampler[0, 1] = float("nan")
    options = {"beta": 0.0, "loss_type": "bnpo"}
    keep = trainer.get_off_policy_mask(advantages[:, None], logps, sampler, mask.float(), threshold)[:, 0]
    keywords = {"old_per_token_logps": old, "sampling_per_token_logps": sampler}
    masked = GRPO(**options, off_policy_mask_threshold=threshold)
    ours = run(masked, (hidden, weight, bias), ids, mask, advantages, **keywords)
    plain = run(GRPO(**options), (hidden, weight, bias), ids, mask, advantages * keep, **keywords)
    close(ours, plain)


@pytest.mark.peers
def test_vespo_weights_equal_trl():
    trainer = pytest.importorskip("trl", reason="TRL is not installed").GRPOTrainer
    *_, mask, advantages, _, noise = problem()
    number, a = mask.float(), advantages[:, None]
    for is_ratio in (None, (0.2 * noise).exp() * number + (1 - number), torch.tensor([0.5, 1.0, 2.0, 1.5])[:, None]):
        theirs = trainer.get_gamma_weights(a, noise, number, is_ratio)
        torch.testing.assert_close(vespo_weights(noise, number, a, is_ratio, PolicyOptions()), theirs)


@pytest.mark.parametrize("quantile", [0.25, 0.6])
def test_entropy_quantile_and_bonus(quantile):
    hidden, weight, bias, ids, mask, advantages, logps, noise = problem(dtype=torch.float64)
    old = logps - 0.3 * noise
    loss = GRPO(beta=0.0, loss_type="bnpo", top_entropy_quantile=quantile, entropy_coef=0.3)
    ours = run(loss, (hidden, weight, bias), ids, mask, advantages, old_per_token_logps=old)
    found = plain_statistics(hidden, weight, ids, bias)
    keep = found["entropy"].detach() >= torch.quantile(found["entropy"].detach()[mask.bool()], 1 - quantile)
    keep = keep & mask.bool()
    ratio, a = (found["logp"] - old).exp(), advantages[:, None]
    objective = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    expected = -(objective * keep).sum() / mask.sum() - 0.3 * (found["entropy"] * keep).sum() / keep.sum()
    close(ours, (expected, None, torch.autograd.grad(expected, (hidden, weight, bias))))


def test_entropy_bonus_in_one_pass_equals_two():
    hidden, weight, bias, ids, mask, advantages, logps, noise = problem(dtype=torch.float64)
    keywords = {"old_per_token_logps": logps - 0.3 * noise}
    results = []
    for extra in ({}, {"off_policy_mask_threshold": 1e9}):
        loss = GRPO(beta=0.0, entropy_coef=0.2, **extra)
        results.append(run(loss, (hidden, weight, bias), ids, mask, advantages, **keywords))
    close(*results, atol=1e-8)


def test_adaptive_entropy_follows_its_target():
    adaptive = AdaptiveEntropy(0.1, target=1.0, delta=0.05, high=0.2)
    assert adaptive.coef == 0.0  # nothing is known of the entropy yet
    for entropy, coef in ((0.5, 0.15), (0.5, 0.2), (0.5, 0.2), (2.0, 0.0), (0.5, 0.2)):
        adaptive.observe(torch.tensor(entropy * 4), torch.tensor(4))
        adaptive.observe(torch.tensor(entropy * 6), torch.tensor(6))
        adaptive.step()
        assert adaptive.coef == pytest.approx(coef)
    hidden, weight, bias, ids, mask, advantages, *_ = problem()
    loss = GRPO(beta=0.0, entropy_coef=AdaptiveEntropy(0.1, target=1.0))
    run(loss, (hidden, weight, bias), ids, mask, advantages)
    loss.entropy_coef.step()
    entropy = plain_statistics(hidden, weight, ids, bias)["entropy"][mask.bool()].mean()
    assert loss.entropy_coef.last_entropy == pytest.approx(float(entropy), rel=1e-4)
    restored = GRPO(beta=0.0, entropy_coef=AdaptiveEntropy(0.5, target=1.0))
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
    hidden, weight, bias, ids, mask, advantages, logps, noise = problem()
    marked, masked = ids.clone(), mask.clone()
    marked[1, 2] = -100
    masked[1, 2] = 0
    for level in ("token", "sequence"):
        loss = GRPO(beta=0.2, loss_type="bnpo", importance_sampling_level=level)
        keywords = {"ref_per_token_logps": logps, "old_per_token_logps": logps + 0.1 * noise}
        first = run(loss, (hidden, weight, bias), marked, mask, advantages, **keywords)
        close(first, run(loss, (hidden, weight, bias), ids, masked, advantages, **keywords), atol=1e-7)


def test_extreme_ratios_stay_finite():
    hidden, weight, bias, ids, mask, advantages, logps, _ = problem()
    for shift in (-500.0, 500.0):
        for loss_type in LOSS_TYPES:
            options, inputs = needed(loss_type, logps - shift)
            loss = GRPO(beta=0.1, loss_type=loss_type, delta=2.0, **options)
            keywords = {"old_per_token_logps": logps + shift, "ref_per_token_logps": logps - shift} | inputs
            value, metrics, grads = run(loss, (hidden, weight, bias), ids, mask, advantages.abs(), **keywords)
            assert all(t.isfinite().all() for t in (value, *metrics, *grads)), (loss_type, shift)


def test_reference_hidden_states_equal_their_log_probabilities():
    hidden, weight, bias, ids, mask, advantages, *_ = problem()
    ref_hidden = hidden.detach() + 0.1
    ref_logps = plain_statistics(ref_hidden, weight, ids)["logp"].detach()
    loss = GRPO(loss_type="grpo")
    tensors = (hidden, weight, bias)
    first = run(loss, tensors, ids, mask, advantages, ref_input=ref_hidden, ref_weight=weight.detach())
    second = run(loss, tensors, ids, mask, advantages, ref_per_token_logps=ref_logps)
    close(first, second)
    keywords = {"ref_input": ref_hidden, "ref_weight": weight, "ref_per_token_logps": ref_logps}
    with pytest.warns(UserWarning, match="are used"):
        third = run(loss, tensors, ids, mask, advantages, **keywords)
    close(third, second)


def test_empty_batches():
    hidden, weight, bias, ids, mask, advantages, *_ = problem()
    for loss_type in LOSS_TYPES:
        options, inputs = needed(loss_type, torch.zeros(B, T))
        loss = GRPO(beta=0.0, loss_type=loss_type, **options)
        value, metrics, grads = run(loss, (hidden, weight, bias), ids, torch.zeros_like(mask), advantages, **inputs)
        assert value == 0
        assert all((g == 0).all() for g in (*grads, *metrics))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.ones(B, T - 1)}, "attention_mask must be"),
        ({"advantages": torch.ones(B + 1)}, "advantages must be"),
        ({"old_per_token_logps": torch.ones(B)}, "old_per_token_logps must be"),
        ({"vllm_is_ratio": torch.ones(B, 2)}, "vllm_is_ratio must be"),
        ({"ref_per_token_logps": torch.ones(B)}, "ref_per_token_logps must be"),
        ({"ref_per_token_logps": torch.ones(B, T - 1)}, "ref_per_token_logps must be"),
        ({"ref_per_token_logps": None}, "none. Pass ref_per_token_logps=, or .* ref_input= .*ref_weight=.* beta=0.0"),
        ({"ref_per_token_logps": None}, "weighs the divergence from a reference"),
        ({"ref_per_token_logps": None, "ref_input": torch.zeros(B, T, H)}, "no ref_weight="),
        ({"num_items_in_batch": torch.arange(T)}, "one number"),
        ({"advantages": torch.ones(B, device="meta")}, "advantages is on meta"),
        ({"prompts": torch.ones(B)}, "prompts must be integers"),
        ({"selected_token_ids": torch.ones(B * T, dtype=torch.int64)}, "labels must have one entry per hidden state"),
    ],
)
def test_bad_input_is_refused(change, message):
    hidden, weight, _, ids, mask, advantages, logps, _ = problem()
    arguments = {
        "selected_token_ids": ids,
        "attention_mask": mask,
        "advantages": advantages,
        "ref_per_token_logps": logps,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        GRPO()(hidden, weight, **arguments)


@pytest.mark.parametrize(
    "name", ["advantages", "old_per_token_logps", "sampling_per_token_logps", "vllm_is_ratio", "attention_mask"]
)
def test_bad_input_is_refused_before_the_reference_runs(name, monkeypatch):
    def run(*arguments, **options):
        raise AssertionError("the reference runs")

    monkeypatch.setattr("liger_losses.chunked.losses.completion_loss.statistics", run)
    hidden, weight, _, ids, mask, advantages, _, _ = problem()
    arguments = {"attention_mask": mask, "advantages": advantages, name: torch.ones(B, T + 1)}
    with pytest.raises(ValueError, match=f"{name} must be"):
        GRPO()(hidden, weight, ids, **arguments, ref_input=hidden, ref_weight=weight)


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"use_ref_model": False}], ids=str)
def test_a_reference_that_is_not_used_is_ignored(options):
    hidden, weight, _, ids, mask, advantages, logps, _ = problem()
    loss, call = GRPO(**options), (hidden, weight, ids, mask, advantages)
    for reference in ({}, {"ref_input": hidden}, {"ref_per_token_logps": logps}):
        found = loss(*call, **reference, ref_weight=weight)[0]
        torch.testing.assert_close(found, GRPO(beta=0.0)(*call)[0], rtol=0, atol=0)


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name not in ("real", "icepop", "kpop")])
def test_a_token_that_had_no_probability_is_finite(loss_type):
    hidden, weight, bias, ids, mask, advantages, logps, _ = problem()
    logps[0, 0] = logps[1, 0] = -torch.inf
    loss = GRPO(beta=0.0, loss_type=loss_type, **needed(loss_type, logps)[0])
    value, metrics, grads = run(loss, (hidden, weight, bias), ids, mask, advantages, old_per_token_logps=logps)
    assert all(each.isfinite().all() for each in (value, *metrics, *grads))


def test_the_documented_names_of_other_losses():
    hidden, weight, _, ids, mask, advantages, *_ = problem()
    found = GRPO(beta=0.0)(head=weight, hidden_states=hidden, labels=ids, mask=mask, advantages=advantages)
    assert found[0] == GRPO(beta=0.0)(hidden, weight, ids, mask, advantages)[0]


def test_advantages_are_needed():
    hidden, weight, _, ids, mask, _, _, _ = problem()
    with pytest.raises(TypeError, match="advantages must be a tensor"):
        GRPO(beta=0.0)(hidden, weight, ids, mask, None)


def test_the_quantile_counts_each_token_once(monkeypatch):
    """Processes that share a vocabulary have the same tokens."""
    entropy, mask = torch.tensor([[0.1, 0.7, 0.3, 0.9, 0.5]]), torch.ones(1, 5, dtype=torch.bool)
    expected = functional.high_entropy_mask(entropy, mask, 0.24)
    monkeypatch.setattr(policy_objectives, "gather_over_processes", lambda values: torch.cat([values, values]))
    assert torch.equal(functional.high_entropy_mask(entropy, mask, 0.24, copies=2), expected)
    assert not torch.equal(functional.high_entropy_mask(entropy, mask, 0.24), expected)
