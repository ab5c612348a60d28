"""The divergences that replace TRL's, of tokens of completions alone."""

import pytest
import torch

from liger_losses.trl.divergences import chunked_divergence_loss


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_tokens_outside_of_the_completion_have_no_part(beta):
    g = torch.Generator().manual_seed(0)
    states, teacher = (torch.randn(2, 7, size, generator=g) for size in (6, 5))
    weights = torch.randn(19, 6, generator=g), torch.randn(19, 5, generator=g)
    mask = torch.tensor([[0, 1, 1, 1, 0, 0, 0]] * 2)
    found = chunked_divergence_loss(states, teacher, *weights, mask, beta)
    alone = chunked_divergence_loss(states[:, 1:4], teacher[:, 1:4], *weights, mask[:, 1:4], beta)
    torch.testing.assert_close(found, alone)
    assert found[2] == 6
