"""Compiled functions that call losses and operations: results, gradients and states as without torch.compile."""

import copy
import pickle

import pytest
import torch
from torch import nn

from liger_losses import AdaptiveEntropy
from tests.losses import BCO, JSD, KTO
from tests.reference import tensors_of
from tests.results.compiled import (
    CE,
    DEVICE,
    HALF,
    LOSSES,
    OPERATIONS,
    assert_same,
    batch,
    check,
    check_one_graph,
    compiled,
    layer,
    masked,
)

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def step(loss):
    if isinstance(getattr(loss, "entropy_coef", None), AdaptiveEntropy):
        loss.entropy_coef.step()


def of_any_length(d):
    """A batch for which torch.compile traces its length as a symbol at once."""
    for name in ("h", "other", "y", "logps", "columns", "top_logps"):
        torch._dynamo.mark_dynamic(d[name], 1)
    return d


#: Beside others of their kind, ``make test`` leaves these out.
_SLOW = (
    *("ORPO", "cosine", "KL, logits", "JSD", "MiniLLM", "GRPO", "head with a transform", "user's pairs", "user's loss"),
    *("cross entropy", "cross entropy, per token", "BCO", "user's loss, a dictionary"),
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in LOSSES])
def test_losses(name):
    """One graph for many lengths, and for calls without any token. A loss's own state changes as it does eagerly.

    Each kind of operator is in a graph of its backward too.
    """
    build, call = LOSSES[name]
    # What a loss keeps is on the GPU at once: in a first call that moves it there, it is traced on the CPU.
    head, (ours, theirs) = layer(), [loss.to(DEVICE) if hasattr(loss, "to") else loss for loss in (build(), build())]
    function, counter = compiled(lambda d: call(ours, head, d), "aot_eager" if name in KINDS else "eager")
    for d in (of_any_length(batch(5)), masked(batch(5)), batch(8)):
        check(function, lambda d: call(theirs, head, d), [d], head.parameters())
        step(ours), step(theirs)
        assert str(ours.state_dict()) == str(theirs.state_dict())
    moved = DEVICE == "cuda" and isinstance(getattr(ours, "entropy_coef", None), AdaptiveEntropy)
    assert counter.frame_count == 1 + moved  # the first call moves its sums to the GPU


def test_operations():
    """All in one graph."""
    head, batches = layer(), [of_any_length(batch(5)), masked(batch(5)), batch(8)]
    call_all = lambda d: [call(head, d) for call in OPERATIONS.values()]  # noqa: E731
    check_one_graph(call_all, call_all, batches, head.parameters(), backend="aot_eager")


class Several(nn.Module):
    """One loss of each kind, called one after another: one graph has all."""

    def __init__(self, *names):
        super().__init__()
        self.losses = nn.ModuleList([LOSSES[name][0]() for name in names])
        self.calls = [LOSSES[name][1] for name in names]
        self.to(DEVICE)

    def forward(self, head, d):
        return [call(loss, head, d) for loss, call in zip(self.losses, self.calls, strict=True)]


KINDS = ("cross entropy, options", "GRPO", "JSD")


def test_without_gradients():
    head, ours, theirs = layer(), Several(*KINDS[::2]), Several(*KINDS[::2])

    def call_all(losses, d):
        return [*losses(head, d), *[OPERATIONS[name](head, d) for name in ("logps", "divergence loss")]]

    function, counter = compiled(lambda d: call_all(ours, d), "eager")
    with torch.no_grad():
        for d in (of_any_length(batch(5)), batch(6)):
            assert_same(function(d), call_all(theirs, d))
    assert counter.frame_count == 1


#: The dtype of hidden states (and of the head, but under autocast), that of autocast, and the loss scale.
DTYPES = {"fp16": (torch.float16, None, 2.0**10), "bf16 autocast": (torch.bfloat16, torch.bfloat16, 1.0)}


@pytest.mark.slow
@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name):
    """One graph for two lengths; gradients of fp16 are multiplied by the loss scale before they are rounded."""
    dtype, autocast, scale = DTYPES[name]
    head, ours, theirs = layer(torch.float32 if autocast else dtype), Several(*KINDS), Several(*KINDS)

    def call_all(losses, d):
        with torch.autocast(DEVICE, dtype=autocast, enabled=autocast is not None):
            return [*losses(head, d), *[OPERATIONS[name](head, d) for name in ("logps", "divergence", "token loss")]]

    batches, how = (of_any_length(batch(5, dtype=dtype)), batch(7, dtype=dtype)), (HALF, scale)
    check_one_graph(lambda d: call_all(ours, d), lambda d: call_all(theirs, d), batches, head.parameters(), *how)


@pytest.mark.parametrize("rows", [0, 4], ids=["empty", "frozen"])
def test_batches_without_a_row_and_frozen_parts(rows):
    """Gradients are those of what requires one: the bias."""
    head, (ours, theirs) = layer(), [Several("cross entropy, options" if rows else "JSD") for _ in range(2)]
    head.weight.requires_grad_(rows == 0)

    def call_all(losses, d):
        d = d if rows == 0 else {**d, "h": d["h"].detach()}
        return [*losses(head, d), OPERATIONS["logps"](head, d), OPERATIONS["token loss"](head, d)]

    batches = [batch(5, rows=rows)]
    check_one_graph(lambda d: call_all(ours, d), lambda d: call_all(theirs, d), batches, head.parameters())


@torch._functorch.config.patch(donated_buffer=False)  # torch.compile's condition for retain_graph=True
def test_several_backwards_and_losses_in_any_order():
    """Two calls before a backward that runs twice, each of which makes the call again in fp16."""
    names, dtype = ("cross entropy", "BCO"), torch.float16
    head, ours, theirs = layer(dtype), Several(*names), Several(*names)

    def total(losses, d):
        return sum(tensor.sum() for tensor in tensors_of(losses(head, d)) if tensor.requires_grad)

    function, counter = compiled(lambda d: total(ours, d))
    results = []
    for call in (function, lambda d: total(theirs, d)):
        one, other = of_any_length(batch(5, dtype=dtype)), batch(7, dtype=dtype)
        first, second = call(one), call(other)
        head.zero_grad()
        (2 * first).backward(retain_graph=True)
        (second / 3 + first).backward(retain_graph=True)
        second.backward()
        results.append([one["h"].grad, other["h"].grad, head.weight.grad, head.bias.grad])
    assert counter.frame_count == 1
    torch.testing.assert_close(*results, **HALF)
    assert str(ours.state_dict()) == str(theirs.state_dict())
    assert int(ours.losses[1].batches) == 2


def test_numbers_that_change():
    """Arguments that are numbers: a change is compiled once, not for each value."""
    head, ce, kto = layer(), CE(), KTO(use_ref_model=False)

    def call_all(d, count, kl):
        return (
            ce(head, d["h"], d["y"], num_items_in_batch=count),
            kto(head, (d["h"], d["y"]), preference_labels=d["signs"] > 0, kl=kl),
        )

    function, counter = compiled(call_all, "eager")
    d = batch(6)
    for number in (2, 3):
        check(
            lambda d: function(d, number, number / 7),  # noqa: B023
            lambda d: call_all(d, number, number / 7),  # noqa: B023
            [d],
            head.parameters(),
        )
    assert counter.frame_count <= 2
    count = torch.tensor(9, device=DEVICE)
    assert_same(function(d, count, 0.3), call_all(d, count, 0.3))


@pytest.mark.parametrize(
    "name", ["GRPO", "DPO, several", *(pytest.param(n, marks=pytest.mark.slow) for n in ("JSD", "cross entropy"))]
)
def test_five_steps_of_a_schedule(name):
    """Beta, temperature and the entropy's coefficient change at each step, and so does the number of tokens."""
    head, loss = layer(), LOSSES[name][0]()
    schedule = {"GRPO": ("beta", "temperature", "entropy_coef"), "cross entropy": ("temperature", "label_smoothing")}
    function, counter = compiled(lambda d: LOSSES[name][1](loss, head, d), "eager")
    for step in range(5):
        loss = loss.replace(**dict.fromkeys(schedule.get(name, ("beta", "temperature")), 0.1 + 0.15 * step))
        d = batch(5 + step)
        assert_same(function(d), LOSSES[name][1](loss, head, d))
    assert counter.frame_count <= 2


def test_losses_that_replace_others():
    """The function reads the options of each, and of two whose calls are alike; values that an option had already
    compile nothing."""
    head, loss, other, d = layer(), CE(label_smoothing=0.1), CE(label_smoothing=0.9), batch(6)
    call_both = lambda d: [each(head, d["h"], d["y"]) for each in (loss, other)]  # noqa: E731
    function, counter = compiled(lambda d: call_both(d), "eager")
    before = function(d)[0].item()
    for name, value in (("label_smoothing", 0.7), ("reduction", "sum"), ("softcap", 3.0)):
        loss = loss.replace(**{name: value})
        assert_same(function(d), call_both(d))
        assert function(d)[0].item() != before
        before = function(d)[0].item()
    graphs = counter.frame_count
    assert 2 <= graphs <= 4
    loss = CE(label_smoothing=0.7, reduction="sum", softcap=3.0)
    function(d)
    assert counter.frame_count == graphs
    loss.eval()
    assert_same(function(d), call_both(d))


def test_copies_of_losses():
    """A copy is another loss, with options and a state of its own, in functions that were compiled for the first; in
    evaluation the state stays."""
    head, loss, d = layer(), BCO(beta=0.1, use_ref_model=False), batch(6)
    call = LOSSES["BCO"][1]
    function, counter = compiled(lambda loss, d: call(loss, head, d), "eager")
    function(loss, d)
    pickled = lambda loss: pickle.loads(pickle.dumps(loss))  # noqa: E731
    others = [copied(loss).replace(beta=0.9) for copied in (copy.deepcopy, pickled, lambda loss: loss)]
    for other, copied in zip(others, (copy.deepcopy, pickled, copy.deepcopy), strict=True):
        expected = call(copied(other), head, d)
        assert_same(function(other, d), expected)
        assert (int(loss.batches), int(other.batches)) == (1, 2)
    assert counter.frame_count == 2
    del loss
    for other in others:
        expected = call(copy.deepcopy(other.eval()), head, d)
        assert_same(function(other, d), expected)
        assert int(other.batches) == 2  # that of training


@pytest.mark.slow
def test_inductor():
    head, loss, batches = layer(), JSD(beta=0.3), (of_any_length(batch(5)), batch(7))
    call = lambda d: LOSSES["JSD"][1](loss, head, {**d, "h": torch.tanh(d["h"])})  # noqa: E731
    check_one_graph(call, call, batches, head.parameters(), backend="inductor")
