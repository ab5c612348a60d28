"""Many heads on a GPU: those of a CPU, in the memory of one head, with one synchronization."""

import gc

import pytest
import torch

from tests.chunked.core.test_many_heads import WEIGHTS, K
from tests.losses import CE
from tests.reference import relative_error

pytestmark = pytest.mark.gpu
WIRINGS = {"one head": (K, 1), "own heads": (K, K), "one hidden state": (1, K)}


def tensors(wiring, dtype, shape, h, v, masked=0.3):
    """Distinct tensors, those of each target, and labels."""
    g = torch.Generator("cuda").manual_seed(0)
    states, heads = WIRINGS[wiring]
    hidden = [torch.randn(*shape, h, generator=g, device="cuda").to(dtype).requires_grad_() for _ in range(states)]
    weights = [
        (torch.randn(v, h, generator=g, device="cuda") * 2 / h**0.5).to(dtype).requires_grad_() for _ in range(heads)
    ]
    labels = torch.randint(v, shape, generator=g, device="cuda")
    labels[torch.rand(shape, generator=g, device="cuda") < masked] = -100
    each = hidden * (K // states), weights * (K // heads), [None] * K
    return [*hidden, *weights], each, labels


@pytest.mark.parametrize("wiring", list(WIRINGS))
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-4)])
def test_losses_and_gradients(dtype, bound, wiring):
    """As on a CPU in float64."""
    leaves, each, labels = tensors(wiring, dtype, (3, 401), 264, 5021)
    exact_leaves = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    exact_of = {id(leaf): exact for leaf, exact in zip(leaves, exact_leaves, strict=True)}
    for chunk_size in (None, 256):
        loss_module = CE(shift=[1, 2, 3], head_weights=WEIGHTS, chunk_size=chunk_size)
        hidden, weights = ([exact_of[id(tensor)] for tensor in part] for part in each[:2])
        results = []
        for given, y, of in ((each[1::-1], labels, leaves), ((weights, hidden), labels.cpu(), exact_leaves)):
            loss, metrics = loss_module(*given, y)
            results.append([loss, metrics.losses, *torch.autograd.grad(loss, of)])
        assert all(relative_error(ours.cpu(), exact) < bound for ours, exact in zip(*results, strict=True))


@pytest.mark.parametrize("wiring", list(WIRINGS))
def test_memory_does_not_grow_with_heads(wiring):
    n, h, v = 4096, 1024, 50304

    def extra(count):
        _, (hidden, weights, _), labels = tensors(wiring, torch.bfloat16, (n,), h, v)
        hidden, weights = hidden[:count], weights[:count]
        leaves = list({id(t): t for t in (*hidden, *weights)}.values())
        loss_module = CE(shift=list(range(1, count + 1)), workspace=2**26)

        def call():
            return torch.autograd.grad(loss_module(weights, hidden, labels)[0], leaves)

        outputs = sum(grad.nbytes for grad in call())
        gc.collect()  # what earlier tests left behind would be freed during the call
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = call()
        peak = torch.cuda.max_memory_allocated() - before - outputs
        del found
        return peak

    one, many = extra(1), extra(K)
    # One more tensor of hidden states where they are shared; statistics, labels and weights of each token.
    assert many <= one + n * h * 2 + K * n * 200, (one, many)


@pytest.mark.parametrize("wiring", list(WIRINGS))
def test_the_host_never_waits_without_compaction(wiring):
    leaves, each, labels = tensors(wiring, torch.bfloat16, (512,), 64, 1024)
    loss_module = CE(shift=[1, 2, 3], head_weights=WEIGHTS, compact=False)
    torch.autograd.grad(loss_module(each[1], each[0], labels)[0], leaves)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, _ = loss_module(each[1], each[0], labels)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    compact, _ = CE(shift=[1, 2, 3], head_weights=WEIGHTS)(each[1], each[0], labels)
    torch.testing.assert_close(loss, compact)
