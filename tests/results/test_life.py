"""The life of a call: what it keeps, when it counts, and what may happen between its forward and its backward."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from liger_losses import Head, Teacher, linear_logps, linear_token_loss
from tests.losses import CE, JSD
from tests.reference import problem, tensors_of
from tests.results.losses import LOSSES, OPERATIONS, batch, case_of, gradients
from tests.seam import as_on_a_gpu, leave_out_zero_rows

pytestmark = pytest.mark.usefixtures("default_gpu")
NAMES = [*LOSSES, *OPERATIONS]
#: One loss of each way to be computed: one pass, blocks that are kept, two models, kept columns, coupled sequences.
KINDS = ("cross entropy", "DPO", "JSD", "GRPO, kept columns", "GRPO, sequences", "statistics of columns")


class Call:
    """A loss or operation with leaves of its own: hidden states, weight and bias."""

    def __init__(self, name, dtype=torch.float64, **sizes):
        self.name, self.case, self.d = name, case_of(name), batch(dtype, **sizes)
        self.leaves = [self.d[key].clone().requires_grad_() for key in ("h", "weight", "bias")]

    def __call__(self, hidden=None, **options):
        hidden, weight, bias = self.leaves if hidden is None else [hidden, *self.leaves[1:]]
        found = self.case(Head(weight, bias), Head(self.d["ref_weight"]), {**self.d, "h": hidden}, **options)
        return sum(
            (v.nan_to_num() * torch.arange(1, 1 + v.numel(), device=v.device).float().cos().view(v.shape)).sum()
            for v in tensors_of(found)  # some metrics of no completion are NaN
        )

    def gradients(self, loss):
        return gradients(loss, self.leaves)


@pytest.mark.parametrize("name", NAMES)
def test_torch_s_default_dtype_changes_nothing(name):
    call, results = Call(name, torch.float32), []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            loss = call()
            results.append([loss, *call.gradients(loss)])
        finally:
            torch.set_default_dtype(torch.float32)
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == expected.dtype
        assert torch.equal(ours, expected)


def live_tensors():
    return {id(t): t for t in gc.get_objects() if isinstance(t, torch.Tensor) and not isinstance(t, torch.nn.Parameter)}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_large_lives_after_backward(name):
    """While the loss is referenced, of sizes in which a head or logits stand out."""
    call = Call(name, vocab_size=200)
    before = live_tensors()
    loss = call()
    loss.backward()
    gc.collect()
    kept = [
        t for key, t in live_tensors().items() if key not in before and all(t is not leaf.grad for leaf in call.leaves)
    ]
    large = [tuple(t.shape) for t in kept if t.numel() >= call.leaves[1].numel() // 2]
    assert not large
    assert loss.isfinite()


@pytest.mark.parametrize("name", KINDS)
def test_the_graph_is_freed(name):
    """Without a search for reference cycles."""
    call = Call(name)
    gc.collect()
    gc.disable()
    try:
        activation = call.leaves[0] * 2  # held by the graph alone
        alive, loss = weakref.ref(activation), call(activation)
        del activation
        assert alive() is not None
        del loss
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_trained_is_decided_in_forward(name, trained):
    """A weight that is trained before backward gets no gradient, and one that is frozen by then changes nothing."""
    call = Call(name)
    hidden, weight, _ = call.leaves
    weight.requires_grad_(trained)
    loss = call()
    weight.requires_grad_(not trained)
    loss.backward(retain_graph=True)
    first = hidden.grad.clone()
    loss.backward()
    torch.testing.assert_close(hidden.grad, 2 * first)
    assert trained or weight.grad is None


@pytest.mark.parametrize("changed", ["weight", "hidden states"])
@pytest.mark.parametrize("name", ["logps", "DPO", "GRPO, kept columns"])
def test_a_tensor_that_changes_before_backward_is_an_error(name, changed):
    """Gradients would be those of other values."""
    call = Call(name)
    loss = call()
    with torch.no_grad():
        call.leaves[changed == "weight"].add_(1.0)
    with pytest.raises(RuntimeError, match="in-?place"):
        loss.backward()


def test_labels_that_change_before_backward():
    """Gradients that were computed in forward are those of the loss; others raise as in torch."""
    hidden, weight, labels, _ = problem(50, 24, 61, masked=0.0)
    logps, loss = linear_logps(hidden, weight, labels), CE()(weight, hidden, labels)
    (expected,) = torch.autograd.grad(CE()(weight, hidden, labels), weight)
    labels.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logps.sum().backward()
    assert torch.equal(torch.autograd.grad(loss, weight, retain_graph=True)[0], expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("masked", [0.0, 0.3])
@pytest.mark.parametrize("compact", [True, False])
def test_labels_of_inference_mode(compact, masked):
    hidden, weight, labels, _ = problem(50, 24, 61, masked=masked)
    with torch.inference_mode():
        labels = labels.clone()
    for value in (CE(compact=compact)(weight, hidden, labels), linear_logps(hidden, weight, labels, compact=compact)):
        value.sum().backward()
    assert weight.grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_are_an_error(name):
    call = Call(name)
    with pytest.raises(RuntimeError, match=r"derivative|differentiate|twice"):
        grads = torch.autograd.grad(call(), call.leaves[:1], create_graph=True)
        torch.autograd.grad(grads[0].square().sum(), call.leaves[1])


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_in_forward_mode_are_errors(name):
    call = Call(name)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward"):
        call(forward_ad.make_dual(call.leaves[0].detach(), call.leaves[0].detach()))


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("BCO", "GRPO, two"))])
@pytest.mark.parametrize("how", ["checkpoint", "reentrant checkpoint", "save_on_cpu"])
def test_activations_that_are_computed_again_or_moved(name, how):
    call = Call(name)
    expected = call.gradients(call())
    around = save_on_cpu() if how == "save_on_cpu" else nullcontext()
    with around:
        if how == "save_on_cpu":
            loss = call(call.leaves[0] * 1.0)
        else:
            loss = checkpoint(lambda h: call(h * 1.0), call.leaves[0], use_reentrant=how.startswith("reentrant"))
    loss.backward()
    found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.to_dense() for leaf in call.leaves]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_new_tensors_are_on_the_device_of_the_inputs(name):
    """And not on torch's default device, which has no values here."""
    call = Call(name, torch.float32)
    if name in LOSSES:  # built before
        call.case = partial(LOSSES[name].call, LOSSES[name].made(call.d))
    with torch.device("meta"):
        loss = call()
        loss.backward()  # which takes gradients of a leaf's device alone
    assert loss.device == call.leaves[0].device


# --- No tokens, dtypes ------------------------------------------------------------------------------------------------


def test_a_mean_over_nothing_is_0():
    """Of weights that are all 0, of no items in the batch, and of metrics without tokens."""
    hidden, weight, labels, _ = problem(20, 8, 31)
    nothing, teacher = torch.full_like(labels, -100), Teacher(hidden.detach(), weight.detach())
    losses = [
        CE()(weight, hidden, labels, token_weights=torch.zeros(20)),
        CE()(weight, hidden, nothing, num_items_in_batch=0),
        *JSD()(weight, hidden, nothing, teacher, num_items_in_batch=0),
    ]
    for loss in (*losses[:2], losses[2], *losses[3]):
        assert loss == 0.0
    for loss in losses[:3]:
        assert not any(g.any() for g in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("what", ["hidden states", "weight"])
def test_a_head_of_weight_0_may_hold_anything(what, reduction):
    """NaN in a head that does not count reaches neither the loss nor a gradient; its own loss says what it is."""
    (hidden, weight, labels, _), (other, second, _, _) = problem(20, 8, 31), problem(20, 8, 31, seed=1)
    (other if what == "hidden states" else second).data.fill_(float("nan"))
    options = {"reduction": reduction, "label_smoothing": 0.1, "lse_square_scale": 0.1}
    loss, metrics = CE(head_weights=[0.5, 0.0], **options)([weight, second], [hidden, other], labels)
    alone = 0.5 * CE(**options)(weight, hidden, labels)
    assert metrics.losses.isnan().tolist() == [False, True]
    if reduction == "none":
        assert not loss[1].any()
        loss = loss[0]
    torch.testing.assert_close(loss, alone)
    found = torch.autograd.grad(loss.sum(), [hidden, weight, second], allow_unused=True)
    torch.testing.assert_close(found[:2], torch.autograd.grad(alone.sum(), [hidden, weight]))
    assert found[2] is None or not found[2].any()


def test_one_of_two_heads_masked():
    """Gradients of its tensors are 0, and the other is as alone."""
    (hidden, weight, labels, _), (other, second, none, _) = problem(20, 8, 31), problem(20, 12, 9, seed=1)
    loss, metrics = CE()([weight, second], [hidden, other], [labels, torch.full_like(none, -100)])
    alone = CE()(weight, hidden, labels)
    torch.testing.assert_close(metrics.losses, torch.stack([alone.detach(), torch.tensor(0.0)]))
    found = torch.autograd.grad(loss, [hidden, weight, other, second])
    torch.testing.assert_close(found[:2], torch.autograd.grad(alone, [hidden, weight]))
    assert not found[2].any()
    assert not found[3].any()


@pytest.mark.parametrize("name", NAMES)
def test_autocast(name):
    """Hidden states in bf16 beside a head in fp32: results are in fp32, and gradients in their leaf's dtype."""
    call = Call(name, torch.float32)
    call.leaves[0] = call.leaves[0].detach().bfloat16().requires_grad_()
    expected = call(call.leaves[0].float())
    with torch.autocast(call.leaves[0].device.type, torch.bfloat16):
        loss = call()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.05, atol=0.1)
    assert [g.dtype for g in call.gradients(loss)] == [torch.bfloat16, torch.float32, torch.float32]


def test_no_gradient_where_no_loss_depends():
    hidden, weight, labels, _ = problem()
    loss, found = linear_token_loss(hidden, weight, labels, lambda s, y: torch.zeros_like(s.logp), metrics=("entropy",))
    assert not found.entropy.requires_grad
    assert not any(g.any() for g in torch.autograd.grad(loss, (hidden, weight)))


# --- Nothing waits for the device -------------------------------------------------------------------------------------


#: For their results the host waits for a GPU; ``lift_fresh`` is ``torch.tensor`` of numbers, a copy from the host.
WAITING = ("_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "lift_fresh")


class NothingWaits(TorchDispatchMode):
    """Raises where the host would wait for a GPU, so that a CUDA graph cannot be captured."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            index is not None and index.dtype == torch.bool
            for index in (arguments[1] if isinstance(arguments[1], (list, tuple)) else ())
        )
        if name in WAITING or by_mask:
            raise AssertionError(f"{function} makes the host wait")
        return function(*arguments, **(keywords or {}))


#: They ask for values: which batch it is, which columns there are, where a token's columns are.
ASKING = (
    "BCO",
    "GRPO, kept columns",
    "KL, renormalized",
    "KL, top-k",
    "KL, logits",
    "kept columns, sparse",
    "statistics of columns",
)


#: They choose tokens by a mask, or call the core several times.
OFTEN = ("GRPO, score centering", "GRPO, near the sampler", "MiniLLM")


@pytest.mark.parametrize(
    ("name", "compact"), [(n, c) for n in NAMES for c in (True, False) if n not in ASKING and not (c and n in OFTEN)]
)
def test_how_often_the_host_waits(name, compact):
    """Once in forward and once in backward, of all models, heads and blocks together; never with ``compact=False``, so
    that a CUDA graph can capture the call. The first call fills caches."""
    call = Call(name, torch.float32)
    options = {"compact": compact, "chunk_size": 5} if name in LOSSES else {}
    most = compact or (name in OPERATIONS and name != "not compact")
    call(**options)
    read, tolist = [], torch.Tensor.tolist

    def read_once(tensor):
        with mock.patch.object(torch.Tensor, "tolist", tolist):  # which a default device calls once more
            return read.append(1) or tolist(tensor)

    counted = mock.patch.object(torch.Tensor, "tolist", read_once)
    with as_on_a_gpu(), leave_out_zero_rows(), counted, NothingWaits():
        loss = call(**options)
        in_forward = len(read)
        loss.backward()
    assert in_forward <= most
    assert len(read) - in_forward <= most
