"""TRL's trainers, plain and enabled: the same losses, gradients and metrics, and no logits in training."""

import pytest

from tests.trl.trainers import CASES, check_training

#: ``make test`` leaves out those that take long.
_SLOW = ("DPO, compiled", "GRPO, compiled")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in CASES])
def test_training_is_the_same_and_makes_no_logits(name, tmp_path):
    build, options = CASES[name]
    check_training(build, tmp_path, **options)
