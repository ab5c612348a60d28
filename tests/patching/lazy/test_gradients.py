"""Gradients that reach lazy logits by ways of the user's own."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F

from liger_losses.patching.lazy import lazy_linear, true_values
from tests.patching.lazy.test_tensor import LAZY, V, chosen, problem
from tests.reference import peak_bytes


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


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
def test_anomaly_detection():
    results = []
    for make in (F.linear, lazy_linear):
        *tensors, labels = problem()
        with torch.autograd.detect_anomaly():
            results.append(torch.autograd.grad(chosen(make(*tensors), labels), tensors))
            with pytest.raises(RuntimeError, match="returned nan values"):
                (chosen(make(*tensors), labels) * torch.nan).backward()
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore:.*needs the values")
def test_an_autograd_function_that_detaches_logits_which_get_values():
    *tensors, _ = problem()
    results = []
    for make in (F.linear, lazy_linear):
        logits = make(*tensors)
        passed, _ = Halved.apply(WAYS["detach"], logits, tensors[0])
        results.append(torch.autograd.grad(logits.exp().sum() + passed.sin().sum(), tensors))
    torch.testing.assert_close(*results)


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


class Dirty(torch.autograd.Function):
    """Says that it has changed the logits, and passes a third of their gradient back."""

    @staticmethod
    def forward(ctx, logits):
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 3


def test_logits_that_an_autograd_function_takes_in_place():
    """What is read of them afterwards has the gradient of its result."""
    *leaves, _ = problem()
    results = []
    for make in (F.linear, lazy_linear):
        logits = make(*leaves)
        before = torch.zeros_like(logits[..., 0]) if make is F.linear else logits.logsumexp(-1)
        total = before.sum() * 0 + Dirty.apply(logits).logsumexp(-1).sum()
        results.append(torch.autograd.grad(total, leaves))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("read", ["logits", "casts"])
def test_two_losses_add_up_their_gradients_in_place(read):
    """A third gradient of the weight is never in memory."""
    tokens, width, columns = 32, 256, 4000
    hidden, labels = torch.randn(tokens, width, requires_grad=True), torch.randint(columns, (tokens,))
    weight = torch.randn(columns, width, requires_grad=True)

    def gradients(linear):
        logits = linear(hidden, weight)
        one, two = (logits, logits) if read == "logits" else (logits.view(-1, columns), logits[:])
        total = F.cross_entropy(one, labels) + 1e-3 * two.logsumexp(-1).square().mean()
        return torch.autograd.grad(total, (hidden, weight))

    torch.testing.assert_close(gradients(lazy_linear), gradients(F.linear))
    assert peak_bytes(lambda: gradients(lazy_linear)) < 2.5 * weight.nbytes


def test_losses_of_the_same_logits_with_a_backward_each():
    """In any order, and with what was read before the first one; in-place sums reach no gradient that someone has."""
    *leaves, labels = problem()
    results = []
    for make in (F.linear, lazy_linear):
        logits = make(*leaves)
        one, two = chosen(logits, labels), logits.logsumexp(-1).square().sum()
        found = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (two, one)]
        kept = [[gradient.clone() for gradient in part] for part in found]
        found.append(torch.autograd.grad(logits.logsumexp(-1).sum() + chosen(logits, labels), leaves))
        torch.testing.assert_close(found[:2], [tuple(part) for part in kept], rtol=0, atol=0)
        results.append(found)
    torch.testing.assert_close(*results)


def test_a_gradient_of_logits_that_someone_keeps():
    """It starts several backwards, beside other losses of the same logits."""
    *leaves, labels = problem()
    logits = lazy_linear(*leaves)
    (gradient,) = torch.autograd.grad(chosen(logits, labels), logits, retain_graph=True)
    (expected, *_) = torch.autograd.grad(chosen(F.linear(*leaves), labels), leaves)
    for _ in range(2):
        other = logits.logsumexp(-1).sum()
        torch.autograd.grad([logits, other], leaves, [gradient, torch.ones_like(other)], retain_graph=True)
        found = torch.autograd.grad(logits, leaves, gradient, retain_graph=True)
        torch.testing.assert_close(found[0], expected)
