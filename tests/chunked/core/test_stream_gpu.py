"""The engine on a GPU: exact in every dtype by every strategy, deterministic, and within its workspace."""

import subprocess
import sys
import warnings

import pytest
import torch

from liger_losses import EngineOptions, LogitTransform, linear_logps, linear_statistics, linear_token_loss
from liger_losses.kernels import (
    _tiles,
    autograd,
    label_rows,
    linear_exp,
    linear_grad,
    linear_stats,
    softmax_grad,
    targets,
)
from liger_losses.kernels._triton import warn_once
from tests.losses import CE, DPO
from tests.reference import NAMES, assert_as_exact_as_plain, double, gradients, on_gpu, plain_statistics, total

pytestmark = pytest.mark.gpu
MiB = 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(1, 64, 50257), (517, 576, 1031), (1000, 896, 15163), (300, 33, 77)])
def test_as_exact_as_plain_pytorch(sizes, dtype):
    hidden, weight, labels, bias = on_gpu(*sizes, dtype=dtype, bias=True, masked=0.3 if sizes[0] > 1 else 0.0)
    names, transform = NAMES[:4], {"temperature": 0.8, "logit_scale": 1.2, "softcap": 12.0}
    exact_in = double(hidden, weight, bias)
    plain = plain_statistics(hidden, weight, labels, bias, **transform)
    exact = plain_statistics(exact_in[0], exact_in[1], labels, exact_in[2], **transform)
    plain_grads = gradients(total(plain, names), (hidden, weight, bias))
    exact_grads = gradients(total(exact, names), exact_in)
    # In full precision, cuBLAS sums in another order from one shape to the next.
    floor = {torch.float32: 1e-5, torch.float64: 1e-13}.get(dtype)
    common = {"bias": bias, "transform": LogitTransform(**transform)}
    for strategy in ("resident", "two_pass", "small", "one_pass"):
        if strategy == "one_pass":
            loss, found = linear_token_loss(
                hidden,
                weight,
                labels,
                lambda s, y: sum(getattr(s, n) * (0.5 + i) for i, n in enumerate(names)),
                names,
                **common,
            )
        else:
            chosen = EngineOptions(strategy="two_pass" if strategy == "small" else strategy)
            if strategy == "small":
                chosen = EngineOptions(strategy="two_pass", workspace=24 * MiB)
            found = linear_statistics(hidden, weight, labels, names, **common, options=chosen)
            loss = total(found._asdict(), names)
        for name in names:
            ours = getattr(found, name)
            assert_as_exact_as_plain(ours, plain[name], exact[name], f"{name} by {strategy}", floor=floor)
        ours_grads = gradients(loss, (hidden, weight, bias))
        for what, a, p, e in zip(("hidden", "weight", "bias"), ours_grads, plain_grads, exact_grads, strict=True):
            assert_as_exact_as_plain(a, p, e, f"grad_{what} by {strategy}", floor=floor)


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes", [(1, 64, 50257), (517, 576, 1031), (1000, 896, 151643), (300, 33, 77), (4097, 72, 999)]
)
def test_statistics_without_logits(sizes, dtype, tma, monkeypatch):
    if not tma:
        monkeypatch.setattr("liger_losses.kernels._tiles.has_tma", lambda device: False)
    hidden, weight, labels, bias = on_gpu(
        *sizes, dtype=dtype, bias=True, masked=0.2 if sizes[0] > 1 else 0.0, scale=3.0
    )
    transform = {"temperature": 0.8, "logit_scale": 1.2, "softcap": 12.0}
    exact_in = double(hidden, weight, bias)
    with torch.no_grad():
        for b, options in ((None, {}), (bias, transform)):
            exact = plain_statistics(exact_in[0], exact_in[1], labels, None if b is None else exact_in[2], **options)
            found = linear_statistics(
                hidden, weight, labels, NAMES, metrics=("argmax",), bias=b, transform=LogitTransform(**options)
            )
            for name in NAMES:
                torch.testing.assert_close(
                    getattr(found, name).double(), exact[name], rtol=1e-4, atol=1e-4, msg=f"{name} {options}"
                )
            again = linear_statistics(hidden, weight, labels, NAMES, bias=b, transform=LogitTransform(**options))
            assert all(torch.equal(getattr(found, name), getattr(again, name)) for name in NAMES)


def test_frozen_head():
    hidden, weight, labels, _ = on_gpu(700, 256, 5003, dtype=torch.bfloat16)
    weight.requires_grad_(False)
    exact_in = double(hidden, weight)
    plain = gradients(plain_statistics(hidden, weight, labels)["logp"].sum(), (hidden,))
    exact = gradients(plain_statistics(*exact_in, labels)["logp"].sum(), exact_in[:1])
    ours = gradients(linear_logps(hidden, weight, labels).sum(), (hidden,))
    assert_as_exact_as_plain(ours[0], plain[0], exact[0])


@pytest.mark.parametrize("blocks", [1, 4, 16, 32])
def test_grad_weight_does_not_suffer_from_many_blocks(blocks):
    hidden, weight, labels, _ = on_gpu(4096, 256, 2053, dtype=torch.bfloat16, masked=0.0)
    exact_in = double(hidden, weight)
    exact = gradients(plain_statistics(*exact_in, labels)["logp"].mean(), exact_in)
    plain = gradients(plain_statistics(hidden, weight, labels)["logp"].mean(), (hidden, weight))
    options = EngineOptions(chunk_size=4096 // blocks)
    loss, _ = linear_token_loss(hidden, weight, labels, lambda s, y: s.logp / 4096, options=options)
    for what, a, p, e in zip(("hidden", "weight"), gradients(loss, (hidden, weight)), plain, exact, strict=True):
        assert_as_exact_as_plain(a, p, e, f"grad_{what}, {blocks} blocks")


@pytest.mark.parametrize("sizes", [(1, 576, 50257), (1000, 896, 151643), (100003, 64, 1031), (131, 72, 50257)])
@pytest.mark.parametrize("loss", ["cross_entropy", "coupled", "frozen head"])
def test_odd_sizes(sizes, loss):
    """The fused kernels' own path (log-probabilities in bf16): rows and columns that fill no tile."""
    hidden, weight, labels, _ = on_gpu(*sizes, dtype=torch.bfloat16, masked=0.2 if sizes[0] > 1 else 0.0)
    if loss == "frozen head":
        weight.requires_grad_(False)
    weights = torch.randn(sizes[0], device="cuda")
    exact_in = double(hidden, weight)

    def of(logps):
        return (logps * weights).sum()

    if loss == "cross_entropy":
        ours, _ = linear_token_loss(hidden, weight, labels, lambda s, y, w: s.logp * w, token_inputs={"w": weights})
    else:
        ours = of(linear_logps(hidden, weight, labels))
    plain = of(plain_statistics(hidden, weight, labels)["logp"])
    exact = of(plain_statistics(*exact_in, labels)["logp"])
    assert_as_exact_as_plain(ours, plain, exact, floor=1e-5)
    found = (
        gradients(value, x) for value, x in ((ours, (hidden, weight)), (plain, (hidden, weight)), (exact, exact_in))
    )
    for a, p, e in zip(*found, strict=True):
        assert_as_exact_as_plain(a, p, e)


def test_a_new_number_of_tokens_never_recompiles():
    def compiled():
        kernels = {
            name: kernel
            for module in (label_rows, linear_exp, linear_grad, linear_stats, autograd, softmax_grad)
            for name, kernel in vars(module).items()
            if name.endswith("_kernel")
        }
        return {name: sum(len(cache[0]) for cache in kernel.device_caches.values()) for name, kernel in kernels.items()}

    def run(tokens):
        # Of a small vocabulary, a few tokens have fewer tiles than there are programs, which takes another variant.
        hidden, weight, labels, _ = on_gpu(tokens, 64, 50257, dtype=torch.bfloat16, masked=0.3 if tokens > 1 else 0.0)
        for strategy in ("one_pass", "two_pass", "resident"):
            linear_token_loss(hidden, weight, labels, lambda s, y: s.logp, options=EngineOptions(strategy=strategy))[
                0
            ].backward()
        linear_logps(hidden.detach(), weight.detach(), labels)

    run(2048)
    run(1)  # no token is masked
    before = compiled()
    for tokens in (1024, 77, 1000, 4099, 12345):
        run(tokens)
    assert compiled() == before


def test_devices_without_tma_say_so_once(monkeypatch):
    hidden, weight, labels, _ = on_gpu(300, 64, 5003, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = linear_logps(hidden, weight, labels)
        for known in (_tiles.has_tma, targets.target_of, warn_once):
            known.cache_clear()
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (8, 0))
        try:
            with pytest.warns(RuntimeWarning, match="tensor memory accelerator"):
                first = linear_logps(hidden, weight, labels)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                second = linear_logps(hidden, weight, labels)
        finally:
            _tiles.has_tma.cache_clear()
            targets.target_of.cache_clear()
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(first, second)


def test_bitwise_the_same_from_run_to_run():
    hidden, weight, labels, bias = on_gpu(3000, 512, 32003, dtype=torch.bfloat16, bias=True)
    module = CE(label_smoothing=0.1, lse_square_scale=1e-4)

    def run():
        loss = module(weight, hidden, labels, bias)
        logps = linear_logps(hidden, weight, labels, bias=bias, workspace=64 * MiB)
        return loss, logps, *gradients(loss + logps.square().mean(), (hidden, weight, bias))

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, None])
def test_autocast(dtype, hidden_dtype):
    hidden, weight, labels, bias = on_gpu(517, 128, 3001, dtype=torch.float32, bias=True)
    hidden = hidden.detach().to(hidden_dtype or dtype).requires_grad_()
    exact_in = double(hidden, weight, bias)
    exact = plain_statistics(exact_in[0], exact_in[1], labels, exact_in[2])["logp"]
    with torch.autocast("cuda", dtype):
        plain = plain_statistics(hidden, weight, labels, bias)["logp"]
        ours = linear_logps(hidden, weight, labels, bias=bias)
        loss = CE(reduction="sum")(weight, hidden, labels, bias)
    assert_as_exact_as_plain(ours, plain, exact, "logp")
    plain_grads, exact_grads = (gradients(v.sum(), x) for v, x in ((plain, (hidden, weight, bias)), (exact, exact_in)))
    for sign, value in ((1, ours.sum()), (-1, loss)):
        for a, p, e in zip(gradients(value, (hidden, weight, bias)), plain_grads, exact_grads, strict=True):
            assert a.dtype == p.dtype
            assert_as_exact_as_plain(sign * a, p, e, "gradient")


@pytest.mark.parametrize("tokens", [2048, 16384, 100003])
def test_peak_memory_stays_under_the_workspace(tokens):
    h, v, workspace = 256, 50257, 192 * MiB
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, h, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    weight = torch.randn(v, h, device="cuda", dtype=torch.bfloat16, generator=generator).mul_(0.06).requires_grad_()
    labels = torch.randint(v, (tokens,), device="cuda", generator=generator)
    labels[::3] = -100
    options = EngineOptions(workspace=workspace)

    def coupled():
        found = linear_statistics(hidden, weight, labels, ("logp", "entropy"), options=options)
        return (found.logp + found.entropy).mean()

    def separable():
        return linear_token_loss(hidden, weight, labels, lambda s, y: s.logp, options=options)[0]

    for build in (coupled, separable):
        for measured in (False, True):  # the first time, cuBLAS takes a workspace of its own
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            grads = gradients(build(), (hidden, weight))
            outputs = sum(g.numel() * g.element_size() for g in grads)
            extra = torch.cuda.max_memory_allocated() - before - outputs
            del grads
            if measured:
                assert extra <= workspace, f"{build.__name__}: {extra / MiB:.0f} MiB"


def test_offsets_beyond_2_to_the_31():
    """As many logits at once as overflow 32-bit offsets, against the same in small blocks."""
    tokens, h, v = 17000, 64, 131072
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, h, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    weight = torch.randn(v, h, device="cuda", dtype=torch.bfloat16, generator=generator).mul_(0.1).requires_grad_()
    labels = torch.randint(v, (tokens,), device="cuda", generator=generator)
    big = EngineOptions(workspace=14 * 2**30, strategy="resident")
    small = EngineOptions(workspace=512 * MiB, strategy="two_pass")
    results = []
    for options in (big, small):
        logps = linear_statistics(hidden, weight, labels, options=options).logp
        results.append((logps, *gradients(logps.mean(), (hidden, weight))))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-4)
    for a, b in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-6, atol=float(a.abs().max()) * 2**-7)


def test_bad_labels_are_an_error_and_the_gpu_survives():
    hidden, weight, labels, _ = on_gpu(64, 32, 101)
    labels[3] = 101
    with pytest.raises(ValueError, match="labels must be in"):
        linear_logps(hidden, weight, labels)
    labels[3] = 5
    assert linear_logps(hidden, weight, labels).isfinite().all()


#: Calls that leave out no token, of labels outside of the vocabulary.
WRONG = """
import torch
from liger_losses import LigerFusedLinearCrossEntropyLoss, linear_logps
hidden, weight = (torch.zeros(n, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (16, 256))
labels = torch.full((16,), 256, device="cuda")
with torch.set_grad_enabled({}):
    {}
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        "LigerFusedLinearCrossEntropyLoss(compact=False)(weight, hidden, labels)",
        "linear_logps(hidden, weight, labels, compact=False)",
    ],
)
def test_a_gpu_asserts_that_labels_are_right_where_no_token_is_left_out(call, grad):
    """In a process of its own, whose work there ends."""
    ended = subprocess.run(
        [sys.executable, "-c", WRONG.format(grad, call)], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode
    assert "device-side assert" in ended.stderr


def test_one_synchronisation_and_none_in_backward():
    hidden, weight, labels, _ = on_gpu(64, 32, 101)
    stacked = hidden.detach().view(8, 8, 32).requires_grad_()
    module = DPO(use_ref_model=False, compact=False)
    free = CE(compact=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, _ = module(weight, stacked, labels.view(8, 8))
        total_loss = loss + free(weight, hidden, labels)
        total_loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    compacted = CE()(weight, hidden, labels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        compacted.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on(device, value):
    if isinstance(value, torch.Tensor):
        moved = value.detach().to(device)
        return moved.requires_grad_(value.requires_grad)
    return value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_selected_columns(dtype):
    """In one block, in many, and in the one pass of a separable loss; some columns are named twice."""
    hidden, weight, labels, bias = on_gpu(517, 192, 1031, dtype=dtype, bias=True, masked=0.3)
    generator = torch.Generator("cuda").manual_seed(0)
    columns = torch.randint(0, 1031, (517, 6), device="cuda", generator=generator)
    columns[:, 1] = columns[:, 0]
    columns[:, 2] = labels.clamp(min=0)
    upstream = torch.randn(517, 6, device="cuda", generator=generator)
    exact_in = double(hidden, weight, bias)

    def plain(hidden, weight, bias):
        logps = (hidden @ weight.T + bias).log_softmax(-1, torch.promote_types(hidden.dtype, torch.float32))
        return (logps.gather(1, columns) * upstream * (labels != -100)[:, None]).sum()

    expected, exact = plain(hidden, weight, bias), plain(*exact_in)
    losses = {
        name: (
            linear_statistics(
                hidden, weight, labels, "selected_logps", selected=columns, bias=bias, options=options
            ).selected_logps
            * upstream
        ).sum()
        for name, options in (
            ("resident", EngineOptions(strategy="resident")),
            ("two_pass", EngineOptions(strategy="two_pass", workspace=4 * MiB)),
        )
    }
    losses["one_pass"] = linear_token_loss(
        hidden,
        weight,
        labels,
        lambda s, y, g: (s.selected_logps * g).sum(-1),
        "selected_logps",
        token_inputs={"g": upstream},
        selected=columns,
        bias=bias,
    )[0]
    floor = 1e-5 if dtype == torch.float32 else None
    for name, loss in losses.items():
        grads = gradients(loss, (hidden, weight, bias))
        wanted = gradients(expected, (hidden, weight, bias)), gradients(exact, exact_in)
        for what, a, p, e in zip(("hidden", "weight", "bias"), grads, *wanted, strict=True):
            assert_as_exact_as_plain(a, p, e, f"grad_{what} by {name}", floor=floor)
