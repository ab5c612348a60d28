"""Every loss has the results that it had before: those of ``golden.json``."""

import json

import pytest
import torch

from tests.results.golden import CASES, FILE, computed

EXPECTED = json.loads(FILE.read_text()) if FILE.exists() else {}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_what_it_was(name):
    found, expected = computed(*CASES[name]), EXPECTED[name]
    assert found.keys() == expected.keys()
    for key, values in found.items():
        assert len(values) == len(expected[key]), key
        for value, other in zip(values, expected[key], strict=True):
            # Some losses are of float32, and so is what they multiply gradients by.
            assert value == pytest.approx(other, rel=2e-6, abs=1e-6), key


def test_the_file_has_no_other_cases():
    assert EXPECTED.keys() == CASES.keys()
    assert torch.tensor([n for case in EXPECTED.values() for v in case.values() for x in v for n in x]).isfinite().all()
