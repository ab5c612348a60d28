"""What tests of documentation and of extensions register."""

import pytest

from liger_losses.chunked.core.statistics import STATISTICS
from liger_losses.chunked.losses import policy_tables
from liger_losses.kernels import divergence_forms


@pytest.fixture
def registered():
    """What is registered is forgotten."""
    tables = policy_tables.LOSS_TYPES, policy_tables.OBJECTIVES, divergence_forms.FORMS, STATISTICS
    before = [dict(table) for table in tables]
    yield
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)
