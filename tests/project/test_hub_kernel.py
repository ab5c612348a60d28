"""The Hub kernel in ``kernels/``: without dependencies, and right in models that ``kernels`` changes."""

import ast
import copy
import functools
import importlib
import importlib.metadata
import importlib.util
import pathlib
import sys

import pytest
import torch

import liger_losses
from liger_losses.layers.rms_norm import rms_norm
from tests.kernels.cases import DEVICE
from tests.models import randomised, small
from tests.reference import relative_error
from tests.test_modules import modules

FOLDER = pathlib.Path(__file__).parents[2] / "kernels"
#: Imported only in functions that read weights of that package.
OPTIONAL = {"chunked/core/quantizers.py": {"bitsandbytes"}}


@pytest.fixture(scope="module")
def builder():
    spec = importlib.util.spec_from_file_location("build_hub_kernel", FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.sources = functools.cache(module.sources)
    return module


@pytest.fixture(scope="module")
def built(builder, tmp_path_factory):
    try:  # not importorskip: without it, the folder kernels/ would be imported as a namespace package
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package kernels is not installed (make test installs it)")
    folder = tmp_path_factory.mktemp("kernels")
    builder.build(folder)
    return folder


def test_it_is_no_package_of_its_own():
    assert not (FOLDER / "__init__.py").exists()


def test_it_imports_nothing_but_torch_and_triton(builder):
    allowed = {"torch", "triton", "typing_extensions", *sys.stdlib_module_names}  # torch needs the third
    for name, text in builder.sources().items():
        tree, found = ast.parse(text), []
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
                found += [(package.split(".")[0], node in tree.body) for package in names]
        for package, at_the_top in found:
            assert package in allowed or (package in OPTIONAL.get(name, ()) and not at_the_top), (name, package)
        assert "torch.ops.liger_losses" not in text, name
        assert '"liger_losses::' not in text, name  # operators of another build, beside this one


def annotate(monkeypatch, cls, name):
    """What the decorators of transformers do where it supports the installed version of kernels."""
    from kernels import replace_kernel_forward_from_hub

    for attribute in ("kernel_layer_name", "kernel_condition"):
        monkeypatch.setattr(cls, attribute, None, raising=False)
    replace_kernel_forward_from_hub(cls, name)


def annotate_rotation(monkeypatch, model, module):
    """The same for the function that rotates queries and keys, which kernels turns into a module."""
    from kernels import use_kernel_forward_from_hub

    function = module.apply_rotary_pos_emb
    if not isinstance(function, torch.nn.Module):
        function = use_kernel_forward_from_hub("rotary_pos_emb")(function)
    monkeypatch.setattr(module, "apply_rotary_pos_emb", function)
    monkeypatch.setattr(function, "forward", function.forward)
    for layer in model.model.layers:
        layer.self_attn._kernel_funcs = {"apply_rotary_pos_emb": function}
    return function


def kernelized(model, built, layers):
    """The model with our layers, by the names of its own."""
    from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping

    mapping = {
        name: {DEVICE: {Mode.TRAINING | Mode.TORCH_COMPILE: LocalLayerRepository(built, layer_name=layer)}}
        for name, layer in layers.items()
    }
    with use_kernel_mapping(mapping, inherit_mapping=False):
        return kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=DEVICE)


#: By family, our layers for its norm and its MLP, and options of its configuration.
FAMILIES = {
    "Llama": ("RMSNorm", "SwiGLUMLP", {}),
    "Gemma": ("RMSNormZeroCentered", "GeGLUMLP", {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"}),
}


def tiny(family):
    """The module of a family, a model, and our layers by the classes that they replace."""
    module = importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    norm, mlp, options = FAMILIES[family]
    layers = {getattr(module, f"{family}RMSNorm"): norm, getattr(module, f"{family}MLP"): mlp}
    return module, small(family, vocab_size=61, num_hidden_layers=2, **options), layers


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_kernelized_model_has_the_right_loss_and_gradients(built, monkeypatch, family, backend):
    pytest.importorskip("transformers")
    if backend == "triton":
        pytest.importorskip("triton")
    from kernels import get_local_kernel

    module, model, layers = tiny(family)
    plain = randomised(model).to(DEVICE).train()
    exact, ours = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 61, (2, 9), generator=g).to(DEVICE)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=g).to(DEVICE) < 0.3, -100)
    losses = [other(ids, labels=labels).loss for other in (exact, plain)]

    monkeypatch.setenv("LIGER_LOSSES_BACKEND", backend)
    for cls, layer in layers.items():
        annotate(monkeypatch, cls, layer)
    rotation = annotate_rotation(monkeypatch, ours, module)
    kernelized(ours, built, {**{name: name for name in layers.values()}, "rotary_pos_emb": "RotaryPosEmb"})
    kernel = get_local_kernel(built)
    replaced = [part for part in ours.modules() if type(part) in layers]
    assert len(replaced) == 7
    for part in [*replaced, rotation]:
        assert part.forward.__func__.__module__ == f"{kernel.__name__}.layers"
    hidden = ours.model(ids).last_hidden_state[:, :-1]
    losses.append(kernel.layers.LinearCrossEntropy()(hidden, ours.lm_head.weight, labels[:, 1:]))

    for loss in losses:
        loss.backward()
    theirs = relative_error(losses[1], losses[0])
    assert relative_error(losses[2], losses[0]) <= 2 * theirs + 1e-6
    for (name, p), q, r in zip(exact.named_parameters(), plain.parameters(), ours.parameters(), strict=True):
        assert relative_error(r.grad, p.grad) <= 2 * relative_error(q.grad, p.grad) + 1e-6, name


#: For each layer of the kernel, a module that it may be put into.
SINGLE = {"RMSNorm": "Llama", "RMSNormFP32": "Olmo2", "RMSNormZeroCentered": "Gemma", "GatedRMSNorm": "Qwen3Next"}
SINGLE |= {"LayerNorm": "LayerNorm"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", SINGLE)
def test_layers_compute_what_the_modules_do(built, monkeypatch, layer, dtype):
    pytest.importorskip("transformers")
    plain, _, count = modules(SINGLE[layer])
    plain = randomised(plain).to(DEVICE, dtype)
    ours = copy.deepcopy(plain)
    annotate(monkeypatch, type(plain), layer)
    kernelized(ours, built, {layer: layer})
    g = torch.Generator().manual_seed(3)
    inputs = [torch.randn(3, 5, 24, generator=g).to(DEVICE, dtype) for _ in range(count)]
    results = []
    for module in (plain, ours):
        x = [part.clone().requires_grad_() for part in inputs]
        out = module(*x)
        out.backward(inputs[0])
        results.append([out, *(part.grad for part in x), *(p.grad for p in module.parameters())])
    if dtype == torch.bfloat16:  # where another rounding rule differs in a fifth of the entries
        assert (results[0][0] != results[1][0]).float().mean() < 0.02
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(*results[::-1], **tolerance)


def test_a_gate_that_is_no_silu_is_refused(built):
    pytest.importorskip("transformers")
    from kernels import get_local_kernel

    layer, (module, *_) = get_local_kernel(built).layers.GatedRMSNorm, modules("Qwen3Next")
    module.activation = "sigmoid"  # as in Kimi Linear, whose module has the same name for kernels
    x = torch.randn(2, 24)
    with pytest.raises(ValueError, match=r"gates with silu, this module with 'sigmoid'"):
        layer.forward(module, x, x)


def test_rotations_of_angles_that_are_held_once(built):
    from kernels import get_local_kernel

    layer = get_local_kernel(built).layers.RotaryPosEmb()
    g = torch.Generator().manual_seed(4)
    q, k, angles = (torch.randn(shape, generator=g) for shape in ((1, 4, 5, 8), (1, 2, 5, 8), (1, 5, 4)))
    cos, sin = angles.cos(), angles.sin()
    first, second = q.chunk(2, -1)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    torch.testing.assert_close(layer(q, k, cos, sin)[0], expected)
    with pytest.raises(ValueError, match="as wide as the heads"):
        layer(q, k, cos[..., :3], sin[..., :3])


def test_patching_finds_a_rotation_that_kernels_has_made_a_module_of(built, monkeypatch):
    pytest.importorskip("transformers")
    module, model, _ = tiny("Llama")
    function = annotate_rotation(monkeypatch, model, module)
    report = liger_losses.patch(model)
    assert report.counts["rope"] == 2
    assert module.apply_rotary_pos_emb is function
    monkeypatch.setattr(function, "forward", None)  # patched layers do not call it
    ids = torch.randint(0, 61, (2, 9))
    assert model(ids, labels=ids).loss.isfinite()


@pytest.mark.slow
def test_it_can_be_compiled_beside_the_library(built):
    from kernels import get_local_kernel

    kernel = get_local_kernel(built)
    assert kernel.rms_norm is not rms_norm
    assert kernel.__name__ in kernel.rms_norm.__module__
    x, weight = torch.randn(3, 8, device=DEVICE), torch.rand(8, device=DEVICE)
    for function in (rms_norm, kernel.rms_norm):
        x.grad, _ = None, x.requires_grad_()
        torch.compile(function, backend="aot_eager", fullgraph=True)(x, weight).sum().backward()
        expected = torch.autograd.grad(torch.nn.functional.rms_norm(x, (8,), weight, 1e-6).sum(), x)[0]
        torch.testing.assert_close(x.grad, expected)
