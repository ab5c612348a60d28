"""The Hub kernel in ``kernels/``: without dependencies, and right in models that ``kernels`` changes."""

import ast
import copy
import functools
import importlib.metadata
import inspect
import pathlib
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch

import liger_losses
from tests.kernels.cases import DEVICE
from tests.models import randomised, small
from tests.seam import BACKENDS
from tests.test_modules import modules

FOLDER = pathlib.Path(__file__).parents[2] / "kernels"
#: Imported only in functions that read weights of that package.
OPTIONAL = {"chunked/core/quantizers.py": {"bitsandbytes"}}


@pytest.fixture(scope="module")
def builder():
    return SimpleNamespace(**runpy.run_path(str(FOLDER / "build.py")))


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
        nodes = [*ast.walk(ast.parse(text))]
        packages = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        packages |= {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and not n.level}
        assert packages <= allowed | OPTIONAL.get(name, set()), name
        assert "torch.ops.liger_losses" not in text, name
        assert '"liger_losses::' not in text, name  # operators of another build, beside this one


def kernel_of(built):
    from kernels import get_local_kernel

    return get_local_kernel(built)


def annotate_rotation(monkeypatch, model):
    """What the decorators of transformers do where it supports the installed version of kernels: the function that
    rotates queries and keys is a module."""
    from kernels import use_kernel_forward_from_hub

    module = sys.modules[type(model).__module__]
    function = module.apply_rotary_pos_emb
    if not isinstance(function, torch.nn.Module):
        function = use_kernel_forward_from_hub("rotary_pos_emb")(function)
    monkeypatch.setattr(module, "apply_rotary_pos_emb", function)
    monkeypatch.setattr(function, "forward", function.forward)
    for layer in model.model.layers:
        layer.self_attn._kernel_funcs = {"apply_rotary_pos_emb": function}
    return function


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kernelized_model_has_the_same_loss_and_gradients(built, backend, monkeypatch):
    from transformers.models.llama import modeling_llama

    from kernels import LocalLayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping

    plain = randomised(small(vocab_size=61, num_hidden_layers=2)).to(DEVICE).train()
    ours, ids = copy.deepcopy(plain), torch.randint(61, (2, 9)).to(DEVICE)
    losses, layers = [plain(ids, labels=ids).loss], {"LlamaRMSNorm": "RMSNorm", "LlamaMLP": "SwiGLUMLP"}
    for name, layer in layers.items():
        for attribute in ("kernel_layer_name", "kernel_condition"):
            monkeypatch.setattr(getattr(modeling_llama, name), attribute, None, raising=False)
        replace_kernel_forward_from_hub(getattr(modeling_llama, name), layer)
    monkeypatch.setenv("LIGER_LOSSES_BACKEND", backend)
    rotation, mode = annotate_rotation(monkeypatch, ours), Mode.TRAINING | Mode.TORCH_COMPILE
    names = {"RMSNorm": "RMSNorm", "SwiGLUMLP": "SwiGLUMLP", "rotary_pos_emb": "RotaryPosEmb"}
    of_ours = {name: LocalLayerRepository(built, layer_name=layer) for name, layer in names.items()}
    mapping = {name: {DEVICE: {mode: layer}} for name, layer in of_ours.items()}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(ours, mode=mode, device=DEVICE)
    replaced = [part for part in ours.modules() if type(part).__name__ in layers]
    assert len(replaced) == 7
    for part in [*replaced, rotation]:
        assert part.forward.__func__.__module__ == f"{kernel_of(built).__name__}.layers"
    hidden = ours.model(ids).last_hidden_state[:, :-1]
    losses.append(kernel_of(built).layers.LinearCrossEntropy()(hidden, ours.lm_head.weight, ids[:, 1:]))
    pairs = zip(losses, (plain, ours), strict=True)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss, model in pairs]
    torch.testing.assert_close([losses[1], *gradients[1]], [losses[0], *gradients[0]])


#: For each layer of the kernel, a module that it may be put into.
SINGLE = {"RMSNorm": "Llama", "RMSNormFP32": "Olmo2", "RMSNormZeroCentered": "Gemma", "GatedRMSNorm": "Qwen3Next"}
SINGLE |= {"LayerNorm": "LayerNorm", "SwiGLUMLP": "LlamaMLP", "GeGLUMLP": "GemmaMLP"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", SINGLE)
def test_layers_compute_what_the_modules_do(built, layer, dtype):
    pytest.importorskip("transformers")
    plain, _, count = modules(SINGLE[layer])
    plain = randomised(plain).to(DEVICE, dtype)
    g, results = torch.Generator().manual_seed(3), []
    inputs = [torch.randn(3, 5, 24, generator=g).to(DEVICE, dtype).requires_grad_() for _ in range(count)]
    leaves, ours = [*inputs, *plain.parameters()], getattr(kernel_of(built).layers, layer)
    takes = [list(inspect.signature(cls.forward).parameters) for cls in (type(plain), ours)]
    assert len(takes[0]) == len(takes[1])  # kernels refuses others, and those with a constructor or other attributes
    assert not {name for name in vars(ours) if not name.startswith("__")} - {"forward", "can_torch_compile"}
    for forward in (plain, functools.partial(ours.forward, plain)):
        out = forward(*inputs)
        results.append([out, *torch.autograd.grad(out, leaves, inputs[0].detach())])
    if dtype == torch.bfloat16:  # where another rounding rule differs in a fifth of the entries
        assert (results[0][0] != results[1][0]).float().mean() < 0.02
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 6e-2}
    torch.testing.assert_close(*results[::-1], **tolerance)


def test_a_gate_that_is_no_silu_is_refused(built):
    pytest.importorskip("transformers")
    layer, (module, *_) = kernel_of(built).layers.GatedRMSNorm, modules("Qwen3Next")
    module.activation = "sigmoid"  # as in Kimi Linear, whose module has the same name for kernels
    x = torch.randn(2, 24)
    with pytest.raises(ValueError, match=r"gates with silu, this module with 'sigmoid'"):
        layer.forward(module, x, x)


def test_rotations_of_angles_that_are_held_once(built):
    layer = kernel_of(built).layers.RotaryPosEmb()
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
    model = small(vocab_size=61, num_hidden_layers=2)
    function = annotate_rotation(monkeypatch, model)
    assert liger_losses.patch(model).counts["rope"] == 2
    assert sys.modules[type(model).__module__].apply_rotary_pos_emb is function
    monkeypatch.setattr(function, "forward", None)  # patched layers do not call it
    ids = torch.randint(0, 61, (2, 9))
    assert model(ids, labels=ids).loss.isfinite()
