"""Gradients that reach lazy logits by ways of the user's own."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F

from liger_losses.patching.lazy import lazy_linear, true_values
from tests.patching.lazy.test_tensor import LAZY, V, chosen, problem


class Halved(torch.autograd.Function):
    """Passes logits on beside another tensor, and half of their gradient back."""

    @staticmethod
    def forward(ctx, way, logits, other):
        return way(logits), other.clone()

    @staticmethod
    def backward(ctx, gradient, other):
        return None, gradient / 2, other


#: Ways in which an autograd function may pass them on, and what is done with them then.
WAYS = {"itself": lambda z: z, "detach": lambda z: z.detach(), "clone": lambda z: z.clone()}
#: What it may return instead: other lazy logits, to which their gradient does not lead.
OTHERS = {"product": lambda z: z * 1, "slice": lambda z: z[:], "two steps": lambda z: z.detach()[:, :].double().clone()}
USES = {
    **{name: LAZY[name] for name in ("cross entropy", "gather", "scaled", "sums")},
    "second argument": lambda z, y: (torch.ones(V, dtype=z.dtype) * z).square().sum(),
    "concatenated": lambda z, y: torch.cat([z, z]).square().sum(),
    "added": lambda z, y: chosen(z.detach() + z, y),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("use", USES)
def test_an_autograd_function_that_passes_them_on_sees_their_gradient(way, use):
    *tensors, labels = problem()
    results = []
    for make in (lambda *t: F.linear(*t), lazy_linear):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            logits, hidden_states = Halved.apply(WAYS[way], make(*tensors), tensors[0])
            with torch.no_grad():
                logits.argmax(-1)  # who looks first must not matter
            loss = USES[use](logits, labels) + 0.1 * hidden_states.square().mean()
        results.append([loss, *torch.autograd.grad(loss, tensors)])
    torch.testing.assert_close(*results[::-1])


@pytest.mark.parametrize("way", OTHERS)
def test_an_autograd_function_that_returns_other_lazy_logits_is_refused(way):
    *tensors, labels = problem()
    logits, hidden_states = Halved.apply(OTHERS[way], lazy_linear(*tensors), tensors[0])
    with pytest.raises(RuntimeError, match="passed the gradient of lazy logits on to other lazy logits"):
        (chosen(logits, labels) + hidden_states.sum()).backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_head(reentrant):
    """The reentrant one gives gradients to logits that it has made without any."""
    from torch.utils.checkpoint import checkpoint

    *tensors, labels = problem()
    results = []
    for linear in (F.linear, lazy_linear):
        loss = chosen(checkpoint(linear, *tensors, use_reentrant=reentrant), labels)
        if reentrant and linear is lazy_linear:
            with pytest.raises(RuntimeError, match=r"liger_losses\.patching\.lazy\.true_values\(logits\)"):
                loss.backward()
        else:
            results.append([loss, *torch.autograd.grad(loss, tensors)] if not reentrant else [loss])
    torch.testing.assert_close(results[-1], results[0])


def test_gradients_that_lead_nowhere():
    hidden_states, weight, *_ = problem()
    leaf = lazy_linear(hidden_states, weight).detach().requires_grad_()
    frozen = lazy_linear(hidden_states.detach(), weight.detach())
    given, _ = Halved.apply(WAYS["detach"], frozen, hidden_states)
    for logits in (leaf, given):
        for use in (lambda z: z.logsumexp(-1), lambda z: z.float(), true_values):
            with pytest.raises(RuntimeError, match=r"by requires_grad_\(\) or an autograd function"):
                use(logits)


class Summed(torch.autograd.Function):
    """Looks at the values, and not at the class."""

    @staticmethod
    def forward(ctx, logits):
        ctx.shape = logits.shape
        return true_values(logits).sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.shape)


def test_logits_that_were_changed_in_place_and_are_gone():
    *tensors, _ = problem()

    def loss():
        logits = lazy_linear(*tensors) * 1.0
        logits.mul_(2.0)
        return Summed.apply(logits)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        total = loss()
    gc.collect()
    with pytest.raises(RuntimeError, match="changed in place"):
        total.backward()
