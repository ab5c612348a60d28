"""The engine's kernels on a GPU: how often they are compiled, and where there is no tensor memory accelerator."""

import warnings

import pytest
import torch

from liger_losses import EngineOptions, LogitTransform, linear_logps, linear_statistics, linear_token_loss
from liger_losses.chunked.accelerators import label_rows, linear_exp
from liger_losses.kernels import autograd, softmax_grad, targets
from liger_losses.kernels._triton import warn_once
from tests.reference import double, on_gpu, plain_statistics

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(1, 64, 50257), (517, 576, 1031), (4097, 72, 999)])
def test_statistics_without_the_tensor_memory_accelerator(sizes, dtype, monkeypatch):
    monkeypatch.setattr("liger_losses.chunked.accelerators.tiles.has_tma", lambda device: False)
    masked = 0.2 if sizes[0] > 1 else 0.0
    hidden, weight, labels, bias = on_gpu(*sizes, dtype=dtype, bias=True, masked=masked, scale=3.0)
    names = ("logp", "entropy", "lse", "mean_logit")
    transform = {"temperature": 0.8, "logit_scale": 1.2, "softcap": 12.0}
    exact_hidden, exact_weight, exact_bias = double(hidden, weight, bias)
    with torch.no_grad():
        exact = plain_statistics(exact_hidden, exact_weight, labels, exact_bias, **transform)
        found = linear_statistics(hidden, weight, labels, names, bias=bias, transform=LogitTransform(**transform))
    for name in names:
        torch.testing.assert_close(getattr(found, name).double(), exact[name], rtol=1e-4, atol=1e-4, msg=name)


def test_a_new_number_of_tokens_never_recompiles():
    def compiled():
        kernels = {
            name: kernel
            for module in (label_rows, linear_exp, autograd, softmax_grad)
            for name, kernel in vars(module).items()
            if name.endswith("_kernel")
        }
        return {name: sum(len(cache[0]) for cache in kernel.device_caches.values()) for name, kernel in kernels.items()}

    def run(tokens):
        # Of a small vocabulary, a few tokens have fewer tiles than there are programs, which takes another variant.
        hidden, weight, labels, _ = on_gpu(tokens, 64, 50257, dtype=torch.bfloat16, masked=0.3 if tokens > 1 else 0.0)
        for strategy in (None, "two_pass"):
            linear_token_loss(hidden, weight, labels, lambda s, y: s.logp, options=EngineOptions(strategy=strategy))[
                0
            ].backward()
        linear_logps(hidden.detach(), weight.detach(), labels)

    run(2048)
    run(1)  # no token is masked
    before = compiled()
    for tokens in (1024, 77, 1000, 4099, 12345):
        run(tokens)
    assert compiled() == before


def test_devices_without_tma_say_so_once(monkeypatch):
    hidden, weight, labels, _ = on_gpu(300, 64, 5003, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = linear_logps(hidden, weight, labels)
        for known in (targets.target_of, warn_once):
            known.cache_clear()
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (8, 0))
        try:
            with pytest.warns(RuntimeWarning, match="tensor memory accelerator"):
                first = linear_logps(hidden, weight, labels)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                second = linear_logps(hidden, weight, labels)
        finally:
            targets.target_of.cache_clear()
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(first, second)
