"""Old log-probabilities from the training forward: the numbers of TRL, with one forward less."""

import functools
import types
from collections import Counter
from unittest import mock

import pytest
import torch
import transformers

from liger_losses.places import Missing
from liger_losses.trl import disable, enable, enabled
from liger_losses.trl.features import FEATURES, find
from liger_losses.trl.reuse import _check_dropout, without_old_policy
from tests.models import small, tiny_model
from tests.trl.trainers import _TIMES, gmpo, grpo, reward_half, rloo, trl

WORK = [name for name, places in find(FEATURES).items() if not isinstance(places, Missing)]


def corrected(mode, low=None, high=3.0):
    """TRL's options of a correction."""
    options = {"mode": mode, "clip_min": low, "clip_max": high}
    return {f"vllm_importance_sampling_{name}": value for name, value in options.items()}


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
    """In place of generation: completions that do not depend on the model, with probabilities that differ from its."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)

    def generate(self, prompts):
        draw = functools.partial(torch.randint, generator=self.generator)
        ids = [draw(3, 19, (int(draw(1, 7, ())),)).tolist() for _ in prompts]
        logps = [(-2.9 + 0.4 * torch.randn(len(row), generator=self.generator)).tolist() for row in ids]
        logps[0][0] = None  # unknown
        return ids, logps

    def rollout(self, prompts, trainer):
        """With tokens of a tool at the end of each completion."""
        ids, logps = self.generate(prompts)
        tools = [[1] * (len(row) - len(row) // 3) + [0] * (len(row) // 3) for row in ids]
        return {"prompt_ids": [[3, 4]] * len(ids), "completion_ids": ids, "logprobs": logps, "env_mask": tools}


class Gradients(transformers.TrainerCallback):
    """The gradients of each optimizer step."""

    def __init__(self):
        self.of_steps = []

    def on_pre_optimizer_step(self, *_, model, **__):
        self.of_steps.append([p.grad.clone() for p in model.parameters() if p.requires_grad])


def built(build, output, model=None, tools=False, **options):
    """A trainer of the sampler's completions, which uses its log-probabilities where there is a mode of correction."""
    output.mkdir()
    own, tokenizer, text = tiny_model()
    common = {"beta": 0.0, "optim": "sgd", "learning_rate": 0.1, "temperature": 0.9, "gradient_accumulation_steps": 2}
    trainer = build(output, model or own, tokenizer, text, **common | options)
    trainer.use_vllm, sampler = "vllm_importance_sampling_mode" in options, Sampler()
    trainer.rollout_func, trainer._last_loaded_step = sampler.rollout if tools else None, -1
    trainer.vllm_generation = types.SimpleNamespace(sync_weights=lambda: None)

    def generate(prompts, *_, **__):
        ids, logps = sampler.generate(prompts)
        return ids if build is rloo else (ids, logps if trainer.use_vllm else None)

    trainer._generate_single_turn = generate
    return trainer


def trained(build, output, options, **enabled_with):
    """The numbers of each step and of an evaluation, gradients, weights, and how many sequences the layers ran."""
    if enabled_with:
        enable(**enabled_with)
    trainer, ran, gradients = built(build, output, **options), Counter(), Gradients()
    for name, model in (("policy", trainer.model), ("reference", getattr(trainer, "ref_model", None))):
        for layer in () if model is None else [m for n, m in model.named_modules() if n.endswith("layers.0.mlp")]:
            layer.register_forward_pre_hook(lambda _, inputs, name=name: ran.update({name: len(inputs[0])}))
    trainer.add_callback(gradients)
    torch.manual_seed(1)
    trainer.train()
    units = sum(ran.values()) / len(gradients.of_steps) / 8 + 2  # a backward is two forwards
    trainer.evaluate(trainer.train_dataset.select(range(4)))
    disable()
    logged = [row for row in trainer.state.log_history if "loss" in row or "eval_loss" in row]
    return logged, gradients.of_steps, list(trainer.model.parameters()), units


def check(build, tmp_path, options, **enabled_with):
    """The same numbers; the units of work of TRL, and of this."""
    theirs = trained(build, tmp_path / "theirs", options)
    ours = trained(build, tmp_path / "ours", options, reuse_forward=True, **enabled_with)
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert set(a) == set(b)
        for key, value in b.items():
            if not any(word in key for word in _TIMES) and value is not None:
                assert a[key] == pytest.approx(value, rel=2e-4, abs=2e-6, nan_ok=True), key
    for a, b in zip([*ours[1], ours[2]], [*theirs[1], theirs[2]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-6)
    return theirs[3], ours[3]


@pytest.mark.parametrize("build", [grpo, gmpo])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_many_steps_are_those_of_trl(name, build, tmp_path):
    options = {"max_steps": 20, "rewards": reward_half, "gradient_accumulation_steps": 1 + ("from" in name)}
    theirs, ours = check(build, tmp_path, options | CORRECTIONS[name])
    assert ours < theirs - 0.4  # sequences without advantage run apart


ITERATIONS, VESPO = {"num_iterations": 2, "max_steps": 4}, {"loss_type": "vespo"}
#: A trainer, its options, and the forwards and backwards of TRL and of this, in forwards. A step has two batches.
CASES = {
    "": (grpo, MASK, 4, 3),
    **{name: (grpo, CORRECTIONS[name], 4, 3) for name in CORRECTIONS if "truncate" in name},
    "reference": (grpo, {**MASK, "beta": 0.1}, 5, 4),
    "checkpointing": (grpo, {**MASK, "gradient_checkpointing": True}, 5, 4),
    "checkpointing, reference": (grpo, {**MASK, "gradient_checkpointing": True, "beta": 0.1}, 6, 5),
    "reference without an adapter": (grpo, {**MASK, "adapter": ("q_proj",), "beta": 0.1}, 5, 4),
    "iterations": (grpo, {**MASK, **ITERATIONS}, 3.5, 3),
    "iterations, no correction": (grpo, ITERATIONS, 3.5, 3),
    "generations of one batch": (grpo, {**CORRECTIONS["sequence_mask"], "steps_per_generation": 1}, 4, 3),
    "no correction": (grpo, {}, 3, 3),
    "vespo": (grpo, {**MASK, **VESPO}, 4, 3),
    "luspo": (grpo, {**MASK, "loss_type": "luspo", "importance_sampling_level": "sequence"}, 4, 3),
    "off-policy mask": (grpo, {**MASK, "off_policy_mask_threshold": 0.01}, 4, 3),
    "tools": (grpo, {**MASK, "tools": True}, 4, 3),
    "truncated completions": (grpo, {**CORRECTIONS["sequence_truncate"], "mask_truncated_completions": True}, 4, 3),
    "GMPO": (gmpo, MASK, 4, 3),
    "RLOO": (rloo, {}, 4, 3),
    "RLOO, iterations": (rloo, ITERATIONS, 3.5, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_work(name, tmp_path):
    build, options, *units = CASES[name]
    assert check(build, tmp_path, {"max_steps": 2, **options}, skip_zero_advantages=False) == tuple(units)


def test_prompts_are_shared_too(tmp_path):
    """Each batch is a row, and the first forward tries a row of two tokens."""
    if "any head in GRPO" not in WORK:
        pytest.skip("this version of TRL has no shared prompts")
    _, ours = check(grpo, tmp_path, MASK | {"max_steps": 2}, skip_zero_advantages=False, share_prompts=True)
    assert ours == 2 + (2 * 2 + 1) / (2 * 8)


#: TRL's way, and why.
REFUSED = {
    "misaligned": (grpo, {**MASK, "steps_per_generation": 4}, "gradient_accumulation_steps=2 is no multiple of .*=4"),
    "RLOO, beta": (rloo, {"beta": 0.1}, "beta=0.1 adds log-probabilities to the rewards"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_aligned_takes_trls_way_and_says_so_once(name, tmp_path):
    build, options, reason = REFUSED[name]
    with pytest.warns(UserWarning, match=f"runs TRL's forward for old log-probabilities: {reason}") as said:
        theirs, ours = check(build, tmp_path, {"max_steps": 3, **options}, skip_zero_advantages=False)
    assert theirs == ours
    assert len([w for w in said if "TRL's forward" in str(w.message)]) == 1


@pytest.mark.parametrize(
    ("changed", "mode", "reason"),
    [
        ("_compute_loss", "token_mask", "Other has a _compute_loss"),
        ("_generate_and_score_completions", "token_mask", "Other has a _generate_and_score_completions that is not TR"),
        (None, "odd", "sampling_mode='odd' is not known"),
    ],
)
def test_what_is_not_known_takes_trls_way(changed, mode, reason):
    methods = {n: getattr(trl.GRPOTrainer, n) for n in ("_compute_loss", "_generate_and_score_completions")}
    kind = type("Other", (types.SimpleNamespace,), {n: print if n == changed else m for n, m in methods.items()})
    args = types.SimpleNamespace(steps_per_generation=1, gradient_accumulation_steps=1)
    trainer = kind(args=args, vllm_importance_sampling_mode=mode)
    with enabled(reuse_forward=True), pytest.warns(UserWarning, match=reason):
        assert without_old_policy("old_per_token_logps", lambda self, inputs: inputs, trainer, 7) == 7


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("Llama", {"attention_dropout": 0.1}, r"model\.layers\.0\.self_attn\.attention_dropout=0\.1"),
        ("GPTNeoX", {"hidden_dropout": 0.1}, r"gpt_neox\.emb_dropout\.p=0\.1"),
        ("Mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.1}, r"jitter_noise=0\.1"),
    ],
)
def test_dropout_is_an_error(family, options, named, tmp_path):
    message = rf"without dropout, got .*{named}: .*disable_dropout"
    with enabled(reuse_forward=True):
        trainer = built(grpo, tmp_path / "x", small(family, vocab_size=19, **options), **MASK)
        with pytest.raises(ValueError, match=message):
            trainer.train()


def test_a_switch_is_no_rate_of_dropout():
    model = torch.nn.Linear(2, 2)
    model.drop_tokens = True
    _check_dropout(model)


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("again", [lambda: None, disable, lambda: disable() or enable()])
def test_after_a_failed_step_training_begins_with_a_generation(again, iterations, tmp_path):
    results = []
    for reuse in (False, True):
        with enabled(reuse_forward=reuse):
            options = MASK | {"max_steps": 3, "num_iterations": iterations}
            trainer = built(grpo, tmp_path / str(reuse), **options)
            effects = [*[mock.DEFAULT] * 3, MemoryError, *[mock.DEFAULT] * 6]  # in the second batch of a generation
            trainer.training_step = mock.Mock(wraps=trainer.training_step, side_effect=effects)
            with pytest.raises(MemoryError):
                trainer.train()
            trainer._step = trainer._step if reuse else 0
            again()
            trainer.train()
        results.append([*trainer.model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-3, atol=2e-6)


def test_a_batch_of_an_earlier_policy_is_an_error(tmp_path):
    with enabled(reuse_forward=True):
        trainer = built(grpo, tmp_path / "x", **MASK)
        trainer.current_gradient_accumulation_steps = 2
        batch = trainer.model.train() and trainer._prepare_inputs([{"prompt": "word1"}] * 8)
        trainer.state.global_step = 3
        said = r"generated at optimizer step 0 has its first loss at step 3, .*disable\(\)"
        with pytest.raises(RuntimeError, match=said):
            trainer.compute_loss(trainer.model, batch)
        trainer.state.global_step = 0
        trainer.compute_loss(trainer.model, batch)
        trainer.state.global_step = 3
        trainer.compute_loss(trainer.model, batch)  # which has its old log-probabilities
