"""Models with quantized layers, patched and trained (QLoRA): as the model itself, without logits."""

import copy
import functools
import warnings

import pytest
import torch
from torch import nn

from liger_losses import LigerFusedLinearCrossEntropyLoss, loss_inputs, patch, unpatch
from tests.models import adapted, patch_head, small, without_logits
from tests.quantized_layers import LAYERS, dequantized
from tests.reference import relative_error

pytest.importorskip("transformers")

V, H = 128, 64
IDS = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(0))
#: A layer's own product: bitsandbytes rounds hidden states to 8 bits in the second.
BOUNDS = {"bitsandbytes 8 bit": 2e-2}


def tiny(dtype=torch.float32):
    return small(vocab_size=V, hidden_size=H, intermediate_size=64, initializer_range=0.2).to(dtype)


def quantize(model, kind, head=True, inner=True):
    """The model with quantized linear layers; its embeddings are trained."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and (head if name == "lm_head" else inner):
                setattr(module, name, LAYERS[kind](child))
    model.model.embed_tokens.weight.requires_grad_()
    return model


def loss_and_gradients(model, **inputs):
    loss = model(IDS, labels=IDS, **inputs).loss
    parameters = [p for p in model.parameters() if p.requires_grad]
    return loss, torch.autograd.grad(loss, parameters)


def assert_same(found, expected, bound):
    assert relative_error(found[0], expected[0]) < bound
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert relative_error(ours, theirs) < bound


@pytest.mark.parametrize("kind", LAYERS)
def test_a_quantized_head_takes_no_logits(kind):
    model, bound = quantize(tiny(), kind, inner=False), BOUNDS.get(kind, 1e-5)
    expected = loss_and_gradients(model)
    original, logits = type(model.lm_head), model(IDS).logits
    report = patch_head(model, keep_logits=True)
    by = "LossHead" if kind.startswith("torchao") else "QuantizedHead"
    assert [entry.replaced_by for entry in report.entries] == [by]
    model.train()
    assert relative_error(model(IDS, labels=IDS).logits, logits) < bound
    patch_head(model)
    with warnings.catch_warnings(), without_logits():
        warnings.simplefilter("error")
        assert_same(loss_and_gradients(model), expected, bound)
        head, hidden, labels = loss_inputs(model, input_ids=IDS)
        assert relative_error(LigerFusedLinearCrossEntropyLoss()(head, hidden, labels), expected[0]) < bound
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    generated = model.eval().generate(IDS[:1], **options)
    # On CPUs with bf16 instructions, bitsandbytes rounds the scales of 4-bit weights where it generates, and lays them
    # out so that its own layer has no gradients any more.
    rounded = kind.endswith(("nf4, nested", "fp4"))
    assert_same(loss_and_gradients(model.train()), expected, 1e-2 if rounded else bound)
    unpatch(model)
    assert type(model.lm_head) is original
    if not rounded:
        assert_same(loss_and_gradients(model), expected, 1e-12)
    assert torch.equal(model.eval().generate(IDS[:1], **options), generated)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen before", "trained before"])
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind.startswith("torchao")])
def test_a_head_that_is_quantized_in_place_after_patch(kind, trained, bias):
    results = []
    for patched in (False, True):
        model = quantize(tiny(), kind, head=False, inner=False).train()
        if bias:
            model.lm_head.bias = nn.Parameter(torch.randn(V, generator=torch.Generator().manual_seed(1)))
        model.lm_head.weight.requires_grad_(trained)
        if patched:
            patch_head(model)
        model(IDS, labels=IDS).loss.backward()
        model.zero_grad()
        assert LAYERS[kind](model.lm_head) is model.lm_head
        with without_logits():
            found = [*loss_and_gradients(model)]
        results.append([*found, model(IDS).logits])
    assert_same(results[1], results[0], 1e-5)
    assert relative_error(results[1][2], results[0][2]) < 1e-5
    head, hidden, targets = loss_inputs(model, input_ids=IDS)
    assert relative_error(LigerFusedLinearCrossEntropyLoss()(head, hidden, targets), results[0][0]) < 1e-5
    unpatch(model)
    assert type(model.lm_head) is nn.Linear
    assert_same(loss_and_gradients(model), results[0], 1e-12)


class OtherWeight(torch.Tensor):
    """A weight of a kind that nobody has registered."""


def test_a_head_that_gets_a_weight_of_an_unknown_kind_computes_its_logits():
    model = quantize(tiny(), "torchao int8", head=False, inner=False).train()
    expected = loss_and_gradients(model)
    patch_head(model)
    weight = model.lm_head.weight.detach().as_subclass(OtherWeight)
    model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.warns(RuntimeWarning, match="computes its logits"):
        assert_same(loss_and_gradients(model), expected, 1e-6)


@pytest.mark.parametrize("kind", ["packed 4 bit", "torchao int8", "bitsandbytes nf4, nested", "bitsandbytes 8 bit"])
def test_quantized_layers_inside_of_a_model(kind):
    """Norms, MLPs and rotations around them are replaced as around ordinary layers."""
    model = quantize(tiny(), kind).train()
    expected = loss_and_gradients(model)
    report = patch(model)
    assert not [str(entry) for entry in report.entries if entry.reason]
    assert_same(loss_and_gradients(model), expected, BOUNDS.get(kind, 1e-4))
    unpatch(model)


def qlora(kind, dtype):
    """A model whose head and query projections are quantized and have adapters, which PEFT keeps in fp32."""
    model = quantize(tiny(dtype), kind)
    model.model.embed_tokens.weight.requires_grad_(False)
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = "nf4" in kind, "8 bit" in kind
    return adapted(model, "q_proj", "lm_head", r=4).train()


FP32, BF16 = torch.float32, torch.bfloat16
KINDS = ("torchao int8", "bitsandbytes nf4, nested", "bitsandbytes 8 bit")
#: Kind of the layer, dtype of the model, whether under autocast, and adapters of the head. Without autocast, hidden
#: states and head are in bf16 and adapters in fp32, as PEFT makes them.
ADAPTED = [(kind, dtype, dtype is BF16, 1) for kind in KINDS for dtype in (FP32, BF16)]
ADAPTED += [("torchao int8", FP32, False, 2), ("bitsandbytes nf4, nested", BF16, False, 1)]


@pytest.mark.parametrize(("kind", "dtype", "autocast", "adapters"), ADAPTED)
def test_lora_on_a_quantized_head(kind, dtype, autocast, adapters):
    model = qlora(kind, dtype)
    if adapters == 2:
        peft = pytest.importorskip("peft")
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
        model.base_model.set_adapter(["default", "other"])
    with torch.autocast("cpu", BF16, enabled=autocast):
        expected = loss_and_gradients(model)
    report = patch_head(model)
    by = sorted(entry.replaced_by for entry in report.entries)
    # All of the adapter, and the layer inside if it multiplies itself.
    assert by == (["LossHead"] if kind.startswith("torchao") else ["LossHead", "QuantizedHead"])
    with torch.autocast("cpu", BF16, enabled=autocast), without_logits():
        found = loss_and_gradients(model)
    assert_same(found, expected, 5e-2 if dtype is BF16 else BOUNDS.get(kind, 1e-5))
    assert all(gradient.dtype == FP32 for gradient in found[1])
    unpatch(model)


def test_what_is_left_as_it_is():
    def another_weight(head):
        vars(head)["_unpack"] = lambda packed: type(head)._unpack(head, packed) ^ 1

    def other_last_rows(head):
        vars(head)["dequantize_weight"] = lambda: type(head).dequantize_weight(head) * (torch.arange(V) < V - 9)

    for change, words in (
        (lambda head: vars(head).update(forward=lambda hidden: hidden), "its forward was replaced on the instance"),
        (another_weight, "something else than the product with its dequantized rows"),
        (other_last_rows, "something else than the product with its dequantized rows"),
        (lambda head: vars(head).update(bits=3), "GPTQ's layout"),
        (lambda head: head.to("meta"), "meta device"),
    ):
        model = quantize(tiny(), "packed 4 bit", inner=False)
        change(model.lm_head)
        (entry,) = patch_head(model).entries
        assert entry.replaced_by is None
        assert words in entry.reason


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["dpo", "sft"])
def test_trl_trains_lora_below_a_quantized_head(trainer, tmp_path):
    for package in ("peft", "torchao", "trl", "datasets"):
        pytest.importorskip(package)
    from tests.trl import trainers

    def build(output, model, *others, quantized, **options):
        model.requires_grad_(False)
        head, model.config.tie_word_embeddings = copy.deepcopy(model.lm_head), False
        model.lm_head = LAYERS["torchao int8"](head)
        if not quantized:
            weight = dequantized(model.lm_head)
            model.lm_head = nn.Linear(*weight.shape[::-1], bias=False)
            model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
        return getattr(trainers, trainer)(output, model, *others, adapter=("q_proj",), **options)

    builds = (functools.partial(build, quantized=quantized) for quantized in (False, True))
    (plain, _), (quantized, _) = (trainers.train(one, tmp_path, True) for one in builds)
    assert len(plain) == trainers.STEPS
    for one, other in zip(plain, quantized, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-4)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-3)
