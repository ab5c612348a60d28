"""Cross-entropy against torch.nn.functional in float64, option by option."""

import pytest
import torch
import torch.nn.functional as F

from liger_losses import CrossEntropyOutput
from liger_losses.chunked.core import stream
from tests.losses import CE
from tests.reference import assert_as_exact_as_plain, double, plain_logits, plain_statistics, problem

OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"lse_square_scale": 1e-2},
    {"softcap": 3.0},
    {"ce_weight": True},
    {"ce_weight": True, "label_smoothing": 0.2, "lse_square_scale": 1e-2, "softcap": 3.0, "accum_dtype": torch.float32},
    {"use_token_scaling": True, "lse_square_scale": 1e-2},
    {"token_weights": True},
    {"token_weights": True, "ce_weight": True, "label_smoothing": 0.1},
    {"num_items_in_batch": 7},
    {"temperature": 0.5, "logit_scale": 2.0},
]


def split_options(options, v, n, dtype):
    """Constructor and call keywords, with the tensors made."""
    g = torch.Generator().manual_seed(9)
    build = {k: x for k, x in options.items() if k not in ("token_weights", "num_items_in_batch")}
    call = {k: x for k, x in options.items() if k in ("token_weights", "num_items_in_batch")}
    if build.get("ce_weight"):
        build["ce_weight"] = torch.rand(v, generator=g, dtype=torch.float64).to(dtype) + 0.5
    if call.get("token_weights"):
        call["token_weights"] = torch.rand(n, generator=g, dtype=torch.float64).to(dtype)
    return build, call


def plain_cross_entropy(hidden, weight, labels, bias, build, call, reduction="mean"):
    """The definition, from all logits."""
    transform = {k: build[k] for k in ("temperature", "logit_scale", "softcap") if k in build}
    logits = plain_logits(hidden, weight, bias, **transform)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    mask = labels != -100
    safe = labels.masked_fill(~mask, 0)
    c = build.get("ce_weight")
    c = c.to(logits.dtype) if c is not None else None
    ce = F.cross_entropy(logits, labels, weight=c, label_smoothing=build.get("label_smoothing", 0.0), reduction="none")
    z = build.get("lse_square_scale", 0.0) * logits.logsumexp(-1).square()
    if build.get("use_token_scaling"):
        p = logits.detach().softmax(-1).gather(-1, safe[:, None])[:, 0]
        ce, z = ce * p, z * p
    w = call.get("token_weights", torch.ones_like(ce)).to(ce.dtype) * mask
    if reduction == "none":
        return w * (ce + z)
    total_ce = (w * (c[safe] if c is not None else 1)).sum()
    total_z = w.sum()
    if "num_items_in_batch" in call:
        total_ce = total_z = call["num_items_in_batch"]
    if reduction == "sum":
        total_ce = total_z = 1.0
    return (w * ce).sum() / total_ce + (w * z).sum() / total_z


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_the_definition(dtype, options, bias, reduction, monkeypatch):
    """In blocks of active tokens, and of all tokens, for which the device is never asked how many are active."""
    if "num_items_in_batch" in options and reduction != "mean":
        pytest.skip("num_items_in_batch is the divisor of 'mean'")
    inputs = problem(37, 24, 131, dtype=dtype, bias=bias)
    hidden, weight, labels, b = inputs
    build, call = split_options(options, 131, 37, dtype)
    exact_in = double(hidden, weight, b)
    wide = [{k: x.double() if isinstance(x, torch.Tensor) else x for k, x in d.items()} for d in (build, call)]
    exact = plain_cross_entropy(exact_in[0], exact_in[1], labels, exact_in[2], *wide, reduction)
    plain = plain_cross_entropy(hidden, weight, labels, b, build, call, reduction)
    g = torch.linspace(0.5, 1.5, exact.numel()).view(exact.shape)
    leaves = [t for t in (hidden, weight, b) if t is not None]
    exact_leaves = [t for t in exact_in if t is not None]
    plain_grads = torch.autograd.grad((plain * g).sum(), leaves)
    exact_grads = torch.autograd.grad((exact * g.double()).sum(), exact_leaves)
    with torch.no_grad():
        hidden[labels == -100] = float("nan")
    # fp64: the denominators are sums of fp32 ones, weights in fp64
    floor = 1e-12 if dtype == torch.float64 else None
    for compact in (True, False):
        loss_module = CE(**build, reduction=reduction, compact=compact, chunk_size=11 if compact else None)
        with monkeypatch.context() as patched:
            if not compact:
                patched.setattr(stream, "label_facts", None)
            ours = loss_module(weight, hidden, labels, b, **call)
        assert ours.dtype == torch.promote_types(dtype, torch.float32)
        assert ours.shape == (labels.shape if reduction == "none" else ())
        assert_as_exact_as_plain(ours, plain, exact, "loss", floor=floor)
        grads = torch.autograd.grad((ours * g).sum(), leaves)
        for a, p, e in zip(grads, plain_grads, exact_grads, strict=True):
            assert_as_exact_as_plain(a, p, e, "gradient", floor=floor)


def test_what_else_it_returns():
    hidden, weight, labels, _ = problem(20, 8, 5)
    labels[0] = -100
    for reduction in ("mean", "none"):
        out = CE(
            lse_square_scale=0.1,
            reduction=reduction,
            return_z_loss=True,
            return_token_accuracy=True,
            return_predicted_tokens=True,
        )(weight, hidden, labels)
        assert isinstance(out, CrossEntropyOutput)
        logits, mask = hidden @ weight.t(), labels != -100
        correct = (logits.argmax(-1) == labels)[mask].float()
        z = 0.1 * logits.logsumexp(-1).square()
        predicted = torch.where(mask, logits.argmax(-1), -1)
        assert torch.equal(out.predicted_tokens, predicted)
        if reduction == "mean":
            torch.testing.assert_close(out.z_loss, z[mask].mean().detach())
            torch.testing.assert_close(out.token_accuracy, correct.mean())
        else:
            torch.testing.assert_close(out.z_loss, (z * mask).detach())
            torch.testing.assert_close(out.token_accuracy[mask], correct)
        assert not out.z_loss.requires_grad


def test_return_z_loss_without_a_z_loss_is_zero():
    hidden, weight, labels, _ = problem()
    assert CE(return_z_loss=True)(weight, hidden, labels).z_loss == 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_fully_masked_batch_has_loss_and_gradient_zero(reduction):
    hidden, weight, labels, _ = problem()
    labels[:] = -100
    module = CE(reduction=reduction, label_smoothing=0.1, ce_weight=torch.rand(61), return_token_accuracy=True)
    loss = module(weight, hidden, labels).loss.sum()
    loss.backward()
    assert loss == 0
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


def test_other_ignore_index_and_batched_shapes_and_shift():
    hidden, weight, labels, _ = problem(shape=(3, 8), masked=0.0)
    labels[:, :4] = 7
    ours = CE(ignore_index=7, shift=True)(weight, hidden, labels)
    logits = (hidden @ weight.t())[:, :-1].reshape(-1, 61)
    torch.testing.assert_close(ours, F.cross_entropy(logits, labels[:, 1:].reshape(-1), ignore_index=7))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_shift_moves_token_weights_with_their_labels(reduction):
    hidden, weight, labels, _ = problem(shape=(3, 8))
    token_weights = torch.arange(1.0, 25.0).view(3, 8)
    loss = CE(reduction=reduction, ignore_index=-100)(
        weight, hidden[:, :-1], labels[:, 1:], token_weights=token_weights[:, 1:]
    )
    ours = CE(reduction=reduction, shift=True)(weight, hidden, labels, token_weights=token_weights)
    torch.testing.assert_close(ours if reduction != "none" else ours[:, :-1], loss)


def test_ce_weight_moves_with_the_module_and_is_not_saved():
    module = CE(ce_weight=torch.ones(3)).to(torch.float64)
    assert module.ce_weight.dtype == torch.float64
    assert module.state_dict() == {}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_token_weights_are_constants(dtype, reduction):
    hidden, weight, labels, _ = problem(dtype=dtype)
    weights = torch.rand(13, requires_grad=True)
    loss = CE(reduction=reduction)(weight, hidden, labels, token_weights=weights)
    loss.sum().backward()
    assert weights.grad is None


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("dtype", "of_weights"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_token_weights_of_another_dtype(dtype, of_weights, heads):
    hidden, weight, labels, _ = problem(dtype=dtype)
    weights = torch.rand(13, dtype=torch.float64).to(of_weights)
    given = hidden if heads == 1 else [hidden] * heads
    loss = CE()(weight, given, labels, token_weights=weights, num_items_in_batch=7)
    loss = loss if heads == 1 else loss[0]
    exact_inputs = double(hidden, weight)
    exact = -heads * (weights * plain_statistics(*exact_inputs, labels)["logp"]).sum() / 7
    assert loss.dtype == dtype
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
    torch.testing.assert_close(loss, exact.to(dtype), **tolerance)
    pairs = zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(exact, exact_inputs), strict=True)
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected.to(dtype), **tolerance)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("weighted", ["tokens", "classes", "both"])
def test_what_fp64_calls_divide_by_is_fp64(weighted, heads):
    hidden, weight, labels, _ = problem(3000, 8, 50, dtype=torch.float64)
    weights = torch.rand(3000) if weighted != "classes" else None
    classes = torch.rand(50) if weighted != "tokens" else None
    given = hidden if heads == 1 else [hidden] * heads
    loss = CE(classes, lse_square_scale=0.1)(weight, given, labels, token_weights=weights)
    call = {} if weights is None else {"token_weights": weights.double()}
    build = {"lse_square_scale": 0.1} | ({} if classes is None else {"ce_weight": classes.double()})
    exact = heads * plain_cross_entropy(hidden, weight, labels, None, build, call, "mean")
    torch.testing.assert_close(loss if heads == 1 else loss[0], exact, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("compact", [True, False])
def test_no_items_in_the_batch(compact):
    hidden, weight, labels, _ = problem()
    labels[:] = -100
    loss = CE(compact=compact)(weight, hidden, labels, num_items_in_batch=0)
    loss.backward()
    assert loss == 0
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()
