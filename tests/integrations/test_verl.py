"""verl's heads, without verl; real.py has them in verl itself."""

import functools
import json
from types import SimpleNamespace

import pytest
import torch

from liger_losses.integrations import verl
from tests.reference import double, plain_statistics, problem, relative_error


def test_both_heads_give_log_probabilities_and_entropies():
    hidden, weight, labels, _ = problem(shape=(2, 7), masked=0.0)
    logps, entropy = verl.fused_linear_for_ppo(None, hidden, weight, labels, 0.7)
    assert logps.shape == entropy.shape == labels.shape
    flat = verl.linear_cross_entropy(hidden, weight, labels.int(), 0.7, "none")
    torch.testing.assert_close(flat, (logps.flatten(), entropy.flatten()))
    assert verl.linear_cross_entropy(hidden, weight, labels, 0.7, "sum")[0] == logps.flatten().sum()
    grads = torch.autograd.grad(logps.sum() - 0.1 * entropy.sum(), (hidden, weight))
    exact = double(hidden, weight)
    statistics = plain_statistics(*exact, labels, temperature=0.7)
    expected = torch.autograd.grad(statistics["logp"].sum() - 0.1 * statistics["entropy"].sum(), exact)
    values = (statistics["logp"], statistics["entropy"], *expected)
    for found, value in zip((logps, entropy, *grads), values, strict=True):
        assert relative_error(found, value) < 1e-5
    with pytest.raises(ValueError, match="reduction must be none, sum or mean"):
        verl.linear_cross_entropy(hidden, weight, labels, 0.7, "median")


@pytest.mark.parametrize("tokens", [9, 8, 0])
def test_the_head_of_a_batch_that_is_distilled(tokens, monkeypatch):
    hidden, weight, labels, _ = problem(shape=(1, 9), masked=0.0)
    columns = torch.zeros(1, tokens, 5, dtype=torch.int64)
    config = SimpleNamespace(distillation_loss=SimpleNamespace(loss_mode="forward_kl_topk", log_prob_min_clamp=None))
    batch = verl._Distilled(config, False, columns, columns.float())
    monkeypatch.setattr(verl._thread, "batch", batch, raising=False)
    if tokens == 8:
        with pytest.raises(ValueError, match="columns have 8 tokens, the student's hidden states 9"):
            verl.fused_linear_for_ppo(None, hidden, weight, labels)
        return
    logps, entropy = verl.fused_linear_for_ppo(None, hidden[:, :tokens], weight, labels[:, :tokens])
    assert entropy is None
    losses = batch.losses["distillation_losses"]
    assert losses.shape == columns.shape[:-1]
    # FSDP gathers the head's weight in a hook on the model's output, before the head's backward.
    order = []
    hidden.register_hook(lambda grad: order.append("hidden states"))
    logps.register_hook(lambda grad: order.append("output"))
    losses.sum().backward()
    assert order == ["output", "hidden states"]


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", None])
def test_the_head_of_a_teacher_that_sends_hidden_states(name, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    teacher_head, given = verl.teacher_head, (str(tmp_path), torch.device("cpu"), torch.float64)
    if name is None:
        with pytest.raises(ValueError, match="set the teacher's model_path to a folder that contains"):
            teacher_head(*given)
        return
    weights = {name: torch.randn(5, 3), "model.norm.weight": torch.ones(3)}
    safetensors.save_file(weights, tmp_path / "a.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(teacher_head(*given), weights[name].double())


@pytest.mark.parametrize(("teachers", "fused", "message"), [(2, True, "takes one teacher, got 2"), (1, False, "needs")])
def test_steps_that_cannot_take_hidden_states(teachers, fused, message, monkeypatch):
    monkeypatch.setattr(verl, "_asked", lambda data, key: fused)
    distillation = SimpleNamespace(loss_mode="jsd_hidden_states")
    models = {str(i): SimpleNamespace(model_path="folder") for i in range(teachers)}
    config = SimpleNamespace(distillation_loss=distillation, teacher_models=models)
    of_step = functools.partial(print, distillation_config=config)

    def step(loss_function):
        return verl._distilled_step(lambda *_: verl._thread.config, None, None, loss_function, False)

    with pytest.raises(ValueError, match=message):
        step(of_step)
    distillation.loss_mode = "k3"
    assert step(of_step) is config
    assert step(print) is None
