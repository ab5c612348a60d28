"""Models that are patched when they are loaded."""

import contextlib
import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from liger_losses.integrations import loading
from tests.integrations.models import is_patched, llama
from tests.models import without_logits


def test_models_that_are_loaded_later(tmp_path):
    model = llama()
    from transformers import AutoModel, AutoModelForCausalLM

    model.save_pretrained(tmp_path)
    with loading.patched_loading(rope=False):
        assert is_patched(AutoModelForCausalLM.from_pretrained(tmp_path))
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert is_patched(loaded)
        assert not info["missing_keys"]
        assert is_patched(AutoModelForCausalLM.from_config(model.config))
        assert not hasattr(AutoModel.from_pretrained(tmp_path), "liger_report")  # without a head
    assert not hasattr(AutoModelForCausalLM.from_pretrained(tmp_path), "liger_report")
    with loading.patched_loading(rope=False), loading.patched_loading(lambda _: {"norms": False}):  # the last apply
        assert {"rope", "RMSNorm"} & {*AutoModelForCausalLM.from_pretrained(tmp_path).liger_report.counts} == {"rope"}


def test_models_that_are_loaded_by_several_threads(monkeypatch):
    config = llama().config
    from transformers import LlamaForCausalLM

    made, both = LlamaForCausalLM.__init__, threading.Barrier(2, timeout=60)

    def make(self, config):
        both.wait()  # both threads are in the constructor at the same time
        made(self, config)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", make)
    with loading.patched_loading(rope=False), ThreadPoolExecutor(2) as threads:
        models = list(threads.map(LlamaForCausalLM._from_config, [config, config]))
    assert all(is_patched(model) for model in models)


@pytest.mark.parametrize("same", [True, False])
def test_leaving_one_leaves_the_others(same):
    """Be the options the same."""
    pytest.importorskip("transformers")

    def options(model):
        return None

    outer = loading.patch_loaded_models(options)
    try:
        with loading.patched_loading(*[options] * same):
            assert len(loading._wanted) == 2
        assert loading._wanted == [outer]
        assert len(loading._REPLACEMENTS._replaced)
    finally:
        loading.leave_loaded_models()
    assert not loading._wanted
    assert not len(loading._REPLACEMENTS._replaced)


def test_a_model_within_a_model_is_patched_with_it():
    config = llama().config
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    class WithDraft(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.draft = AutoModelForCausalLM.from_config(type(config)(**config.to_dict()))

    seen = []
    with loading.patched_loading(lambda model: seen.append(type(model).__name__)):
        WithDraft._from_config(config)
    assert seen == ["WithDraft"]


def divergence(outputs, labels, reference):
    """Of logits, which are not those of ``outputs.loss``."""
    student, teacher = (logits.log_softmax(-1) for logits in (outputs.get("logits"), reference))
    chosen = student[:, :-1].gather(-1, labels[:, 1:, None])
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) - chosen.mean()


@pytest.mark.parametrize("changed", [False, True])
def test_the_loss_function_of_a_trainer_gets_pending_logits(tmp_path, changed):
    """Where the model is given labels, whose outputs have no logits otherwise, and of another model, too."""
    plain, results = llama(), []
    import transformers

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            with torch.no_grad():
                reference = self.ref_model(inputs["input_ids"]).logits
            return self.compute_loss_func(model(**inputs), inputs["labels"], reference)

    ids = torch.arange(5, 23).view(2, 9)
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    for patched in (False, True):
        with loading.patched_loading() if patched else contextlib.nullcontext():
            model, reference = (type(plain)._from_config(plain.config) for _ in range(2))
            model.load_state_dict(plain.state_dict())
            reference.load_state_dict({name: weight.flip(0) for name, weight in plain.state_dict().items()})
            if changed:  # since it was patched
                model.lm_head = copy.deepcopy(plain.lm_head)
            trainer = Trainer(model, arguments, compute_loss_func=divergence)
            trainer.ref_model = reference
            with without_logits() if patched else contextlib.nullcontext():
                loss = trainer.training_step(model, {"input_ids": ids, "labels": ids})
        results.append((loss, [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(*results[::-1], rtol=1e-5, atol=1e-6)
