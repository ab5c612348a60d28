"""Statistics and divergences of rows of logits and their gradients, where these are extreme; what the host reads."""

import math

import pytest
import torch

from liger_losses.functional import forward_kl
from liger_losses.kernels.divergence import Coefficients, Logits, divergence_gradient_into, divergence_sums, square_sums
from liger_losses.kernels.divergence_forms import FORMS
from liger_losses.kernels.logit_transform import Epilogue
from liger_losses.kernels.online_softmax import merge
from liger_losses.kernels.reading import label_facts
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import STATISTICS, softmax_statistics
from tests.kernels.cases import DEVICE
from tests.reference import DIVERGENCES, NAMES, divergence, relative_error


def test_every_statistic_has_a_test_and_a_closed_form():
    assert set(STATISTICS) == {*NAMES, "argmax"}


def test_no_rows(backend):
    projected, labels = torch.empty(0, 7, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
    found = softmax_statistics(projected, labels, frozenset(STATISTICS), backend=backend)
    assert all(value.shape == (0,) for value in found.values())
    softmax_gradient_into(projected, projected, found["lse"], labels, SoftmaxGradient(), backend=backend)


def test_extreme_logits_give_finite_statistics_and_gradients(backend):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, 0.0, 3e4], [0.0, float("-inf"), 1.0]], device=DEVICE)
    labels = torch.tensor([0, 2, 2], device=DEVICE)
    names = frozenset({"logp", "entropy", "lse", "log_sum_sq_probs"})
    value = softmax_statistics(logits, labels, names, backend=backend)
    assert value["logp"][0] == 0
    for name, v in value.items():
        assert v.isfinite().all(), name
        coefficients = SoftmaxGradient.of({name: torch.ones(3, device=DEVICE)}, value)
        grad = softmax_gradient_into(
            torch.empty_like(logits), logits, value["lse"], labels, coefficients, backend=backend
        )
        assert grad.isfinite().all(), name


def test_argmax_is_the_first_maximum(backend):
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, [5, 8000]] = 3.0
    logits[1, 8999] = 1.0
    labels = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    assert softmax_statistics(logits, labels, frozenset({"argmax"}), backend=backend)["argmax"].tolist() == [5, 8999]


# --- Statistics of parts of the vocabulary make those of the whole ----------------------------------------------------


def test_confident_tokens_keep_their_digits(backend):
    """Where 1 - p is far below fp32's rounding of 1."""
    others = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    lse = torch.stack([torch.full((20,), 1000.0), 960 + others[:, 0], 970 + others[:, 1]])
    parts = {"lse": lse, "logp": torch.tensor([[0.0], [torch.inf], [torch.inf]]).expand(3, 20).contiguous()}
    found = merge({name: part.to(DEVICE) for name, part in parts.items()}, [1, 7, 9], backend=backend)["logp"].cpu()
    exact = -(lse[1:].double() - 1000).exp().sum(0).log1p()
    assert found.abs().max() < 1e-11
    assert relative_error(found, exact) < 1e-6


def test_parts_of_the_vocabulary(backend):
    """Of 300 tokens, among them parts whose logits are all -inf, and one whose label is in such a part."""
    z = 5 * torch.randn(3, 300, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z[1, 7] = z[0, 8] = -math.inf
    lse, owner = z.logsumexp(-1), torch.arange(300) % 3
    logp = torch.where(owner == torch.arange(3)[:, None], z[..., 2] - lse, math.inf)
    parts = {"lse": lse, "logp": logp, "entropy": torch.special.entr((z - lse[..., None]).exp()).sum(-1).nan_to_num()}
    found = merge({name: part.float().to(DEVICE) for name, part in parts.items()}, [6] * 3, backend=backend)
    whole = z.transpose(0, 1).flatten(1)
    exact = {"lse": whole.logsumexp(-1), "entropy": torch.special.entr(whole.softmax(-1)).sum(-1)}
    exact["logp"] = whole[torch.arange(300), 6 * owner + 2] - exact["lse"]
    for name, value in exact.items():
        keep = ~((torch.arange(300) == 7) & (owner == 1)) if name == "logp" else slice(None)
        torch.testing.assert_close(found[name].cpu().double()[keep], value[keep], rtol=1e-5, atol=1e-5)


# --- Divergences of rows of logits and their gradients where these are extreme ----------------------------------------


def test_columns_that_the_student_finds_all_but_impossible(backend):
    """The forward Kullback-Leibler divergence grows with the logit's distance, however large that is."""
    student, teacher = torch.zeros(1, 20, device=DEVICE), torch.zeros(1, 20, device=DEVICE)
    student[0, 3] = -24_000.0
    sides = [Logits(logits, logits.logsumexp(-1), Epilogue()) for logits in (student, teacher)]
    value = divergence_sums(*sides, divergence("forward KL"), backend=backend)[0]
    assert value.item() == pytest.approx(24_000 / 20 + math.log(19 / 20), rel=1e-6)


@pytest.mark.parametrize("name", ["cosine", *DIVERGENCES])
def test_extreme_logits_of_two_models(name, backend):
    """Masked columns, one-hot softmaxes and columns without any probability: no NaN."""
    student = torch.randn(4, 130, generator=torch.Generator().manual_seed(0))
    teacher = student.flip(1).clone()
    if name != "cosine":
        teacher[0, 5] = student[0, 5] = -math.inf
        student[1, 3] = -3e4
    student[2, 7], teacher[2, 8] = 400.0, 500.0
    sides = [Logits(part.to(DEVICE), part.to(DEVICE).logsumexp(-1)) for part in (student, teacher)]
    which, coefficients = divergence(name), Coefficients(torch.ones(4, device=DEVICE))
    squares = square_sums(*sides, backend=backend) if name == "cosine" else None
    value, h = divergence_sums(*sides, which, squares=squares, backend=backend)
    out = torch.empty(4, 130, device=DEVICE)
    divergence_gradient_into(out, *sides, which, coefficients, h, squares=squares, backend=backend)
    assert value.isfinite().all()
    assert out.isfinite().all()
    assert (value >= 0).all()


@pytest.mark.parametrize("gap", [2e2, 2e4, 2e6])
def test_however_unlikely_a_column_is(gap):
    """``KL(q || p) = 1/2 (log 1/2 - 0) + 1/2 (log 1/2 + gap)``; the gradient is p - q."""
    log_p = torch.tensor([0.0, -gap], requires_grad=True)
    found = forward_kl(log_p, torch.full((2,), 0.5).log())
    assert found.item() == pytest.approx(gap / 2 - math.log(2), rel=1e-6)
    (grad,) = torch.autograd.grad(found, log_p)
    assert grad.tolist() == [0.5, -0.5]


def test_a_divergence_has_the_dtype_of_the_student():
    log_p = torch.linspace(-1, 1, 5).log_softmax(-1).bfloat16()
    assert forward_kl(log_p, log_p).dtype == torch.bfloat16


@pytest.mark.parametrize("zero", [-math.inf, torch.finfo(torch.float32).min])
def test_columns_without_a_probability_add_nothing(zero):
    log_p, log_q = torch.tensor([math.log(0.25), math.log(0.75), zero]), torch.tensor([math.log(0.5)] * 2 + [zero])
    assert torch.equal(forward_kl(log_p, log_q), forward_kl(log_p[:2], log_q[:2]))


@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith("limited")])
def test_a_limit_does_not_hide_nan(name):
    terms = FORMS[name].torch(torch.tensor([torch.nan, -1.0]), torch.tensor([-1.0, -1.0]), 0.5, 0.5, 0.5)
    assert terms[0].isnan().tolist() == [True, False]


# --- What the host reads of labels ------------------------------------------------------------------------------------


def test_what_the_host_must_know_of_labels():
    torch.manual_seed(0)
    parts = [torch.randint(0, 50, (n,), device=DEVICE) for n in (5000, 0, 3, 2048)]
    parts[0][::3] = -100
    parts[2][:] = -100
    masks = [None, None, None, torch.rand(2048, device=DEVICE) < 0.3]
    parts[3][7], parts[3][9] = -5, 2**40  # outside of any vocabulary
    for ignore_index in (-100, 7, 2**40):
        expected = []
        for part in parts:
            labels = part.tolist()
            active = [label for label in labels if label != ignore_index]
            expected.append([len(active), min([*active, 0]), max([*active, 0]), len(active)])
        expected[3][3] = int((parts[3] != ignore_index)[masks[3]].sum())
        for backend in ("torch", "triton"):
            assert label_facts(parts, ignore_index, masks, backend=backend).tolist() == expected
