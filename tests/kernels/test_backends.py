"""Products into memory that is there, rounded once; which backend runs."""

import dis
import importlib
import inspect
import pkgutil
import types

import pytest
import torch
from torch.autograd import forward_ad

import liger_losses
from liger_losses.kernels import LOGIT_DTYPES, choose_backend, matmul
from liger_losses.kernels._triton import tl, triton
from liger_losses.kernels.autograd import records_nothing
from liger_losses.kernels.matmul import matmul_into


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matmul_rounds_once(dtype, out_dtype, accumulate):
    torch.manual_seed(0)
    a, b, start = torch.randn(7, 300).to(dtype), torch.randn(300, 5).to(dtype), torch.randn(7, 5).to(out_dtype)
    exact = a.double() @ b.double() + (start.double() if accumulate else 0)
    out = matmul_into(start.clone(), a, b, accumulate=accumulate)
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(out_dtype).eps, atol=1e-4)


@pytest.mark.parametrize("sizes", [(37, 16, 24), (32, 19, 24), (32, 16, 29), (37, 19, 29), (5, 3, 7)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_products_of_odd_sizes_are_whole(sizes, accumulate, monkeypatch):
    """On a GPU, products are cut where a size is no multiple of 8: an aligned part, and the rest."""
    monkeypatch.setattr(matmul, "MIN_CUT_SIZE", 8)
    rows, terms, columns = sizes
    g = torch.Generator().manual_seed(0)
    a, b, out = (
        torch.randn(*s, generator=g, dtype=torch.float64) for s in ((rows, terms), (terms, columns), sizes[::2])
    )
    expected = a @ b + (out if accumulate else 0)
    out = out if accumulate else out.fill_(float("nan"))
    torch.testing.assert_close(matmul._aligned(out, a, b, accumulate), expected)


# --- Which backend runs -----------------------------------------------------------------------------------------------


def test_backend_is_chosen_from_the_tensor_and_can_be_overridden(monkeypatch):
    monkeypatch.delenv("LIGER_LOSSES_BACKEND", raising=False)
    cpu = (torch.device("cpu"), torch.float32)

    def chosen(operand, backend=None):
        return choose_backend(backend, [operand], dtypes=LOGIT_DTYPES)

    assert chosen(cpu) == chosen(torch.empty(0)) == "torch"
    with pytest.raises(ValueError, match="torch, triton.*'cuda'"):
        chosen(cpu, "cuda")
    with pytest.raises(ValueError, match=r"float32.*torch\.float64"):
        pytest.importorskip("triton")
        chosen(torch.empty(0, dtype=torch.float64), "triton")
    monkeypatch.setenv("LIGER_LOSSES_BACKEND", "nonsense")
    with pytest.raises(ValueError, match="LIGER_LOSSES_BACKEND"):
        chosen(cpu)
    assert chosen(cpu, "torch") == "torch"


def test_what_records_nothing(monkeypatch):
    assert not records_nothing()
    with torch.no_grad():
        assert records_nothing()
        monkeypatch.delattr(forward_ad, "_current_level", raising=False)  # where it cannot be told
        assert not records_nothing()


def kernels():
    """Every function of the packages that is compiled by Triton, by its name."""
    for package in (liger_losses.kernels, liger_losses.layers, liger_losses.chunked.accelerators):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for name, value in vars(importlib.import_module(module.name)).items():
                function = getattr(value, "fn", None)
                if inspect.isfunction(function) and function.__module__ == module.name:
                    yield f"{module.name}.{name}", function


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_kernels_read_no_global_that_a_compiler_refuses():
    """Which the interpreter does not notice, nor a device whose branch of an ``if`` leaves the name out."""
    found = dict(kernels())
    assert len(found) > 60
    refused = []
    for name, function in found.items():
        for read in {step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"}:
            value = function.__globals__.get(read)  # None: a builtin, or a name that is not defined on this device
            is_kernel = inspect.isfunction(getattr(value, "fn", None)) or hasattr(value, "__triton_builtin__")
            if not (value is None or is_kernel or isinstance(value, (tl.constexpr, type, types.ModuleType))):
                refused.append(f"{name} reads {read}")
    assert refused == []
