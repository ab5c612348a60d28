"""Models that integrations patch."""

import pytest


def is_patched(model):
    return "lm_head" in [entry.path for entry in model.liger_report.replaced]


def llama():
    pytest.importorskip("transformers")
    from benchmarks.coverage.model_zoo import build

    return build("llama")
