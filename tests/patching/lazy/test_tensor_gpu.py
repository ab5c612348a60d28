"""Lazy logits on a GPU wait for nothing, and notice steps of optimizers."""

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:.*needs the values")
def test_lazy_logits_wait_for_nothing_and_are_not_read_after_a_step():
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
    assert torch.equal(logits.topk(1).indices[:, 0], largest)
    loss = torch.nn.functional.cross_entropy(rows, largest[1:])
    assert torch.equal(true_values(logits), plain)
    loss.backward()
    torch.optim.SGD([weight], lr=10.0).step()
    assert torch.equal(logits.argmax(-1), largest)  # of the values
    with pytest.raises(RuntimeError, match="has changed since the forward"):
        rows.argmax(-1)
    logits = lazy_linear(hidden, weight)
    logits.logsumexp(-1)
    weight.data.mul_(1.5)
    with pytest.raises(RuntimeError, match="has changed since the forward"):
        logits.argmax(-1)


@pytest.mark.parametrize("when", ["before the forward", "after the forward"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_a_step_before_anything_was_read_is_noticed(kind, optimizer, when):
    """Also if it does not count as an in-place operation. The gradient came from elsewhere."""
    from liger_losses.patching.lazy import lazy_linear

    hidden, weight = (torch.randn(n, 256, device="cuda").bfloat16() for n in (512, 5000))
    weight.requires_grad_()
    if when == "before the forward":
        weight.sum().backward()
    logits = lazy_linear(hidden, weight)
    if when == "after the forward":
        weight.sum().backward()
    step = optimizer([weight], lr=0.1, **{kind: True})
    step.step()
    if when == "before the forward":
        step.zero_grad()
    labels = torch.arange(512, device="cuda")
    for read in (lambda z: torch.nn.functional.cross_entropy(z, labels), lambda z: z.argmax(-1)):
        with pytest.raises(RuntimeError, match="has changed since the forward"):
            read(logits)
