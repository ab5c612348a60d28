"""Over random shapes, masks, dtypes, transforms, workspaces and strategies: always the plain computation's answer."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liger_losses import (
    EngineOptions,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LogitTransform,
    linear_statistics,
    linear_token_loss,
)
from tests.reference import NAMES, assert_as_exact_as_plain, double, plain_statistics, problem, relative_error, rounding

SETTINGS = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
transforms = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 0.5, 1.7]),
        "logit_scale": st.sampled_from([1.0, 0.25, 2.0]),
        "softcap": st.sampled_from([None, 2.0, 30.0]),
    }
)
problems = st.fixed_dictionaries(
    {
        "n": st.integers(1, 40),
        "h": st.integers(1, 33),
        "v": st.integers(2, 150),
        "dtype": st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
        "masked": st.sampled_from([0.0, 0.4, 1.0]),
        "bias": st.booleans(),
        "seed": st.integers(0, 1000),
        "scale": st.sampled_from([0.1, 1.0, 4.0]),
    }
)
frozen = st.sampled_from([(), ("hidden",), ("weight",), ("bias",), ("weight", "bias"), ("hidden", "weight")])


def grads(values, names, leaves):
    loss = sum((values[n] * (0.5 + i)).sum() for i, n in enumerate(names))
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    return torch.autograd.grad(loss, wanted, retain_graph=True) if wanted else ()


@SETTINGS
@given(
    given_problem=problems,
    transform=transforms,
    freeze=frozen,
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
    chunk_size=st.sampled_from([None, 1, 3, 16]),
    small=st.booleans(),
    compact=st.booleans(),
)
def test_every_strategy_gives_the_plain_answer(given_problem, transform, freeze, names, chunk_size, small, compact):
    hidden, weight, labels, bias = problem(**given_problem)
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None:
            tensor.requires_grad_(name not in freeze)
    leaves, exact_leaves = (hidden, weight, bias), double(hidden, weight, bias)
    plain = plain_statistics(hidden, weight, labels, bias, **transform)
    exact = plain_statistics(exact_leaves[0], exact_leaves[1], labels, exact_leaves[2], **transform)
    plain_grads, exact_grads = grads(plain, names, leaves), grads(exact, names, exact_leaves)

    scale = 4 * float(hidden.detach().double().norm() + weight.detach().double().norm())

    def check(values, what):
        for name in names:
            # Statistics near 0 (log-probs next to 1, entropies of one-hot rows) are judged on an absolute scale.
            ours, e = getattr(values, name).detach().double(), exact[name].detach()
            allowed = 2 * (plain[name].detach().double() - e).abs().max() + 1e-5 * (1 + e.abs().max())
            assert (ours - e).abs().max() <= allowed, f"{name} by {what}"
        for i, (a, p, e) in enumerate(
            zip(grads(values._asdict(), names, leaves), plain_grads, exact_grads, strict=True)
        ):
            floor = max(2 * rounding(given_problem["dtype"]), 1e-6)  # of few numbers, one error may be large by chance
            assert_as_exact_as_plain(a, p, e, f"gradient {i} by {what}", floor=floor, scale=scale)

    common = {"bias": bias, "transform": LogitTransform(**transform)}
    possible = [None, "two_pass"]
    trainable_head = weight.requires_grad or (bias is not None and bias.requires_grad)
    if chunk_size is None:
        possible.append("resident")
    if len(names) == 1 and not trainable_head and hidden.requires_grad:
        possible.append("frozen_head")
    # A bound that is tight, but that one row fits in.
    workspace = 60_000 if small and chunk_size is not None else None
    for strategy in possible:
        options = EngineOptions(chunk_size=chunk_size, compact=compact, workspace=workspace, strategy=strategy)
        check(linear_statistics(hidden, weight, labels, names, **common, options=options), strategy)

    def token_loss(s, y):
        return sum(getattr(s, n) * (0.5 + i) for i, n in enumerate(names))

    options = EngineOptions(chunk_size=chunk_size, compact=compact, workspace=workspace)
    loss, _ = linear_token_loss(hidden, weight, labels, token_loss, names, **common, options=options)
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    if wanted:
        ours = torch.autograd.grad(loss, wanted)
        for i, (a, p, e) in enumerate(zip(ours, plain_grads, exact_grads, strict=True)):
            floor = max(2 * rounding(given_problem["dtype"]), 1e-6)
            assert_as_exact_as_plain(a, p, e, f"gradient {i} of the token loss", floor=floor, scale=scale)


@SETTINGS
@given(given_problem=problems, smoothing=st.sampled_from([0.0, 0.1]), z=st.sampled_from([0.0, 1e-3]))
def test_cross_entropy_is_finite_and_scales(given_problem, smoothing, z):
    hidden, weight, labels, bias = problem(**given_problem)
    module = LigerFusedLinearCrossEntropyLoss(label_smoothing=smoothing, lse_square_scale=z)
    loss = module(weight, hidden, labels, bias)
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    double_grad = torch.autograd.grad(2 * loss, weight)[0]
    assert loss.isfinite()
    assert relative_error(double_grad, 2 * first) < 8 * torch.finfo(weight.dtype).eps


@SETTINGS
@given(
    pairs=st.integers(0, 4),
    chosen=st.integers(1, 9),
    rejected=st.integers(1, 9),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 100),
    chunk_size=st.sampled_from([None, 1]),
)
def test_pairs_of_any_lengths(pairs, chosen, rejected, masked, seed, chunk_size):
    w_hidden, weight, w_labels, _ = problem(shape=(pairs, chosen), masked=masked, seed=seed)
    l_hidden, _, l_labels, _ = problem(shape=(pairs, rejected), masked=masked, seed=seed + 1)
    module = LigerFusedLinearDPOLoss(use_ref_model=False, chunk_size=chunk_size)
    loss, _ = module(weight, (w_hidden, w_labels), (l_hidden, l_labels))
    logps = [plain_statistics(h, weight, y)["logp"].sum(-1) for h, y in ((w_hidden, w_labels), (l_hidden, l_labels))]
    exact = -torch.nn.functional.logsigmoid(0.1 * (logps[0] - logps[1])).sum() / max(pairs, 1)
    torch.testing.assert_close(loss, exact)
    inputs = (w_hidden, l_hidden, weight)
    torch.testing.assert_close(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(exact, inputs), rtol=1e-4, atol=1e-6
    )
