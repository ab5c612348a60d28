"""Losses of sequences that are cut over two processes: loss, metrics and gradients are those of one process."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import liger_losses
from liger_losses import functional
from liger_losses.chunked.losses.unpaired import mean_over_processes
from tests.processes import BACKENDS, case_named, start
from tests.reference import tensors_of

WORLD, ROWS, LENGTH, HIDDEN, VOCAB = 2, 4, 9, 6, 13
CUT = 5  # the first rank has the first five tokens of each sequence, the second the other four
KINDS = torch.tensor([True, False, True, False])


def problem(rank=None):
    """Whole sequences, or a rank's slices of them; in float64."""
    g = torch.Generator().manual_seed(0)

    def states():
        return torch.randn(ROWS, LENGTH, HIDDEN, generator=g, dtype=torch.float64)

    labels = torch.randint(VOCAB, (ROWS, LENGTH), generator=g)
    labels[torch.rand(ROWS, LENGTH, generator=g) < 0.3] = -100
    labels[0, CUT:] = labels[1, :CUT] = labels[3] = -100  # no tokens on one rank, or on neither
    top = torch.randn(ROWS, LENGTH, VOCAB, generator=g, dtype=torch.float64).log_softmax(-1).topk(3)
    cut = {
        "hidden": states(),
        "ref_hidden": states(),
        "labels": labels,
        "nll_labels": labels.where(torch.rand(ROWS, LENGTH, generator=g) < 0.8, 1),
        "token_weights": torch.rand(ROWS, LENGTH, generator=g, dtype=torch.float64),
        "logps": -torch.rand(ROWS, LENGTH, generator=g, dtype=torch.float64) * 3,
        "old_logps": torch.randn(ROWS, LENGTH, generator=g, dtype=torch.float64) / 4,
        "token_advantages": torch.randn(ROWS, LENGTH, generator=g, dtype=torch.float64),
        "teacher_logps": top.values,
        "teacher_indices": top.indices,
    }
    whole = {
        "weight": torch.randn(VOCAB, HIDDEN, generator=g, dtype=torch.float64),
        "bias": torch.randn(VOCAB, generator=g, dtype=torch.float64),
        "ref_weight": torch.randn(VOCAB, HIDDEN, generator=g, dtype=torch.float64),
        "class_weights": torch.rand(VOCAB, generator=g, dtype=torch.float64),
        "advantages": torch.randn(ROWS, generator=g, dtype=torch.float64),
        "sums": torch.randn(ROWS, generator=g, dtype=torch.float64),
    }
    # Close to the policy, whose ratios of whole completions are near 1.
    logps = (cut["hidden"] @ whole["weight"].t() + whole["bias"]).log_softmax(-1)
    cut["old_logps"] += logps.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    if rank is not None:
        cut = {name: value.split([CUT, LENGTH - CUT], 1)[rank].clone() for name, value in cut.items()}
    p = SimpleNamespace(**cut, **whole)
    for tensor in (p.hidden, p.weight, p.bias):
        tensor.requires_grad_()
    return p


# --- Losses, and how each is called -----------------------------------------------------------------------------------


def build(name, **options):
    return functools.partial(getattr(liger_losses, f"LigerFusedLinear{name}Loss"), **options)


def shared(name, **options):
    """A loss of sequences that both processes share."""
    return build(name, group=dist.group.WORLD, **options)()


def numbers(found):
    """All tensors of a result, detached."""
    return [tensor.detach().clone() for tensor in tensors_of(found)]


# --- What each process does -------------------------------------------------------------------------------------------


def check_functional(rank):
    """A loss of log-probabilities."""
    results = []
    for p, group in ((problem(), None), (problem(rank), dist.group.WORLD)):
        logps, mask = p.logps.requires_grad_(), p.labels != -100
        options = {"loss_type": "grpo", "importance_sampling_level": "sequence", "old_logps": p.old_logps}
        loss = functional.grpo_loss(logps, p.advantages, mask, group=group, **options)
        loss.backward()
        results.append((loss.detach(), logps.grad))
    (expected, gradient), (found, cut) = results
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(cut, gradient.split([CUT, LENGTH - CUT], 1)[rank], check_dtype=False)


def check_means_of_processes(rank):
    """KTO's and BCO's, over processes with batches of different sizes: of all values, not of the processes' means."""
    values = torch.tensor([[1.0, 2.0, 3.0], [10.0]][rank])
    assert mean_over_processes(values).item() == 4.0


def check_averaged_gradients(rank):
    """DDP averages over the group: the loss is multiplied by its size."""
    gradients = []
    for p, group in ((problem(), None), (problem(rank), dist.group.WORLD)):
        torch.manual_seed(0)
        layer = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        model = layer if group is None else nn.parallel.DistributedDataParallel(layer)
        loss, _ = build("ORPO", group=group)()(p.weight, model(p.hidden), p.labels)
        (loss * (1 if group is None else dist.get_world_size(group))).backward()
        gradients.append(layer.weight.grad)
    torch.testing.assert_close(*gradients)


def check_compiled(rank):
    """Under torch.compile, the call runs outside of the graph."""
    p = problem(rank)
    loss = shared("SimPO")
    compiled = torch.compile(lambda hidden, labels: loss(p.weight, hidden * 2, labels)[0] * 3, backend="eager")
    found = compiled(p.hidden, p.labels)
    torch.testing.assert_close(found, loss(p.weight, p.hidden * 2, p.labels)[0] * 3)
    found.backward()


def check_members(rank):
    group = dist.new_group([0])
    if rank:
        with pytest.raises(TypeError, match="this rank is a member"):
            build("ORPO", group=group)()
    else:
        values = []
        for options in ({}, {"group": group}):
            loss, metrics = build("ORPO", **options)()(*(getattr(problem(), x) for x in ("weight", "hidden", "labels")))
            values.append(numbers([loss, metrics]))
        torch.testing.assert_close(*values)


CHECKS = (
    check_functional,
    check_means_of_processes,
    check_averaged_gradients,
    check_compiled,
    check_members,
)


def work(rank):
    for check in CHECKS:
        with case_named(check.__name__):
            check(rank)


@pytest.mark.distributed
@pytest.mark.parametrize("backend", BACKENDS)
def test_slices_of_sequences_on_two_processes(tmp_path, backend):
    """In one start of the processes. Losses, metrics and gradients: tests/results/test_ranks.py."""
    start(work, WORLD, tmp_path, backend=backend)


# --- Options ----------------------------------------------------------------------------------------------------------


def test_what_no_group_can_be_given_to(one_process):
    group = dist.group.WORLD
    with pytest.raises(ValueError, match=r"shift the labels before you cut the sequences, and pass"):
        build("CrossEntropy", group=group)(shift=True)
    with pytest.raises(ValueError, match="ld_alpha depends on the position of tokens"):
        build("DPO", group=group)(ld_alpha=0.5)
    with pytest.raises(ValueError, match="later tokens' rewards depends on the position of tokens"):
        build("MiniLLM", group=group)()

    class Own(liger_losses.ChunkedLoss):
        def loss(self, statistics, mask):
            return -statistics.logp.sum()

    p = problem()
    with pytest.raises(ValueError, match="Own defines loss"):
        Own(group=group)(p.weight, p.hidden, p.labels)
    loss = build("ORPO")()
    loss.group = group
    with pytest.raises(ValueError, match="shift=False"):
        loss.shift = True
    with pytest.raises(TypeError, match=r"mesh\['cp'\]\.get_group\(\)"):
        build("ORPO", group="cp")()
