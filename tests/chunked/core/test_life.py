"""What a call of the core keeps, how often the host waits, what it multiplies, and what it refuses."""

from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch

from liger_losses.chunked.core import (
    Dense,
    EngineOptions,
    Head,
    Quantized,
    Target,
    TokenLoss,
    WithAdapters,
    block,
    loss_sum,
    statistics,
    stream,
)
from liger_losses.chunked.core.quantizers import QuantizedWeight
from liger_losses.chunked.core.ranks import ALONE, Ranks
from liger_losses.chunked.core.statistics import Statistic, asked_for
from liger_losses.chunked.core.target import Counted
from liger_losses.kernels.divergence_forms import Divergence
from tests.kernels.cases import DEVICE
from tests.results.test_work import Work

N, H, V = 40, 16, 203


def head_of(weights, bias=None):
    return Head(None, bias, ranks=ALONE, weights=weights)


class Codes(QuantizedWeight):
    def __init__(self, codes):
        super().__init__(tuple(codes.shape), torch.float32, codes.device)
        self.codes = codes

    def rows(self, start, stop):
        return self.codes[start:stop] * 0.05


def inputs(dtype=torch.float32, tokens=N, seed=0, masked=0.2, vocab=V):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, H, generator=g, dtype=torch.double).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, H, generator=g, dtype=torch.double) / 2).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=g)
    labels[torch.rand(tokens, generator=g) < masked] = -100
    return hidden, weight, labels


LOSS = TokenLoss(lambda s: -s["logp"])


def teacher_of(labels):
    g = torch.Generator().manual_seed(9)
    return Target(head_of(Dense(torch.randn(V, 8, generator=g))), torch.randn(len(labels), 8, generator=g), labels)


def test_ranks_of_different_sizes_plan_alike():
    """Otherwise one would wait for numbers of a block that another does not have."""
    (hidden, _, labels), calls = inputs(), set()
    for rank, columns in enumerate(sizes := (9, 1, 193)):
        head = Head(torch.randn(columns, H), ranks=Ranks(rank=rank, sizes=sizes))
        target = Target(head, hidden, labels, counted=Counted.of_all(N))
        calls.add(
            stream.signature(target, target.leaves(), asked_for(["logp"]), EngineOptions(), gradients_in_backward=True)
        )
    assert len(calls) == 1


# --- Work -------------------------------------------------------------------------------------------------------------


class Dequantized(Codes):
    """Codes that count their rows which are dequantized, and the most of them at a time."""

    total = most = 0

    def rows(self, start, stop):
        rows = super().rows(start, stop)
        self.total, self.most = self.total + len(rows), max(self.most, len(rows))
        return rows


@pytest.mark.parametrize(
    ("passes", "workspace", "trained"), [(3 + 4, 150_000, True), (1 + 1, 600_000, True), (3, 150_000, False)]
)
def test_each_row_is_dequantized_once_a_pass(passes, workspace, trained):
    """For all tokens, or for a third of them, and a fourth where gradients take memory too; never all at once."""
    hidden, weight, labels = inputs(tokens=600)
    codes = Dequantized((weight.detach() * 20).round().to(torch.int8))
    target = Target(head_of(Quantized.of(codes)), hidden, labels)
    with torch.set_grad_enabled(trained):
        found = statistics([target], ["logp"], EngineOptions(workspace=workspace, keep=0))[0]
    if trained:
        torch.autograd.grad(found["logp"].sum(), hidden)
    assert codes.total == passes * V
    assert codes.most < V / 2


def test_codes_that_are_made_in_fp16_need_no_scale_of_the_loss():
    hidden, weight, labels = inputs(torch.bfloat16, tokens=400)
    codes = Codes((weight.detach() * 20).round().to(torch.int8))
    codes.dtype = torch.float16
    with Work() as work:
        loss = loss_sum(
            [Target(head_of(Quantized.of(codes)), hidden, labels)], ["logp"], [LOSS], EngineOptions(keep=0)
        )[0]
        torch.autograd.grad(loss, hidden)
    assert work.flops == pytest.approx(4 * int((labels >= 0).sum()) * H * V, rel=0.01)


@pytest.mark.parametrize("biased", [False, True])
def test_a_block_takes_few_launches_whatever_adds_to_a_gradient(biased):
    hidden, weight, labels = [t.to(DEVICE) for t in inputs(torch.bfloat16, tokens=80)]
    weight, bias = weight.detach().requires_grad_(), torch.zeros(V, device=DEVICE, requires_grad=True)
    ids = torch.arange(80, device=DEVICE)[:, None] + torch.arange(3, device=DEVICE)
    target = Target(head_of(Dense(weight), bias if biased else None), hidden, labels, selected=ids)
    launched, launch = [], block.softmax_gradient_into
    with mock.patch.object(
        block, "softmax_gradient_into", lambda *a, **k: launched.append(k["backend"]) or launch(*a, **k)
    ):
        found = statistics([target], ["selected_logps", "mean_logit"], EngineOptions(backend="triton"))[0]
        sum(value.sum() for value in found.values()).backward()
    assert launched.count("triton") == 1


@pytest.mark.parametrize(("temperature", "passes"), [(1.0, 2), (2.0, 3)])
def test_rows_of_both_models_are_read_once_for_statistics_at_one_temperature(temperature, passes):
    hidden, weight, labels = inputs()
    names = ["logp", Statistic("divergence", divergence=Divergence.forward_kl())]
    read, run = [], block.softmax_statistics
    with mock.patch.object(block, "softmax_statistics", lambda *a, **k: read.append(1) or run(*a, **k)):
        teacher = replace(teacher_of(labels), temperature=temperature)
        statistics([Target(head_of(Dense(weight)), hidden, labels, teacher=teacher)], names)
    assert len(read) == passes


# --- Precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [("logp", "entropy", "lse"), (Statistic("divergence", divergence=Divergence.mixture(0.3, 0.3, 0.7)), "logp")],
)
def test_long_rows_in_half_precision(names):
    """Of several blocks of a kernel, whose half-precision gradient may take the memory of projections."""
    g = torch.Generator().manual_seed(4)
    (h, w), (t, v) = ((torch.randn(n, k, generator=g).double() for n in (6, 9001)) for k in (8, 4))
    labels = torch.arange(6, device=DEVICE) * 1500

    def gradients(dtype, backend):
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in (h, w)]
        teacher = Target(head_of(Dense(v.to(DEVICE, dtype))), t.to(DEVICE, dtype), labels)
        target = Target(head_of(Dense(leaves[1])), leaves[0], labels, teacher=teacher if names[0] != "logp" else None)
        (found,) = statistics([target], names, EngineOptions(backend=backend))
        return torch.autograd.grad(sum(value.sum() for value in found.values()), leaves)

    for ours, exact in zip(gradients(torch.bfloat16, "triton"), gradients(torch.double, "torch"), strict=True):
        assert (ours - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 20])
def test_rows_that_many_tokens_keep_are_rounded_few_times(sparse, chunk_size):
    hidden, weight, _ = inputs(torch.bfloat16, tokens=600, masked=0.0)
    labels = torch.randint(3, (600,))
    kept = torch.arange(5).expand(600, 5)
    grads = []
    for dtype, options in ((torch.bfloat16, EngineOptions(chunk_size=chunk_size)), (torch.double, EngineOptions())):
        w = weight.detach().to(dtype).requires_grad_()
        target = Target(head_of(Dense(w)), hidden.detach().to(dtype), labels, kept=kept, sparse_grad=sparse)
        loss = loss_sum([target], ["logp"], [LOSS], options)[0]
        grads.append(torch.autograd.grad(loss, w)[0].to_dense())
    assert (grads[0] - grads[1]).norm() < 0.004 * grads[1].norm()


def test_adapters_beside_a_sparse_gradient_are_dense():
    g = torch.Generator().manual_seed(0)
    w, a, b = [torch.randn(size, generator=g).requires_grad_() for size in ((V, 8), (2, 8), (V, 2))]
    y = torch.arange(6)
    head = head_of(WithAdapters(Dense(w), a, b, 1.0))
    target = Target(head, torch.randn(6, 8, generator=g), y, kept=y[:, None] + torch.arange(3), sparse_grad=True)
    gradients = torch.autograd.grad(statistics([target], ["logp"])[0]["logp"].sum(), (w, a, b))
    assert [gradient.is_sparse for gradient in gradients] == [True, False, False]


def test_a_quantized_weight_may_be_a_dataclass():
    """It is made of its own tensors, and of nothing that stands for them."""

    @dataclass(eq=False)
    class OfFields(Codes):
        codes: torch.Tensor

        def __post_init__(self):
            super().__init__(self.codes[:])

    hidden, _, labels = inputs()
    weight = OfFields(torch.randint(-99, 99, (V, H), dtype=torch.int8))
    statistics([Target(head_of(Quantized.of(weight)), hidden, labels)], ["logp"])[0]["logp"].sum().backward()
    assert hidden.grad.abs().sum() > 0
