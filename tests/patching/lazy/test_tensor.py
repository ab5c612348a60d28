"""Lazy logits against the logits themselves: values, gradients, and when they are computed."""

import gc
import itertools
import re
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_losses.patching.lazy import LazyLogits, lazy_linear, true_values
from liger_losses.patching.lazy_head import LazyLinear

B, T, H, V = 3, 5, 8, 13


def problem(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*size, generator=g, dtype=torch.float64).to(dtype) for size in ((B, T, H), (V, H), (V,))]
    labels = torch.randint(V, (B, T), generator=g)
    labels[0, 2] = -100
    return *[t.requires_grad_() for t in tensors], labels


def shifted(logits, labels):
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, V), labels[..., 1:].reshape(-1))


def chosen(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).sum()


#: Some of them twice in a row.
SEVERAL = torch.tensor([[0, 3, 3, 12], [5, 4, 1, 5], [2, 7, 8, 9]])[torch.arange(B * T) % 3].view(B, T, 4)

#: What losses do with logits, none of which needs their values.
LAZY = {
    "cross entropy": lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1)),
    "shifted": shifted,
    "options": lambda z, y: F.cross_entropy(
        z.flatten(0, 1), y.flatten(), torch.arange(1.0, V + 1).to(z.dtype), reduction="sum", label_smoothing=0.1
    ),
    "module": lambda z, y: nn.CrossEntropyLoss(reduction="none")(z.reshape(-1, V), y.reshape(-1)).square().sum(),
    "nll": lambda z, y: F.nll_loss(F.log_softmax(z, dim=-1).view(-1, V), y.view(-1)),
    "gather": chosen,
    "logits at labels": lambda z, y: torch.gather(z, -1, y.clamp(min=0)[..., None]).sum(),
    "several columns": lambda z, y: (
        z.log_softmax(-1).gather(-1, SEVERAL).exp().sum() + z.gather(-1, SEVERAL).square().sum()
    ),
    "likeliest columns": lambda z, y: (
        (z / 0.7).topk(4).values.square().sum() + z.log_softmax(-1).topk(3, dim=-1, largest=False).values.exp().sum()
    ),
    "sums": lambda z, y: z.sum() + z.sum(-1).square().sum() + z[1].sum(dim=-1, keepdim=True).exp().sum() * 1e-3,
    "logsumexp": lambda z, y: torch.logsumexp(z, dim=-1).square().sum() + z.logsumexp(-1, keepdim=True).sum(),
    "row by row": lambda z, y: sum(torch.logsumexp(row, dim=-1).square().sum() for row in z),
    "scaled": lambda z, y: shifted(z * 0.3 / 1.7, y),
    "soft-capped": lambda z, y: shifted(torch.tanh(z / 3.0) * 3.0, y) + chosen(2.0 * (z * 0.5).tanh(), y),
    "biased": lambda z, y: chosen(z + torch.arange(V).to(z.dtype), y),
    "cast": lambda z, y: shifted(z.float().double().to(torch.float32).to("cpu"), y),
    "vocabulary sliced": lambda z, y: z[..., :7].logsumexp(-1).sum() + z.narrow(1, 2, 2)[..., 2:].logsumexp(-1).sum(),
    "tokens chosen": lambda z, y: F.cross_entropy(z[y != -100], y[y != -100]) + z[:, -2:].logsumexp(-1).sum(),
    "moved": lambda z, y: F.cross_entropy(z.transpose(0, 1).reshape(-1, V), y.t().reshape(-1)),
    "split": lambda z, y: sum(chosen(a, b) for a, b in zip(z.split(2), y.split(2), strict=True)),
    "indexed": lambda z, y: chosen(z[:, torch.tensor([3, 1])], y[:, [3, 1]]) + chosen(z[1], y[1]),
    "two products": lambda z, y: chosen(z + z, y) if not isinstance(z, LazyLogits) else chosen(z + z.clone(), y),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LAZY)
def test_losses_never_need_the_values(name, bias):
    hidden, weight, b, labels = problem()
    leaves = (hidden, weight, b) if bias else (hidden, weight)
    results = []
    for linear in (F.linear, lazy_linear):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = LAZY[name](linear(*leaves), labels)
            results.append((loss, *torch.autograd.grad(loss, leaves)))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if name == "cast" else {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(*results[::-1], check_dtype=False, **tolerance)


class Square(torch.autograd.Function):
    """Code that never looks at a tensor's class."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx, g):
        (logits,) = ctx.saved_tensors
        return 2 * g * logits


class Pass(torch.autograd.Function):
    """As DDP's: returns its input."""

    @staticmethod
    def forward(ctx, logits):
        return logits

    @staticmethod
    def backward(ctx, g):
        return g


class Cross(Pass):
    """Passes the gradient of its first argument on to the second."""

    @staticmethod
    def forward(ctx, one, two):
        return one.detach()

    @staticmethod
    def backward(ctx, g):
        return None, g


class Clip(Pass):
    @staticmethod
    def backward(ctx, g):
        return g.clamp(-1, 1)


#: What needs them.
EAGER = {
    "softmax": lambda z, y: z.softmax(-1).square().sum(),
    "custom function": lambda z, y: Square.apply(z),
    "in place": lambda z, y: z.mul_(2.0).exp().sum(),
    "in place, then lazily": lambda z, y: chosen(z.div_(2.0), y),
    "cat": lambda z, y: torch.cat([z, z]).sin().sum(),
    "index_select": lambda z, y: chosen(z.index_select(1, torch.tensor([3, 1])), y[:, [3, 1]]),
    "one column": lambda z, y: z[..., 3].square().sum() + z.narrow(-1, 2, 5).logsumexp(-1).sum(),
    "max": lambda z, y: z.max(-1).values.sum(),
    "several columns": lambda z, y: z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None].expand(-1, -1, 2)).sum(),
    "soft labels": lambda z, y: F.cross_entropy(z.view(-1, V), z.detach().view(-1, V).softmax(-1)),
    "classes in the middle": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "softmax of other dimensions": lambda z, y: z.log_softmax(1).sum() + z.logsumexp((0, 2)).sum(),
    "negative scale": lambda z, y: (z * -1.0).tanh().mul(-2.0).logsumexp(-1).sum(),
}


@pytest.mark.parametrize("name", EAGER)
def test_what_needs_the_values_gets_them(name):
    hidden, weight, bias, labels = problem()
    results = []
    for linear in (F.linear, lazy_linear):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Not a leaf's view: in-place operations are allowed on it.
            loss = EAGER[name](linear(hidden, weight, bias), labels)
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight, bias))))
    torch.testing.assert_close(*results[::-1], rtol=1e-9, atol=1e-10)


def test_it_says_once_who_needs_them():
    hidden, weight, bias, _ = problem()

    def use():
        lazy_linear(hidden, weight, bias).sigmoid()

    with pytest.warns(RuntimeWarning, match=rf"sigmoid, called in {re.escape(__name__)}:\d+, needs the values"):
        use()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use()


def test_it_looks_like_logits():
    hidden, weight, bias, _ = problem(torch.bfloat16)
    lazy = lazy_linear(hidden, weight, bias)
    assert isinstance(lazy, LazyLogits)
    assert lazy.shape == (B, T, V)
    assert (lazy.dtype, lazy.device, lazy.dim(), len(lazy), lazy.numel()) == (
        torch.bfloat16,
        hidden.device,
        3,
        B,
        B * T * V,
    )
    assert lazy.requires_grad
    assert lazy.grad_fn is not None
    assert "LazyLogits" in repr(lazy)
    assert not lazy.detach().requires_grad
    assert lazy.argmax(-1).equal((hidden.float() @ weight.float().T + bias.float()).argmax(-1))
    with torch.autocast("cpu", torch.bfloat16):
        under = lazy_linear(hidden.float(), weight.float(), bias.float())
    assert under.dtype == torch.bfloat16
    with pytest.raises(RuntimeError):
        lazy_linear(hidden, weight.float())


def test_autocast_is_the_heads():
    """Logits that outlive the autocast they were made under are of its dtype all the same."""
    hidden, weight, bias, labels = problem(torch.float32)
    results = []
    for linear in (F.linear, lazy_linear):
        with torch.autocast("cpu", torch.bfloat16):
            logits = linear(hidden, weight, bias)
        loss = F.cross_entropy(logits.float().view(-1, V), labels.view(-1))
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight, bias))))
    torch.testing.assert_close(*results[::-1], rtol=3e-2, atol=3e-2)
    assert true_values(logits).dtype == torch.bfloat16


def both():
    """Ordinary and lazy logits of the same tensors."""
    hidden, weight, bias, labels = problem()
    return (hidden, weight, bias), labels, F.linear(hidden, weight, bias), lazy_linear(hidden, weight, bias)


def test_made_without_gradients_it_has_none():
    leaves, labels, plain, lazy = both()
    results = []
    for logits in (plain, lazy):
        with torch.no_grad():
            old = logits / 0.7
        loss = (chosen(logits, labels) - chosen(old, labels)).square()
        results.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(*results[::-1])


@pytest.mark.filterwarnings("ignore:.*needs the values")
def test_in_place_operations():
    leaves, labels, plain, lazy = both()
    results = []
    for logits in (plain, lazy):
        logits[..., 3] = -5.0
        logits *= 0.5
        logits.masked_fill_(labels[..., None] == 2, 1.0)
        loss = logits.logsumexp(-1).sum()
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*results[::-1])
    # What shares its memory in torch would have changed as well.
    lazy = both()[-1]
    for copied in (lazy.to(torch.float32), lazy.float(), lazy[[0, 1]], lazy.transpose(0, 1).contiguous(), lazy * 2):
        copied.mul_(2.0)
        assert lazy.logsumexp(-1).isfinite().all()
    copy = lazy.clone()
    rows, tokens = lazy.view(-1, V), lazy[:, 1:]
    del lazy  # nobody knows what both are views of
    rows.mul_(2.0)
    with pytest.raises(RuntimeError, match="share their memory"):
        tokens.logsumexp(-1)
    assert copy.logsumexp(-1).isfinite().all()
    with torch.no_grad():
        changed = copy.clone()
        changed.mul_(2.0)
        assert changed.isfinite().all()
        assert copy.logsumexp(-1).isfinite().all()
    with pytest.raises(RuntimeError, match="use unsqueeze instead"):
        copy.unsqueeze_(0)
    with torch.no_grad():
        torch.mul(torch.ones(B, T, V), 2.0, out=lazy_linear(*leaves))
    changed = both()[-1]
    changed.mul_(2.0)
    with pytest.raises(RuntimeError, match="changed in place were then used"):
        Square.apply(changed).backward()


@pytest.mark.filterwarnings("ignore:.*needs the values")
def test_detached_logits_keep_no_graph():
    *leaves, _ = problem()
    logits = lazy_linear(*leaves)
    detached, alive = logits.detach(), weakref.ref(logits)
    assert torch.equal(logits.exp(), detached.exp())
    del logits
    gc.collect()
    assert alive() is None


def change_slices(z):
    z[:, :-1, 2:] -= 5.0
    z[:, -1] /= 0.5
    return [z]


def change_a_view(z):
    rows, columns, detached = z.view(-1, V)[1:], z[..., :3], z.detach()
    columns.exp()
    rows[:2].mul_(3.0)
    z[0] = 1.0
    columns += 1.0
    return [rows, columns, z, detached]


def change_a_view_that_was_read(z):
    tokens = z[:, 1:]
    assert tokens.exp().isfinite().all()
    tokens.neg_()
    return [z, tokens]


def change_a_column_of_a_view(z):
    last = z[:, -1]
    last[:, 1] -= 3.0
    column = last[:, 2]
    column *= 2.0
    last /= 0.5
    return [last, column]


@pytest.mark.filterwarnings("ignore:.*needs the values", "ignore:Sparse")
@pytest.mark.parametrize(
    "use",
    [
        lambda v: v.to_sparse().to_dense(),
        lambda v: torch.vmap(lambda x: (v * x).sum())(torch.ones(2)),
        lambda v: torch.func.grad(lambda x: (v * x).sum())(torch.ones(())),
    ],
    ids=["sparse", "vmap", "grad"],
)
def test_views_whose_results_have_no_storage(use):
    *leaves, _ = problem()
    with torch.no_grad():
        found, expected = (use(make(*leaves)[:, 1:]) for make in (lazy_linear, F.linear))
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*needs the values")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "change", [change_slices, change_a_view, change_a_view_that_was_read, change_a_column_of_a_view]
)
def test_logits_and_their_views_see_what_changes_them(change, mode):
    results = []
    for make in (F.linear, lazy_linear):
        *leaves, _ = problem()
        with mode():
            found = [logits.logsumexp(-1) for logits in change(make(*leaves))]
        if mode is torch.enable_grad:
            found += torch.autograd.grad(sum(x.sum() for x in found), leaves)
        results.append(found)
    torch.testing.assert_close(*results[::-1])


@pytest.mark.filterwarnings("ignore:.*needs the values")
@pytest.mark.parametrize("loss", [lambda z: z.logsumexp(-1).sum(), lambda z: z.sin().sum()], ids=["lazy", "values"])
def test_hooks_that_wait_for_their_gradient(loss):
    """And scale it; it has no values."""
    leaves, _, plain, lazy = both()
    results, seen = [], []
    for logits in (plain, lazy):
        logits.register_hook(seen.append)
        logits.register_hook(lambda g: (g * 3 + g) / 2)
        results.append(torch.autograd.grad(loss(logits), leaves))
    torch.testing.assert_close(*results[::-1])
    assert [x.shape for x in seen] == [plain.shape] * 2
    assert str(seen[1]) == f"LazyGradient(shape=({B}, {T}, {V}), dtype=torch.float64, device=cpu)"


@pytest.mark.filterwarnings("ignore:.*needs the values")
def test_gradients_of_several_kinds_meet():
    """A loss of the logits, one of their values, and one of what an autograd function returns."""
    leaves, labels, plain, lazy = both()
    results = []
    for logits in (plain, lazy):
        logits.register_hook(lambda g: 2 * g)
        first, passed = chosen(logits, labels), Pass.apply(logits)
        total = first + passed.logsumexp(-1).sum() + Square.apply(logits) + Square.apply(passed)
        results.append(torch.autograd.grad(total, leaves))
    torch.testing.assert_close(*results[::-1])


@pytest.mark.filterwarnings("ignore:.*needs the values")
def test_gradients_that_have_no_way():
    """They are an error, and not silently wrong."""
    *leaves, labels = problem()
    logits = lazy_linear(*leaves)
    hidden_gradient, found = torch.autograd.grad(chosen(logits, labels), [leaves[0], logits])
    assert hidden_gradient.isfinite().all()
    with pytest.raises(RuntimeError, match=r"compute the loss from liger_losses\.patching\.lazy\.true_values"):
        found.norm()
    crossed = Cross.apply(lazy_linear(*leaves), lazy_linear(*leaves))
    with pytest.raises(RuntimeError, match="passed the gradient of lazy logits on to other lazy logits"):
        crossed.logsumexp(-1).sum().backward()
    clipped = Clip.apply(lazy_linear(*leaves))
    with pytest.raises(RuntimeError, match="needs the values of a gradient"):
        clipped.logsumexp(-1).sum().backward()


@pytest.mark.filterwarnings("ignore:.*needs the values")
@pytest.mark.parametrize(
    "operation",
    [
        lambda z: z[0, 1].logsumexp(-1),
        lambda z: z[0][2].log_softmax(-1).gather(-1, torch.tensor([3])).sum(),
        lambda z: z[1, -1].argmax(-1).to(z.dtype) + z[0, 0].mean(),
        lambda z: (z + torch.arange(V)).logsumexp(-1).sum(),
        lambda z: (z + torch.ones(V, dtype=torch.bool)).logsumexp(-1).sum(),
        lambda z: z.transpose(dim0=0, dim1=1).logsumexp(-1).sum() + z.unsqueeze(dim=0).logsumexp(-1).sum(),
        lambda z: torch.permute(z, dims=(1, 0, 2))[0].logsumexp(-1).sum() + torch.chunk(z, chunks=3)[1].sum(),
        lambda z: z.argmax(axis=-1).sum().to(z.dtype) + z.argmax(-1, keepdim=True).sum(),
        lambda z: z.mean((0, 1, 2), True).sum() + z.mean(None, True).sum(),
        lambda z: z.log_softmax(-1).to(torch.bfloat16).float().sum(),
        lambda z: z[:, 0, 1:4, ...].logsumexp(-1).sum() + z[..., 1:, 0, :5].sum() + z[0, ..., 1:3].logsumexp(-1).sum(),
        lambda z: z[..., :0].sum() + z.narrow(0, -2, 2).logsumexp(-1).sum(),
        lambda z: z.split([V - 1, 1], -1)[0].logsumexp(-1).sum() + z.narrow(-1, 0, V).sum() + z.unbind(-1)[1].sum(),
    ],
)
def test_spellings_and_corners(operation):
    _, _, plain, lazy = both()
    torch.testing.assert_close(operation(lazy), operation(plain))


def test_what_is_no_head_goes_to_linear():
    hidden = torch.randn(2, H)
    for weight, bias in (
        (torch.randn(V, H), torch.randn(1)),
        (torch.randn(V, H), torch.tensor(1.0)),
        (hidden[0], None),
    ):
        torch.testing.assert_close(lazy_linear(hidden, weight, bias), F.linear(hidden, weight, bias))
    ones = torch.ones(2, H, dtype=torch.int64)
    torch.testing.assert_close(lazy_linear(ones, ones), F.linear(ones, ones))


def test_what_is_made_without_gradients_holds_no_graph():
    *tensors, _ = problem()
    hidden_states = tensors[0] * 2
    alive = weakref.ref(hidden_states)
    logits = lazy_linear(hidden_states, *tensors[1:])
    with torch.no_grad():
        kept = logits.detach(), logits[:, 1:], logits.float()
    del hidden_states, logits
    gc.collect()
    # What they are computed of is there; the graph behind it is not.
    assert alive() is None
    assert not any(z.logsumexp(-1).requires_grad for z in kept)


def test_the_largest_are_those_of_the_logits_themselves():
    """With the rounding that decided which they are."""
    hidden, weight, bias, _ = problem(torch.bfloat16)
    plain, lazy = (3.0 * torch.tanh(make(hidden, weight, bias) / 3.0) for make in (F.linear, lazy_linear))
    for k in (1, 4, V):
        expected, found = plain.topk(k), lazy.topk(k)
        assert torch.equal(found.values, expected.values)
        assert torch.equal(plain.gather(-1, found.indices), expected.values)
    assert torch.equal(lazy[0, 0].topk(3).values, plain[0, 0].topk(3).values)
    with torch.no_grad():
        assert torch.equal(lazy.topk(2).values, plain.topk(2).values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_rounded_once(dtype):
    hidden, weight = (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) for shape in ((6, 8), (7000, 8)))
    exact = (hidden.to(dtype).double() @ weight.to(dtype).double().T).sum(-1)
    leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight)]
    logits = lazy_linear(*leaves)
    assert ((logits.sum(-1).double() - exact).abs() <= 2**-7 * exact.abs() + 0.5).all()
    logits.float().sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert lazy_linear(leaves[0][:0], leaves[1]).sum() == 0


def test_columns_outside_of_the_vocabulary_are_an_error():
    *tensors, _ = problem()
    logits = lazy_linear(*tensors)
    for index in (torch.full((B, T, 1), -100), torch.full((B, T, 1), V)):
        with pytest.raises(ValueError, match="label"):
            logits.gather(-1, index)
    with pytest.raises(IndexError), pytest.warns(RuntimeWarning, match="needs the values"):
        logits.gather(5, torch.zeros(B, T, 1, dtype=torch.int64))


def test_views_without_tokens_or_hidden_size():
    _, weight, _, _ = problem()
    assert lazy_linear(torch.zeros(0, T, H).double(), weight).unbind() == ()
    one = lazy_linear(torch.ones(1, 1, 1).double(), weight[:, :1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(true_values(one.squeeze()), weight[:, 0])


def test_ddp_passes_them_on_without_their_values(one_process):
    """Where it looks for unused parameters, its output goes through a function of its own; also with static graphs."""

    outputs = (lambda z: z, lambda z: (None, z), lambda z: {"more": None, "logits": z})
    cases = ({"find_unused_parameters": True}, {"static_graph": True}, {})
    for options, wrap in itertools.product(cases, outputs):
        *_, labels = problem(torch.float32)
        results = []
        for lazily in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(H, H), nn.Linear(H, V))
            if lazily:
                model[1].__class__ = LazyLinear
            model.register_forward_hook(lambda *given, wrap=wrap: wrap(given[-1]))
            spread = nn.parallel.DistributedDataParallel(model, **options)
            with warnings.catch_warnings():
                if "static_graph" not in options and wrap is outputs[0]:
                    warnings.filterwarnings("error", message=".*needs the values")
                found = spread(problem(torch.float32)[0].detach())
                found = found["logits"] if isinstance(found, dict) else found[-1] if type(found) is tuple else found
                loss = chosen(found, labels)
                loss.backward()
            results.append([loss.detach(), *(p.grad for p in model.parameters())])
        torch.testing.assert_close(*results[::-1])
