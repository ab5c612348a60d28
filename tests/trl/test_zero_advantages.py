"""Sequences without advantage in TRL's trainers: the loss, gradients and metrics of all, the backward of the others."""

import contextlib
import warnings
from collections import defaultdict
from unittest import mock

import pytest
import torch
from torch import nn

from liger_losses.trl import enabled
from liger_losses.trl.zero_advantages import _select, without_zero_advantages
from tests.models import tiny_model
from tests.trl.test_trainers_images import CASES as WITH_IMAGES
from tests.trl.trainers import gmpo, grpo, mixture, rloo, trl

B, P, C = 4, 3, 6
LENGTHS = (6, 3, 5, 2)
HALF, NONE, ALL, ONE = [0.0, 1.0, 0.0, -2.0], [0.0] * 4, [0.5, 1.0, -1.5, -2.0], [0.0, 0.0, 0.7, 0.0]


BUILDERS = {"GRPO": grpo, "RLOO": rloo, "GMPO": gmpo, "image": WITH_IMAGES["GRPO"], "experts": grpo}


def trainer_of(kind, folder):
    """A trainer of each kind, built once, with weights of its own."""
    made = folder / kind
    made.mkdir()
    model, tokenizer, text = tiny_model()
    if kind == "experts":
        model = mixture(made, None, tokenizer, text).model
    text = (lambda n: "word1 " * n) if kind == "image" else text
    options = {"beta": 0.0, "num_generations": 2, "max_completion_length": C}
    trainer = BUILDERS[kind](made, model, tokenizer, text, **options)
    torch.manual_seed(0)
    for parameter in trainer.model.parameters():
        nn.init.normal_(parameter, std=0.3)
    trainer.model.train()
    return trainer


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainers")
    with enabled():
        found = {kind: trainer_of(kind, folder) for kind in BUILDERS}
    return found.__getitem__


def inputs_of(kind, advantages, **others):
    g = torch.Generator().manual_seed(0)
    logps = [-2.5 + 0.3 * torch.randn(B, C, generator=g) for _ in range(2)]
    inputs = {
        "prompt_ids": torch.randint(3, 19, (B, P), generator=g),
        "prompt_mask": torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 1], [0, 0, 1]]),
        "completion_ids": torch.randint(3, 19, (B, C), generator=g),
        "completion_mask": (torch.arange(C) < torch.tensor(LENGTHS)[:, None]).long(),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.tensor(40),
        "old_per_token_logps": logps[0],
        "ref_per_token_logps": logps[1],
        "old_logps": logps[0].sum(1),
    }
    if kind == "image":  # each prompt is an image's tokens
        inputs["prompt_ids"], inputs["prompt_mask"] = torch.full((B, 4), 3), torch.ones(B, 4, dtype=torch.int64)
        inputs["completion_ids"] = inputs["completion_ids"].clamp(min=4)
        inputs |= {"pixel_values": torch.randn(B, 3, 8, 8, generator=g), "num_images": [1] * B}
    return inputs | others


@contextlib.contextmanager
def changed(trainer, attributes):
    """Attributes of the trainer, or of its configuration where it has them there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "current_gradient_accumulation_steps", 2, raising=False)
        for name, value in attributes.items():
            patch.setattr(trainer if name in vars(trainer) else trainer.args, name, value)
        yield


def evaluated(trainer, inputs, skip, attributes):
    """Loss, gradients, metrics, and how many sequences ran with a gradient and without, of each forward."""
    ran, model = [], trainer.model
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: ran.append((torch.is_grad_enabled(), *kwargs["input_ids"].shape)), with_kwargs=True
    )
    with changed(trainer, attributes), hook, enabled(skip_zero_advantages=skip):
        trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        model.zero_grad()
        loss = trainer._compute_loss(model, inputs)
        loss.backward()
        return loss.detach(), [p.grad for p in model.parameters()], dict(trainer._metrics["train"]), ran


LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")
#: A kind of trainer, what is changed in it and its configuration, the advantages, and other inputs.
SPLITS = {
    "half": ("GRPO", {}, HALF, {}),
    "a single one": ("GRPO", {}, ONE, {}),
    "none": ("GRPO", {}, NONE, {}),
    "not a number": ("GRPO", {}, [0.0, float("nan"), 0.0, 0.0], {}),
    "by token": ("GRPO", {}, [[0.0] * C, [0.0] * 2 + [1.0] * 4, [0.0] * C, [1.0] * C], {}),
    **{name: ("GRPO", {"loss_type": name}, HALF, {}) for name in LOSS_TYPES},
    "iterations": ("GRPO", {"loss_type": "grpo", "num_iterations": 2}, HALF, {}),
    "first iteration": ("GRPO", {"loss_type": "grpo"}, HALF, {"old_per_token_logps": None}),
    "sequence level": ("GRPO", {"importance_sampling_level": "sequence", "loss_type": "grpo"}, HALF, {}),
    "entropy quantile": ("GRPO", {"top_entropy_quantile": 0.5}, HALF, {}),
    "two-sided": ("GRPO", {"delta": 1.5}, HALF, {}),
    "off-policy mask": ("GRPO", {"off_policy_mask_threshold": 0.1}, HALF, {}),
    "truncated": ("GRPO", {}, ALL, {"completion_mask": torch.tensor([[1] * C, [0] * C, [1] * C, [0] * C])}),
    "tools": ("GRPO", {}, ALL, {"tool_mask": torch.tensor([[1] * C, [0] * C, [1] * C, [0] * C])}),
    "RLOO": ("RLOO", {}, HALF, {}),
    "RLOO, beta": ("RLOO", {"beta": 0.3}, ONE, {}),  # in its rewards
    "GMPO": ("GMPO", {}, HALF, {}),
    "image": ("image", {}, HALF, {}),
    "image, none": ("image", {}, NONE, {}),
    "experts": ("experts", {"aux_loss_enabled": False}, HALF, {}),
}


@pytest.mark.parametrize(
    ("name", "checkpointing"), [*((name, False) for name in SPLITS), ("half", True), ("RLOO", True), ("image", True)]
)
def test_loss_gradients_and_metrics_are_those_of_all_sequences(name, checkpointing, trainers):
    kind, attributes, advantages, others = SPLITS[name]
    trainer, inputs = trainers(kind), inputs_of(kind, advantages, **others)
    if checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    loss, gradients, metrics, ran = evaluated(trainer, inputs, False, attributes)
    found = evaluated(trainer, inputs, True, attributes)
    trainer.model.gradient_checkpointing_disable()
    torch.testing.assert_close(found[0], loss, rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(found[1], gradients, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert found[2].keys() == metrics.keys()
    for key, values in metrics.items():
        assert found[2][key] == pytest.approx(values, rel=1e-6, abs=1e-6, nan_ok=True), key
    ((whole, *size),) = ran
    (with_gradient, counted, length), (without, left_out, *_) = found[3]
    assert (whole, without, with_gradient, size[0]) == (True, False, True, B)
    if advantages is NONE and kind != "image":  # a short input stands in
        assert (left_out, counted) == (B, 1)
        assert length <= size[1]
    else:
        assert left_out + counted == B


#: A kind of trainer, what is changed in it, the advantages, other inputs, and what is said, once, of a batch that is
#: not split: what gives tokens without advantage a gradient, or couples sequences.
WHOLE = {
    "beta": ("GRPO", {"beta": 0.1}, HALF, {}, "beta adds a term"),
    "entropy": ("GRPO", {"_entropy_bonus_enabled": True, "entropy_coef": 0.1}, HALF, {}, "entropy_coef adds a term"),
    "router": ("experts", {}, HALF, {}, "router_aux_loss_coef adds a term"),
    "beta of GMPO": ("GMPO", {"beta": 0.1}, HALF, {}, "beta adds a term"),
    "a tower": ("GRPO", {}, HALF, {}, "batch normalization couples sequences"),
    "every one has an advantage": ("GRPO", {}, ALL, {}, None),
    "some have no images": ("image", {}, HALF, {"num_images": [1, 1, 2, 0]}, None),
}


@pytest.mark.parametrize("name", WHOLE)
def test_batches_that_are_not_split(name, trainers, monkeypatch):
    kind, attributes, advantages, others, reason = WHOLE[name]
    trainer, inputs = trainers(kind), inputs_of(kind, advantages, **others)
    monkeypatch.setattr(trainer, "_liger_losses_said_why", False, raising=False)
    if name == "a tower":
        monkeypatch.setitem(trainer.model._modules, "tower", nn.BatchNorm1d(2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ran = evaluated(trainer, inputs, True, attributes)[-1] + evaluated(trainer, inputs, True, attributes)[-1]
    said = [str(w.message) for w in said if "take part in the backward" in str(w.message)]
    words = f"take part in the backward of this {type(trainer).__name__}: {reason}"
    assert [words in text for text in said] == [True] * (reason is not None)
    assert [size[:2] for size in ran] == [(True, B)] * 2


def test_a_term_that_is_not_known_is_an_error_before_the_step(trainers):
    """In another version of TRL, say: sequences without advantage would have a gradient."""
    trainer, knows_no_terms = trainers("GRPO"), ()
    with changed(trainer, {"beta": 0.1}):
        given = trainer, trainer.model, inputs_of("GRPO", HALF)
        loss = without_zero_advantages(knows_no_terms, trl.GRPOTrainer._compute_loss, *given)
        with pytest.raises(RuntimeError, match=r"has a gradient: .*skip_zero_advantages=False"):
            loss.backward()


def test_nothing_is_split_without_gradients(trainers):
    trainer = trainers("GRPO")
    split = mock.patch("liger_losses.trl.zero_advantages._split")
    with torch.no_grad(), changed(trainer, {}), enabled(), split as called:
        trainer._compute_loss(trainer.model, inputs_of("GRPO", HALF))
    assert not called.called
    assert "_get_per_token_logps_and_entropies" not in vars(trainer)


#: What TRL has of the layout of pictures, and how many rows of pixels each sequence has.
LAYOUTS = [
    ("image_grid_thw", torch.tensor([[1, 1, 2], [1, 2, 2], [1, 1, 1], [1, 1, 3]]), [2, 5, 3]),
    ("image_sizes", torch.arange(8).view(4, 2), [1, 2, 1]),
    ("num_tiles", [1, 3, 2], [1, 3, 2]),
]


@pytest.mark.parametrize(("name", "layout", "counts"), LAYOUTS)
def test_pictures_go_with_their_sequences(name, layout, counts):
    pixels = torch.arange(sum(counts))
    batch = {"input_ids": torch.arange(3), "pixel_values": pixels, "num_images": [1, 2, 1], name: layout}
    chosen = _select(batch, torch.tensor([2, 1]))
    assert (chosen["input_ids"].tolist(), chosen["num_images"]) == ([2, 1], [1, 2])
    _, second, third = pixels.split(counts)
    assert torch.equal(chosen["pixel_values"], torch.cat([third, second]))
    assert name == "num_tiles" or torch.equal(chosen[name], layout[[3, 1, 2]])
