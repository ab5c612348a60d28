"""Exponentials of ``hidden @ weight.T`` and their sums in the product's epilogue, against float64."""

from dataclasses import replace

import pytest
import torch

from liger_losses.chunked.accelerators import linear_exp, unstored
from liger_losses.chunked.accelerators.exponentials import gradient_scales
from liger_losses.chunked.accelerators.linear_exp import Exponentials, linear_exponentials
from liger_losses.kernels._triton import INTERPRETED
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.softmax_stats import softmax_statistics
from tests.chunked.core.test_plan import CALL
from tests.kernels.cases import DEVICE
from tests.reference import peak_bytes, problem

pytestmark = pytest.mark.usefixtures("default_gpu")
pytest.importorskip("triton")


def empty(tokens, *names):
    """Memory of all statistics, or of those named."""
    names = names or Exponentials._fields
    memory = [torch.full((tokens,), float("nan"), device=DEVICE) if n in names else None for n in Exponentials._fields]
    return Exponentials(*memory[:-1], None if memory[-1] is None else torch.zeros_like(memory[-1], dtype=torch.int64))


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.usefixtures("small_tiles", "products_of_one_order")
def test_tiles_of_all_groups_are_summed(tma, monkeypatch):
    """Groups of row tiles of which the last one is smaller, and more tokens than one launch takes. Tiles are loaded by
    the tensor memory accelerator, as on Hopper, and through pointers, as elsewhere."""
    monkeypatch.setattr("liger_losses.chunked.accelerators.tiles.has_tma", lambda device: tma)
    tokens, columns = (40, 70) if INTERPRETED else (300, 520)
    hidden, weight, labels, _ = problem(tokens, 16, columns, dtype=torch.bfloat16, masked=0.0, scale=4.0)
    epilogue = Epilogue(LogitTransform(torch.linspace(0.5, 2.0, tokens, device=DEVICE)))
    monkeypatch.setattr(linear_exp, "_GROUP", 2)
    logits = epilogue(hidden.double() @ weight.double().t())
    exact = softmax_statistics(logits, labels, frozenset(Exponentials._fields[1:]))
    results = []
    for most in (tokens, tokens // 2):
        monkeypatch.setattr(linear_exp, "_MAX_TOKENS", most)
        results.append(empty(tokens))
        linear_exponentials(hidden, weight, labels, results[-1], epilogue)
    for name, ours, in_parts in zip(Exponentials._fields[1:], *(r[1:] for r in results), strict=True):
        torch.testing.assert_close(ours.double(), exact[name].double(), rtol=1e-5, atol=1e-5)
        assert torch.equal(ours, in_parts)


@pytest.mark.skipif(not INTERPRETED, reason="so few tokens have as many splits as a GPU has multiprocessors")
@pytest.mark.parametrize("metrics", [set(), {"argmax"}, {"entropy", "mean_logit"}, {"argmax", "entropy", "mean_logit"}])
def test_plans_have_room_for_the_sums_of_tiles(metrics):
    call = replace(CALL, hidden_size=16, columns=16384, metrics=frozenset(metrics))
    hidden, weight, labels, _ = problem(256, 16, 16384, dtype=torch.bfloat16, masked=0.0)
    values = empty(256, "offset", "lse", "logp", *metrics)
    assert peak_bytes(lambda: linear_exponentials(hidden, weight, labels, values)) <= 256 * unstored.row_bytes(call)


@pytest.mark.parametrize(
    "transform", [LogitTransform(), LogitTransform(0.7, 1.2), LogitTransform(0.7, 1.2, 8.0)], ids=str
)
def test_scales_of_exponentials(transform):
    logp = -torch.tensor([1e-12, 1e-5, 0.3, 5.0, 80.0, 200.0], device=DEVICE)
    of_logp, of_lse = (torch.linspace(start, 2.0, 6, device=DEVICE) for start in (-2.0, -0.5))
    of_lse[0] = 0.0  # what is left is p - 1
    lse = torch.linspace(-3.0, 6.0, 6, device=DEVICE)
    offset = torch.cat([(lse + logp)[:-1], lse[-1:]])
    values = Exponentials(offset, lse, logp)
    for given in ((of_logp, of_lse), (of_logp, None), (None, of_lse)):
        label_c, lse_c = (torch.zeros_like(lse).double() + (0.0 if g is None else g) for g in given)
        p_c = lse_c - label_c
        exact = p_c * (offset - lse).double().exp() * transform.factor(lse)
        at_label = (p_c + label_c + p_c * logp.double().expm1()) * transform.slope((logp + lse).double())
        hidden = torch.linspace(-1, 1, 6 * 1030, device=DEVICE).view(6, 1030).bfloat16()
        scale, ours, scaled = gradient_scales(*given, values, hidden, transform)
        torch.testing.assert_close(scale.double(), exact.double(), rtol=1e-5, atol=1e-37)
        torch.testing.assert_close(ours.double(), at_label * transform.factor(lse), rtol=2e-5, atol=1e-37)
        torch.testing.assert_close(scaled.double(), hidden.double() * scale.double()[:, None], rtol=8e-3, atol=1e-37)
        assert gradient_scales(*given, values, None, transform)[2] is None


def test_confident_tokens_are_exact():
    """1 - p is not what is left of 1 when p is taken from it. A logit of -inf has no share of the entropy."""
    hidden = torch.tensor([[8.0]], dtype=torch.bfloat16, device=DEVICE)
    weight = torch.tensor([[4.0], [0.0], [0.0]], dtype=torch.bfloat16, device=DEVICE)
    labels = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    epilogue = Epilogue(bias=torch.tensor([0.0, 0.0, -torch.inf], device=DEVICE))
    found, unlikely = empty(1), empty(1)
    linear_exponentials(hidden, weight, labels, found, epilogue)
    assert abs(found.logp.item() / -1.2664165549e-14 - 1) < 1e-4
    assert abs(found.entropy.item() / (33 * 1.2664165549e-14) - 1) < 1e-4
    linear_exponentials(hidden, weight, labels + 1, unlikely, epilogue)
    assert 0 <= unlikely.entropy.item() < 5e-6


def test_the_first_of_equal_columns_is_the_largest():
    """In whichever half tile, and whether it is the label."""
    hidden, weight = torch.ones(3, 1, device=DEVICE).bfloat16(), torch.zeros(600, 1, device=DEVICE).bfloat16()
    weight[[5, 300, 599]], labels = 4.0, torch.tensor([5, 300, 7], device=DEVICE)
    linear_exponentials(hidden, weight, labels, found := empty(3))
    assert found.argmax.tolist() == [5, 5, 5]
