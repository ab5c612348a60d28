"""Models that integrations patch."""

import pytest


def is_patched(model):
    from liger_losses.patching.lazy_head import patched_heads

    return bool(patched_heads(model)) and "LazyLinear" in str(model.liger_report)


def llama():
    pytest.importorskip("transformers")
    from benchmarks.coverage.model_zoo import build

    return build("llama")
