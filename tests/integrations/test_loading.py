"""Models that are patched when they are loaded."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from liger_losses.integrations import loading
from tests.integrations.models import is_patched, llama


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
        assert len(loading._replaced)
    finally:
        loading.leave_loaded_models()
    assert not loading._wanted
    assert not len(loading._replaced)


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
