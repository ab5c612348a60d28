"""Pending logits against the logits themselves: values, gradients, and what needs the values."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_losses import Head, linear_logps
from liger_losses.patching.pending import PendingLogits, pending_product

B, T, H, V = 3, 5, 8, 13


def pending(hidden_states, weight, bias=None):
    return pending_product(hidden_states, Head(weight, bias))


def problem(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*size, generator=g, dtype=torch.float64).to(dtype) for size in ((B, T, H), (V, H), (V,))]
    labels = torch.randint(V, (B, T), generator=g)
    labels[0, 2] = -100
    return *[t.requires_grad_() for t in tensors], labels


def assert_alike(loss_of, *leaves, **tolerance):
    """Losses and gradients of the logits of a layer, and of those that are pending."""
    results = []
    for linear in (F.linear, pending):
        loss = loss_of(linear(*leaves))
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*results[::-1], **tolerance)


def shifted(logits, labels):
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, V), labels[..., 1:].reshape(-1))


def chosen(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).sum()


def taught(logits):
    """A teacher's logits, which have no gradient."""
    return logits[:, torch.arange(T - 1, -1, -1)].detach() * 0.7


def taught_kl(logits, **options):
    return F.kl_div(logits.log_softmax(-1), taught(logits).softmax(-1), **options)


#: Some of them twice in a row.
SEVERAL = torch.tensor([[0, 3, 3, 12], [5, 4, 1, 5], [2, 7, 8, 9]])[torch.arange(B * T) % 3].view(B, T, 4)

#: What losses do with logits, none of which needs their values.
PENDING = {
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
    "along a dimension": lambda z, y: torch.take_along_dim(z.log_softmax(-1), y.clamp(min=0)[..., None], -1).sum(),
    "sums": lambda z, y: z.sum() + z.sum(-1).square().sum() + z[1].sum(dim=-1, keepdim=True).exp().sum() * 1e-3,
    "label smoothing": lambda z, y: (-z.log_softmax(-1)).sum(-1, keepdim=True).square().sum() + chosen(z, y),
    "logsumexp": lambda z, y: torch.logsumexp(z, dim=-1).square().sum() + z.logsumexp(-1, keepdim=True).sum(),
    "row by row": lambda z, y: sum(torch.logsumexp(row, dim=-1).square().sum() for row in z.unbind()),
    "scaled": lambda z, y: shifted(z * 0.3 / 1.7, y),
    "soft-capped": lambda z, y: shifted(torch.tanh(z / 3.0) * 3.0, y) + chosen(2.0 * (z * 0.5).tanh(), y),
    "largest": lambda z, y: (
        z.topk(3).values.square().sum()
        + z.log_softmax(-1).topk(4, dim=2)[0].exp().sum()
        + z.topk(2).indices.sum() * 1e-3
    ),
    "scaled by entry": lambda z, y: chosen(z * torch.linspace(0.5, 2.0, V).to(z.dtype), y),
    "biased": lambda z, y: chosen(z + torch.arange(V).to(z.dtype), y),
    "cast": lambda z, y: shifted(z.float().double().to(torch.float32).to("cpu"), y),
    "vocabulary sliced": lambda z, y: z[..., :7].logsumexp(-1).sum() + z[:, 2:4, 2:].logsumexp(-1).sum(),
    "tokens chosen": lambda z, y: F.cross_entropy(z[y != -100], y[y != -100]) + z[:, -2:].logsumexp(-1).sum(),
    "moved": lambda z, y: F.cross_entropy(z.transpose(0, 1).reshape(-1, V), y.t().reshape(-1)),
    "split": lambda z, y: sum(chosen(a, b) for a, b in zip(z.split(2), y.split(2), strict=True)),
    "indexed": lambda z, y: chosen(z[:, torch.tensor([3, 1])], y[:, [3, 1]]) + chosen(z[1], y[1]),
    "divergence": lambda z, y: taught_kl(z, reduction="none").sum(-1).square().sum(),
    "mean divergence": lambda z, y: nn.KLDivLoss(reduction="batchmean", log_target=True)(
        F.log_softmax(z.view(-1, V), -1), F.log_softmax(taught(z).view(-1, V), -1)
    ),
    "two products": lambda z, y: chosen(z + z, y) if not isinstance(z, PendingLogits) else chosen(z + z.clone(), y),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", PENDING)
def test_losses_never_need_the_values(name, bias):
    *leaves, labels = problem()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if name == "cast" else {"rtol": 1e-9, "atol": 1e-10}
    assert_alike(lambda z: PENDING[name](z, labels), *leaves[: 2 + bias], check_dtype=False, **tolerance)


#: What needs them.
EAGER = {
    "softmax": lambda z, y: z.softmax(-1).square().sum(),
    "in place": lambda z, y: z.mul_(2.0).exp().sum(),
    "set": lambda z, y: [z.__setitem__((..., 3), -5.0), z.logsumexp(-1).square().sum()][1],
    "cat": lambda z, y: torch.cat([z, z]).sin().sum(),
    "index_select": lambda z, y: chosen(z.index_select(1, torch.tensor([3, 1])), y[:, [3, 1]]),
    "one column": lambda z, y: z[..., 3].square().sum() + z.narrow(-1, 2, 5).logsumexp(-1).sum(),
    "largest": lambda z, y: z.topk(4).values.square().sum(),
    "smallest": lambda z, y: (-z.log_softmax(-1)).topk(2).values.sum() + z.topk(2, largest=False).values.sum(),
    "max": lambda z, y: z.max(-1).values.sum(),
    "several columns": lambda z, y: z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None].expand(-1, -1, 2)).sum(),
    "deprecated arguments": lambda z, y: (
        F.cross_entropy(z.view(-1, V), y.view(-1), size_average=False) + taught_kl(z, reduce=False).square().sum()
    ),
    "soft labels": lambda z, y: F.cross_entropy(z.view(-1, V), z.detach().view(-1, V).softmax(-1)),
    "classes in the middle": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "softmax of other dimensions": lambda z, y: z.log_softmax(1).sum() + z.logsumexp((0, 2)).sum(),
    "terms of a divergence": lambda z, y: (
        taught_kl(z, reduction="none").logsumexp(-1).sum() + taught_kl(z, reduction="none")[:, 1:].sum()
    ),
    "other divergences": lambda z, y: (
        F.kl_div(z.log_softmax(-1), (z * 0.5).log_softmax(-1), reduction="sum", log_target=True)
        + F.kl_div(-z.log_softmax(-1), taught(z).softmax(-1), reduction="sum")
        + F.kl_div(z.log_softmax(-1), taught(z), reduction="sum", log_target=True)
        + taught_kl(z, reduction="sum", log_target=True)
    ),
    "probabilities": lambda z, y: (
        (taught(z).softmax(-1).gather(-1, SEVERAL) * z.gather(-1, SEVERAL)).sum()
        + (z + taught(z).softmax(-1)).logsumexp(-1).sum()
    ),
    "scaled log-probabilities": lambda z, y: (z.log_softmax(-1) * 0.5).mean(-1).square().sum(),
    "some log-probabilities": lambda z, y: z.log_softmax(-1)[..., :4].mean(-1).square().sum(),
    "a sum with what was computed": lambda z, y: [z.clone(), z.mul_(2.0)][0].add(z).logsumexp(-1).sum(),
    "negative scale": lambda z, y: (z * -1.0).tanh().mul(-2.0).logsumexp(-1).sum(),
}
#: The same in other words, and at the ends of dimensions.
SPELLINGS = [
    lambda z, y: z[0, 1].logsumexp(-1),
    lambda z, y: z[0][2].log_softmax(-1).gather(-1, torch.tensor([3])).sum(),
    lambda z, y: z[1, -1].argmax(-1).to(z.dtype) + z[0, 0].mean(),
    lambda z, y: (z + torch.arange(V)).logsumexp(-1).sum(),
    lambda z, y: z.transpose(dim0=0, dim1=1).logsumexp(-1).sum() + z.unsqueeze(dim=0).logsumexp(-1).sum(),
    lambda z, y: torch.permute(z, dims=(1, 0, 2))[0].logsumexp(-1).sum() + torch.chunk(z, chunks=3)[1].sum(),
    lambda z, y: z.argmax(axis=-1).sum().to(z.dtype) + z.argmax(-1, keepdim=True).sum() + z.sum(),
    lambda z, y: z.mean((0, 1, 2), True).sum() + z.mean(None, True).sum(),
    lambda z, y: z.log_softmax(-1).to(torch.bfloat16).float().sum(),
    lambda z, y: z[:, 0, 1:4, ...].logsumexp(-1).sum() + z[..., 1:, 0, :5].sum() + z[0, ..., 1:3].logsumexp(-1).sum(),
    lambda z, y: z.gather(-1, torch.zeros(B, T, 0, dtype=torch.long)).sum() + z.logsumexp(-1).sum(),
    lambda z, y: z[..., :0].sum() + z.narrow(0, -2, 2).logsumexp(-1).sum(),
    lambda z, y: z.split([V - 1, 1], -1)[0].logsumexp(-1).sum() + z.unbind(-1)[1].sum(),
    lambda z, y: z[..., :3].split(3, -1)[0].logsumexp(-1).sum(),
]


@pytest.mark.filterwarnings("error")
def test_values_that_are_fewer_than_the_hidden_states_are_computed_in_silence():
    hidden, weight, *_ = problem()
    torch.testing.assert_close(pending(hidden, weight[:2]).sigmoid(), F.linear(hidden, weight[:2]).sigmoid())


@pytest.mark.filterwarnings("ignore:.*needs the values")
@pytest.mark.parametrize("loss", [*EAGER.values(), *SPELLINGS], ids=[*EAGER, *map(str, range(len(SPELLINGS)))])
def test_what_needs_the_values_gets_them(loss):
    *leaves, labels = problem()
    assert_alike(lambda z: loss(z, labels), *leaves, rtol=1e-9, atol=1e-10)


def test_values_are_computed_once():
    hidden, weight, bias, _ = problem()
    logits = pending(hidden, weight, bias)
    assert logits.values() is logits.values()
    assert torch.equal(logits.values(), F.linear(hidden, weight, bias))
    assert logits.exp().equal(logits.values().exp())


def test_the_head_is_that_of_the_engine():
    """Scale, soft-cap, bias and slices of the vocabulary are in it, and the values are still the model's own."""
    hidden, weight, bias, labels = problem()
    logits = 3.0 * torch.tanh(pending(hidden, weight, bias)[..., :7] * 0.5 / 3.0)
    assert (logits.head.transform.logit_scale, logits.head.transform.softcap) == (pytest.approx(0.5), 3.0)
    labels = labels.clamp(0, 6)
    expected = logits.values().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(linear_logps(hidden, logits.head, labels), expected)


def test_it_looks_like_logits():
    hidden, weight, bias, _ = problem(torch.bfloat16)
    logits = pending(hidden, weight, bias)
    assert (logits.shape, logits.dtype, logits.device) == ((B, T, V), torch.bfloat16, hidden.device)
    assert (logits.dim(), logits.ndim, logits.size(-1), logits.numel()) == (3, 3, V, B * T * V)
    assert logits.requires_grad
    assert not logits.detach().requires_grad
    assert repr(logits) == f"PendingLogits(shape=({B}, {T}, {V}), dtype=torch.bfloat16, device=cpu)"
    assert torch.equal(logits.argmax(-1), F.linear(hidden, weight, bias).argmax(-1))
    wide = logits.detach().float().softmax(-1)
    assert F.kl_div(logits.log_softmax(-1), wide, reduction="sum").dtype == torch.float32
    with pytest.raises(AttributeError, match="PendingLogits has no attribute 'softmx'"):
        _ = logits.softmx


def test_argmax_is_that_of_the_models_rounded_logits():
    """Of largest logits that are equal in bf16, and not in fp32, it is the first."""
    hidden, weight = torch.ones(1, 2, 2).bfloat16(), torch.tensor([[0.0, 0.0], [256, 0.5], [256, 0.75]]).bfloat16()
    logits = F.linear(hidden, weight)
    assert logits[0, 0, 1] == logits[0, 0, 2]
    assert torch.equal(pending(hidden, weight).argmax(-1), logits.argmax(-1))


def test_autocast_is_the_heads():
    """Logits that outlive the autocast they were made under are of its dtype all the same."""
    hidden, weight, bias, labels = problem(torch.float32)
    results = []
    for linear in (F.linear, pending):
        with torch.autocast("cpu", torch.bfloat16):
            logits = linear(hidden, weight, bias)
        assert logits.dtype == torch.bfloat16
        loss = F.cross_entropy(logits.float().view(-1, V), labels.view(-1))
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight, bias))))
    torch.testing.assert_close(*results[::-1], rtol=3e-2, atol=3e-2)
    with torch.autocast("cpu", torch.bfloat16):
        expected, of_half = F.linear(hidden, weight, bias), pending(hidden.bfloat16(), weight, bias)
    for of in (lambda z: F.cross_entropy(z.view(-1, V), labels.view(-1)), lambda z: chosen(z, labels)):
        torch.testing.assert_close(of(of_half), of(expected), rtol=3e-2, atol=3e-2)  # of two dtypes, an error without
    torch.testing.assert_close(logits.values(), expected, rtol=0, atol=0)
    outside = pending(hidden, weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        values = outside.values()
        other = pending(hidden, weight, bias).detach().softmax(-1)
    with pytest.warns(RuntimeWarning, match="kl_div"):  # products of two dtypes
        F.kl_div(pending(hidden, weight, bias).log_softmax(-1), other, reduction="sum")
    torch.testing.assert_close(values, F.linear(hidden, weight, bias))


@pytest.mark.parametrize("old", [lambda make, z: make(), lambda make, z: z / 0.7], ids=["product", "scale"])
def test_made_without_gradients_it_has_none(old):
    """Though their loss is computed where gradients are enabled, as of a teacher's."""
    *leaves, labels = problem()
    results = []
    for linear in (F.linear, pending):
        logits = linear(*leaves)
        with torch.no_grad():
            before = old(lambda linear=linear: linear(*[2 * leaf for leaf in leaves]), logits)
        loss = (chosen(logits, labels) - chosen(before, labels)).square()
        results.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(*results[::-1])
    assert not before.requires_grad


IN_VIEWS = {
    "a view": lambda z: z[:, -1].mul_(2.0),
    "the scale of a view": lambda z: operator.itruediv(z[:, :-1], 0.7),
    "what has a view": lambda z: operator.setitem(z, (..., slice(2)), -1e4),
    "what has a view, computed": lambda z: (z.softmax(-1), z.mul_(2.0)),
}


@pytest.mark.filterwarnings("ignore:.*needs the values")
@pytest.mark.parametrize("name", IN_VIEWS)
def test_in_place_changes_that_views_would_have_to_see_are_refused(name):
    logits = pending(*problem()[:3])
    _view = logits.view(-1, V) if "has a view" in name else None
    with pytest.raises(RuntimeError, match=r"changes logits in place that have views.*logits = logits / temperature"):
        IN_VIEWS[name](logits)


def temper(z, scale=0.3):
    z.argmax(-1)
    z *= scale


IN_PLACE = {
    "scale": temper,
    "a cast that changes nothing": lambda z: temper(z.double()),
    "bias": lambda z: operator.iadd(z, torch.arange(V).to(z.dtype)),
    "another dtype": lambda z: operator.iadd(z, torch.arange(V)),
    "difference": lambda z: operator.isub(z, 1.0),
    "tensor": lambda z: temper(z, torch.arange(V)),
    "power": lambda z: (temper(z), operator.ipow(z, 2)),
    "without gradients": torch.no_grad()(lambda z: operator.itruediv(z, 2.0)),
}


@pytest.mark.filterwarnings("ignore:.*needs the values")
@pytest.mark.parametrize("name", IN_PLACE)
def test_the_caller_sees_changes_in_place(name):
    assert_alike(lambda z: [IN_PLACE[name](z), z.logsumexp(-1).sum()][1], *problem()[:3])


@pytest.mark.filterwarnings("ignore:.*needs the values")
def test_values_that_were_read_without_gradients_have_them():
    *leaves, labels = problem()
    logits = pending(*leaves)
    with torch.no_grad():
        assert not logits.softmax(-1).requires_grad
    torch.autograd.grad(chosen(logits, labels), leaves)


def test_columns_outside_of_the_vocabulary_are_an_error():
    logits = pending(*problem()[:3])
    for index in (torch.full((B, T, 1), -100), torch.full((B, T, 1), V)):
        with pytest.raises(ValueError, match="label"):
            logits.gather(-1, index)


def test_a_weight_that_was_freed():
    hidden, weight, bias, _ = problem()
    logits = pending(hidden, weight, bias)
    weight.untyped_storage().resize_(0)
    for read in (lambda: logits.values(), lambda: logits.logsumexp(-1)):
        with pytest.raises(RuntimeError, match=r"last layer was freed.*fully_shard"):
            read()
