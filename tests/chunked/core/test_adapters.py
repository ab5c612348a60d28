"""LoRA on a head, quantized or not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from liger_losses import Head
from tests.chunked.core.test_quantized_weight import H, V, linear
from tests.losses import CE
from tests.reference import problem, relative_error
from tests.seam import LowRank


def test_merged_adapters_that_are_disabled():
    """PEFT's forward takes them out of the weight again."""
    peft = pytest.importorskip("peft")
    plain = linear()
    weight = plain.weight.detach().clone()
    config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(plain), config)
    model.merge_adapter()
    layer = model.base_model.model[0]
    assert relative_error(Head.of(layer).weight, weight) > 0.1
    with model.disable_adapter():
        torch.testing.assert_close(Head.of(layer).weight.detach(), weight)


def test_lora_on_an_embedding_is_refused():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    layer = peft.get_peft_model(nn.Sequential(nn.Embedding(V, H)), config).base_model.model[0]
    with pytest.raises(TypeError, match="'default' of Embedding belongs to an embedding"):
        Head.of(layer)


def test_dropout_before_an_adapter():
    """Drawn as PEFT's layer draws it."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.5, target_modules=["0"], init_lora_weights=False)
    layer = peft.get_peft_model(nn.Sequential(linear()), config).base_model.model[0].train()
    hidden, _, labels, _ = problem(30, H, V)
    for training in (True, False):
        layer.train(training)
        results = []
        for function in (lambda: F.cross_entropy(layer(hidden), labels), lambda: CE()(layer, hidden, labels)):
            torch.manual_seed(0)
            loss = function()
            results.append((loss, *torch.autograd.grad(loss, hidden)))
        assert all(relative_error(a, b) < 1e-5 for a, b in zip(*results, strict=True))


def test_dropout_copies_no_weight():
    hidden, weight, labels, _ = problem(30, H, V)
    weight, b, copied = weight.detach(), torch.randn(V, 2, requires_grad=True), []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            found = function(*arguments, **(keywords or {}))
            if isinstance(found, torch.Tensor) and found.numel() >= weight.numel():
                copied.extend([function] * (found.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()))
            return found

    with Copies():
        CE(chunk_size=2)(Head(weight, adapters=(LowRank(torch.randn(2, H), b, 0.5, 0.3),)), hidden, labels).backward()
    assert not copied
