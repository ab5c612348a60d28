"""Head, hidden states and shifted labels from a model and a batch."""

import functools
import inspect

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import liger_losses
from liger_losses import LigerFusedLinearCrossEntropyLoss, loss_inputs
from tests.models import adapted, patch_head, small, without_logits

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

#: The families that transform their logits, and one that does not.
TYPES = {"Llama": {}, "Cohere": {"logit_scale": 0.3}, "Granite": {"logits_scaling": 3.0}}
TYPES |= {"Gemma2": {"final_logit_softcapping": 5.0, "head_dim": 8}, "Phi": {}}  # whose head has a bias
tiny = functools.partial(small, vocab_size=61, max_position_embeddings=32, pad_token_id=0, bos_token_id=1)


def make(name="Llama"):
    model = tiny(name, num_hidden_layers=2, num_key_value_heads=2, eos_token_id=2, **TYPES[name]).double()
    for parameter in model.parameters():
        parameter.data.mul_(5)
    return model


def batch(padded_left=False):
    ids = torch.randint(3, 61, (4, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(7) < torch.tensor([7, 4, 6, 2])[:, None]
    mask = mask.flip(1) if padded_left else mask
    return {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}


def gradients(loss, model):
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], materialize_grads=True)


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
    if name != "Gemma2":  # it gives NaN at padding, which its backward spreads
        assert_same(model, batch(padded_left=True))
    assert type(model(**batch()).logits) is torch.Tensor  # as before


def test_adapters_and_patched_models():
    model = make("Gemma2")
    patch_head(model)
    assert_same(model, batch(), plain=make("Gemma2"))
    assert_same(adapted(make(), "q_proj", "lm_head"), batch())


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
    with pytest.raises(ValueError, match=r"logits of \(4, 2\) tokens.*labels of \(4, 7\).*shift_labels=.*to_keep"):
        loss_inputs(model, **inputs, logits_to_keep=2)
    with pytest.raises(TypeError, match=r"take it out of the batch, and pass it to the loss"):
        loss_inputs(model, **inputs, num_items_in_batch=57)
    for model.config.return_dict, given in ((True, {"return_dict": False}), (False, {})):
        with pytest.raises(ValueError, match="leave out return_dict=False"):
            loss_inputs(model, **inputs, **given)
    model.config.return_dict = True
    loss_inputs(model, **inputs, return_dict=True, num_items_in_batch=None)
    with pytest.raises(TypeError, match="the last layer of Linear cannot be a Head .*it has no output embedding"):
        loss_inputs(nn.Linear(3, 3), input_ids=inputs["input_ids"])
    seq2seq = small("T5", "ForConditionalGeneration", d_kv=8, d_ff=32, vocab_size=61)
    with pytest.raises(ValueError, match="encoder-decoder"):
        loss_inputs(seq2seq, **inputs)
    model = make()
    model.lm_head.register_full_backward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="the last layer of LlamaForCausalLM cannot be a Head .*backward hooks"):
        loss_inputs(model, **inputs)


class OwnForward(transformers.LlamaForCausalLM):
    """Compares the logits of a token with that token's label."""

    def forward(self, input_ids, labels=None, **others):
        logits = self.lm_head(self.model(input_ids, **others).last_hidden_state)
        loss = None if labels is None else nn.functional.cross_entropy(logits.view(-1, 61), labels.view(-1))
        return transformers.modeling_outputs.CausalLMOutput(loss, logits)


def own_loss_function():
    model = tiny()
    model.loss_function = lambda logits, labels, **others: nn.functional.cross_entropy(logits[0], labels[0])
    return model


@pytest.mark.parametrize("make", [lambda: OwnForward(tiny().config), own_loss_function])
def test_a_users_loss_that_does_not_shift_its_labels(make):
    """It is refused, and a patched model's loss is its own."""
    model, ids = make(), batch()["input_ids"]
    loss_inputs(tiny(), input_ids=ids)  # another one of its class shifts them
    expected = model(input_ids=ids, labels=ids).loss
    with pytest.raises(ValueError, match="does not shift its labels"):
        loss_inputs(model, input_ids=ids)
    patch_head(model)
    with without_logits():
        found = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, model), gradients(expected, model))
    with pytest.raises(ValueError, match="does not shift its labels"):
        loss_inputs(model, input_ids=ids)


BART = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [("Bert", "ForMaskedLM", {}), ("XLNet", "LMHeadModel", {"d_head": 8}), ("Bart", "ForCausalLM", BART)],
)
def test_a_model_whose_labels_are_not_shifted_is_refused(family, kind, options):
    """The first by the loss function that its forward calls, the others, which call none, by their loss."""
    model, ids = small(family, kind, vocab_size=61, **options).eval(), batch()["input_ids"]
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{family}{kind} does not shift .*pass the labels as shift_labels="):
            loss_inputs(model, input_ids=ids, labels=ids)
    plain = model(input_ids=ids, labels=ids).loss
    loss = LigerFusedLinearCrossEntropyLoss()(*loss_inputs(model, input_ids=ids, shift_labels=ids))
    torch.testing.assert_close(loss, plain)


@pytest.mark.parametrize("name", ["GPT2", "OpenAIGPT"])
def test_a_model_that_shifts_its_labels_itself(name):
    """Its forward tells, which runs once for each batch."""
    model, ids, calls = tiny(name, "DoubleHeadsModel"), torch.arange(24).view(2, 2, 6), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    torch.manual_seed(1)
    first = loss_inputs(model, input_ids=ids)
    after = torch.rand(1)
    assert len(calls) == 1
    torch.manual_seed(1)
    second = loss_inputs(model, input_ids=ids)
    assert len(calls) == 2
    assert torch.equal(after, torch.rand(1))
    assert torch.equal(first.hidden_states, second.hidden_states)
    choices = {"mc_labels": torch.tensor([0, 1])}
    plain = model.eval()(input_ids=ids, labels=ids, **choices)
    torch.testing.assert_close(LigerFusedLinearCrossEntropyLoss()(*loss_inputs(model, input_ids=ids)), plain.loss)
    liger_losses.patch(model)
    with without_logits():
        patched = model(input_ids=ids, labels=ids, **choices)
    torch.testing.assert_close((patched.loss, patched.mc_loss), (plain.loss, plain.mc_loss))


def test_a_loss_that_the_model_adds_is_no_sign_of_a_label():
    """Such as a router's."""
    model = tiny("Mixtral", num_local_experts=2, output_router_logits=True)
    ids, attributes = batch()["input_ids"], set(vars(model))
    assert model(input_ids=ids, labels=torch.full_like(ids, -100)).aux_loss > 0
    loss_inputs(model, input_ids=ids)
    assert set(vars(model)) == attributes


def test_a_cache_sees_a_batch_once():
    """No labels tell whether the model shifts them, with which a forward may raise and run again."""
    model, ids, labels = make().eval(), batch()["input_ids"], []
    parameters = inspect.signature(model.forward).parameters
    cache = {"cache" if "cache" in parameters else "past_key_values": transformers.DynamicCache(config=model.config)}
    whole = model.model(ids).last_hidden_state
    model(ids[:, :3], use_cache=True, **cache)
    model.register_forward_pre_hook(lambda _, args, kwargs: labels.append(kwargs.get("labels")), with_kwargs=True)
    torch.testing.assert_close(loss_inputs(model, input_ids=ids[:, 3:], **cache).hidden_states, whole[:, 3:])
    assert labels == [None]


def test_logits_of_a_patched_model_are_refused():
    model, inputs = make(), batch()
    liger_losses.patch(model)
    with pytest.raises(ValueError, match=r"look like logits.* Of a patched model, take the model's own loss \(labels="):
        LigerFusedLinearCrossEntropyLoss()(model.lm_head, model(**inputs).logits, inputs["input_ids"])
