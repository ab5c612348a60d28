"""Several hidden states and heads in one call: as the sum of single calls, without their sum of gradients or memory."""

import pytest
import torch
from torch import nn

from liger_losses import functional, linear_logps, linear_token_loss
from liger_losses.chunked.core.inputs import shift_labels
from tests.losses import CE
from tests.reference import peak_bytes, problem

K, H, V, SHAPE = 3, 24, 131, (2, 11)
WEIGHTS = [1.0, 0.8, 0.64]
#: Of K targets, which hidden states and which head each has.
WIRINGS = {
    "one head": ([0, 1, 2], [0, 0, 0]),
    "own heads": ([0, 1, 2], [0, 1, 2]),
    "one hidden state": ([0, 0, 0], [0, 1, 2]),
    "two of one head": ([0, 1, 0], [0, 1, 0]),
}


def targets(wiring, dtype=torch.float32, bias=False):
    """Hidden states, heads and biases, all distinct ones; and those of each target."""
    made = [problem(0, H, V, dtype=dtype, shape=SHAPE, bias=bias, seed=seed) for seed in range(K)]
    states, heads = WIRINGS[wiring]
    hidden, weights, biases = ([m[i] for m in made] for i in (0, 1, 3))
    used = [hidden[i] for i in sorted({*states})], [weights[i] for i in sorted({*heads})]
    used_biases = [biases[i] for i in sorted({*heads})] if bias else []
    each = [hidden[i] for i in states], [weights[i] for i in heads], [biases[i] for i in heads]
    return [*used[0], *used[1], *used_biases], each, made[0][2]


OPTIONS = [
    {},
    {"ce_weight": True, "label_smoothing": 0.2, "lse_square_scale": 1e-2, "softcap": 3.0},
    {"use_token_scaling": True, "lse_square_scale": 1e-2, "token_weights": True},
    {"num_items_in_batch": True, "temperature": 0.5},
    dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), True)
    | {"lse_square_scale": 0.1},
]
#: What metrics of many heads, and the results of single ones, call what else they return.
OTHERS = {"z_losses": "z_loss", "token_accuracies": "token_accuracy", "predicted_tokens": "predicted_tokens"}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("wiring", list(WIRINGS))
def test_equals_the_sum_of_single_calls(wiring, options):
    leaves, each, labels = targets(wiring, torch.float64, bias="ce_weight" in options)
    g = torch.Generator().manual_seed(5)
    build, call = dict(options), {}
    if build.get("ce_weight"):
        build["ce_weight"] = torch.rand(V, generator=g, dtype=torch.float64) + 0.5
    if build.pop("token_weights", False):
        call["token_weights"] = [torch.rand(SHAPE, generator=g, dtype=torch.float64) for _ in range(K)]
    if build.pop("num_items_in_batch", False):
        call["num_items_in_batch"] = [7, 5, 3]
    several = CE(**build, shift=[1, 2, 3], head_weights=WEIGHTS, chunk_size=9)
    loss, metrics = several(each[1], each[0], labels, each[2], **call)
    parts = []
    for k, (hidden, weight, bias) in enumerate(zip(*each, strict=True)):
        single = CE(**build, shift=k + 1)
        parts.append(single(weight, hidden, labels, bias, **{name: values[k] for name, values in call.items()}))
    for name, single in OTHERS.items() if "return_z_loss" in options else ():
        torch.testing.assert_close(list(getattr(metrics, name)), [getattr(part, single) for part in parts])
    parts = [getattr(part, "loss", part) for part in parts]
    expected = sum(w * part for w, part in zip(WEIGHTS, parts, strict=True))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics.losses, torch.stack(parts).detach())
    assert not any(getattr(found, "requires_grad", False) for found in metrics)
    torch.testing.assert_close(torch.autograd.grad(loss * 0.5, leaves), torch.autograd.grad(expected * 0.5, leaves))


@pytest.mark.parametrize(("dtype", "reduction"), [(torch.float16, "mean"), (torch.float32, "none")])
def test_what_is_kept_until_backward_fits_one_workspace(dtype, reduction):
    """Where logits stay until backward, as losses of log-probabilities and fp16 have it."""
    n, h, v, count = 64, 16, 1000, 8
    hidden = [torch.randn(n, h, dtype=dtype, requires_grad=True) for _ in range(count)]
    heads = [torch.randn(v, h, dtype=dtype, requires_grad=True) for _ in range(count)]
    labels = [torch.randint(v, (n,)) for _ in range(count)]
    leaves = [*hidden, *heads]

    def gradients(losses):
        loss = losses[0] if reduction == "mean" else torch.stack(losses[0]).sum()
        return torch.autograd.grad(loss, leaves)

    one = n * v * 4 + 2**16  # the logits of one head
    loss_module = CE(reduction=reduction, workspace=3 * one)
    found = gradients(loss_module(heads, hidden, labels))
    outputs = sum(grad.nbytes for grad in found)
    assert peak_bytes(lambda: gradients(loss_module(heads, hidden, labels))) - outputs <= 3 * one
    plain_losses = [
        nn.functional.cross_entropy(a.float() @ w.float().T, y, reduction=reduction)
        for a, w, y in zip(hidden, heads, labels, strict=True)
    ]
    plain = gradients([sum(plain_losses) if reduction == "mean" else plain_losses])
    torch.testing.assert_close(found, plain, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("weights", [[1.0, 0.0, 0.5], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("what", ["hidden states", "weight"])
def test_a_head_of_weight_0_may_hold_anything(what, reduction, weights):
    """NaN and inf in a head that does not count reach neither the loss nor a gradient; its own loss says what it is."""
    leaves, (hidden, heads, _), labels = targets("own heads")
    broken = [h.detach() * (float("nan") if k == 1 and what == "hidden states" else 1) for k, h in enumerate(hidden)]
    if what == "weight":
        with torch.no_grad():
            heads[1].mul_(float("nan"))
    options = {"reduction": reduction, "label_smoothing": 0.1, "lse_square_scale": 0.1}
    out = CE(head_weights=weights, **options, return_predicted_tokens=True)
    loss, metrics = out(heads, broken, labels)
    singles = [CE(**options)(heads[k], hidden[k], labels) for k in range(K)]
    assert metrics.losses.isnan().tolist() == [False, True, False]
    for k in (0, 2):
        torch.testing.assert_close(metrics.losses[k], singles[k].detach().sum())
    kept = [weights[k] * singles[k] for k in (0, 2)]
    if reduction == "none":
        assert not loss[1].any()
        torch.testing.assert_close([loss[0], loss[2]], kept)
        loss, kept = torch.stack(loss), torch.stack(kept)
    else:
        kept = torch.stack(kept).sum()
        torch.testing.assert_close(loss, kept)
    trained = [leaf for leaf in leaves if any(leaf is head for head in heads)]
    assert len(trained) == K
    found = torch.autograd.grad(loss.sum(), trained)
    expected = torch.autograd.grad(kept.sum(), trained, allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


def test_heads_of_different_vocabularies():
    """A draft model with a vocabulary of its own."""
    (hidden, weight, labels, _), (draft, small, _, _) = problem(20, 8, 31), problem(20, 12, 9, seed=1)
    draft_labels = torch.where(labels < 9, labels, -100)
    loss, metrics = CE()([weight, small], [hidden, draft], [labels, draft_labels])
    single = CE()
    expected = single(weight, hidden, labels), single(small, draft, draft_labels)
    torch.testing.assert_close(metrics.losses, torch.stack(expected).detach())
    torch.testing.assert_close(loss, sum(expected))


@pytest.mark.parametrize("name", ["weight", "bias", "shift", "transform", "heads"])
def test_token_inputs_of_any_name(name):
    _, (hidden, weights, _), labels = targets("own heads")
    scale = torch.rand(SHAPE)
    loss, found = linear_token_loss(
        hidden, weights, labels, lambda values, labels, **given: -given[name] * values.logp, token_inputs={name: scale}
    )
    torch.testing.assert_close(loss, -sum((scale * values.logp).sum() for values in found))


def test_token_inputs_of_another_target():
    """Their sizes add up, but each must fit its own target."""
    hidden, weight, labels = [torch.randn(2, n, H) for n in (5, 7)], torch.randn(V, H), torch.zeros(2, 7).long()
    labels = [labels[:, :5], labels]

    def call(*given):
        return linear_token_loss(hidden, weight, labels, lambda values, _, u: u, token_inputs={"u": list(given)})

    for given in ([torch.ones(2, 7), torch.ones(2, 5)], [torch.ones(2, 5), torch.ones(())]):
        with pytest.raises(ValueError, match="u has shape .* there is one value for each label"):
            call(*given)
    with pytest.raises(TypeError, match="u must be a tensor, got NoneType"):
        call(torch.ones(2, 5), None)
    with pytest.raises(ValueError, match=r"1 of token_inputs\['u'\]"):
        call(torch.ones(2, 5))


def test_the_pure_function_of_lists():
    logps, lse = [-torch.rand(n) for n in (3, 5)], [torch.rand(n) for n in (3, 5)]
    scales = [torch.tensor(0.5), torch.tensor(2.0)]
    found = functional.cross_entropy(logps, lse=lse, lse_square_scale=0.1, ce_scale=scales)
    for k in range(2):
        single = functional.cross_entropy(logps[k], lse=lse[k], lse_square_scale=0.1, ce_scale=scales[k])
        assert all(torch.equal(a, b) for a, b in zip(found[k][:2], single[:2], strict=True))
    with pytest.raises(ValueError, match="2 of logps, 1 of lse"):
        functional.cross_entropy(logps, lse=lse[:1])


@pytest.mark.parametrize("positions", [0, 1, 4, 11, 20])
def test_labels_from_later_positions(positions):
    labels = torch.arange(22).view(SHAPE)
    shifted = shift_labels(labels, -100, positions)
    assert torch.equal(shifted[:, : 11 - positions], labels[:, positions:]) or positions > 11
    assert (shifted[:, max(11 - positions, 0) :] == -100).all()
    hidden, weight = torch.randn(*SHAPE, 8), torch.randn(22, 8)
    found = linear_logps(hidden, weight, labels, shift=positions)
    assert torch.equal(found, linear_logps(hidden, weight, shifted))
    found = CE(shift=positions)(weight, hidden, labels)
    torch.testing.assert_close(found, CE()(weight, hidden, shifted))
