"""Each kernel, by every backend, against float64 and autograd. Triton runs in its interpreter where there is no GPU."""

import itertools

import pytest
import torch

from liger_losses.kernels import LOGIT_DTYPES, _tiles, choose_backend, linear_exp, matmul
from liger_losses.kernels.autograd import scale_
from liger_losses.kernels.label_rows import add_to_label_rows_, label_facts, label_logits, scale_and_add_label_rows
from liger_losses.kernels.linear_exp import Exponentials, gradient_scales, linear_exponentials
from liger_losses.kernels.linear_grad import linear_softmax_gradient_into
from liger_losses.kernels.linear_stats import linear_softmax_statistics
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.matmul import matmul_into
from liger_losses.kernels.softmax_grad import SoftmaxGradient, softmax_gradient_into
from liger_losses.kernels.softmax_stats import STATISTICS, softmax_statistics
from tests.reference import NAMES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def triton_or_skip():
    pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    if request.param == "triton":
        triton_or_skip()
    return request.param


def exact_statistics(projected, labels, transform, bias, c):
    logits = transform(projected, bias)
    log_p = logits.log_softmax(-1)
    return {
        "logp": log_p.gather(1, labels[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "lse": logits.logsumexp(-1),
        "mean_logp": (log_p if c is None else c * log_p).mean(-1),
        "log_sum_sq_probs": log_p.exp().square().sum(-1).log(),
        "mean_logit": logits.mean(-1),
    }


class Differentiable(LogitTransform):
    """The transform without in-place steps, for autograd."""

    def __call__(self, projected, bias=None):
        logits = (projected if bias is None else projected + bias) * self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature


def inputs(rows, columns, seed=0, scale=2.0):
    g = torch.Generator().manual_seed(seed)
    projected = torch.randn(rows, columns, generator=g) * scale
    labels = torch.randint(columns, (rows,), generator=g)
    bias, c = torch.randn(columns, generator=g), torch.rand(columns, generator=g)
    return tuple(t.to(DEVICE) for t in (projected, labels, bias, c))


def padded_rows(block, width):
    """The same block at the beginning of wider rows, as the engine's buffers have them."""
    buffer = torch.full((block.shape[0], width), float("nan"), device=block.device)
    buffer[:, : block.shape[1]] = block
    return buffer


TRANSFORMS = [{}, {"temperature": 0.7, "logit_scale": 1.3}, {"softcap": 3.0, "logit_scale": 0.9, "temperature": 1.1}]


@pytest.mark.parametrize("columns", [1, 17, 64, 5000])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("class_weighted", [False, True])
@pytest.mark.parametrize("options", TRANSFORMS, ids=str)
def test_statistics_and_their_closed_form_gradients(backend, options, class_weighted, with_bias, columns):
    projected, labels, bias, c = inputs(5, columns)
    bias, c = bias if with_bias else None, c if class_weighted else None
    wide = projected.double().requires_grad_()
    exact = exact_statistics(
        wide, labels, Differentiable(**options), bias if bias is None else bias.double(), c if c is None else c.double()
    )
    buffer = padded_rows(projected, -(-columns // 64) * 64)
    transform = LogitTransform(**options)
    found = softmax_statistics(
        buffer[:, :columns],
        labels,
        frozenset(STATISTICS),
        Epilogue(transform, bias, c),
        scratch=1000,
        backend=backend,
    )
    for name, value in exact.items():
        torch.testing.assert_close(found[name].double(), value.detach(), rtol=1e-5, atol=2e-5)
    assert torch.equal(found["argmax"], transform(projected, bias).argmax(-1))

    g = {name: torch.linspace(0.5, 1.5, 5, device=DEVICE) * (i + 1) for i, name in enumerate(NAMES)}
    for names in (*((name,) for name in NAMES), NAMES):
        (expected,) = torch.autograd.grad(sum((exact[n] * g[n]).sum() for n in names), wide, retain_graph=True)
        coefficients = SoftmaxGradient.of({n: g[n] for n in names}, found, c)
        for dtype in (torch.float32, torch.bfloat16):
            for cuts in ([0, columns], sorted({0, columns // 3, columns // 2, columns})):
                parts = []
                for start, stop in itertools.pairwise(cuts):
                    tile = padded_rows(projected[:, start:stop], -(-(stop - start) // 64) * 64)
                    grad_bias = torch.ones(stop - start, device=DEVICE)
                    part = softmax_gradient_into(
                        tile.view(dtype)[:, : stop - start],  # over the memory of the projections
                        tile[:, : stop - start],
                        found["lse"],
                        labels,
                        coefficients,
                        Epilogue(transform, bias, c).columns(slice(start, stop)),
                        first_column=start,
                        vocab_size=columns,
                        grad_bias=grad_bias,
                        scratch=1000,
                        backend=backend,
                    )
                    # The sum is as exact in half precision: nothing is rounded before it.
                    torch.testing.assert_close(
                        grad_bias.double() - 1, expected[:, start:stop].sum(0), rtol=1e-4, atol=1e-4
                    )
                    parts.append(part)
                ours = torch.cat(parts, 1).double()
                eps = torch.finfo(dtype).eps
                torch.testing.assert_close(ours, expected, rtol=max(eps, 1e-5), atol=2e-5)


def test_every_statistic_has_a_test_and_a_closed_form():
    assert set(STATISTICS) == {*NAMES, "argmax"}


def test_no_rows(backend):
    projected, labels, _, _ = inputs(0, 7)
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


# --- Kernels that multiply: tiles of hidden @ weight.T in their epilogue ---------------------------------------------


@pytest.fixture(params=["tma", "pointers"])
def loads(request, monkeypatch):
    """Through the tensor memory accelerator, as on Hopper, and through pointers, as elsewhere."""
    triton_or_skip()
    monkeypatch.setattr("liger_losses.kernels._tiles.has_tma", lambda device: request.param == "tma")
    monkeypatch.setattr(linear_exp, "hopper_tiles", lambda *call: None)


def head(tokens, hidden_size, columns, dtype=torch.float16, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, hidden_size, generator=g).to(dtype).to(DEVICE) for n in (tokens, columns))
    labels = torch.randint(columns, (tokens,), generator=g).to(DEVICE)
    bias, c = (torch.rand(columns, generator=g).to(DEVICE) for _ in range(2))
    return hidden, weight, labels, bias, c


def doubled(epilogue):
    return Epilogue(epilogue.transform, *(None if vector is None else vector.double() for vector in epilogue[1:]))


SIZES = pytest.mark.parametrize(("tokens", "hidden_size", "columns"), [(3, 16, 70), (130, 40, 300), (5, 33, 257)])
HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@SIZES
@HALF
@pytest.mark.usefixtures("loads")
def test_statistics_without_logits(tokens, hidden_size, columns, dtype):
    hidden, weight, labels, bias, c = head(tokens, hidden_size, columns, dtype)
    projected = hidden.double() @ weight.double().t()
    for epilogue in (Epilogue(), Epilogue(LogitTransform(0.7, 1.2, 8.0), bias, c)):
        found = linear_softmax_statistics(hidden, weight, labels, frozenset(STATISTICS), epilogue, backend="triton")
        exact = softmax_statistics(projected, labels, frozenset(STATISTICS), doubled(epilogue))
        for name, value in exact.items():
            torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-5, atol=1e-4, msg=name)


TRANSFORMS_OF_HEAD = [LogitTransform(), LogitTransform(0.7, 1.2), LogitTransform(0.7, 1.2, 8.0)]


@SIZES
@HALF
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("loads")
def test_exponentials(tokens, hidden_size, columns, dtype, with_bias):
    hidden, weight, labels, bias, _ = head(tokens, hidden_size, columns, dtype)
    bias = bias if with_bias else None
    # One token whose label is hopeless: exp(z - z_label) overflows, and another offset must be found.
    hidden[1] *= 25
    labels[1] = (hidden[1].float() @ weight.float().t()).argmin()
    for transform in TRANSFORMS_OF_HEAD:
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


@pytest.mark.usefixtures("loads")
def test_tiles_of_all_groups_are_summed(monkeypatch):
    """Groups of row tiles of which the last one is smaller, and more tokens than one launch takes."""
    hidden, weight, labels, _, _ = head(300, 16, 520, torch.bfloat16)
    epilogue = Epilogue(LogitTransform(torch.linspace(0.5, 2.0, 300, device=DEVICE)))
    monkeypatch.setattr(linear_exp, "_GROUP", 2)
    results = []
    for backend, most in (("torch", 300), ("triton", 300), ("triton", 150)):
        monkeypatch.setattr(linear_exp, "_MAX_TOKENS", most)
        names = ("lse", "mean_logit", "entropy")
        found = Exponentials.into({name: torch.full((300,), float("nan"), device=DEVICE) for name in names})
        linear_exponentials(hidden, weight, labels, None, epilogue, found=found, backend=backend)
        results.append(found)
    for exact, ours, in_parts in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)
        assert torch.equal(ours, in_parts)


@pytest.mark.parametrize("transform", TRANSFORMS_OF_HEAD, ids=str)
def test_scales_of_exponentials(backend, transform):
    logp = -torch.tensor([1e-12, 1e-5, 0.3, 5.0, 80.0, 200.0], device=DEVICE)
    p_coef, label_coef = (torch.linspace(start, 2.0, 6, device=DEVICE) for start in (-2.0, -0.5))
    label_coef[0] = -p_coef[0]  # what is left is p - 1
    lse = torch.linspace(-3.0, 6.0, 6, device=DEVICE)
    offset = lse + logp
    offset[-1] = lse[-1]
    found = Exponentials(offset, lse, logp)
    for coefs in ((p_coef, label_coef), (p_coef, None), (None, label_coef)):
        p_c, label_c = (0.0 if coef is None else coef.double() for coef in coefs)
        exact = p_c * (offset - lse).double().exp() * transform.factor(lse)
        at_label = (p_c + label_c + p_c * logp.double().expm1()) * transform.slope((logp + lse).double())
        hidden = torch.linspace(-1, 1, 6 * 1030, device=DEVICE).view(6, 1030).bfloat16()
        place = torch.full((6,), float("nan"), device=DEVICE)
        scale, ours, scaled = gradient_scales(*coefs, found, hidden, place, transform=transform, backend=backend)
        exact = torch.zeros_like(found.lse) + exact
        torch.testing.assert_close(scale.double(), exact.double(), rtol=1e-5, atol=1e-37)
        torch.testing.assert_close(ours.double(), at_label * transform.factor(lse), rtol=2e-5, atol=1e-37)
        torch.testing.assert_close(scaled.double(), hidden.double() * scale.double()[:, None], rtol=8e-3, atol=1e-37)
        assert ours is place
        assert gradient_scales(*coefs, found, transform=transform, backend=backend)[2] is None


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


@SIZES
@HALF
@pytest.mark.usefixtures("loads")
def test_gradients_without_logits(tokens, hidden_size, columns, dtype):
    hidden, weight, labels, bias, c = head(tokens, hidden_size, columns, dtype)
    hidden = hidden / 4
    for epilogue in (Epilogue(), Epilogue(LogitTransform(0.7, 1.2, 8.0), bias, c)):
        wide = doubled(epilogue)
        projected = hidden.double() @ weight.double().t()
        values = softmax_statistics(projected, labels, frozenset(STATISTICS), wide)
        for names in (("logp",), NAMES):
            g = {name: torch.linspace(0.5, 1.5, tokens, device=DEVICE) * (i + 1) for i, name in enumerate(names)}
            table = SoftmaxGradient.of(g, {k: v.float() for k, v in values.items()}, epilogue.class_weight)
            exact = torch.empty(tokens, columns, dtype=torch.float64, device=DEVICE)
            softmax_gradient_into(
                exact,
                projected.clone(),
                values["lse"],
                labels,
                SoftmaxGradient.of({k: v.double() for k, v in g.items()}, values, wide.class_weight),
                wide,
                backend="torch",
            )
            for start, stop in itertools.pairwise([0, columns // 3, columns]):
                for backend in ("torch", "triton"):
                    out = torch.full((tokens, stop - start + 5), float("nan"), dtype=dtype, device=DEVICE)
                    out = linear_softmax_gradient_into(
                        out[:, : stop - start],
                        hidden,
                        weight[start:stop],
                        values["lse"].float(),
                        labels,
                        table,
                        epilogue.columns(slice(start, stop)),
                        first_column=start,
                        vocab_size=columns,
                        backend=backend,
                    )
                    eps = torch.finfo(dtype).eps
                    torch.testing.assert_close(out.double(), exact[:, start:stop], rtol=eps, atol=3e-5)


def test_what_the_host_must_know_of_labels():
    torch.manual_seed(0)
    parts = [torch.randint(0, 50, (n,), device=DEVICE) for n in (5000, 0, 3, 2048)]
    parts[0][::3] = -100
    parts[2][:] = -100
    parts[3][7], parts[3][9] = -5, 2**40  # outside of any vocabulary
    for ignore_index in (-100, 7, 2**40):
        expected, place = [], 0
        for part in parts:
            labels = part.tolist()
            active = [label for label in labels if label != ignore_index]
            total = sum((label + 1) * ((place + i) % 1009 + 1) for i, label in enumerate(labels))
            total = (total + 2**63) % 2**64 - 2**63
            expected.append([len(active), min([*active, 0]), max([*active, 0]), total])
            place += len(part)
        for backend in ("torch", "triton"):
            assert label_facts(parts, ignore_index, backend=backend).tolist() == expected


@HALF
@pytest.mark.parametrize(("tokens", "hidden_size", "columns"), [(1, 5, 3), (40, 70, 6), (9, 1030, 50)])
def test_label_rows(backend, tokens, hidden_size, columns, dtype):
    hidden, weight, labels, _, _ = head(tokens, hidden_size, columns, dtype)
    scale, coef = torch.linspace(-1, 1, 2 * tokens, device=DEVICE).split(tokens)
    bias = torch.linspace(-1, 1, columns, device=DEVICE)
    for transform, b in ((LogitTransform(), None), (LogitTransform(0.7, 1.2, 8.0), bias)):
        projected = (hidden.double() * weight.double()[labels]).sum(-1)
        exact = transform(projected, None if b is None else b.double()[labels])
        found = label_logits(hidden, weight, labels, Epilogue(transform, b), backend=backend)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)

    out = torch.randn(tokens, hidden_size, device=DEVICE)
    exact = scale.double()[:, None] * out.double() + coef.double()[:, None] * weight.double()[labels]
    for out_dtype in (torch.float32, dtype):
        wide = torch.full((tokens, hidden_size + 3), float("nan"), dtype=out_dtype, device=DEVICE)[:, :hidden_size]
        scale_and_add_label_rows(wide, out, scale, coef, weight, labels, backend=backend)
        torch.testing.assert_close(wide.double(), exact, rtol=torch.finfo(out_dtype).eps, atol=1e-5)

    grad = weight.clone()
    exact = weight.double().index_add(0, labels, coef.double()[:, None] * hidden.double())
    add_to_label_rows_(grad, labels, coef, hidden, backend=backend)
    torch.testing.assert_close(grad.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, -0.37])
@pytest.mark.parametrize("count", [0, 1, 4096, 10_001])
def test_scale(backend, count, factor, dtype):
    tensor = torch.linspace(-2, 2, count, device=DEVICE).to(dtype)
    expected, eps = tensor * factor, torch.finfo(dtype).eps * (factor != 1.0)
    scaled = scale_(tensor, torch.tensor(factor, device=DEVICE), backend=backend)
    torch.testing.assert_close(scaled, expected, rtol=eps, atol=0.0)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matmul_rounds_once(dtype, out_dtype, accumulate):
    torch.manual_seed(0)
    a, b, start = torch.randn(7, 300).to(dtype), torch.randn(300, 5).to(dtype), torch.randn(7, 5).to(out_dtype)
    exact = a.double() @ b.double() + (start.double() if accumulate else 0)
    out = matmul_into(start.clone(), a, b, accumulate=accumulate)
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(out_dtype).eps, atol=1e-4)


@pytest.mark.parametrize("sizes", [(37, 16, 24), (32, 19, 24), (32, 16, 29), (37, 19, 29), (5, 3, 7)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_products_of_odd_sizes_are_whole(sizes, accumulate, monkeypatch):
    """On a GPU, products are cut where a size is no multiple of 8: an aligned part, and the rest."""
    monkeypatch.setattr(matmul, "MIN_CUT_SIZE", 8)
    rows, terms, columns = sizes
    g = torch.Generator().manual_seed(0)
    a, b, out = (
        torch.randn(*s, generator=g, dtype=torch.float64) for s in ((rows, terms), (terms, columns), sizes[::2])
    )
    expected = a @ b + (out if accumulate else 0)
    out = out if accumulate else out.fill_(float("nan"))
    torch.testing.assert_close(matmul._aligned(out, a, b, accumulate), expected)


def test_matmul_into_strided_output():
    a, b = torch.randn(6, 4), torch.randn(4, 3)
    buffer = torch.zeros(6, 8)
    matmul_into(buffer[:, 2:5], a, b)
    torch.testing.assert_close(buffer[:, 2:5], a @ b)
    assert (buffer[:, [0, 1, 5, 6, 7]] == 0).all()


def test_backend_is_chosen_from_the_tensor_and_can_be_overridden(monkeypatch):
    monkeypatch.delenv("LIGER_LOSSES_BACKEND", raising=False)
    cpu = (torch.device("cpu"), torch.float32)

    def chosen(operand, backend=None):
        return choose_backend(backend, [operand], dtypes=LOGIT_DTYPES)

    assert chosen(cpu) == chosen(torch.empty(0)) == "torch"
    with pytest.raises(ValueError, match="torch, triton.*'cuda'"):
        chosen(cpu, "cuda")
    with pytest.raises(ValueError, match=r"float32.*torch\.float64"):
        triton_or_skip()
        chosen(torch.empty(0, dtype=torch.float64), "triton")
    monkeypatch.setenv("LIGER_LOSSES_BACKEND", "nonsense")
    with pytest.raises(ValueError, match="LIGER_LOSSES_BACKEND"):
        chosen(cpu)
    assert chosen(cpu, "torch") == "torch"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_which_matrices_the_tensor_memory_accelerator_takes(dtype):
    """Rows that begin at multiples of 16 bytes, each in memory of its own."""
    in_16_bytes = 16 // dtype.itemsize
    memory = torch.empty(4096, dtype=dtype)
    assert memory.data_ptr() % 16 == 0
    assert _tiles.aligned(memory.view(64, 64))
    assert _tiles.aligned(memory.view(64, 64)[::2, :33])
    assert _tiles.aligned(memory[in_16_bytes:][:128].view(2, 64))
    for matrix in (
        memory[:64].expand(8, 64),  # stride 0
        memory[:64][None].expand(8, 64)[:1],  # of one row too
        memory.as_strided((8, 64), (16, 1)),  # windows that overlap
        memory.view(64, 64).t(),
        memory.view(64, 64)[:, ::2],
        memory[: 4 * 65].view(4, 65),
        memory[1:129].view(2, 64),
        memory.view(64, 64)[:0],
        memory.view(64, 64)[:, :0],
    ):
        assert not _tiles.aligned(matrix)
