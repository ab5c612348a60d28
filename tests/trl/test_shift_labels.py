"""Labels that the caller has shifted: in models, in TRL's head, and in trainers that cut sequences over processes."""

import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.processes import start
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


def sequence_parallel(rank):
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


@pytest.mark.distributed
def test_sequence_parallelism_on_two_processes(tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed")
    start(sequence_parallel, WORLD, tmp_path)
