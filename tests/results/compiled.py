"""Every loss and operation in compiled functions: calls of :mod:`tests.results.losses`, in fp32."""

from functools import partial

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from liger_losses import AdaptiveEntropy, ChunkedLoss, Head, LogitTransform, PreferenceLoss
from tests.losses import CE, DPO, GRPO, JSD
from tests.reference import relative_error, tensors_of
from tests.results import losses as calls
from tests.results.losses import gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, H, V = calls.ROWS, calls.HIDDEN, calls.VOCAB
TOLERANCE = {"rtol": 2e-5, "atol": 1e-6}
HALF = {"rtol": 1e-2, "atol": 1e-3}


def compiled(function, backend="aot_eager"):
    """The compiled function, and what counts its graphs."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


def batch(length, rows=B, *, dtype=torch.float32):
    """The tensors of one call. Some tokens carry no loss."""
    d = {name: value.to(DEVICE) for name, value in calls.batch(dtype, rows, length, seed=length).items()}
    d["h"].requires_grad_()
    return d


def masked(d):
    """The same call without any token that carries loss."""
    return {**d, "y": torch.full_like(d["y"], -100)}


def layer(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(H, V, device=DEVICE, dtype=dtype)


def structure(result):
    """How they are arranged: the named tuples' classes, and where there is none."""
    if result is None or isinstance(result, torch.Tensor):
        return None if result is None else torch.Tensor
    return (
        type(result),
        [structure(part) for part in (result.values() if isinstance(result, dict) else result)],
        list(result) if isinstance(result, dict) else None,
    )


def assert_same(found, expected, tolerance=TOLERANCE):
    """Results of calls: structure, values, dtypes, and what can be differentiated."""
    assert structure(found) == structure(expected)
    for a, b in zip(tensors_of(found), tensors_of(expected), strict=True):
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


def check_one_graph(call, plain, batches, leaves, *how, backend="eager"):
    """The same of a function that is compiled here, and once."""
    function, counter = compiled(call, backend)
    check(function, plain, batches, leaves, *how)
    assert counter.frame_count == 1


def reference(head):
    """The head of another model; a constant."""
    return Head(head.weight.detach() * 0.7, head.bias.detach())


def with_reference(call):
    return lambda loss, head, d: call(loss, head, reference(head), d)


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


#: How to build a loss, and how to call it.
LOSSES = {
    **{name: (loss.build, with_reference(loss.call)) for name, loss in calls.LOSSES.items() if name not in calls.ALIKE},
    "cross entropy, options": (
        lambda: calls.weighted(torch.linspace(0.5, 1.5, V, device=DEVICE)),
        lambda loss, head, d: loss(head, torch.tanh(d["h"]), d["y"]),
    ),
    "DPO, several": (
        lambda: DPO(loss_type=["ipo", "sft"], ld_alpha=0.4),
        with_reference(partial(calls.completions, start=1)),
    ),
    "user's pairs": (Squared, with_reference(calls.pairs)),
    "GRPO, two passes": (
        lambda: GRPO(
            beta=0.0,
            importance_sampling_level="sequence",
            top_entropy_quantile=0.5,
            entropy_coef=AdaptiveEntropy(0.1, target=9.0),
        ),
        with_reference(calls.policy),
    ),
    "JSD, Liger's form": (
        lambda: JSD(return_soft_hard_loss=True),
        lambda loss, head, d: loss(d["h"], head.weight, d["other"], head.weight.detach() * 0.7, d["y"]),
    ),
    "user's loss": (
        lambda: Focal(temperature=0.7),
        lambda loss, head, d: loss(Head(head.weight, head.bias), d["h"], d["y"], gamma=3.0),
    ),
    "user's loss, a dictionary": (InADictionary, with_reference(calls.plain_call)),
    "head with a transform": (
        CE,
        lambda loss, head, d: loss(Head.of(head, transform=LogitTransform(0.5)), d["h"], d["y"]),
    ),
}
OPERATIONS = {
    name: (lambda head, d, call=calls.OPERATIONS[name]: call(head, reference(head), d))
    for name in (
        *("logps", "not compact", "statistics", "statistics of several", "statistics of columns", "divergence"),
        *("divergence loss", "token loss", "largest, two passes", "logps of many heads"),
    )
}
