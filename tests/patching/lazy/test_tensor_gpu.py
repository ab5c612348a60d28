"""Lazy logits on a GPU wait for nothing."""

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:.*needs the values")
def test_lazy_logits_wait_for_nothing_and_are_those_of_their_forward():
    from liger_losses.patching.lazy import lazy_linear, true_values

    hidden, weight = (torch.randn(n, 256, device="cuda").bfloat16() for n in (512, 5000))
    weight.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits = lazy_linear(hidden, weight)
        rows = logits[1:].float()
        largest = logits.argmax(-1)  # nothing has happened since the forward
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plain = torch.nn.functional.linear(hidden, weight)
    assert torch.equal(largest, plain.argmax(-1))
    assert torch.equal(logits.max(-1).indices, largest)
    loss = torch.nn.functional.cross_entropy(rows, largest[1:])
    loss.backward()
    torch.optim.SGD([weight], lr=10.0).step()
    assert not torch.equal(weight @ hidden.T, plain.T)
    assert torch.equal(logits.argmax(-1), largest)
    assert torch.equal(true_values(logits), plain)
    logits = lazy_linear(hidden, weight)
    logits.logsumexp(-1)
    weight.data.mul_(1.5)
    with pytest.raises(RuntimeError, match="has changed since the forward"):
        logits.argmax(-1)
