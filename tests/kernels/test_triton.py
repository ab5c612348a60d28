"""Which backend runs."""

import dis
import importlib
import inspect
import pkgutil
import types

import pytest
import torch
from torch.autograd import forward_ad

import liger_losses
from liger_losses.kernels import LOGIT_DTYPES, choose_backend
from liger_losses.kernels._triton import tl, triton
from liger_losses.kernels.autograd import records_nothing
from tests.kernels.cases import triton_or_skip


def test_backend_is_chosen_from_the_tensor_and_can_be_overridden(monkeypatch):
    monkeypatch.delenv("LIGER_LOSSES_BACKEND", raising=False)
    cpu = (torch.device("cpu"), torch.float32)

    def chosen(operand, backend=None):
        return choose_backend(backend, [operand], dtypes=LOGIT_DTYPES)

    assert chosen(cpu) == chosen(torch.empty(0)) == "torch"
    with pytest.raises(ValueError, match="torch, triton.*'cuda'"):
        chosen(cpu, "cuda")
    with pytest.raises(ValueError, match=r"float32.*torch\.float64"):
        triton_or_skip()
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
