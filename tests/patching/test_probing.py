"""What probing refuses: functions that draw random numbers, and calls of shapes that were not probed."""

import pytest
import torch

from liger_losses.patching import probing, rotations
from liger_losses.patching.probing import Mismatch


def test_a_function_that_draws_random_numbers_is_no_match():
    """Even where its result does not depend on them: the next number would be another one without it."""
    x = torch.ones(2, 3)
    probing.observe(torch.sin, [x])
    with pytest.raises(Mismatch, match="draws random numbers"):
        probing.observe(lambda x: x.sin() + 0 * torch.rand(()), [x])


@pytest.mark.parametrize(("batch", "of_angles", "probed"), [(2, 2, True), (2, 1, True), (1, 3, False), (2, 3, False)])
def test_rotations_of_shapes_that_the_function_would_broadcast(batch, of_angles, probed):
    q, k, cos = torch.ones(batch, 4, 5, 16), torch.ones(batch, 2, 5, 16), torch.ones(of_angles, 5, 16)
    assert rotations._was_probed(q, k, cos, cos, unsqueeze_dim=1) == probed
