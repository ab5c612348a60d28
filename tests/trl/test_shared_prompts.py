"""TRL's trainers with a prompt computed once for all of its completions: the same losses, gradients and metrics."""

import functools
import types
import warnings
from dataclasses import replace

import pytest
import torch
import transformers

from liger_losses.prompts import attention
from liger_losses.trl import disable, enabled, fused_head, packed_batches
from tests.models import small, tiny_model
from tests.prompts.packed import family
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


QUICK = ("DPO", "DPO, LoRA", "GRPO", "GRPO, iterations", "GRPO, accumulated, checkpointing", "RLOO")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("GRPO, head in fp32, bf16", "GMPO")]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_training_is_as_with_repeated_prompts(name, runs, tmp_path):
    build, options = CASES[name]
    check_training(build, tmp_path, **options)
    assert runs
    assert all(ran for _, _, ran in runs)
    packed, padded = (sum(column) for column in list(zip(*runs, strict=True))[:2])
    assert packed < 0.95 * padded


@pytest.mark.slow
def test_a_compiled_model_repeats_prompts(runs, tmp_path):
    build, options = CASES["DPO, compiled"]
    with pytest.warns(UserWarning, match="torch.compile compiles the model"):
        check_training(build, tmp_path, **options)
    assert not runs


def model_of(tmp_path, share_prompts=True, family="Llama", **options):
    """The model of a DPO trainer."""
    _, tokenizer, text = tiny_model()
    model = small(family, vocab_size=20, **options)
    with enabled(share_prompts=share_prompts):
        return dpo(tmp_path, model, tokenizer, text, disable_dropout=False).model.train()


def logps(model, lengths, device=None, **arguments):
    """Of completions of some lengths, each behind a prompt of the first length, or the second one's own if negative."""
    prompt, *rest = lengths
    ids = torch.full((len(rest), prompt + max(map(abs, rest))), 3, device=device)
    mask = torch.zeros_like(ids)
    for i, length in enumerate(rest):
        ids[i, 0], mask[i, : prompt + abs(length)] = 4 + i * (length < 0), 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :prompt] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels} | arguments
    return model(**batch, fused_lm_head=True).log_probs


#: Prompt and completions, whose padded tokens are 604, and 384 or 640 in a row.
SAVES, DIFFERS = (300, 2, 2), (300, 2, -2)
#: The same with 620 and 608, and 512 in a row; and 915, and 384 in a row, by what is padding.
ENOUGH, LITTLE, PADDED = (110, 200, 200), (104, 200, 200), (5, 300, 1, 1)
POSITIONS, EXPERTS = {"position_ids": torch.arange(302)[None]}, {"family": "Mixtral", "num_local_experts": 4}
#: Of a model, and of its forward; the reason, and whether the model runs for it, in each of two forwards.
REASONS = {
    "positions": ({}, POSITIONS, "position_ids is given", []),
    "router": (EXPERTS, {"output_router_logits": True}, "output_router_logits is given", []),
    "shifted": ({}, {"labels": None, "shift_labels": torch.full((2, 302), 3)}, "cut for context parallelism", []),
    "dropout": ({"attention_dropout": 0.5}, {}, "attention_dropout=0.5, and FlexAttention has no dropout", [False]),
}


@pytest.fixture
def suits(monkeypatch):
    monkeypatch.setattr(packed_batches, "suits_sharing", lambda model, device: True)


@pytest.mark.parametrize("asked", [True, None])
@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_be_packed_repeats_prompts_and_says_so_if_asked(name, asked, runs, suits, tmp_path):
    options, arguments, reason, ran = REASONS[name]
    model = model_of(tmp_path, asked, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert logps(model, SAVES, **arguments).shape[0] == 2
    assert [made for _, _, made in runs] == ran
    assert [w for w in said if reason in str(w.message)] if asked else not [w for w in said if "prompts" in str(w)]


def raised(error):
    raise error


def raises_in_a_row(model, monkeypatch):
    """As a layer that gives a mask of blocks to a function that takes none."""
    model.model.layers[0].eval()
    forward, error = model.model.layers[0].mlp.forward, TypeError("the mask must be a tensor")
    packed = lambda states: raised(error) if states.shape[0] == 1 else forward(states)  # noqa: E731
    monkeypatch.setattr(model.model.layers[0].mlp, "forward", packed)


def raises_in_its_backward(model, monkeypatch):
    """As kernels of a GPU whose forward compiles alone: the trainer's own backward would end the training."""

    def no_backward(query, *_):
        out = query.transpose(1, 2) * 1
        if out.requires_grad:
            out.register_hook(lambda gradient: raised(RuntimeError("out of shared memory")))
        return out

    monkeypatch.setattr(attention, "reason_against_flex", lambda *_: None)
    monkeypatch.setattr(attention, "flex_attention", no_backward)


RAISED = {raises_in_a_row: "TypeError: the mask must be", raises_in_its_backward: "RuntimeError: out of shared"}


@pytest.mark.parametrize(("change", "reason"), RAISED.items())
def test_what_a_row_of_two_tokens_raises_is_a_reason_to_repeat_prompts(change, reason, runs, tmp_path, monkeypatch):
    model = model_of(tmp_path)
    change(model, monkeypatch)
    training = [module.training for module in model.modules()]
    with pytest.warns(UserWarning, match=f"a row of two tokens raised {reason}"), torch.inference_mode():
        logps(model, SAVES)
    logps(model, SAVES).sum().backward()
    assert not runs
    assert [module.training for module in model.modules()] == training


@pytest.fixture
def nvidia(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(attention, "triton", object())


def test_later_forwards_pass_through_no_modules(runs, nvidia, tmp_path, monkeypatch):
    """That would take milliseconds in a large model with adapters."""
    model, visited, walk = model_of(tmp_path), set(), torch.nn.Module.named_modules
    logps(model, SAVES)

    def watched(*arguments, **options):
        for pair in walk(*arguments, **options):
            visited.add(pair[1])
            yield pair

    monkeypatch.setattr(torch.nn.Module, "named_modules", watched)
    packed_batches.suits_sharing(model, torch.device("cuda"))
    logps(model, SAVES)
    assert len(runs) == 2
    assert len(visited) < 5 < len([*walk(model)])


def test_unasked_prompts_are_shared_where_that_saves_a_fifth(runs, suits, tmp_path, recwarn):
    model = model_of(tmp_path, None)
    for batch, count in ((SAVES, 1), (DIFFERS, 1), (LITTLE, 1), (ENOUGH, 2), (PADDED, 3)):
        logps(model, batch)
        assert len(runs) == count, batch
    logps(model_of(tmp_path, False), SAVES)
    logps(model_of(tmp_path), DIFFERS)
    assert len(runs) == 4
    assert not [w for w in recwarn if "prompts" in str(w.message)]


#: Of a small model in half precision on a GPU: its family and options, what differs, and whether prompts are shared.
SUITS = [
    ("llama", {}, {}, True),
    ("llama", {"attn_implementation": "eager"}, {}, True),
    ("llama", {"attn_implementation": "flash_attention_2"}, {}, False),
    ("llama", {"dtype": torch.float32}, {}, False),
    ("llama", {"device": "cpu"}, {}, False),  # a dense mask takes longer than repeated prompts
    ("gemma2", {}, {}, True),
    ("gemma3_text", {}, {}, True),  # whose two kinds of layers have different frequencies
    ("llama", {"head_dim": 8}, {}, False),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, {}, False),
    ("gpt2", {"n_embd": 64}, {}, False),  # absolute positions, which padding shifts
    ("llama", {}, {"TORCHDYNAMO_DISABLE": "1"}, False),
    ("llama", {}, {"TORCH_COMPILE_DISABLE": "1"}, False),
    ("llama", {}, {"LIGER_LOSSES_BACKEND": "torch"}, False),
]


@pytest.mark.parametrize(("name", "options", "environment", "found"), SUITS)
def test_which_models_share_prompts_unasked(name, options, environment, found, nvidia, monkeypatch, recwarn):
    options = {"head_dim": 16} | options
    device, dtype = torch.device(options.pop("device", "cuda")), options.pop("dtype", torch.bfloat16)
    attention_name = options.pop("attn_implementation", "sdpa")
    model = family(name, **options).to(dtype)
    model.config._attn_implementation = attention_name
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert packed_batches.suits_sharing(model, device) == found
    for module, attribute in ((torch.version, "cuda"), (attention, "triton")):  # ROCm has no version of CUDA
        with monkeypatch.context() as patched:
            patched.setattr(module, attribute, None)
            assert not packed_batches.suits_sharing(model, device)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    assert packed_batches.suits_sharing(model, device) == (found or dtype == torch.float32)
    for parameter in model.parameters():
        parameter.ds_id = 0  # as DeepSpeed's ZeRO-3 marks what it gathers
    assert not packed_batches.suits_sharing(model, device)
    assert not [w for w in recwarn if "slower" in str(w.message)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "autocast"])
def test_unasked_prompts_are_shared_on_a_gpu(dtype, runs, tmp_path):
    """With weights in bf16, and with fp32 weights under autocast, as TRL's trainers have them."""
    model = model_of(tmp_path, None, head_dim=16).to("cuda", dtype)
    found = []
    for share in (None, False):
        model._liger_losses_head = replace(model._liger_losses_head, share_prompts=share)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
            logprobs = logps(model, SAVES, "cuda")
        gradients = torch.autograd.grad(logprobs.sum(), list(model.parameters()))
        found.append((logprobs, *gradients))
    assert [ran for _, _, ran in runs] == [True]
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).float().norm() < 0.03 * theirs.float().norm() + 1e-3


def test_a_model_with_images_repeats_prompts_unasked():
    model = types.SimpleNamespace(config=transformers.Gemma3Config(attn_implementation="sdpa"), dtype=torch.bfloat16)
    assert not packed_batches.suits_sharing(model, torch.device("cuda"))
