"""Tokens whose upstream gradients are zero take no part in the gradient products, and all others do."""

import pytest
import torch

from liger_losses import EngineOptions, Head, LogitTransform, linear_logps
from liger_losses.chunked.engine import accumulation, blocks, stream
from liger_losses.chunked.engine.operators import separable_loss
from liger_losses.chunked.engine.query import Query
from tests.kernels.cases import DEVICE, triton_or_skip
from tests.losses import GRPO
from tests.reference import problem

N, H, V = 37, 16, 53


@pytest.fixture(autouse=True)
def counts(monkeypatch):
    """Calls of any size are looked at; how many tokens each of them has multiplied."""
    found, few = [], stream._few

    def counted(counts):
        index = few(counts)
        found.append(None if index is None else len(index))
        return index

    monkeypatch.setattr(stream, "MIN_FLOPS", {"cpu": 0.0, "cuda": 0.0})
    monkeypatch.setattr(blocks, "MOVED_BYTES", 2**10)  # a few rows at a time
    monkeypatch.setattr(stream, "_few", counted)
    return found


@pytest.fixture
def multiplied(monkeypatch):
    """How many rows each product has that is added to a gradient."""
    found, matmul_into = [], accumulation.matmul_into
    spy = lambda out, a, b, **more: found.append(len(b)) or matmul_into(out, a, b, **more)  # noqa: E731
    monkeypatch.setattr(accumulation, "matmul_into", spy)
    return found


def upstream_of(names, share, labels, dtype):
    """Random numbers for a share of the tokens, the first and the last among them, and 0 for the others."""
    g = torch.Generator().manual_seed(7)
    counted = torch.rand(labels.shape, generator=g) < share
    if share:
        counted[..., 0] = counted[..., -1] = True
    return {name: torch.randn(labels.shape, generator=g, dtype=torch.float64).to(dtype) * counted for name in names}, (
        counted & (labels != -100)
    )


#: Options of GRPO losses, which tokens have an advantage or a weight, and whether the others are left out.
POLICIES = {
    "dapo": ({}, {}, True),
    "sapo": ({"loss_type": "sapo"}, {}, True),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, {}, True),
    "importance, masked": ({"loss_type": "dppo_tv"}, {}, True),
    "no advantage at all": ({}, {"advantages": torch.zeros(5)}, True),
    "by token": ({}, {"advantages": torch.tensor([[0.0, 1.0] * 4] * 5)}, True),
    "rejected by the sampler": (
        {},
        {"advantages": torch.ones(5), "vllm_is_ratio": torch.tensor([1.0, 0, 0, 2, 0])},
        True,
    ),
    "entropy quantile": ({"top_entropy_quantile": 0.3}, {}, True),
    "sequences": ({"importance_sampling_level": "sequence"}, {}, True),
    "beta": ({"beta": 0.1}, {"ref_per_token_logps": torch.full((5, 8), -4.0)}, False),
    "entropy bonus": ({"entropy_coef": 0.1}, {}, False),
    "penalty": ({"log_ratio_penalty": 0.1}, {}, False),
}


@pytest.mark.parametrize("name", POLICIES)
def test_policy_losses(name, multiplied, monkeypatch):
    options, given, left_out = POLICIES[name]
    hidden, weight, labels, _ = problem(5 * 8, H, V, dtype=torch.float64, shape=(5, 8))
    mask, g = labels != -100, torch.Generator().manual_seed(2)
    given = {"advantages": torch.tensor([0.0, 1.0, 0.0, -2.0, 0.0]), **given}
    given["old_per_token_logps"] = -4 + 0.5 * torch.randn(5, 8, generator=g)
    found = []
    for least in ({"cpu": 0.0}, {}):
        monkeypatch.setattr(stream, "MIN_FLOPS", least)
        multiplied.clear()
        loss, metrics = GRPO(**{"beta": 0.0, **options})(hidden, weight, labels.clamp(min=0), mask, **given)
        found.append([loss, *metrics, *torch.autograd.grad(loss, [hidden, weight]), sum(multiplied)])
    torch.testing.assert_close(found[0][:-1], found[1][:-1], rtol=1e-6, atol=1e-9)
    assert (found[0][-1] < found[1][-1]) is left_out


@pytest.mark.parametrize(
    ("exponentials", "share"), [*((False, share) for share in (0.0, 0.1, 0.3, 0.6, 1.0)), (True, 0.1), (True, 1.0)]
)
def test_separable_losses_that_know_which_tokens_count(share, exponentials, counts, multiplied):
    """In even blocks, and twice."""
    if exponentials:
        triton_or_skip()
    device, dtype = (DEVICE, torch.bfloat16) if exponentials else ("cpu", torch.float64)
    hidden, weight, labels, _ = problem(N, H, V, dtype=dtype)
    hidden, weight = (tensor.detach().to(device).requires_grad_() for tensor in (hidden, weight))
    upstream, counted = upstream_of(("g",), share, labels, torch.float32)
    inputs = {name: value.to(device) for name, value in (*upstream.items(), ("c", torch.linspace(0.5, 2.0, N)))}
    backend = "triton" if exponentials else "torch"
    options = EngineOptions(chunk_size=8, backend=backend, strategy="one_pass", accum_dtype=torch.float32)
    head = Head(weight, transform=LogitTransform(torch.linspace(0.5, 2.0, N, device=device)))

    def found(which):
        multiplied.clear()
        query = Query(
            ("logp",), ("lse",), token_inputs=inputs, counts=which,
            token_loss=lambda s, labels, g, c: g * (c * s.logp).exp(),
        )  # fmt: skip
        loss, (statistics,) = separable_loss(hidden, head, labels.to(device), query, options)
        rows = sum(multiplied)
        grads = [torch.autograd.grad(loss, [hidden, weight], retain_graph=True) for _ in range(2)]
        assert torch.equal(grads[0][0], grads[1][0])
        assert torch.equal(grads[0][1], grads[1][1])
        return (loss, statistics.logp, statistics.lse, *grads[0]), rows

    (expected, every), (ours, rows) = found(None), found(inputs["g"] != 0)
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if exponentials else {"rtol": 1e-9, "atol": 1e-12}
    for value, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(value, right, **tolerance)
    active, most = int(counted.sum()), int((labels != -100).sum())
    assert counts[0] == (None if active == most else active)
    # Of the product with the weight's rows, and of that with hidden states.
    assert every - rows == most - active


def test_backward_may_run_again(counts):
    hidden, weight, labels, _ = problem(N, H, V, dtype=torch.float64)
    logps = linear_logps(hidden, weight, labels)
    upstream, _ = upstream_of(("logp",), 0.5, labels, torch.float64)
    others = upstream["logp"].flip(0)
    first = torch.autograd.grad(logps, [hidden, weight], upstream["logp"], retain_graph=True)
    second = torch.autograd.grad(logps, [hidden, weight], others, retain_graph=True)
    again = torch.autograd.grad(logps, [hidden, weight], upstream["logp"])
    torch.testing.assert_close(first, again, rtol=1e-9, atol=1e-12)
    fresh = torch.autograd.grad(linear_logps(hidden, weight, labels), [hidden, weight], others)
    torch.testing.assert_close(second, fresh, rtol=1e-9, atol=1e-12)
    assert len(counts) == 4


@pytest.mark.parametrize(("zeros", "multiplied"), [(0, None), (3, None), (4, 196), (200, 0)])
def test_a_few_zeros_are_multiplied(zeros, multiplied, counts, monkeypatch):
    hidden, weight, labels, _ = problem(200, H, V, dtype=torch.float64, masked=0.0)
    upstream = torch.ones(200, dtype=torch.float64).index_fill(0, torch.arange(200)[:zeros], 0.0)
    found = torch.autograd.grad(linear_logps(hidden, weight, labels), [hidden, weight], upstream)
    assert counts == [multiplied]
    monkeypatch.setattr(stream, "MIN_FLOPS", {})
    expected = torch.autograd.grad(linear_logps(hidden, weight, labels), [hidden, weight], upstream)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
