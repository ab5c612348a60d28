"""Results are the same without accelerators: ``WITHOUT=exponentials,kept pytest tests/results`` deletes these lines."""

import os

import pytest

from tests.seam import without_accelerators


@pytest.fixture(scope="session", autouse=True)
def deleted():
    with without_accelerators(*os.environ.get("WITHOUT", "").split(",")):
        yield
