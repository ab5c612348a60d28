"""Patched models: they compute what they did, and everything else about them stays."""

import copy
import functools
import gc
import importlib
import inspect
import io
import os
import pickle
import pydoc
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.coverage import model_zoo
from benchmarks.coverage.patches import check, difference, loss_and_grads
from liger_losses.layers.launches import Launches
from liger_losses.layers.plain import HOOKS
from liger_losses.patching.mlps import GatedMLP
from liger_losses.patching.norms import Norm
from liger_losses.patching.patch import AutoLigerModelForCausalLM, patch, unpatch
from liger_losses.patching.rotations import Rotations
from liger_losses.patching.swap import replacement_of
from tests.kernels.cases import DEVICE, interpreted
from tests.models import adapted
from tests.patching.test_layers import MLP

pytest.importorskip("transformers")

#: Types that together have every kind of layer and rotation that is replaced in a model of transformers.
REPLACED = {
    "llama": "rms_norm; glu (silu); rope",
    "cohere": "layer_norm; glu (silu); rope (interleaved)",
    "deepseek_v3": "rms_norm; glu (silu); experts' glu_fused (silu); rope (sorted), rope",
    "diffllama": "rms_norm; glu (silu); rope",
    "falcon_h1": "rms_norm; glu (silu); rope",
    "gemma2": "rms_norm (1 + weight, fp32); glu (gelu_tanh); rope",
    "gemma3n_text": "rms_norm; rms_norm (fp32); glu (gelu_tanh); rope",
    "glm": "rms_norm; glu_fused (silu); rope (interleaved)",
    "gpt_neox": "layer_norm; rope",
    "gpt_oss": "rms_norm (fp32); experts' glu_fused (silu, limit 7); rope",
    "granitemoehybrid": "rms_norm; gated_rms_norm (gate first); glu_fused (silu); experts' glu_fused (silu); rope",
    "lara_mini": "rms_norm (fp32); gated_rms_norm (fp32); glu (silu); experts' glu_fused (silu); rope",
    "minimax_m3_vl_text": "rms_norm (1 + weight, fp32); glu_fused (silu, limit 7); experts' glu_fused (silu, limit 7); "
    "rope",
    "modernbert-decoder": "layer_norm; glu_fused (gelu); rope",
    "olmo": "layer_norm; glu (silu); rope",
    "qwen3_next": "rms_norm (1 + weight, fp32); gated_rms_norm; glu (silu); experts' glu_fused (silu); rope",
    "zamba": "rms_norm; glu (gelu)",
}


# Models


@pytest.mark.parametrize("model_type", REPLACED)
def test_a_patched_model_is_the_model(model_type):
    if model_type not in model_zoo.names():
        pytest.skip("this version of transformers does not have it")
    result = check(model_type)
    assert result["status"] == "ok", result
    assert result["restored"]
    assert {*result["replaced"]} == {*REPLACED[model_type].split("; ")}


@pytest.mark.parametrize("model_type", ["florence2", "llava", "qwen2_vl", "qwen3_vl_moe", "smolvlm"])
def test_a_patched_image_text_model_is_the_model(model_type):
    result = check(model_type, image_text=True)
    assert result["status"] == "ok", result
    assert result["restored"]
    assert result["norm"]
    assert result["images"] or model_type == "florence2"


@pytest.fixture
def llama():
    model = model_zoo.build("llama")
    yield model
    unpatch(model)


def same(model, expected, inputs, tolerance=1e-5):
    loss, grads = loss_and_grads(model, inputs)
    torch.testing.assert_close(loss, expected[0], rtol=tolerance, atol=tolerance)
    assert difference(grads, expected[1])[0] <= tolerance * 1e5


def kinds(model):
    return [type(replacement_of(module)) for module in model.modules() if replacement_of(module) is not None]


def test_copies_and_pickles_stay_patched(llama):
    inputs = model_zoo.inputs_of(llama)
    patch(llama, loss_head=False)
    expected, names = loss_and_grads(llama, inputs), kinds(llama)
    assert {Norm, GatedMLP, Rotations} == set(names)
    saved = io.BytesIO()
    torch.save(llama, saved)
    saved.seek(0)
    for other in (copy.deepcopy(llama), pickle.loads(pickle.dumps(llama)), torch.load(saved, weights_only=False)):
        assert kinds(other) == names
        same(other, expected, inputs)
        assert other.model.norm.weight is not llama.model.norm.weight
        with torch.no_grad():
            other.model.norm.weight.mul_(2)  # a copy that ran the original's forward would not notice
        assert not torch.equal(other(**inputs).loss, expected[0])
        unpatch(other)
        assert not kinds(other)


def test_saving_and_loading(llama, tmp_path):
    inputs = model_zoo.inputs_of(llama)
    expected, state = loss_and_grads(llama, inputs), list(llama.state_dict())
    patch(llama, loss_head=False)
    assert list(llama.state_dict()) == state
    llama.save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not kinds(loaded)
    same(loaded.train(), expected, inputs)
    loaded = AutoLigerModelForCausalLM.from_pretrained(tmp_path, patch_options={"loss_head": False})
    assert kinds(loaded) == kinds(llama)
    assert loaded.liger_report.counts["rms_norm"] == 9
    same(loaded.train(), expected, inputs)
    made = AutoLigerModelForCausalLM.from_config(llama.config, patch_options={"loss_head": False, "norms": False})
    assert set(kinds(made)) == {GatedMLP, Rotations}
    assert AutoLigerModelForCausalLM.register  # what else the class has is there


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "cohere", "qwen3_next"])
def test_bfloat16_and_autocast(model_type):
    model = model_zoo.build(model_type)
    inputs = model_zoo.inputs_of(model)
    for of_weights in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=of_weights == torch.float32):
            expected = loss_and_grads(model.to(of_weights), inputs)
            patch(model, loss_head=False)
            same(model, expected, inputs, tolerance=5e-3)
        unpatch(model)


@pytest.mark.parametrize("adapters_first", [True, False])
def test_adapters(llama, adapters_first):
    inputs, targets = model_zoo.inputs_of(llama), ("gate_proj", "up_proj", "down_proj", "q_proj")
    expected = loss_and_grads(adapted(copy.deepcopy(llama), *targets), inputs)
    if not adapters_first:
        patch(llama, loss_head=False)
    model = adapted(llama, *targets)
    report = patch(model, loss_head=False)
    assert report.counts == {"glu (silu)": 4, "rms_norm": 9, "rope": 4}
    same(model, expected, inputs)
    unpatch(model)
    unpatch(llama)
    assert not kinds(model)
    loss, _ = loss_and_grads(model, inputs)
    assert torch.equal(loss, expected[0])


def test_patching_again_after_the_class_was_wrapped(llama, monkeypatch):
    patch(llama)
    kind, ids = type(llama).__mro__[1], torch.randint(17, (2, 5))
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs)))
    patch(llama)
    assert llama(input_ids=ids, labels=ids).logits is None


def test_unpatching_what_fully_shard_has_made_a_unit(one_process):
    plain = MLP()
    ours = copy.deepcopy(plain)
    patch(ours, loss_head=False)
    fully_shard(ours, mesh=init_device_mesh("cpu", (1,)))  # otherwise it moves the weights to a GPU
    unit, report = type(ours).__name__, patch(ours, tile_mlps=2, loss_head=False)
    assert replacement_of(ours).tile == 2
    assert isinstance(ours, FSDPModule)
    assert (type(ours).__name__, report.unchanged) == (unit, False)
    x = torch.randn(3, plain.down_proj.out_features)
    torch.testing.assert_close(ours(x), plain(x))
    unpatch(ours)
    assert replacement_of(ours) is None
    assert inspect.getattr_static(type(ours), "forward") is MLP.forward
    torch.testing.assert_close(ours(x), plain(x))


def test_what_changed_since_is_not_undone_by_mistake(llama):
    patch(llama, loss_head=False)
    nn.utils.parametrizations.weight_norm(llama.model.norm, dim=None)
    with pytest.raises(RuntimeError, match=r"model\.norm cannot be unpatched.*Parametrized"):
        unpatch(llama)
    assert len(kinds(llama)) == 17
    nn.utils.parametrize.remove_parametrizations(llama.model.norm, "weight")
    unpatch(llama)
    assert not kinds(llama)


def test_functions_of_one_kind_are_told_apart():
    class Activated(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            return self.function(x)

    functions = (F.silu, F.gelu, F.relu, lambda x: F.silu(x))
    report = patch(nn.ModuleList([MLP(Activated(function)) for function in functions]), loss_head=False)
    assert [entry.replaced_by for entry in report.entries] == ["glu (silu)", "glu (gelu)", None, "glu (silu)"]


def test_choosing_what_to_patch(llama):
    report = patch(llama, loss_head=False, norms=False, rope=False)
    assert report.counts == {"glu (silu)": 4}
    unpatch(llama)
    asked = []

    def only_the_first_layer(module, name):
        asked.append((module, name))
        return "layers.0." in name

    report = patch(llama, loss_head=False, filter_fn=only_the_first_layer)
    norms = {entry.path for entry in report.replaced if entry.replaced_by == "rms_norm"}
    assert norms == {f"model.layers.0.{place}_layernorm" for place in ("input", "post_attention")}
    assert {entry.reason for entry in report.left} == {"left out by filter_fn"}
    assert all(dict(llama.named_modules())[name] is module for module, name in asked)
    assert {"", "model", "model.layers"}.isdisjoint(name for _, name in asked)  # nothing there is replaced


def test_patching_leaves_everything_else_alone(llama):
    state = {name: value.clone() for name, value in llama.state_dict().items()}
    grads_needed = [p.requires_grad for p in llama.parameters()]
    before, classes = torch.get_rng_state(), [type(module) for module in llama.modules()]
    inputs = model_zoo.inputs_of(llama.eval())
    with torch.inference_mode():
        expected = llama(**inputs).logits
        with torch.autocast("cpu", torch.bfloat16):
            report = patch(llama, loss_head=False)
        torch.testing.assert_close(llama(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
        assert not torch.is_grad_enabled()
    assert len(report.replaced) == len(report.entries)
    assert torch.equal(before, torch.get_rng_state())
    assert not llama.training
    assert [p.requires_grad for p in llama.parameters()] == grads_needed
    assert all(p.grad is None for p in llama.parameters())
    assert all(torch.equal(value, state[name]) for name, value in llama.state_dict().items())
    assert [type(module).__name__ for module in llama.modules()] == [kind.__name__ for kind in classes]
    for _ in range(2):
        unpatch(llama)
        assert [type(module) for module in llama.modules()] == classes


LLAMA, ACTIVATIONS = "transformers.models.llama.modeling_llama", "transformers.activations"


def first_mlp(model):
    return model.model.layers[0].mlp


#: What is changed in a model: an attribute, with a warning, or a function of the process.
CHANGES = {
    "an eps": lambda model: (model.model.norm, "variance_epsilon", 0.5),
    "an activation": lambda model: (first_mlp(model), "act_fn", nn.ReLU()),
    "experts' activation": lambda model: (first_mlp(model).experts, "act_fn", nn.ReLU()),
    f"{LLAMA}.eager_attention_forward": lambda old: lambda *args, **options: (old(*args, **options)[0] * 3, None),
    f"{LLAMA}.apply_rotary_pos_emb": lambda old: lambda q, *args, **options: old(q * 3, *args, **options),
    f"{ACTIVATIONS}.SiLUActivation.forward": lambda old: lambda self, x: old(self, x) * 2,
}


@pytest.mark.parametrize("place", CHANGES)
def test_what_changes_after_patch_counts(place, monkeypatch):
    owner = place.rpartition(".")[0]
    model, change = model_zoo.build("mixtral" if "experts" in place else "llama"), CHANGES[place]
    model.set_attn_implementation("eager")
    inputs, plain = model_zoo.inputs_of(model), copy.deepcopy(model)
    before = loss_and_grads(plain, inputs)[0]
    patch(model, loss_head=False)
    model, number = pickle.loads(pickle.dumps(model)), len(kinds(model))
    if owner:
        monkeypatch.setattr(place, change(pydoc.locate(place)))
    else:
        setattr(*change(plain))
        with pytest.warns(RuntimeWarning, match=r"was changed after patch\(\).*Call liger_losses.patch\(model\) again"):
            setattr(*change(model))
        setattr(*change(model))
    expected = loss_and_grads(plain, inputs)
    assert abs(expected[0] - before) > 1e-6
    same(model, expected, inputs)
    assert len(kinds(model)) == number - (not owner)


def test_a_traced_model_is_the_model(llama):
    patch(llama.eval(), loss_head=False)
    mlp, hidden = llama.model.layers[0].mlp, torch.randn(2, 200, llama.config.hidden_size)
    traced = torch.jit.trace(mlp, hidden, check_trace=False)
    torch.testing.assert_close(traced(2 * hidden), mlp(2 * hidden))


def test_other_attributes_may_change_after_patch(llama):
    """Those of frameworks, those that are set to what they are, and layers that are called as before."""
    patch(llama, loss_head=False)
    number, norm, mlp = len(kinds(llama)), llama.model.norm, llama.model.layers[0].mlp
    for counter in range(2):
        norm.ds_grads_remaining = counter
    norm.variance_epsilon, mlp.act_fn = float(norm.variance_epsilon), mlp.act_fn
    norm.weight, mlp.up_proj = nn.Parameter(norm.weight * 2), copy.deepcopy(mlp.up_proj)
    llama.model.layers[0].self_attn.scaling = 0.5
    assert len(kinds(llama.train())) == number


def test_an_attribute_that_cannot_change_after_patch():
    norm = nn.LayerNorm(8)
    patch(norm)
    nn.utils.parametrizations.weight_norm(norm, dim=None)
    with pytest.raises(RuntimeError, match="eps of a patched LayerNorm cannot change: its class was changed to Param"):
        norm.eps = 0.5
    assert norm.eps == 1e-5


#: Classes without a file, and whose forward cannot be read.
Executed = type("Executed", (nn.Module,), {"forward": eval("lambda self, x: x")})
Raising = type("Raising", (nn.LayerNorm,), {"forward": property(lambda self: 1 / 0)})
EMPTY = "its weight is empty, as FSDP1 leaves it on some processes; patch before sharding"
UNUSUAL = {
    "fx": (lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), set()),
    "exec": (Executed, set()),
    "not initialized": (lambda: nn.ModuleList([nn.LazyLinear(4), nn.LazyLinear(4)]), set()),
    "empty": (lambda: nn.RMSNorm(0), {EMPTY}),
    "raises": (lambda: Raising(8), {"it cannot be probed (ZeroDivisionError: division by zero)"}),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_cannot_be_probed_is_reported(llama, name):
    make, reasons = UNUSUAL[name]
    llama.tower = make()
    report = patch(llama)
    assert {entry.reason for entry in report.left} == reasons
    assert len(report.replaced) == 18


@pytest.mark.parametrize("last", ["model.norm", "lm_head"])
def test_a_model_is_as_before_if_patch_raises(llama, last):
    def filter_fn(module, name):
        return name != last or 1 / 0

    def state():
        parts = [(type(module), {**vars(module)}) for module in llama.modules()]
        hooks = [{**vars(module)[kind]} for module in llama.modules() for kind in HOOKS]
        return [kind for kind, _ in parts], [[*map(id, values.values())] for _, values in parts], hooks

    patch(llama, filter_fn=lambda module, name: "layers.0" in name)
    before = state()
    with pytest.raises(ZeroDivisionError):
        patch(llama, filter_fn=filter_fn, tile_mlps=4)
    assert state() == before


def test_what_is_no_model_is_refused():
    for function in (patch, unpatch):
        with pytest.raises(TypeError, match=r"must be a torch.nn.Module.*got str.*AutoLigerModelForCausalLM"):
            function("meta-llama/Llama-3.2-1B")
    with pytest.raises(TypeError, match="from_pretrained"):
        AutoLigerModelForCausalLM()


@pytest.mark.parametrize("end", ["unpatched", "patched", "failed"])
def test_nothing_of_the_process_outlives_a_patched_model(end):
    """No table keeps the model, its classes or those that were made for it, and no name or hook of torch changes."""

    class OwnMLP(MLP):
        pass

    model = model_zoo.build("llama")

    class OwnAttention(type(model.model.layers[0].self_attn)):
        pass

    model.model.layers[0].mlp, model.model.layers[1].self_attn.__class__ = OwnMLP(size=64), OwnAttention
    names, own = [dict(vars(module)) for module in KEPT], {*vars(model)}
    if end == "failed":
        with pytest.raises(ZeroDivisionError):
            patch(model, filter_fn=lambda module, path: 1 / ("1.self_attn" not in path))
    else:
        patch(model)
    inputs = model_zoo.inputs_of(model)
    model(**inputs).loss.backward()
    layers = (model.model.layers[0].mlp, model.model.layers[1].self_attn, model.model.norm, model.lm_head)
    kept = [*map(weakref.ref, layers), *(weakref.ref(type(layer)) for layer in layers[:2]), weakref.ref(OwnMLP)]
    if end == "unpatched":
        unpatch(model)
        assert {*vars(model)} == own
    del model, layers, inputs, OwnMLP, OwnAttention
    for _ in range(3):  # what was made of a class is deleted first
        gc.collect()
    assert [reference() for reference in kept] == [None] * 7
    assert [dict(vars(module)) for module in KEPT] == names


#: Modules with hooks and functions of the whole process, and a class of others.
KEPT = (nn.modules.module, F, importlib.import_module(LLAMA), pydoc.locate(f"{LLAMA}.LlamaAttention"))


# Few tokens without gradients, as in generation


def _functions(call):
    """How many functions of the package a call enters, from Python."""
    entered = []

    def note(frame, event, _):
        if event == "call" and f"{os.sep}liger_losses{os.sep}" in frame.f_code.co_filename:
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(entered)


@interpreted
def test_one_token_takes_few_steps_and_launches(monkeypatch):
    """Checks, outputs, and one launch."""
    monkeypatch.setenv("LIGER_LOSSES_BACKEND", "triton")
    launches = []
    monkeypatch.setattr(Launches, "__call__", lambda *arguments, **options: launches.append(arguments))
    model = model_zoo.build("llama", num_hidden_layers=1).to(DEVICE)
    patch(model)
    attention, norm, mlp = model.model.layers[0].self_attn, model.model.norm, model.model.layers[0].mlp
    new = inspect.getclosurevars(type(attention).forward).nonlocals["new"]
    (rotate,) = inspect.getclosurevars(new).nonlocals["kernels"].values()
    sizes = (1, 1, model.config.hidden_size), (1, 2, 1, 16), (1, 1, 16)
    x, heads, angles = [torch.zeros(size, device=DEVICE) for size in sizes]
    calls = {
        "norm": (lambda: norm(x), 23, 1),
        "rotation": (lambda: rotate(heads, heads, angles, angles), 28, 1),
        "MLP": (lambda: mlp(x), 6, 0),
        "head": (lambda: model.lm_head(x), 3, 0),
    }
    with torch.no_grad():
        for name, (call, most, launched) in calls.items():
            call()
            launches.clear()
            assert _functions(call) <= most, name
            assert len(launches) == launched, name


def test_torchs_norms_of_few_tokens_run_themselves():
    """They are one operation."""
    plain = nn.ModuleList([nn.LayerNorm(32), nn.RMSNorm(32, eps=1e-6), model_zoo.build("llama").model.norm])
    patched = copy.deepcopy(plain)
    patch(patched)
    with torch.no_grad():
        for module, its in zip(patched, (True, True, False), strict=True):
            call, size = replacement_of(module).call, len(module.weight)
            assert [call(module, torch.randn(n, size)) is NotImplemented for n in (8, 500)] == [its, False]
