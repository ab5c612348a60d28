"""Enabling and disabling, with liger-kernel and with kernels in the models."""

import functools
import gc
import warnings
from dataclasses import replace

import pytest
import torch

from liger_losses.patching.swap import replacement_of
from liger_losses.trl import disable, enable, enabled, is_enabled
from liger_losses.trl.patch_points import PATCH_POINTS
from tests.project.test_examples import tiny_model
from tests.trl.trainers import CASES, check_training, dpo, gmpo, online, preference, sft, train, trl


@pytest.mark.peers
@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO", "CPO", "GKD"])
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


@pytest.mark.parametrize("build", [sft, dpo, online(trl.GRPOTrainer, trl.GRPOConfig)])
def test_kernels_in_the_models(build, tmp_path):
    """What they compute stays the same; a trainer's reference model has them too."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "ours").mkdir()
    plain, expected = train(build, tmp_path / "plain", False)
    ours, found = train(build, tmp_path / "ours", True, kernels=True)
    for a, b in zip(plain, ours, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-3, abs=2e-4)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=5e-3)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-2, atol=2e-3, msg=key)


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
    """They keep their heads, and a warning names them; those that were built while enabled are not meant."""
    assert not is_enabled()
    early = build(tmp_path, *tiny_model())
    with pytest.warns(
        UserWarning, match=rf"after these trainers were built.*{type(early).__name__}\. Build them again"
    ):
        enable()
    assert is_enabled()
    disable()
    assert not is_enabled()
    del early
    gc.collect()
    with enabled():
        late = build(tmp_path, *tiny_model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enable()
    assert is_enabled()
    assert late.model is not None


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
    assert isinstance(trl.trainer.sft_trainer.add_fused_lm_head, functools.partial)
    enable(kernels=True)  # they come to what is enabled
    assert _BaseTrainer.__init__ is not original
    disable()
    assert _BaseTrainer.__init__ is original


def test_what_was_enabled_stays_where_kernels_cannot_come(monkeypatch):
    import trl.trainer.sft_trainer as sft_trainer
    from trl.trainer.base_trainer import _BaseTrainer

    from liger_losses.trl import enabling

    enable()
    ours = sft_trainer.add_fused_lm_head
    monkeypatch.setattr(enabling, "KERNELS", replace(PATCH_POINTS[0], name="gone"))
    with pytest.raises(RuntimeError, match=r"sft_trainer\.gone"):
        enable(kernels=True)
    assert sft_trainer.add_fused_lm_head is ours
    assert "wrapped" not in _BaseTrainer.__init__.__code__.co_name


def test_another_trl_is_refused_whole(monkeypatch):
    import trl.trainer.dpo_trainer as dpo_trainer
    import trl.trainer.sft_trainer as sft_trainer

    original = sft_trainer.add_fused_lm_head
    monkeypatch.delattr(dpo_trainer, "add_fused_lm_head")
    with pytest.raises(RuntimeError, match=r"dpo_trainer\.add_fused_lm_head \(DPO\) is not there"):
        enable()
    assert sft_trainer.add_fused_lm_head is original
    monkeypatch.setattr(dpo_trainer, "add_fused_lm_head", lambda model: None, raising=False)
    with pytest.raises(RuntimeError, match="takes no temperature"):
        enable()
    assert all("trl" in point.module for point in PATCH_POINTS)
