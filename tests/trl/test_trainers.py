"""TRL's trainers, plain and enabled: the same losses, gradients and metrics, and no logits in training."""

import contextlib
import copy
import functools
import gc
import math
import warnings
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch._dynamo.utils
from torch.utils._python_dispatch import TorchDispatchMode

from liger_losses.chunked.engine import ops
from tests.project.test_examples import tiny_model
from tests.trl_servers import Rollouts, Server, rollouts

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

from liger_losses.patching.swap import replacement_of  # noqa: E402
from liger_losses.trl import disable, enable, enabled, is_enabled  # noqa: E402
from liger_losses.trl.patch_points import PATCH_POINTS  # noqa: E402

STEPS = 3


@pytest.fixture(autouse=True)
def always_disabled():
    yield
    disable()


class NoLogits(TorchDispatchMode):
    """Fails where logits of sequences are made, [batch, length, vocab]; the engine's blocks of tokens have no batch."""

    def __init__(self, vocab, pair_allowed):
        self.vocab, self.allowed = vocab, 2 if pair_allowed else 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 3 and tensor.shape[1] > 1:  # generation makes 1
                if tensor.shape[0] <= self.allowed:
                    continue
                assert tensor.shape[-1] != self.vocab, f"{func} made {tuple(tensor.shape)}"
        return out


def settings(config, output, **options):
    common = {
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "seed": 0,
    }
    return config(output_dir=str(output), **{**common, **options})


def lora(*targets):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    if targets == ("virtual tokens",):
        return peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    if targets == ("some tokens",):  # of the embedding, and of the head, which shares its weight
        return peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 4], task_type="CAUSAL_LM")
    return peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM")


def mixture(output, model, tokenizer, text, **options):
    """SFT of a mixture of experts, with its auxiliary loss."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    return sft(output, MixtralForCausalLM(config), tokenizer, text, **options)


def sft(output, model, tokenizer, text, **options):
    rows = datasets.Dataset.from_list([{"prompt": text(3), "completion": text(2 + i % 5)} for i in range(16)])
    adapter, metrics = options.pop("adapter", None), options.pop("compute_metrics", None)
    return trl.SFTTrainer(
        model,
        settings(trl.SFTConfig, output, **options),
        train_dataset=rows,
        processing_class=tokenizer,
        compute_metrics=metrics,
        **({"peft_config": lora(*adapter)} if adapter else {}),
    )


def dpo(output, model, tokenizer, text, **options):
    rows = [{"prompt": text(3), "chosen": text(2 + i % 5), "rejected": text(1 + i % 4)} for i in range(16)]
    adapter = options.pop("adapter", None)
    return trl.DPOTrainer(
        model,
        None if adapter else copy.deepcopy(model),
        args=settings(trl.DPOConfig, output, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        **({"peft_config": lora(*adapter)} if adapter else {}),
    )


def kto(output, model, tokenizer, text, **options):
    rows = [{"prompt": text(3), "completion": text(2 + i % 5), "label": i % 2 == 0} for i in range(16)]
    return trl.KTOTrainer(
        model,
        copy.deepcopy(model),
        args=settings(trl.KTOConfig, output, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def reward(completions, **kwargs):
    return [float(len(set(completion.split()))) for completion in completions]


def online(trainer, config, **own):
    own = own or {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}

    def build(output, model, tokenizer, text, **options):
        rows = datasets.Dataset.from_list([{"prompt": text(3)} for _ in range(16)])
        given = {**own, **options}
        tokenizer.padding_side = "left"
        model.save_pretrained(output / "model")  # the reference is loaded from where the model came from
        return trainer(
            type(model).from_pretrained(output / "model"),
            reward_funcs=reward,
            args=settings(config, output, **given),
            train_dataset=rows,
            processing_class=tokenizer,
        )

    return build


def distillation(output, model, tokenizer, text, **options):
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    tokenizer.padding_side = "left"
    return trl.DistillationTrainer(
        model=model,
        teacher_model=teacher,
        args=settings(trl.DistillationConfig, output, max_completion_length=6, **options),
        train_dataset=datasets.Dataset.from_list([{"prompt": text(3)} for _ in range(16)]),
        processing_class=tokenizer,
    )


def preference(trainer):
    """CPO's and ORPO's rows are of text."""

    def build(output, model, tokenizer, text, **options):
        rows = [{"prompt": text(3), "chosen": text(2 + i % 5), "rejected": text(1 + i % 4)} for i in range(16)]
        module = __import__(f"trl.experimental.{trainer}", fromlist=["*"])
        name, adapter = trainer.upper(), options.pop("adapter", None)
        if adapter:  # of a head that shares its weight with the embedding, it would not be the head's alone
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
            model.config.tie_word_embeddings = False
        return getattr(module, f"{name}Trainer")(
            model,
            settings(getattr(module, f"{name}Config"), output, max_length=32, **options),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            **({"peft_config": lora(*adapter)} if adapter else {}),
        )

    return build


def tpo(output, model, tokenizer, text, **options):
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    rows = [
        {"prompt": text(3), "chosen": text(2 + i % 5), "rejected": text(1 + i % 4), "reference": text(3)}
        for i in range(16)
    ]
    return TPOTrainer(
        model,
        args=settings(TPOConfig, output, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def of_bytes(model):
    """A model as the given one, with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    config = copy.deepcopy(model.config)
    config.vocab_size = len(names)
    torch.manual_seed(0)
    return type(model)(config), tokenizer


def from_a_teacher(name, trainer, **own):
    """GKD, GOLD and IW-OPD: completions of the data, and a teacher in the same process."""

    def build(output, model, tokenizer, text, **options):
        module = __import__(f"trl.experimental.{name}", fromlist=["*"])
        if name == "gold":  # which takes no other tokenizers
            model, tokenizer = of_bytes(model)
        teacher = copy.deepcopy(model)
        with torch.no_grad():
            teacher.model.norm.weight.mul_(1.5)
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        tokenizer.padding_side = "left"
        # Whose tokenizer is looked at, to be the student's.
        tokenizer.save_pretrained(output / "model")
        teacher.config._name_or_path = model.config._name_or_path = str(output / "model")
        rows = [
            {"messages": [{"role": "user", "content": text(3)}, {"role": "assistant", "content": text(2 + i % 5)}]}
            for i in range(16)
        ]
        if options.get("use_uld_loss"):
            own["teacher_tokenizer_name_or_path"] = str(output / "model")
        return getattr(module, f"{trainer}Trainer")(
            model=model,
            teacher_model=teacher,
            args=settings(getattr(module, f"{trainer}Config"), output, **{**own, **options}),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )

    return build


def self_distillation(name, trainer):
    """SDFT and SDPO: a teacher that is the model itself, told more."""

    def build(output, model, tokenizer, text, **options):
        module = __import__(f"trl.experimental.{name}", fromlist=["*"])
        rows = [{"prompt": text(3), "privileged_context": text(2 + i % 3)} for i in range(16)]
        tokenizer.padding_side = "left"
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        rewards = {"reward_funcs": reward} if name == "sdpo" else {}
        model.save_pretrained(output / "model")  # the teacher is loaded from where the model came from
        model = type(model).from_pretrained(output / "model")
        options = {"num_generations": 2, **options}
        return getattr(module, f"{trainer}Trainer")(
            model,
            args=settings(getattr(module, f"{trainer}Config"), output, max_completion_length=6, **options),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            **rewards,
        )

    return build


def a2po(output, model, tokenizer, text, **options):
    from trl.experimental.a2po import A2POConfig, A2POTrainer

    return online(A2POTrainer, A2POConfig, max_completion_length=6, num_value_samples=2)(
        output, model, tokenizer, text, **options
    )


def online_dpo(output, model, tokenizer, text, **options):
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    given = {"max_new_tokens": 6, "top_k": 0, "disable_dropout": True}
    return online(OnlineDPOTrainer, OnlineDPOConfig, **given)(output, model, tokenizer, text, **options)


def gmpo(output, model, tokenizer, text, **options):
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    return online(GMPOTrainer, GMPOConfig)(output, model, tokenizer, text, **options)


def async_grpo(output, model, tokenizer, text, worker=False, **options):
    import trl.experimental.async_grpo.async_grpo_trainer as module
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    model.save_pretrained(output / "model")
    with pytest.MonkeyPatch.context() as patch:
        # Its attention is a kernel for GPUs; any other sees the same in both runs.
        patch.setattr(module, "TREE_ATTENTION", "eager")
        patch.setattr(module, "register_tree_attention", lambda: None)
        patch.setattr(module, "VLLMClient", lambda *_: Rollouts(0))  # its methods do nothing
        patch.setattr(module, "get_peak_flops_per_device", lambda *_: 1.0)
        return AsyncGRPOTrainer(
            str(output / "model"),
            reward_funcs=reward,
            args=settings(AsyncGRPOConfig, output, num_generations=2, token_budget=40, **options),
            train_dataset=datasets.Dataset.from_list([{"prompt": text(3)} for _ in range(16)]),
            processing_class=tokenizer,
            rollout_worker=rollouts(text, tokenizer) if worker else Rollouts(64),
            weight_transfer=Rollouts(0),
        )


def from_a_server(output, model, tokenizer, text, **options):
    from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

    tokenizer.padding_side = "left"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl.generation.vllm_client.VLLMClient", Server)
        return ServerDistillationTrainer(
            model=model,
            args=settings(
                ServerDistillationConfig,
                output,
                max_completion_length=6,
                teacher_model_server_url="http://localhost",
                **options,
            ),
            train_dataset=datasets.Dataset.from_list([{"prompt": text(3)} for _ in range(16)]),
            processing_class=tokenizer,
        )


gkd = from_a_teacher("gkd", "GKD", lmbda=0.0, max_new_tokens=4)
gold = from_a_teacher("gold", "GOLD", lmbda=0.0, max_completion_length=4)
iw_opd = from_a_teacher("iw_opd", "IWOPD", lmbda=0.0, max_completion_length=4)
sdft, sdpo = self_distillation("sdft", "SDFT"), self_distillation("sdpo", "SDPO")


CASES = {
    "SFT": (sft, {}),
    "SFT, dft": (sft, {"loss_type": "dft"}),
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
    "DPO, several losses": (dpo, {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}),
    "DPO, WPO": (dpo, {"use_weighting": True, "precompute_ref_log_probs": True}),
    "DPO, length-desensitised": (dpo, {"ld_alpha": 0.4}),
    "DPO, synchronised reference": (dpo, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "DPO, compiled": (dpo, {"torch_compile": True, "torch_compile_backend": "eager"}),
    "GRPO, compiled": (
        online(trl.GRPOTrainer, trl.GRPOConfig),
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ),
    "CPO, compiled": (preference("cpo"), {"torch_compile": True, "torch_compile_backend": "eager"}),
    "KTO": (kto, {}),
    "GRPO": (online(trl.GRPOTrainer, trl.GRPOConfig), {}),
    "GRPO, sequences": (
        online(trl.GRPOTrainer, trl.GRPOConfig),
        {"importance_sampling_level": "sequence", "top_entropy_quantile": 0.5},
    ),
    "GRPO, entropy bonus": (online(trl.GRPOTrainer, trl.GRPOConfig), {"entropy_coef": 0.05}),
    "GRPO, iterations": (online(trl.GRPOTrainer, trl.GRPOConfig), {"num_iterations": 2, "loss_type": "dr_grpo"}),
    "GRPO, head in fp32": (online(trl.GRPOTrainer, trl.GRPOConfig), {"cast_lm_head_to_fp32": True}),
    "GRPO, head in fp32, bf16": (
        online(trl.GRPOTrainer, trl.GRPOConfig),
        {"cast_lm_head_to_fp32": True, "bf16": True, "optim": "sgd"},
    ),
    "asynchronous GRPO": (async_grpo, {}),
    "asynchronous GRPO, its own worker": (async_grpo, {"worker": True}),
    "GMPO": (gmpo, {}),
    "A2PO": (a2po, {}),
    "online DPO": (online_dpo, {}),
    "distillation": (distillation, {}),
    "distillation, JSD": (distillation, {"beta": 0.5, "temperature": 1.3}),
    "CPO": (preference("cpo"), {}),
    "SimPO": (preference("cpo"), {"loss_type": "simpo", "cpo_alpha": 0.5}),
    "CPO, bf16": (preference("cpo"), {"bf16": True}),
    "ORPO": (preference("orpo"), {}),
    "ORPO, LoRA": (preference("orpo"), {"adapter": ("q_proj", "lm_head")}),
    "ORPO, checkpointing": (preference("orpo"), {"gradient_checkpointing": True}),
    "TPO": (tpo, {}),
    "GKD": (gkd, {"beta": 0.3}),
    "GOLD": (gold, {"beta": 0.3}),
    "GOLD, across tokenizers": (gold, {"use_uld_loss": True, "uld_crossentropy_weight": 0.5}),
    "GOLD, hybrid": (gold, {"use_uld_loss": True, "uld_use_hybrid_loss": True, "uld_crossentropy_weight": 0.5}),
    "IW-OPD": (iw_opd, {"lmbda": 1.0}),
    "IW-OPD, JSD": (iw_opd, {"distillation_objective": "jsd", "beta": 0.5}),
    "server distillation": (from_a_server, {"beta": 0.0, "loss_top_k": 4}),
    "server distillation, JSD": (from_a_server, {"beta": 0.5, "loss_top_k": 1}),
    "SDFT": (sdft, {"distillation_topk": 5}),
    "SDFT, whole vocabulary": (sdft, {"distillation_mode": "full_logits", "distillation_alpha": 0.5}),
    "SDPO": (sdpo, {}),
    # Adam would make much of differences between gradients that are almost 0.
    "SDPO, top-k": (sdpo, {"distillation_mode": "topk_logits", "distillation_topk": 5, "optim": "sgd"}),
    "RLOO": (online(trl.RLOOTrainer, trl.RLOOConfig), {}),
}


def train(build, output, on, kernels=False, **options):
    """The logged numbers of each step, and the trained parameters."""
    compiled = options.get("torch_compile", False)
    model, tokenizer, text = tiny_model()
    torch.manual_seed(0)
    if on:
        enable(kernels=kernels)
    trainer = build(output, model, tokenizer, text, **options)
    if on:
        step = trainer.training_step

        def watched(model, inputs, *arguments):
            # GOLD across tokenizers sorts rows: those of one answer, the student's and the teacher's, are there.
            vocab_size = trainer.model.config.get_text_config().vocab_size
            # Nothing is compiled within a dispatch mode.
            mode = contextlib.nullcontext() if compiled else NoLogits(vocab_size, options.get("use_uld_loss"))
            with mode, warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*needs the values")
                return step(model, inputs, *arguments)

        trainer.training_step = watched
    torch.manual_seed(1)
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with mock.patch.object(ops, "make_call", wraps=ops.make_call) as calls:
        trainer.train()
    assert bool(calls.call_count) == on  # the engine computes the loss
    if compiled:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    disable()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return logged, {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


#: What depends on the clock.
_TIMES = ("time", "per_second", "runtime", "epoch", "perf/")


#: ``make test`` leaves out those that take long.
_SLOW = ("DPO, compiled", "GRPO, compiled")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in CASES])
def test_training_is_the_same_and_makes_no_logits(name, tmp_path):
    build, options = CASES[name]
    check_training(build, tmp_path, **options)


def check_training(build, tmp_path, **options):
    """Train plain and enabled from one seed: the same numbers are logged, the weights are the same, no logits."""
    plain, expected = train(build, tmp_path / "plain", False, **options)
    ours, found = train(build, tmp_path / "ours", True, **options)
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
        torch.testing.assert_close(found[key], value, rtol=1e-2, atol=0.03 if bf16 else 2e-3, msg=key)


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


def forward_outputs(model, ids, labels, outputs, add, **options):
    model = copy.deepcopy(model)
    add(model, outputs=outputs, **options)
    found = model(input_ids=ids, labels=labels, fused_lm_head=True)
    weights = torch.linspace(0.5, 1.5, found.log_probs.numel()).view_as(found.log_probs)
    total = found.loss + (weights * found.log_probs).sum()
    if found.entropy is not None:
        total = total + (weights * found.entropy).sum()
    total.backward()
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("one_pass", [True, False])
def test_the_contract_of_the_head(one_pass, temperature):
    from trl.trainer.utils import add_fused_lm_head as theirs

    from liger_losses.trl.fused_head import add_fused_lm_head as ours

    model, _, _ = tiny_model()
    ids = torch.randint(3, 19, (3, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.rand(3, 9, generator=torch.Generator().manual_seed(1)) < 0.4, -100)
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    expected = forward_outputs(model, ids, labels, outputs, theirs, temperature=temperature)
    found = forward_outputs(model, ids, labels, outputs, ours, temperature=temperature, one_pass=one_pass)
    for name in (*outputs, "loss", "label_mask"):
        a, b = getattr(expected[0], name), getattr(found[0], name)
        torch.testing.assert_close(b, a.to(b.dtype), rtol=1e-4, atol=1e-5, msg=name)
    assert expected[1].keys() == found[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_the_head_in_fp32():
    """A model in bf16 whose head has been cast, and whose head's forward casts its input, as GRPO's trainer does it."""
    from trl.trainer.utils import add_fused_lm_head as theirs

    from liger_losses.trl.fused_head import add_fused_lm_head as ours

    model = tiny_model()[0]
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.model.bfloat16()
    ids = torch.randint(3, 19, (3, 9), generator=torch.Generator().manual_seed(0))
    results = []
    for add in (theirs, ours):

        def cast_and_add(model, add=add, **options):
            head = model.lm_head
            head.forward = lambda hidden: torch.nn.functional.linear(hidden.float(), head.weight.float())
            add(model, cast_lm_head_to_fp32=True, **options)

        results.append(forward_outputs(model, ids, ids, ("log_probs", "entropy"), cast_and_add))
    for name in ("log_probs", "entropy", "loss"):
        torch.testing.assert_close(*(getattr(found, name) for found, _ in results), rtol=1e-5, atol=1e-6, msg=name)
    assert results[0][1].keys() == results[1][1].keys()
    for name, gradient in results[0][1].items():
        tolerance = 1e-5 if name == "lm_head.weight" else 2e-2  # of bf16
        torch.testing.assert_close(results[1][1][name], gradient, rtol=tolerance, atol=tolerance, msg=name)


def test_the_head_of_shifted_labels_without_padding():
    """As asynchronous GRPO calls it: one row of several sequences, labels shifted by the caller."""
    from trl.trainer.utils import add_fused_lm_head as theirs

    from liger_losses.trl.fused_head import add_fused_lm_head as ours

    model, _, _ = tiny_model()
    ids = torch.randint(3, 19, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    labels = ids.roll(-1, 1).masked_fill(positions.roll(-1, 1) == 0, -100)
    results = []
    for add in (theirs, ours):
        other = copy.deepcopy(model)
        add(other, temperature=0.9, outputs=("log_probs", "entropy"))
        found = other(input_ids=ids, position_ids=positions, shift_labels=labels, fused_lm_head=True)
        found.log_probs.exp().sum().backward()
        gradients = [p.grad for p in other.parameters()]
        results.append([found.log_probs.detach(), found.entropy.detach(), found.label_mask, *gradients])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_metrics_of_evaluation(tmp_path):
    """``compute_metrics`` sees the logits, which an extra forward computes; the loss is the same."""
    found = []
    for on in (False, True):
        model, tokenizer, text = tiny_model()
        seen = []

        def accuracy(prediction, seen=seen):
            seen.append(torch.as_tensor(prediction.predictions))
            return {"mean": float(prediction.predictions.mean())}

        with enabled() if on else contextlib.nullcontext():
            trainer = sft(tmp_path / str(on), model, tokenizer, text, compute_metrics=accuracy)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                result = trainer.evaluate(trainer.train_dataset)
        found.append((result["eval_loss"], result["eval_mean"], result["eval_entropy"], *seen))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(b), torch.as_tensor(a), rtol=1e-4, atol=1e-5)


def test_the_forward_without_it_is_the_models_own():
    from liger_losses.trl.fused_head import add_fused_lm_head

    model, _, _ = tiny_model()
    ids = torch.randint(3, 19, (2, 7))
    with torch.no_grad():
        before = model(input_ids=ids, labels=ids)
        generated = model.generate(ids, max_new_tokens=4, do_sample=False)
        add_fused_lm_head(model)
        model(input_ids=ids, labels=ids, fused_lm_head=True)
        after = model(input_ids=ids, labels=ids)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), generated)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.loss, after.loss)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.mul_(2.0)
        a, b = (m(input_ids=ids, labels=ids, fused_lm_head=True).loss for m in (model, other))
    assert a != b


def test_models_it_cannot_serve_are_refused():
    from liger_losses.trl.fused_head import add_fused_lm_head

    model, _, _ = tiny_model()
    ids = torch.randint(3, 19, (2, 7))
    with pytest.raises(ValueError, match="unknown outputs"):
        add_fused_lm_head(model, outputs=("log_probs", "logits"))
    add_fused_lm_head(model)
    with pytest.raises(ValueError, match="needs labels"):
        model(input_ids=ids, fused_lm_head=True)
    inner = model.lm_head
    model.lm_head = torch.nn.Sequential(inner, torch.nn.Softmax(-1))
    model.lm_head.weight = inner.weight
    with (
        pytest.raises(TypeError, match="must be LazyLogits here, got Tensor"),
        pytest.warns(RuntimeWarning, match="softmax"),
    ):
        model(input_ids=ids, labels=ids, fused_lm_head=True)


def test_a_teacher_whose_head_cannot_be_lazy_is_used_as_it_is():
    from liger_losses.patching.lazy_head import LazyLinear
    from liger_losses.trl.experimental import with_lazy_heads

    class Quantised(torch.nn.Linear):
        pass

    class Trainer:
        @with_lazy_heads
        def __init__(self, model, teacher_model):
            self.model, self.teacher_model = model, teacher_model

    model, teacher = tiny_model()[0], tiny_model()[0]
    teacher.lm_head.__class__ = Quantised
    with pytest.warns(UserWarning, match=r"Quantised is not torch.nn.Linear\): as teacher_model, it computes"):
        Trainer(model, teacher)
    assert type(model.lm_head) is LazyLinear
    with pytest.raises(TypeError, match="train it outside"):
        Trainer(teacher, model)


@pytest.mark.parametrize(
    ("targets", "error", "parameter"),
    [(("q_proj", "lm_head"), ValueError, "lm_head.lora"), (("some tokens",), AttributeError, "trainable_tokens_delta")],
)
def test_adapters_on_the_head_train(targets, error, parameter, tmp_path):
    """TRL refuses them; here the adapter is part of the logits, with the gradient that the model's own loss gives."""
    with pytest.raises(error):
        train(sft, tmp_path / "plain", False, adapter=targets)
    _, trained = train(sft, tmp_path / "ours", True, adapter=targets)
    assert any(parameter in name for name in trained)

    import peft

    from liger_losses.trl.fused_head import add_fused_lm_head

    model, _, _ = tiny_model()
    if "lm_head" in targets:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    add_fused_lm_head(model)
    adapted = peft.get_peft_model(model, lora(*targets))
    ids = torch.randint(3, 19, (3, 9), generator=torch.Generator().manual_seed(0))
    results = []
    for options in ({}, {"fused_lm_head": True}):
        adapted.zero_grad()
        loss = adapted(input_ids=ids, labels=ids, **options).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in adapted.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 4
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_asynchronous_distillation(beta, tail):
    """Its rollouts come from elsewhere; what it computes of them is one function."""
    import trl.experimental.async_distillation.async_distillation_trainer as module

    from liger_losses.trl.divergences import chunked_jsd_loss

    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=g) for shape in ((11, 6), (23, 6), (23,)))
    columns = torch.stack([torch.randperm(23, generator=g)[:4] for _ in range(11)])
    teacher = torch.randn(11, 23, generator=g).log_softmax(-1).gather(1, columns)
    there = torch.rand(11, 4, generator=g) < 0.7
    there[:, 0] = True
    columns = torch.where(there, columns, -1)
    results = []
    for function in (module._chunked_jsd_loss, chunked_jsd_loss):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        loss, *sums = function(*leaves, 1.3, 5.0, columns, teacher, there, beta, 0.7, tail, torch.arange(11) % 2, 2, 4)
        results.append([loss.detach(), *sums, *torch.autograd.grad(loss, leaves)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # As with a head that is kept in fp32; TRL's product is in fp32 then.
    leaves = [t.requires_grad_() for t in (hidden.bfloat16(), weight, bias)]
    loss, *_ = chunked_jsd_loss(*leaves, 1.3, 5.0, columns, teacher, there, beta, 0.7, tail, None, 2, 4)
    assert [g.dtype for g in torch.autograd.grad(loss, leaves)] == [t.dtype for t in leaves]
