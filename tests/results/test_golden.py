"""Every loss has the results that it had before: those of ``golden.json``. And what these do not have: NaN and inf."""

import math

import pytest
import torch

from tests.results.golden import CASES, EXPECTED, computed


@pytest.mark.parametrize("name", CASES, ids=CASES)
def test_a_loss_is_what_it_was(name):
    found, expected = computed(CASES[name]), EXPECTED[name]
    error = 2e-6 if CASES[name].loss in ("GRPO", "KTO", "BCO") else 1e-10  # these are of float32
    assert found.keys() == expected.keys()
    for key, values in found.items():
        assert len(values) == len(expected[key]), key
        for value, other in zip(values, expected[key], strict=True):
            assert value == pytest.approx(other, rel=error, abs=error), key


#: Losses that are means over tokens.
OF_TOKENS = {"CE", "GRPO", "JSD", "KL", "ReverseKL", "TVD", "AlphaBeta", "Cosine", "DistillationLoss", "MiniLLM"}
#: What says which tokens have a loss.
MASKS = {"labels", "shared_labels", "label_lists", "mask", "some", "first"}


def assert_finite(found):
    assert all(math.isfinite(x) for values in found.values() for numbers in values for x in numbers)


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.loss != "minillm_returns" and MASKS & {*case.call.split()}]
)
def test_all_tokens_masked(name):
    """There is no gradient, and a mean over tokens is 0."""
    found, case = computed(CASES[name], masked=True), CASES[name]
    assert_finite(found)
    assert not any(x for key, values in found.items() if key != "values" for numbers in values for x in numbers)
    assert case.loss not in OF_TOKENS or not any(found["values"][0])


#: Options whose results have no bound, and an operation that gives a probability of 0.
UNBOUNDED = ("use_bias_correction_kl=True", "f_divergence_type=forward_kl", "linear_topk rest=True")


@pytest.mark.parametrize("name", [name for name in CASES if not any(words in name for words in UNBOUNDED)])
def test_extremes_are_finite(name):
    """In fp32: log-probabilities of -1e4, or log-ratios of hundreds."""
    given = {"gap": 300.0} if "old" in CASES[name].call else {"size": 1e3}
    assert_finite(computed(CASES[name], dtype=torch.float32, **given))


def test_no_case_is_lost():
    assert len(CASES) >= 464
