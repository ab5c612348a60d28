"""Old log-probabilities from the training forward: the numbers of TRL, one forward less."""

import functools
import math
import warnings
from collections import Counter

import pytest
import torch
import transformers

from liger_losses.trl import disable, enable, enabled
from tests.project.test_examples import tiny_model
from tests.trl.trainers import _TIMES, gmpo, grpo, lora, online, reward_half, trl

rloo = online(trl.RLOOTrainer, trl.RLOOConfig)


def corrected(mode, low=None, high=3.0):
    """TRL's options of a correction."""
    return {
        f"vllm_importance_sampling_{name}": x for name, x in {"mode": mode, "clip_min": low, "clip_max": high}.items()
    }


#: Some ratios of :class:`Sampler` are out of these bounds.
CORRECTIONS = {
    "token_truncate": corrected("token_truncate", high=1.2),
    "token_truncate, from below": corrected("token_truncate", 0.8, None),
    "token_mask": corrected("token_mask", 0.5, 1.5),
    "sequence_truncate": corrected("sequence_truncate", high=1.2),
    "sequence_mask": corrected("sequence_mask"),
    "sequence_mask, from below": corrected("sequence_mask", 0.5, None),
}
MASK = CORRECTIONS["token_mask"]


class Sampler:
    """In vLLM's place: completions that do not depend on the model, with probabilities that differ from its own."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)
        self.sync_weights = lambda: None

    def generate(self, prompts, **_):
        draw = functools.partial(torch.randint, generator=self.generator)
        ids = [draw(3, 19, (int(draw(1, 7, ())),)).tolist() for _ in prompts]
        logps = [(-2.9 + 0.4 * torch.randn(len(row), generator=self.generator)).tolist() for row in ids]
        logps[0][0] = None  # unknown
        return None, ids, [[[logp] for logp in row] for row in logps], None


class Gradients(transformers.TrainerCallback):
    """The gradients of each optimizer step."""

    def __init__(self):
        self.of_steps = []

    def on_pre_optimizer_step(self, *_, model, **__):
        self.of_steps.append([p.grad.clone() for p in model.parameters() if p.requires_grad])


def built(build, output, **options):
    """A trainer, whose completions are the sampler's where it corrects for one."""
    output.mkdir()
    model, tokenizer, text = tiny_model()
    common = {"beta": 0.0, "optim": "sgd", "learning_rate": 0.1, "rewards": reward_half, "temperature": 0.9}
    common |= {"gradient_accumulation_steps": 2}
    trainer = build(output, model, tokenizer, text, **common | options)
    if "vllm_importance_sampling_mode" in options:
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, Sampler(), -1
    return trainer


def trained(build, output, options, **enabled_with):
    """The logged numbers and gradients of each step, the weights, and how many sequences the layers ran."""
    if enabled_with:
        enable(**enabled_with)
    trainer, ran, gradients = built(build, output, **options), Counter(), Gradients()
    for name, model in (("policy", trainer.model), ("reference", getattr(trainer, "ref_model", None))):
        for layer in () if model is None else [m for n, m in model.named_modules() if n.endswith("layers.0")]:
            layer.register_forward_pre_hook(lambda _, inputs, name=name: ran.update({name: len(inputs[0])}))
    trainer.add_callback(gradients)
    torch.manual_seed(1)
    trainer.train()
    disable()
    logged = [row for row in trainer.state.log_history if "loss" in row or "eval_loss" in row]
    return logged, gradients.of_steps, list(trainer.model.parameters()), ran


def check(build, tmp_path, options, plain=None, **enabled_with):
    """The same numbers; the sequences that ran in TRL, and those that ran here."""
    theirs = trained(build, tmp_path / "theirs", options, **plain or {})
    ours = trained(build, tmp_path / "ours", options, reuse_forward=True, **enabled_with)
    assert len(ours[0]) == len(theirs[0])
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert set(a) == set(b)
        for key, value in b.items():
            if not any(word in key for word in _TIMES) and value is not None:
                assert a[key] == pytest.approx(value, rel=2e-4, abs=2e-6, nan_ok=True), key
    for a, b in zip(ours[1] + [ours[2]], theirs[1] + [theirs[2]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-6)
    return theirs[3], ours[3]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_twenty_steps_are_those_of_trl(name, tmp_path):
    theirs, ours = check(grpo, tmp_path, {"max_steps": 20, **CORRECTIONS[name]})
    assert theirs - ours == {"policy": 20 * 8}
