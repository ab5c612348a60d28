"""KTO, APO-zero and BCO on single completions, against their definitions in float64 and against Liger."""

import pytest
import torch
import torch.nn.functional as F

from liger_losses import Completions
from tests.losses import BCO, KTO
from tests.reference import assert_as_exact_as_plain, plain_statistics, relative_error

B, T, H, V = 5, 9, 16, 37


def problem(seed=0, dtype=torch.float64, rows=B, length=T):
    """Hidden states, weight, labels, reference hidden states and weight, and which completions are desirable."""
    g = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64).to(dtype)

    hidden, weight = normal(rows, length, H), normal(V, H) / H**0.5
    labels = torch.randint(V, (rows, length), generator=g)
    labels[torch.rand(rows, length, generator=g) < 0.3] = -100
    ref_hidden, ref_weight = hidden + 0.3 * normal(rows, length, H), normal(V, H) / H**0.5
    desirable = torch.arange(rows) % 2 == 0
    return hidden.requires_grad_(), weight.requires_grad_(), labels, ref_hidden.detach(), ref_weight, desirable


def sums(hidden, weight, labels, average=False):
    logps = plain_statistics(hidden, weight, labels)["logp"].sum(-1)
    return logps / (labels != -100).sum(-1).clamp(min=1) if average else logps


def definition(loss_type, rewards, desirable, shift, weights=(1.0, 1.0)):
    """The formulas as the papers have them, completion by completion."""
    total = 0.0
    for reward, wanted in zip(rewards, desirable, strict=True):
        if loss_type == "bco":
            total = total - (F.logsigmoid(reward - shift) if wanted else F.logsigmoid(shift - reward))
        elif wanted:
            total = total + weights[0] * (1 - torch.sigmoid(reward - shift))
        else:
            total = total + weights[1] * (1 - torch.sigmoid(shift - reward))
    return total / len(rewards)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired", "bco"])
@pytest.mark.parametrize("options", [{}, {"average_log_prob": True}, {"workspace": 20_000}], ids=str)
def test_equals_the_definition_in_every_form(loss_type, options, dtype):
    hidden, weight, labels, ref_hidden, ref_weight, desirable = problem(dtype=dtype)
    kl_hidden, _, kl_labels, kl_ref_hidden, _, _ = problem(seed=7, dtype=dtype)
    average = options.get("average_log_prob", False)
    weights = (1.3, 0.6) if loss_type == "kto" else (1.0, 1.0)

    def expected(tensors):
        h, w, rh, rw, kh, krh = tensors
        rewards = 0.2 * (sums(h, w, labels, average) - sums(rh, rw, labels, average).detach())
        shift = torch.zeros((), dtype=rewards.dtype)
        if loss_type == "kto":
            shift = 0.2 * (sums(kh, w, kl_labels, average) - sums(krh, rw, kl_labels, average)).mean().clamp(min=0)
        elif loss_type == "bco":
            shift = rewards.mean()
        return definition(loss_type, rewards, desirable, shift.detach(), weights)

    tensors = (hidden, weight, ref_hidden, ref_weight, kl_hidden.detach(), kl_ref_hidden)
    exact_in = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    plain, exact = expected(tensors), expected(exact_in)
    plain_grads = torch.autograd.grad(plain, tensors[:2])
    exact_grads = torch.autograd.grad(exact, exact_in[:2])

    def module():
        common = {"beta": 0.2, "use_ref_model": True, **options}
        if loss_type == "bco":
            return BCO(**common)
        return KTO(**common, loss_type=loss_type, desirable_weight=weights[0], undesirable_weight=weights[1])

    keywords = {"ref_weight": ref_weight}
    if loss_type == "kto":
        keywords["kl_completions"] = Completions(kl_hidden.detach(), kl_labels, kl_ref_hidden)
    everything = Completions(hidden, labels, ref_hidden)
    apart = [Completions(hidden[mask], labels[mask], ref_hidden[mask]) for mask in (desirable, ~desirable)]
    forms = {
        "apart": lambda: module()(weight, *apart, **keywords),
        "marked": lambda: module()(weight, everything, preference_labels=desirable, **keywords),
        "stacked": lambda: module()(
            hidden, weight, labels, None, preference_labels=desirable, ref_input=ref_hidden, **keywords
        ),
    }
    for name, form in forms.items():
        loss, metrics = form()
        assert loss.dtype == torch.float32
        assert_as_exact_as_plain(loss, plain, exact, name, floor=1e-6)
        grads = torch.autograd.grad(loss, (hidden, weight))
        for a, p, e in zip(grads, plain_grads, exact_grads, strict=True):
            assert_as_exact_as_plain(a, p, e, name, floor=None if dtype == torch.bfloat16 else 1e-6)
        logps = sums(hidden.double(), weight.double(), labels, average)
        assert relative_error(metrics.chosen_logps_sum, logps[desirable].sum()) < 1e-2
        assert relative_error(metrics.rejected_logps_sum, logps[~desirable].sum()) < 1e-2


def test_the_divergence_is_never_negative_and_may_be_logged():
    hidden, weight, labels, ref_hidden, ref_weight, desirable = problem()
    module = KTO(use_ref_model=True)
    for sign in (1.0, -1.0):
        ref_logps = sums(hidden, weight, labels).detach() - sign
        mismatched = Completions(hidden.detach(), labels, ref_logps=ref_logps)
        kl = module.divergence(weight, mismatched)
        torch.testing.assert_close(kl, torch.tensor(max(sign, 0.0), dtype=kl.dtype))
        arguments = {"preference_labels": desirable, "ref_weight": ref_weight}
        given = Completions(hidden, labels, ref_hidden)
        estimated = module(weight, given, **arguments, kl=kl)[0]
        computed = module(weight, given, **arguments, kl_completions=Completions(hidden.detach(), labels, ref_hidden))
        assert computed[0].isfinite()
        torch.testing.assert_close(estimated, module(weight, given, **arguments, kl=float(kl))[0])


def test_the_running_shift_counts_every_training_batch_once():
    module, means = BCO(beta=0.5, use_ref_model=False), []
    for seed in range(3):
        hidden, weight, labels, _, _, desirable = problem(seed)
        means.append((0.5 * sums(hidden, weight, labels)).mean())
        module(weight, (hidden, labels), preference_labels=desirable)
        torch.testing.assert_close(module.running_shift.double(), torch.stack(means).mean().detach(), rtol=1e-5, atol=0)
    before = module.running_shift.clone()
    loss, _ = module.eval()(weight, (hidden, labels), preference_labels=desirable)
    assert torch.equal(module.running_shift, before)
    restored = BCO(beta=0.5, use_ref_model=False)
    restored.load_state_dict(module.state_dict())
    again, _ = restored.eval()(weight, (hidden, labels), preference_labels=desirable)
    assert torch.equal(loss, again)
    loss.backward()


def test_the_running_shift_ignores_what_says_nothing():
    hidden, weight, labels, _, _, desirable = problem()
    module = BCO(beta=0.5)
    marks = {"preference_labels": desirable}
    module(weight, Completions(hidden, labels, ref_logps=torch.zeros(B)), **marks)
    before = module.running_shift.clone()
    endless = torch.zeros(B)
    endless[0] = -float("inf")
    module(weight, Completions(hidden, labels, ref_logps=endless), **marks)
    module(weight, Completions(hidden[:0], labels[:0], ref_logps=endless[:0]), preference_labels=desirable[:0])
    assert torch.equal(module.running_shift, before)
    assert module.batches == 1
    with torch.inference_mode():
        module.eval()(weight, Completions(hidden, labels, ref_logps=torch.zeros(B)), **marks)
    module.train()(weight, Completions(hidden, labels, ref_logps=torch.zeros(B)), **marks)[0].backward()
    assert module.batches == 2  # also if it is the same batch


def test_sample_weights():
    hidden, weight, labels, _, _, desirable = problem()
    module = BCO(use_ref_model=False).eval()
    given = {"preference_labels": desirable}
    each = [
        module(weight, (hidden[i : i + 1], labels[i : i + 1]), preference_labels=desirable[i : i + 1])[0]
        for i in range(B)
    ]
    weights = torch.tensor([1.0, 0.0, 2.5, 1.0, 0.5])
    loss, _ = module(weight, (hidden, labels), **given, sample_weights=weights)
    torch.testing.assert_close(loss, (torch.stack(each) * weights).sum() / B)


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_batches_of_one_kind_and_empty_ones(rows):
    hidden, weight, labels, _, _, _ = problem(rows=rows)
    nothing = torch.full_like(labels, -100)
    for marks in (torch.ones(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)):
        for targets in (labels, nothing):
            for module, extra in ((KTO(), {"kl": 0.1}), (BCO(use_ref_model=False), {})):
                loss, metrics = module(weight, (hidden, targets), preference_labels=marks, **extra)
                grads = torch.autograd.grad(loss, (hidden, weight))
                assert all(value.isfinite().all() for value in (loss, *metrics, *grads))
                if rows == 0:
                    assert loss == 0


def test_extreme_rewards_stay_finite():
    hidden, weight, labels, _, _, desirable = problem(dtype=torch.float32)
    for scale in (1e3, -1e3):
        ref_logps = torch.full((B,), scale)
        for module, extra in ((KTO(beta=10.0, use_ref_model=True), {"kl": 0.0}), (BCO(beta=10.0), {})):
            given = Completions(hidden, labels, ref_logps=ref_logps)
            loss, _ = module(weight, given, preference_labels=desirable, **extra)
            grads = torch.autograd.grad(loss, (hidden, weight))
            assert all(value.isfinite().all() for value in (loss, *grads))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kl": None}, "give kl_completions="),
        ({"kl_completions": "same"}, "not both"),
        ({"kl": torch.zeros(3)}, r"one number or \[5\]"),
        ({"preference_labels": None}, "which completions are desirable"),
        ({"preference_labels": torch.ones(2, dtype=torch.bool)}, r"preference_labels must be \[5\]"),
        ({"ref_input": torch.zeros(1)}, "give the reference in Completions"),
    ],
)
def test_bad_input_is_refused(change, message):
    hidden, weight, labels, _, _, desirable = problem()
    arguments = {"preference_labels": desirable, "kl": 0.0, **change}
    if arguments.get("kl_completions") == "same":
        arguments["kl_completions"] = (hidden, labels)
    with pytest.raises(ValueError, match=message):
        KTO()(weight, (hidden, labels), **arguments)


def test_other_bad_input_is_refused():
    hidden, weight, labels, ref_hidden, _, desirable = problem()
    marks = {"preference_labels": desirable}
    with pytest.raises(ValueError, match="no divergence term"):
        KTO(loss_type="apo_zero_unpaired")(weight, (hidden, labels), **marks, kl=0.0)
    with pytest.raises(ValueError, match="compares with a reference model"):
        BCO()(weight, (hidden, labels), **marks)
    with pytest.raises(ValueError, match="no ref_weight="):
        BCO()(weight, Completions(hidden, labels, ref_hidden), **marks)
    with pytest.raises(ValueError, match="leave preference_labels= out"):
        KTO()(weight, (hidden, labels), (hidden, labels), **marks, kl=0.0)
    with pytest.raises(ValueError, match="sample_weights must be"):
        BCO(use_ref_model=False)(weight, (hidden, labels), **marks, sample_weights=torch.ones(2))
    with pytest.raises(TypeError, match="preference_labels must be bool"):
        signs = torch.where(desirable, 1, -1)
        KTO()(weight, (hidden, labels), preference_labels=signs, kl=0.0)
    with pytest.raises(ValueError, match="kl must lie in"):
        KTO()(weight, (hidden, labels), **marks, kl=-3.0)
    with pytest.raises(ValueError, match="on meta"):
        KTO()(weight, (hidden, labels), preference_labels=desirable.to("meta"), kl=0.0)
    with pytest.raises(TypeError, match="given must be Completions"):
        KTO()(weight, hidden.tolist(), preference_labels=desirable, kl=0.0)
