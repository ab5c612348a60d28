"""No test leaves TRL enabled."""

import pytest

from liger_losses.trl import disable


@pytest.fixture(autouse=True)
def always_disabled():
    yield
    disable()
