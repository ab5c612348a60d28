"""Patched models: what they return, and that their loss takes no logits, whatever their head is."""

import contextlib
import copy
import functools
import pickle
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from benchmarks.coverage.patches import loss_and_grads
from liger_losses import unpatch
from liger_losses.patching import loss_head
from liger_losses.patching.loss_head import pending_logits
from liger_losses.patching.pending import PendingLogits
from tests.models import adapted, patch_head, small, without_logits

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

B, T, H, V = 3, 12, 16, 97


def llama(tied=False, **options):
    return small(vocab_size=V, hidden_size=H, tie_word_embeddings=tied, initializer_range=0.2, **options).train()


def batch():
    ids = torch.randint(3, V, (B, T), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(T) < 3, -100)}


def step(model, **options):
    """The loss and the gradients of a step."""
    return loss_and_grads(model, batch() | options)


def plain_and_patched(change=lambda model: model):
    plain, patched = change(llama()), change(llama())
    patch_head(patched)
    return plain, patched


assert_same = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)


# --- What a forward returns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_dict", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("options", [{}, {"keep_logits": True}, {"eval_logits": False}])
def test_logits_of_a_call_with_labels(options, grad, as_dict):
    """With gradients none, unless they are asked for; without gradients those of the model."""
    model, inputs = llama(), batch()
    last = (inputs["input_ids"], None, None, None, None, inputs["labels"][:, -5:])
    expected, expected_last = model(**inputs), model(*last, logits_to_keep=5)
    patch_head(model, **options)
    keeps = options.get("keep_logits", False) if grad else options.get("eval_logits", True)
    with torch.set_grad_enabled(grad), contextlib.nullcontext() if keeps else without_logits():
        outputs = model(**inputs, use_cache=False, return_dict=as_dict)
        positional = model(inputs["input_ids"], None, None, None, None, inputs["labels"])
        of_last = model(*last, logits_to_keep=5)
        shifted = model(inputs["input_ids"], shift_labels=inputs["labels"].roll(-2, 1), labels=inputs["labels"])
    loss, *logits = [value for value in outputs.to_tuple() if value is not None] if as_dict else outputs
    found = loss, positional.loss, of_last.loss
    torch.testing.assert_close(found, (expected.loss, expected.loss, expected_last.loss))
    assert shifted.loss != expected.loss
    assert len(logits) == keeps
    assert (positional.logits is None) == (not keeps)
    if keeps:
        torch.testing.assert_close([*logits, of_last.logits], [expected.logits, expected_last.logits])
        assert logits[0].requires_grad == grad
    if as_dict:
        assert list(outputs) == ["loss", "logits"][: 1 + keeps]
        assert outputs[1:] == tuple(logits)


def test_logits_of_a_call_without_labels_are_the_models(monkeypatch):
    model, ids = llama(), batch()["input_ids"]
    expected = model(ids).logits
    patch_head(model)
    assert torch.equal(model(ids).logits, expected)
    assert type(model.lm_head(torch.zeros(1, 2, H))) is torch.Tensor
    monkeypatch.setattr(loss_head, "_MANY_BYTES", 1000)
    with pytest.warns(RuntimeWarning, match=r"returned 0\.0 GiB of logits.*Pass it labels=.*loss_inputs"):
        model(ids)
    model.generation_config.pad_token_id = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model(**batch())
        with torch.no_grad():
            model(ids)
        generated = model.eval().generate(ids, max_new_tokens=3, do_sample=False)
    unpatch(model)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), generated)


def test_a_loss_function_that_needs_the_logits_gets_them():
    model = llama()
    model.loss_function = lambda logits, labels, vocab_size, **others: logits.softmax(-1).square().sum()
    expected = step(model)
    patch_head(model)
    with pytest.warns(RuntimeWarning, match=r"softmax, called in .*test_loss_head:\d+, needs the values"):
        assert_same(step(model), expected)


def test_a_forward_without_a_loss_returns_logits():
    class Unscored(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            return super().forward(input_ids)

    model, ids = Unscored(llama().config), batch()["input_ids"]
    expected = model(ids, labels=ids).logits
    patch_head(model)
    assert torch.equal(model(ids, labels=ids).logits, expected)


# --- Trainers that keep the labels back -------------------------------------------------------------------------------


def own_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].float()
    return F.cross_entropy(logits.reshape(-1, V), labels[:, 1:].reshape(-1), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(("smoothing", "function"), [(0.1, None), (0.0, own_loss), (0.0, None)])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_trainer_computes_its_loss_without_logits(smoothing, function, wrapped, tmp_path, one_process, monkeypatch):
    """Also in DistributedDataParallel that looks for unused parameters, as the Trainer's does."""
    rows = [{key: value[i % B] for key, value in batch().items()} for i in range(8)]
    found, logits, options = [], [], {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "logging_steps": 1}
    options |= {"learning_rate": 1e-2, "label_smoothing_factor": smoothing}
    for model in plain_and_patched():
        arguments = transformers.TrainingArguments(str(tmp_path), **options)
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, compute_loss_func=function)
        if wrapped:
            unused = DistributedDataParallel(model, find_unused_parameters=True)
            monkeypatch.setattr(trainer, "_wrap_model", lambda *_, unused=unused, **__: unused)
        model.lm_head.register_forward_hook(lambda *given: logits.append(type(given[-1])))
        with without_logits():
            trainer.train()
        log = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row]
        found.append((torch.tensor(log), {key: p.detach() for key, p in model.named_parameters()}))
    assert len(found[0][0]) == 2
    assert logits == [torch.Tensor] * (len(logits) // 2) + [PendingLogits] * (len(logits) // 2)
    assert_same(found[1], found[0], rtol=2e-3, atol=1e-4)


# --- Heads that are changed, before patch and after it ----------------------------------------------------------------


def adapter(*targets, **options):
    return lambda model: adapted(model, *targets, task_type="CAUSAL_LM", **options)


def resize(model):
    torch.manual_seed(1)
    model.resize_token_embeddings(V + 13, mean_resizing=False)
    return model


def on_instance(forward):
    def add(model):
        model.lm_head.forward = types.MethodType(forward, model.lm_head)
        return model

    return add


def scale_of_entries(model):
    model.lm_head.logit_scale = nn.Parameter(torch.linspace(-2, 5, V))
    return on_instance(lambda head, x: F.linear(x.float(), head.weight.float()) * head.logit_scale)(model)


def weight_norm(model):
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    return model


def around_forward(model):
    """As accelerate wraps the forward of a model in mixed precision."""
    own = model.forward
    model.forward = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))
    return model


#: What changes a head; of a model whose embeddings are tied if the name says so.
CHANGES = {
    "none": lambda model: model,
    "none, tied": lambda model: model,
    "resized": resize,
    "resized, tied": resize,
    "LoRA": adapter("q_proj", "lm_head"),
    "LoRA, bias": adapter("q_proj", "lm_head", lora_bias=True),
    "LoRA, merged": lambda model: adapter("lm_head")(model).merge_and_unload().requires_grad_(),
    "modules_to_save": adapter("q_proj", modules_to_save=["lm_head"]),
    "modules_to_save, tied": adapter("q_proj", modules_to_save=["lm_head", "embed_tokens"]),
    "trainable tokens": adapter("q_proj", trainable_token_indices={"lm_head": [3, 4]}),
    "trainable tokens, tied": adapter("q_proj", trainable_token_indices=[3, 4]),
    "scaled, without its bias": on_instance(lambda head, x: F.linear(x, head.weight) * 2 / 3),
    "in fp32": on_instance(lambda head, x: F.linear(x.float(), head.weight.float())),
    "in fp64 and back": on_instance(lambda head, x: F.linear(x.double(), head.weight.double()).to(x.dtype)),
    "with a weight of its own": on_instance(lambda head, x: F.linear(x, head.weight * 2, bias=head.bias)),
    "of other hidden states": on_instance(lambda head, x: nn.Linear.forward(head, x.detach() + x)),
    "a trained scale of each vocabulary entry": scale_of_entries,
    "weight norm": weight_norm,
    "a forward around the model's": around_forward,
}


@pytest.mark.parametrize("patched_first", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_changed_heads_take_no_logits(name, patched_first):
    change, tied = CHANGES[name], "tied" in name
    expected = step(change(llama(tied)).train())
    model = llama(tied)
    if patched_first:
        patch_head(model)
    changed = change(model).train()
    if not patched_first:
        patch_head(changed)
    copies = () if change is around_forward else (copy.deepcopy(changed), pickled(changed))  # its closure has the model
    for other in (changed, *copies):
        with without_logits():
            assert_same(step(other), expected)
    report = patch_head(changed)
    assert report.counts == {"LossHead": 1}
    if name == "weight norm" and patched_first:
        with pytest.raises(RuntimeError, match="cannot be unpatched: its class was changed"):
            unpatch(changed)
        return
    unpatch(changed)
    loss, gradients = step(changed)
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(gradients[key], gradient) for key, gradient in expected[1].items())
    assert not any("_with_loss" in repr(vars(module).get("forward")) for module in changed.modules())
    assert changed(**batch()).logits is not None


def pickled(model):
    try:
        return pickle.loads(pickle.dumps(model))
    except (AttributeError, RuntimeError, pickle.PicklingError):  # local functions, parametrizations
        return model


COMPUTED = {
    "relu": on_instance(lambda head, x: F.linear(x, head.weight).relu()),
    "another product": on_instance(lambda head, x: x @ head.weight.t()),
    "DoRA": adapter("lm_head", "q_proj", use_dora=True),
}


@pytest.mark.filterwarnings("ignore:.*needs the values")
@pytest.mark.parametrize("name", COMPUTED)
def test_heads_that_do_more_compute_their_logits(name):
    plain, patched = plain_and_patched(COMPUTED[name])
    with pytest.warns(RuntimeWarning, match="computes its logits.*: it does more than to multiply by a weight"):
        assert_same(step(patched), step(plain))


def test_an_embedding_computes_its_logits():
    model = llama()
    model.set_output_embeddings(model.get_input_embeddings())
    (entry,) = patch_head(model).left
    assert entry.reason == "it is no layer that multiplies hidden states"


REGISTER = {
    "hook": lambda head, function: head.register_full_backward_hook(lambda _, inputs, outputs: function(outputs[0])),
    "pre-hook": lambda head, function: head.register_full_backward_pre_hook(lambda _, outputs: function(outputs[0])),
    "hook of all modules": lambda head, function: nn.modules.module.register_module_full_backward_hook(
        lambda module, inputs, outputs: function(outputs[0]) if module is head else None
    ),
    "pre-hook of all modules": lambda head, function: nn.modules.module.register_module_full_backward_pre_hook(
        lambda module, outputs: function(outputs[0]) if module is head else None
    ),
}


@pytest.mark.parametrize("name", REGISTER)
def test_backward_hooks_get_the_gradient_of_the_logits(name):
    (plain, patched), found = plain_and_patched(), []
    for model in (plain, patched):
        handle = REGISTER[name](model.lm_head, lambda gradient: found.append(gradient.clone()) and None)
        with pytest.warns(RuntimeWarning, match="backward hooks") if model is patched else contextlib.nullcontext():
            model(**batch()).loss.backward()
        handle.remove()
    torch.testing.assert_close(*found)
    plain.lm_head.register_full_backward_hook(lambda *_: None)
    (entry,) = patch_head(plain).left
    assert "backward hooks" in entry.reason


def test_a_head_that_cannot_be_prepared_any_more_is_reported_once():
    model = llama()
    patch_head(model)
    head, model.lm_head = model.lm_head, nn.ModuleList([model.lm_head])
    model.lm_head.weight, model.lm_head.forward = head.weight, head.forward
    model.lm_head.register_full_backward_hook(lambda *_: None)
    with pytest.warns(RuntimeWarning, match=r"was changed after patch\(\).*liger_losses.patch"):
        model(**batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert model(**batch()).logits is not None


def test_a_model_without_a_head_and_layers_that_are_left():
    (entry,) = patch_head(nn.Linear(3, 3)).entries
    assert "no output embedding" in entry.reason
    (entry,) = patch_head(llama(), filter_fn=lambda module, path: path != "lm_head").left
    assert (entry.path, entry.reason) == ("lm_head", "left out by filter_fn")


@pytest.mark.parametrize("bias", [False, True])
def test_adapters_in_fp32_on_a_head_in_half_precision(bias):
    """As PEFT makes them; losses and gradients are as exact as those of the plain model."""
    model = adapter("lm_head", "q_proj", lora_bias=bias)(llama().bfloat16())
    exact, ours = copy.deepcopy(model).double(), copy.deepcopy(model)
    patch_head(ours)
    results = []
    for one in (exact, model, ours):
        with without_logits():
            loss, gradients = step(one)
        assert one is exact or {g.dtype for g in gradients.values()} == {torch.float32}
        results.append([loss.double(), *(g.double() for g in gradients.values())])
    for expected, plain, found in zip(*results, strict=True):
        error, others = (found - expected).norm(), (plain - expected).norm()
        assert error <= 1.5 * others + 1e-3 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["none", "LoRA", "trainable tokens"])
def test_autocast(name, dtype):
    models = plain_and_patched(lambda model: CHANGES[name](model.to(dtype)))
    with torch.autocast("cpu", torch.bfloat16), without_logits():
        expected, found = map(step, models)
    assert found[0].dtype == expected[0].dtype
    assert_same(found, expected, rtol=0.1, atol=0.02)


# --- Wrappers, graphs and layers --------------------------------------------------------------------------------------


def test_a_head_that_fsdp1_frees_computes_its_logits(one_process):
    model = llama()
    expected = step(model)
    patch_head(model)
    model.lm_head = FullyShardedDataParallel(model.lm_head, device_id=torch.device("cpu"))
    with pytest.warns(RuntimeWarning, match="unit of FSDP1"):
        torch.testing.assert_close(step(model)[0], expected[0])


@pytest.mark.parametrize(
    ("partitioned", "users", "expected"),
    [(True, set(), ["gather", "partition"]), (True, {0}, ["gather"]), (False, set(), [])],
    ids=["split", "in use", "gathered"],
)
def test_a_weight_that_zero_gathers_is_gathered_for_its_gradient(partitioned, users, expected):
    """With the names of DeepSpeed's parameters, which are empty while other ranks have their rows."""
    layer, x, labels, calls = nn.Linear(H, V, bias=False), torch.randn(T, H), batch()["labels"][0], []
    F.cross_entropy(layer(x), labels).backward()
    weight, whole, gradient = layer.weight, layer.weight.detach(), layer.weight.grad
    weight.grad, weight.ds_id, weight.ds_active_sub_modules = None, 0, users
    weight.ds_status = types.SimpleNamespace(name="AVAILABLE")

    def change(name, status, data, param_list, has_been_updated=False):
        assert param_list[0] is weight
        weight.data, weight.ds_status.name = data, status
        calls.append(name)

    weight.all_gather = functools.partial(change, "gather", "AVAILABLE", whole)
    weight.partition = functools.partial(change, "partition", "NOT_AVAILABLE", torch.empty(0))
    with loss_head.Products():
        logits = layer(x)
    if partitioned:
        weight.partition([weight])
        calls.clear()
    F.cross_entropy(logits, labels).backward()
    assert calls == expected
    torch.testing.assert_close(weight.grad, gradient)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_layers_and_of_the_whole_model(reentrant):
    expected, model = step(llama()), llama()
    patch_head(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with without_logits():
        assert_same(step(model), expected)
        model.zero_grad()
        run = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        run(lambda: model(**batch()).loss).backward()
    assert_same((expected[0], {name: p.grad for name, p in model.named_parameters()}), expected)


def test_exported_and_traced_graphs_have_logits_and_change_nothing():
    model, ids = llama(use_cache=False).eval(), batch()["input_ids"]
    expected = model(ids).logits
    patch_head(model)
    before = [type(module) for module in model.modules()]
    with torch.no_grad():
        exported = torch.export.export(model, (), {"input_ids": ids}, strict=False)
    torch.testing.assert_close(exported.module()(input_ids=ids).logits, expected)
    hidden = torch.randn(2, 3, H)
    traced = torch.jit.trace(model.lm_head, hidden, check_trace=False)
    torch.testing.assert_close(traced(hidden), model.lm_head(hidden))
    assert [type(module) for module in model.modules()] == before
    with without_logits():
        model.train()(**batch())


def test_replaced_functions_are_those_that_are_called(monkeypatch):
    """``F.linear``, and the forward of ``nn.Linear``, before patch and after it."""
    own, results = nn.Linear.forward, []
    for model in plain_and_patched():
        monkeypatch.setattr(F, "linear", lambda x, w, b=None, linear=F.linear: linear(x, w * 1.5, b))
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: own(self, x * 0.5))
        with without_logits():
            results.append(step(model))
        monkeypatch.undo()
    assert_same(*results[::-1])


def test_a_context_is_of_its_models_and_its_thread():
    """Another thread gets logits, or trains the same model without them."""
    model, other, ids = llama(), llama(), batch()["input_ids"]
    patch_head(model)
    patch_head(other)
    with pending_logits(model):
        assert type(other(ids).logits) is torch.Tensor
        with ThreadPoolExecutor(1) as thread:
            found = [type(thread.submit(model, **given).result().logits) for given in ({"input_ids": ids}, batch())]
        assert isinstance(model(ids).logits, PendingLogits)
    assert found == [torch.Tensor, type(None)]
    assert type(model(ids).logits) is torch.Tensor


def test_of_two_contexts_the_first_may_end_first():
    """As those of generators that take turns."""
    models, contexts, ids = (llama(), llama()), [contextlib.ExitStack() for _ in range(2)], batch()["input_ids"]
    for model, context in zip(models, contexts, strict=True):
        patch_head(model)
        context.enter_context(pending_logits(model))
    for context, expected in zip(contexts, ([torch.Tensor, PendingLogits], [torch.Tensor] * 2), strict=True):
        context.close()
        assert [type(model(ids).logits) for model in models] == expected
