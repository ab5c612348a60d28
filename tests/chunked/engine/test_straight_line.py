"""Calls of few tokens that go from their arguments to the launches: as exact as others, and taken where they can be."""

import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_losses import Completions, Head, LogitTransform, linear_logps, set_default_workspace
from liger_losses.chunked.engine import decision, plan, straight_line
from liger_losses.chunked.losses.cross_entropy_terms import linear_cross_entropy
from liger_losses.kernels._triton import INTERPRETED, Launcher
from liger_losses.kernels.exponential_rows import ExponentialRows
from tests.kernels.cases import triton_or_skip
from tests.losses import CE, DPO, GRPO
from tests.reference import assert_as_exact_as_plain, small_calls

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, HIDDEN, VOCAB = (2, 3), 16, 128


@pytest.fixture(autouse=True)
def no_lines():
    triton_or_skip()
    straight_line._lines.clear()
    with small_calls():
        yield


def problem(dtype, masked=(2, 3)):
    g = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(*n, HIDDEN, generator=g, dtype=torch.float64) for n in (TOKENS, (VOCAB,)))
    labels = torch.randint(VOCAB, TOKENS, generator=g)
    labels.view(-1)[list(masked)] = -100
    return *[t.to(DEVICE, dtype).requires_grad_() for t in (hidden, weight)], labels.to(DEVICE)


def lines():
    """How many kinds of calls there were, and how many of them have a line."""
    return len(straight_line._lines), len(made())


def made():
    """The lines."""
    return [line for line in straight_line._lines.values() if isinstance(line, straight_line.StraightLine)]


def exact(hidden, weight, labels, transform):
    h, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logits = h.where(labels[..., None] != -100, 0.0) @ w.t()
    logits = transform.softcap * torch.tanh(logits / transform.softcap) if transform.softcap else logits
    return h, w, logits.log_softmax(-1)


LOSSES = {
    "mean": ({}, LogitTransform()),
    "sum": ({"reduction": "sum", "label_smoothing": 0.1, "softcap": 3.0}, LogitTransform(softcap=3.0)),
}
SIZES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropy(name, dtype):
    options, transform = LOSSES[name]
    hidden, weight, labels = problem(dtype)
    h, w, log_p = exact(hidden, weight, labels, transform)
    smoothing, active = options.get("label_smoothing", 0.0), labels != -100
    at_labels = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    expected = -((1 - smoothing) * at_labels + smoothing * log_p.mean(-1))[active].sum()
    expected = expected if name == "sum" else expected / active.sum()
    (3 * expected).backward()
    with torch.no_grad():
        hidden[labels == -100] = float("nan")
    loss, found = CE(backend="triton", **options), []
    for _ in range(2):
        value = loss(weight, hidden, labels)
        gradients = torch.autograd.grad(3 * value, (hidden, weight), retain_graph=True)
        again = torch.autograd.grad(3 * value, (hidden, weight))
        found.append((value, *gradients, *again))
    assert lines() == (1, 1)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with torch.no_grad():
        alone = loss(weight, hidden, labels)
        empty = loss(weight, hidden, labels.fill_(-100))
    assert torch.equal(alone, found[0][0])
    assert (lines(), float(empty)) == ((2, 2), 0.0)
    for ours, theirs in zip(found[0], (expected, h.grad, w.grad, h.grad, w.grad), strict=True):
        size = SIZES[dtype] * theirs.detach().abs().max().item()
        torch.testing.assert_close(ours.double(), theirs, rtol=SIZES[dtype], atol=size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", [(), ("entropy", "lse")])
def test_statistics(names, dtype):
    hidden, weight, labels = problem(dtype)
    h, w, log_p = exact(hidden, weight, labels, LogitTransform(softcap=5.0))
    active = labels != -100
    expected = {
        "logp": log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "lse": (5.0 * torch.tanh(h @ w.t() / 5.0)).logsumexp(-1),
    }
    upstream = torch.randn(3, *TOKENS, dtype=torch.float64, device=DEVICE)
    wanted = [expected[name].where(active, 0.0) for name in ("logp", *names)]
    sum((value * g).sum() for value, g in zip(wanted, upstream, strict=False)).backward()
    with torch.no_grad():
        hidden[~active] = float("nan")
    options = {"backend": "triton", "softcap": 5.0, **dict.fromkeys(names, True)}
    found = linear_logps(hidden, weight, labels, **options)
    values = [getattr(found, name) for name in ("logp", *names)] if names else [found]
    with torch.no_grad():
        alone = linear_logps(hidden, weight, labels, **options)
        alone = [getattr(alone, name) for name in ("logp", *names)] if names else [alone]
    assert lines() == (2, 2)
    for value, same, theirs in zip(values, alone, wanted, strict=True):
        assert torch.equal(value, same)
        torch.testing.assert_close(value.double(), theirs, rtol=SIZES[dtype], atol=SIZES[dtype])
    with torch.no_grad():
        _ = [value.zero_() for value in values]  # what backward needs is kept elsewhere
    for _ in range(2):  # the second time, the projections are computed again
        gradients = [upstream[i].float() for i in range(len(values))]
        ours = torch.autograd.grad(values, (hidden, weight), gradients, retain_graph=True)
        for own, theirs in zip(ours, (h.grad, w.grad), strict=True):
            size = SIZES[dtype] * theirs.detach().abs().max().item()
            torch.testing.assert_close(own.double(), theirs, rtol=SIZES[dtype], atol=size)


def dpo(hidden, weight, labels, backend, **options):
    """Chosen and rejected completions of different lengths."""
    sides = [Completions(h, y, ref_logps=y.new_full((1,), -9.0).to(h)) for h, y in zip(hidden, labels, strict=True)]
    return DPO(backend=backend, **options)(weight, *sides)


def dpo_with_likelihood(*given):
    return dpo(*given, compute_nll_loss=True)


def dpo_with_references(hidden, weight, labels, backend):
    """Of one side by token, of the other by completion."""
    refs = [torch.full(labels[0].shape, -5.0, device=DEVICE), torch.full((1,), -7.0, device=DEVICE)]
    refs[0][labels[0] == -100] = float("nan")
    sides = [Completions(h, y, ref_logps=ref) for h, y, ref in zip(hidden, labels, refs, strict=True)]
    return DPO(backend=backend)(weight, *sides)


def dpo_with_a_reference_model(hidden, weight, labels, backend):
    states = [h.detach().flip(-1).nan_to_num() for h in hidden]
    sides = [Completions(h, y, ref_hidden_states=r) for h, y, r in zip(hidden, labels, states, strict=True)]
    return DPO(backend=backend)(weight, *sides, ref_weight=weight.detach())


def stacked_dpo(hidden, weight, labels, backend):
    hidden, labels = torch.cat([part[:, :2] for part in hidden]), torch.cat([part[:, :2] for part in labels])
    reference = {f"ref_{side}_logps": torch.full((1,), -7.0, device=DEVICE) for side in ("chosen", "rejected")}
    return DPO(backend=backend)(weight, hidden, labels, **reference)


def grpo_with_a_reference_model(hidden, weight, labels, backend):
    hidden, labels = torch.cat([part[:, :2] for part in hidden]), torch.cat([part[:, :2] for part in labels])
    loss, active = GRPO(beta=0.1, backend=backend), labels != -100
    rest = {"ref_input": hidden.detach().flip(-1).nan_to_num(), "ref_weight": weight.detach()}
    advantages = torch.tensor([[1.0], [-0.5]], device=DEVICE)
    rest["num_items_in_batch"] = 7
    return loss(hidden, weight, labels.where(active, 0), active.long(), advantages, **rest)


def grpo_with_entropy(*given):
    return grpo(*given, entropy_coef=0.01)


def grpo(hidden, weight, labels, backend, **options):
    hidden, labels = torch.cat([part[:, :2] for part in hidden]), torch.cat([part[:, :2] for part in labels])
    loss = GRPO(beta=0.1, backend=backend, **options)
    old, advantages = torch.full(labels.shape, -4.9, device=DEVICE), torch.tensor([1.0, -0.5], device=DEVICE)
    active = labels != -100
    rest = {"ref_per_token_logps": old - 0.1, "old_per_token_logps": old.where(active, float("nan"))}
    return loss(hidden, weight, labels.where(active, 0), active, advantages, **rest)


#: What one launch computes.
AT_ONCE = [dpo, dpo_with_references, dpo_with_a_reference_model, stacked_dpo, grpo, grpo_with_a_reference_model]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e30), (torch.bfloat16, 1e30), (torch.bfloat16, 0.0)])
@pytest.mark.parametrize("loss", [*AT_ONCE, dpo_with_likelihood, grpo_with_entropy])
def test_losses_of_completions(loss, dtype, limit, monkeypatch, small_tiles):
    monkeypatch.setattr(straight_line, "MIN_EXPONENTIALS", limit)
    hidden, weight, labels = problem(dtype, masked=(1, 5))
    sides = [hidden.detach()[:1], hidden.detach()[1:, :2]]
    leaves = [part.clone().requires_grad_() for part in sides]
    exact = [tensor.detach().double().requires_grad_() for tensor in (*leaves, weight)]
    labels, found = [labels[:1], labels[1:, :2]], []
    expected, metrics = loss(exact[:2], exact[2], labels, "torch")
    gradients = torch.autograd.grad(3 * expected, exact)
    with torch.no_grad():
        leaves[0][labels[0] == -100] = float("nan")
    for _ in range(2):
        value, own = loss(leaves, weight, labels, "triton")
        first = torch.autograd.grad(3 * value, (*leaves, weight), retain_graph=True)
        found.append((value, *own, *first, *torch.autograd.grad(3 * value, (*leaves, weight))))
    assert lines()[1] == 1 + (loss in (dpo_with_a_reference_model, grpo_with_a_reference_model))
    at_once = any(line.coupled is not None for line in made())
    assert at_once == (loss in AT_ONCE)
    rows = [type(line.rows) for line in made()]
    assert (ExponentialRows in rows) == (limit == 0 and loss is not grpo_with_entropy)
    with torch.no_grad():
        alone = loss(leaves, weight, labels, "triton")[0]
    assert torch.equal(alone, found[0][0]) or (limit == 0 and torch.allclose(alone, found[0][0], rtol=1e-5))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for ours, theirs in zip(found[0], (expected, *metrics, *gradients, *gradients), strict=True):
        size = SIZES[dtype] * theirs.detach().abs().max().item()
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=SIZES[dtype], atol=size)


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations, but for those that launch nothing on a GPU."""

    FREE = ("view", "t", "detach", "slice", "narrow", "unbind", "empty", "empty_like", "new_empty")

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in (*self.FREE, "_local_scalar_dense"):  # a CPU reads whether labels are right
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


#: What a call launches, forward and backward, which is most of what it takes the host.
LAUNCHES = {
    "cross-entropy": (["_loss_kernel", "_scale_kernel"], {"mm": 3, "sum": 1, "ones_like": 1}),
    "DPO": (
        ["row_statistics_kernel", "_pairs_kernel", "_gradient_kernel", "_scale_kernel"],
        {"mm": 3, "cat": 2, "ones_like": 1},
    ),
    "GRPO": (
        ["row_statistics_kernel", "_policy_kernel", "_gradient_kernel", "_scale_kernel"],
        {"mm": 3, "where": 1, "ones_like": 1},
    ),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_call_that_was_made_before(name, monkeypatch):
    hidden, weight, labels = problem(torch.float32)
    states = [hidden[:1].detach().requires_grad_(), hidden[1:].detach().requires_grad_()]
    ref, ids, mask = torch.zeros(1, device=DEVICE), labels.clamp(min=0), labels >= 0
    sides = [Completions(h, y, ref_logps=ref) for h, y in zip(states, labels.split(1), strict=True)]
    losses = CE, DPO, GRPO
    of_tokens, of_pairs, of_group = (loss(backend="triton") for loss in losses)
    of_group.beta = 0.0
    advantages = torch.tensor([1.0, -1.0], device=DEVICE)
    calls = {
        "cross-entropy": lambda: of_tokens(weight, hidden, labels),
        "DPO": lambda: of_pairs(weight, *sides)[0],
        "GRPO": lambda: of_group(hidden, weight, ids, mask, advantages)[0],
    }
    leaves = [weight, *(states if name == "DPO" else [hidden])]
    torch.autograd.grad(calls[name](), leaves)
    launched, (kernels, operations) = [], LAUNCHES[name]
    monkeypatch.setattr(Launcher, "__call__", lambda self, *given, **named: launched.append(self.kernel.fn.__name__))
    with Operations() as seen:
        torch.autograd.grad(calls[name](), leaves)
    assert launched == kernels
    assert seen.found == operations


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_has_no_gradient(frozen):
    given = problem(torch.float32)
    given[frozen].requires_grad_(False)
    CE(backend="triton")(given[1], given[0], given[2]).backward()
    linear_logps(*given, backend="triton").sum().backward()
    assert lines()[1] == 2 - frozen  # a gradient per token, [T, H], takes less memory
    assert given[frozen].grad is None
    assert given[1 - frozen].grad is not None


@pytest.mark.parametrize("loss", [dpo, grpo])
def test_gradients_of_fp16_wait_for_the_loss_scale(loss):
    hidden, weight, labels = problem(torch.float16)
    sides, of_sides = [part.detach().requires_grad_() for part in hidden.split(1)], list(labels.split(1))
    loss(sides, weight, of_sides, "triton")[0].backward()
    assert not any(line.coupled for line in made())


@pytest.mark.parametrize("loss", [dpo, grpo])
def test_coupled_losses_of_a_frozen_head(loss):
    hidden, weight, labels = problem(torch.float32)
    sides, of_sides = [part.detach().requires_grad_() for part in hidden.split(1)], list(labels.split(1))
    expected = torch.autograd.grad(loss(sides, weight, of_sides, "triton")[0], sides)
    found = torch.autograd.grad(loss(sides, weight.detach(), of_sides, "triton")[0], sides)
    assert lines() == (2, 2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_patched_models_cross_entropy():
    hidden, weight, labels = problem(torch.float32)
    loss = linear_cross_entropy(hidden.flatten(0, 1), Head(weight), labels.flatten())
    expected = torch.nn.functional.cross_entropy((hidden @ weight.t()).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("fused", [True, False])
def test_labels_outside_of_the_vocabulary(fused, monkeypatch):
    """``fused``: without gradients, statistics come from a kernel that merges sums over tiles."""
    monkeypatch.setattr(straight_line, "MIN_FUSED", 0.0)
    hidden, weight, labels = problem(torch.bfloat16 if fused else torch.float32)
    if DEVICE == "cuda":
        pytest.skip("an assertion on the device, which the next test sees")
    labels[1, 1], message = VOCAB, r"labels must be in \[0, 128\).*to 128"
    for _ in range(2):
        with pytest.raises(ValueError, match=message), torch.set_grad_enabled(not fused):
            linear_logps(hidden, weight, labels, backend="triton")
        with pytest.raises(ValueError, match=message):
            CE(backend="triton")(weight, hidden, labels)
    labels[1, 1] = 0
    with torch.set_grad_enabled(not fused):
        linear_logps(hidden, weight, labels, backend="triton")
    assert fused == any(line.fused is not None for line in made())


#: Calls of each kernel that reads labels first, of which one is outside of the vocabulary.
WRONG = """
import torch
from liger_losses import LigerFusedLinearCrossEntropyLoss, linear_logps
from liger_losses.chunked.engine import straight_line
hidden, weight = (torch.zeros(n, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (16, 256))
labels = torch.full((16,), 256, device="cuda")
straight_line.MIN_{} = 0.0
with torch.set_grad_enabled({}):
    {}
torch.cuda.synchronize()
"""


OF_TOKENS = "linear_logps(hidden, weight, labels)"


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("limit", "grad", "call"),
    [
        ("OTHER", True, "LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)"),
        ("OTHER", True, OF_TOKENS),
        ("FUSED", False, OF_TOKENS),
        ("EXPONENTIALS", True, OF_TOKENS),
    ],
)
def test_a_gpu_asserts_that_labels_are_right(limit, grad, call):
    """In a process of its own, whose work there ends; the message names the labels."""
    code = WRONG.format(limit, grad, call)
    for _ in range(3):  # a launch may fail before the device has printed the message
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
        assert "device-side assert" in ended.stderr
        if "labels must be in [0, vocab_size)" in ended.stderr:
            break
    else:
        raise AssertionError(ended.stderr)


def test_what_was_changed_before_backward():
    hidden, weight, labels = problem(torch.float32)
    logps = linear_logps(hidden, weight, labels, backend="triton")
    labels.clamp_(min=0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logps.sum().backward()
    loss = CE(backend="triton")(weight, hidden, labels)
    labels.zero_()  # gradients were computed in forward
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("loss", [True, False])
def test_autocast_that_begins_before_backward(loss):
    hidden, weight, labels = problem(torch.float32)

    def gradients(autocast):
        if loss:
            value = CE(backend="triton")(weight, hidden, labels)
        else:
            value = linear_logps(hidden, weight, labels, backend="triton").sum()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            return [torch.autograd.grad(value, (hidden, weight), retain_graph=True) for _ in range(2)]

    assert lines() == (0, 0)
    for found, expected in zip(gradients(True), gradients(False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert lines() == (1, 1)


def test_labels_of_inference_mode():
    hidden, weight, labels = problem(torch.float32)
    with torch.inference_mode():
        labels = labels.clone()
    CE(backend="triton")(weight, hidden, labels).backward()
    assert weight.grad is not None


def test_alignment_of_the_weight():
    """Kernels are compiled for it."""
    hidden, weight, labels = problem(torch.float32)
    shifted = torch.cat([weight.detach().flatten()[:1], weight.detach().flatten()])[1:].view_as(weight)
    for each in (weight.detach(), shifted):
        linear_logps(hidden.detach(), each, labels, backend="triton")
    assert lines()[0] == 2


def test_temperatures_of_tokens_are_not_kept():
    hidden, weight, labels = problem(torch.float32)
    for head in (weight, Head(weight)):
        temperature = torch.full(TOKENS, 0.5, device=DEVICE)
        CE(backend="triton", temperature=temperature)(head, hidden, labels).backward()
    assert lines() == (0, 0)


def test_which_calls_have_a_line():
    hidden, weight, labels = problem(torch.float32)

    def has(h=hidden, w=weight, y=labels, **options):
        straight_line._lines.clear()
        linear_logps(h, w, y, **{"backend": "triton", **options})
        return lines()[1] == 1

    assert has()
    assert has(hidden.flatten(0, 1), weight, labels.flatten())
    assert has(temperature=0.5)
    assert has(workspace=2**20)
    assert not has(hidden.transpose(0, 1).contiguous().transpose(0, 1))
    assert not has(w=weight[:100], y=labels.clamp(max=99))
    assert not has(chunk_size=4)
    assert not has(backend="torch")
    assert not has(temperature=torch.ones(TOKENS, device=DEVICE))
    assert has(shift=1)
    assert has(w=Head(weight, None, LogitTransform(softcap=3.0)))
    assert not has(w=Head(weight, torch.ones(VOCAB, device=DEVICE)))
    layer = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    layer.weight = torch.nn.Parameter(weight.detach())
    assert has(w=layer)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert not has()
    set_default_workspace(4000)
    try:
        assert not has()
    finally:
        set_default_workspace(None)


def test_lines_do_not_pile_up(monkeypatch):
    hidden, weight, labels = problem(torch.float32)
    monkeypatch.setattr(straight_line, "_MOST_LINES", 2)
    for i in range(1, 6):
        linear_logps(hidden[0, :i], weight, labels[0, :i], backend="triton")
    assert lines()[0] <= 2


def test_statistics_beside_the_product(monkeypatch):
    """Without a gradient, of calls that take the device longer than the host: no logits are written."""
    monkeypatch.setattr(straight_line, "MIN_FUSED", 0.0)
    hidden, weight, labels = problem(torch.bfloat16)
    _, _, log_p = exact(hidden, weight, labels, LogitTransform(softcap=5.0))
    active = labels != -100
    with torch.no_grad():
        hidden[~active] = float("nan")
        found = linear_logps(hidden, weight, labels, softcap=5.0, entropy=True, lse=True, backend="triton")
    assert next(iter(straight_line._lines.values())).fused is not None
    expected = {
        "logp": log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
    }
    for name, value in expected.items():
        torch.testing.assert_close(getattr(found, name).double(), value.where(active, 0.0), rtol=1e-5, atol=1e-5)
    assert not found.lse[~active].any()
    for reduction in ("mean", "sum"):
        straight_line._lines.clear()
        loss = CE(reduction=reduction, softcap=5.0, backend="triton")
        with torch.no_grad():
            total = loss(weight, hidden, labels)
        assert next(iter(straight_line._lines.values())).fused is not None
        terms = -expected["logp"][active]
        assert abs(float(total) - float(terms.mean() if reduction == "mean" else terms.sum())) < 1e-4
    for workspace in (None, 2**20):
        straight_line._lines.clear()
        set_default_workspace(None if workspace else 2**20)
        with torch.no_grad():
            linear_logps(hidden, weight, labels, workspace=workspace, backend="triton")
        set_default_workspace(None)
        assert next(iter(straight_line._lines.values())).fused is None
    labels[0, 0] = VOCAB
    if DEVICE == "cpu":
        with torch.no_grad(), pytest.raises(ValueError, match="to 128"):
            linear_logps(hidden, weight, labels, softcap=5.0, entropy=True, lse=True, backend="triton")


@pytest.mark.parametrize(("shape", "vocab", "scale"), [((2, 3), 128, 1.0), ((3, 3), 101, 30.0)])
def test_exponentials(shape, vocab, scale, monkeypatch, small_tiles):
    """Of calls that take the device longer than the host: no logits are written; labels may be hopeless, or sure."""
    monkeypatch.setattr(straight_line, "MIN_EXPONENTIALS", 0.0)
    g = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(*n, HIDDEN, generator=g).bfloat16().to(DEVICE) for n in (shape, (vocab,)))
    labels = torch.randint(vocab, shape, generator=g).to(DEVICE)
    hidden[0] *= scale
    labels[0, 0], labels[1, :2] = (hidden[0, 0].float() @ weight.float().t()).argmax(), -100
    active, upstream = labels != -100, torch.randn(shape, generator=g).to(DEVICE)

    def by_autograd(dtype):
        h, w = (t.to(dtype).requires_grad_() for t in (hidden, weight))
        logp = ((h @ w.t()) / 0.7).to(torch.promote_types(dtype, torch.float32)).log_softmax(-1)
        logp = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0].where(active, 0.0)
        loss = -logp.sum() / active.sum()
        sums = 3 * loss, (logp * upstream).sum()
        return [
            loss.detach(),
            logp.detach(),
            *(g for s in sums for g in torch.autograd.grad(s, (h, w), retain_graph=True)),
        ]

    exact, plain, found = by_autograd(torch.float64), by_autograd(torch.bfloat16), []
    given = [t.clone().requires_grad_() for t in (hidden, weight)]
    with torch.no_grad():
        given[0][~active] = float("nan")
    for _ in range(2):
        loss = CE(temperature=0.7, backend="triton")(given[1], given[0], labels)
        logp = linear_logps(*given, labels, temperature=0.7, backend="triton")
        values = loss.detach(), logp.detach().clone()
        with torch.no_grad():
            _ = logp.zero_()  # what backward needs is kept elsewhere
        for again in (True, False):
            gradients = [
                g for s, u in ((3 * loss, None), (logp, upstream)) for g in torch.autograd.grad(s, given, u, again)
            ]
            found.append([*values, *gradients])
    assert [type(line.rows) for line in straight_line._lines.values()] == [ExponentialRows] * 2
    for ours, *others, theirs, wanted in zip(*found, plain, exact, strict=True):
        assert all(torch.equal(ours, other) for other in others)
        # The interpreter truncates where a GPU rounds to bfloat16.
        assert_as_exact_as_plain(ours, theirs, wanted, slack=4.0 if INTERPRETED else 2.0)


def test_which_calls_have_exponentials(monkeypatch):
    monkeypatch.setattr(straight_line, "MIN_EXPONENTIALS", 0.0)
    given = problem(torch.bfloat16)

    def has(loss=None, inputs=given, **options):
        straight_line._lines.clear()
        if loss is None:
            linear_logps(*inputs, **{"backend": "triton", **options})
        else:
            CE(backend="triton", **options)(inputs[1], inputs[0], inputs[2])
        found = [line.rows for line in made()]
        return any(isinstance(rows, ExponentialRows) for rows in found)

    assert has()
    assert has(True)
    assert has(True, reduction="sum")
    assert not has(True, label_smoothing=0.1)
    assert not has(entropy=True)
    assert not has(softcap=3.0)
    assert not has(inputs=problem(torch.float16))
    assert not has(inputs=problem(torch.float32))
    assert not has(inputs=[given[0], given[1].detach().t().contiguous().t().requires_grad_(), given[2]])
    with torch.no_grad():
        assert not has()
    # More logits than one block of fp32 takes.
    monkeypatch.setattr(plan, "SMALL_CALL_LOGITS", 0)
    monkeypatch.setattr(plan, "FEWEST_FLOPS", 0)
    decision._decisions.clear()
    assert has()
    assert has(True)
    assert not has(chunk_size=4)
    assert not has(inputs=[given[0], given[1].detach(), given[2]])
    monkeypatch.setattr(straight_line, "MIN_EXPONENTIALS", given[2].numel() * given[1].numel())
    assert has()
    monkeypatch.setattr(straight_line, "MOST_DEPTH", HIDDEN - 1)
    assert not has()
    monkeypatch.setattr(straight_line, "MIN_EXPONENTIALS", 0.0)
    monkeypatch.setattr(straight_line, "MOST_SMALL_LOGITS", 100)
    assert not has()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_of_many_tokens_that_were_made_before_are_known(dtype):
    """They have other values, masks and weights, and labels of theirs may be wrong; no weight is kept."""
    loss, made_before, decide = CE(backend="triton"), [], straight_line.decide
    with small_calls(0), pytest.MonkeyPatch.context() as patched:
        patched.setattr(straight_line, "decide", lambda *given: made_before.append(1) or decide(*given))
        for masked in ((2, 3), (), (0, 1, 2, 4), (2, 3)):
            hidden, weight, labels = problem(dtype, masked)
            with torch.no_grad():
                weight.copy_(weight.flip(0) + len(masked))
            h, w, log_p = exact(hidden, weight, labels, LogitTransform())
            logp = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0].where(labels != -100, 0.0)
            found = linear_logps(hidden, weight, labels, backend="triton")
            gradients = torch.autograd.grad(found.sum(), (hidden, weight))
            value = loss(weight, hidden, labels)
            of_mean = torch.autograd.grad(value, (hidden, weight))
            each = (found, *gradients, value, *of_mean)
            expected = torch.autograd.grad(logp.sum(), (h, w), retain_graph=True)
            mean = -logp.sum() / max(int((labels != -100).sum()), 1)
            expected = (logp, *expected, mean, *torch.autograd.grad(mean, (h, w)))
            for ours, theirs in zip(each, expected, strict=True):
                size = SIZES[dtype] * max(float(theirs.detach().abs().max()), 1.0)
                torch.testing.assert_close(ours.double(), theirs, rtol=SIZES[dtype], atol=size)
        assert len(made_before) == len(straight_line._lines) == 2
        assert {type(line) for line in straight_line._lines.values()} == {straight_line.Known}
        assert all(line.head.weight is None for line in straight_line._lines.values())
        labels[0, 0] = VOCAB
        for _ in range(2):
            with pytest.raises(ValueError, match="labels must be in"):
                loss(weight, hidden, labels)
