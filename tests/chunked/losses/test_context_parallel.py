"""Losses of sequences that are cut over two processes: loss, metrics and gradients are those of one process."""

import pytest
import torch
import torch.distributed as dist

import liger_losses
from liger_losses import functional
from liger_losses.chunked.losses.unpaired import sum_and_number
from tests.losses import CE, DPO, ORPO, MiniLLM, SimPO
from tests.processes import BACKENDS, case_named, start
from tests.results.losses import batch

WORLD = 2
CUT = [4, 2]  # the first rank has the first four tokens of each sequence, the second the other two


def slices(rank):
    """A batch, or a rank's tokens of it: no tokens on one rank, or on neither."""
    d = batch()
    d["y"][0, CUT[0] :] = d["y"][1, : CUT[0]] = d["y"][3] = -100
    names = () if rank is None else ("h", "y", "logps")
    return {**d, **{name: d[name].split(CUT, 1)[rank].clone() for name in names}}


# --- What each process does -------------------------------------------------------------------------------------------


def check_functional(rank):
    """A loss of log-probabilities."""
    results = []
    for d, group in ((slices(None), None), (slices(rank), dist.group.WORLD)):
        logps, mask = d["logps"].double().requires_grad_(), d["y"] != -100
        options = {"loss_type": "grpo", "importance_sampling_level": "sequence", "old_logps": d["logps"] - 0.2}
        loss = functional.grpo_loss(logps, d["signs"], mask, group=group, beta=0.0, **options)
        loss.backward()
        results.append((loss.detach(), logps.grad))
    (expected, gradient), (found, cut) = results
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(cut, gradient.split(CUT, 1)[rank])


def check_means_of_processes(rank):
    """KTO's and BCO's, over processes with batches of different sizes: of all values, not of the processes' means."""
    values = torch.tensor([[1.0, 2.0, 3.0], [10.0]][rank])
    total, count = sum_and_number(values)
    assert float(total / count) == 4.0


def check_compiled(rank):
    """Under torch.compile, the call runs outside of the graph."""
    d, loss = slices(rank), SimPO(group=dist.group.WORLD)
    compiled = torch.compile(lambda hidden, labels: loss(d["weight"], hidden * 2, labels)[0] * 3, backend="eager")
    found = compiled(d["h"].requires_grad_(), d["y"])
    torch.testing.assert_close(found, loss(d["weight"], d["h"] * 2, d["y"])[0] * 3)
    found.backward()


def check_members(rank):
    group = dist.new_group([0])
    if rank:
        with pytest.raises(TypeError, match="this rank is a member"):
            ORPO(group=group)
    else:
        d = batch()
        losses = (ORPO(**options) for options in ({}, {"group": group}))
        torch.testing.assert_close(*(loss(d["weight"], d["h"], d["y"]) for loss in losses))


CHECKS = (check_functional, check_means_of_processes, check_compiled, check_members)


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


class Own(liger_losses.ChunkedLoss):
    def loss(self, statistics, mask):
        return -statistics.logp.sum()


def test_what_no_group_can_be_given_to(one_process):
    group, d, of_tokens = {"group": dist.group.WORLD}, batch(), (torch.zeros(2, 3), torch.ones(2), torch.ones(2, 3))
    for call, message in (
        (lambda: CE(shift=True, **group), "shift the labels before you cut the sequences, and pass"),
        (lambda: DPO(ld_alpha=0.5, **group), "ld_alpha depends on the position of tokens"),
        (lambda: MiniLLM(**group), "later tokens' rewards depends on the position of tokens"),
        (lambda: functional.grpo_loss(*of_tokens, loss_type="fipo", **group), "pass whole completions, and no group="),
        (lambda: functional.grpo_loss(*of_tokens, loss_type="kl_cov", **group), "pass whole completions, and no group"),
        (lambda: Own(**group)(d["weight"], d["h"], d["y"]), "Own defines loss"),
        (lambda: ORPO().replace(shift=True, **group), "shift=False"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
