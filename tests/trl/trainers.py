"""Every trainer of TRL on a tiny model, and a comparison of plain and enabled training."""

import contextlib
import copy
import functools
import importlib
import math
import queue
import time
import warnings
from unittest import mock

import pytest
import tokenizers
import torch
import torch._dynamo.utils
import torch.distributed as dist
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from liger_losses.trl import disable, enable
from tests.models import small, tiny_model
from tests.processes import whole
from tests.results.test_work import Work
from tests.seam import engine_calls

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

STEPS = 2  # the second one starts from the weights that the first one found


class NoLogits(TorchDispatchMode):
    """Fails where logits of sequences are made, [batch, length, vocab]; the engine's blocks of tokens have no batch."""

    def __init__(self, vocab):
        self.vocab = vocab

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 3 and tensor.shape[1] > 1:  # generation makes 1
                made = tensor.shape[-1] == self.vocab and not tensor.is_meta  # which has no memory
                assert not made, f"{func} made {tuple(tensor.shape)}"
        return out


def settings(config, output, **options):
    common = {"per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 1e-2, "seed": 0, "use_cpu": True}
    common |= {"logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    common |= {"gradient_checkpointing": False, "bf16": False, "dataloader_pin_memory": False}
    return config(output_dir=str(output), **common | options)


def lora(*targets):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    if targets == ("virtual tokens",):
        return peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    if targets == ("some tokens",):  # of the embedding, and of the head, which shares its weight
        return peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 4], task_type="CAUSAL_LM")
    return peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM")


#: By column, the fewest words of a text, and how many lengths there are.
LENGTHS = {"prompt": (3, 1), "chosen": (2, 5), "rejected": (1, 4), "completion": (2, 5), "reference": (3, 1)}
LENGTHS |= {"privileged_context": (2, 3)}


def rows_of(text, *columns):
    """Sixteen, with other texts in each."""
    return [{name: text(LENGTHS[name][0] + i % LENGTHS[name][1]) for name in columns} for i in range(16)]


def reward(completions, **kwargs):
    return [float(len(set(completion.split()))) for completion in completions]


def reward_half(completions, prompts, **kwargs):
    """Of each second prompt, all completions have the same reward, so that they have no advantage."""
    known = sorted(set(map(str, prompts)))
    return [r * (known.index(str(p)) % 2) for r, p in zip(reward(completions), prompts, strict=True)]


def classes(name):
    """An experimental trainer, and its configuration."""
    module = importlib.import_module(f"trl.experimental.{name}")
    trainer = "OnlineDPO" if name == "online_dpo" else name.upper().replace("_", "")
    return getattr(module, f"{trainer}Trainer"), getattr(module, f"{trainer}Config")


def builder(kind, *columns, saved=True, messages=False, others=(), **own):
    """Makes trainers of a class, or of the name of an experimental one, on texts in some columns.

    They get ``others`` too: a ``ref_model``, a ``teacher_model``, ``reward_funcs``. Some load the model again from
    where it was ``saved``, or look there for a teacher's tokenizer.
    """

    def build(output, model, tokenizer, text, rows=None, rewards=reward, adapter=None, **options):
        trainer, config = classes(kind) if isinstance(kind, str) else (kind, None)
        config = config or getattr(trl, trainer.__name__.replace("Trainer", "Config"))
        if kind == "gold":  # which takes no other tokenizers
            bytes_alone, names = tokenizers.ByteLevelBPETokenizer(), {"pad_token": "<pad>", "eos_token": "<eos>"}
            bytes_alone.train_from_iterator([], 258, special_tokens=[*names.values()])
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_alone._tokenizer, **names)
            model = small(vocab_size=len(tokenizer), num_hidden_layers=2, tie_word_embeddings=True)
        tokenizer.padding_side = "left"
        tokenizer.chat_template = tokenizer.chat_template or "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        rows = [{**row, "label": i % 2 == 0} for i, row in enumerate(rows or rows_of(text, *columns))]
        if messages:
            told = ("user", "prompt"), ("assistant", "completion")
            rows = [{"messages": [{"role": who, "content": row[name]} for who, name in told]} for row in rows]
        other = None if others in ((), _REWARDS) else copy.deepcopy(model)  # ZeRO-3 splits what is loaded
        if saved:
            if not dist.is_initialized() or dist.get_rank() == 0:
                model.save_pretrained(output / "model")
                tokenizer.save_pretrained(output / "model")
            if dist.is_initialized():
                dist.barrier()
            model = type(model).from_pretrained(output / "model")
        given = {"reward_funcs": rewards} if "reward_funcs" in others else {}
        if "ref_model" in others:
            given["ref_model"] = None if adapter else other
        if "teacher_model" in others:
            other.config._name_or_path = str(output / "model")
            other.model.norm.weight.data.mul_(1.5)
            given["teacher_model"] = other
        if adapter:
            given["peft_config"] = lora(*adapter)
            if "lm_head" in adapter:  # of a head that shares its weight with the embedding, it would not be its alone
                model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
                model.config.tie_word_embeddings = False
        args, dataset = settings(config, output, **own | options), datasets.Dataset.from_list(rows)
        return trainer(model, args=args, train_dataset=dataset, processing_class=tokenizer, **given)

    return build


_SHORT = {"num_generations": 2, "max_completion_length": 6}
_ONLINE, _TAUGHT = {**_SHORT, "beta": 0.1}, {"lmbda": 0.0, "max_completion_length": 4}
_REWARDS, _TEACHER, _REFERENCE = ["reward_funcs"], ["teacher_model"], ["ref_model"]
sft = builder(trl.SFTTrainer, "prompt", "completion", saved=False)
dpo = builder(trl.DPOTrainer, "prompt", "chosen", "rejected", saved=False, others=_REFERENCE)
kto = builder(trl.KTOTrainer, "prompt", "completion", saved=False, others=_REFERENCE)
grpo = builder(trl.GRPOTrainer, "prompt", others=_REWARDS, **_ONLINE)
rloo = builder(trl.RLOOTrainer, "prompt", others=_REWARDS, **_ONLINE)
gmpo = builder("gmpo", "prompt", others=_REWARDS, **_ONLINE)
online_dpo = builder("online_dpo", "prompt", others=_REWARDS, max_new_tokens=6, top_k=0, disable_dropout=True)
distillation = builder(trl.DistillationTrainer, "prompt", others=_TEACHER, max_completion_length=6)
cpo, orpo = (builder(n, "prompt", "chosen", "rejected", saved=False, max_length=32) for n in ("cpo", "orpo"))
tpo = builder("tpo", "prompt", "chosen", "rejected", "reference", saved=False)
gkd = builder("gkd", "prompt", "completion", messages=True, others=_TEACHER, lmbda=0.0, max_new_tokens=4)
gold = builder("gold", "prompt", "completion", messages=True, others=_TEACHER, **_TAUGHT)
iw_opd = builder("iw_opd", "prompt", "completion", messages=True, others=_TEACHER, **_TAUGHT)
sdft = builder("sdft", "prompt", "privileged_context", **_SHORT)
sdpo = builder("sdpo", "prompt", "privileged_context", others=_REWARDS, **_SHORT)


def mixture(output, model, tokenizer, text, **options):
    """SFT of a mixture of experts, with its auxiliary loss."""
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    return sft(output, small("Mixtral", vocab_size=tokenizer.vocab_size, **experts), tokenizer, text, **options)


def rollouts(count):
    """Stands in for the worker that asynchronous GRPO gets its completions from."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    worker, g = mock.Mock(rollout_buffer=queue.Queue(), metrics_queue=queue.Queue()), torch.Generator().manual_seed(0)
    for i in range(count):
        length = 6 + i % 4
        ids = torch.randint(3, 19, (length,), generator=g).numpy()
        completion = (torch.arange(length) >= 3).numpy().astype("int64")
        logps = (-2.0 - torch.rand(length, generator=g)).numpy() * completion
        sample = RolloutSample([], [], ids, completion, logps, (-1.0) ** i, 0, i // 2, {}, time.time())
        worker.rollout_buffer.put(sample)
    return worker


def async_grpo(output, model, tokenizer, text, **options):
    import trl.experimental.async_grpo.async_grpo_trainer as module
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    model.save_pretrained(output / "model")
    with pytest.MonkeyPatch.context() as patch:
        # Its attention is a kernel for GPUs; any other sees the same in both runs.
        patch.setattr(module, "TREE_ATTENTION", "eager")
        patch.setattr(module, "register_tree_attention", lambda: None)
        patch.setattr(module, "VLLMClient", mock.Mock())
        patch.setattr(module, "get_peak_flops_per_device", lambda *_: 1.0)
        args = settings(AsyncGRPOConfig, output, num_generations=2, token_budget=40, **options)
        given = {"train_dataset": datasets.Dataset.from_list(rows_of(text, "prompt")), "processing_class": tokenizer}
        given |= {"rollout_worker": rollouts(64), "weight_transfer": mock.Mock(), "reward_funcs": reward}
        return AsyncGRPOTrainer(str(output / "model"), args=args, **given)


#: Half of the sequences have no advantage, nor another term in the loss, and take no part in the backward.
_HALF = {"beta": 0.0, "rewards": reward_half}
CASES = {
    "SFT": (sft, {}),
    "SFT, accumulated": (sft, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "SFT, checkpointing": (sft, {"gradient_checkpointing": True}),
    "SFT, packed": (sft, {"packing": True, "max_length": 16, "padding_free": False}),
    "SFT, bf16": (sft, {"bf16": True}),
    "SFT, LoRA": (sft, {"adapter": ("q_proj", "v_proj")}),
    "SFT, prompt tuning": (sft, {"adapter": ("virtual tokens",)}),
    "SFT, compiled": (sft, {"torch_compile": True, "torch_compile_backend": "eager"}),
    "SFT, experts": (mixture, {}),
    "DPO": (dpo, {}),
    "DPO, LoRA": (dpo, {"adapter": ("q_proj", "v_proj")}),
    "DPO, synchronised reference": (dpo, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "DPO, compiled": (dpo, {"torch_compile": True, "torch_compile_backend": "eager"}),
    "GRPO, compiled": (grpo, {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    "CPO, compiled": (cpo, {"torch_compile": True, "torch_compile_backend": "eager"}),
    "KTO": (kto, {}),
    "GRPO": (grpo, {}),
    "GRPO, entropy bonus": (grpo, {"entropy_coef": 0.05}),
    "GRPO, iterations": (grpo, {"num_iterations": 2, "loss_type": "dr_grpo", **_HALF}),
    "GRPO, accumulated, checkpointing": (
        grpo,
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "per_device_train_batch_size": 2, **_HALF},
    ),
    "GRPO, head in fp32, bf16": (grpo, {"cast_lm_head_to_fp32": True, "bf16": True, "optim": "sgd"}),
    "asynchronous GRPO": (async_grpo, {}),
    "GMPO": (gmpo, _HALF),
    "online DPO": (online_dpo, {}),
    "distillation": (distillation, {}),
    "distillation, JSD": (distillation, {"beta": 0.5, "temperature": 1.3}),
    "CPO": (cpo, {}),
    "CPO, bf16": (cpo, {"bf16": True}),
    "ORPO": (orpo, {}),
    "ORPO, LoRA": (orpo, {"adapter": ("q_proj", "lm_head")}),
    "ORPO, checkpointing": (orpo, {"gradient_checkpointing": True}),
    "TPO": (tpo, {}),
    "GKD": (gkd, {"beta": 0.3}),
    "GOLD": (gold, {"beta": 0.3}),
    "IW-OPD": (iw_opd, {"lmbda": 1.0}),
    "IW-OPD, JSD": (iw_opd, {"distillation_objective": "jsd", "beta": 0.5}),
    "SDFT": (sdft, {"distillation_topk": 5}),
    "SDFT, whole vocabulary": (sdft, {"distillation_mode": "full_logits", "distillation_alpha": 0.5}),
    "SDPO": (sdpo, {}),
    # Adam would make much of differences between gradients that are almost 0.
    "SDPO, top-k": (sdpo, {"distillation_mode": "topk_logits", "distillation_topk": 5, "optim": "sgd"}),
    "RLOO": (rloo, _HALF),
}


class Products:
    """Of the trained head, in the loss and backward of a trainer's first step: their work, and of how many tokens."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.model = next(m for m in trainer.model.modules() if isinstance(m, transformers.PreTrainedModel))
        self.positions, self.with_loss, self.work = [], [], Work(self.model.config.vocab_size)
        self.model.model.norm.register_forward_hook(self.count)
        # Online DPO has no compute_loss; what comes before is generation.
        of_loss = "_forward" if type(trainer).__name__ == "OnlineDPOTrainer" else "compute_loss"
        for owner, name in ((trainer, of_loss), (trainer.accelerator, "backward")):
            setattr(owner, name, functools.partial(self.counted, getattr(owner, name)))

    def count(self, module, arguments, hidden_states):
        if hidden_states.requires_grad and torch.is_grad_enabled() and self.trainer.state.global_step == 0:
            self.positions.append(hidden_states[..., 0].numel())
            hidden_states.register_hook(lambda gradient: self.with_loss.append(int((gradient != 0).any(-1).sum())))

    def counted(self, function, *arguments, **keywords):
        with self.work if self.trainer.state.global_step == 0 else contextlib.nullcontext():
            return function(*arguments, **keywords)

    def units(self, of_positions):
        """In N H V, where N is the number of positions, or of tokens with loss."""
        config = self.model.config
        tokens = sum(self.positions if of_positions else self.with_loss)
        return self.work.flops / (tokens * config.hidden_size * config.vocab_size)


def train(build, output, on, kernels=False, watch=lambda trainer: None, **options):
    """The logged numbers of each step, and the trained parameters."""
    compiled = options.get("torch_compile", False)
    model, tokenizer, text = tiny_model()  # which seeds what is drawn
    if on:
        enable(kernels=kernels)
    trainer = build(output, model, tokenizer, text, **options)
    if on:
        watch(trainer)
        step = trainer.training_step

        def watched(model, inputs, *arguments):
            vocab_size = trainer.model.config.get_text_config().vocab_size
            # Nothing is compiled within a dispatch mode.
            mode = contextlib.nullcontext() if compiled else NoLogits(vocab_size)
            with mode, warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*needs the values")
                return step(model, inputs, *arguments)

        trainer.training_step = watched
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with engine_calls() as calls:
        trainer.train()
    assert bool(calls) == on  # the engine computes the loss
    if compiled:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    disable()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return logged, {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


#: What depends on the clock.
_TIMES = ("time", "per_second", "runtime", "epoch", "perf/")


def check_training(build, tmp_path, kernels=False, watch=lambda trainer: None, **options):
    """Train plain and enabled from one seed: the same numbers are logged, the weights, which it returns, are the same,
    no logits."""
    plain, expected = train(build, tmp_path / "plain", False, **options)
    ours, found = train(build, tmp_path / "ours", True, kernels, watch, **options)
    bf16 = options.get("bf16", False)
    assert len(plain) == len(ours) == STEPS
    assert all(row["grad_norm"] > 0 for row in plain)
    for a, b in zip(plain, ours, strict=True):
        assert set(a) == set(b)
        for key, value in a.items():
            if isinstance(value, float) and not any(word in key for word in _TIMES) and not math.isnan(value):
                tolerance = {"rel": 0.05, "abs": 0.02} if bf16 else {"rel": 2e-3, "abs": 2e-4}
                assert b[key] == pytest.approx(value, **tolerance), key
    for key, value in expected.items():
        torch.testing.assert_close(whole(found[key]), whole(value), rtol=1e-2, atol=0.03 if bf16 else 2e-3, msg=key)
    return [(found[key], value) for key, value in expected.items()]
