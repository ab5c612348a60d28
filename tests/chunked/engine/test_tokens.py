"""Which tokens a call computes: masks, shifts, several tensors, any strides, none at all."""

import pytest
import torch

from liger_losses import EngineOptions, linear_logps, linear_statistics, linear_token_loss
from tests.chunked.engine.test_stream import MiB, gradients, weighted
from tests.reference import peak_bytes, plain_statistics, problem


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
