"""Enabling and disabling, with liger-kernel and with kernels in the models."""

import re
import warnings

import pytest

from liger_losses.patching.swap import replacement_of
from liger_losses.trl import disable, enable, enabled, is_enabled
from liger_losses.trl.features import FEATURES, find
from liger_losses.trl.fused_head import add_fused_lm_head
from tests.project.test_examples import tiny_model
from tests.trl.trainers import CASES, check_training, dpo, gmpo, grpo, preference, sft, trl


@pytest.mark.peers
@pytest.mark.parametrize("name", ["SFT", "GRPO", "CPO"])
@pytest.mark.filterwarnings("ignore:.*use_liger_kernel:FutureWarning")
def test_liger_kernel_beside_this_library(name, tmp_path):
    """Its layers may run (they need a GPU, so they are off here); the forward that it gives a model keeps our head."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    build, options = CASES[name]
    off = {"rope": False, "rms_norm": False, "swiglu": False}
    check_training(build, tmp_path, use_liger_kernel=True, liger_kernel_config=off, **options)


@pytest.mark.filterwarnings("ignore:.*use_liger_kernel:FutureWarning")
def test_liger_kernel_beside_the_kernels(tmp_path):
    with (
        enabled(kernels=True),
        pytest.warns(UserWarning, match="use_liger_kernel=True and .*kernels=True.* each replace"),
    ):
        sft(tmp_path, *tiny_model(), use_liger_kernel=True)


@pytest.mark.parametrize("build", [sft, dpo, grpo])
def test_kernels_in_the_models(build, tmp_path):
    """What they compute stays the same; a trainer's reference model has them too."""
    check_training(build, tmp_path, kernels=True)


def test_kernels_reach_policy_and_reference(tmp_path):
    model, tokenizer, text = tiny_model()
    with enabled(kernels=True):
        trainer = dpo(tmp_path, model, tokenizer, text)
    for policy in (trainer.model, trainer.ref_model):
        assert replacement_of(policy.model.norm) is not None
        assert replacement_of(policy.model.layers[0].mlp) is not None
    with enabled():
        trainer = dpo(tmp_path, *tiny_model())
    assert replacement_of(trainer.model.model.norm) is None


def test_enable_and_disable():
    import trl.trainer.sft_trainer as module

    original = module.add_fused_lm_head
    with enabled():
        assert module.add_fused_lm_head is not original
        enable()  # again: nothing happens
        with enabled():
            pass
        assert module.add_fused_lm_head is not original
    assert module.add_fused_lm_head is original


@pytest.mark.parametrize("build", [sft, preference("cpo"), gmpo], ids=["SFT", "CPO", "GMPO"])
def test_trainers_that_were_built_too_early(build, tmp_path):
    """They keep their heads, and warn when they train; trainers that were built while enabled do not."""
    early = build(tmp_path, *tiny_model(), max_steps=1)
    assert not is_enabled()
    enable()
    assert is_enabled()
    with pytest.warns(UserWarning, match=rf"this {type(early).__name__} was built before .*Build it again"):
        early.train()
    late = build(tmp_path, *tiny_model(), max_steps=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was built before")
        late.train()
    disable()
    assert not is_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*was built before")
        early.train()


def test_kernels_come_and_go():
    from trl.trainer.base_trainer import _BaseTrainer

    original = _BaseTrainer.__init__
    enable()
    assert _BaseTrainer.__init__ is original
    with enabled(kernels=True):
        assert _BaseTrainer.__init__ is not original
        enable()  # the kernels stay
        assert _BaseTrainer.__init__ is not original
    assert _BaseTrainer.__init__ is original
    assert trl.trainer.sft_trainer.add_fused_lm_head is add_fused_lm_head
    enable(kernels=True)  # they come to what is enabled
    assert _BaseTrainer.__init__ is not original
    disable()
    assert _BaseTrainer.__init__ is original


def test_what_was_enabled_stays_where_kernels_cannot_come(monkeypatch):
    import trl.trainer.base_trainer as base
    import trl.trainer.sft_trainer as sft_trainer

    enable()
    ours = sft_trainer.add_fused_lm_head
    monkeypatch.setattr(base, "_BaseTrainer", None)
    with pytest.warns(UserWarning, match=r"kernels: trl\.trainer\.base_trainer\._BaseTrainer\.__init__ is not there"):
        enable(kernels=True)
    assert sft_trainer.add_fused_lm_head is ours


FOUND = find(FEATURES)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_that_lacks_a_place_is_left_out(feature, monkeypatch):
    """Each place of it in turn; all other features are enabled, but for what is a part of it."""
    before = {(p.owner, p.name): vars(p.owner).get(p.name) for places in FOUND.values() for p in places}
    parts = {other.name for other in FEATURES if feature.name in (other.name, other.part_of)}
    for place, removed in zip(feature.places, FOUND[feature.name], strict=True):
        if place.module == "trl.trainer":  # which gets its names from other modules
            continue
        others = {name for name, places in FOUND.items() if any(p[:2] == removed[:2] for p in places)}
        kept = {(p.owner, p.name) for name, places in FOUND.items() if name not in parts | others for p in places}
        with monkeypatch.context() as patch:
            if place.function or place.takes:  # deleted, a method might be inherited
                patch.setattr(removed.owner, removed.name, lambda: None)
            else:
                patch.delattr(removed.owner, removed.name)
            with pytest.warns(UserWarning, match=re.escape(f"{feature.name}: {place.module}.{place.name} ")):
                enable()
            for owner, attribute in before:
                replaced = vars(owner).get(attribute) is not before[owner, attribute]
                assert replaced is ((owner, attribute) in kept) or (owner, attribute) == removed[:2], attribute
            disable()
    assert before == {place: vars(place[0]).get(place[1]) for place in before}


def test_a_trl_without_any_place_is_refused(monkeypatch):
    import trl.trainer.dpo_trainer as dpo_trainer

    with monkeypatch.context() as patch:
        for places in FOUND.values():
            for owner, name, _ in places:
                patch.setattr(owner, name, None)
        with pytest.raises(RuntimeError, match=r"SFT: trl.trainer.sft_trainer.add_fused_lm_head .*Nothing was changed"):
            enable()
    assert not is_enabled()
    for other, said in ((lambda model, scale=1.0: None, "an unknown parameter scale"), (lambda: None, "no parameter")):
        monkeypatch.setattr(dpo_trainer, "add_fused_lm_head", other)
        with pytest.warns(UserWarning, match=f"DPO: trl.trainer.dpo_trainer.add_fused_lm_head has {said}"):
            enable()
        disable()


def test_what_needs_another_package_is_left_out_silently(monkeypatch):
    """Nobody can use it without the package."""
    import trl.trainer.sft_trainer as module

    original = module.BaseTunerLayer
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        enable()
    assert module.BaseTunerLayer is original
    assert {f.package for f in FEATURES} == {"", "peft"}


def test_wrong_options():
    with pytest.raises(TypeError, match="kernels must be True or False, got 'x'"):
        enable(kernels="x")
    with pytest.raises(TypeError, match=r"no kernel= \(did you mean 'kernels'\?\); its arguments are kernels"):
        enable(kernel=True)
