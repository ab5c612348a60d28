"""Labels that the caller has shifted: in models, in TRL's head, and in trainers that cut sequences over processes."""

import contextlib
import copy
import functools
import os
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from liger_losses import LigerFusedLinearCrossEntropyLoss, loss_inputs, patch
from tests.processes import case_named, start
from tests.project.test_examples import tiny_model

pytest.importorskip("transformers", reason="transformers is not installed")

WORLD, LENGTH = 2, 8
#: The slices that torch's context parallelism gives its two ranks.
SLICES = torch.tensor([[0, 1, 6, 7], [2, 3, 4, 5]])


def batch(cut=None, empty=False):
    """Ids, and labels that were shifted before the sequences were cut."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 19, (3, LENGTH), generator=g)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.3, -100)
    if empty:
        labels[:, SLICES[1]] = -100
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    positions = torch.arange(LENGTH).expand_as(ids)
    found = {"input_ids": ids, "labels": labels, "shift_labels": shifted, "position_ids": positions}
    return found if cut is None else {name: value[:, cut].clone() for name, value in found.items()}


def gradients(loss, model):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": torch.tensor(7)}], ids=["mean", "items"])
def test_patched_models(options):
    model, *_ = tiny_model()
    patched = copy.deepcopy(model)
    assert patch(patched).counts
    for cut in SLICES:
        inputs = batch(cut) | options
        found, expected = (m(**inputs).loss for m in (patched, model))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients(found, patched), gradients(expected, model), rtol=1e-4, atol=1e-6)
        assert not torch.isclose(expected, model(**inputs | {"shift_labels": None}).loss)


def test_loss_inputs():
    model, *_ = tiny_model()
    for cut in SLICES:
        inputs = batch(cut)
        found = LigerFusedLinearCrossEntropyLoss()(*loss_inputs(model, **inputs))
        torch.testing.assert_close(found, model(**inputs).loss, rtol=1e-5, atol=1e-6)
        del inputs["labels"]
        assert torch.equal(loss_inputs(model, **inputs).labels, inputs["shift_labels"])


# --- TRL --------------------------------------------------------------------------------------------------------------


def heads():
    """A model with TRL's head, and one with ours in its place."""
    from trl.trainer.utils import add_fused_lm_head as plain_head

    from liger_losses.trl.fused_head import add_fused_lm_head

    outputs = ("log_probs", "entropy", "is_top1")
    for add in (plain_head, add_fused_lm_head):
        model, *_ = tiny_model()
        add(model, outputs=outputs, temperature=0.9)
        yield model


def check_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_trls_head():
    pytest.importorskip("trl", reason="TRL is not installed")
    plain, *ours = heads()
    for labelled, cut in enumerate(SLICES):
        inputs = batch(cut)
        if not labelled:  # as asynchronous GRPO calls it
            del inputs["labels"]
        expected = plain(**inputs, fused_lm_head=True)
        for model in ours:
            found = model(**inputs, fused_lm_head=True)
            for name in ("loss", "log_probs", "entropy", "is_top1", "label_mask"):
                check_close(getattr(found, name), getattr(expected, name))
            for loss in ("loss", "log_probs"):
                pair = [(getattr(m(**inputs, fused_lm_head=True), loss).sum(), m) for m in (model, plain)]
                check_close(*(gradients(*part) for part in pair))


class Gathered(torch.autograd.Function):
    """All ranks' tensors, stacked."""

    @staticmethod
    def forward(ctx, value):
        parts = [torch.empty_like(value) for _ in range(WORLD)]
        dist.all_gather(parts, value.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient[dist.get_rank()]


def attention(plain, q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, **options):
    """Causal attention of one rank's slices to the whole sequences: torch's has no operator for CPUs."""
    assert is_causal
    assert attn_mask is None
    chunks = torch.arange(q.shape[2] * WORLD).chunk(2 * WORLD)
    positions = torch.stack([torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(WORLD)])
    order = positions.flatten().argsort()
    k, v = (torch.cat(tuple(Gathered.apply(x)), 2)[:, :, order] for x in (k, v))
    mask = positions[dist.get_rank()][:, None] >= torch.arange(len(order))
    return plain(q, k, v, attn_mask=mask, **options)


@contextlib.contextmanager
def with_attention(context, **buffers):
    """The context in which torch cuts the inputs, with :func:`attention`."""
    plain = F.scaled_dot_product_attention
    with context(**buffers), mock.patch.object(F, "scaled_dot_product_attention", functools.partial(attention, plain)):
        yield


def trained(folder, setup=lambda: None, **options):
    """Losses and metrics of SFT steps, and the weights after them; ``setup`` runs before the first."""
    import datasets
    import trl

    from tests.trl.trainers import settings

    model, tokenizer, text = tiny_model()
    rows = [{"prompt": text(3), "completion": text(2 + i % 5)} for i in range(16)]
    trainer = trl.SFTTrainer(
        model,
        settings(trl.SFTConfig, folder, pad_to_multiple_of=2 * WORLD, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    setup()
    trainer.train()
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
    history = [[step[name] for name in names] for step in trainer.state.log_history if "loss" in step]
    return history, {name: value.detach().clone() for name, value in model.named_parameters()}


def trained_enabled(*arguments, **options):
    """The same with this library's head, which got shifted labels at every step."""
    from liger_losses.trl import enabled, fused_head

    seen, forward = [], fused_head.fused_forward

    def recorded(*arguments, **keywords):
        seen.append(keywords.get("shift_labels") is not None)
        return forward(*arguments, **keywords)

    with enabled(), mock.patch.object(fused_head, "fused_forward", recorded):
        found = trained(*arguments, **options)
    assert all(seen)
    assert len(seen) == len(found[0]) > 1
    return found


def context_parallel(rank, folder):
    """``ParallelismConfig(cp_size=2)``; DDP averages where FSDP2 would."""
    from accelerate import Accelerator, ParallelismConfig

    def prepared(self, *arguments, prepare=Accelerator._prepare_cp):
        found = prepare(self, *arguments)
        self._cp_context = functools.partial(with_attention, self._cp_context)
        return found

    with (
        mock.patch.object(ParallelismConfig, "_validate_accelerator", return_value=None),  # which refuses CPUs
        mock.patch.object(Accelerator, "_prepare_cp", prepared),
    ):
        options = {"parallelism_config": ParallelismConfig(cp_size=WORLD)}
        check_close(trained_enabled(folder, **options), trained(folder, **options))


def sequence_parallel(rank, folder):
    """The loss that transformers makes of the ranks' losses, for Ulysses sequence parallelism through DeepSpeed."""
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    groups = SimpleNamespace(_get_sequence_parallel_group=lambda: dist.group.WORLD)
    utils = ModuleType("deepspeed.utils")
    utils.groups = groups
    config = SimpleNamespace(sp_backend="deepspeed", sp_size=WORLD)
    models = list(heads())
    with mock.patch.dict(sys.modules, {"deepspeed": ModuleType("deepspeed"), "deepspeed.utils": utils}):
        for empty in (False, True):
            found = []
            for model in models:
                inputs = batch(SLICES[rank], empty)
                del inputs["labels"]  # as DeepSpeed's loader does
                inputs = inputs | {"fused_lm_head": True}
                loss, outputs = deepspeed_sp_compute_loss(None, model, inputs, True, config)
                found.append((loss.detach(), outputs.log_probs.detach(), gradients(loss, model)))
            for other in found[1:]:
                check_close(other, found[0])
            assert found[0][0] > 1


def environment(rank, port=0):
    """What accelerate reads."""
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in found.items()}


def work(rank, folder):
    environment(rank)
    for check in (sequence_parallel, context_parallel):
        with case_named(check.__name__):
            check(rank, folder)


@pytest.mark.distributed
def test_trainers_on_two_processes(tmp_path):
    """In one start of the processes."""
    pytest.importorskip("trl", reason="TRL is not installed")
    pytest.importorskip("datasets", reason="datasets is not installed")
    start(work, WORLD, tmp_path, tmp_path)
