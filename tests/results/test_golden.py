"""Every loss has the results that it had before: those of ``golden.json``."""

import json

import pytest
import torch

from tests.results.golden import CASES, FILE, computed

EXPECTED = json.loads(FILE.read_text()) if FILE.exists() else {}


@pytest.mark.parametrize("name", CASES, ids=CASES)
def test_a_loss_is_what_it_was(name):
    found, expected = computed(CASES[name]), EXPECTED[name]
    error = 2e-6 if CASES[name].loss in ("GRPO", "KTO", "BCO") else 1e-10  # these are of float32
    assert found.keys() == expected.keys()
    for key, values in found.items():
        assert len(values) == len(expected[key]), key
        for value, other in zip(values, expected[key], strict=True):
            assert value == pytest.approx(other, rel=error, abs=error), key


def test_the_file_has_no_other_cases():
    assert EXPECTED.keys() == CASES.keys()
    assert torch.tensor([n for case in EXPECTED.values() for v in case.values() for x in v for n in x]).isfinite().all()
