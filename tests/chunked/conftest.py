"""Problems of tests are small: calls take the way of large ones, unless a test asks for that of small ones."""

import pytest

from tests.reference import small_calls


@pytest.fixture(autouse=True)
def _large_calls():
    with small_calls(0.0):
        yield
