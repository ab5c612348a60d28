"""Distillation beside its golden results: digits close to the teacher, TRL's divergences, and wrong inputs."""

import pytest
import torch
import torch.nn.functional as F

from liger_losses import Teacher
from tests.losses import JSD
from tests.results.losses import batch


def problem():
    """Hidden states, weight and bias of the student, labels, and the teacher's."""
    d = batch(torch.float32)
    return (
        *(d[name].requires_grad_() for name in ("h", "weight", "bias")),
        d["y"],
        d["other"],
        d["ref_weight"],
        d["bias"],
    )


@pytest.mark.parametrize("over", ["all", "largest"])
def test_weights_of_tokens(over):
    """Which may be anything at masked ones; ``shift`` moves them with the labels."""
    hidden, weight, _, labels, *teacher = problem()
    g, (b, t) = torch.Generator().manual_seed(0), labels.shape
    weights = torch.rand(b, t, generator=g).masked_fill_(labels < 0, torch.nan)
    weights[:, 3] = 0.0
    loss = JSD(0.4, 0.6, **({"top_k": 7, "tail": "renormalize"} if over == "largest" else {}))
    call = lambda loss, *given, **more: loss(weight, hidden, *given, Teacher(*teacher[:2]), **more)  # noqa: E731
    each = [torch.where(torch.arange(b * t).view(b, t) == i, labels, -100) for i in range(b * t)]
    parts = [call(loss, one, num_items_in_batch=(labels >= 0).sum())[0] for one in each]
    kept = [w * part for w, part in zip(weights.flatten(), parts, strict=True) if not w.isnan()]
    value, metrics = call(loss, labels, token_weights=weights)
    torch.testing.assert_close(value, torch.stack(kept).sum())
    torch.testing.assert_close(metrics, call(loss, labels)[1])
    grads = torch.autograd.grad(value, (hidden, weight))
    torch.testing.assert_close(grads, torch.autograd.grad(torch.stack(kept).sum(), (hidden, weight)))
    before, of_before = (F.pad(x[:, :-1], (1, 0), value=fill) for x, fill in ((labels, -100), (weights, 0.0)))
    shifted = call(loss.replace(shift=True), before, token_weights=of_before)[0]
    last = labels.clone()
    last[:, -1] = -100
    torch.testing.assert_close(shifted, call(loss, last, token_weights=weights)[0])


def test_token_scaling_of_distillation():
    hidden, weight, _, labels, *teacher = problem()
    for options in (
        {"token_scaling": "entropy"},
        {"token_scaling": "probability", "top_k": 3},
        {"weight_hard_loss": 0.0, "token_scaling": "probability"},
    ):
        with pytest.raises(ValueError, match="token_scaling="):
            JSD(**options)(weight, hidden, labels, Teacher(*teacher[:2]))
