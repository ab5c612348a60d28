"""Exponentials of ``hidden @ weight.T`` and their sums in the product's epilogue, against float64."""

import pytest
import torch

from liger_losses.kernels import BACKENDS, linear_exp
from liger_losses.kernels._triton import INTERPRETED
from liger_losses.kernels.exponential_scales import gradient_scales
from liger_losses.kernels.linear_exp import Exponentials, linear_exponentials
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.softmax_stats import softmax_statistics
from tests.kernels.cases import DEVICE, SEVERAL_TILES, SIZES, TRANSFORMS_OF_HEAD, head, triton_or_skip


@SIZES
@pytest.mark.parametrize(("dtype", "with_bias"), [(torch.bfloat16, True), (torch.float16, False)], ids=str)
@pytest.mark.usefixtures("loads")
def test_exponentials(tokens, hidden_size, columns, dtype, with_bias):
    hidden, weight, labels, bias, _ = head(tokens, hidden_size, columns, dtype)
    bias = bias if with_bias else None
    # One token whose label is hopeless: exp(z - z_label) overflows, and another offset must be found.
    hidden[1] *= 25
    labels[1] = (hidden[1].float() @ weight.float().t()).argmin()
    for transform in TRANSFORMS_OF_HEAD[1:] if with_bias else TRANSFORMS_OF_HEAD[::2]:
        logits = transform(hidden.double() @ weight.double().t(), None if bias is None else bias.double())
        exact = softmax_statistics(logits, labels, frozenset({"lse", "logp", "mean_logit", "entropy"}))
        for backend in ("torch", "triton"):
            out = torch.full((tokens, columns + 3), float("nan"), dtype=dtype, device=DEVICE)[:, :columns]
            for block in (out, None):
                names = ("lse", "mean_logit", "entropy") if block is None else ("lse",)
                values = {name: torch.full((tokens,), float("nan"), device=DEVICE) for name in names}
                epilogue, into = Epilogue(transform, bias), Exponentials.into(values)
                found = linear_exponentials(hidden, weight, labels, block, epilogue, found=into, backend=backend)
                if found.mean_logit is not None:
                    torch.testing.assert_close(found.mean_logit.double(), exact["mean_logit"], rtol=1e-5, atol=1e-5)
                    torch.testing.assert_close(found.entropy.double(), exact["entropy"], rtol=1e-5, atol=5e-5)
                torch.testing.assert_close(found.lse.double(), exact["lse"], rtol=1e-5, atol=1e-4)
                torch.testing.assert_close(found.logp.double(), exact["logp"], rtol=1e-5, atol=1e-4)
            if dtype == torch.float16:
                continue  # does not hold exponentials of any size
            e = (logits - found.offset.double()[:, None]).exp()
            expected = (e * transform.slope(logits)).scatter(1, labels[:, None], 0.0)
            # A saturated soft-cap's slope is 1 less a number that fp32 cannot tell from 1.
            allowed = 8e-3 * expected + 1e-6 * e + 1e-6
            assert ((out.double() - expected).abs() <= allowed).all()


@pytest.mark.usefixtures("loads", "products_of_one_order")
def test_tiles_of_all_groups_are_summed(monkeypatch):
    """Groups of row tiles of which the last one is smaller, and more tokens than one launch takes."""
    tokens, columns = (40, 70) if INTERPRETED else (300, 520)
    hidden, weight, labels, _, _ = head(tokens, 16, columns, torch.bfloat16)
    epilogue = Epilogue(LogitTransform(torch.linspace(0.5, 2.0, tokens, device=DEVICE)))
    monkeypatch.setattr(linear_exp, "_GROUP", 2)
    results = []
    for backend, most in (("torch", tokens), ("triton", tokens), ("triton", tokens // 2)):
        monkeypatch.setattr(linear_exp, "_MAX_TOKENS", most)
        names = ("lse", "mean_logit", "entropy")
        found = Exponentials.into({name: torch.full((tokens,), float("nan"), device=DEVICE) for name in names})
        linear_exponentials(hidden, weight, labels, None, epilogue, found=found, backend=backend)
        results.append(found)
    for exact, ours, in_parts in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)
        assert torch.equal(ours, in_parts)


@pytest.mark.parametrize("transform", TRANSFORMS_OF_HEAD, ids=str)
def test_scales_of_exponentials(backend, transform):
    logp = -torch.tensor([1e-12, 1e-5, 0.3, 5.0, 80.0, 200.0], device=DEVICE)
    of_logp, of_lse = (torch.linspace(start, 2.0, 6, device=DEVICE) for start in (-2.0, -0.5))
    of_lse[0] = 0.0  # what is left is p - 1
    lse = torch.linspace(-3.0, 6.0, 6, device=DEVICE)
    offset = torch.cat([(lse + logp)[:-1], lse[-1:]])
    found, others = Exponentials(offset, lse, logp), torch.tensor([0, 0, 1, 0, 1, 0], device=DEVICE).bool()
    for *given, other in ((of_logp, of_lse, None), (0.75, None, None), (None, -0.25, None), (of_logp, of_lse, others)):
        label_c, lse_c = (torch.zeros_like(lse).double() + (0.0 if g is None else g) for g in given)
        p_c, label_c = lse_c - label_c, label_c if other is None else label_c.masked_fill(other, 0.0)
        exact = p_c * (offset - lse).double().exp() * transform.factor(lse)
        at_label = (p_c + label_c + p_c * logp.double().expm1()) * transform.slope((logp + lse).double())
        hidden = torch.linspace(-1, 1, 6 * 1030, device=DEVICE).view(6, 1030).bfloat16()
        place = torch.full((6,), float("nan"), device=DEVICE)
        scale, ours, scaled = gradient_scales(*given, found, hidden, place, other, transform=transform, backend=backend)
        torch.testing.assert_close(scale.double(), exact.double(), rtol=1e-5, atol=1e-37)
        torch.testing.assert_close(ours.double(), at_label * transform.factor(lse), rtol=2e-5, atol=1e-37)
        torch.testing.assert_close(scaled.double(), hidden.double() * scale.double()[:, None], rtol=8e-3, atol=1e-37)
        assert ours is place
        assert gradient_scales(*given, found, transform=transform, backend=backend)[2] is None


def test_confident_tokens_are_exact():
    """1 - p is not what is left of 1 when p is taken from it. A logit of -inf has no share of the entropy."""
    hidden = torch.tensor([[8.0]], dtype=torch.bfloat16, device=DEVICE)
    weight = torch.tensor([[4.0], [0.0], [0.0]], dtype=torch.bfloat16, device=DEVICE)
    labels = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    epilogue = Epilogue(bias=torch.tensor([0.0, 0.0, float("-inf")], device=DEVICE))
    for backend in ("torch", "triton"):
        if backend == "triton":
            triton_or_skip()
        found = Exponentials.into({name: torch.empty(1, device=DEVICE) for name in ("lse", "entropy")})
        linear_exponentials(hidden, weight, labels, None, epilogue, found=found, backend=backend)
        assert abs(found.logp.item() / -1.2664165549e-14 - 1) < 1e-4
        assert abs(found.entropy.item() / (33 * 1.2664165549e-14) - 1) < 1e-4
        unlikely = Exponentials.into({name: torch.empty(1, device=DEVICE) for name in ("lse", "entropy")})
        linear_exponentials(hidden, weight, labels + 1, None, epilogue, found=unlikely, backend=backend)
        assert 0 <= unlikely.entropy.item() < 5e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("small_tiles")
def test_projections_and_their_log_sum_exp(backend):
    """The kernel that sums exponentials also gives fp32 projections: with bias and transform in the sums alone."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(0)
    tokens, hidden_size, columns = SEVERAL_TILES
    hidden, weight = (torch.randn(n, hidden_size, generator=g).half().to(device) for n in (tokens, columns))
    bias = torch.randn(columns, generator=g).half().to(device)
    labels = torch.randint(columns, (tokens,), generator=g).to(device)
    transform, out = LogitTransform(1.3, 0.1, 20.0), torch.full((tokens, -(-columns // 4) * 4 + 4), 7.0, device=device)
    found = linear_exponentials(
        hidden, weight, labels, out[:, :columns], Epilogue(transform, bias), projections=True, backend=backend
    )
    exact = hidden.double() @ weight.double().t()
    torch.testing.assert_close(out[:, :columns].double(), exact, rtol=1e-5, atol=1e-4)
    assert (out[:, columns:] == 7).all()
    torch.testing.assert_close(found.lse.double(), transform(exact, bias).logsumexp(-1), rtol=1e-5, atol=1e-5)
