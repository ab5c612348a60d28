"""The kernel of divergences in tiles on a GPU, against float64."""

import pytest
import torch

from liger_losses.kernels.divergence import Coefficients, Logits, RowSums, divergence_into
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.linear_divergence import Product, is_balanced, linear_divergence_into
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform

pytestmark = pytest.mark.gpu
DIVERGENCES = {
    "forward KL": Divergence.forward_kl(),
    "reverse KL": Divergence.reverse_kl(),
    "JSD": Divergence.mixture(0.5, 0.5, 0.5),
    "mixture": Divergence.mixture(0.3, 0.3, 0.7),
    "total variation": Divergence.total_variation(),
    "alpha beta": Divergence.alpha_beta(0.4, 0.8),
}


def numbers(name, size, dtype, every_option, device):
    """Both models' products over all columns, the same logits in float64, and the loss's derivatives."""
    tokens, hidden_size, teacher_size, vocab = size
    g = torch.Generator().manual_seed(0)  # the same numbers on all devices

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(device)

    transform = LogitTransform(), LogitTransform()
    if every_option:
        common = LogitTransform(0.7, 1.2)
        per_token = LogitTransform(torch.linspace(0.5, 2.0, tokens, device=device), 1.2)
        transform = (per_token, per_token) if name == "reverse KL" else (common, common)
    models = []
    for size, own in zip((hidden_size, teacher_size), transform, strict=True):
        hidden, weight = normal(tokens, size).to(dtype), (normal(vocab, size) * size**-0.5).to(dtype)
        epilogue = Epilogue(own, normal(vocab) / 2 if every_option else None)
        wide = epilogue._replace(bias=None if epilogue.bias is None else epilogue.bias.double())
        projected = hidden.double() @ weight.double().t()
        exact = Logits(projected, wide(projected.clone()).logsumexp(1), wide)
        models.append((Product(hidden, weight, exact.lse.float(), epilogue), exact))
    labels = torch.randint(vocab, (tokens,), generator=g).to(device)
    coefficients = Coefficients(torch.linspace(0.5, 1.5, tokens, device=device))
    if every_option:
        factors = torch.linspace(0, 1, 2 * tokens, device=device).split(tokens)
        exact = models[0][1]
        lse = (exact.logits() * exact.epilogue.transform.column(exact.projected)).logsumexp(1)
        coefficients = coefficients._replace(hard_p=factors[0], hard_label=-factors[1], hard_lse=lse.float())
    return models, labels, coefficients


def check(name, size, dtype, every_option, device="cuda"):
    which = DIVERGENCES[name]
    (student, teacher), labels, coefficients = numbers(name, size, dtype, every_option, device)
    tokens, _, _, vocab = size
    wide = Coefficients(*(None if c is None else c.double() for c in coefficients))
    exact, expected = torch.empty(tokens, dtype=torch.float64, device=device), torch.empty_like(student[1].projected)
    divergence_into(
        exact, student[1], teacher[1], which, out=expected, coefficients=wide, labels=labels, backend="torch"
    )
    cut = vocab // 2 // 64 * 64
    runs = []
    for _ in range(2):
        value, sums, outs = torch.zeros(tokens, device=device), RowSums(torch.zeros(tokens, device=device)), []
        for with_gradient in (False, True) if not is_balanced(which) else (True,):
            for columns in (slice(0, cut), slice(cut, vocab)):
                if columns.start == columns.stop:
                    continue
                (p, _), (q, wide_q) = student, teacher
                projected = torch.full((tokens, (vocab + 15) // 16 * 16), float("nan"), device=device)
                projected = projected[:, : columns.stop - columns.start].copy_(wide_q.projected[:, columns])
                sides = (
                    Product(p.hidden, p.weight[columns], p.lse, p.epilogue.columns(columns)),
                    Logits(projected, q.lse, q.epilogue.columns(columns)),
                )
                out = torch.full((tokens, vocab + 64), float("nan"), dtype=dtype, device=device)
                out = out[:, : (vocab + 7) // 8 * 8][:, : columns.stop - columns.start] if with_gradient else None
                given = {"first_column": columns.start, "backend": "triton"}
                if with_gradient:
                    given |= {"out": out, "coefficients": coefficients, "labels": labels if every_option else None}
                    outs.append(out)
                linear_divergence_into(value, *sides, which, sums, **given)
        runs.append((value, torch.cat(outs, 1)))
    torch.testing.assert_close(runs[0][0].double(), exact, rtol=3e-5, atol=1e-6)
    torch.testing.assert_close(runs[0][1].double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=3e-6)
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


@pytest.mark.parametrize("every_option", [False, True], ids=["plain", "every option"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_forms(name, every_option):
    """Rows and columns that fill no tile, hidden sizes that fill no step."""
    check(name, (300, 272, 1032, 1008), torch.bfloat16, every_option)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "size",
    [
        (1, 8, 8, 8),
        (129, 1024, 64, 4112),
        (2000, 528, 1040, 20016),
        (128, 4160, 2048, 256),
        (4000, 64, 64, 9001),
        (70, 36, 44, 300),
    ],
)
def test_sizes(size, dtype):
    """One tile and many; fewer steps than buffers and more; rows that the tensor memory accelerator does not take."""
    check("JSD", size, dtype, False)
    check("forward KL", size, dtype, False)
