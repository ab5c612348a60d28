"""Gradients that reach lazy logits by ways of the user's own."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F

from liger_losses.patching.lazy import lazy_linear, true_values
from tests.patching.lazy.test_tensor import LAZY, B, T, V, chosen, problem


class Halved(torch.autograd.Function):
    """Passes logits on beside another tensor, and half of their gradient back."""

    @staticmethod
    def forward(ctx, way, logits, other):
        return way(logits), other.clone()

    @staticmethod
    def backward(ctx, gradient, other):
        return None, gradient / 2, other


#: Ways in which an autograd function may pass something on, and what is done with it then.
WAYS = {
    "detach": lambda z: z.detach(),
    "clone": lambda z: z.clone(),
    "product": lambda z: z * 1,
    "slice": lambda z: z[:],
    "view": lambda z: z.view(B, T, V),
    "two steps": lambda z: z[:, :].double().clone(),
}
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
