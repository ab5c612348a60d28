"""The engine: exact by every strategy, bounded in memory and in work, and safe to use anywhere autograd goes."""

import gc
import itertools
import weakref

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from liger_losses import EngineOptions, LogitTransform, linear_logps, linear_statistics, linear_token_loss
from liger_losses.chunked.engine.plan import Workload, make_plan
from tests.reference import NAMES, assert_as_exact_as_plain, double, peak_bytes, plain_statistics, problem

MiB = 2**20
TRANSFORM = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 5.0}
OPTIONS = {
    "resident": EngineOptions(strategy="resident"),
    "two_pass": EngineOptions(strategy="two_pass", chunk_size=4, workspace=60_000),
}


def weighted(values, seed=3):
    """A fixed random linear function of tensors, so that every statistic and token has its own upstream gradient."""
    g = torch.Generator().manual_seed(seed)
    return sum((v * torch.randn(v.shape, generator=g, dtype=torch.float64).to(v)).sum() for v in values)


def gradients(loss, inputs):
    return torch.autograd.grad(loss, [t for t in inputs if t is not None and t.requires_grad], retain_graph=True)


@pytest.mark.parametrize("strategy", OPTIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transform", [{}, TRANSFORM])
def test_gradcheck_of_all_statistics(strategy, bias, transform):
    hidden, weight, labels, b = problem(5, 4, 11, dtype=torch.float64, bias=bias)

    def function(*inputs):
        found = linear_statistics(
            inputs[0],
            inputs[1],
            labels,
            NAMES,
            bias=inputs[2] if bias else None,
            transform=LogitTransform(**transform),
            options=OPTIONS[strategy],
        )
        return tuple(getattr(found, name) for name in NAMES)

    assert torch.autograd.gradcheck(function, (hidden, weight, b) if bias else (hidden, weight))


@pytest.mark.parametrize("statistic", NAMES)
def test_gradcheck_of_the_frozen_head(statistic):
    hidden, weight, labels, _ = problem(5, 4, 11, dtype=torch.float64)
    weight.requires_grad_(False)
    options = EngineOptions(strategy="frozen_head", chunk_size=2)

    def function(h):
        return getattr(linear_statistics(h, weight, labels, (statistic,), options=options), statistic)

    assert torch.autograd.gradcheck(function, (hidden,))


@pytest.mark.parametrize("strategy", OPTIONS)
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("transform", [{}, TRANSFORM])
def test_gradcheck_of_selected_columns(strategy, compact, transform):
    """Some of them twice in a row, some the label's own."""
    hidden, weight, labels, b = problem(7, 4, 11, dtype=torch.float64, bias=True)
    columns = torch.tensor([[3, 3, 0, 10], [1, 2, 3, 4], [5, 5, 5, 0]])[torch.arange(7) % 3].clone()
    columns[:, -1] = labels.clamp(min=0)
    options = EngineOptions(**{**vars(OPTIONS[strategy]), "compact": compact})

    def function(*inputs):
        found = linear_statistics(
            inputs[0],
            inputs[1],
            labels,
            ("selected_logps", "logp"),
            metrics=("entropy",),
            selected=columns,
            bias=inputs[2],
            transform=LogitTransform(**transform),
            options=options,
        )
        return found.selected_logps, found.logp

    logits = LogitTransform(**transform)(hidden @ weight.T, b)
    expected = logits.log_softmax(-1).gather(1, columns) * (labels != -100)[:, None]
    torch.testing.assert_close(function(hidden, weight, b)[0], expected)
    assert torch.autograd.gradcheck(function, (hidden, weight, b))


@pytest.mark.parametrize("strategy", OPTIONS)
def test_columns_may_be_given_without_their_statistic(strategy):
    hidden, weight, labels, _ = problem(7, 4, 11)
    columns = torch.zeros(7, 2, dtype=torch.int64)
    given, plain = (
        linear_statistics(hidden, weight, labels, selected=c, options=OPTIONS[strategy]) for c in (columns, None)
    )
    torch.testing.assert_close(given.logp, plain.logp)


@pytest.mark.parametrize("strategy", OPTIONS)
def test_metrics_change_no_gradient(strategy):
    """The log-sum-exp too, which backward reads."""
    hidden, weight, labels, _ = problem(13)
    with_metrics, alone = (
        linear_statistics(hidden, weight, labels, metrics=names, options=OPTIONS[strategy])
        for names in (("lse", "entropy", "argmax"), ())
    )
    for a, b in zip(*(gradients(found.logp.sum(), (hidden, weight)) for found in (with_metrics, alone)), strict=True):
        torch.testing.assert_close(a, b)


def test_selected_columns_in_many_half_precision_blocks():
    """Each block adds to all of grad_weight: it must not be rounded once for each."""
    hidden, weight, labels, _ = problem(200, 8, 40, dtype=torch.bfloat16)
    columns = torch.randint(0, 40, (200, 3), generator=torch.Generator().manual_seed(0))
    options = EngineOptions(strategy="two_pass", chunk_size=4)
    found = linear_statistics(hidden, weight, labels, ("selected_logps",), selected=columns, options=options)
    (grad,) = torch.autograd.grad(found.selected_logps.sum(), (weight,))
    h, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logps = (h @ w.T).log_softmax(-1).gather(1, columns) * (labels != -100)[:, None]
    (expected,) = torch.autograd.grad(logps.sum(), (w,))
    # The wide logits' gradient is rounded once, and the sum once.
    assert (grad.double() - expected).abs().max() < 2 * 2**-8 * expected.abs().max()


@pytest.mark.parametrize("strategy", ["one_pass", "two_pass", "resident"])
def test_masked_inputs_never_leak_into_token_losses(strategy):
    hidden, weight, labels, _ = problem(13, dtype=torch.float64)
    poison = torch.where(labels == -100, float("nan"), 0.7)
    options = EngineOptions(compact=False, strategy=strategy)
    loss, _ = linear_token_loss(
        hidden, weight, labels, lambda s, y, w: -w * s.logp, token_inputs={"w": poison}, options=options
    )
    grads = torch.autograd.grad(loss, (hidden, weight))
    expected = -0.7 * plain_statistics(hidden, weight, labels)["logp"].sum()
    for a, b in zip((loss, *grads), (expected, *torch.autograd.grad(expected, (hidden, weight))), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("strategy", ["two_pass", "resident"])
def test_labels_that_changed_before_backward_are_an_error(strategy):
    hidden, weight, labels, _ = problem(13, masked=0.0)
    logps = linear_statistics(hidden, weight, labels, options=EngineOptions(strategy=strategy)).logp
    labels.fill_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logps.sum().backward()


def test_derivatives_that_come_along_replace_autograd():
    hidden, weight, labels, _ = problem(13, dtype=torch.float64)
    built = []

    def by_autograd(s, labels):
        return s.logp * s.logp + 0.3 * s.lse

    def given(s, labels):
        with torch.no_grad():
            built.append(len(labels))
            return by_autograd(s, labels), {"logp": 2 * s.logp, "lse": torch.full_like(s.lse, 0.3)}

    losses = []
    for token_loss in (by_autograd, given):
        for extra in ({}, {"compact": False}, {"strategy": "two_pass"}, {"strategy": "two_pass", "compact": False}):
            options = EngineOptions(chunk_size=4, **extra)
            loss, _ = linear_token_loss(hidden, weight, labels, token_loss, ("logp", "lse"), options=options)
            losses.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    assert built
    for other in losses[1:]:
        for a, b in zip(losses[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_gradcheck_of_the_one_pass_loss(chunk_size):
    hidden, weight, labels, b = problem(5, 4, 11, dtype=torch.float64, bias=True)
    factor = torch.rand(5, dtype=torch.float64)

    def token_loss(s, labels, factor):
        return factor * (s.logp.exp() + s.entropy * s.lse + s.mean_logp.square() * s.log_sum_sq_probs)

    def function(h, w, b):
        return linear_token_loss(
            h,
            w,
            labels,
            token_loss,
            ("logp", "entropy", "lse", "mean_logp", "log_sum_sq_probs"),
            token_inputs={"factor": factor},
            bias=b,
            transform=LogitTransform(**TRANSFORM),
            options=EngineOptions(chunk_size=chunk_size, strategy="one_pass"),
        )[0]

    assert torch.autograd.gradcheck(function, (hidden, weight, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transform", [{}, TRANSFORM])
def test_as_exact_as_plain_pytorch(dtype, transform):
    inputs = problem(67, 96, 501, dtype=dtype, bias=True, scale=2.0)
    hidden, weight, labels, bias = inputs
    exact_in = (*double(hidden, weight), labels, *double(bias))
    names = NAMES[:4]
    plain = plain_statistics(*inputs, **transform)
    exact = plain_statistics(*exact_in, **transform)
    plain_grads = gradients(weighted(plain[n] for n in names), inputs[:2] + inputs[3:])
    exact_grads = gradients(weighted(exact[n] for n in names), exact_in[:2] + exact_in[3:])
    for options in (EngineOptions(), EngineOptions(chunk_size=16, strategy="two_pass"), OPTIONS["resident"]):
        found = linear_statistics(
            hidden, weight, labels, names, bias=bias, transform=LogitTransform(**transform), options=options
        )
        for name in names:
            assert_as_exact_as_plain(getattr(found, name), plain[name], exact[name], name)
        ours = gradients(weighted(getattr(found, n) for n in names), inputs[:2] + inputs[3:])
        for what, a, b, c in zip(("hidden", "weight", "bias"), ours, plain_grads, exact_grads, strict=True):
            assert_as_exact_as_plain(a, b, c, f"grad_{what} {options.strategy}")


@pytest.mark.parametrize("blocks", [1, 4, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_grad_weight_does_not_suffer_from_many_blocks(blocks, dtype):
    hidden, weight, labels, _ = problem(256, 32, 97, dtype=dtype, masked=0.0)
    exact_in = double(hidden, weight)
    exact = gradients(plain_statistics(*exact_in, labels)["logp"].sum(), exact_in)
    plain = gradients(plain_statistics(hidden, weight, labels)["logp"].sum(), (hidden, weight))
    loss, _ = linear_token_loss(
        hidden, weight, labels, lambda s, y: s.logp, options=EngineOptions(chunk_size=256 // blocks)
    )
    for a, b, c in zip(gradients(loss, (hidden, weight)), plain, exact, strict=True):
        assert_as_exact_as_plain(a, b, c, f"{blocks} blocks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_many_tiles_and_weight_chunks(dtype, needs):
    """Tokens and vocabulary both cut into tiles, and (in half precision on a CPU) tiles into chunks of the weight."""
    hidden, weight, labels, bias = problem(300, 24, 3001, dtype=dtype, bias=True)
    for tensor, need in zip((hidden, weight), needs, strict=True):
        tensor.requires_grad_(need)
    workspace = 200_000
    work = Workload(
        tokens=int((labels != -100).sum()),
        hidden_size=24,
        vocab_size=3001,
        operand_dtype=torch.float32,
        weight_dtype=dtype,
        device=torch.device("cpu"),
    )
    plan = make_plan(work, workspace=workspace)
    assert plan.tile_columns < 3001 / 4
    assert plan.tile_rows < 200
    assert dtype == torch.float32 or plan.weight_chunk < plan.tile_columns
    options = EngineOptions(workspace=workspace, strategy="two_pass")
    transform = {"softcap": 9.0}
    found = linear_statistics(
        hidden, weight, labels, NAMES[:3], bias=bias, transform=LogitTransform(**transform), options=options
    )
    exact_in = double(hidden, weight, bias)
    exact = plain_statistics(exact_in[0], exact_in[1], labels, exact_in[2], **transform)
    plain = plain_statistics(hidden, weight, labels, bias, **transform)
    leaves = (hidden, weight, bias)
    for what, a, p, e in zip(
        [n for n, need in zip(("hidden", "weight"), needs, strict=True) if need] + ["bias"],
        gradients(weighted(found[:3]), leaves),
        gradients(weighted(plain[n] for n in NAMES[:3]), leaves),
        gradients(weighted(exact[n] for n in NAMES[:3]), exact_in),
        strict=True,
    ):
        assert_as_exact_as_plain(a, p, e, f"grad_{what}")


def test_accum_dtype_adds_up_in_fp32():
    hidden, weight, labels, _ = problem(256, 32, 97, dtype=torch.bfloat16, masked=0.0)
    options = EngineOptions(chunk_size=4, accum_dtype=torch.float32, strategy="one_pass")
    loss, _ = linear_token_loss(hidden, weight, labels, lambda s, y: s.logp, options=options)
    (grad,) = gradients(loss, (weight,))
    exact_in = double(hidden, weight)
    (exact,) = gradients(plain_statistics(*exact_in, labels)["logp"].sum(), exact_in[1:])
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.double(), exact, rtol=2**-8, atol=2**-8 * float(exact.abs().max()))


# --- Which tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 3}])
def test_masks(compact, options):
    for keep in ([], [0], [4, 5, 11], list(range(12))):
        hidden, weight, labels, _ = problem(shape=(3, 4), dtype=torch.float64, masked=0.0)
        mask = torch.zeros(12, dtype=torch.bool)
        mask[keep] = True
        labels[~mask.view(3, 4)] = -100
        exact = plain_statistics(hidden, weight, labels)
        found = linear_statistics(
            hidden, weight, labels, ("logp", "entropy"), options=EngineOptions(compact=compact, **options)
        )
        torch.testing.assert_close(found.logp, exact["logp"])
        ours = gradients(weighted([found.logp, found.entropy]), (hidden, weight))
        expected = gradients(weighted([exact["logp"], exact["entropy"]]), (hidden, weight))
        torch.testing.assert_close(ours, expected)
        loss, _ = linear_token_loss(
            hidden, weight, labels, lambda s, y: -s.logp, options=EngineOptions(compact=compact, **options)
        )
        torch.testing.assert_close(loss, -exact["logp"].sum())
        torch.testing.assert_close(gradients(loss, (hidden, weight)), gradients(-exact["logp"].sum(), (hidden, weight)))


def test_masked_tokens_never_leak_even_when_they_are_nan():
    hidden, weight, labels, _ = problem(shape=(2, 6), masked=0.0)
    labels[0, :3] = -100
    poisoned = hidden.detach().clone()
    poisoned[0, :3] = float("nan")
    poisoned.requires_grad_()
    clean = linear_logps(hidden, weight, labels)
    dirty = linear_logps(poisoned, weight, labels)
    torch.testing.assert_close(dirty, clean)
    a, b = gradients(clean.sum(), (hidden, weight)), gradients(dirty.sum(), (poisoned, weight))
    torch.testing.assert_close(a, b)
    assert (b[0][0, :3] == 0).all()


@pytest.mark.parametrize("strategy", ["one_pass", "resident", "two_pass"])
def test_triton_backend_equals_torch(strategy):
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("tests/chunked/engine/test_stream_gpu.py runs the kernels on the GPU")
    hidden, weight, labels, bias = problem(37, 16, 203, bias=True)
    results = []
    for backend in ("torch", "triton"):
        options = EngineOptions(strategy=strategy, backend=backend, chunk_size=None if strategy == "resident" else 8)
        common = {"bias": bias, "transform": LogitTransform(**TRANSFORM), "options": options}
        if strategy == "one_pass":
            loss, _ = linear_token_loss(
                hidden, weight, labels, lambda s, y: s.logp * s.entropy, ("logp", "entropy"), **common
            )
        else:
            loss = weighted(v for v in linear_statistics(hidden, weight, labels, NAMES, **common) if v is not None)
        results.append((loss, *gradients(loss, (hidden, weight, bias))))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_several_tensors_are_one_stream():
    parts = [problem(shape=(2, t), dtype=torch.float64, seed=t) for t in (3, 5, 1)]
    weight = parts[0][1]
    labels = [p[2] for p in parts]
    labels[2][:] = -100
    hidden = [p[0] for p in parts]
    exact = [plain_statistics(h, weight, y)["logp"] for h, y in zip(hidden, labels, strict=True)]
    for chunk_size in (None, 1, 4):
        found = linear_statistics(hidden, weight, labels, options=EngineOptions(chunk_size=chunk_size))
        for f, e in zip(found, exact, strict=True):
            torch.testing.assert_close(f.logp, e)
        torch.testing.assert_close(
            gradients(weighted([f.logp for f in found]), [*hidden, weight]),
            gradients(weighted(exact), [*hidden, weight]),
        )


def test_some_tensors_need_no_gradient():
    (a, weight, y, _), (b, _, z, _) = problem(seed=1, dtype=torch.float64), problem(seed=2, dtype=torch.float64)
    b.requires_grad_(False)
    found = linear_statistics([a, b], weight, [y, z])
    exact = [plain_statistics(a, weight, y)["logp"], plain_statistics(b, weight, z)["logp"]]
    torch.testing.assert_close(
        gradients(weighted([f.logp for f in found]), (a, weight)), gradients(weighted(exact), (a, weight))
    )


def test_shift_predicts_the_next_token():
    hidden, weight, labels, _ = problem(shape=(3, 7))
    shifted = linear_logps(hidden, weight, labels, shift=True)
    torch.testing.assert_close(shifted[:, :-1], linear_logps(hidden[:, :-1], weight, labels[:, 1:]))
    assert (shifted[:, -1] == 0).all()


def test_any_strides():
    hidden, weight, labels, _ = problem(shape=(4, 6), dtype=torch.float64)
    strided = torch.empty(6, 24, 4, dtype=torch.float64).permute(2, 0, 1)
    wide = torch.empty(24, 61, dtype=torch.float64).t()
    with torch.no_grad():
        strided.copy_(hidden)
        wide.copy_(weight)
    every_other = torch.stack([labels, labels], -1)[..., 0]
    strided, wide = strided.requires_grad_(), wide.requires_grad_()
    a, b = linear_logps(hidden, weight, labels), linear_logps(strided, wide, every_other)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(gradients(weighted([a]), (hidden, weight)), gradients(weighted([b]), (strided, wide)))


def test_strided_hidden_states_are_not_copied_whole():
    hidden, weight, labels, _ = problem(shape=(4, 2000), h=256, v=512, masked=0.0)
    workspace = 4 * MiB
    shifted, targets = hidden[:, :-1], labels[:, 1:]
    assert shifted.numel() * 4 > workspace
    with torch.no_grad():
        assert peak_bytes(lambda: linear_logps(shifted, weight, targets, workspace=workspace)) <= workspace
    expected = linear_logps(hidden, weight, labels, shift=True)[:, :-1]
    torch.testing.assert_close(linear_logps(shifted, weight, targets), expected)


def test_hidden_states_of_different_dtypes_under_autocast():
    (a, weight, y, _), (b, _, z, _) = problem(seed=1), problem(seed=2)
    weight.requires_grad_(False)
    half = a.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = linear_statistics([half, b], weight, [y, z])
        alone = linear_statistics(b, weight, z, options=EngineOptions(strategy="two_pass"))
    torch.testing.assert_close(
        gradients(mixed[1].logp.sum(), (b,)), gradients(alone.logp.sum(), (b,)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("shape", [(0,), (0, 5), (2, 0)])
def test_empty_batches(shape):
    hidden, weight, labels, _ = problem(shape=shape)
    logps = linear_logps(hidden, weight, labels)
    assert logps.shape == shape
    loss, _ = linear_token_loss(hidden, weight, labels, lambda s, y: s.logp)
    for value in (logps.sum(), loss):
        assert value == 0
        grad_hidden, grad_weight = gradients(value, (hidden, weight))
        assert grad_hidden.shape == hidden.shape
        assert (grad_weight == 0).all()


# --- Autograd ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["one_pass", "resident", "two_pass", "frozen_head"])
def test_repeated_backward_and_determinism(strategy):
    hidden, weight, labels, _ = problem(40, 16, 101)
    weight.requires_grad_(strategy != "frozen_head")

    def build():
        options = EngineOptions(strategy=strategy, chunk_size=None if strategy == "resident" else 7)
        if strategy == "one_pass":
            return linear_token_loss(hidden, weight, labels, lambda s, y: -s.logp, options=options)[0]
        return -linear_statistics(hidden, weight, labels, options=options).logp.sum()

    inputs = [t for t in (hidden, weight) if t.requires_grad]
    loss = build()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    snapshot = [g.clone() for g in first]
    for g in first:
        g.mul_(7)  # what was handed out belongs to the caller
    second = torch.autograd.grad(3 * loss, inputs, retain_graph=True)
    third = torch.autograd.grad(loss, inputs)
    for a, b, c in zip(snapshot, second, third, strict=True):
        torch.testing.assert_close(3 * a, b)
        assert torch.equal(a, c), "not the same bit for bit"
    again = build()
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(snapshot, torch.autograd.grad(again, inputs), strict=True))


def test_gradients_accumulate_in_parameters():
    hidden, weight, labels, _ = problem()
    for _ in range(2):
        linear_token_loss(hidden, weight, labels, lambda s, y: -s.logp)[0].backward()
    twice = weight.grad.clone()
    weight.grad = None
    linear_token_loss(hidden, weight, labels, lambda s, y: -s.logp)[0].backward()
    torch.testing.assert_close(twice, 2 * weight.grad)


def test_outputs_may_be_changed_in_place():
    hidden, weight, labels, _ = problem(masked=0.0)
    expected = gradients(2 * linear_logps(hidden, weight, labels).sum(), (hidden, weight))
    logps = linear_logps(hidden, weight, labels)
    logps.mul_(2)
    torch.testing.assert_close(gradients(logps.sum(), (hidden, weight)), expected)


def test_the_upstream_gradient_is_applied():
    hidden, weight, labels, _ = problem(dtype=torch.float64)
    loss, _ = linear_token_loss(hidden, weight, labels, lambda s, y: -s.logp)
    exact = -plain_statistics(hidden, weight, labels)["logp"].sum()
    torch.testing.assert_close(
        gradients((loss * 0.25).square(), (hidden, weight)), gradients((exact * 0.25).square(), (hidden, weight))
    )


def test_no_gradient_where_no_loss_depends():
    hidden, weight, labels, _ = problem()
    loss, found = linear_token_loss(hidden, weight, labels, lambda s, y: torch.zeros_like(s.logp), metrics=("entropy",))
    assert not found.entropy.requires_grad
    assert all((g == 0).all() for g in gradients(loss, (hidden, weight)))


# --- Only the work that is needed -------------------------------------------------------------------------------------


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("frozen", "strategy", "factor"),
    [
        ((), None, 6),
        ((), "two_pass", 8),
        (("weight",), None, 4),
        (("weight",), "resident", 4),
        (("weight",), "two_pass", 6),
        (("hidden",), "resident", 4),
        (("hidden", "weight"), None, 2),
    ],
)
def test_products_that_are_taken(frozen, strategy, factor):
    n, h, v = 64, 16, 128
    hidden, weight, labels, _ = problem(2 * n, h, v, masked=0.0)
    labels[::2] = -100  # half of the tokens must cost nothing
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        tensor.requires_grad_(name not in frozen)
    options = EngineOptions(strategy=strategy)

    def coupled():
        loss = linear_statistics(hidden, weight, labels, options=options).logp.sum().square()
        if loss.requires_grad:
            loss.backward()

    assert flops(coupled) == factor * n * h * v

    def separable():
        loss, _ = linear_token_loss(hidden, weight, labels, lambda s, y: s.logp)
        if loss.requires_grad:
            loss.backward()

    assert flops(separable) == (6 - 2 * len(frozen)) * n * h * v


def test_no_grad_computes_no_gradient():
    n, h, v = 64, 16, 128
    hidden, weight, labels, _ = problem(n, h, v, masked=0.0)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert flops(lambda: linear_logps(hidden, weight, labels)) == 2 * n * h * v
            assert flops(lambda: linear_token_loss(hidden, weight, labels, lambda s, y: s.logp)) == 2 * n * h * v
            assert not linear_logps(hidden, weight, labels).requires_grad


def test_peak_memory_is_flat_in_the_length_and_under_the_workspace():
    h, v, workspace = 32, 8192, 8 * 2**20
    peaks = []
    for n in (512, 4096, 16384):
        hidden, weight, labels, _ = problem(n, h, v, masked=0.5)
        outputs = sum(t.numel() * t.element_size() for t in (hidden, weight))
        for options in (
            EngineOptions(workspace=workspace),
            EngineOptions(workspace=workspace, strategy="two_pass"),
        ):

            def coupled(options=options, hidden=hidden, weight=weight, labels=labels):
                logps = linear_statistics(hidden, weight, labels, ("logp", "entropy"), options=options)
                return torch.autograd.grad((logps.logp + logps.entropy).sum(), (hidden, weight))

            def separable(hidden=hidden, weight=weight, labels=labels):
                loss, _ = linear_token_loss(
                    hidden, weight, labels, lambda s, y: s.logp, options=EngineOptions(workspace=workspace)
                )
                return torch.autograd.grad(loss, (hidden, weight))

            peaks.append(max(peak_bytes(coupled), peak_bytes(separable)) - outputs)
    assert max(peaks) <= workspace, peaks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_peak_memory_in_other_dtypes(dtype):
    workspace = 12 * 2**20
    hidden, weight, labels, bias = problem(3000, 64, 8192, dtype=dtype, masked=0.2, bias=True)
    outputs = sum(t.numel() * t.element_size() for t in (hidden, weight, bias))

    def run():
        options = EngineOptions(workspace=workspace)
        transform = LogitTransform(softcap=10.0)
        found = linear_statistics(hidden, weight, labels, NAMES, bias=bias, transform=transform, options=options)
        return torch.autograd.grad(weighted(v for v in found if v is not None), (hidden, weight, bias))

    assert peak_bytes(run) - outputs <= workspace


# --- Where it runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_autocast(hidden_dtype):
    hidden, weight, labels, bias = problem(31, 16, 67, bias=True)
    hidden = hidden.detach().to(hidden_dtype).requires_grad_()
    exact_in = double(hidden, weight, bias)
    exact = plain_statistics(exact_in[0], exact_in[1], labels, exact_in[2])["logp"]
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_logps(hidden, weight, labels, bias=bias)
        loss, _ = linear_token_loss(hidden, weight, labels, lambda s, y: s.logp, bias=bias)
        plain = plain_statistics(hidden, weight, labels, bias)["logp"]
    assert ours.dtype == torch.float32
    assert_as_exact_as_plain(ours, plain, exact, "logp")
    expected = gradients(exact.sum(), exact_in)
    for value in (ours.sum(), loss):
        for g, p, e in zip(
            gradients(value, (hidden, weight, bias)),
            gradients(plain.sum(), (hidden, weight, bias)) if value is loss else itertools.repeat(None),
            expected,
            strict=False,
        ):
            if p is not None:
                assert g.dtype == p.dtype
                assert_as_exact_as_plain(g, p, e, "gradient")


def test_half_precision_inputs_give_fp32_statistics():
    for dtype in (torch.float16, torch.bfloat16):
        hidden, weight, labels, _ = problem(dtype=dtype)
        assert linear_logps(hidden, weight, labels).dtype == torch.float32
        loss, _ = linear_token_loss(hidden, weight, labels, lambda s, y: s.logp)
        assert loss.dtype == torch.float32
        assert loss.shape == ()
    hidden, weight, labels, _ = problem(dtype=torch.float64)
    assert linear_logps(hidden, weight, labels).dtype == torch.float64


def test_fp16_gradients_survive_a_loss_scale():
    # Mean over many tokens: each token's gradient is far below fp16's smallest number until it is scaled.
    hidden, weight, labels, _ = problem(512, 16, 4096, dtype=torch.float16, masked=0.0)
    exact_in = double(hidden, weight)
    exact = gradients(-plain_statistics(*exact_in, labels)["logp"].sum() / 1e6 * 65536, exact_in)
    loss, _ = linear_token_loss(hidden, weight, labels, lambda s, y: -s.logp / 1e6)
    plain = gradients(-plain_statistics(hidden, weight, labels)["logp"].sum() / 1e6 * 65536, (hidden, weight))
    for g, p, e in zip(gradients(loss * 65536, (hidden, weight)), plain, exact, strict=True):
        assert_as_exact_as_plain(g, p, e)


def test_activation_checkpointing_around_it():
    hidden, weight, labels, _ = problem()

    def step(h, w):
        return linear_logps(torch.tanh(h), w, labels).sum()

    checkpointed = torch.utils.checkpoint.checkpoint(step, hidden, weight, use_reentrant=False)
    torch.testing.assert_close(
        gradients(checkpointed, (hidden, weight)), gradients(step(hidden, weight), (hidden, weight))
    )


def test_the_graph_is_freed():
    hidden, weight, labels, _ = problem(64, 16, 128)
    for build in (
        lambda h: linear_logps(h, weight, labels).sum(),
        lambda h: linear_token_loss(h, weight, labels, lambda s, y: s.logp)[0],
    ):
        gc.disable()
        try:
            activation = hidden * 2  # held by the graph alone
            alive = weakref.ref(activation)
            loss = build(activation)
            del activation
            assert alive() is not None
            del loss
            assert alive() is None, "a reference cycle keeps the graph alive"
        finally:
            gc.enable()
