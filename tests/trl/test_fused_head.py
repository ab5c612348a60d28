"""The forward of a model with TRL's fused head: its contract, the function that trainers share, and what is refused."""

import contextlib
import copy

import pytest
import torch

from liger_losses.trl import enabled
from liger_losses.trl.fused_head import add_fused_lm_head
from tests.models import small
from tests.project.test_examples import tiny_model
from tests.trl.trainers import trl


def forward_outputs(model, ids, labels, outputs, add, **options):
    model = copy.deepcopy(model)
    add(model, outputs=outputs, **options)
    found = model(input_ids=ids, labels=labels, fused_lm_head=True)
    weights = torch.linspace(0.5, 1.5, found.log_probs.numel()).view_as(found.log_probs)
    total = found.loss + (weights * found.log_probs).sum()
    if found.entropy is not None:
        total = total + (weights * found.entropy).sum()
    total.backward()
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("experts", [{}, {"num_local_experts": 4, "output_router_logits": True}])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_contract_of_the_head(temperature, experts):
    model = small("Mixtral" if experts else "Llama", vocab_size=20, router_aux_loss_coef=0.5, **experts)
    ids = torch.randint(3, 19, (3, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.rand(3, 9, generator=torch.Generator().manual_seed(1)) < 0.4, -100)
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    expected = forward_outputs(
        model, ids, labels, outputs, trl.trainer.utils.add_fused_lm_head, temperature=temperature
    )
    found = forward_outputs(model, ids, labels, outputs, add_fused_lm_head, temperature=temperature)
    for name in (*outputs, "loss", "label_mask"):
        a, b = getattr(expected[0], name), getattr(found[0], name)
        torch.testing.assert_close(b, a.to(b.dtype), rtol=1e-4, atol=1e-5, msg=name)
    assert expected[1].keys() == found[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("dtype", "of_weight", "autocast"),
    [
        (torch.float32, torch.float32, None),
        (torch.bfloat16, torch.float32, None),
        (torch.float32, torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("outputs", [("log_probs", "entropy"), ("log_probs", "entropy", "log_sum_sq_probs", "is_top1")])
def test_the_function_that_trls_trainers_share(outputs, dtype, of_weight, autocast):
    """With a bias, a temperature, a scale and a soft-cap, and entropies in the loss."""
    theirs = trl.trainer.utils._ChunkedLogProbFunction
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(*shape, generator=g) for shape in ((9, 16), (41, 16), (41,))]
    targets, results = torch.randint(41, (9,), generator=g), []
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        for on in (False, True):
            leaves = [t.to(d).requires_grad_() for t, d in zip(made, (dtype, of_weight, of_weight), strict=True)]
            with enabled() if on else contextlib.nullcontext():
                function = trl.trainer.utils._ChunkedLogProbFunction
                assert (function is theirs) is not on
                found = function.apply(*leaves, targets, 0.7, 32768, 5.0, 1.3, outputs)
            total = sum((torch.linspace(0.5, 1.5, 9) * values).sum() for values in found[:2])
            kept = [None if values is None else values.detach() for values in found]
            results.append([*kept, *(gradient.float() for gradient in torch.autograd.grad(total, leaves))])
    half = torch.bfloat16 in (dtype, autocast)
    for theirs, ours in zip(*results, strict=True):
        assert (theirs is None) == (ours is None)
        if ours is not None:
            assert (ours.float() - theirs.float()).norm() <= (0.02 if half else 1e-5) * theirs.float().norm()


def test_the_forward_without_it_is_the_models_own():
    model, _, _ = tiny_model()
    ids = torch.randint(3, 19, (2, 7))
    with torch.no_grad():
        before = model(input_ids=ids, labels=ids)
        generated = model.generate(ids, max_new_tokens=4, do_sample=False)
        add_fused_lm_head(model)
        model(input_ids=ids, labels=ids, fused_lm_head=True)
        after = model(input_ids=ids, labels=ids)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), generated)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.loss, after.loss)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.mul_(2.0)
        a, b = (m(input_ids=ids, labels=ids, fused_lm_head=True).loss for m in (model, other))
    assert a != b


def test_models_it_cannot_serve_are_refused():
    model, _, _ = tiny_model()
    ids = torch.randint(3, 19, (2, 7))
    add_fused_lm_head(model)
    with pytest.raises(ValueError, match="needs labels"):
        model(input_ids=ids, fused_lm_head=True)
    inner = model.lm_head
    model.lm_head = torch.nn.Sequential(inner, torch.nn.Softmax(-1))
    model.lm_head.weight = inner.weight
    with (
        pytest.raises(TypeError, match="must be its last layer's"),
        pytest.warns(RuntimeWarning, match="a Sequential, computes its logits"),
    ):
        model(input_ids=ids, labels=ids, fused_lm_head=True)
