"""Packed completions compute what each completion computes behind a copy of its prompt."""

import functools
import inspect

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig
from transformers.masking_utils import sliding_window_causal_mask_function

from liger_losses import CannotShareError, loss_inputs, pack_completions
from liger_losses.prompts import attention
from liger_losses.prompts.masks import RowMask, block_mask
from tests.prompts.packed import FAMILIES, apart, drawn, family, loss_and_gradients, repeated, shared


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_and_gradients_are_those_of_repeated_prompts(name):
    model = family(name)
    for seed in range(3):
        batch = drawn(seed)
        expected, their_gradients = loss_and_gradients(model, repeated(model, *batch))
        loss, gradients = loss_and_gradients(model, shared(model, *batch))
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        together, largest = apart(gradients, their_gradients)
        assert together < 1e-6
        assert largest < 5e-6


def test_the_rest_of_a_model_is_as_it_was():
    """Ordinary batches and generation, and the name that other code reads; and layers that are checkpointed, which
    backward runs outside of the context."""
    model, batch = family("gemma2"), drawn(0)
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 3]])
    before, text = model(ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False)
    expected = loss_and_gradients(model, shared(model, *batch))[1]
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(ids).logits, before)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), text)
    model.gradient_checkpointing_enable()
    assert apart(loss_and_gradients(model, shared(model, *batch))[1], expected) == (0, 0)


def all_scores(query, key, value, mask, scaling, *_):
    places = torch.arange(query.shape[2])
    sees = mask.mask_mod(0, 0, places[:, None], places)[None, None]
    options = {"attn_mask": sees, "scale": scaling, "enable_gqa": True}
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options).transpose(1, 2)


def use_block_masks(monkeypatch, function=all_scores):
    """On a CPU, layers get block masks as on a GPU, for a function in the place of FlexAttention's kernel."""
    monkeypatch.setattr(attention, "reason_against_flex", lambda *_: None)
    monkeypatch.setattr(attention, "flex_attention", function)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_checkpointed_layers_attend_by_the_block_mask_that_they_get(name, monkeypatch):
    """Backward runs them again outside of the context, with the mask of the forward."""
    model, batch = family("llama", name), drawn(0)
    expected = loss_and_gradients(model, shared(model, *batch))[1]
    model.gradient_checkpointing_enable()
    use_block_masks(monkeypatch)
    assert apart(loss_and_gradients(model, shared(model, *batch))[1], expected)[0] < 1e-6


@pytest.mark.parametrize(
    "changed",
    [
        lambda forward: lambda hidden_states, **_: (hidden_states, None),
        lambda forward: lambda attention_mask, **others: forward(attention_mask=torch.zeros(1, 1, 1, 1), **others),
    ],
    ids=["another attention", "another mask"],
)
def test_a_layer_that_bypasses_the_interface_is_refused(changed, monkeypatch):
    """It would mix completions."""
    use_block_masks(monkeypatch)
    model = family("llama", "sdpa")
    layer = model.model.layers[1].self_attn
    monkeypatch.setattr(layer, "forward", changed(layer.forward))
    with pytest.raises(CannotShareError, match="of its 2 layers, 1 took their attention and its mask"):
        shared(model, *drawn(0))


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_packed_models_generate_by_continuous_batching(name):
    """transformers then reads the name of the attention implementation, and refuses those that it does not know."""
    model, ids = family("llama", name).eval(), [3, 4, 5]
    shared(model, *drawn(0))
    options = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=2, pad_token_id=0)
    sizes = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=8)
    (found,) = model.generate_batch([ids], options, continuous_batching_config=sizes, progress_bar=False).values()
    assert ids + found.generated_tokens == model.generate(torch.tensor([ids]), options)[0].tolist()


def test_packed_models_are_compiled_whole(nothing_compiled):
    model, ids = family("llama", "sdpa"), torch.tensor([[0, 4, 5, 6], [3, 4, 5, 6]])
    shared(model, *drawn(0))
    batch = {"input_ids": ids, "attention_mask": ids != 0, "use_cache": False}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits)


def flex_attention_of(batch, window=None, heads=(4, 2), **options):
    """FlexAttention of a drawn batch, compiled, and the same with all scores; without gradients, as a CPU has none."""
    prompts, completions, groups = batch
    packed = pack_completions(prompts, completions, groups=groups)
    sees = RowMask(packed, None if window is None else sliding_window_causal_mask_function(window))
    mask, length = _pytree.tree_map(lambda leaf: leaf, block_mask(sees)), packed.input_ids.shape[1]
    query, key, value = (torch.randn(1, n, length, 16) for n in (heads[0], heads[1], heads[1]))
    with torch.no_grad():
        found = attention.flex_attention(query, key, value, mask, 0.3, **options)
    key, value = (tensor.repeat_interleave(heads[0] // heads[1], 1) for tensor in (key, value))
    scores, places, cap = query @ key.mT * 0.3, torch.arange(length), options.get("softcap")
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~sees(0, 0, places[:, None], places), float("-inf"))
    if options.get("sinks") is not None:
        scores = torch.cat([scores, options["sinks"].view(1, -1, 1, 1).expand(1, heads[0], length, 1)], -1)
    return found, (scores.softmax(-1)[..., :length] @ value).transpose(1, 2)


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(None, None, False), (50, None, True), (None, 3.0, True), (50, 3.0, False)]
)
def test_flex_attention_is_that_of_all_scores_and_compiled_once(window, softcap, sinks, monkeypatch, nothing_compiled):
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(attention, "_compiled", functools.partial(attention._compiled, backend=counter))
    for seed, longest in enumerate((40, 300, 90, 150)):
        options = {"softcap": softcap, "sinks": torch.randn(4) if sinks else None}
        torch.testing.assert_close(*flex_attention_of(drawn(seed, longest=longest), window, **options))
    assert counter.frame_count == 1


def test_layers_may_be_on_several_devices(monkeypatch):
    """Whoever spreads a model moves masks from device to device, but not the tensors of their functions."""
    devices = set()

    def compiled(query, key, value, blocks, rows, *_):
        devices.update(tensor.device.type for tensor in (query, key, value, rows, *blocks.values()))
        return query.flatten(2, 3), None

    monkeypatch.setattr(attention, "_compiled", lambda: compiled)
    packed = pack_completions([[3]], [[4]])
    query = torch.randn(1, 2, 256, 16, device="meta")
    attention.flex_attention(query, query, query, block_mask(RowMask(packed, None)).to("meta"))
    assert devices == {"meta"}
    assert packed.completion_states(query.new_zeros(1, 256, 8)).shape == (1, 1, 8)


def test_as_many_kinds_of_models_as_there_are_in_a_process_are_compiled(monkeypatch, nothing_compiled):
    """Beyond torch.compile's own limit, which is 8, FlexAttention would compute all pairs of tokens."""
    graphs, limits = [], set()

    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *tensors: limits.add(torch._dynamo.config.recompile_limit) or graph(*tensors)

    monkeypatch.setattr(attention, "_compiled", functools.partial(attention._compiled, backend=backend))
    with torch._dynamo.config.patch(recompile_limit=2):
        for heads in range(1, 4):
            torch.testing.assert_close(*flex_attention_of(drawn(0), heads=(heads, 1)))
    assert len(graphs) == 3
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        assert limits == {2}  # while it runs, other functions keep theirs


def test_under_autocast_queries_keys_and_values_have_its_dtype(monkeypatch):
    """Rotated queries and keys of fp32 weights are in fp32, and values in bf16: FlexAttention takes one dtype."""
    dtypes = []

    def watched(*tensors):
        dtypes.extend(tensor.dtype for tensor in tensors[:3])
        return tensors[0].transpose(1, 2)

    use_block_masks(monkeypatch, watched)
    with torch.autocast("cpu", torch.bfloat16):
        shared(family("llama"), *drawn(0))
    assert set(dtypes) == {torch.bfloat16}


REFUSED = {
    "mamba": ({"state_size": 4, "n_groups": 1}, "its layers .linear_attention. mix tokens by more than masked"),
    "rwkv": ({"attention_hidden_size": 32}, "its layers .with a state. mix tokens"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "its layers .conv. mix tokens"),
    "qwen3_next": ({"layer_types": ["linear_attention", "full_attention"]}, "its layers .linear_attention. mix tokens"),
    "roberta": ({"is_decoder": True}, "its positions do not count from 0"),
    "bloom": ({}, "takes no position_ids"),
    # The scale is 1 for the first 8,192 tokens of a row, so that short rows would not show it.
    "llama4_text": ({"layer_types": ["full_attention"] * 2}, "scaled by tokens' places in the row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_would_mix_completions_are_refused(name):
    options, message = REFUSED[name]
    model = family(name, None, **options)
    with pytest.raises(CannotShareError, match=message):
        shared(model, *drawn(0))


def test_attention_dropout_is_refused_in_training():
    model = family("llama", attention_dropout=0.1)
    with pytest.raises(CannotShareError, match="attention_dropout=0.1, and FlexAttention has no dropout; set it to 0"):
        shared(model, *drawn(0))
    shared(model.eval(), *drawn(0))


LLAMA = "transformers.models.llama.modeling_llama"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("LlamaModel._can_set_attn_implementation", False, "its attention does not use transformers' AttentionInter"),
        ("create_causal_mask", None, "of its 2 layers, 0 took their attention and its mask from"),
        ("create_causal_mask", torch.ones(256, 256).triu(1).mul(-1e9)[None, None], "of its 2 layers, 0 took their"),
    ],
)
def test_a_model_that_bypasses_the_interface_is_refused(name, value, message, monkeypatch):
    monkeypatch.setattr(f"{LLAMA}.{name}", lambda *_, **__: value)
    with pytest.raises(CannotShareError, match=message):
        shared(family("llama", "sdpa"), *drawn(0))


def test_tokens_beside_the_row_are_refused():
    model, packed = family("llama"), pack_completions([[3, 4]], [[5]])
    model(torch.tensor([[3, 4, 5]]), past_key_values=(cache := DynamicCache()))
    with pytest.raises(CannotShareError, match="the packed row has 256 tokens, and attention 256 queries and 259 keys"):
        loss_inputs(model, packed, past_key_values=cache)
    for name in ("labels", "position_ids", "pixel_values"):
        with pytest.raises(ValueError, match=f"packed completions have their ids.*: leave out {name}"):
            loss_inputs(model, packed, **{name: torch.ones(1, 1)})


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])  # the kinds of kernels; each takes seconds to compile
def test_half_precision_is_as_exact_as_with_repeated_prompts_and_compiled_once(name):
    """FlexAttention in bf16, against repeated prompts in fp32: within twice the error of repeated prompts in bf16. No
    other lengths compile anything, with and without gradients."""
    sizes = {"head_dim": 16, "hidden_size": 64, "max_position_embeddings": 1024}
    exact, model = family(name, **sizes).cuda(), family(name, **sizes).cuda().bfloat16()
    counts = [torch._dynamo.utils.counters["stats"]["unique_graphs"]]
    for seed, longest in enumerate((200, 40, 120, 400)):
        batch = *drawn(seed, longest=longest), "cuda"
        errors, (expected, gradients) = [], loss_and_gradients(exact, repeated(exact, *batch))
        for compute in (repeated, shared):
            loss, theirs = loss_and_gradients(model, compute(model, *batch))
            difference = sum(float((theirs[k].float() - g).square().sum()) for k, g in gradients.items())
            errors.append((float((loss - expected).abs() / expected.abs()), difference**0.5))
        assert errors[1][0] < 2 * errors[0][0] + 1e-3
        assert errors[1][1] < 2 * errors[0][1]
        with torch.no_grad():
            shared(model, *batch)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] < counts[1] == counts[-1], counts
