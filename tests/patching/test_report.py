"""The report of what was patched."""

import pytest
import torch

from liger_losses.patching.patch import patch, unpatch
from liger_losses.patching.report import Entry, PatchReport
from tests.models import small

transformers = pytest.importorskip("transformers")


def test_the_report_prints_as_a_table():
    norms = [Entry(f"layers.{i}.norm", "Norm", "rms_norm") for i in range(3)]
    lines = str(PatchReport([*norms, Entry("head.2", "Odd", None, "it is odd")])).splitlines()
    assert lines[0].split() == ["module", "class", "count", "replaced", "by", "reason"]
    assert lines[1].split() == ["layers.*.norm", "Norm", "3", "rms_norm"]
    assert lines[2].split() == ["head.*", "Odd", "1", "-", "it", "is", "odd"]
    assert lines[3] == "3 of 4 modules replaced: rms_norm 3, left 1"


def test_patching_again_says_that_nothing_was_changed():
    model, again = small(vocab_size=61), "already patched; nothing was changed"
    reports = [patch(model, **options) for options in ({"loss_head": False}, {}, {})]
    assert [str(report).splitlines()[-1] == again for report in reports] == [False, False, True]
    assert reports[1].entries == reports[2].entries
    model.model.layers[0].mlp = small(vocab_size=61).model.layers[0].mlp
    assert again not in str(patch(model))
    unpatch(model)  # without which tiles do not change
    lines = [str(patch(model, **options)).splitlines() for options in ({"tile_mlps": 8}, {"tile_mlps": 8}, {})]
    assert [line[-1] == again for line in lines] == [False, True, True]
    unpatch(model)
    assert again not in str(patch(model))
    assert again not in str(patch(torch.nn.Linear(2, 2)))


def test_a_model_without_its_head_is_named():
    """It may also be without weights."""
    with torch.device("meta"):
        report = patch(transformers.LlamaModel(transformers.LlamaConfig(num_hidden_layers=1)))
    assert report.counts == {"rms_norm": 3, "glu (silu)": 1, "rope": 1, "left": 1}
    assert report.left[0].reason.endswith("pass the model with its lm_head (AutoModelForCausalLM)")
