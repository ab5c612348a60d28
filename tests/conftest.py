"""Without a GPU, Triton kernels run in Triton's interpreter, which must be asked for before they are defined."""

import gc
import os
import sys

import pytest
import torch
import torch.distributed as dist

from tests import interpreter, processes

# Files that tests share: where an assert fails in one, pytest shows the values.
folders = ("chunked", "integrations", "kernels", "layers", "patching", "results", "trl")
pytest.register_assert_rewrite("benchmarks.coverage", *(f"tests.{folder}" for folder in folders))

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def faster_interpreter():
    with interpreter.faster():
        yield


@pytest.fixture(scope="session", autouse=True)
def no_times_of_guards():
    """``torch.compile`` measures each graph's guards for its log, and empties the processor's caches for it."""
    with pytest.MonkeyPatch.context() as patch:
        if guards := sys.modules.get("torch._dynamo.guards"):
            patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture
def nothing_compiled():
    """What torch.compile keeps of earlier functions is dropped, before a test and after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_process():
    """The group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def default_gpu():
    """Tensors that name no device are on the GPU, if there is one."""
    with pytest.MonkeyPatch.context() as patched:
        if torch.cuda.is_available():
            processes.take_gpu(0, patched.setattr)
        yield
    torch.set_default_device(None)


@pytest.fixture
def small_tiles():
    with interpreter.small_tiles():
        yield


@pytest.fixture
def products_of_one_order(monkeypatch):
    """In the interpreter, a row of a tile's product has the same bits wherever it stands in the tile.

    A GPU's tensor cores sum every row in one order. NumPy's BLAS has other code for a tile's last rows, and whether it
    sums in another order there depends on the processor.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    numpy = pytest.importorskip("numpy")
    runtime = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(self, a, b, d, *_):
        product = numpy.einsum("mk,kn->mn", a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
        return runtime.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(runtime.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(scope="module", autouse=True)
def no_search_in_what_stays():
    """What there is before a file's tests stays: each search for garbage in it takes up to a second, and trainers ask
    for some."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Searches for garbage in what tests import would take a quarter of the time of importing them."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    if not torch.cuda.is_available():  # a GPU's memory is not to wait for it
        gc.set_threshold(20_000)  # with Python's 700, searches take a fortieth of the tests' time
    if any(item.get_closest_marker("distributed") for item in session.items) and not torch.cuda.is_available():
        processes.make_nursery()
    return result


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
