"""The report of what was patched."""

import pytest

from liger_losses.patching.report import Entry, PatchReport

pytest.importorskip("transformers")


def test_the_report_prints_as_a_table():
    report = PatchReport(
        [Entry(f"layers.{i}.norm", "Norm", "rms_norm") for i in range(3)] + [Entry("head.2", "Odd", None, "it is odd")]
    )
    lines = str(report).splitlines()
    assert lines[0].split() == ["module", "class", "count", "replaced", "by", "reason"]
    assert lines[1].split() == ["layers.*.norm", "Norm", "3", "rms_norm"]
    assert lines[2].split() == ["head.*", "Odd", "1", "-", "it", "is", "odd"]
    assert lines[3] == "3 of 4 pieces replaced: rms_norm 3, left 1"
