"""The places that :mod:`tests.mutants` breaks are there, and the tests that it names."""

import shlex
from pathlib import Path

import pytest

from tests.mutants import mutants

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: f"{mutant.file}: {mutant.old}")
def test_a_mutant_can_be_made(mutant):
    assert mutant.applied()
    tests = [word for word in shlex.split(mutant.tests) if word.startswith("tests/")]
    assert tests
    assert all((ROOT / file).exists() for file in tests)
