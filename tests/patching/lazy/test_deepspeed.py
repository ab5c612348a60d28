"""Lazy logits under the hooks of DeepSpeed, which these tests imitate; tests/trl/test_zero.py has the real ones."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from tests.patching.lazy.test_deferred import both, computed_rows


def engine_hook(events, steps):
    """As the one that DeepSpeed's engine registers on all that the model returns."""

    def backward_hook(gradient):
        events.append("begin")
        return gradient / steps

    return backward_hook


def gathers(events):
    """As the function that DeepSpeed applies to a module's output, to gather its weights for its backward."""

    class PreBackward(torch.autograd.Function):
        @staticmethod
        def forward(logits):
            return logits.detach()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *gradients):
            events.append("gather")
            return gradients

    return PreBackward.apply


@pytest.mark.parametrize("frozen", [False, True])
def test_logits_stay_lazy_under_the_hooks_of_deepspeed(frozen):
    """Its engine begins the backward, then the head's weights are gathered, then parameters get their gradients."""
    plain, ours = both()
    ids = torch.randint(97, (3, 7), generator=torch.Generator().manual_seed(0))
    for model in (plain, ours):
        model.lm_head.weight.requires_grad_(not frozen)
    events = []
    for parameter in ours.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    F.cross_entropy(plain(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).div(4).backward()
    with computed_rows() as rows:
        logits = gathers(events)(ours(input_ids=ids).logits)
        with torch.no_grad():
            logits.argmax(-1)  # the gradient must come all the same
        rows.clear()
        logits.register_hook(engine_hook(events, 4))
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert not rows
    assert events[:2] == ["begin", "gather"]
    assert set(events[2:]) == {"gradient"}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, msg=name)
