"""Losses of single completions on a GPU are those on a CPU."""

import pytest
import torch

from tests.chunked.core.test_stream_gpu import gradients, on
from tests.losses import BCO, KTO

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired", "bco"])
def test_unpaired_losses_equal_those_on_a_cpu(loss_type):
    from tests.chunked.losses.test_unpaired import problem as unpaired

    results = []
    for device in ("cpu", "cuda"):
        tensors = [on(device, t) for t in unpaired(dtype=torch.float32)]
        hidden, weight, labels, ref_hidden, ref_weight, desirable = tensors
        options = {"use_ref_model": True, **({} if loss_type == "bco" else {"loss_type": loss_type})}
        module = (BCO if loss_type == "bco" else KTO)(**options)
        divergence = {"kl": torch.tensor(0.3, device=device)} if loss_type == "kto" else {}
        loss, _ = module(hidden, weight, labels, None, desirable, ref_hidden, ref_weight, None, **divergence)
        results.append([t.cpu() for t in (loss.detach(), *gradients(loss, (hidden, weight)))])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
