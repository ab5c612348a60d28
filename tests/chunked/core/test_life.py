"""What a call of the core keeps, how often the host waits, what it multiplies, and what it refuses."""

import gc
import math
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from liger_losses import checks
from liger_losses.chunked.core import (
    Dense,
    EngineOptions,
    Projection,
    Quantized,
    Target,
    TokenLoss,
    WithAdapters,
    loss_sum,
    rows,
    statistics,
    stream,
)
from liger_losses.chunked.core.quantizers import QuantizedWeight
from liger_losses.chunked.core.ranks import ALONE
from liger_losses.chunked.core.statistics import divergence
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform
from tests.kernels.cases import DEVICE

N, H, V = 40, 16, 203


def head_of(weights, bias=None):
    return Projection(weights, LogitTransform(), ALONE, bias)


class Codes(QuantizedWeight):
    def __init__(self, codes):
        super().__init__(tuple(codes.shape), torch.float32, codes.device)
        self.codes = codes

    def rows(self, start, stop):
        return self.codes[start:stop] * 0.05


def inputs(dtype=torch.float32, tokens=N, seed=0, masked=0.2, vocab=V):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, H, generator=g, dtype=torch.double).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, H, generator=g, dtype=torch.double) / 2).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=g)
    labels[torch.rand(tokens, generator=g) < masked] = -100
    return hidden, weight, labels


LOSS = TokenLoss(lambda s: -s["logp"])


def teacher_of(labels):
    g = torch.Generator().manual_seed(9)
    return Target(head_of(Dense(torch.randn(V, 8, generator=g))), torch.randn(len(labels), 8, generator=g), labels)


def couples(h, w, y, names=("logp",), **options):
    """A loss of statistics, by a target whose further fields are options too."""
    fields = {name: options.pop(name) for name in ("kept", "teacher") if name in options}
    (found,) = statistics([Target(head_of(Dense(w)), h, y, **fields)], names, EngineOptions(**options))
    return -sum(value.sum() for value in found.values())


def of_kept(h, w, y, **options):
    ids = y.clamp(min=0)
    return couples(h, w, y, kept=torch.stack([ids, (ids + 1) % V], -1), **options)


#: The ways of a call, as functions of hidden states, weight and labels.
CALLS = {
    "one pass": lambda h, w, y, **o: loss_sum([Target(head_of(Dense(w)), h, y)], ["logp"], [LOSS], EngineOptions(**o))[
        0
    ],
    "kept": couples,
    "again": lambda h, w, y, **o: couples(h, w, y, keep=0, **o),
    "divergence": lambda h, w, y, **o: couples(
        h, w, y, names=[divergence(Divergence.forward_kl())], teacher=teacher_of(y), **o
    ),
    "kept columns": of_kept,
}
every_call = pytest.mark.parametrize("name", CALLS)


# --- Until backward ---------------------------------------------------------------------------------------------------


@every_call
@pytest.mark.parametrize("which", [0, 1])
def test_a_tensor_that_changes_before_backward_is_an_error(name, which):
    """But not for gradients that were computed with the loss."""
    leaves = inputs()
    loss = CALLS[name](*leaves)
    with torch.no_grad():
        leaves[which].add_(1.0)
    if name == "one pass":
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@every_call
def test_backward_may_run_twice_and_gives_away_what_it_returns(name):
    *leaves, labels = inputs()
    loss = CALLS[name](*leaves, labels)
    first = torch.autograd.grad(2 * loss, leaves, retain_graph=True)
    copies = [g.clone() for g in first]
    for g in first:
        g.fill_(7.0)
    for a, b in zip(torch.autograd.grad(2 * loss, leaves), copies, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@every_call
def test_nothing_large_lives_after_backward(name):
    *leaves, labels = inputs(tokens=400)
    gc.collect()
    before = {id(t) for t in gc.get_objects() if isinstance(t, torch.Tensor)}
    loss = CALLS[name](*leaves, labels)
    loss.backward()
    gc.collect()
    kept = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and id(t) not in before]
    kept = [tuple(t.shape) for t in kept if t.numel() >= 400 * H // 2 and all(t is not leaf.grad for leaf in leaves)]
    assert not kept
    assert loss.isfinite()


@every_call
def test_saved_tensors_hooks_see_all_that_lives(name):
    """What a call keeps goes through autograd: there, it can be counted, and moved to the host."""
    *leaves, labels = inputs(tokens=400)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t.clone(), lambda t: t):
        loss = CALLS[name](*leaves, labels)
    gc.collect()
    moved = torch.autograd.grad(loss, leaves)
    assert any(tuple(shape) == (V, H) for shape in seen)
    for a, b in zip(moved, torch.autograd.grad(CALLS[name](*leaves, labels), leaves), strict=True):
        torch.testing.assert_close(a, b)


@every_call
def test_second_derivatives_and_transforms_are_errors(name):
    *leaves, labels = inputs()
    gradients = torch.autograd.grad(CALLS[name](*leaves, labels), leaves, create_graph=True)
    for leaf in leaves:
        with pytest.raises(RuntimeError, match="second derivatives are not supported"):
            torch.autograd.grad(sum(g.sum() for g in gradients), leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match="torch.func"):
        torch.func.grad(lambda h: CALLS[name](h, leaves[1], labels))(leaves[0].detach())
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward"):
        CALLS[name](torch.autograd.forward_ad.make_dual(leaves[0].detach(), leaves[0].detach()), leaves[1], labels)


@every_call
@pytest.mark.parametrize("compact", [True, False])
def test_masked_batches_give_zeros(name, compact):
    *leaves, labels = inputs()
    loss = CALLS[name](*leaves, torch.full_like(labels, -100), compact=compact)
    assert loss == 0.0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(loss, leaves))
    nothing = CALLS[name](leaves[0][:0], leaves[1], labels[:0], compact=compact)
    assert nothing == 0.0
    assert not torch.autograd.grad(nothing, leaves[1])[0].any()


@pytest.mark.parametrize("couples", [True, False])
def test_one_of_two_heads_may_have_no_token(couples):
    (a, v, y), (b, w, _) = inputs(), inputs(seed=1)
    targets = [Target(head_of(Dense(v)), a, y), Target(head_of(Dense(w)), b, torch.full_like(y, -100))]
    if couples:
        loss = -sum(s["logp"].sum() for s in statistics(targets, ["logp"]))
    else:
        loss = loss_sum(targets, ["logp"], [LOSS] * 2)[0]
    grads = torch.autograd.grad(loss, [a, v, b, w])
    reference = torch.autograd.grad(F.cross_entropy(a @ v.T, y, reduction="sum"), [a, v])
    for x, e in zip(grads, [*reference, torch.zeros_like(b), torch.zeros_like(w)], strict=True):
        torch.testing.assert_close(x, e, rtol=1e-4, atol=1e-5)


@every_call
def test_nan_hidden_states_of_masked_tokens_have_no_influence(name):
    *leaves, labels = inputs()
    with torch.no_grad():
        leaves[0][labels < 0] = torch.nan
    for compact in (True, False):
        loss = CALLS[name](*leaves, labels, compact=compact)
        assert all(g.isfinite().all() for g in (loss, *torch.autograd.grad(loss, leaves)))


# --- Precision --------------------------------------------------------------------------------------------------------


@every_call
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_size", [None, 4, 1])
def test_half_precision_is_as_exact_in_any_number_of_blocks(name, dtype, chunk_size):
    *narrow, labels = inputs(dtype)
    wide = [t.detach().double().requires_grad_() for t in narrow]
    exact = torch.autograd.grad(CALLS[name](*wide, labels), wide)
    loss = CALLS[name](*narrow, labels, chunk_size=chunk_size)
    assert loss.dtype == torch.float32
    for g, e in zip(torch.autograd.grad(loss, narrow), exact, strict=True):
        assert g.dtype == dtype
        assert (g - e).norm() < 2.5 * torch.finfo(dtype).eps * e.norm()


@every_call
def test_autocast(name):
    *leaves, labels = inputs()
    narrow = [t.detach().bfloat16().requires_grad_() for t in leaves]
    with torch.autocast("cpu", torch.bfloat16):
        loss = CALLS[name](*leaves, labels)
    expected = CALLS[name](*narrow, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
    for g, e in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, narrow), strict=True):
        assert g.dtype == torch.float32
        torch.testing.assert_close(g, e.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("couples", [True, False])
def test_many_targets_of_one_head_are_as_exact(couples):
    """Twenty parts of a half-precision gradient add up in fp32."""
    weight = inputs(torch.bfloat16)[1]
    pairs = [inputs(torch.bfloat16, seed=i)[::2] for i in range(20)]
    errors = []
    for some in (pairs, pairs[:8]):
        targets = [Target(head_of(Dense(weight)), h, y) for h, y in some]
        if couples:
            loss = -sum(s["logp"].sum() for s in statistics(targets, ["logp"]))
        else:
            loss = loss_sum(targets, ["logp"], [LOSS] * len(some))[0]
        w = weight.detach().double().requires_grad_()
        losses = [F.cross_entropy(h.detach().double() @ w.T, y, reduction="sum") for h, y in some]
        (exact,) = torch.autograd.grad(sum(losses), w)
        errors.append((torch.autograd.grad(loss, weight)[0] - exact).norm() / exact.norm())
    assert errors[0] < errors[1]


@pytest.mark.parametrize(
    "names", [("logp", "entropy"), (divergence(Divergence.mixture(0.3, 0.3, 0.7)), "logp")], ids=str
)
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_are_collected(names, biased):
    """In half precision, of more tokens than there are logits of at a time: the same, in fewer parts."""
    hidden, weight, labels = [t.to(DEVICE) for t in inputs(torch.bfloat16, tokens=200, masked=0.0)]
    bias = [torch.randn(V).bfloat16().to(DEVICE)] if biased else []
    factor = torch.arange(200.0, device=DEVICE).cos().clamp(min=0)
    taken = []

    def gradients(dtype, **options):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight, *bias)]
        given = teacher_of(labels.cpu())
        head = head_of(Dense(given.head.weights.weight.to(DEVICE, dtype)))
        teacher = Target(head, given.hidden.to(DEVICE, dtype), labels) if names[0] != "logp" else None
        target = Target(head_of(Dense(leaves[1]), *leaves[2:]), leaves[0], labels, teacher=teacher)
        loss = TokenLoss(lambda s, f: f * sum(s.values()), {"f": factor}, live=factor > 0)
        return torch.autograd.grad(loss_sum([target], names, [loss], EngineOptions(**options))[0], leaves)

    take = stream.Collected.take
    with mock.patch.object(stream.Collected, "take", lambda *arguments: taken.append(take(*arguments))):
        collected = gradients(torch.bfloat16, workspace=64_000 if names[0] != "logp" else 55_000, backend="triton")
    assert taken
    for g, e in zip(collected, gradients(torch.double), strict=True):
        assert (g - e).norm() < 0.01 * e.norm()


def test_a_workspace_of_too_many_parts_is_warned_of():
    for workspace, told in ((64_000, True), (200_000, False)):
        *leaves, labels = inputs(torch.bfloat16, tokens=400)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            CALLS["one pass"](*leaves, labels, workspace=workspace)
        assert ["has no room for" in str(warning.message) for warning in caught] == [True] * told


def test_accum_dtype_adds_up_in_fp32():
    *leaves, labels = inputs(torch.bfloat16, tokens=400)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = torch.autograd.grad(CALLS["one pass"](*wide, labels), wide[1])[0]
    errors = []
    for accum in (torch.float32, None):
        loss = CALLS["one pass"](*leaves, labels, chunk_size=50, accum_dtype=accum)
        errors.append((torch.autograd.grad(loss, leaves[1])[0] - exact).norm())
    assert errors[0] < errors[1]


@pytest.mark.parametrize("form", ["forward_kl", "reverse_kl", "mixture"])
def test_series_near_the_teacher(form):
    """Of fp32 logits that are nearly the teacher's, a divergence has its digits."""
    hidden, weight, labels = inputs(masked=0.0)
    other = (weight.detach() * (1 + 1e-4)).contiguous()
    which = Divergence.mixture(0.5, 0.5, 0.5) if form == "mixture" else getattr(Divergence, form)()

    def of(h, w, v):
        target = Target(head_of(Dense(w)), h, labels, teacher=Target(head_of(Dense(v)), h.detach(), labels))
        value = statistics([target], [divergence(which)])[0]["divergence"].sum()
        return value, torch.autograd.grad(value, h)[0]

    value, grad = of(hidden, weight, other)
    exact = of(*[t.detach().double().requires_grad_() for t in (hidden, weight, other)])
    torch.testing.assert_close(value.double(), exact[0], rtol=1e-2, atol=0)
    torch.testing.assert_close(grad.double(), exact[1], rtol=1e-2, atol=1e-3 * float(exact[1].abs().max()))


# --- Work -------------------------------------------------------------------------------------------------------------


class Work(TorchDispatchMode):
    """Floating-point operations of products, tensors ``[V, H]`` in fp32 that are made, and waits of the host."""

    def __init__(self):
        super().__init__()
        self.flops, self.wide, self.waits = 0, 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function._schema.name.removeprefix("aten::")
        matrices = {"mm": arguments[:2], "bmm": arguments[:2], "addmm": arguments[1:3]}
        if pair := matrices.get(name.rstrip("_")):
            self.flops += 2 * math.prod((*pair[0].shape, pair[1].shape[-1]))
        self.waits += name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
        made = function(*arguments, **(keywords or {}))
        self.wide += isinstance(made, torch.Tensor) and tuple(made.shape) == (V, H) and made.dtype == torch.float32
        return made


def units(name, *, frozen=False, grad=True, **options):
    """Products in N H V."""
    *leaves, labels = inputs(tokens=400)
    leaves[1].requires_grad_(not frozen)
    with Work() as work, torch.set_grad_enabled(grad):
        loss = CALLS[name](*leaves, labels, **options)
        if grad:
            torch.autograd.grad(loss, [t for t in leaves if t.requires_grad])
    return work.flops / (int((labels >= 0).sum()) * H * V)


@pytest.mark.parametrize(
    ("name", "trained", "frozen", "silent"),
    [("one pass", 6, 4, 2), ("kept", 6, 4, 2), ("again", 8, 6, 2), ("divergence", 7, 5, 3)],
)
def test_products(name, trained, frozen, silent):
    """The table of DESIGN; a teacher of half the hidden size adds 1 where logits live until backward."""
    assert units(name) == pytest.approx(trained, abs=0.1)
    assert units(name, frozen=True) == pytest.approx(frozen, abs=0.1)
    assert units(name, grad=False) == pytest.approx(silent, abs=0.1)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("name", ["kept", "again", "one pass"])
def test_tokens_without_a_coefficient_have_no_gradient_products(share, name):
    hidden, weight, labels = inputs(tokens=400, masked=0.0)
    factor = (torch.rand(400, generator=torch.Generator().manual_seed(0)) < share).float()
    target = Target(head_of(Dense(weight)), hidden, labels)
    least = {"cpu": 0.0}
    patches = mock.patch.dict(stream.MIN_FLOPS, least), mock.patch.dict(stream.MIN_FLOPS_OF_LOSSES, least)
    with Work() as work, patches[0], patches[1]:
        if name == "one pass":
            loss = loss_sum(
                [target], ["logp"], [TokenLoss(lambda s, f: f * s["logp"], {"f": factor}, live=factor > 0)]
            )[0]
        else:
            loss = (
                statistics([target], ["logp"], EngineOptions(keep=None if name == "kept" else 0))[0]["logp"] * factor
            ).sum()
        grads = torch.autograd.grad(loss, (hidden, weight))
    again = 2 * (name == "again")
    assert work.flops <= (2 * 400 + (4 + again) * float(factor.sum())) * H * V * 1.001
    assert not grads[0][factor == 0].any()


@pytest.mark.parametrize("name", ["one pass", "kept", "again"])
@pytest.mark.parametrize("chunk_size", [None, 4, 40])
def test_no_second_buffer_of_the_weights_size(name, chunk_size):
    *leaves, labels = inputs(torch.bfloat16, tokens=160)
    with Work() as work:
        torch.autograd.grad(3 * CALLS[name](*leaves, labels, chunk_size=chunk_size, workspace=200_000), leaves)
    assert not work.wide


class Dequantized(Codes):
    """Codes that count their rows which are dequantized, and the most of them at a time."""

    total = most = 0

    def rows(self, start, stop):
        rows = super().rows(start, stop)
        self.total, self.most = self.total + len(rows), max(self.most, len(rows))
        return rows


@pytest.mark.parametrize(("passes", "workspace"), [(3 + 4, 150_000), (1 + 1, 600_000)])
def test_each_row_is_dequantized_once_a_pass(passes, workspace):
    """For all tokens, or for a third of them, and a fourth where gradients take memory too; never all at once."""
    hidden, weight, labels = inputs(tokens=600)
    codes = Dequantized((weight.detach() * 20).round().to(torch.int8))
    target = Target(head_of(Quantized.of(codes)), hidden, labels)
    found = statistics([target], ["logp"], EngineOptions(workspace=workspace, keep=0))[0]
    torch.autograd.grad(found["logp"].sum(), hidden)
    assert codes.total == passes * V
    assert codes.most < V / 2


def test_a_loss_without_gradients_dequantizes_each_row_as_rarely():
    hidden, weight, labels = inputs(tokens=600)
    codes = Dequantized((weight.detach() * 20).round().to(torch.int8))
    with torch.no_grad():
        loss_sum(
            [Target(head_of(Quantized.of(codes)), hidden, labels)], ["logp"], [LOSS], EngineOptions(workspace=150_000)
        )
    assert codes.total == 3 * V


def test_codes_that_are_made_in_fp16_need_no_scale_of_the_loss():
    hidden, weight, labels = inputs(torch.bfloat16, tokens=400)
    codes = Codes((weight.detach() * 20).round().to(torch.int8))
    codes.dtype = torch.float16
    with Work() as work:
        loss = loss_sum(
            [Target(head_of(Quantized.of(codes)), hidden, labels)], ["logp"], [LOSS], EngineOptions(keep=0)
        )[0]
        torch.autograd.grad(loss, hidden)
    assert work.flops == pytest.approx(4 * int((labels >= 0).sum()) * H * V, rel=0.01)


def test_tokens_without_a_gradient_are_no_part_of_one():
    hidden, weight, labels = inputs(torch.bfloat16, tokens=400, masked=0.0)
    live = torch.arange(400) < 20
    loss = TokenLoss(lambda s, f: f * s["logp"], {"f": live.float()}, live=live)
    with Work() as work, mock.patch.dict(stream.MIN_FLOPS_OF_LOSSES, {"cpu": 0.0}):
        value = loss_sum(
            [Target(head_of(Dense(weight)), hidden, labels)], ["logp"], [loss], EngineOptions(chunk_size=20)
        )[0]
        torch.autograd.grad(value, weight)
    assert work.flops == pytest.approx((2 * 400 + 4 * 20) * H * V, rel=0.01)


@pytest.mark.parametrize("quantized", [False, True])
def test_what_all_columns_add_to_adds_up_in_fp32(quantized):
    """An adapter's first matrix, by parts of the vocabulary."""
    hidden, weight, labels = inputs(torch.bfloat16, tokens=120, vocab=6000)
    g = torch.Generator().manual_seed(5)
    a, b = (torch.randn(*size, generator=g).bfloat16().requires_grad_() for size in ((4, H), (6000, 4)))
    base = Dense(weight.detach())
    if quantized:
        base = Quantized.of(Codes((weight.detach() * 20).round().to(torch.int8)))

    def gradient(**options):
        target = Target(head_of(WithAdapters(base, a, b, 0.1)), hidden, labels)
        return torch.autograd.grad(statistics([target], ["logp"], EngineOptions(**options))[0]["logp"].sum(), a)[
            0
        ].float()

    whole = gradient()
    assert (gradient(workspace=200_000, keep=0, backend="torch") - whole).norm() < 0.004 * whole.norm()


@pytest.mark.parametrize("biased", [False, True])
def test_a_block_takes_few_launches_whatever_adds_to_a_gradient(biased):
    hidden, weight, labels = [t.to(DEVICE) for t in inputs(torch.bfloat16, tokens=80)]
    weight, bias = weight.detach().requires_grad_(), torch.zeros(V, device=DEVICE, requires_grad=True)
    ids = torch.arange(80, device=DEVICE)[:, None] + torch.arange(3, device=DEVICE)
    target = Target(head_of(Dense(weight), bias if biased else None), hidden, labels, selected=ids)
    launched, launch = [], rows.softmax_gradient
    with mock.patch.object(rows, "softmax_gradient", lambda *a, **k: launched.append(launch(*a, **k))):
        found = statistics([target], ["selected_logps", "lse"], EngineOptions(backend="triton"))[0]
        sum(value.sum() for value in found.values()).backward()
    assert len(launched) == 1


@contextmanager
def reads():
    """A list that grows by one each time that the host reads a tensor."""
    count, tolist = list[int](), torch.Tensor.tolist
    with mock.patch.object(torch.Tensor, "tolist", lambda tensor: count.append(1) or tolist(tensor)):
        yield count


@every_call
def test_how_often_the_host_waits(name):
    """Once in forward and once in backward, however many blocks; never where masked tokens are not dropped."""
    for compact, most in ((True, (1, 1)), (False, (0, 0))):
        *leaves, labels = inputs(tokens=400)
        CALLS[name](*leaves, labels)  # fills caches of constants
        with reads() as count, mock.patch.object(checks, "host_checks", return_value=compact):
            with Work() as forward:
                loss = CALLS[name](*leaves, labels, compact=compact, chunk_size=50)
            in_forward = len(count)
            with Work() as backward, mock.patch.dict(stream.MIN_FLOPS, {"cpu": 0.0}):
                torch.autograd.grad(loss, leaves)
        assert in_forward <= most[0]
        assert len(count) - in_forward <= most[1]
        assert not forward.waits
        assert not backward.waits


# --- Heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("couples", [True, False])
def test_heads_of_one_weight_have_one_buffer(couples):
    """The same tensor, or views of it."""
    weight = inputs()[1]
    hs, ys = zip(*[(h, y) for h, _, y in (inputs(seed=i) for i in range(3))], strict=True)
    heads = [head_of(Dense(weight)), head_of(Dense(weight.view(V, H))), head_of(Dense(weight.view(V, H)))]
    targets = [Target(head, h, y) for head, h, y in zip(heads, hs, ys, strict=True)]
    made = []
    with mock.patch.object(stream, "Gradients", lambda leaves, f=stream.Gradients: made.append(f(leaves)) or made[-1]):
        if couples:
            loss = -sum(s["logp"].sum() for s in statistics(targets, ["logp"]))
        else:
            loss = loss_sum(targets, ["logp"], [LOSS] * 3)[0]
        grads = torch.autograd.grad(loss, [weight, *hs])
    assert len(made[-1].buffers) == 4
    expected = torch.autograd.grad(
        sum(F.cross_entropy(h @ weight.T, y, reduction="sum") for h, y in zip(hs, ys, strict=True)), [weight, *hs]
    )
    for g, e in zip(grads, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4)


def test_quantized_rows_are_dequantized_in_parts():
    hidden, weight, labels = inputs(tokens=100, vocab=2000)
    codes = (weight.detach() * 20).round()
    sizes = []

    class Counted(Codes):
        def rows(self, start, stop):
            sizes.append(stop - start)
            return super().rows(start, stop)

    for weights in (
        Quantized.of(Counted(codes)),
        WithAdapters(Quantized.of(Counted(codes)), weight[:2] * 0, weight[:, :2]),
    ):
        sizes.clear()
        target = Target(head_of(weights), hidden, labels)
        loss = loss_sum([target], ["logp"], [LOSS], EngineOptions(workspace=300_000))[0]
        (grad,) = torch.autograd.grad(loss, hidden)
        assert max(sizes) < 1000
        expected = torch.autograd.grad(F.cross_entropy(hidden @ (codes * 0.05).T, labels, reduction="sum"), hidden)[0]
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("couples", [True, False])
def test_rows_are_dequantized_for_all_tokens_of_a_tile(couples):
    """Not for each of the blocks that a small workspace makes; statistics of parts of the vocabulary are merged."""
    hidden, weight, labels = inputs(tokens=600, vocab=2000)
    codes, count = (weight.detach() * 20).round(), []

    class Counted(Codes):
        def rows(self, start, stop):
            count.append(stop - start)
            return super().rows(start, stop)

    names = ("logp", "entropy", "mean_logp", "log_sum_sq_probs", "mean_logit", "argmax")
    target = Target(head_of(Quantized.of(Counted(codes))), hidden, labels)
    options = EngineOptions(workspace=600_000)
    if couples:
        found = statistics([target], names, options)[0]
    else:
        found = loss_sum([target], names, [TokenLoss(lambda s: s["logp"] + s["entropy"])], options)[1][0]
        loss = loss_sum([target], names, [TokenLoss(lambda s: s["logp"] + s["entropy"])], options)[0]
    whole = Target(head_of(Dense(codes * 0.05)), hidden, labels)
    expected = statistics([whole], names)[0]
    for name in names:
        torch.testing.assert_close(found[name], expected[name].detach(), rtol=1e-4, atol=1e-4)
    loss = found["logp"].sum() + found["entropy"].sum() if couples else loss
    (grad,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(
        grad, torch.autograd.grad(expected["logp"].sum() + expected["entropy"].sum(), hidden)[0], rtol=1e-3, atol=1e-3
    )
    assert sum(count) <= (9 if couples else 18) * 2000


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 20])
def test_rows_that_many_tokens_keep_are_rounded_few_times(sparse, chunk_size):
    hidden, weight, _ = inputs(torch.bfloat16, tokens=600, masked=0.0)
    labels = torch.randint(3, (600,))
    kept = torch.arange(5).expand(600, 5)
    grads = []
    for dtype, options in ((torch.bfloat16, EngineOptions(chunk_size=chunk_size)), (torch.double, EngineOptions())):
        w = weight.detach().to(dtype).requires_grad_()
        target = Target(head_of(Dense(w)), hidden.detach().to(dtype), labels, kept=kept, sparse_grad=sparse)
        loss = loss_sum([target], ["logp"], [LOSS], options)[0]
        grads.append(torch.autograd.grad(loss, w)[0].to_dense())
    assert (grads[0] - grads[1]).norm() < 0.004 * grads[1].norm()


def test_sparse_gradients_of_kept_columns():
    hidden, weight, labels = inputs()
    kept = torch.stack([labels.clamp(min=0), (labels.clamp(min=0) + 7) % V, torch.full_like(labels, -1)], -1)
    grads = []
    for sparse in (True, False):
        target = Target(head_of(Dense(weight)), hidden, labels, kept=kept, sparse_grad=sparse)
        loss = statistics([target], ["logp"])[0]["logp"].square().sum()
        grads.append(torch.autograd.grad(loss, weight)[0])
    assert grads[0].layout == torch.sparse_coo
    torch.testing.assert_close(grads[0].to_dense(), grads[1])
    active = kept[labels >= 0]
    assert {*grads[0].coalesce().indices()[0].tolist()} <= {*active[active >= 0].tolist()}


def test_metrics_of_the_largest():
    hidden, weight, labels = inputs(masked=0.0)
    target = Target(head_of(Dense(weight)), hidden, labels, selected=3)
    found = statistics([target], ["selected_logps", "columns", "rest", "argmax"], EngineOptions(chunk_size=7))[0]
    lp = (hidden @ weight.T).log_softmax(-1)
    values, ids = lp.topk(3)
    assert torch.equal(found["columns"], ids)
    assert torch.equal(found["argmax"], ids[:, 0])
    torch.testing.assert_close(found["selected_logps"], values)
    torch.testing.assert_close(found["rest"], lp.scatter(1, ids, -torch.inf).logsumexp(-1))


def test_class_weights_in_half_precision():
    g = torch.Generator().manual_seed(0)
    hidden, c = torch.randn(N, 8, generator=g).double().requires_grad_(), torch.rand(V, generator=g).bfloat16()
    weight, labels = torch.randn(V, 8, generator=g).double(), torch.randint(V, (N,), generator=g)
    of = [
        statistics([Target(head_of(Dense(weight)), hidden, labels, class_weight=w)], ["mean_logp"])[0]["mean_logp"]
        for w in (c, c.double())
    ]
    torch.testing.assert_close(*[torch.autograd.grad(value.sum(), hidden) for value in of], rtol=1e-12, atol=1e-12)


def test_what_nothing_of_is_trained_has_no_gradient():
    h, w, y = torch.randn(6, 8), torch.randn(V, 8), torch.arange(6)
    targets = [Target(head_of(Dense(w)), h, y), Target(head_of(Dense(w)), h.clone().requires_grad_(), y)]
    assert [of["logp"].requires_grad for of in statistics(targets, ["logp"])] == [False, True]


def test_adapters_beside_a_sparse_gradient_are_dense():
    g = torch.Generator().manual_seed(0)
    w, a, b = [torch.randn(size, generator=g).requires_grad_() for size in ((V, 8), (2, 8), (V, 2))]
    y = torch.arange(6)
    head = head_of(WithAdapters(Dense(w), a, b, 1.0))
    target = Target(head, torch.randn(6, 8, generator=g), y, kept=y[:, None] + torch.arange(3), sparse_grad=True)
    gradients = torch.autograd.grad(statistics([target], ["logp"])[0]["logp"].sum(), (w, a, b))
    assert [gradient.is_sparse for gradient in gradients] == [True, False, False]


def test_class_weights():
    hidden, weight, labels = inputs(torch.double)
    c = torch.rand(V, dtype=torch.double)
    found = statistics([Target(head_of(Dense(weight)), hidden, labels, class_weight=c)], ["mean_logp"])[0]["mean_logp"]
    lp = (hidden @ weight.T).log_softmax(-1)
    expected = (lp * c).mean(-1) * (labels >= 0)
    torch.testing.assert_close(found, expected)
    a, b = (torch.autograd.grad(x.square().sum(), (hidden, weight)) for x in (found, expected))
    for g, e in zip(a, b, strict=True):
        torch.testing.assert_close(g, e)


def test_hidden_states_of_any_strides():
    hidden, weight, _ = inputs(tokens=60)
    labels = torch.randint(V, (4, 14))
    labels[0, :5] = -100
    states = hidden.view(4, 15, H)
    for compact in (True, False):
        losses = CALLS["one pass"](states[:, :-1], weight, labels, compact=compact)
        grads = torch.autograd.grad(losses, (hidden, weight))
        expected = F.cross_entropy((states[:, :-1] @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
        torch.testing.assert_close(losses, expected)
        for g, e in zip(grads, torch.autograd.grad(expected, (hidden, weight)), strict=True):
            torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


def test_labels_outside_of_the_vocabulary_and_small_workspaces_are_errors():
    *leaves, labels = inputs()
    labels[3] = V
    with pytest.raises(ValueError, match="labels must be in"):
        CALLS["one pass"](*leaves, labels)
    with pytest.raises(ValueError, match="workspace=100 bytes is too small"):
        CALLS["one pass"](*leaves, labels.clamp(max=V - 1), workspace=100)
