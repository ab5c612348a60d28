"""Compiled functions that call losses, operations and kernels: results, gradients and states as without torch.compile.

All are compiled with ``fullgraph=True``, and the graphs are counted: one for the first length, one for all others.
"""

import copy
import pickle
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from liger_losses import (
    AdaptiveEntropy,
    ChunkedLoss,
    Completions,
    DistillationLoss,
    Divergence,
    Head,
    LigerFusedLinearAlphaBetaLoss,
    LigerFusedLinearBCOLoss,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearMiniLLMLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearReverseKLLoss,
    LigerFusedLinearSimPOLoss,
    LigerFusedLinearTVDLoss,
    LogitTransform,
    PreferenceLoss,
    Teacher,
    TeacherLogits,
    TeacherTopK,
    linear_divergence,
    linear_divergence_loss,
    linear_logps,
    linear_statistics,
    linear_token_loss,
)
from liger_losses.chunked.engine import operators
from liger_losses.kernels import glu, layer_norm, rms_norm, rope
from liger_losses.modules import RMSNorm, SwiGLUMLP
from tests.reference import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, H, V = 4, 16, 29
TOLERANCE = {"rtol": 2e-5, "atol": 1e-6}
HALF = {"rtol": 1e-2, "atol": 1e-3}
LENGTHS = (5, 6, 8)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend="aot_eager"):
    """The compiled function, and what counts its graphs."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


def batch(length, rows=B, *, seed=0, dtype=torch.float32):
    """The tensors of one call. Some tokens carry no loss."""
    g = torch.Generator().manual_seed(100 * seed + length)
    hidden, other = (torch.randn(rows, length, H, generator=g).to(DEVICE, dtype) for _ in range(2))
    labels = torch.randint(V, (rows, length), generator=g)
    labels[torch.rand(rows, length, generator=g) < 0.3] = -100
    signs = torch.tensor([1.0, -0.5, 0.3, -1.0])[:rows]
    return {
        "h": hidden.requires_grad_(),
        "other": other,
        "y": labels.to(DEVICE),
        "signs": signs.to(DEVICE),
        "logps": -3.4 + 0.2 * torch.randn(rows, length, generator=g).to(DEVICE),
    }


def masked(d):
    """The same call without any token that carries loss."""
    return {**d, "y": torch.full_like(d["y"], -100)}


def layer(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(H, V, device=DEVICE, dtype=dtype)


def flat(result):
    """All tensors of a result."""
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else [t for part in parts_of(result) for t in flat(part)]


def parts_of(result):
    return result.values() if isinstance(result, dict) else result


def structure(result):
    """How they are arranged: the named tuples' classes, and where there is none."""
    if result is None or isinstance(result, torch.Tensor):
        return None if result is None else torch.Tensor
    return (
        type(result),
        [structure(part) for part in parts_of(result)],
        list(result) if isinstance(result, dict) else None,
    )


def gradients(result, leaves, scale=1.0):
    """Of a sum of all outputs in which no two entries count alike. (Zeros are as good as none.)"""
    outputs = [tensor for tensor in flat(result) if tensor.requires_grad]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    assert outputs, "nothing to differentiate"
    weights = [(scale * torch.arange(1.0, 1 + o.numel()).cos()).view(o.shape).to(o) for o in outputs]
    found = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


def assert_same(found, expected, tolerance=TOLERANCE):
    """Results of calls: structure, values, dtypes, and what can be differentiated."""
    assert structure(found) == structure(expected)
    for a, b in zip(flat(found), flat(expected), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)
        assert a.requires_grad == b.requires_grad


def check(function, plain, batches, leaves, tolerance=TOLERANCE, scale=1.0):
    """A compiled function's results and gradients are the plain one's."""
    leaves = list(leaves)
    for d in batches:
        found, expected = function(d), plain(d)
        assert_same(found, expected, TOLERANCE)
        inputs = (d["h"], *leaves)
        for a, b in zip(gradients(found, inputs, scale), gradients(expected, inputs, scale), strict=True):
            assert a.dtype == b.dtype
            if tolerance is HALF:  # rounded once or twice
                assert relative_error(a, b) < 1e-2
            else:
                torch.testing.assert_close(a, b, equal_nan=True, **tolerance)


# --- Every loss and every operation -----------------------------------------------------------------------------------


def pairs(loss, head, d):
    """Liger's form, half of whose rows are chosen, with a bias of its own."""
    extra = (d["other"], head.weight.detach() * 0.7) if loss.use_ref_model else ()
    return loss(head.weight, torch.tanh(d["h"]), d["y"], head.bias, *extra)


def completions(loss, head, d):
    """Two groups of completions, the second one shorter."""
    groups = [
        Completions(*[d[name][rows] for name in ("h", "y", "other")])
        for rows in (slice(2), (slice(2, 4), slice(1, None)))
    ]
    return loss(head, *groups, ref_weight=head.weight.detach() * 0.7, ref_bias=head.bias.detach())


def marked(loss, head, d):
    extra = {"kl": 0.3} if loss.loss_type == "kto" else {}
    if loss.use_ref_model:
        extra |= {"ref_input": d["other"], "ref_weight": head.weight.detach()}
    return loss(d["h"], head, d["y"], preference_labels=d["signs"] > 0, **extra)


def policy(loss, head, d):
    extra = {"ref_per_token_logps": d["logps"] * 1.1} if loss.beta else {}
    mask, ids = d["y"] >= 0, d["y"].clamp(min=0)
    return loss(torch.tanh(d["h"]), head, ids, mask, d["signs"], old_per_token_logps=d["logps"], **extra)


def teacher(head, d):
    return Teacher(d["other"], head.weight.detach() * 0.7)


def distillation(loss, head, d):
    return loss(head, d["h"], d["y"], teacher(head, d))


def from_logits(loss, head, d):
    return loss(head, d["h"], d["y"], TeacherLogits(d["other"] @ head.weight.detach().T))


def from_top_k(loss, head, d):
    logps, indices = (d["other"] @ head.weight.detach().T).log_softmax(-1).topk(4)
    return loss(head, d["h"], d["y"], TeacherTopK(logps, indices))


def like_liger(loss, head, d):
    return loss(d["h"], head.weight, d["other"], head.weight.detach() * 0.7, d["y"])


def plain_call(loss, head, d):
    return loss(head, torch.tanh(d["h"]), d["y"])


class Focal(ChunkedLoss):
    def loss(self, statistics, mask, gamma=2.0):
        p = statistics.logp.exp()
        return -((1 - p) ** gamma * statistics.logp * mask).sum() / mask.sum().clamp(min=1), p.detach()


class InADictionary(Focal):
    """A forward of its own, whose result is no tuple."""

    def forward(self, weight, hidden_states, labels):
        loss, p = super().forward(weight, hidden_states, labels)
        return {"loss": loss, "parts": [p.mean(), None]}


class Squared(PreferenceLoss):
    def __init__(self, beta=0.1, **options):
        super().__init__(beta=beta, use_ref_model=True, **options)

    def pair_loss(self, pairs):
        return (self.beta * (pairs.chosen_logratios - pairs.rejected_logratios) - 1).square()


CE = LigerFusedLinearCrossEntropyLoss
#: How to build a loss, and how to call it.
LOSSES = {
    "cross entropy": (CE, plain_call),
    "cross entropy, shifted": (
        CE,
        lambda loss, head, d: loss(head.weight, d["h"][:, :-1], d["y"][:, 1:].contiguous(), head.bias),
    ),
    "cross entropy, options": (
        lambda: CE(
            torch.linspace(0.5, 1.5, V, device=DEVICE),
            label_smoothing=0.1,
            lse_square_scale=1e-2,
            return_z_loss=True,
            return_token_accuracy=True,
            return_predicted_tokens=True,
        ),
        plain_call,
    ),
    "cross entropy, per token": (lambda: CE(reduction="none", softcap=3.0, shift=True), plain_call),
    "DPO": (lambda: LigerFusedLinearDPOLoss(beta=0.3, compute_nll_loss=True), pairs),
    "DPO, completions": (lambda: LigerFusedLinearDPOLoss(loss_type=["ipo", "sft"], ld_alpha=0.4), completions),
    "CPO": (LigerFusedLinearCPOLoss, pairs),
    "SimPO": (LigerFusedLinearSimPOLoss, pairs),
    "ORPO": (LigerFusedLinearORPOLoss, pairs),
    "user's pairs": (Squared, pairs),
    "KTO": (LigerFusedLinearKTOLoss, marked),
    "BCO": (LigerFusedLinearBCOLoss, marked),
    "GRPO": (lambda: LigerFusedLinearGRPOLoss(beta=0.1), policy),
    "GRPO, two passes": (
        lambda: LigerFusedLinearGRPOLoss(
            beta=0.0,
            importance_sampling_level="sequence",
            top_entropy_quantile=0.5,
            entropy_coef=AdaptiveEntropy(0.1, target=9.0),
        ),
        policy,
    ),
    "JSD": (lambda: LigerFusedLinearJSDLoss(beta=0.3, temperature=1.5), distillation),
    "JSD, Liger's form": (lambda: LigerFusedLinearJSDLoss(return_soft_hard_loss=True), like_liger),
    "KL, top-k": (LigerFusedLinearKLLoss, from_top_k),
    "KL, logits": (LigerFusedLinearKLLoss, from_logits),
    "reverse KL": (LigerFusedLinearReverseKLLoss, distillation),
    "TVD": (LigerFusedLinearTVDLoss, distillation),
    "alpha-beta": (lambda: LigerFusedLinearAlphaBetaLoss(0.3, 0.6), distillation),
    "cosine": (LigerFusedLinearCosineSimilarityLoss, distillation),
    "divergence": (lambda: DistillationLoss(Divergence.forward_kl()), distillation),
    "MiniLLM": (LigerFusedLinearMiniLLMLoss, distillation),
    "user's loss": (
        lambda: Focal(temperature=0.7),
        lambda loss, head, d: loss(Head(head.weight, head.bias), d["h"], d["y"], gamma=3.0),
    ),
    "user's loss, a dictionary": (InADictionary, plain_call),
    "head with a transform": (
        CE,
        lambda loss, head, d: loss(Head.of(head, transform=LogitTransform(0.5)), d["h"], d["y"]),
    ),
}


def user_function(statistics, labels, w):
    return -w * statistics.logp + 0.01 * statistics.lse.square()


OPERATIONS = {
    "logps": lambda head, d: linear_logps(d["h"], head.weight, d["y"], bias=head.bias, temperature=0.7, entropy=True),
    "logps, shifted": lambda head, d: linear_logps(torch.tanh(d["h"]), head, d["y"], shift=True, chunk_size=3),
    "statistics": lambda head, d: linear_statistics(
        d["h"], head, d["y"], ("logp", "entropy", "mean_logit"), metrics="lse"
    ),
    "statistics of several": lambda head, d: linear_statistics([d["h"], d["h"][:2] * 2], head, [d["y"], d["y"][:2]]),
    "statistics of columns": lambda head, d: linear_statistics(
        d["h"],
        head,
        d["y"],
        ("selected_logps", "lse"),
        selected=(d["y"].clamp(min=0)[..., None] + d["y"].new_ones(3)) % V,
    ),
    "divergence": lambda head, d: linear_divergence(
        d["h"], head.weight, d["y"], teacher(head, d), Divergence.forward_kl(), logp=True, temperature=1.5
    ),
    "divergence loss": lambda head, d: linear_divergence_loss(
        d["h"],
        head,
        d["y"],
        teacher(head, d),
        Divergence.reverse_kl(),
        {"divergence": d["logps"].abs(), "logp": -d["logps"].exp()},
        metrics=("entropy",),
    ),
    "token loss": lambda head, d: linear_token_loss(
        d["h"], head, d["y"], user_function, ("logp", "lse"), token_inputs={"w": d["logps"].abs()}
    ),
}


def step(loss):
    if isinstance(getattr(loss, "entropy_coef", None), AdaptiveEntropy):
        loss.entropy_coef.step()


def of_any_length(d):
    """A batch for which torch.compile traces its length as a symbol at once."""
    for name in ("h", "other", "y", "logps"):
        torch._dynamo.mark_dynamic(d[name], 1)
    return d


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    """One graph for many lengths, and for calls without any token. A loss's own state changes as it does eagerly."""
    build, call = LOSSES[name]
    head, ours, theirs = layer(), build(), build()
    function, counter = compiled(lambda d: call(ours, head, d))
    for d in (of_any_length(batch(5)), masked(batch(5)), batch(6), batch(8)):
        check(function, lambda d: call(theirs, head, d), [d], head.parameters())
        step(ours), step(theirs)
        assert str(ours.state_dict()) == str(theirs.state_dict())
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    call, head = OPERATIONS[name], layer()
    function, counter = compiled(lambda d: call(head, d))
    batches = of_any_length(batch(5)), masked(batch(5)), batch(6), batch(8)
    check(function, lambda d: call(head, d), batches, head.parameters())
    assert counter.frame_count == 1


class Several(nn.Module):
    """One loss of each kind, called one after another: one graph has all."""

    def __init__(self, *names):
        super().__init__()
        self.losses = nn.ModuleList([LOSSES[name][0]() for name in names])
        self.calls = [LOSSES[name][1] for name in names]

    def forward(self, head, d):
        return [call(loss, head, d) for loss, call in zip(self.losses, self.calls, strict=True)]


KINDS = ("cross entropy, options", "BCO", "GRPO", "JSD", "user's loss")


def test_without_gradients():
    """One graph for the first length, one for all others."""
    head, ours, theirs = layer(), Several(*KINDS), Several(*KINDS)

    def call_all(losses, d):
        return [*losses(head, d), *[call(head, d) for call in OPERATIONS.values()]]

    function, counter = compiled(lambda d: call_all(ours, d), "eager")
    with torch.no_grad():
        for length in LENGTHS:
            assert_same(function(batch(length)), call_all(theirs, batch(length)))
    assert counter.frame_count == 2


#: The dtype of hidden states (and of the head, but under autocast), that of autocast, and the loss scale.
DTYPES = {
    "bf16": (torch.bfloat16, None, 1.0),
    "fp16": (torch.float16, None, 2.0**10),
    "bf16 autocast": (torch.bfloat16, torch.bfloat16, 1.0),
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name):
    """One graph for two lengths; gradients of fp16 are multiplied by the loss scale before they are rounded."""
    dtype, autocast, scale = DTYPES[name]
    head, ours, theirs = layer(torch.float32 if autocast else dtype), Several(*KINDS), Several(*KINDS)

    def call_all(losses, d):
        with torch.autocast(DEVICE, dtype=autocast, enabled=autocast is not None):
            return [*losses(head, d), *[OPERATIONS[name](head, d) for name in ("logps", "divergence", "token loss")]]

    function, counter = compiled(lambda d: call_all(ours, d), "eager")
    batches = of_any_length(batch(5, dtype=dtype)), batch(7, dtype=dtype)
    check(function, lambda d: call_all(theirs, d), batches, head.parameters(), HALF, scale)
    assert counter.frame_count == 1


def test_fp16_gradients_do_not_underflow():
    head, d, loss = layer(torch.float16), batch(6, dtype=torch.float16), CE()
    d["h"] = (d["h"].detach() * 1e-2).requires_grad_()
    function, counter = compiled(lambda d: loss(head, d["h"], d["y"]) * 1e-4)
    found, expected = (
        gradients(f(d) * 2.0**14, (d["h"], *head.parameters()))
        for f in (function, lambda d: loss(head, d["h"], d["y"]) * 1e-4)
    )
    assert counter.frame_count == 1
    for a, b in zip(found, expected, strict=True):
        assert int((b != 0).sum()) == b.numel() or b is expected[0]
        torch.testing.assert_close(a, b, rtol=1e-2, atol=0)


@pytest.mark.parametrize("trained", ["hidden states", "weight", "bias"])
def test_frozen_parts(trained):
    """Gradients are those of what requires one."""
    head, ours, theirs = layer(), Several(*KINDS), Several(*KINDS)
    head.weight.requires_grad_(trained == "weight")
    head.bias.requires_grad_(trained == "bias")

    def call_all(losses, d):
        h = d["h"] if trained == "hidden states" else d["h"].detach()
        d = {**d, "h": h}
        return [*losses(head, d), OPERATIONS["logps"](head, d), OPERATIONS["token loss"](head, d)]

    function, counter = compiled(lambda d: call_all(ours, d))
    with mock.patch.object(operators, "_leaves", wraps=operators._leaves) as leaves:
        check(function, lambda d: call_all(theirs, d), [batch(6)], head.parameters())
    assert counter.frame_count == 1
    # Nothing else is differentiated.
    shapes = {tuple(call.args[0][i].shape) for call in leaves.call_args_list for i in call.args[1]}
    parts = {"weight": (V, H), "bias": (V,)}
    assert shapes == {parts[trained]} if trained in parts else shapes and not shapes & set(parts.values())


@pytest.mark.parametrize("shape", [(B, 0), (0, 5)])
def test_empty_batches(shape):
    rows, length = shape
    head, names = layer(), KINDS if rows else ("cross entropy, options", "JSD", "user's loss")
    ours, theirs = Several(*names), Several(*names)

    def call_all(losses, d):
        return [*losses(head, d), OPERATIONS["logps"](head, d), OPERATIONS["token loss"](head, d)]

    function, counter = compiled(lambda d: call_all(ours, d))
    batches = [batch(length, rows), batch(length, rows)]
    check(function, lambda d: call_all(theirs, d), batches, head.parameters())
    assert counter.frame_count == 1


# --- Graphs that are used several times -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch._functorch.config.patch(donated_buffer=False)  # torch.compile's condition for retain_graph=True
def test_several_backwards_and_losses_in_any_order(dtype):
    """Two calls before a backward that runs twice. In fp16, each backward makes the call again."""
    names = "cross entropy", "BCO", "JSD, Liger's form"
    head, ours, theirs = layer(dtype), Several(*names), Several(*names)
    function, counter = compiled(lambda d: sum(tensor.sum() for tensor in flat(ours(head, d)) if tensor.requires_grad))
    results = []
    for call in (function, lambda d: sum(tensor.sum() for tensor in flat(theirs(head, d)) if tensor.requires_grad)):
        one, other = batch(5, dtype=dtype), batch(7, dtype=dtype)
        first, second = call(one), call(other)
        head.zero_grad()
        (2 * first).backward(retain_graph=True)
        (second / 3 + first).backward(retain_graph=True)
        second.backward()
        results.append([one["h"].grad, other["h"].grad, head.weight.grad, head.bias.grad])
    assert counter.frame_count == 2
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **(TOLERANCE if dtype == torch.float32 else HALF))
    assert str(ours.state_dict()) == str(theirs.state_dict())
    assert int(ours.losses[1].batches) == 2


def test_the_running_mean_changes_once_for_each_call():
    """Not while it is traced, nor when a backward in fp16 makes the call again. Training and evaluation take turns."""
    head, loss = layer(torch.float16), LigerFusedLinearBCOLoss(use_ref_model=False)
    function, counter = compiled(lambda d: marked(loss, head, d))
    for number, length in enumerate((5, 6, 8, 5), start=1):
        result = function(batch(length, dtype=torch.float16))
        assert int(loss.batches) == number
        gradients(result, head.parameters())
        with torch.no_grad():
            loss.eval()
            function(batch(length, dtype=torch.float16))
            loss.train()
        assert int(loss.batches) == number
    assert counter.frame_count == 4  # of two modes
    assert torch.isfinite(loss.running_shift)


def test_numbers_that_change():
    """Arguments that are numbers: a change is compiled once, not for each value."""
    head, ce, kto, grpo = layer(), CE(), LigerFusedLinearKTOLoss(use_ref_model=False), LigerFusedLinearGRPOLoss(0.0)

    def call_all(d, count, kl):
        mask, ids = d["y"] >= 0, d["y"].clamp(min=0)
        return (
            ce(head, d["h"], d["y"], num_items_in_batch=count),
            grpo(d["h"], head, ids, mask, d["signs"], num_items_in_batch=count),
            kto(head, (d["h"], d["y"]), preference_labels=d["signs"] > 0, kl=kl),
        )

    function, counter = compiled(call_all)
    d = batch(6)
    for number in range(2, 9):
        check(
            lambda d: function(d, number, number / 7),  # noqa: B023
            lambda d: call_all(d, number, number / 7),  # noqa: B023
            [d],
            head.parameters(),
        )
    assert counter.frame_count <= 2
    count = torch.tensor(9, device=DEVICE)
    assert_same(function(d, count, 0.3), call_all(d, count, 0.3))


def test_attributes_that_change():
    """Each is read at the next call; a value that an attribute had already compiles nothing."""
    head, loss, d = layer(), LigerFusedLinearDPOLoss(beta=0.1), batch(6)
    function, counter = compiled(lambda d: pairs(loss, head, d), "eager")
    before = function(d)[0].item()
    for name, value in (("beta", 0.7), ("loss_type", ["ipo"]), ("softcap", 2.0), ("use_ref_model", False)):
        setattr(loss, name, value)
        assert_same(function(d), pairs(loss, head, d))
        assert function(d)[0].item() != before
        before = function(d)[0].item()
    graphs = counter.frame_count
    assert 2 <= graphs <= 5
    loss.beta = 0.7
    function(d)
    assert counter.frame_count == graphs
    loss.eval()
    assert_same(function(d), pairs(loss, head, d))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
def test_copies_of_losses(copied):
    """A copy is another loss, with options and a state of its own, in functions that were compiled for the first."""
    head, loss, d = layer(), LigerFusedLinearBCOLoss(beta=0.1, use_ref_model=False), batch(6)
    function, counter = compiled(lambda loss, d: marked(loss, head, d), "eager")
    function(loss, d)
    other = copied(loss)
    other.beta = 0.9
    expected = marked(copied(other), head, d)
    assert_same(function(other, d), expected)
    assert (int(loss.batches), int(other.batches)) == (1, 2)
    assert counter.frame_count == 2
    del loss
    expected = marked(copied(other), head, d)
    assert_same(function(other, d), expected)


def test_losses_of_one_class_are_told_apart():
    """Two losses whose calls are alike, and one that replaces another which is gone."""
    head, d = layer(), batch(6)
    one, other = (LigerFusedLinearJSDLoss(beta=beta) for beta in (0.1, 0.9))
    function, counter = compiled(lambda d: (distillation(one, head, d), distillation(other, head, d)))
    assert_same(function(d), (distillation(one, head, d), distillation(other, head, d)))
    one = LigerFusedLinearJSDLoss(beta=0.5)
    assert_same(function(d), (distillation(one, head, d), distillation(other, head, d)))
    assert counter.frame_count == 2


def test_errors_say_what_is_wrong():
    head, ce = layer(), CE()
    with pytest.raises(Exception, match="labels"):
        compiled(lambda d: ce(head, d["h"][:, 1:], d["y"]))[0](batch(6))


@pytest.mark.slow
def test_inductor():
    head, loss, plain = layer(), LigerFusedLinearJSDLoss(beta=0.3), LigerFusedLinearJSDLoss(beta=0.3)
    function, counter = compiled(lambda d: distillation(loss, head, {**d, "h": torch.tanh(d["h"])}), "inductor")
    batches = of_any_length(batch(5)), batch(7)
    check(function, lambda d: distillation(plain, head, {**d, "h": torch.tanh(d["h"])}), batches, head.parameters())
    assert counter.frame_count == 1


# --- Kernels ----------------------------------------------------------------------------------------------------------

WIDTH = 24
g = torch.Generator().manual_seed(3)
W, BIAS, DOWN = (torch.randn(*s, generator=g).to(DEVICE).requires_grad_() for s in ((WIDTH,), (WIDTH,), (7, WIDTH)))


def angles(length, width):
    at = torch.arange(float(length * width), device=DEVICE).view(1, length, width)
    return at.cos(), at.sin()


def heads(x):
    return x.view(2, -1, 3, 8)


KERNELS = {
    "RMS norm": lambda x, y, b: rms_norm.rms_norm(x * 1.5, W, 1e-5, offset=1.0, multiply="fp32", backend=b),
    "RMS norm, no weight": lambda x, y, b: rms_norm.rms_norm(x[:, 1:], None, backend=b),
    "residual and norm": lambda x, y, b: rms_norm.add_rms_norm(x, y, W, backend=b),
    "one output": lambda x, y, b: rms_norm.add_rms_norm(x, y, W, backend=b)[0],
    "gated norm": lambda x, y, b: rms_norm.gated_rms_norm(x, y, W, gate_first=True, backend=b),
    "layer norm": lambda x, y, b: layer_norm.layer_norm(x, W, BIAS, backend=b),
    "gate": lambda x, y, b: glu.glu(x, y, "silu", limit=1.0, alpha=1.7, up_offset=1.0, backend=b),
    "fused gate": lambda x, y, b: glu.glu_fused(x, interleaved=True, backend=b),
    "gate and product": lambda x, y, b: glu.glu_linear(x, y, DOWN, None, "gelu_tanh", backend=b),
    "rotation": lambda x, y, b: rope.rope(
        heads(x).transpose(1, 2), heads(y).transpose(1, 2), *angles(x.shape[1], 6), backend=b
    ),
    "rotation, one output": lambda x, y, b: rope.rope(
        heads(x), heads(y), *angles(x.shape[1], 8), interleaved=True, unsqueeze_dim=2, backend=b
    )[0],
}


def check_kernel(kernel, backend):
    """One graph for all lengths; outputs with the strides and gradients that they have eagerly."""
    function, counter = compiled(kernel, backend)
    for length in (5, 8):
        x, y = (torch.randn(2, length, WIDTH, generator=g).to(DEVICE).requires_grad_() for _ in range(2))
        if length == 5:
            torch._dynamo.mark_dynamic(x, 1), torch._dynamo.mark_dynamic(y, 1)
        found, expected = function(x, y), kernel(x, y)
        assert_same(found, expected, {"rtol": 1e-4, "atol": 1e-5})
        assert [t.stride() for t in flat(found)] == [t.stride() for t in flat(expected)]
        inputs = (x, y, W, BIAS, DOWN)
        for a, b in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    check_kernel(lambda x, y: KERNELS[name](x, y, "triton"), "aot_eager")


def test_kernels_in_torch():
    check_kernel(lambda x, y: [kernel(x, y, "torch") for kernel in KERNELS.values()], "eager")


def test_kernels_of_two_dtypes_in_one_graph():
    names = "RMS norm", "residual and norm", "gated norm", "layer norm", "gate", "fused gate"

    def call_all(x, y):
        return [KERNELS[n](a, b, "triton") for n in names for a, b in ((x, y), (x.bfloat16(), y.bfloat16()), (x, y))]

    function, counter = compiled(call_all)
    x, y = (torch.randn(2, 6, WIDTH, generator=g).to(DEVICE).requires_grad_() for _ in range(2))
    found, expected, inputs = function(x, y), call_all(x, y), (x, y, W, BIAS)
    assert_same(found, expected, HALF)
    for a, b in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert relative_error(a, b) < 1e-2
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_kernels_under_autocast_and_without_gradients(backend):
    def call_all(x, y):
        return [KERNELS[name](x, y, backend) for name in ("RMS norm", "residual and norm", "gate", "rotation")]

    function, counter = compiled(call_all, "eager")
    for dtype in (torch.float32, torch.bfloat16):
        x, y = (torch.randn(2, 6, WIDTH, generator=g).to(DEVICE, dtype) for _ in range(2))
        with torch.autocast(DEVICE, dtype=torch.bfloat16), torch.no_grad():
            assert_same(function(x, y), call_all(x, y), HALF)
    assert counter.frame_count == 2


def test_modules():
    norm, mlp = RMSNorm(WIDTH, device=DEVICE), SwiGLUMLP(WIDTH, 40, device=DEVICE)
    function, counter = compiled(lambda x: mlp(norm(x)))
    x = torch.randn(2, WIDTH, device=DEVICE, requires_grad=True)
    inputs = (x, *norm.parameters(), *mlp.parameters())
    for a, b in zip(gradients(function(x), inputs), gradients(mlp(norm(x)), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1
