"""No test leaves TRL enabled, and none waits for what datasets finds out again and again."""

import uuid
from importlib.util import find_spec

import pytest

from liger_losses.trl import disable


@pytest.fixture(autouse=True)
def always_disabled():
    yield
    disable()


@pytest.fixture(autouse=True, scope="session")
def no_names_of_functions():
    """datasets disassembles all code that a mapped function reaches, for minutes once TRL's asynchronous trainer is
    imported, to name what it caches; none of these data are cached."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("datasets"):
            name = "datasets.fingerprint.Hasher.hash"
            patch.setattr(name, classmethod(lambda cls, value: uuid.uuid4().hex[:16]))
        yield
