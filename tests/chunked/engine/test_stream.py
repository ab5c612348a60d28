"""Losses over many blocks: exact by every strategy, and safe to use anywhere autograd goes."""

import gc
import weakref

import pytest
import torch

from liger_losses import EngineOptions, linear_logps, linear_statistics, linear_token_loss
from tests.losses import CE
from tests.reference import assert_as_exact_as_plain, double, gradients, plain_statistics, problem

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


def test_accum_dtype_adds_up_in_fp32():
    hidden, weight, labels, _ = problem(256, 32, 97, dtype=torch.bfloat16, masked=0.0)
    options = EngineOptions(chunk_size=4, accum_dtype=torch.float32, strategy="one_pass")
    loss, _ = linear_token_loss(hidden, weight, labels, lambda s, y: s.logp, options=options)
    (grad,) = gradients(loss, (weight,))
    exact_in = double(hidden, weight)
    (exact,) = gradients(plain_statistics(*exact_in, labels)["logp"].sum(), exact_in[1:])
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.double(), exact, rtol=2**-8, atol=2**-8 * float(exact.abs().max()))


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


def test_outputs_may_be_changed_in_place():
    hidden, weight, labels, _ = problem(masked=0.0)
    expected = gradients(2 * linear_logps(hidden, weight, labels).sum(), (hidden, weight))
    logps = linear_logps(hidden, weight, labels)
    logps.mul_(2)
    torch.testing.assert_close(gradients(logps.sum(), (hidden, weight)), expected)


def test_no_gradient_where_no_loss_depends():
    hidden, weight, labels, _ = problem()
    loss, found = linear_token_loss(hidden, weight, labels, lambda s, y: torch.zeros_like(s.logp), metrics=("entropy",))
    assert not found.entropy.requires_grad
    assert all((g == 0).all() for g in gradients(loss, (hidden, weight)))


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


def test_labels_that_change_before_backward():
    """Gradients that were computed in forward are those of the loss; others raise as in torch."""
    hidden, weight, labels, _ = problem(50, 24, 61, masked=0.0)
    logps, loss = linear_logps(hidden, weight, labels), CE()(weight, hidden, labels)
    (expected,) = torch.autograd.grad(CE()(weight, hidden, labels), weight)
    labels.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logps.sum().backward()
    assert torch.equal(torch.autograd.grad(loss, weight, retain_graph=True)[0], expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("masked", [0.0, 0.3])
@pytest.mark.parametrize("compact", [True, False])
def test_labels_of_inference_mode(compact, masked):
    hidden, weight, labels, _ = problem(50, 24, 61, masked=masked)
    with torch.inference_mode():
        labels = labels.clone()
    for value in (CE(compact=compact)(weight, hidden, labels), linear_logps(hidden, weight, labels, compact=compact)):
        value.sum().backward()
    assert weight.grad.any()
