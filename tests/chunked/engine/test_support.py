"""Log-probabilities over kept columns, against the plain computation with all other logits at minus infinity."""

import itertools

import pytest
import torch

from liger_losses import EngineOptions, Head, LogitTransform, TeacherTopK, TokenSupport, linear_logps
from liger_losses.chunked.engine import support as engine_support
from liger_losses.chunked.engine.support import linear_support_statistics
from liger_losses.chunked.losses import columns
from liger_losses.kernels import row_sums
from liger_losses.kernels._triton import INTERPRETED
from liger_losses.kernels.given_columns import ByRows, GivenCall, GivenColumns, evaluate, project_, with_gradients
from liger_losses.kernels.given_ids import Facts, GivenIds, find
from tests.losses import KL
from tests.reference import assert_close_gradients, gradients, peak_bytes, plain_logits, problem

NEEDS_TRITON = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
BACKENDS = ["torch", pytest.param("triton", marks=NEEDS_TRITON)]
NAMES = ("logp", "entropy", "lse")
TRANSFORM = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 4.0}


@pytest.fixture(autouse=True)
def rows_are_read(monkeypatch):
    """Vocabularies of tests are so small that products would be taken."""
    choose_above(monkeypatch, 1)


def choose_above(monkeypatch, cost):
    """Tokens with more than V / ``cost`` columns are scored by products."""
    monkeypatch.setattr(engine_support, "_COST", {"cuda": (cost, cost), "cpu": (cost, cost)})


def kept(labels, vocab_size, k, *, seed=0, uncut=(), cuts=0.4):
    """``[..., k]`` ids, each row different columns and the label, some of them -1."""
    g = torch.Generator().manual_seed(seed)
    flat = labels.flatten().clamp(min=0)
    scores = torch.rand(len(flat), vocab_size, generator=g)
    scores[:, 1] = 1.5  # a popular column
    ids = scores.scatter_(1, flat[:, None], 2.0).topk(k).indices
    ids[:, 1:][torch.rand(len(flat), k - 1, generator=g) < cuts] = -1
    ids = ids.gather(1, torch.rand(len(flat), k, generator=g).argsort(1))  # the label at any place
    ids[list(uncut)] = -1
    return ids.view(*labels.shape, k)


def ragged(ids, **options):
    flat = ids.flatten(0, -2)
    return TokenSupport(
        flat[flat >= 0], torch.cat([torch.zeros(1, dtype=torch.int64), (flat >= 0).sum(-1).cumsum(0)]), **options
    )


def total(values):
    upstream = torch.rand(3, *values["logp"].shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    upstream = upstream.to(values["logp"].device)
    return sum((values[name] * u).sum() for name, u in zip(NAMES, upstream - 0.4, strict=True))


@pytest.mark.parametrize(("backend", "uncut"), [("torch", ()), ("torch", (2,)), ("triton", ())])
def test_sparse_gradients(backend, uncut, monkeypatch):
    if backend == "triton" and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    hidden, weight, labels, bias = problem(5, 5, 9, masked=0.2, bias=True)
    ids = kept(labels, 9, 4, uncut=uncut)
    labels[2] = 3
    ids[2] = torch.tensor([3, -1, -1, -1]) if not uncut else -1

    def call(**options):
        return linear_logps(hidden, weight, labels, support=TokenSupport(ids, **options), bias=bias, backend=backend)

    dense = gradients(call().square().sum(), (hidden, weight, bias))
    choose_above(monkeypatch, 9)  # would make them dense
    found = gradients(call(sparse_grad=True).square().sum(), (hidden, weight, bias))
    assert found[1].is_sparse == (not uncut)
    if not uncut:
        assert found[1].is_coalesced()
        touched = ids[(labels != -100)[:, None] & (ids >= 0)].unique()
        assert torch.equal(found[1].indices()[0], touched)
    for a, b in zip(found, dense, strict=True):
        assert torch.equal(a.to_dense(), b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probabilities_of_the_columns(backend):
    """Those of a sparse teacher, among which the label need not be."""
    hidden, weight, labels, bias = problem(0, 6, 30, shape=(2, 4), bias=True, masked=0.3)
    ids = torch.randn(2, 4, 30, generator=torch.Generator().manual_seed(1)).topk(5).indices
    ids[1, 2, 3:] = -1
    upstream = torch.randn(ids.shape, generator=torch.Generator().manual_seed(2))
    names, options = ("selected_logps", "lse"), EngineOptions(backend=backend)
    head = Head(weight, bias, LogitTransform(**TRANSFORM))
    found = linear_support_statistics(hidden, head, labels, TokenSupport(ids), names, options)
    logits = plain_logits(hidden, weight, bias, **TRANSFORM)
    kept_logits = logits.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, float("-inf"))
    active = (labels != -100)[..., None] & (ids >= 0)
    expected = torch.where(active, kept_logits.log_softmax(-1), 0.0)
    torch.testing.assert_close(found.selected_logps, expected, rtol=1e-5, atol=1e-5)
    of_lse = torch.where(labels != -100, kept_logits.logsumexp(-1), 0.0)
    torch.testing.assert_close(found.lse, of_lse, rtol=1e-5, atol=1e-5)
    ours = gradients((found.selected_logps * upstream).sum() + found.lse.square().sum(), (hidden, weight, bias))
    theirs = gradients((expected * upstream).sum() + of_lse.square().sum(), (hidden, weight, bias))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_logit_of_minus_infinity_is_no_empty_place(softcap, backend):
    hidden, weight, labels, bias = problem(5, 6, 30, bias=True, masked=0.3)
    bias.data[[3, 4]] = -torch.inf
    ids = torch.arange(8).repeat(len(labels), 1)
    ids[:, 4:6] = -1
    head, options = Head(weight, bias, LogitTransform(softcap=softcap)), EngineOptions(backend=backend)
    found = linear_support_statistics(hidden, head, labels, TokenSupport(ids), ("selected_logps",), options)
    logits = plain_logits(hidden, weight, bias, softcap=softcap)[:, :8]
    expected = logits.masked_fill(ids < 0, -torch.inf).log_softmax(-1)
    expected = torch.where((labels != -100)[:, None] & (ids >= 0), expected, 0.0)
    torch.testing.assert_close(found.selected_logps, expected)
    # Of probabilities, as the logarithm of 0 has no derivative.
    ours, theirs = ((logps.exp() * torch.arange(8.0)).sum() for logps in (found.selected_logps, expected))
    torch.testing.assert_close(*(gradients(each, (hidden, weight)) for each in (ours, theirs)))


@pytest.mark.parametrize("hard", [0.0, 0.5])
def test_a_sparse_teacher_that_is_renormalized_reads_its_columns_alone(hard, monkeypatch):
    hidden, weight, labels, bias = problem(0, 6, 30, shape=(2, 4), bias=True, masked=0.3)
    top = torch.randn(2, 4, 30, generator=torch.Generator().manual_seed(1)).log_softmax(-1).topk(5)
    loss = KL(weight_hard_loss=hard, weight_soft_loss=0.8, temperature=2.0)
    teacher = TeacherTopK(top.values.masked_fill((labels == -100)[..., None], float("nan")), top.indices, "renormalize")
    if not hard:
        monkeypatch.setattr(columns, "linear_token_loss", None)
    found, _ = loss(weight, hidden, labels, teacher, bias=bias)
    mask = labels != -100
    logits = plain_logits(hidden, weight, bias)[mask]
    log_p = (logits / 2).gather(-1, top.indices[mask]).log_softmax(-1)
    log_q = top.values[mask].log_softmax(-1)
    expected = 0.8 * (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    expected = expected + hard * torch.nn.functional.cross_entropy(logits, labels[mask])
    torch.testing.assert_close(found, expected)
    assert_close_gradients(found, expected, (hidden, weight, bias), rtol=1e-4, atol=1e-6)


def test_sparse_gradients_that_cannot_be():
    hidden, weight, labels, _ = problem(4, 5, 20, masked=0.0)
    support = TokenSupport(kept(labels, 20, 4), sparse_grad=True)
    with pytest.raises(RuntimeError, match="a compiled function cannot return sparse gradients"):
        torch.compile(lambda: linear_logps(hidden, weight, labels, support=support), backend="eager", fullgraph=True)()
    with pytest.raises(ValueError, match="sparse_grad=True.* needs a weight that is a parameter"):
        linear_logps(hidden.double(), weight.double(), labels, support=support)
    with torch.no_grad():
        linear_logps(hidden.double(), weight.double(), labels, support=support)


@NEEDS_TRITON
def test_the_kernels_find_the_same_as_the_reference():
    """Right ids and wrong ones, of all tokens and of some, with columns that are computed here and others."""
    g = torch.Generator().manual_seed(0)
    (hidden, weight, *_), totals = problem(7, 4, 50, masked=0.0), torch.zeros(6)
    for case, (form, add_label, shift) in enumerate(itertools.product(("padded", "ragged"), (False, True), (0, 2))):
        count, width, size = 7, (3, 3, 40, 3)[case % 4], 50
        labels = torch.randint(-1, size + 1, (count,), generator=g)
        labels[torch.rand(count, generator=g) < 0.3] = -100
        labels[2], labels[count - shift :] = size, -100
        ids = torch.randint(-1, size, (count, width), generator=g)
        ids[3, 0], ids[4] = size, -1
        offsets = None
        if form == "ragged":
            lengths = torch.randint(0, width, (count,), generator=g)
            lengths[0] = 2
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            ids = ids.flatten()[: int(offsets[-1])].int()
        columns = range(*((0, size), (7, 30))[case % 2])
        tokens = None if case % 3 else torch.tensor([1, 2, 5])
        given = GivenIds(ids, offsets, labels, -100, size, columns, shift, add_label, (30, 45)[case > 2], tokens, width)
        results, (h, w) = [], (hidden if tokens is None else hidden[tokens], weight[columns.start : columns.stop])
        for backend in ("torch", "triton"):
            found = find(given, torch.float32, backend=backend)
            those = GivenColumns(found.columns, len(columns))
            call = GivenCall(those, found, ByRows(backend), backend=backend)
            project_(call, None, h, w)
            outputs = with_gradients(call, evaluate(call, NAMES), (*NAMES, "selected_logps"), None, h, w).values()
            facts = Facts(*found.facts)
            right = facts.no_columns + facts.no_labels == 0  # others may have no column at all
            values = [output[right] for output in outputs]
            grads = gradients(sum(value.square().sum() for value in values), (hidden, weight))
            results.append([found.columns, found.label_at, found.facts, *values, *grads])
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        totals += results[0][2].sum(1)
    assert all(totals), Facts(*totals)


@pytest.mark.parametrize("cost", [1, 20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_is_not_hidden(backend, cost, monkeypatch):
    choose_above(monkeypatch, cost)
    hidden, weight, _, _ = problem(4, 4, 20)
    labels = torch.tensor([1, 2, 3, 4])
    with torch.no_grad():
        hidden[0] = weight[6] = float("nan")  # a token; a column that another keeps
    ids = torch.stack([labels, torch.tensor([7, 6, 9, 10]), torch.full((4,), -1)], 1)
    found = linear_logps(hidden, weight, labels, support=TokenSupport(ids), entropy=True, lse=True, backend=backend)
    for name in NAMES:
        assert getattr(found, name).isnan().tolist() == [True, True, False, False], name


def test_memory_is_that_of_the_pairs():
    hidden, weight, labels, _ = problem(600, 64, 3000, masked=0.0)
    support, size = TokenSupport(kept(labels, 3000, 16)), hidden.numel() * 4
    found = []

    def call():
        found[:] = gradients(linear_logps(hidden, weight, labels, support=support).sum(), (hidden, weight))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sums, "GATHERED_BYTES", 2**17)
        assert peak_bytes(call) < weight.numel() * 4 + 4 * size + 2**21  # all rows would be 16 x size, logits 7 MB
    assert len(found) == 2


def test_errors_say_what_to_do():
    hidden, weight, labels, _ = problem(6, 4, 20, masked=0.0)
    ids = kept(labels, 20, 3, cuts=0.0)

    def call(support, **options):
        return linear_logps(hidden, weight, labels, support=support, **options)

    lacking = ids.clone()
    lacking[4][lacking[4] == labels[4]] = -1
    with pytest.raises(ValueError, match="label of 1 tokens is not among.*token 4 of the flattened.*add_label=True"):
        call(TokenSupport(lacking))
    twice = torch.cat([ids, ids[:, :1]], 1)
    with pytest.raises(ValueError, match="twice: token .* pad with -1"):
        call(TokenSupport(twice))
    for wrong in (20, -2, 2**33):
        with pytest.raises(ValueError, match=r"must be in \[0, 20\)"):
            call(TokenSupport(torch.where(ids == labels[:, None], ids, wrong)))
    with pytest.raises(ValueError, match="one row for each label"):
        call(TokenSupport(ids[:3]))
    with pytest.raises(ValueError, match=r"offsets must be \[7\]"):
        call(TokenSupport(ids.flatten(), torch.arange(6)))
    for offsets in ([0, 3, 6, 9, 12, 15, 17], [1, 3, 6, 9, 12, 15, 18], [0, 3, 6, 2, 12, 15, 18]):
        with pytest.raises(ValueError, match="rise from 0 to 18"):
            call(TokenSupport(ids.flatten(), torch.tensor(offsets)))
    with pytest.raises(ValueError, match=r"takes ids \[P\]"):
        TokenSupport(ids, torch.arange(7))
    with pytest.raises(TypeError, match="int64 or int32"):
        TokenSupport(ids.float())
    for name in ("add_label", "sparse_grad"):
        with pytest.raises(TypeError, match=f"{name} must be True or False, got 2"):
            TokenSupport(ids, **{name: 2})
    with pytest.raises(ValueError, match="TokenSupport has 18 ids, but there are no labels"):
        linear_logps(hidden[:0], weight, labels[:0], support=TokenSupport(ids.flatten(), torch.tensor([0])))
    with pytest.raises(TypeError, match="must be a TokenSupport"):
        call(ids)
    with pytest.raises(ValueError, match=r"labels must be in \[0, 20\).*found the label 20"):
        linear_logps(hidden, weight, labels.masked_fill(labels == labels[0], 20), support=TokenSupport(ids))
