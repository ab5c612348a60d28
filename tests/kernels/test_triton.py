"""Which backend runs."""

import pytest
import torch

from liger_losses.kernels import LOGIT_DTYPES, choose_backend
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
