"""verl's heads, without verl; real.py has them in verl itself."""

import pytest
import torch

from liger_losses.integrations import verl
from tests.reference import double, plain_statistics, problem, relative_error


def test_both_heads_give_log_probabilities_and_entropies():
    hidden, weight, labels, _ = problem(shape=(2, 7), masked=0.0)
    logps, entropy = verl.fused_linear_for_ppo(None, hidden, weight, labels, 0.7)
    assert logps.shape == entropy.shape == labels.shape
    flat = verl.linear_cross_entropy(hidden, weight, labels.int(), torch.tensor(0.7), "none")
    torch.testing.assert_close(flat, (logps.flatten(), entropy.flatten()))
    assert verl.linear_cross_entropy(hidden, weight, labels, 0.7, "sum")[0] == logps.flatten().sum()
    grads = torch.autograd.grad(logps.sum() - 0.1 * entropy.sum(), (hidden, weight))
    exact = double(hidden, weight)
    statistics = plain_statistics(*exact, labels, temperature=0.7)
    expected = torch.autograd.grad(statistics["logp"].sum() - 0.1 * statistics["entropy"].sum(), exact)
    values = (statistics["logp"], statistics["entropy"], *expected)
    for found, value in zip((logps, entropy, *grads), values, strict=True):
        assert relative_error(found, value) < 1e-5
    with pytest.raises(ValueError, match="reduction must be none, sum or mean"):
        verl.linear_cross_entropy(hidden, weight, labels, 0.7, "median")
