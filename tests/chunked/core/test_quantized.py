"""Quantized heads are their dequantized rows, which are the package's; and LoRA on a head, quantized or not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from liger_losses import EngineOptions, Head, linear_statistics, register_quantized_weight
from liger_losses.chunked.core import stream
from liger_losses.chunked.core.quantizers import _FINDERS, GPTQRows
from tests.losses import CE
from tests.models import adapted
from tests.quantized_layers import LAYERS, PackedLinear, bnb_linear, dequantized
from tests.reference import Int8Weight, double, gradients, problem, relative_error, weighted
from tests.seam import LowRank

V, H = 120, 40  # rows of 40 start inside of blocks of 64


def linear(dtype=torch.float32, bias=False, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(H, V, bias=bias, dtype=dtype)


@pytest.fixture
def plans(monkeypatch):
    """Those of calls."""
    made, plans = [], stream.plans
    monkeypatch.setattr(stream, "plans", lambda *call: made.extend(plans(*call)) or made[-1:])
    return made


#: In which a head of 100 x 40 is dequantized by tiles of columns for 40 tokens.
SMALL = EngineOptions(workspace=20_000)


def small():
    hidden, weight, labels, _ = problem(40, 40, 100, scale=2.0, masked=0.1)
    return hidden, Int8Weight(weight), labels


@pytest.mark.parametrize("active", [slice(0, 30), slice(60, 100)], ids=["first", "last"])
def test_columns_without_probability(active, plans):
    """Where a bias of -inf leaves tiles without any probability, all else is as without them."""
    hidden, quantized, labels = small()
    labels = torch.where(labels >= 0, labels % (active.stop - active.start) + active.start, labels)
    bias = torch.full((100,), -torch.inf)
    bias[active] = 0.0
    names = ("logp", "entropy", "lse", "log_sum_sq_probs")
    found = linear_statistics(hidden, Head(quantized, bias), labels, names, metrics="argmax", options=SMALL)
    assert plans[0].tile is not None
    assert plans[0].products.columns < 50
    x, w = double(hidden, quantized.rows(*active.indices(100)[:2]))
    moved = torch.where(labels >= 0, labels - active.start, labels)
    exact = linear_statistics(x, w, moved, names, metrics="argmax")
    assert torch.equal(found.argmax, exact.argmax + active.start * (labels >= 0))
    ours, theirs = ([getattr(values, name) for name in names] for values in (found, exact))
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(ours, theirs, strict=True))
    assert (
        relative_error(*(gradients(weighted(values), (of,))[0] for values, of in ((ours, hidden), (theirs, x)))) < 1e-5
    )


def test_a_token_that_is_not_finite(plans):
    """It is NaN alone, and its argmax is still a column."""
    hidden, quantized, labels = small()
    with torch.no_grad():
        hidden[3] = torch.nan
    names, labels = ("logp", "entropy"), labels.clamp(min=0)
    found = linear_statistics(hidden, Head(quantized), labels, names, metrics="argmax", options=SMALL)
    assert plans[0].tile is not None
    grad = torch.autograd.grad((found.logp + found.entropy).sum(), hidden)[0]
    for value in (found.logp, found.entropy, grad.sum(1)):
        assert torch.equal(value.isnan(), torch.arange(40) == 3)
    assert found.argmax.max() < 100


# --- Rows of quantized weights are those of the package that made them ------------------------------------------------


def assert_rows_are(whole, found):
    assert found.shape == (V, H)
    for start, stop in ((0, V), (0, 1), (17, 18), (31, 101), (len(whole) - 1, len(whole))):
        rows = found.rows(start, stop)
        assert rows.is_floating_point()
        torch.testing.assert_close(rows.float(), whole[start:stop].float(), rtol=1e-6, atol=1e-7)
    part = found.part(30, 90).rows(5, 20)
    torch.testing.assert_close(part.float(), whole[35:50].float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", LAYERS)
def test_rows_are_those_of_the_package(name):
    layer = LAYERS[name](linear(torch.bfloat16))
    assert_rows_are(dequantized(layer), Head.of(layer).quantized)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_rows_in_the_layout_of_cpus_that_generate(kind):
    functional = pytest.importorskip("bitsandbytes.functional")
    rows, width = 96, 128  # the layout takes 32 rows at a time
    layer = bnb_linear(torch.nn.Linear(width, rows, bias=False, dtype=torch.bfloat16), nested=False, kind=kind)
    whole = dequantized(layer)
    packed, state = functional._convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
    layer.weight.data, layer.weight.quant_state, before = packed, state, packed.clone()
    found = Head.of(layer).quantized
    for start, stop in ((0, rows), (0, 1), (31, 65), (95, 96)):
        torch.testing.assert_close(found.rows(start, stop), whole[start:stop], rtol=1e-2, atol=1e-4)  # scales in bf16
    assert layer.weight.data_ptr() == packed.data_ptr()  # the layer is left as it is
    assert torch.equal(packed, before)
    assert state.packing_format_for_cpu


def packaged(name, zero_offset, bases=(PackedLinear,), **attributes):
    """A layer of a class that bears the name of a package's."""
    module, _, kind = name.rpartition(".")
    cls = type(kind, bases, {"__module__": module, "__qualname__": kind, **attributes})
    return cls(linear(), group=8, zero_offset=zero_offset)


TORCH = "gptqmodel.nn_modules.qlinear.torch.TorchLinear"


@pytest.mark.parametrize(
    ("name", "offset", "attributes"),
    [
        (TORCH, 1, {"qzero_format": lambda layer: 1}),
        (TORCH, 0, {"qzero_format": lambda layer: 2}),
        ("gptqmodel.nn_modules.qlinear.tritonv2.TritonV2QuantLinear", 0, {"qzero_format": lambda layer: 2}),
    ],
)
def test_zero_points_are_read_as_the_layer_says(name, offset, attributes, monkeypatch):
    monkeypatch.delitem(_FINDERS, PackedLinear)
    layer = packaged(name, offset, **attributes, forward=None)  # which nobody calls
    assert Head.of(layer).quantized.zero_offset == offset
    assert_rows_are(dequantized(layer), Head.of(layer).quantized)


def test_layouts_that_are_not_known(monkeypatch):
    monkeypatch.delitem(_FINDERS, PackedLinear)
    fused = packaged("gptqmodel.nn_modules.qlinear.torch_fused.Fused", 0, (type(packaged(TORCH, 0)),))
    for layer, words in (
        (PackedLinear(linear()), "layout differs from package to package"),
        (packaged("gptqmodel.nn_modules.qlinear.exllamav2.ExllamaV2QuantLinear", 1), "layout differs"),
        (fused, "may reorder what it has loaded"),
        (packaged(TORCH, 0, adapter=torch.nn.Identity(), qzero_format=lambda layer: 2), "or add an adapter"),
    ):
        with pytest.raises(TypeError, match=rf"{words}.*register_quantized_weight\({type(layer).__name__}, function\)"):
            Head.of(layer)
    layer = PackedLinear(linear(), bits=8, group=8, zero_offset=0)
    register_quantized_weight(PackedLinear, lambda layer: GPTQRows(layer, zero_offset=0))
    assert_rows_are(dequantized(layer), Head.of(layer).quantized)
    layer.bits = 3
    with pytest.raises(TypeError, match="not in GPTQ's layout of 2, 4 or 8 bits"):
        Head.of(layer)


# --- LoRA on a head, quantized or not ---------------------------------------------------------------------------------


def test_merged_adapters_that_are_disabled():
    """PEFT's forward takes them out of the weight again."""
    plain = linear()
    weight = plain.weight.detach().clone()
    model = adapted(nn.Sequential(plain), "0")
    model.merge_adapter()
    layer = model.base_model.model[0]
    assert relative_error(Head.of(layer).weight, weight) > 0.1
    with model.disable_adapter():
        torch.testing.assert_close(Head.of(layer).weight.detach(), weight)


def test_lora_on_an_embedding_is_refused():
    layer = adapted(nn.Sequential(nn.Embedding(V, H)), "0").base_model.model[0]
    with pytest.raises(TypeError, match="'default' of Embedding belongs to an embedding"):
        Head.of(layer)


def test_dropout_before_an_adapter():
    """Drawn as PEFT's layer draws it."""
    layer = adapted(nn.Sequential(linear()), "0", lora_dropout=0.5).base_model.model[0]
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
