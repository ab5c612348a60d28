"""MLPs over tiles of tokens: outputs and gradients of the whole, in the memory of a tile."""

import copy
import functools
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from liger_losses.modules import SwiGLUMLP
from liger_losses.patching.mlps import GatedMLP
from liger_losses.patching.patch import patch, unpatch
from liger_losses.patching.swap import replacement_of
from liger_losses.patching.tiles import tile_of
from tests.kernels.cases import DEVICE
from tests.models import adapted
from tests.patching.test_layers import MLP as Gated
from tests.patching.test_layers import Fused
from tests.processes import BACKENDS, device_type, start, whole

H, INNER = 16, 40
MLP = functools.partial(Gated, size=H, inner=INNER)


class GateSecond(Fused):
    def product(self, both):
        up, gate = both.chunk(2, -1)
        return up * self.act(gate)


MODULES = {kind.__name__: functools.partial(kind, H, INNER) for kind in (Fused, GateSecond, SwiGLUMLP)} | {"MLP": MLP}


def made(make=MLP, dtype=torch.float64):
    torch.manual_seed(0)
    return make().to(dtype)


def tiled(module, tokens=4, **options):
    module = copy.deepcopy(module)
    patch(module, tile_mlps=tokens, **options)
    return module


def inputs(*leading, dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    return torch.randn(*leading, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()


def results(module, x, through=lambda module, x: module(x)):
    """The output, and all gradients."""
    module.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    out = through(module, x)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    out.backward(upstream)
    return [out.detach(), x.grad, *(weight.grad for weight in module.parameters())]


def check_same(actual, expected, tolerance=1e-12):
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("leading", [(13,), (2, 13), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_tiles_give_what_the_whole_gives(name, leading):
    plain = made(MODULES[name])
    for tokens in (1, 4, 12, 100):
        ours = tiled(plain, tokens)
        assert type(replacement_of(ours)) is GatedMLP
        check_same(results(ours, inputs(*leading)), results(plain, inputs(*leading)))
    unpatch(ours)
    assert replacement_of(ours) is None


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_in_half_precision_as_exact_as_the_whole(backend, monkeypatch):
    monkeypatch.setenv("LIGER_LOSSES_BACKEND", backend)
    device = DEVICE if backend == "triton" else "cpu"
    plain = made(dtype=torch.bfloat16).to(device)
    x = inputs(3, 40, dtype=torch.bfloat16).to(device).detach().requires_grad_()
    exact = results(copy.deepcopy(plain).double(), x.double().detach().requires_grad_())
    whole, ours = results(plain, x), results(tiled(plain, 8), x)
    for a, w, e in zip(ours, whole, exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - e).norm() <= 2 * (w - e).norm()


def test_gradients_of_weights_are_summed_in_fp32():
    """1000 tiles of one token, whose gradients of 1 a running sum in bf16 would stop adding at 256."""
    ours = tiled(made(dtype=torch.bfloat16), 1)
    ours(torch.ones(1000, H, dtype=torch.bfloat16)).sum().backward()
    torch.testing.assert_close(ours.down_proj.bias.grad, torch.full((H,), 1000.0).bfloat16(), rtol=0, atol=0)


class Widths(TorchDispatchMode):
    """The largest number of rows of the intermediate size that any tensor had."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == INNER:
                self.rows = max(self.rows, tensor.numel() // INNER)
        return out


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_no_tensor_of_the_intermediate_size_is_larger_than_a_tile(name, checkpointed):
    ours, x = tiled(made(MODULES[name]), 48), inputs(500)
    with Widths() as widths:
        out = checkpoint(ours, x, use_reentrant=False) if checkpointed else ours(x)
        out.sum().backward()
    assert widths.rows <= 48


class Products(TorchDispatchMode):
    """The rows of all matrix products, and their dtypes."""

    rows, dtypes = 0, ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            matrix, other = args[-2:]
            self.dtypes = {*self.dtypes, matrix.dtype}
            self.rows += matrix.numel() * other.shape[1] // (H * INNER)
        return func(*args, **(kwargs or {}))


def test_no_work_is_repeated_that_checkpointing_does_not_repeat():
    for module in (tiled(made()), made()):
        x = inputs(64)
        with Products() as products:
            checkpoint(lambda x, module=module: module(x) + x, x, use_reentrant=False).sum().backward()
        assert products.rows == 11 * 64


def test_under_what_hooks_modules():
    with FlopCounterMode(display=False) as counter:
        tiled(made())(inputs(16)).sum().backward()
    assert counter.get_total_flops() == 12 * 16 * H * INNER * 2


def compiled(module, x):
    return torch.compile(nn.Sequential(nn.Tanh(), module, nn.Tanh()), backend="aot_eager")(x)


def functional(module, x):
    """With weights that are no parameters."""
    weights = {name: 2 * weight / 2 for name, weight in module.named_parameters()}
    return torch.func.functional_call(module, weights, (x,))


#: How tiles are run, and how the whole.
THROUGH = {
    "checkpoint": (functools.partial(checkpoint, use_reentrant=False), nn.Module.__call__),
    "reentrant checkpoint": (functools.partial(checkpoint, use_reentrant=True), nn.Module.__call__),
    "compiled": (compiled, lambda module, x: module(x.tanh()).tanh()),
    "functional": (functional, functional),
}


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("way", THROUGH)
def test_tiles_within_others(way):
    plain, (ours, theirs) = made(), THROUGH[way]
    check_same(results(tiled(plain), inputs(2, 13), ours), results(plain, inputs(2, 13), theirs))


def test_layers_are_called_for_each_tile_and_no_others():
    """Not without tokens: hooks and layers of 8 bits may take the largest entry of what they get."""
    ours, tokens = tiled(made()), []
    for layer in (ours.gate_proj, ours.down_proj):
        layer.register_forward_hook(lambda layer, args, out: tokens.append(out.shape[1]))
    out = ours(inputs(13))
    assert tokens == [4, 4, 4, 4, 4, 4, 1, 1]
    out.sum().backward()
    assert tokens[8:] == tokens[:8]


def test_what_needs_no_gradient_gets_none():
    x = inputs(13)
    for frozen, needs in ((("gate_proj.weight",), True), (("down_proj.weight", "up_proj.weight"), True), ((), False)):
        plain = made()
        for name in frozen:
            plain.get_parameter(name).requires_grad_(False)
        given = x.detach().requires_grad_(needs)
        check_same(results(tiled(plain), given), results(plain, given))
    frozen = made().requires_grad_(False)
    check_same(results(tiled(frozen), x), results(frozen, x))
    assert not tiled(frozen)(x.detach()).requires_grad
    with torch.no_grad():
        assert not tiled(made())(x).requires_grad


def test_backward_twice():
    ours, x = tiled(made()), inputs(13)
    out = ours(x).square().sum()
    first = torch.autograd.grad(out, [x, *ours.parameters()], retain_graph=True)
    check_same(torch.autograd.grad(out, [x, *ours.parameters()]), first, 0)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()
    (gradient,) = torch.autograd.grad(ours(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        gradient.sum().backward()


@pytest.mark.parametrize("backward_inside", [False, True])
def test_under_autocast(backward_inside):
    """Weights that the tiles' forward casts without gradients are not those of other layers' forward."""
    plain = made(dtype=torch.float32)
    ours, x = tiled(plain), inputs(13, dtype=torch.float32)

    def run(module):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
            loss = (out.float() + F.linear(x, module.gate_proj.weight).float().sum()).square().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        return [out.detach(), *(weight.grad for weight in module.parameters())]

    with Products() as products:
        found = run(ours)
    assert products.dtypes == {torch.bfloat16}
    for a, e in zip(found, run(plain), strict=True):
        assert a.dtype == e.dtype
        assert (a - e).norm() <= 0.01 * e.norm()


def test_dropout_is_that_of_the_forward():
    model = adapted(nn.ModuleDict({"mlp": MLP()}), "gate_proj", "up_proj", "down_proj", lora_dropout=0.5)
    plain = model.base_model.model["mlp"].double()
    ours, x = tiled(plain), inputs(13)
    assert replacement_of(ours) is not None

    def by_parts(module, x):
        return torch.cat([module(part[None])[0] for part in x.split(4)])

    torch.manual_seed(3)
    expected, drawn = results(plain, x, by_parts), torch.rand(1)
    torch.manual_seed(3)
    check_same(results(ours, x), expected, 1e-9)
    assert torch.equal(torch.rand(1), drawn)


def test_hooks_on_weights_get_the_whole_gradient_once():
    plain = made()
    ours, seen = tiled(plain), []
    for module in (plain, ours):
        weight = module.down_proj.weight
        weight.register_hook(lambda grad: 2 * grad)
        weight.register_hook(lambda grad: seen.append(grad.clone()))
    for _ in range(2):
        check_same(results(ours, inputs(2, 13)), results(plain, inputs(2, 13)))
    assert len(seen) == 4


def test_weights_that_changed_before_backward():
    """Modified ones are torch's error; the others are those of the forward."""
    plain, x = made(), inputs(13)
    expected = [weight.grad for weight in (results(plain, x), plain.parameters())[1]]
    changes = {
        "modified": lambda module: module.up_proj.weight.detach().add_(1),
        "replaced": lambda module: setattr(module.up_proj, "weight", nn.Parameter(module.up_proj.weight + 1)),
        "frozen": lambda module: module.requires_grad_(False),
    }
    for name, change in changes.items():
        ours = tiled(plain)
        weights, out = list(ours.parameters()), ours(x)
        upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
        change(ours)
        if name == "modified":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.backward(upstream)
        else:
            found = [weight.requires_grad_() for weight in weights]
            check_same(torch.autograd.grad(out, found, upstream), expected)


def test_choosing_tiles():
    model = nn.ModuleList([made(), made(MODULES["Fused"])])

    def replaced(**options):
        return {entry.path: entry.replaced_by for entry in patch(model, loss_head=False, **options).replaced}

    fused = "glu_fused (gelu)"
    assert replaced() == {"0": "glu (silu)", "1": fused}
    gated = "glu (silu), tiles of 8 tokens"
    assert replaced(tile_mlps=8, filter_fn=lambda module, path: path != "1") == {"0": gated, "1": fused}
    assert replaced() == {"0": gated, "1": fused}
    for module in (copy.deepcopy(model[0]), pickle.loads(pickle.dumps(model[0]))):
        assert replacement_of(module).tile == 8
    assert replaced(tile_mlps=True) == {"0": "glu (silu), tiles", "1": f"{fused}, tiles"}
    assert replaced(tile_mlps=1)["0"] == "glu (silu), tiles of 1 tokens"
    unpatch(model)
    assert not any(replacement_of(module) for module in model)
    for wrong in ({"tile_mlps": value} for value in (0, -1, 2.5, "all")):
        with pytest.raises(ValueError, match="tile_mlps must be True, False or a positive number of tokens, and needs"):
            patch(model, **wrong)
    with pytest.raises(ValueError, match="needs mlps=True, got 8"):
        patch(model, tile_mlps=8, mlps=False)


def test_the_size_of_a_tile():
    """64 MiB of the widest tensor in half precision, but no fewer than 4096 tokens."""
    with torch.device("meta"):
        assert tile_of(SwiGLUMLP(4096, 14336)) == tile_of(SwiGLUMLP(2048, 8192)) == 4096
        assert tile_of(SwiGLUMLP(576, 1536)) == 21760


# --- Processes --------------------------------------------------------------------------------------------------------


def spread_by(name, model):
    if name == "ddp":
        return DistributedDataParallel(model, static_graph=False)
    policy = {"mesh": init_device_mesh(device_type(), (2,))}  # otherwise it takes GPUs, and gloo none of their tensors
    if name == "fsdp, half":
        policy["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in model:
        fully_shard(part, **policy)
    return fully_shard(model, **policy)


def work(rank):
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    gathers = []
    original = _fsdp_param_group.foreach_all_gather
    _fsdp_param_group.foreach_all_gather = lambda *args, **kwargs: gathers.append(1) or original(*args, **kwargs)
    x = inputs(2, 26, dtype=torch.float32)[rank : rank + 1]
    for name in ("ddp", "fsdp", "fsdp, half"):
        counts, grads = [], []
        for tokens, checkpointing in itertools.product((False, 4), (False, name != "ddp")):
            gathers.clear()
            model = nn.Sequential(made(dtype=torch.float32), made(MODULES["Fused"], dtype=torch.float32))
            patch(model, tile_mlps=tokens)
            spread = spread_by(name, model)
            for _ in range(2):
                found = checkpoint(spread, x, use_reentrant=False) if checkpointing else spread(x)
                found.float().square().mean().backward()
            grads.append([whole(weight.grad) for weight in model.parameters()])
            counts.append(len(gathers))
        assert counts[:2] == counts[2:], (name, counts)
        for other in grads[1:]:
            for a, e in zip(other, grads[0], strict=True):
                assert (a - e).norm() <= (2e-2 if "half" in name else 1e-5) * e.norm(), name


@pytest.mark.distributed
@pytest.mark.parametrize("backend", BACKENDS)
def test_processes(tmp_path, backend):
    start(work, 2, tmp_path, backend=backend)


def partition(module):
    module.up_proj.weight.ds_id = 0


def shard(module):
    mesh = init_device_mesh("cpu", (1,))  # otherwise it moves the weights to a GPU
    fully_shard(module.up_proj, mesh=mesh)
    fully_shard(module, mesh=mesh)


@pytest.mark.parametrize(
    ("split", "reason"), [(partition, "ZeRO-3"), (shard, "fully_shard has made its up_proj a separate unit")]
)
def test_weights_that_are_partitioned_are_computed_as_a_whole(split, reason, one_process):
    plain, x = made(dtype=torch.float32), inputs(13, dtype=torch.float32)
    ours = tiled(plain)
    split(ours)
    with pytest.warns(RuntimeWarning, match=f"not computed in tiles in training: {reason}"):
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-5, atol=1e-5)
