"""Enabling and disabling, with liger-kernel and with kernels in the models."""

import re
import warnings
from types import SimpleNamespace

import pytest

from liger_losses import Divergence
from liger_losses.patching.swap import replacement_of
from liger_losses.trl import disable, enable, enabled, is_enabled
from liger_losses.trl.divergences import chosen
from liger_losses.trl.features import FEATURES, find
from tests.models import tiny_model
from tests.seam import engine_calls
from tests.trl.trainers import CASES, check_training, cpo, dpo, gmpo, grpo, sft, trl


@pytest.mark.peers
@pytest.mark.parametrize("name", ["SFT", "GRPO", "CPO"])
@pytest.mark.filterwarnings("ignore:.*use_liger_kernel:FutureWarning")
def test_liger_kernel_beside_this_library(name, tmp_path):
    """Its layers may run (they need a GPU, so they are off here); the forward that it gives a model keeps our head."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    build, options = CASES[name]
    off = {"rope": False, "rms_norm": False, "swiglu": False}
    check_training(build, tmp_path, use_liger_kernel=True, liger_kernel_config=off, **options)


@pytest.mark.parametrize("build", [sft, dpo, grpo])
def test_kernels_in_the_models(build, tmp_path):
    """What they compute stays the same; a trainer's reference model has them too."""

    def watch(trainer):
        for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
            assert replacement_of(model.model.norm) is not None
            assert replacement_of(model.model.layers[0].mlp) is not None

    check_training(build, tmp_path, kernels=True, watch=watch)
    with enabled():
        assert replacement_of(build(tmp_path, *tiny_model()).model.model.norm) is None


@pytest.mark.parametrize("build", [sft, cpo, gmpo], ids=["SFT", "CPO", "GMPO"])
def test_trainers_that_were_built_before(build, tmp_path):
    """Their losses are this library's too."""
    early = build(tmp_path, *tiny_model(), max_steps=1)
    assert not is_enabled()
    enable()
    assert is_enabled()
    with engine_calls() as calls:
        early.train()
    assert calls
    disable()
    assert not is_enabled()


#: By option, a value that is not the default, and others.
OPTIONS = {"kernels": [True], "reuse_forward": [True], "skip_zero_advantages": [False], "share_prompts": [True, False]}
OPTIONS["divergence"] = [Divergence.reverse_kl(), Divergence.forward_kl()]


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_stays_until_it_is_changed_or_disabled(name):
    default, (value, *others) = getattr(chosen, name), OPTIONS[name]
    enable(**{name: value})
    enable()
    with enabled():
        assert getattr(chosen, name) == value
    for other in others:
        with enabled(**{name: other}):
            assert getattr(chosen, name) == other
    assert getattr(chosen, name) == value
    disable()
    assert getattr(chosen, name) == default != value


def test_a_new_parameter_of_trl_drops_no_feature(monkeypatch):
    """While it has TRL's default; with another value, TRL's own function runs, with a warning."""
    import trl.trainer.sft_trainer as module

    model, added = tiny_model()[0], module.add_fused_lm_head
    calls = []

    def newer(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs",), tiles=4):
        calls.append(tiles)
        added(model, temperature, cast_lm_head_to_fp32, outputs)

    monkeypatch.setattr(module, "add_fused_lm_head", newer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        enable()
        module.add_fused_lm_head(model, tiles=4)
    assert calls == []
    with pytest.warns(UserWarning, match="TRL's own newer runs: the argument tiles is not known"):
        module.add_fused_lm_head(model, tiles=8)
    assert calls == [8]


FOUND = find(FEATURES)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_that_lacks_a_place_is_left_out(feature, monkeypatch):
    """Each place of it in turn; all other features are enabled."""
    before = {(p.owner, p.name): vars(p.owner).get(p.name) for places in FOUND.values() for p in places}
    for place, removed in zip(FEATURES[feature], FOUND[feature], strict=True):
        if place.module == "trl.trainer":  # which gets its names from other modules
            continue
        others = {name for name, places in FOUND.items() if any(p[:2] == removed[:2] for p in places)}
        kept = {(p.owner, p.name) for name, places in FOUND.items() if name not in others for p in places}
        with monkeypatch.context() as patch:
            if place.function or place.takes:  # deleted, a method might be inherited
                patch.setattr(removed.owner, removed.name, lambda: None)
            else:
                patch.delattr(removed.owner, removed.name)
            with pytest.warns(UserWarning, match=re.escape(f"{feature}: {place.module}.{place.name} ")):
                enable()
            for owner, attribute in before:
                replaced = vars(owner).get(attribute) is not before[owner, attribute]
                assert replaced is ((owner, attribute) in kept) or (owner, attribute) == removed[:2], attribute
            disable()
    assert before == {place: vars(place[0]).get(place[1]) for place in before}


def test_a_trl_without_any_place_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        for places in FOUND.values():
            for owner, name, _ in places:
                patch.setattr(owner, name, None)
        with pytest.raises(RuntimeError, match=r"SFT: trl.trainer.sft_trainer.add_fused_lm_head .*Nothing was changed"):
            enable()
    assert not is_enabled()
    other = SimpleNamespace(forward=lambda ctx, hidden, weight, scale: None)
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", other)
    with pytest.warns(UserWarning, match="log-probabilities: .*_ChunkedLogProbFunction has other parameters, hidden"):
        enable()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kernels": "x"}, "kernels must be True or False, got 'x'"),
        ({"kernel": True}, r"no kernel= \(did you mean 'kernels'\?\); its arguments are kernels"),
        ({"reuse_forward": None}, "reuse_forward must be True or False, got None"),
        ({"share_prompts": "yes"}, "share_prompts must be True, False or None, got 'yes'"),
        ({"skip_zero_advantages": 1}, "skip_zero_advantages must be True or False"),
    ],
)
def test_wrong_options(options, said):
    with pytest.raises(TypeError, match=said):
        enable(**options)
