"""Exponentials kept instead of logits, against float64 and beside the core."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from liger_losses import EngineOptions, Head, LogitTransform, linear_logps, linear_statistics, linear_token_loss
from liger_losses.chunked.accelerators import exponentials
from liger_losses.chunked.core import stream
from tests.kernels.cases import DEVICE
from tests.losses import CE
from tests.reference import double, problem, relative_error
from tests.seam import leave_out_zero_rows

pytestmark = pytest.mark.usefixtures("small_tiles", "default_gpu")
pytest.importorskip("triton")


def plans(call):
    """The names of the plans of a call, and its result."""
    names, plan = [], stream.plan

    def recorded(*arguments):
        names.append(plan(*arguments).name)
        return plan(*arguments)

    with mock.patch.object(stream, "plan", recorded):
        result = call()
    return names, result


def inputs(n=40, hidden_size=24, vocab=90, masked=0.2, unlikely=True, dtype=torch.bfloat16):
    hidden, weight, labels, bias = problem(n, hidden_size, vocab, dtype=dtype, masked=masked)
    if unlikely:  # labels of probability 1e-30 and below: exp(z - z_label) would be larger than fp32 can hold
        with torch.no_grad():
            hidden[3:7] *= 40
            labels[3:7] = (hidden[3:7].float() @ weight.float().t()).argmin(-1)
    return hidden, weight, labels, bias


TRANSFORMS = [
    LogitTransform(),
    LogitTransform(0.7, 1.3, 8.0),
    LogitTransform(torch.linspace(0.5, 2.0, 40).to(DEVICE), 0.8),
]


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=["plain", "soft-cap", "temperatures"])
@pytest.mark.parametrize("way", ["kept", "one pass"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients(way, transform, compact, with_bias):
    hidden, weight, labels, bias = inputs()
    bias = torch.linspace(-1, 1, 90).bfloat16().requires_grad_() if with_bias else None
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    g = torch.linspace(-1, 1, 80).view(2, 40).cos()
    head, options = Head(weight, bias, transform=transform), EngineOptions(compact=compact, backend="triton")

    def call():
        if way == "kept":
            s = linear_statistics(hidden, head, labels, ("logp", "lse"), metrics=("entropy",), options=options)
            return (s.logp * g[0] + s.lse * g[1]).sum(), s
        return linear_token_loss(
            hidden,
            head,
            labels,
            lambda s, y, a, b: s.logp * a + s.lse * b,
            token_inputs={"a": g[0], "b": g[1]},
            statistics=("logp", "lse"),
            options=options,
        )

    names, (loss, found) = plans(call)
    assert names == ["exponentials"]
    ours = torch.autograd.grad(loss, leaves)
    wide = double(*leaves)
    logits = (wide[0] @ wide[1].t() + (wide[2] if with_bias else 0.0)) * transform.logit_scale
    logits = logits if transform.softcap is None else transform.softcap * (logits / transform.softcap).tanh()
    logits = logits / transform.column(logits)
    lse, active = logits.logsumexp(-1), labels >= 0
    logp = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0] - lse
    total = torch.where(active, logp * g[0] + lse * g[1], 0.0).sum()
    torch.testing.assert_close(loss.double(), total, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found.logp.double(), torch.where(active, logp, 0.0), rtol=1e-4, atol=1e-4)
    for a, b in zip(ours, torch.autograd.grad(total, wide), strict=True):
        assert relative_error(a, b) < 8e-3


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_of_a_block_that_is_kept_are_moved_in_its_memory(backend, monkeypatch):
    """Some at a time, where few tokens have a gradient."""
    monkeypatch.setattr(stream, "MOVED_BYTES", 2000)
    hidden, weight, labels, _ = inputs(masked=0.0, unlikely=False)
    upstream, found = torch.linspace(-1, 1, 40) * (torch.arange(40) % 3 > 0), []
    for leaving_out in (leave_out_zero_rows, nullcontext):
        with leaving_out():
            logps = linear_logps(hidden, weight, labels, backend=backend)
            found.append(torch.autograd.grad(logps, (hidden, weight), upstream))
    for ours, whole in zip(*found, strict=True):
        # Products of other rows round other sums to bf16.
        torch.testing.assert_close(ours, whole, rtol=2e-2, atol=1e-2 * float(whole.abs().max()))


def test_many_blocks_are_as_exact_as_one():
    """What labels add, most of the weight's gradient, is rounded once for all blocks."""
    hidden, weight, labels, _ = inputs(320, 16, 600, masked=0.0, unlikely=False)
    labels = labels % 20  # of few rows of the weight
    errors, wide = [], double(hidden, weight)
    exact = torch.autograd.grad(-(wide[0] @ wide[1].t()).log_softmax(-1).gather(1, labels[:, None]).sum(), wide[1])[0]
    for chunk in (320, 10):
        loss = CE(reduction="sum", chunk_size=chunk, backend="triton")
        names, value = plans(lambda loss=loss: loss(weight, hidden, labels))
        assert {*names} == {"exponentials"}
        errors.append(relative_error(torch.autograd.grad(value, weight)[0], exact))
    assert errors[1] < 1.5 * errors[0], errors


def test_a_block_without_a_derivative_moves_no_label_terms():
    hidden, weight, labels, _ = inputs(8, 16, 60, masked=0.0, unlikely=False)
    k = torch.tensor([0.0] * 4 + [1.0] * 4).to(DEVICE)

    def loss(s, y, k):
        return k * s.logp if k.any() else k * 1.0

    options = EngineOptions(chunk_size=4, backend="triton")
    names, (found, _) = plans(
        lambda: linear_token_loss(hidden, weight, labels, loss, token_inputs={"k": k}, options=options)
    )
    assert names == ["exponentials"]
    wide = double(hidden, weight)
    exact = (wide[0] @ wide[1].t()).log_softmax(-1).gather(1, labels[:, None])[4:].sum()
    for ours, theirs in zip(
        torch.autograd.grad(found, (hidden, weight)), torch.autograd.grad(exact, wide), strict=True
    ):
        assert relative_error(ours, theirs) < 8e-3


def test_only_a_small_workspace_leaves_a_call_to_the_core():
    """And no other error."""
    hidden, weight, labels, _ = inputs()
    loss = CE(backend="triton", workspace=999)
    with pytest.raises(ValueError, match="workspace=999 bytes is too small"):
        loss(weight, hidden, labels)
    with (
        mock.patch.object(exponentials, "by_blocks", side_effect=ValueError("another")),
        pytest.raises(ValueError, match="another"),
    ):
        CE(backend="triton", workspace=10**6)(weight, hidden, labels)


@pytest.mark.parametrize(
    "call", [lambda h, w, y: linear_logps(h, w, y, backend="triton"), lambda h, w, y: CE(backend="triton")(w, h, y)]
)
def test_a_second_backward_computes_them_again(call):
    hidden, weight, labels, _ = inputs()
    names, found = plans(lambda: call(hidden, weight, labels).sum())
    assert names == ["exponentials"]
    first, second = [torch.autograd.grad(found, (hidden, weight), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
