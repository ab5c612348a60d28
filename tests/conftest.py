"""Without a GPU, Triton kernels run in Triton's interpreter, which must be asked for before they are defined."""

import importlib.util
import inspect
import os

import pytest
import torch
import torch.distributed as dist

# Files that tests share: where an assert fails in one, pytest shows the values.
folders = ("benchmarks.coverage", "tests.chunked", "tests.integrations", "tests.kernels", "tests.patching", "tests.trl")
pytest.register_assert_rewrite(*folders)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def language_patched_once():
    """Triton's interpreter patches ``triton.language`` for each launch, and again for each call of a device function.

    That is a third of the time that tests of kernels take: here it happens once for each launch. What it patches, and
    NumPy's names of dtypes, it finds once for all.
    """
    interpreter = None
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        interpreter = importlib.import_module("triton.runtime.interpreter")
    if not hasattr(interpreter, "_LangPatchScope"):  # another version of Triton
        yield
        return
    patch, is_builtin = interpreter._patch_lang, interpreter.tl.core.is_builtin
    dtype_of, language = interpreter._get_np_dtype, {id(interpreter.tl), id(interpreter.tl.core)}
    patched, names, seen_by, dtypes = set(), {}, {}, {}

    def patch_builtin(owner, builder, scope):
        if owner not in names:
            names[owner] = [name for name, member in inspect.getmembers(owner) if is_builtin(member)]
        for name in names[owner]:
            if is_builtin(member := getattr(owner, name)):
                interpreter._patch_attr(owner, name, member, builder, scope)

    def patch_once(function):
        seen = seen_by.get(function)
        if seen is None:
            seen = seen_by[function] = language & {id(value) for value in function.__globals__.values()}
        if seen <= patched:  # of a kernel that runs
            return interpreter._LangPatchScope()
        first, scope = not patched, patch(function)
        patched.update(seen)
        if first:
            restore = scope.restore
            scope.restore = lambda: (restore(), patched.clear())
        return scope

    def numpy_dtype(dtype):
        if dtype.name not in dtypes:
            dtypes[dtype.name] = dtype_of(dtype)
        return dtypes[dtype.name]

    with pytest.MonkeyPatch.context() as context:
        context.setattr(interpreter, "_get_np_dtype", numpy_dtype)
        context.setattr(interpreter, "_patch_builtin", patch_builtin)
        context.setattr(interpreter, "_patch_lang", patch_once)
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
def small_tiles(monkeypatch):
    """In the interpreter, tiles of 16 tokens and 32 columns: it takes long for the tokens of several tiles of a GPU."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from liger_losses.kernels.targets import INTERPRETER, Tile

        tiling = INTERPRETER.tiling._replace(by_descriptors=Tile(16, 32, 64, 8, 3), by_pointers=Tile(16, 32, 32, 8, 3))
        target = INTERPRETER._replace(tiling=tiling)
        monkeypatch.setattr("liger_losses.kernels._tiles.target_of", lambda device: target)


@pytest.fixture
def products_of_one_order(monkeypatch):
    """In the interpreter, a row of a tile's product has the same bits wherever it stands in the tile.

    A GPU's tensor cores sum every row in one order. NumPy's BLAS has other code for a tile's last rows, and whether it
    sums in another order there depends on the processor.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    numpy = pytest.importorskip("numpy")
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(self, a, b, d, *_):
        product = numpy.einsum("mk,kn->mn", a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
