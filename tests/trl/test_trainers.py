"""TRL's trainers, plain and enabled: the same losses, gradients and metrics, and no logits in training."""

import pytest

from liger_losses.places import Missing
from liger_losses.trl import enabled
from liger_losses.trl.features import FEATURES, find
from tests.trl.trainers import CASES, check_training, train

FOUND = find(FEATURES)
#: The features of cases that are named after something else.
_FEATURES = {"GMPO": "GRPO"}
#: ``make test`` leaves out those that take long, or whose option another trainer has.
_SLOW = {
    *("SFT, compiled", "DPO, compiled", "CPO, compiled", "GRPO, compiled", "CPO, bf16", "DPO, LoRA"),
    *("SFT, prompt tuning", "ORPO, checkpointing", "DPO, synchronised reference", "SDPO, top-k"),
    *("GOLD, hybrid", "IW-OPD, JSD", "server distillation, JSD", "SFT, accumulated"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in CASES])
def test_training_is_the_same_and_makes_no_logits(name, tmp_path):
    """Where this version of TRL lacks what is replaced, TRL's own code trains, with a warning."""
    build, options = CASES[name]
    trainer = name.partition(",")[0]
    feature = _FEATURES.get(trainer, trainer)
    missing = FOUND[feature]
    if not isinstance(missing, Missing):
        check_training(build, tmp_path, **options)
    elif missing.package:
        pytest.skip(str(missing))
    else:
        with pytest.warns(UserWarning, match=f"{feature}: .*TRL's own code runs"), enabled():
            assert train(build, tmp_path, False, **options)[0]
