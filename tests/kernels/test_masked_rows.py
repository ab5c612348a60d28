"""Rows of tokens without loss among others: the kernels compute what their reference does."""

import pytest
import torch

from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.masked_rows import Derivatives, MaskedRows
from tests.kernels.cases import DEVICE, asserts_or_skip, triton_or_skip

TOKENS, COLUMNS, HIDDEN = 3, 130, 9


def problem(wrong=False):
    g = torch.Generator().manual_seed(0)
    projected, hidden = (2 * torch.randn(TOKENS, n, generator=g) for n in (COLUMNS, HIDDEN))
    projected[1], hidden[1] = float("nan"), float("nan")
    labels = torch.tensor([5, -100, COLUMNS if wrong else 129])
    return [tensor.to(DEVICE) for tensor in (projected, labels, hidden)]


def rows(backend, right=None):
    triton_or_skip()
    right = torch.ones((), dtype=torch.bool, device=DEVICE) if right is None else right
    return MaskedRows(TOKENS, COLUMNS, -100, LogitTransform(0.7, 1.2, 5.0), right, backend)


def same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            assert not ours[1].any()


@pytest.mark.parametrize(("entropy", "mean_logit"), [(False, False), (False, True), (True, False), (True, True)])
def test_statistics_and_gradients(entropy, mean_logit):
    projected, labels, hidden = problem()
    g = torch.tensor([0.3, float("nan"), -2.0], device=DEVICE)
    found = []
    for backend in ("triton", "torch"):
        kernels, block = rows(backend), projected.clone()
        values = kernels.statistics(block, labels, entropy, mean_logit)
        upstream = Derivatives(-g, g, 2 * g if entropy else None)
        found.append((*values, *kernels.gradients(block, labels, hidden, values.lse, values.entropy, upstream)))
    same(*found)


@pytest.mark.parametrize(("scales", "mean"), [((-1.0, None), True), ((-0.8, -0.2), False)])
def test_losses_and_gradients(scales, mean):
    projected, labels, hidden = problem()
    found = [rows(b).loss(projected.clone(), labels, hidden, scales, mean) for b in ("triton", "torch")]
    same(*found)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("wrong", [False, True])
def test_labels_outside_of_the_vocabulary(wrong, backend):
    asserts_or_skip(wrong, backend)
    projected, labels, hidden = problem(wrong)
    for call in (
        lambda kernels: kernels.statistics(projected, labels),
        lambda kernels: kernels.loss(projected.clone(), labels, hidden, (-1.0, None), True),
    ):
        right = torch.ones((), dtype=torch.bool, device=DEVICE)
        call(rows(backend, right))
        assert right.item() != wrong
