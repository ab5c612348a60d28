"""TRL's trainers with a prompt computed once for all of its completions: the same losses, gradients and metrics."""

import functools

import pytest
import torch

from liger_losses.trl import disable, divergences, enabled, fused_head
from tests.models import small
from tests.project.test_examples import tiny_model
from tests.trl import trainers
from tests.trl.trainers import CASES, check_training, dpo


@pytest.fixture
def runs(monkeypatch):
    """Trainers share prompts; of each forward, the packed tokens, those of its padded batch, and whether they ran."""
    found, run = [], fused_head.run_packed

    def watched(model, forward, packed, arguments):
        output = run(model, forward, packed, arguments)
        found.append((packed.tokens, arguments["input_ids"].numel(), output is not None))
        return output

    monkeypatch.setattr(fused_head, "run_packed", watched)
    monkeypatch.setattr(trainers, "enable", functools.partial(trainers.enable, share_prompts=True))
    yield found
    disable()


@pytest.mark.parametrize(
    "name",
    [
        "DPO",
        "DPO, LoRA",
        "GRPO",
        "GRPO, iterations",
        "GRPO, accumulated, checkpointing",
        pytest.param("GRPO, head in fp32, bf16", marks=pytest.mark.slow),
        pytest.param("GMPO", marks=pytest.mark.slow),
        "RLOO",
    ],
)
def test_training_is_as_with_repeated_prompts(name, runs, tmp_path):
    build, options = CASES[name]
    check_training(build, tmp_path, **options)
    assert runs
    assert all(ran for _, _, ran in runs)
    packed, padded = (sum(column) for column in list(zip(*runs, strict=True))[:2])
    assert packed < 0.95 * padded


def test_a_compiled_model_repeats_prompts(runs, tmp_path):
    build, options = CASES["DPO, compiled"]
    with pytest.warns(UserWarning, match="torch.compile compiles the model"):
        check_training(build, tmp_path, **options)
    assert not runs


def forward(tmp_path, model=None, **arguments):
    """Log-probabilities of a batch, by a model of a DPO trainer with shared prompts."""
    own, tokenizer, text = tiny_model()
    with enabled(share_prompts=True):
        model = dpo(tmp_path, model or own, tokenizer, text).model
    ids = torch.tensor([[3, 4, 5, 6], [3, 4, 5, 7]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.where(ids > 5, -100)}
    return model(**batch | arguments, fused_lm_head=True).log_probs


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"position_ids": torch.arange(4)[None]}, "position_ids is given"),
        ({"output_router_logits": True}, "output_router_logits is given"),
        ({"labels": None, "shift_labels": torch.tensor([[-100, -100, 6, -100]] * 2)}, "cut for context parallelism"),
    ],
)
def test_batches_that_cannot_be_packed_repeat_prompts(arguments, reason, runs, tmp_path):
    model = small("Mixtral", num_local_experts=4, vocab_size=20) if "output_router_logits" in arguments else None
    with pytest.warns(UserWarning, match=reason):
        logps = forward(tmp_path, model, **arguments)
    assert not runs
    assert logps.shape[0] == 2


def test_attention_dropout_repeats_prompts(runs, tmp_path):
    model = small(vocab_size=20, attention_dropout=0.5)
    _, tokenizer, text = tiny_model()
    with enabled(share_prompts=True):
        model = dpo(tmp_path, model, tokenizer, text, disable_dropout=False).model.train()
    ids = torch.tensor([[3, 4, 5, 6]])
    with pytest.warns(UserWarning, match="attention_dropout=0.5, and FlexAttention has no dropout"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
    assert [ran for _, _, ran in runs] == [False]


def test_it_is_off_until_it_is_enabled():
    assert not divergences.chosen.share_prompts
    with enabled(), enabled(share_prompts=True):
        assert divergences.chosen.share_prompts
    assert not divergences.chosen.share_prompts
    with pytest.raises(TypeError, match="share_prompts must be True or False, got 'yes'"), enabled(share_prompts="yes"):
        pass
