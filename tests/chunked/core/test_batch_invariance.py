"""A token's forward statistics have the same bits in any batch: any number of tokens, order, mask and workspace."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liger_losses import (
    Divergence,
    EngineOptions,
    Head,
    LogitTransform,
    Teacher,
    linear_divergence,
    linear_logps,
    linear_statistics,
)
from liger_losses.kernels import linear_exp, linear_stats
from tests.kernels.cases import interpreted
from tests.reference import problem

pytestmark = pytest.mark.usefixtures("products_of_one_order")
SETTINGS = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
ALL = ("logp", "entropy", "lse", "mean_logp", "log_sum_sq_probs", "mean_logit")
POOL = 90


def statistics(tokens, names, head, options, masked=0, gradient=True):
    """The statistics of some tokens of the pool, ``[names, tokens]``; ``masked`` others lie between them."""
    hidden, labels, temperature = (part[tokens] for part in pool(head))
    if masked:  # a masked token in front of each
        hidden = torch.stack([hidden.flip(0) * 3, hidden], 1).flatten(0, 1)
        labels = torch.stack([torch.full_like(labels, -100), labels], 1).flatten()
        temperature = temperature.repeat_interleave(2)
    head = head.with_fields(transform=LogitTransform(temperature, 1.2, 8.0))
    with torch.set_grad_enabled(gradient):
        found = linear_statistics(hidden.requires_grad_(gradient), head, labels, names, options=options)
    values = torch.stack([getattr(found, name).detach() for name in names])
    return values[:, 1::2] if masked else values


def pool(head):
    hidden, _, labels, _ = problem(POOL, head.hidden_size, head.vocab_size, dtype=head.weight.dtype, masked=0.0, seed=9)
    return hidden.detach(), labels, torch.linspace(0.5, 2.0, POOL)


def head_of(dtype, hidden_size, vocab_size, invariant, needs=False):
    _, weight, _, bias = problem(1, hidden_size, vocab_size, dtype=dtype, bias=True)
    return Head(weight.detach().requires_grad_(needs), bias.detach(), batch_invariant=invariant)


def differing(head, draws, names, backend):
    """How many statistics of drawn batches differ in bits from those of the whole pool."""
    expected = statistics(torch.arange(POOL), names, head, EngineOptions(backend=backend), gradient=False)
    wrong = 0
    for tokens, chunk_size, workspace, strategy, masked in draws:
        tokens = torch.tensor(tokens)
        options = EngineOptions(backend=backend, chunk_size=chunk_size, workspace=workspace, strategy=strategy)
        found = statistics(tokens, names, head, options, masked, gradient=strategy is not None)
        wrong += int((found != expected[:, tokens]).sum())
    return wrong


batches = st.tuples(
    st.lists(st.integers(0, POOL - 1), min_size=1, max_size=70),
    st.sampled_from([None, 1, 7]),
    st.sampled_from([None, 400_000]),
    st.sampled_from([None, "two_pass"]),
    st.booleans(),
)


@SETTINGS
@given(
    draws=st.lists(batches, min_size=3, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    sizes=st.sampled_from([(33, 150), (24, 61), (64, 2100)]),
)
def test_on_a_cpu(draws, dtype, sizes):
    assert differing(head_of(dtype, *sizes, True), draws, ALL, "torch") == 0


def test_without_it_products_of_few_rows_differ_on_a_cpu():
    draws = [([3], None, None, None, False), (list(range(5)), 1, None, None, False), ([7] * 40, 7, None, None, True)]
    assert differing(head_of(torch.float64, 33, 150, False), draws, ALL, "torch") > 0
    assert differing(head_of(torch.float64, 33, 150, True), draws, ALL, "torch") == 0


#: A batch beside the pool of 90 tokens: more row tiles, other splits; and the strategies with a gradient.
DRAWS = [
    ([4], None, None, None, False),
    ([*range(60), *range(90)], None, None, None, False),
    ([4, 80, 3], None, None, "resident", True),
    ([5, 4], 1, None, "two_pass", False),
]


@interpreted
@pytest.mark.parametrize("names", [("logp", "lse"), ("logp", "entropy", "lse", "mean_logp", "log_sum_sq_probs")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_by_triton_kernels(names, dtype):
    assert differing(head_of(dtype, 16, 600, True), DRAWS, names, "triton") == 0


@interpreted
@pytest.mark.parametrize("names", [("logp", "lse"), pytest.param(("logp", "entropy"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("bias", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_by_triton_kernels_where_exponentials_are_kept(names, bias):
    """And where the bias needs a gradient, so that blocks hold logits."""
    head = head_of(torch.bfloat16, 16, 600, True, needs=True)
    head.bias.requires_grad_(bias)
    assert differing(head, DRAWS, names, "triton") == 0


@interpreted
def test_without_it_sums_depend_on_the_number_of_tokens():
    assert differing(head_of(torch.bfloat16, 16, 600, False), DRAWS, ("logp", "entropy"), "triton") > 0


@interpreted
def test_launches_of_any_size(monkeypatch):
    """Of 48 tokens, and of one."""
    hidden, weight, labels, _ = problem(140, 16, 600, dtype=torch.bfloat16, masked=0.0)
    found = []
    for most in (140, 48, 1):
        monkeypatch.setattr(linear_exp, "_MAX_TOKENS", most)
        rows = slice(None if most > 1 else 3)
        call = (hidden.detach()[rows], weight.detach(), labels[rows])
        found.append(linear_exp.linear_exponentials(*call, batch_invariant=True, backend="triton").logp)
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0][:3])


@interpreted
def test_projections_come_along_with_statistics():
    hidden, weight, labels, _ = problem(140, 16, 600, dtype=torch.bfloat16, masked=0.0)
    out = torch.empty(140, 640)[:, :600]
    with torch.no_grad():
        for invariant in (False, True):
            linear_stats.linear_softmax_statistics(
                hidden, weight, labels, frozenset({"entropy"}), out=out, batch_invariant=invariant, backend="triton"
            )
            torch.testing.assert_close(out, hidden.float() @ weight.float().T)
            out.zero_()


@interpreted
def test_unlikely_labels():
    """One token whose exponentials overflow makes the kernels run again, for all tokens."""
    hidden, weight, labels, _ = problem(140, 16, 600, dtype=torch.bfloat16, masked=0.0)
    hidden, weight = hidden.detach(), weight.detach()
    hidden[3] *= 200
    labels[3] = int((hidden[3].float() @ weight.float().T).argmin())
    found = []
    for tokens in (slice(None), slice(3, 4), slice(3, 9), slice(4, 9)):
        e = linear_exp.linear_exponentials(
            hidden[tokens], weight, labels[tokens], batch_invariant=True, backend="triton"
        )
        found.append(torch.stack([e.lse, e.logp]))
    whole, alone, some, others = found
    assert float(whole[1, 3]) < -60
    assert torch.equal(alone, whole[:, 3:4])
    assert torch.equal(some, whole[:, 3:9])
    assert torch.equal(others, whole[:, 4:9])


@pytest.mark.parametrize(
    ("dtype", "backend"), [(torch.float32, "torch"), pytest.param(torch.bfloat16, "triton", marks=interpreted)]
)
@pytest.mark.parametrize("form", [Divergence.forward_kl(), Divergence.cosine()], ids=str)
def test_divergences(form, dtype, backend):
    """Of any part of the tokens, one alone included, in any workspace, with a gradient or without."""
    count, columns = (POOL, 600) if backend == "torch" else (40, 70)
    hidden, weight, labels, bias = problem(count, 16, columns, dtype=dtype, masked=0.0, bias=True)
    teacher_hidden, teacher_weight, *_ = problem(count, 12, columns, dtype=dtype, seed=3)
    head = Head(weight.detach(), bias.detach(), batch_invariant=True)
    temperature = torch.linspace(0.5, 2.0, count)

    def found(tokens, workspace=None, gradient=False):
        states = hidden.detach()[tokens].requires_grad_(gradient)
        teacher = Teacher(teacher_hidden.detach()[tokens], teacher_weight.detach())
        options = EngineOptions(workspace=workspace, backend=backend)
        values = linear_divergence(
            states, head, labels[tokens], teacher, form, logp=True, temperature=temperature[tokens], options=options
        )
        return values.divergence.detach(), values.logp.detach()

    expected = found(torch.arange(count))
    some = torch.randperm(count, generator=torch.Generator().manual_seed(1))[:37]
    for tokens, workspace, gradient in ((some, None, True), (some, 60_000, False), (torch.tensor([31]), None, True)):
        for value, right in zip(found(tokens, workspace, gradient), expected, strict=True):
            assert torch.equal(value, right[tokens])


def test_the_environment_variable_and_what_is_refused(monkeypatch):
    hidden, weight, labels, _ = problem()
    assert not Head(weight).batch_invariant
    monkeypatch.setattr("liger_losses.chunked.core.output_layer._BATCH_INVARIANT", True)
    assert Head(weight).batch_invariant
    assert Head.of(Head(weight), transform=LogitTransform(0.7)).batch_invariant
    assert not Head(weight, batch_invariant=False).batch_invariant
    compiled = torch.compile(lambda h: linear_logps(h, weight, labels), backend="eager", fullgraph=True)
    assert torch.equal(compiled(hidden), linear_logps(hidden, weight, labels))


@pytest.mark.parametrize(
    ("names", "dtype", "backend"),
    [
        (("logp",), torch.float32, "torch"),
        (("logp", "selected_logps"), torch.float32, "torch"),
        pytest.param(("logp", "selected_logps"), torch.bfloat16, "triton", marks=interpreted),
    ],
)
def test_later_backwards_have_the_bits_of_the_first(names, dtype, backend):
    """Which computes the logits again that the first one had from forward."""
    head, (hidden, labels, _) = head_of(dtype, 33, 150, True, needs=True), pool(head_of(dtype, 33, 150, True))
    hidden, labels = hidden[:3].requires_grad_(), labels[:3]
    selected = {"selected": torch.tensor([[1, 149]] * 3)} if len(names) > 1 else {}
    found = linear_statistics(hidden, head, labels, names, options=EngineOptions(backend=backend), **selected)
    loss = sum(getattr(found, name).square().sum() for name in names)
    first, *later = [torch.autograd.grad(loss, (hidden, head.weight), retain_graph=True) for _ in range(3)]
    for grads in later:
        assert all(torch.equal(again, before) for again, before in zip(grads, first, strict=True))
