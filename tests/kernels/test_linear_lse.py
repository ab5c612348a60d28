"""Projections and the log-sum-exps of their logits, against float64; and the losses that take them."""

import math

import pytest
import torch

from liger_losses import DistillationLoss, Divergence, Teacher
from liger_losses.chunked.engine import two_models
from liger_losses.kernels import hopper_pipeline, linear_exp_hopper, linear_lse
from liger_losses.kernels._triton import tl
from liger_losses.kernels.linear_lse import Kept, log_sum_exps_into, row_log_sum_exps_into
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from tests.kernels.test_linear_exp_hopper import Failing, OnTheHost, hopper, on_hopper

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(size, dtype, every_option, backend):
    tokens, hidden_size, vocab = size
    g = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device=DEVICE, generator=g).to(dtype)
    weight = (torch.randn(vocab, hidden_size, device=DEVICE, generator=g) * hidden_size**-0.5).to(dtype)
    epilogue, wide = Epilogue(), Epilogue()
    if every_option:
        bias = torch.randn(vocab, device=DEVICE, generator=g)
        bias[: vocab // 2] = float("-inf")
        hidden[0] *= 100
        transform = LogitTransform(torch.linspace(0.5, 2.0, tokens, device=DEVICE), 1.2)
        epilogue, wide = Epilogue(transform, bias), Epilogue(transform, bias.double())
    out, lse = (torch.full(shape, float("nan"), device=DEVICE) for shape in ((tokens, vocab + 4), (tokens,)))
    out = out[:, :vocab]
    maxima, sums = log_sum_exps_into(lse, hidden, weight, out, epilogue, backend=backend)
    projected = hidden.double() @ weight.double().t()
    largest = projected.abs().amax(1, keepdim=True)  # wgmma does not round, but drops digits of its sums
    torch.testing.assert_close(out / largest, projected / largest, rtol=0, atol=2e-5, check_dtype=False)
    torch.testing.assert_close(lse.double(), wide(out.double()).logsumexp(1), rtol=1e-6, atol=3e-6)
    of_tiles = torch.nn.functional.pad(epilogue(out.clone()), (0, -vocab % 128), value=-math.inf).view(tokens, -1, 128)
    exact = of_tiles.amax(-1).t().clamp(min=-3.0e38)
    torch.testing.assert_close(maxima, exact.where(exact > -3.0e38, maxima), rtol=1e-6, atol=1e-6)
    of_tiles = of_tiles.double().logsumexp(-1).t()
    torch.testing.assert_close(sums.double().log() + maxima, of_tiles, rtol=1e-5, atol=1e-5)
    again = torch.empty_like(lse)
    log_sum_exps_into(again, hidden, weight, out, epilogue, backend=backend)
    assert torch.equal(lse, again)
    # Some groups of columns alone, of which some are chosen by several columns.
    columns = torch.randint(vocab, (tokens, 5), device=DEVICE, generator=g)
    columns[:, 1], columns[:, 2] = vocab - 1, 0
    kept = Kept.of(columns, vocab)
    log_sum_exps_into(again, hidden, weight, None, epilogue, kept=kept, backend=backend)
    torch.testing.assert_close(again, lse)
    torch.testing.assert_close(kept.at(columns), out.gather(1, columns))


@pytest.mark.parametrize("every_option", [False, True])
def test_reference(every_option):
    check((5, 16, 40), torch.float16, every_option, "torch")


@hopper
@pytest.mark.parametrize("every_option", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(1, 8, 8), (129, 1024, 4112), (300, 272, 1008), (2000, 528, 20016), (128, 4160, 256)])
def test_kernel(size, dtype, every_option):
    check(size, dtype, every_option, "triton")


@pytest.mark.skipif(not hopper_pipeline.INTERPRETED, reason="runs in Triton's interpreter")
def test_groups_that_are_kept(monkeypatch):
    """By the kernel's own code: two row tiles of which one is not full, and a last column tile of one group."""
    kernel = OnTheHost(monkeypatch)
    monkeypatch.setattr(linear_exp_hopper, "_add_below_largest", linear_exp_hopper._add_below_largest.fn)
    monkeypatch.setattr(linear_lse, "hopper_exponentials_kernel", kernel)
    monkeypatch.setattr(linear_lse, "AVAILABLE", True)

    def tiles(hidden, weight, epilogue, out):
        arguments = {"hidden": hidden, "weight": weight, "out": out, "tokens": 200, "vocab_size": 300}
        arguments |= {"hidden_size": 8, "bias": None, "transform": epilogue.transform.for_kernel}
        return linear_exp_hopper.Tiles(2, 3, 4, arguments | {"BLOCK_N": 128, "BLOCK_V": 128})

    monkeypatch.setattr(linear_lse, "pipeline_tiles", tiles)
    check((200, 8, 300), torch.bfloat16, False, "triton")


def test_sums_of_tiles():
    """More tiles than are read at once; tiles whose logits are all -inf."""
    if tl is None:
        pytest.skip("needs triton")
    z = 30 * torch.randn(1100, 4, 11, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    z[700:, :, 3] = float("-inf")
    tops = z.amax(1).clamp(min=-3.0e38)
    partial, lse = torch.stack([tops, (z - tops[:, None]).exp().sum(1)]), torch.empty(11, device=DEVICE)
    linear_lse.merge_sums({"lse": lse}, partial, 4400)
    torch.testing.assert_close(lse, z.flatten(0, 1).logsumexp(0))


def check_rows(rows, columns, every_option, backend):
    """In several parts, of which some have only logits of -inf; rows of a wider matrix; one of -inf, two with inf."""
    g = torch.Generator(DEVICE).manual_seed(0)
    projected = 30 * torch.randn(rows, columns + 7, device=DEVICE, generator=g)[:, :columns]
    projected[1:2], projected[2:3, 3], projected[3:4, -1] = float("-inf"), float("inf"), float("inf")
    epilogue, wide = Epilogue(), Epilogue()
    if every_option:
        bias = torch.randn(columns, device=DEVICE, generator=g)
        bias[columns // 4 : columns * 3 // 4] = float("-inf")
        transform = LogitTransform(torch.linspace(0.5, 2.0, rows, device=DEVICE), 1.2)
        epilogue, wide = Epilogue(transform, bias), Epilogue(transform, bias.double())
    lse = torch.full((rows + 4,), float("nan"), device=DEVICE)
    row_log_sum_exps_into(lse[1:-3], projected, epilogue, backend=backend)
    torch.testing.assert_close(lse[1:-3].double(), wide(projected.double()).logsumexp(1), rtol=1e-6, atol=3e-6)
    assert lse.isnan().sum() == 4


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("every_option", [False, True])
def test_rows_that_exist(every_option, backend, monkeypatch):
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(linear_lse, "_COLUMNS", 32)
    check_rows(5, 150, every_option, backend)


@pytest.mark.parametrize("where", ["_descriptor", "hopper_exponentials_kernel"])
def test_a_kernel_that_cannot_be_compiled(monkeypatch, where):
    """It is not asked for again; the first call warns and names the reason."""
    pytest.importorskip("triton", reason="triton is not installed")

    hidden, weight = (torch.randn(n, 16, device="meta", dtype=torch.bfloat16) for n in (5, 40))
    call = torch.empty(5, device="meta"), hidden, weight, torch.empty(5, 40, device="meta")
    broken = Failing(AttributeError("Gluon has no such layout"), compiles=False)
    on_hopper(monkeypatch, broken)
    if where == "_descriptor":
        monkeypatch.setattr(hopper_pipeline, "_descriptor", lambda matrix, columns: broken.launch())
    with pytest.warns(RuntimeWarning, match=r"slower Triton kernel.*AttributeError: Gluon has no such layout") as seen:
        assert [log_sum_exps_into(*call, backend="triton") for _ in range(2)] == [None, None]
    assert len([w for w in seen if "slower Triton kernel" in str(w.message)]) == 1


@pytest.mark.parametrize("hard", [0.0, 0.3])
def test_losses_without_a_label_take_them(hard, monkeypatch):
    """The teacher always; the student, unless its log-probabilities are asked for."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(two_models, "_DEVICES_OF_LSE", (DEVICE,))
    monkeypatch.setattr(linear_lse, "ROWS", 32)  # of which 20 tokens are more than half
    taken = []

    def counted(lse, hidden, *given, **options):
        taken.append(hidden.shape[1])
        return log_sum_exps_into(lse, hidden, *given, backend="torch")

    g = torch.Generator().manual_seed(0)
    hidden, weight, theirs, head = (
        torch.randn(*shape, generator=g).half().to(DEVICE).requires_grad_(i < 2)
        for i, shape in enumerate([(20, 16), (72, 16), (20, 24), (72, 24)])
    )
    labels = torch.arange(20, device=DEVICE)
    loss = DistillationLoss(Divergence.forward_kl(), hard, 0.7, backend="triton")
    results = []
    for function in (lambda *given, **options: None, counted):
        monkeypatch.setattr(two_models, "log_sum_exps_into", function)
        value, _ = loss(weight, hidden, labels, Teacher(theirs, head))
        results.append((value, *torch.autograd.grad(value, (hidden, weight))))
    assert taken
    assert set(taken) == ({24} if hard else {16, 24})
    torch.testing.assert_close(*results, rtol=2e-3, atol=1e-4)
