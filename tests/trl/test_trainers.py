"""TRL's trainers, plain and enabled: the same losses, gradients and metrics, and no logits in training."""

import re
from dataclasses import replace

import pytest

from liger_losses import EngineOptions
from liger_losses.chunked.core import stream
from liger_losses.places import Missing
from liger_losses.trl import enabled, enabling
from liger_losses.trl.features import FEATURES, find
from tests.trl.trainers import CASES, Products, check_training, train

FOUND = find(FEATURES)


def missing_of(name):
    """What this version of TRL lacks for a case, or ``None``."""
    trainer = name.partition(",")[0]
    feature = trainer if trainer in FOUND else f"any head in {'GRPO' if trainer == 'GMPO' else trainer}"
    return FOUND[feature] if isinstance(FOUND[feature], Missing) else None


#: ``make test`` leaves out those that take long, or whose option another trainer has.
_SLOW = {"SFT, compiled", "DPO, compiled", "CPO, compiled", "GRPO, compiled", "CPO, bf16", "DPO, LoRA", "SDPO, top-k"}
_SLOW |= {"SFT, prompt tuning", "ORPO, checkpointing", "DPO, synchronised reference", "IW-OPD, JSD", "SFT, accumulated"}


#: Cases whose trainers ask for all positions and mask afterwards: N counts positions, with prompts and padding.
_ALL_POSITIONS = {"online DPO", "CPO", "CPO, bf16", "ORPO", "ORPO, LoRA", "ORPO, checkpointing", "IW-OPD, JSD", "SDPO"}
_ALL_POSITIONS |= {"SDPO, top-k"}
#: N H V that trainers compute beside one loss of the trained head.
_MORE = {
    **dict.fromkeys(("DPO", "online DPO"), 2),  # the reference
    **dict.fromkeys(("distillation", "GKD", "GOLD", "SDPO"), 2),  # the teacher
    **dict.fromkeys(("GMPO", "RLOO"), 2),  # sequences without advantage, forward only
    **dict.fromkeys(("GRPO, iterations", "GRPO, accumulated, checkpointing"), 2),
    "KTO": 6,  # the reference, and both models on the completions of the KL term
    "CPO": 5,  # cross-entropy of chosen sequences, and mean logits as a metric
    "ORPO": 5,
    "TPO": 5,  # the same, of tokens without loss too
    "asynchronous GRPO": 5,  # sequences without advantage, with gradients of zero
    "IW-OPD": 5,  # the teacher; both on tokens whose weight is 0
    "IW-OPD, JSD": 2,
    "SDFT": 6,  # the teacher, in each of the two passes of a divergence per token, or the largest of all positions
}


#: Trainers that are trained with logits that are too large to keep too.
_RECOMPUTED = ("SFT", "SFT, LoRA", "DPO", "GRPO", "KTO", "distillation", "CPO", "SDFT")


@pytest.mark.parametrize(
    ("name", "kept"),
    [pytest.param(name, True, marks=[pytest.mark.slow] * (name in _SLOW)) for name in CASES]
    + [(name, False) for name in _RECOMPUTED],
)
def test_training_is_the_same_and_makes_no_logits(name, kept, tmp_path, monkeypatch):
    """Forward and both gradients of N tokens are 6 N H V; 8 where the logits are too large to keep.

    Where this version of TRL lacks what is replaced, TRL's own code trains, with a warning.
    """
    build, options = CASES[name]
    trainer, missing, products = name.partition(",")[0], missing_of(name), []
    plans, again = stream.plans, EngineOptions(strategy="two_pass")

    def two_passes(calls, *others):
        return plans(tuple(replace(call, options=again) for call in calls), *others)

    if not kept:
        monkeypatch.setattr(stream, "plans", two_passes)
    if missing is None and "compiled" in name:
        check_training(build, tmp_path, **options)
    elif missing is None:
        check_training(build, tmp_path, watch=lambda trainer: products.append(Products(trainer)), **options)
        most = (6.1 if kept else 8.1) + _MORE.get(name, _MORE.get(trainer, 0))
        assert 0 < products[0].units(name in _ALL_POSITIONS) <= most
    elif missing.package:
        pytest.skip(str(missing))
    else:
        with pytest.warns(UserWarning, match=f"{re.escape(str(missing))}.*TRL's own code runs"), enabled():
            assert train(build, tmp_path, False, **options)[0]


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "GRPO", "RLOO", "asynchronous GRPO"])
def test_one_name_of_trl_serves_its_main_trainers(name, tmp_path, monkeypatch):
    """As for a model of a trainer that was built before ``enable``, or of a later TRL that has another fused head."""
    if missing_of(name) or isinstance(FOUND["log-probabilities"], Missing):
        pytest.skip("this version of TRL has another name, or needs another package")
    monkeypatch.setattr(enabling, "FEATURES", {"log-probabilities": FEATURES["log-probabilities"]})
    build, options = CASES[name]
    check_training(build, tmp_path, **options)
