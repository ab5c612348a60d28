"""Calls of a kind that is known: the same bits and the same errors, and what makes a call one of another kind."""

import threading
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

import liger_losses
from liger_losses import EngineOptions, Head, LigerFusedLinearCrossEntropyLoss, LogitTransform, linear_logps
from liger_losses.chunked.engine import call as engine_call
from liger_losses.chunked.engine import known, linear_token_loss
from liger_losses.chunked.engine.call import Comparison, Query, make_call
from liger_losses.chunked.engine.teachers import TeacherLogits
from liger_losses.chunked.engine.tokens import Tokens
from liger_losses.kernels.tracing import without_values

TOKENS, SIZE, VOCAB = 12, 8, 40


@pytest.fixture(autouse=True)
def nothing_known():
    known.forget()
    yield
    known.forget()


@pytest.fixture
def checks(monkeypatch):
    """The calls whose inputs were checked."""
    checked, check = [], engine_call.check_inputs
    monkeypatch.setattr(engine_call, "check_inputs", lambda *given: checked.append(given) or check(*given))
    return checked


def inputs(dtype=torch.float32, masked=0, tokens=TOKENS):
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, SIZE, dtype=dtype), torch.randn(VOCAB, SIZE, dtype=dtype)
    labels = torch.randint(VOCAB, (tokens,))
    labels[:masked] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def logps(hidden, weight, labels, **options):
    found = linear_logps(hidden, weight, labels, **options)
    return found.detach(), *torch.autograd.grad(found.sum(), (hidden, weight))


def cross_entropy(hidden, weight, labels, **options):
    loss = LigerFusedLinearCrossEntropyLoss(**options)(weight, hidden, labels)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("masked", [0, 5, TOKENS])
@pytest.mark.parametrize("call", [logps, cross_entropy])
def test_a_second_call_is_not_checked_and_has_the_same_bits(call, masked, compact, checks):
    given = inputs(masked=masked)
    first, second = (call(*given, compact=compact) for _ in range(2))
    assert len(checks) == 1
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_second_call_on_triton_has_the_same_bits(checks):
    given = inputs(torch.bfloat16, masked=3)
    first, second = (cross_entropy(*given, backend="triton") for _ in range(2))
    assert len(checks) == 1
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_other_values_have_their_own_results(checks):
    """Labels, the number of active tokens, temperatures and token weights are those of each call."""
    calls = [
        (inputs(masked=masked), {"temperature": temperature, "logit_scale": scale})
        for masked in (0, 5, 7, 0)
        for temperature, scale in ((1.0, 1.0), (0.5, 1.0), (2.0, 0.25))
    ]
    found = [logps(*given, **options) for given, options in calls]
    assert len(checks) == 1
    for values, (given, options) in zip(found, calls, strict=True):
        known.forget()
        assert all(torch.equal(a, b) for a, b in zip(values, logps(*given, **options), strict=True))


def test_token_inputs_are_those_of_each_call(checks):
    hidden, weight, labels = inputs()

    def call(weights, factor):
        def token_loss(statistics, labels, weights):
            return -factor * weights * statistics.logp

        loss, found = linear_token_loss(hidden, weight, labels, token_loss, token_inputs={"weights": weights})
        assert torch.allclose(loss, -(factor * weights * found.logp).sum())

    for factor in (1.0, 3.0):
        call(torch.rand(TOKENS), factor)
    assert len(checks) == 1
    with pytest.raises(ValueError, match="weights has shape"):
        call(torch.rand(TOKENS + 1), 1.0)


def test_values_are_checked_at_every_call(checks):
    hidden, weight, labels = inputs()
    linear_logps(hidden, weight, labels)
    labels[3] = VOCAB
    with pytest.raises(ValueError, match=r"found labels from 0 to 40"):
        linear_logps(hidden, weight, labels)
    assert len(checks) == 1


def test_a_call_that_raises_is_not_known():
    hidden, weight, labels = inputs()
    for given in ((hidden, weight, labels[1:]), (hidden.double(), weight, labels), (hidden, weight, labels.int())):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError)):
                linear_logps(*given)
    labels[3] = VOCAB
    with pytest.raises(ValueError, match="labels must be in"):
        linear_logps(hidden, weight, labels)
    assert not known._kinds


def test_a_strategy_that_fits_some_numbers_of_tokens_is_refused_for_others():
    hidden, weight, labels = inputs(tokens=2048)
    options = EngineOptions(workspace=700_000, strategy="resident")
    few = labels.clone()
    few[100:] = -100
    query = Query(("logp", "entropy"))
    make_call(hidden, Head(weight), few, query, options)
    for _ in range(2):
        with pytest.raises(ValueError, match="unknown strategy for these inputs 'resident'"):
            make_call(hidden, Head(weight), labels, query, options)


HIDDEN, WEIGHT, LABELS = inputs()
BIAS, QUERY = torch.zeros(VOCAB), Query(("logp",))


def kind(hidden=HIDDEN, weight=WEIGHT, labels=LABELS, query=QUERY, options=EngineOptions(), bias=BIAS, **fields):
    head = Head(weight, bias).with_fields(**fields)
    return known.kind_of(hidden, head, labels, query, options)


OTHERS = {
    "hidden dtype": lambda: kind(HIDDEN.detach().half().requires_grad_()),
    "weight dtype": lambda: kind(weight=WEIGHT.detach().half().requires_grad_()),
    "bias dtype": lambda: kind(bias=BIAS.half()),
    "labels dtype": lambda: kind(labels=LABELS.int()),
    "hidden shape": lambda: kind(HIDDEN[:3].detach().requires_grad_()),
    "hidden dimensions": lambda: kind(HIDDEN.detach()[None].requires_grad_()),
    "weight shape": lambda: kind(weight=WEIGHT.detach()[:9].requires_grad_(), bias=BIAS[:9]),
    "labels shape": lambda: kind(labels=LABELS[None]),
    "hidden strides": lambda: kind(HIDDEN.detach().t().contiguous().t().requires_grad_()),
    "weight strides": lambda: kind(weight=WEIGHT.detach().t().contiguous().t().requires_grad_()),
    "device": lambda: kind(
        *(tensor.detach().to("meta").requires_grad_(tensor.requires_grad) for tensor in (HIDDEN, WEIGHT, LABELS)),
        bias=BIAS.to("meta"),
    ),
    "frozen hidden states": lambda: kind(HIDDEN.detach()),
    "frozen weight": lambda: kind(weight=WEIGHT.detach()),
    "trained bias": lambda: kind(bias=BIAS.clone().requires_grad_()),
    "no bias": lambda: kind(bias=None),
    "a list": lambda: kind([HIDDEN], labels=[LABELS]),
    "two tensors": lambda: kind([HIDDEN, HIDDEN], labels=[LABELS, LABELS]),
    "batch invariant": lambda: kind(batch_invariant=True),
    "statistics": lambda: kind(query=Query(("logp", "entropy"))),
    "metrics": lambda: kind(query=Query(("logp",), ("entropy",))),
    "separable": lambda: kind(query=Query(("logp",), token_loss=lambda *_: None)),
    **{
        f"{name}={value}": lambda name=name, value=value: kind(options=replace(EngineOptions(), **{name: value}))
        for name, value in {
            "ignore_index": 0,
            "compact": False,
            "workspace": 2**20,
            "chunk_size": 5,
            "accum_dtype": torch.float32,
            "backend": "torch",
            "strategy": "two_pass",
        }.items()
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_calls_are_of_different_kinds_that_differ_in(name):
    assert kind() is not None
    assert kind() == kind()
    assert OTHERS[name]() not in (None, kind())


def test_kinds_differ_by_the_state_of_the_process(monkeypatch):
    before, found = kind(), []
    with torch.no_grad():
        found.append(kind())
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            found.append(kind())
    for size in (None, 2**20, 2**21):
        with liger_losses.workspace(size):
            found.append(kind())
    for size in (2**20, "1MiB"):
        monkeypatch.setattr(known.workspace.process, "bytes", size)
        found.append(kind())
    monkeypatch.undo()
    for backend in ("torch", "triton"):
        monkeypatch.setenv("LIGER_LOSSES_BACKEND", backend)
        found.append(kind())
    monkeypatch.undo()
    assert kind() == before
    assert None not in found
    assert len({before, *found}) == 1 + len(found)


class Subclass(torch.Tensor):
    pass


UNKNOWN = {
    "a temperature per token": lambda: kind(transform=LogitTransform(torch.ones(TOKENS))),
    "class weights": lambda: kind(query=replace(QUERY, class_weight=BIAS)),
    "selected columns": lambda: kind(query=replace(QUERY, selected=LABELS[:, None])),
    "a teacher": lambda: kind(query=replace(QUERY, comparison=Comparison(TeacherLogits(BIAS[None]), None))),
    "token weights": lambda: kind(query=replace(QUERY, token_weights={})),
    "a group": lambda: kind(shard=object()),
    "a quantized weight": lambda: kind(quantized=object()),
    "a subclass": lambda: kind(HIDDEN.detach().as_subclass(Subclass)),
    "a sparse tensor": lambda: kind(HIDDEN.detach().to_sparse()),
    "a nested tensor": lambda: kind(torch.nested.nested_tensor([HIDDEN.detach()])),
    "no tensor": lambda: kind(HIDDEN.tolist()),
    "tokens": lambda: kind(labels=Tokens.select([LABELS], VOCAB)),
    "labels that are no list": lambda: kind([HIDDEN]),
    "an option that cannot be hashed": lambda: kind(options=EngineOptions(compact=[1])),
    "a name that cannot be hashed": lambda: kind(query=Query((["logp"],))),
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_calls_are_always_checked_that_have(name):
    assert UNKNOWN[name]() is None


def test_calls_are_always_checked_where_nothing_or_something_else_is_computed():
    found = []
    with without_values():
        found.append(kind())
    torch.func.vmap(lambda row: found.append(kind()) or row)(HIDDEN.detach())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        found.append(kind())
    assert found == [None] * 3


def test_parameters_and_tensors_are_of_one_kind():
    assert kind(weight=nn.Parameter(WEIGHT.detach())) == kind()


def test_a_change_of_grad_mode_or_settings_changes_the_call():
    hidden, weight, labels = inputs(tokens=64)

    def plan():
        call = make_call(hidden, Head(weight), labels, QUERY, EngineOptions())[1]
        return call.strategy, call.plan.rows, call.backend

    plain = plan()
    with torch.no_grad():
        assert plan()[0] == "statistics" != plain[0]
    with liger_losses.workspace(20_000):
        assert plan()[1] < plain[1]
    assert plan() == plain


def test_kinds_and_counts_are_bounded(monkeypatch):
    monkeypatch.setattr(known, "MOST_KINDS", 3)
    monkeypatch.setattr(known, "MOST_COUNTS", 3)
    hidden, weight, labels = inputs()
    for tokens in range(1, TOKENS):
        linear_logps(hidden[:tokens], weight, labels[:tokens])
        assert len(known._kinds) <= 3
    for masked in range(TOKENS):
        labels[:masked] = -100
        linear_logps(hidden, weight, labels)
    assert all(len(kept._planned) <= 3 for kept in known._kinds.values())


def test_no_tensor_is_kept():
    hidden, weight, labels = inputs()
    cross_entropy(hidden, weight, labels)
    kept = [weakref.ref(tensor) for tensor in (hidden, weight, labels)]
    del hidden, weight, labels
    assert known._kinds
    assert [ref() for ref in kept] == [None] * 3


def test_threads_get_their_own_results(monkeypatch):
    """While others drop what is kept."""
    monkeypatch.setattr(known, "MOST_KINDS", 2)
    monkeypatch.setattr(known, "MOST_COUNTS", 1)
    cases = [inputs(masked=masked, tokens=tokens) for tokens in (4, 9, 12) for masked in (0, 1, 3)]
    expected, wrong = [logps(*case) for case in cases], []

    def work(offset):
        for i in range(3 * len(cases)):
            which = (i + offset) % len(cases)
            found = logps(*cases[which])
            wrong.extend(which for a, b in zip(found, expected[which], strict=True) if not torch.equal(a, b))

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
