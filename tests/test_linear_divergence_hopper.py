"""The warp-specialised kernel for divergences, on the GPUs that it serves, against float64; and when it is chosen."""

import pytest
import torch

from liger_losses.kernels import linear_divergence, linear_divergence_hopper, linear_exp_hopper
from liger_losses.kernels.divergence import Coefficients, Logits, RowSums, divergence_into
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.linear_divergence import Product, is_balanced, linear_divergence_into
from liger_losses.kernels.linear_divergence_hopper import _tiles, hopper_tiles
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not linear_exp_hopper.AVAILABLE,
    reason="needs a GPU of compute capability 9.0, and Gluon",
)
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


@hopper
@pytest.mark.parametrize("every_option", [False, True], ids=["plain", "every option"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_forms(name, every_option, monkeypatch):
    """Rows and columns that fill no tile, hidden sizes that fill no step; no kernel but this one runs."""
    monkeypatch.setattr(linear_divergence, "_linear_divergence_kernel", None)
    check(name, (300, 272, 1032, 1008), torch.bfloat16, every_option)


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "size",
    [(1, 8, 8, 8), (129, 1024, 64, 4112), (2000, 528, 1040, 20016), (128, 4160, 2048, 256), (4000, 64, 64, 9001)],
)
def test_sizes(size, dtype, monkeypatch):
    """One tile and many, for each program an even number and an odd one; fewer steps than buffers and more."""
    monkeypatch.setattr(linear_divergence, "_linear_divergence_kernel", None)
    check("JSD", size, dtype, False)
    check("forward KL", size, dtype, False)


@hopper
def test_other_calls_have_the_other_kernel(monkeypatch):
    """Rows that the tensor memory accelerator does not take."""
    monkeypatch.setattr(linear_divergence, "hopper_divergence_kernel", None)
    check("JSD", (70, 36, 44, 300), torch.bfloat16, False)


@pytest.mark.skipif(linear_divergence_hopper.gl is None, reason="triton, or its Gluon, is not installed")
def test_the_launch():
    """What it hands to the kernel, and which matrices it leaves to the other one."""
    half, teacher = torch.empty(300, 64, dtype=torch.bfloat16), torch.empty(300, 128)
    assert hopper_tiles(half, half, teacher, None) is None  # no such GPU
    row_tiles, column_tiles, programs, arguments = _tiles(half, half[:130], teacher, half)
    assert (row_tiles, column_tiles, programs) == (3, 2, 4)
    names = getattr(linear_divergence_hopper.hopper_divergence_kernel, "arg_names", arguments)
    assert set(arguments) <= {*names, "num_warps"}
    assert arguments["teacher_stride"] == 128
    elsewhere = half.view(-1)[4:-60].view(-1, 64)  # not 16-byte aligned
    assert _tiles(elsewhere, half, teacher, None) is None
    assert _tiles(half, half[:, :60], teacher, None) is not None
    assert _tiles(half, half, teacher[:, 1:], None) is None
    assert _tiles(half, half, teacher, half[:, 1:]) is None


@pytest.mark.skipif(linear_divergence_hopper.gl is None, reason="triton, or its Gluon, is not installed")
@pytest.mark.parametrize("with_gradient", [False, True])
def test_which_calls_it_takes(with_gradient, monkeypatch):
    """Those of logits without a soft-cap, except the cosine; with all of the kernel's arguments, by name."""
    from liger_losses.kernels.linear_divergence_hopper import hopper_divergence_kernel as kernel

    launched = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda **given: launched.append((grid, given["partial"].zero_(), set(given)))

    class Other:
        def __getitem__(self, grid):
            return lambda **given: launched.append(given["partial"].zero_())

    monkeypatch.setattr(linear_divergence, "hopper_tiles", _tiles)
    monkeypatch.setattr(linear_divergence, "hopper_divergence_kernel", Recorder())
    monkeypatch.setattr(linear_divergence, "_linear_divergence_kernel", Other())
    half, rows = torch.zeros(300, 64, dtype=torch.bfloat16), torch.zeros(300)
    out = half.new_empty(300, 136)[:, :130] if with_gradient else None
    for divergence, capped in ((DIVERGENCES["JSD"], False), (DIVERGENCES["JSD"], True), (Divergence.cosine(), False)):
        epilogue = Epilogue(LogitTransform(softcap=8.0)) if capped else Epilogue()
        sums = RowSums(rows.clone(), torch.ones(2, 300))
        given = Product(half, half[:130], rows, epilogue), Logits(torch.zeros(300, 144)[:, :130], rows, Epilogue())
        options = {"out": out, "coefficients": Coefficients(rows)} if with_gradient else {}
        linear_divergence_into(rows.clone(), *given, divergence, sums, **options, backend="triton")
    (grid, partial, names), *others = launched
    assert grid == (4,)
    assert partial.shape == (2, 2, 300)
    assert len(others) == 2
    assert all(other.shape == (2, 1, 300) for other in others)
    assert names == {*getattr(kernel, "arg_names", names), "num_warps"}
