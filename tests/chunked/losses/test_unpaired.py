"""KTO, APO-zero and BCO on single completions, beside their golden results."""

from functools import partial

import pytest
import torch

from liger_losses import Completions
from tests.losses import BCO, DPO, KTO
from tests.reference import plain_statistics
from tests.results.losses import batch

B = 5


def problem(seed=0, rows=B):
    """Hidden states, weight, labels, reference hidden states and weight, and which completions are desirable."""
    d = batch(rows=rows, length=9, seed=seed)
    hidden, weight = (d[name].requires_grad_() for name in ("h", "weight"))
    return hidden, weight, d["y"], d["other"], d["ref_weight"], d["signs"] > 0


def sums(hidden, weight, labels):
    return plain_statistics(hidden, weight, labels)["logp"].sum(-1)


def test_the_divergence_is_never_negative_and_may_be_logged():
    hidden, weight, labels, ref_hidden, ref_weight, desirable = problem()
    call = partial(KTO(use_ref_model=True), weight, Completions(hidden, labels, ref_hidden), ref_weight=ref_weight)
    for sign in (1.0, -1.0):
        mismatched = Completions(hidden.detach(), labels, ref_logps=sums(hidden, weight, labels).detach() - sign)
        kl = KTO(use_ref_model=True).divergence(weight, mismatched)
        torch.testing.assert_close(kl, torch.tensor(max(sign, 0.0), dtype=kl.dtype))
        logged, number, computed = (
            call(preference_labels=desirable, **given)[0]
            for given in ({"kl": kl}, {"kl": float(kl)}, {"kl_completions": mismatched})
        )
        torch.testing.assert_close((logged, number), (computed, computed))


def test_the_running_shift_counts_every_training_batch_once():
    """But what says nothing: batches without completions, and rewards without an end."""
    module, means = BCO(beta=0.5), []
    for seed in range(3):
        hidden, weight, labels, _, _, desirable = problem(seed)
        refs, marks = torch.zeros(B), {"preference_labels": desirable}
        means.append((0.5 * sums(hidden, weight, labels)).mean())
        module(weight, Completions(hidden, labels, ref_logps=refs), **marks)
        torch.testing.assert_close(module.running_shift.double(), torch.stack(means).mean().detach(), rtol=1e-5, atol=0)
    before = module.running_shift.clone()
    endless = torch.where(torch.arange(B) == 0, -torch.inf, 0.0)
    module(weight, Completions(hidden, labels, ref_logps=endless), **marks)
    module(weight, Completions(hidden[:0], labels[:0], ref_logps=refs[:0]), preference_labels=desirable[:0])
    with torch.inference_mode():
        loss, _ = module.eval()(weight, Completions(hidden, labels, ref_logps=refs), **marks)
    assert (module.running_shift, module.batches) == (before, 3)
    restored = BCO(beta=0.5)
    restored.load_state_dict(module.state_dict())
    assert restored.eval()(weight, Completions(hidden, labels, ref_logps=refs), **marks)[0] == loss
    module.train()(weight, Completions(hidden, labels, ref_logps=refs), **marks)[0].backward()
    assert module.batches == 4  # also if it is the same batch


@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("marked", [True, False])
def test_batches_of_one_kind_and_empty_ones(marked, rows):
    hidden, weight, labels, *_ = problem(rows=rows)
    for module, extra in ((KTO(), {"kl": 0.1}), (BCO(use_ref_model=False), {})):
        loss, metrics = module(weight, (hidden, labels), preference_labels=torch.full((rows,), marked), **extra)
        assert all(v.isfinite().all() for v in (loss, *metrics, *torch.autograd.grad(loss, (hidden, weight))))
        assert loss == 0 or rows
    pairs = DPO(use_ref_model=False)(weight, hidden[:0], labels[:0])
    assert all(value == 0 for value in (pairs[0], *torch.autograd.grad(pairs[0], weight)[0].unique()))
