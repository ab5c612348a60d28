"""How often calls dequantize, multiply, launch and round, and what a plan may depend on."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch

import liger_losses as ll
from liger_losses.chunked.core import block, stream
from liger_losses.chunked.core.ranks import Ranks
from liger_losses.chunked.core.statistics import asked_for
from liger_losses.chunked.core.target import Counted, Target
from tests.kernels.cases import DEVICE
from tests.reference import Int8Weight, problem, relative_error
from tests.results.test_work import Work
from tests.seam import LowRank

H, V = 16, 203


def test_ranks_of_different_sizes_plan_alike():
    """Otherwise one would wait for numbers of a block that another does not have."""
    (hidden, _, labels, _), calls = problem(40, H), set()
    for rank, columns in enumerate(sizes := (9, 1, 193)):
        head = ll.Head(torch.randn(columns, H), ranks=Ranks(rank=rank, sizes=sizes))
        target = Target(head, hidden, labels, counted=Counted.of_all(40))
        call = target, target.leaves(), asked_for(["logp"]), ll.EngineOptions()
        calls.add(stream.signature(*call, gradients_in_backward=True))
    assert len(calls) == 1


# --- Work -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passes", "workspace", "trained"), [(3 + 4, 150_000, True), (1 + 1, 600_000, True), (3, 150_000, False)]
)
def test_each_row_is_dequantized_once_a_pass(passes, workspace, trained):
    """For all tokens, or for a third of them, and a fourth where gradients take memory too; never all at once."""
    hidden, weight, labels, _ = problem(600, H, V, masked=0.2)
    quantized = Int8Weight(weight)
    with torch.set_grad_enabled(trained):
        options = ll.EngineOptions(workspace=workspace, keep=0)
        logps = ll.linear_statistics(hidden, ll.Head(quantized), labels, options=options).logp
    if trained:
        torch.autograd.grad(logps.sum(), hidden)
    assert quantized.total == passes * V
    assert quantized.most < V / 2


def test_codes_that_are_made_in_fp16_need_no_scale_of_the_loss():
    hidden, weight, labels, _ = problem(400, H, V, dtype=torch.bfloat16)
    quantized = Int8Weight(weight)
    quantized.dtype = torch.float16
    with Work() as work:
        given, options = (hidden, ll.Head(quantized), labels), ll.EngineOptions(keep=0)
        loss, _ = ll.linear_token_loss(*given, lambda s, y: -s.logp, options=options)
        torch.autograd.grad(loss, hidden)
    assert work.flops == pytest.approx(4 * int((labels >= 0).sum()) * H * V, rel=0.01)


@pytest.mark.parametrize("biased", [False, True])
def test_a_block_takes_few_launches_whatever_adds_to_a_gradient(biased, default_gpu):
    hidden, weight, labels, bias = problem(80, H, V, dtype=torch.bfloat16, bias=biased)
    ids, launched, launch = torch.arange(80)[:, None] + torch.arange(3), [], block.softmax_gradient_into
    options = {"selected": ids, "bias": bias, "options": ll.EngineOptions(backend="triton")}
    with mock.patch.object(
        block, "softmax_gradient_into", lambda *a, **k: launched.append(k["backend"]) or launch(*a, **k)
    ):
        found = ll.linear_statistics(hidden, weight, labels, ("selected_logps", "mean_logit"), **options)
        (found.selected_logps.sum() + found.mean_logit.sum()).backward()
    assert launched.count("triton") == 1


@pytest.mark.parametrize(("temperature", "passes"), [(1.0, 2), (2.0, 3)])
def test_rows_of_both_models_are_read_once_for_statistics_at_one_temperature(temperature, passes):
    hidden, weight, labels, _ = problem(40, H, V)
    read, run, teacher = [], block.softmax_statistics, ll.Teacher(hidden.detach().flip(0), weight.detach())
    with mock.patch.object(block, "softmax_statistics", lambda *a, **k: read.append(1) or run(*a, **k)):
        given = hidden, weight, labels, teacher, ll.Divergence.forward_kl()
        ll.linear_divergence(*given, logp=True, temperature=temperature)
    assert len(read) == passes


# --- Precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compares", [False, True])
def test_long_rows_in_half_precision(compares):
    """Of several blocks of a kernel, whose half-precision gradient may take the memory of projections."""
    tensors = [t for n, k in ((6, 8), (9001, 8), (6, 4), (9001, 4)) for t in (torch.randn(n, k).double(),)]
    labels = torch.arange(6, device=DEVICE) * 1500

    def gradients(dtype, backend):
        hidden, weight, *teacher = (x.to(DEVICE, dtype).requires_grad_() for x in tensors)
        options = ll.EngineOptions(backend=backend)
        if compares:
            teacher = ll.Teacher(*(t.detach() for t in teacher))
            form = ll.Divergence.mixture(0.3, 0.3, 0.7)
            found = ll.linear_divergence(hidden, weight, labels, teacher, form, logp=True, options=options)
        else:
            found = ll.linear_statistics(hidden, weight, labels, ("logp", "entropy", "lse"), options=options)
        return torch.autograd.grad(sum(value.sum() for value in found if value is not None), (hidden, weight))

    for ours, exact in zip(gradients(torch.bfloat16, "triton"), gradients(torch.double, "torch"), strict=True):
        assert relative_error(ours, exact) < 0.03


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 20])
def test_rows_that_many_tokens_keep_are_rounded_few_times(sparse, chunk_size):
    hidden, weight, _, _ = problem(600, H, V, dtype=torch.bfloat16)
    labels, kept, grads = torch.randint(3, (600,)), torch.arange(5).expand(600, 5), []
    for dtype, chunks in ((torch.bfloat16, chunk_size), (torch.double, None)):
        w = weight.detach().to(dtype).requires_grad_()
        support = ll.TokenSupport(kept, sparse_grad=sparse)
        logps = ll.linear_logps(hidden.detach().to(dtype), w, labels, support=support, chunk_size=chunks)
        grads.append(torch.autograd.grad(logps.sum(), w)[0].to_dense())
    assert relative_error(*grads) < 0.004


def test_adapters_beside_a_sparse_gradient_are_dense():
    w, a, b = (torch.randn(size, requires_grad=True) for size in ((V, 8), (2, 8), (V, 2)))
    labels, head = torch.arange(6), ll.Head(w, adapters=(LowRank(a, b),))
    support = ll.TokenSupport(labels[:, None] + torch.arange(3), sparse_grad=True)
    logps = ll.linear_logps(torch.randn(6, 8), head, labels, support=support)
    assert [g.is_sparse for g in torch.autograd.grad(logps.sum(), (w, a, b))] == [True, False, False]


def test_a_quantized_weight_may_be_a_dataclass():
    """It is made of its own tensors, and of nothing that stands for them."""

    @dataclass(eq=False)
    class OfFields(ll.QuantizedWeight):
        codes: torch.Tensor

        def __post_init__(self):
            super().__init__((V, H), torch.float32, "cpu")

        def rows(self, start, stop):
            return self.codes[start:stop] * 0.05

    hidden, _, labels, _ = problem(40, H, V)
    weight = OfFields(torch.randint(-99, 99, (V, H), dtype=torch.int8))
    ll.linear_logps(hidden, ll.Head(weight), labels).sum().backward()
    assert hidden.grad.abs().sum() > 0
