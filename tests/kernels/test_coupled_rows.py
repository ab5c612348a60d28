"""Losses of few tokens in one launch: the kernels compute what their references do, these what autograd does."""

import pytest
import torch

from liger_losses.functional import dpo_loss, grpo_loss
from liger_losses.kernels.coupled_rows import PairRows, PolicyRows
from liger_losses.kernels.masked_rows import RowStatistics
from tests.kernels.cases import DEVICE, triton_or_skip

BACKENDS = ["torch", "triton"]


def statistics(tokens, masked):
    g = torch.Generator().manual_seed(1)
    logp, logits, labels = -3 * torch.rand(tokens, generator=g), torch.randn(tokens, generator=g), torch.arange(tokens)
    labels[masked] = -100
    active = labels != -100
    values = [value.where(active, torch.zeros(())).to(DEVICE) for value in (logp, logits)]
    return RowStatistics(torch.zeros(tokens, device=DEVICE), values[0], None, values[1]), labels.to(DEVICE)


def close(found, expected):
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("lengths", "smoothing"), [((3, 3), 0.0), ((5, 2), 0.2), ((1100, 3), 0.0)])
@pytest.mark.parametrize("referenced", [True, False])
def test_pairs(lengths, smoothing, referenced, backend):
    triton_or_skip()
    pairs, sizes = 2, [2 * length for length in lengths]
    values, labels = statistics(sum(sizes), [1, sizes[0]])
    refs = [torch.tensor(ref, device=DEVICE) if referenced else None for ref in ([-4.0, -9.0], [-3.0, -2.5])]
    found = PairRows(pairs, lengths, -100, 0.3, smoothing, backend)(values, labels, *refs)
    leaf = values.logp.double().requires_grad_()
    sides = [part.view(pairs, -1) for part in leaf.split(sizes)]
    logps, given = [side.sum(-1) for side in sides], [torch.zeros(2, device=DEVICE) if r is None else r for r in refs]
    loss = dpo_loss(*logps, *given, beta=0.3, label_smoothing=smoothing).mean()
    (derivative,) = torch.autograd.grad(loss, leaf)
    active, logits = (labels != -100).split(sizes), values.mean_logit.double().split(sizes)
    means = [x.sum() / mask.sum() for x, mask in zip(logits, active, strict=True)]
    rewards = [0.3 * (own - ref) for own, ref in zip(logps, given, strict=True)]
    expected = (loss, *logps, *means, -logps[0].sum() / active[0].sum(), *rewards, derivative)
    for ours, theirs in zip((found.loss, *found.metrics, found.derivative), expected, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("completions", [3, 300])
@pytest.mark.parametrize(("old", "ref", "of_tokens"), [(True, True, False), (True, False, True), (False, True, False)])
def test_policy(old, ref, of_tokens, completions, backend):
    items = torch.tensor(17.0, device=DEVICE) if of_tokens else None
    triton_or_skip()
    length, g = 4, torch.Generator().manual_seed(2)
    tokens = completions * length
    values, labels = statistics(tokens, [0, 7])
    shape = (completions, length)
    active = (labels != -100).view(shape)
    noise = torch.randn(2, *shape, generator=g).to(DEVICE)
    given = [values.logp.view(shape) + part for part in noise]
    given[0][0, 1], given[1][0, 1] = -200.0, 200.0  # ratios beyond every exponent
    nan = [part.where(active, torch.tensor(float("nan"), device=DEVICE)) for part in given]
    old_logps, ref_logps = nan[0] if old else None, nan[1] if ref else None
    advantages = torch.randn(shape if of_tokens else shape[:1], generator=g).to(DEVICE)
    rows = PolicyRows(tokens, 1 if of_tokens else length, -100, (0.8, 1.3), 0.1, backend)
    found = rows(values, labels, advantages, old_logps, ref_logps, items)
    leaf = values.logp.double().view(shape).requires_grad_()
    options = {"beta": 0.1, "epsilon_low": 0.2, "epsilon_high": 0.3, "loss_type": "dapo"}
    given = {"old_logps": old_logps, "ref_logps": ref_logps, "num_items_in_batch": items}
    loss = grpo_loss(leaf, advantages, active, **given, **options)
    (derivative,) = torch.autograd.grad(loss, leaf)
    assert found.metrics[0] == 0 if not old else 0 < found.metrics[0] < 1
    assert (found.metrics[1] > 0) == ref
    close(found.loss, loss)
    close(found.derivative.view(shape), derivative)
    again = rows(values, labels, advantages, old_logps, ref_logps, items)
    assert torch.equal(found.derivative, again.derivative)
    assert not found.derivative[labels == -100].any()
