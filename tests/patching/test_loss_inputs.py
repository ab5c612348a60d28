"""Head, hidden states and shifted labels from a model and a batch."""

import re

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import liger_losses
from liger_losses import (
    LigerFusedLinearCrossEntropyLoss,
    loss_inputs,
)
from liger_losses.chunked import shift_labels

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

#: The families that transform their logits, and one that does not.
TYPES = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 5.0, "head_dim": 8},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "phi": {},  # its head has a bias
}
SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"max_position_embeddings": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def make(name="llama", seed=0):
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(name, **SIZES, **HEADS, **TYPES[name])
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


def batch(side="right"):
    ids = torch.randint(3, 61, (4, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(7) < torch.tensor([7, 4, 6, 2])[:, None]
    mask = mask.flip(1) if side == "left" else mask
    return {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}


def gradients(loss, model):
    found = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return [torch.zeros(()) if g is None else g for g in found]


def plain_loss(model, inputs, labels=None):
    """The model's loss; transformers computes it in fp32."""
    labels, mask = inputs["input_ids"] if labels is None else labels, inputs["attention_mask"] != 0
    logits = model(**inputs).logits
    assert type(logits) is torch.Tensor
    counts = mask[:, :-1] & mask[:, 1:]
    return nn.functional.cross_entropy(logits[:, :-1][counts], labels[:, 1:][counts])


def assert_same(model, inputs, labels=None, plain=None):
    """Loss and gradients are those of the model's own loss."""
    plain = model if plain is None else plain
    expected = plain_loss(plain, inputs, labels)
    given = {} if labels is None else {"labels": labels}
    head, hidden_states, shifted = loss_inputs(model, **inputs, **given)
    assert hidden_states.shape[:-1] == shifted.shape == inputs["input_ids"].shape
    loss = LigerFusedLinearCrossEntropyLoss()(head, hidden_states, shifted)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss, model), gradients(expected, plain))


@pytest.mark.parametrize("name", TYPES)
def test_losses_are_the_models_own(name):
    model, labels = make(name), batch()["input_ids"].clone()
    labels[:, :2] = -100  # a prompt
    assert_same(model, batch())
    assert_same(model, batch(), labels)
    if name != "gemma2":  # it gives NaN at padding, which its backward spreads
        assert_same(model, batch("left"))
    assert type(model(**batch()).logits) is torch.Tensor  # as before


def test_adapters_and_patched_models():
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model = make("gemma2")
    liger_losses.patch(model, norms=False, mlps=False, rope=False)
    assert_same(model, batch(), plain=make("gemma2"))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False, lora_dropout=0.0)
    assert_same(peft.get_peft_model(make(), config), batch())


def test_distributed_data_parallel(one_process):
    model, plain = make(), make()
    loss = LigerFusedLinearCrossEntropyLoss()(*loss_inputs(DistributedDataParallel(model), **batch()))
    loss.backward()
    for ours, theirs in zip(model.parameters(), gradients(plain_loss(plain, batch()), plain), strict=True):
        torch.testing.assert_close(ours.grad, theirs)


def test_bad_input_is_refused():
    model, inputs = make(), batch()
    with pytest.raises(TypeError, match=r"by keyword: loss_inputs\(model, input_ids="):
        loss_inputs(model, inputs["input_ids"])
    with pytest.raises(ValueError, match="neither input_ids nor labels"):
        loss_inputs(model, inputs_embeds=torch.zeros(1, 3, 16, dtype=torch.float64))
    with pytest.raises(TypeError, match="int64, got .*token ids"):
        loss_inputs(model, **inputs, labels=inputs["input_ids"].double())
    with pytest.raises(ValueError, match=r"logits of \(4, 2\) tokens.*labels of \(4, 7\).*leave out logits_to_keep"):
        loss_inputs(model, **inputs, logits_to_keep=2)
    with pytest.raises(TypeError, match=r"take it out of the batch, and pass it to the loss"):
        loss_inputs(model, **inputs, num_items_in_batch=57)
    with pytest.raises(ValueError, match="leave out return_dict=False"):
        loss_inputs(model, **inputs, return_dict=False)
    loss_inputs(model, **inputs, return_dict=True, num_items_in_batch=None)
    with pytest.raises(TypeError, match="the last layer of Linear cannot be a Head .*it has no output embedding"):
        loss_inputs(nn.Linear(3, 3), input_ids=inputs["input_ids"])
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 61}
    seq2seq = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    with pytest.raises(ValueError, match="encoder-decoder"):
        loss_inputs(seq2seq, **inputs)
    model = make()
    model.lm_head.register_full_backward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="the last layer of LlamaForCausalLM cannot be a Head .*backward hooks"):
        loss_inputs(model, **inputs)


def small(kind, **options):
    torch.manual_seed(0)
    return getattr(transformers, kind)(
        getattr(transformers, f"{re.split('For|LMHead|Double', kind)[0]}Config")(**options)
    )


BERT = {**SIZES, "num_attention_heads": 2}
XLNET = {"vocab_size": 61, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32}
MODERN = {
    **SIZES,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
BART = {"vocab_size": 61, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("BertForMaskedLM", BERT),
        ("ModernBertForMaskedLM", MODERN),
        ("XLNetLMHeadModel", XLNET),
        ("BartForCausalLM", BART),
    ],
)
def test_a_model_whose_labels_are_not_shifted_is_refused(kind, options):
    """By the loss function that its forward calls, or because it calls none."""
    model, ids = small(kind, **options).eval(), batch()["input_ids"]
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{kind} does not shift its labels.*pass the labels as shift_labels="):
            loss_inputs(model, input_ids=ids, labels=ids)
    plain = model(input_ids=ids, labels=ids).loss
    loss = LigerFusedLinearCrossEntropyLoss()(*loss_inputs(model, input_ids=ids, shift_labels=ids))
    torch.testing.assert_close(loss, plain)


def test_models_whose_own_code_computes_the_loss():
    """One of transformers' is refused, though it shifts; a user's is a causal language model."""
    sizes = {"vocab_size": 61, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model, ids, calls = small("OpenAIGPTDoubleHeadsModel", **sizes).eval(), torch.arange(12).view(2, 6), []
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    with pytest.raises(
        ValueError, match=r"if it shifts them itself, pass shift_labels=liger_losses.chunked.shift_labels"
    ):
        loss_inputs(model, input_ids=ids)
    assert not calls
    inputs = loss_inputs(model, input_ids=ids, shift_labels=shift_labels(ids))
    torch.testing.assert_close(LigerFusedLinearCrossEntropyLoss()(*inputs), model(input_ids=ids, labels=ids).loss)

    class Own(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            calls.append(labels)
            return super().forward(input_ids=input_ids)

    calls.clear()
    assert loss_inputs(Own(transformers.LlamaConfig(**SIZES, **HEADS)), input_ids=ids).labels[:, :-1].equal(ids[:, 1:])
    assert calls == [None]


def test_logits_of_a_patched_model_are_refused():
    model, inputs = make(), batch()
    liger_losses.patch(model)
    with pytest.raises(ValueError, match=r"look like logits.* Of a patched model, take the model's own loss \(labels="):
        LigerFusedLinearCrossEntropyLoss()(model.lm_head, model(**inputs).logits, inputs["input_ids"])
