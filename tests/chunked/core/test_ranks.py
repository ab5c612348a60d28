"""Heads whose vocabulary two or four processes share: losses, metrics and gradients are those of a whole head."""

import os
import sys
import types
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from liger_losses import Head, LogitTransform, TokenSupport, linear_logps, linear_statistics, workspace
from liger_losses.chunked.core.ranks import Ranks
from liger_losses.integrations.megatron import OutputOptions, output_processor
from liger_losses.integrations.verl import linear_cross_entropy
from tests.processes import BACKENDS, case_named, start
from tests.results.losses import Part, batch

WORLD, CUTS = 4, {"two even": (15, 15), "two uneven": (23, 7), "four": (9, 1, 12, 8)}


def devices(parts):
    """Ranks with different devices choose by the smallest; a setting of one rank alone is an error where it is read."""
    rank, d, group = dist.get_rank(), batch(), dist.new_group(range(WORLD))
    rows = parts["four"].rows
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("liger_losses.chunked.core.plan.usual_bytes", lambda *_: 8000)
        patched.setattr("liger_losses.chunked.core.plan.device_memory", lambda device: 2**24 if rank == 1 else 0)
        head = Head(d["weight"][rows].clone().requires_grad_(), group=group)
        for _ in range(2):  # the second time, nothing is exchanged
            logps = linear_logps(d["h"], head, d["y"])
        torch.testing.assert_close(logps, linear_logps(d["h"], d["weight"], d["y"]))
        patched.setattr(type(head.ranks), "gather", None)
        assert head.ranks.least_memory(8, torch.device("cpu")) == 0
        patched.undo()
        with workspace(9000 + (rank == 1)), pytest.raises(ValueError, match="default workspace 9001"):
            linear_logps(d["h"], head, d["y"])
        with workspace(9000 + (rank == 1)):
            linear_logps(d["h"], head, d["y"], workspace=9000)


def partial_gradients(parts):
    """What verl and Megatron sum themselves: each rank's part of the hidden states' gradients."""
    d = batch()
    hidden, labels = d["h"].detach().requires_grad_(), d["y"].clamp(min=0)
    expected = linear_statistics(hidden, d["weight"], labels, ("logp", "entropy"), transform=LogitTransform(0.7))
    upstream = torch.arange(1.0, 1 + labels.numel()).cos().view_as(labels).to(hidden)
    (whole,) = torch.autograd.grad([expected.logp, expected.entropy], hidden, [upstream, -upstream])
    group = types.SimpleNamespace(size=lambda: 1)  # of a layer, where the vocabulary is whole
    whole_layer = types.SimpleNamespace(weight=d["weight"], tp_group=group)
    states, context = hidden.transpose(0, 1), OutputOptions(0.7, entropy=True)
    of_megatron = partial(output_processor, hidden_states=states, output_weight=None, labels=labels, context=context)
    for name, part in parts.items():
        rows = d["weight"][part.rows].detach().requires_grad_()
        with case_named(name):
            logps, entropy = linear_cross_entropy(hidden, rows, labels, 0.7, "none", part.group)
            torch.testing.assert_close((logps, entropy), (expected.logp.flatten(), expected.entropy.flatten()))
            (own,) = torch.autograd.grad([logps, entropy], hidden, [upstream.flatten(), -upstream.flatten()])
            dist.all_reduce(own, group=part.group)
            torch.testing.assert_close(own, whole)
            head = Head(rows, group=part.group)
            kept = TokenSupport(torch.stack([labels, (labels + 1) % len(d["weight"])], -1))
            each = [linear_logps(hidden, h, labels, support=kept) for h in (head, head.with_partial_gradients())]
            summed, own = (torch.autograd.grad(logps, hidden, upstream)[0] for logps in each)
            dist.all_reduce(own, group=part.group)
            torch.testing.assert_close(own, summed)
            layer = types.SimpleNamespace(weight=rows, tp_group=part.group)
            for output_layer in (whole_layer, layer):
                logps, entropy = of_megatron(output_layer=output_layer)
                torch.testing.assert_close((logps, entropy), (expected.logp, expected.entropy))
                (own,) = torch.autograd.grad([logps, entropy], hidden, [upstream, -upstream])
                torch.testing.assert_close(own, whole)
            # With sequence parallelism, Megatron's gather, here of one whole part, sums the ranks' gradients.
            gather = types.SimpleNamespace(gather_from_sequence_parallel_region=lambda hidden: hidden)
            layer.sequence_parallel = True
            with mock.patch.dict(sys.modules, {"megatron.core.tensor_parallel.mappings": gather}):
                found = of_megatron(output_layer=layer)
            own = torch.autograd.grad(found, hidden, [upstream, -upstream])[0].contiguous()
            dist.all_reduce(own, group=part.group)
            torch.testing.assert_close(own, whole)


CHECKS = (devices, partial_gradients)


def work(rank, checks):
    os.environ["TRITON_INTERPRET"] = "1"
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    cut = ("two even", "two uneven")[rank // 2]
    parts = {"four": Part.of(dist.group.WORLD, CUTS["four"]), cut: Part.of(pairs[rank // 2], CUTS[cut])}
    for run_check in checks:
        with case_named(run_check.__name__):
            run_check(parts)


def test_columns_of_other_ranks_are_spread():
    """Of tokens that all read one row, each waits for the others."""
    places, here = Ranks(rank=1, sizes=(50, 50)).local(torch.arange(100))
    assert places.tolist() == 2 * list(range(50))
    assert here.tolist() == [False] * 50 + [True] * 50


@pytest.mark.distributed
def test_a_shared_vocabulary_on_four_processes(tmp_path):
    """All cases in one start of the processes, which takes longer than they do."""
    start(work, WORLD, tmp_path, CHECKS)


def work_on_gpus(rank, checks):
    parts = {cut: Part.of(dist.group.WORLD, CUTS[cut]) for cut in ("two even", "two uneven")}
    for run_check in checks:
        with case_named(run_check.__name__):
            run_check(parts)


@pytest.mark.distributed
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_shared_vocabulary_on_two_gpus(tmp_path, backend):
    """In several tests, which may run at the same time."""
    start(work_on_gpus, 2, tmp_path, CHECKS[1:], backend=backend)
