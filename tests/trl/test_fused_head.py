"""The forward of a model with TRL's fused head: its contract, the function that trainers share, and what is refused."""

import contextlib
import copy
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from liger_losses.trl import enabled
from liger_losses.trl.fused_head import add_fused_lm_head
from tests.models import ids_and_labels, small, tiny_model
from tests.processes import start
from tests.trl.trainers import trl

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
#: The slices that torch's context parallelism gives its two ranks.
SLICES = torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]])


def batch(cut=None, empty=False):
    """Ids and labels, and of a slice, labels that were shifted before."""
    ids, labels = ids_and_labels(3, 19, 3, 8)
    if cut is None:
        return {"input_ids": ids, "labels": labels}
    if empty:
        labels[:, SLICES[1]] = -100
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    found = {"input_ids": ids, "shift_labels": shifted, "position_ids": torch.arange(8).expand_as(ids)}
    return {name: value[:, cut].clone() for name, value in found.items()}


def with_heads(model, outputs=OUTPUTS, **options):
    """The model with TRL's head, and with ours in its place."""
    for add in (trl.trainer.utils.add_fused_lm_head, add_fused_lm_head):
        other = copy.deepcopy(model)
        add(other, outputs=outputs, **options)
        yield other


def gradients(loss, model):
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


INPUTS = {
    "labels": batch(),
    "labels that were shifted": batch(SLICES[0]),
    "both": batch(SLICES[1]) | {"labels": batch()["labels"][:, SLICES[1]]},
}


@pytest.mark.parametrize("experts", [{}, {"num_local_experts": 4, "output_router_logits": True}])
@pytest.mark.parametrize(("inputs", "temperature"), [("labels", 1.0), ("labels that were shifted", 0.7), ("both", 0.9)])
def test_the_contract_of_the_head(inputs, temperature, experts):
    model = small("Mixtral" if experts else "Llama", vocab_size=20, router_aux_loss_coef=0.5, **experts)
    results = []
    for one in with_heads(model, temperature=temperature):
        found = one(**INPUTS[inputs], fused_lm_head=True)
        weights = torch.linspace(0.5, 1.5, found.log_probs.numel()).view_as(found.log_probs)
        total = found.loss + (weights * (found.log_probs + found.entropy)).sum()
        values = {name: getattr(found, name).float() for name in (*OUTPUTS, "loss", "label_mask")}
        results.append((values, gradients(total, one)))
    torch.testing.assert_close(*results[::-1], rtol=1e-4, atol=1e-5)


def sequence_parallel(rank):
    """The loss that transformers makes of the ranks' losses, for Ulysses sequence parallelism through DeepSpeed."""
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    utils = ModuleType("deepspeed.utils")
    utils.groups = SimpleNamespace(_get_sequence_parallel_group=lambda: dist.group.WORLD)
    config = SimpleNamespace(sp_backend="deepspeed", sp_size=2)
    with mock.patch.dict(sys.modules, {"deepspeed": ModuleType("deepspeed"), "deepspeed.utils": utils}):
        for empty in (False, True):
            results, inputs = [], batch(SLICES[rank], empty) | {"fused_lm_head": True}
            for model in with_heads(tiny_model()[0]):
                loss, outputs = deepspeed_sp_compute_loss(None, model, inputs, True, config)
                results.append((loss.detach(), outputs.log_probs.detach(), gradients(loss, model)))
            torch.testing.assert_close(*results[::-1], rtol=1e-4, atol=1e-5)
            assert results[0][0] > 1


@pytest.mark.distributed
def test_sequence_parallelism_on_two_processes(tmp_path):
    start(sequence_parallel, 2, tmp_path)


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
@pytest.mark.parametrize("outputs", [("log_probs", "entropy"), ("log_probs", "entropy", "log_sum_sq_probs", "is_top1")])
def test_the_function_that_trls_trainers_share(outputs, dtype, autocast):
    """With a bias, a temperature, a scale and a soft-cap, and entropies in the loss."""
    theirs = trl.trainer.utils._ChunkedLogProbFunction
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(*shape, generator=g) for shape in ((9, 16), (41, 16), (41,))]
    targets, results = torch.randint(41, (9,), generator=g), []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for on in (False, True):
            leaves = [t.requires_grad_() for t in (made[0].to(dtype), *made[1:])]
            with enabled() if on else contextlib.nullcontext():
                function = trl.trainer.utils._ChunkedLogProbFunction
                assert (function is theirs) is not on
                found = function.apply(*leaves, targets, 0.7, 32768, 5.0, 1.3, outputs)
            total = sum((torch.linspace(0.5, 1.5, 9) * values).sum() for values in found[:2])
            kept = [None if values is None else values.detach() for values in found]
            results.append([*kept, *(gradient.float() for gradient in torch.autograd.grad(total, leaves))])
    half = autocast or dtype == torch.bfloat16
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
    own = model.forward
    add_fused_lm_head(model)
    assert model.forward is own  # again, it is as it was
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
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Softmax(-1))
    model.lm_head.weight = model.lm_head[0].weight
    said = pytest.warns(RuntimeWarning, match="a Sequential, computes its logits")
    with said, pytest.raises(TypeError, match="must be its last layer's"):
        model(input_ids=ids, labels=ids, fused_lm_head=True)
