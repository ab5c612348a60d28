"""Which rotary embeddings are recognised, and which near misses are left."""

import copy
import functools
import inspect
import pickle
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from benchmarks.coverage import model_zoo
from benchmarks.coverage.patches import difference, loss_and_grads
from liger_losses.patching import rotations
from liger_losses.patching.patch import patch, unpatch
from liger_losses.patching.probing import Mismatch
from liger_losses.patching.rotations import Rotation
from liger_losses.patching.rotations import match as match_rotation

pytest.importorskip("transformers")


# Rotary embedding


def _half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _rotation(turn=_half, scale=1.0):
    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple((x * cos + turn(x) * sin) * scale for x in (q, k))

    return rotate


def _of_the_last(q, k, cos, sin, unsqueeze_dim=1):
    """Entries of a head, where a partial rotation is of the first."""
    cos, sin, width = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), cos.shape[-1]
    parts = [(x[..., :-width], x[..., -width:]) for x in (q, k)]
    return tuple(torch.cat((first, last * cos + _half(last) * sin), -1) for first, last in parts)


@pytest.mark.parametrize(
    "function",
    [
        _rotation(lambda x: -_half(x)),
        _rotation(lambda x: _half(x).detach()),
        _rotation(scale=1.0001),
        _rotation(lambda x: x.flip(-1)),
        _rotation(lambda x: _half(x.clamp(-2, 2))),
        _of_the_last,
        lambda q, k, cos, sin: _rotation()(k, q, cos, sin),
        lambda q, k, cos, sin: _rotation()(q, k, sin, cos),
        lambda q, k, cos, sin: (_rotation()(q, k, cos, sin)[0], k),
        lambda q, k, cos, sin: list(_rotation()(q, k, cos, sin)),
        lambda q, k, sin, cos: _rotation()(q, k, cos, sin),
        lambda q, k, cos, sin, position_ids: _rotation()(q, k, cos, sin),
        lambda q, k, cos, sin: (q * cos + _half(q) * sin, k * cos + _half(k) * sin),
        lambda q, k, cos, sin: _rotation()(q, k, cos.mul_(1.0), sin.add_(0.1)),
    ],
)
def test_near_misses_of_rotations_are_left(function):
    with pytest.raises(Mismatch):
        match_rotation(function)


@pytest.mark.parametrize(("batch", "of_angles", "probed"), [(2, 2, True), (2, 1, True), (1, 3, False), (2, 3, False)])
def test_rotations_of_shapes_that_the_function_would_broadcast(batch, of_angles, probed):
    q, k, cos = torch.ones(batch, 4, 5, 16), torch.ones(batch, 2, 5, 16), torch.ones(of_angles, 5, 16)
    assert rotations._was_probed(q, k, cos, cos, unsqueeze_dim=1) == probed


# Modules that call them


apply_rotation = ROTATION = _rotation()
marked = []


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        marked.append(function.__name__)
        return function(*args, **kwargs)

    return wrapper


def rotate_both(q, angles, again=1, *, scale=1.0):
    """Calls itself, too."""
    q, _ = apply_rotation(q, q, *angles)
    return rotate_both(q, angles, again - 1, scale=scale) if again else q * scale


class Direct(nn.Module):
    def forward(self, q, angles):
        return apply_rotation(q, q, *angles)[0]


class ThroughHelper(nn.Module):
    def forward(self, q, angles):
        return rotate_both(q, angles, scale=2.0)


class Decorated(nn.Module):
    @decorated
    @torch.no_grad()
    def forward(self, q, angles, times=1):
        return apply_rotation(q, q, *angles)[0] * times


class OtherMethod(Direct):
    def rotate(self, q, angles):
        return super().forward(q, angles)

    def forward(self, q, angles):
        return apply_rotation(self.rotate(q, angles), q, *angles)[0] + self.turned(q, angles)

    def turned(self, q, angles):
        return apply_rotation(q, q, *angles)[1]


class OfParent(nn.Module):
    """Calls a method of a part, without its forward."""

    def __init__(self):
        super().__init__()
        self.part = OtherMethod()

    def forward(self, q, angles):
        return self.part.turned(q, angles)


@pytest.fixture
def computed(monkeypatch):
    """A list that grows by one for each call of the kernel."""
    calls, compute = [], Rotation.compute
    monkeypatch.setattr(Rotation, "compute", lambda *args, **kwargs: calls.append(0) or compute(*args, **kwargs))
    return calls


KINDS = [(Direct, 1), (ThroughHelper, 2), (Decorated, 1), (OtherMethod, 3), (OfParent, 1)]
#: A query, and cosines and sines of its angles.
GIVEN = torch.randn(2, 3, 5, 16), torch.randn(2, 2, 5, 16).unbind()


@pytest.mark.parametrize(("kind", "calls"), KINDS)
def test_methods_that_rotate_are_replaced(computed, kind, calls):
    module, plain = kind(), kind()
    expected = plain(*GIVEN)
    report = patch(module, loss_head=False)
    assert report.counts == {"rope": 1}
    assert inspect.signature(module.forward) == inspect.signature(plain.forward)
    for patched in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        computed.clear()
        marked.clear()
        torch.testing.assert_close(patched(*GIVEN), expected)
        assert len(computed) == calls
        assert marked == ["forward"] * (kind is Decorated)
        plain(*GIVEN)
        assert len(computed) == calls
        unpatch(patched)
        assert type(patched) is kind
        assert torch.equal(patched(*GIVEN), expected)


def test_a_file_that_is_not_imported_by_its_name(computed):
    """As of code that comes with a model, which may be in no list of modules."""
    file = types.ModuleType("not_imported")
    vars(file).update(nn=nn, apply_rotation=_rotation())
    for kind in (Direct, OtherMethod):
        exec(inspect.getsource(kind), vars(file))
    module, function = file.OtherMethod(), file.apply_rotation
    expected = module(*GIVEN)
    assert patch(module, loss_head=False).counts == {"rope": 1}
    computed.clear()
    torch.testing.assert_close(copy.deepcopy(module)(*GIVEN), expected)
    assert len(computed) == 3
    assert file.apply_rotation is function


def test_a_forward_that_was_replaced_stays(monkeypatch):
    module = nn.ModuleList([Direct(), Direct()])
    module[0].forward = lambda q, angles: "its own"
    (left,) = patch(module, loss_head=False).left
    assert (left.path, left.class_name, left.reason) == ("0", "Direct", "its forward was replaced on the instance")
    assert module[0](*GIVEN) == "its own"
    monkeypatch.setattr(Direct, "forward", lambda self, q, angles: "of the class")
    assert module[1](*GIVEN) == "of the class"


def test_a_compiled_attention_rotates_by_its_own_function(nothing_compiled):
    """In a graph that begins before the rotation, and has ended in the attention before it."""
    model, operators = model_zoo.build("llama", num_hidden_layers=1), []
    inputs = model_zoo.inputs_of(model)
    expected = model(**inputs).logits
    patch(model, loss_head=False, norms=False, mlps=False)
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: torch._dynamo.graph_break())

    def backend(graph, _):
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.testing.assert_close(torch.compile(model, backend=backend)(**inputs).logits, expected)
    assert operators
    assert not any("liger" in name for name in operators)


def test_another_thread_may_rotate_in_the_meantime(monkeypatch):
    """It gets what the function computes, and the function is back afterwards."""
    module, plain, found = ThroughHelper(), ThroughHelper(), []
    expected, compute = plain(*GIVEN), Rotation.compute
    patch(module, loss_head=False)

    def interrupted(*args, **kwargs):
        monkeypatch.setattr(Rotation, "compute", compute)
        found.extend(ThreadPoolExecutor(1).submit(other, *GIVEN).result() for other in (plain, module))
        return compute(*args, **kwargs)

    monkeypatch.setattr(Rotation, "compute", interrupted)
    found.append(module(*GIVEN))
    torch.testing.assert_close(found, [expected] * 3)
    assert apply_rotation is ROTATION


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_rotates_again_by_the_kernel(computed, reentrant):
    model = model_zoo.build("llama")
    inputs = model_zoo.inputs_of(model)
    expected = loss_and_grads(model, inputs)[1]
    patch(model, loss_head=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    computed.clear()
    assert difference(loss_and_grads(model, inputs)[1], expected)[0] <= 1
    assert len(computed) == 8
