"""Distillation of verl, called as its own code calls it."""

import importlib
import types

import pytest
import torch

from liger_losses.integrations import verl_distillation
from tests.reference import double, plain_statistics, problem, relative_error

LOSSES = """
def get_ulysses_sequence_parallel_world_size():
    return 1

def compute_forward_kl_topk(student_logits, teacher_topk_log_probs, teacher_topk_ids, config, data_format):
    return "verl's"
"""
ENGINE = """
import types

tu = types.SimpleNamespace(get_non_tensor_data=lambda data, key, default: data.get(key, default))

class FSDPEngineWithLMHead:
    use_ulysses_sp = False

    def prepare_model_inputs(self, micro_batch):
        return {"input_ids": micro_batch["input_ids"]}, {}

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        return output
"""


PACKING = """
import torch

def preprocess_thd_engine(input_ids, need_roll=False, pad=0):
    rows = torch.cat([row.roll(-1, 0) if need_roll else row for row in input_ids.unbind()])
    return torch.cat([rows, rows.new_zeros(pad, *rows.shape[1:])])[None], None

def postprocess_thd_engine(output, input_ids):
    return torch.nested.nested_tensor_from_jagged(output[0, :input_ids.values().shape[0]], input_ids.offsets())
"""
FUSED = """
from verl.models.mcore.util import postprocess_thd_engine, preprocess_thd_engine

def fused_forward(model, input_ids, labels):
    packed, _ = preprocess_thd_engine(labels, need_roll=True, pad=2)
    logps, entropy = model(packed)
    return {"log_probs": postprocess_thd_engine(logps.view(1, -1), input_ids)}
"""
MEGATRON_ENGINE = """
import types

from verl.models.mcore.model_forward_fused import fused_forward

tu = types.SimpleNamespace(get_non_tensor_data=lambda data, key, default: data.get(key, default))

class MegatronEngineWithLMHead:
    engine_config = types.SimpleNamespace(use_fused_kernels=True)

    def forward_step(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func):
        batch = next(batch_iter)
        return fused_forward(model, batch["input_ids"], batch["input_ids"]), postprocess_micro_batch_func
"""


def distilled(engine, hidden, weight, labels, batch, loss):
    """What verl's engine does with a micro-batch of packed sequences."""
    from liger_losses.integrations.verl import fused_linear_for_ppo

    _, arguments = engine.prepare_model_inputs(batch)
    logps, entropy = fused_linear_for_ppo(None, hidden, weight, labels, 0.7)
    output = types.SimpleNamespace(log_probs=logps, entropy=entropy)
    return engine.prepare_model_outputs(output, arguments, batch, loss)


@pytest.fixture
def verl_engine(framework, installed):
    losses, engine = verl_distillation._FSDP, verl_distillation._FSDP_ENGINE
    framework(**{losses: LOSSES, engine: ENGINE})
    installed(verl_distillation.REPLACEMENTS)
    return importlib.import_module(engine).FSDPEngineWithLMHead(), importlib.import_module(losses)


def test_distillation_of_verl(verl_engine):
    engine, losses = verl_engine
    hidden, weight, labels, _ = problem(shape=(1, 9), masked=0.0)
    exact = double(hidden, weight)
    teacher = torch.randn(9, 61, generator=torch.Generator().manual_seed(3)).mul(3).log_softmax(-1).topk(5)
    nested = [torch.nested.nested_tensor_from_jagged(value, torch.tensor([0, 4, 9])) for value in teacher]
    batch = {"input_ids": labels, "teacher_logprobs": nested[0], "teacher_ids": nested[1], "use_fused_kernels": True}
    config = types.SimpleNamespace(distillation_loss=types.SimpleNamespace(log_prob_min_clamp=-4.0))

    def loss(student_logits, data):
        return losses.compute_forward_kl_topk(student_logits, data["teacher_logprobs"], data["teacher_ids"], config, "")

    plain = distilled(engine, hidden, weight, labels, batch, loss)
    assert not hasattr(plain, "fused_linear_aux")
    batch["distillation_use_topk"] = True
    found = distilled(engine, hidden, weight, labels, {**batch, "calculate_entropy": True}, loss)
    torch.testing.assert_close((found.log_probs, found.entropy), (plain.log_probs, plain.entropy))
    log_p = (exact[0] @ exact[1].t() / 0.7).log_softmax(-1).squeeze(0).gather(-1, teacher.indices)
    q, p = teacher.values.double(), log_p.clamp(min=-4.0)
    assert (log_p < -4.0).any()
    assert (log_p > -4.0).any()
    expected = (q.clamp(min=-4.0).exp() * (q.clamp(min=-4.0) - p)).sum(-1)
    aux = found.fused_linear_aux
    for name, value in (
        ("distillation_losses", expected),
        ("student_mass", log_p.exp().sum(-1)),
        ("teacher_mass", q.exp().sum(-1)),
    ):
        assert getattr(aux, name).shape == (1, 9)
        assert relative_error(getattr(aux, name).squeeze(0), value) < 1e-5, name
    upstream = torch.linspace(-1, 1, 9)
    grads = torch.autograd.grad(
        (aux.distillation_losses, found.log_probs), (hidden, weight), (upstream[None], upstream[None])
    )
    logp = plain_statistics(*exact, labels, temperature=0.7)["logp"].squeeze(0)
    exact_grads = torch.autograd.grad((expected, logp), exact, (upstream.double(), upstream.double()))
    for ours, value in zip(grads, exact_grads, strict=True):
        assert relative_error(ours, value) < 1e-5
    # FSDP gathers the head's weight in a hook on the model's output, before the head's backward.
    alone = distilled(engine, hidden, weight, labels, batch, loss)
    assert alone.entropy is None
    order = []
    hidden.register_hook(lambda grad: order.append("hidden states"))
    alone.log_probs.register_hook(lambda grad: order.append("output"))
    alone.fused_linear_aux.distillation_losses.sum().backward()
    assert order == ["output", "hidden states"]
    assert losses.compute_forward_kl_topk(hidden, None, None, None, "") == "verl's"


def test_distillation_of_verls_megatron_engine(framework, installed):
    names = verl_distillation
    framework(
        **{
            names._MEGATRON: LOSSES,
            "verl.models.mcore.util": PACKING,
            names._MEGATRON_HEAD: FUSED,
            names._MEGATRON_ENGINE: MEGATRON_ENGINE,
        }
    )
    installed(verl_distillation.REPLACEMENTS)
    from liger_losses.integrations.verl import linear_cross_entropy

    losses = importlib.import_module(names._MEGATRON)
    engine = importlib.import_module(names._MEGATRON_ENGINE).MegatronEngineWithLMHead()
    hidden, weight, _, _ = problem(n=12, masked=0.0)  # 10 tokens and 2 of padding
    exact = double(hidden, weight)
    teacher = torch.randn(10, 61, generator=torch.Generator().manual_seed(3)).mul(3).log_softmax(-1).topk(5)
    ids = torch.arange(10)
    ids, logps, columns = (
        torch.nested.nested_tensor_from_jagged(value, torch.tensor([0, 5, 10])) for value in (ids, *teacher)
    )
    batch = {"input_ids": ids, "teacher_logprobs": logps, "teacher_ids": columns, "distillation_use_topk": True}
    config = types.SimpleNamespace(distillation_loss=types.SimpleNamespace(log_prob_min_clamp=-4.0))

    def loss(student_logits, data, data_format):
        assert data_format == "thd"
        return losses.compute_forward_kl_topk(
            student_logits=student_logits,
            teacher_topk_log_probs=data["teacher_logprobs"],
            teacher_topk_ids=data["teacher_ids"],
            config=config,
            data_format=data_format,
        )

    def model(labels):
        return linear_cross_entropy(hidden[:, None], weight, labels, 0.7)

    def step(**changes):
        return engine.forward_step(
            iter([{**batch, **changes}]), model, logits_processor_func=loss, postprocess_micro_batch_func="post"
        )

    found, post = step()
    assert post == "post"
    labels = torch.tensor([*range(1, 5), 0, *range(6, 10), 5])
    logp = plain_statistics(exact[0][:10], exact[1], labels, temperature=0.7)["logp"]
    log_p = (exact[0][:10] @ exact[1].t() / 0.7).log_softmax(-1).gather(-1, teacher.indices).clamp(min=-4.0)
    q = teacher.values.double().clamp(min=-4.0)
    expected = (q.exp() * (q - log_p)).sum(-1)
    for name, value in (
        ("log_probs", logp),
        ("distillation_losses", expected),
        ("student_mass", log_p.exp().sum(-1)),
        ("teacher_mass", q.exp().sum(-1)),
    ):
        assert relative_error(found[name].values(), value) < 1e-5, name
    upstream = torch.linspace(-1, 1, 10)
    grads = torch.autograd.grad(found["distillation_losses"].values(), (hidden, weight), upstream)
    for ours, value in zip(grads, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        assert relative_error(ours, value) < 1e-5
    assert set(step(distillation_use_topk=False)[0]) == {"log_probs"}
    assert importlib.import_module("verl.models.mcore.util").preprocess_thd_engine.__name__ == "preprocess_thd_engine"
    assert not hasattr(importlib.import_module("verl.models.mcore.util").preprocess_thd_engine, "__wrapped__")


def test_distillation_of_verl_says_what_does_not_fit(verl_engine):
    engine, _ = verl_engine
    hidden, weight, labels, _ = problem(shape=(1, 9), masked=0.0)
    columns = torch.nested.nested_tensor_from_jagged(torch.zeros(8, 5, dtype=torch.int64), torch.tensor([0, 8]))
    batch = {"input_ids": labels, "teacher_ids": columns, "teacher_logprobs": columns.float()}
    batch |= {"use_fused_kernels": True, "distillation_use_topk": True}
    try:
        with pytest.raises(ValueError, match="columns are of 8 tokens, the student's of 9"):
            distilled(engine, hidden, weight, labels, batch, None)
    finally:
        engine.prepare_model_inputs({"input_ids": labels})


def test_distillation_of_verl_of_no_tokens(verl_engine):
    engine, _ = verl_engine
    hidden, weight, labels, _ = problem(shape=(1, 9), masked=0.0)
    columns = torch.nested.nested_tensor_from_jagged(torch.zeros(0, 5, dtype=torch.int64), torch.tensor([0, 0]))
    batch = {"input_ids": labels[:, :0], "teacher_ids": columns, "teacher_logprobs": columns.float()}
    batch |= {"use_fused_kernels": True, "distillation_use_topk": True}
    try:
        found = distilled(engine, hidden[:, :0], weight, labels[:, :0], batch, None)
    finally:
        engine.prepare_model_inputs({"input_ids": labels})
    assert found.log_probs.shape == (1, 0)
