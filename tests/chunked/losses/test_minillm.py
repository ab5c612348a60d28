"""MiniLLM against its definition."""

import math

import torch
import torch.nn.functional as F

from liger_losses import Teacher
from liger_losses.chunked.losses.minillm import minillm_returns
from tests.chunked.losses.test_distillation import B, T, problem
from tests.losses import MiniLLM
from tests.reference import assert_close_gradients, kl


def test_minillm():
    hidden, weight, bias, labels, *teacher = problem()
    mask = labels != -100
    log_p, log_q = F.linear(hidden, weight, bias).log_softmax(-1), F.linear(*teacher).log_softmax(-1)
    at = labels.clamp(min=0)[..., None]
    logp, theirs = (t.gather(-1, at)[..., 0] * mask for t in (log_p, log_q))
    reward, returns = (theirs - logp).detach(), torch.zeros(B, T, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            later = [0.9 ** (u - t - 1) * reward[b, u] for u in range(t + 1, T)]
            count = int(mask[b, t + 1 :].sum())
            returns[b, t] = sum(later) / max(count, 1)
    torch.testing.assert_close(minillm_returns(reward, mask, 0.9), returns)
    old = logp.detach() + 0.1
    expected = (torch.where(mask, kl(log_p, log_q), 0.0) - math.exp(-0.1) * returns * logp).sum() / mask.sum()
    value, _ = MiniLLM(gamma=0.9)(weight, hidden, labels, Teacher(*teacher), bias, old_logps=old)
    torch.testing.assert_close(value, expected)
    inputs = (hidden, weight, bias)
    assert_close_gradients(value, expected, inputs, rtol=1e-8, atol=1e-10)
