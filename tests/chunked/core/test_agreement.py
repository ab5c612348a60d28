"""Ranks that are about to make different calls: all raise an error, within a timeout, that lists what each makes."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from liger_losses import Head, functional, linear_logps, linear_statistics, linear_token_loss
from liger_losses.chunked.core import agreement, ranks
from liger_losses.chunked.core.agreement import CHECK_VARIABLE, RankError, agree, checksum
from tests.losses import CE, DPO, GRPO
from tests.processes import case_named, start
from tests.results.losses import VOCAB, Part, batch, policy, support


def test_a_checksum_depends_on_every_entry_and_its_place():
    for dtype in (torch.int64, torch.int32, torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16):
        values = (torch.arange(3000) % 7 == 0).to(dtype)
        whole = checksum(values)
        assert checksum(values.view(3, 1000).mT.contiguous().mT) == whole
        for i, j in ((0, 1), (0, 1009), (7, 1016 + 1009), (0, 2**11)):
            swapped = values.clone()
            swapped[[i, j]] = swapped[[j, i]]
            assert (checksum(swapped) == whole) == (values[i] == values[j])
        changed = values.clone()
        changed[2017] = changed[2017] == 0
        assert checksum(changed) != whole


class Group:
    """A rank of a process group, in a thread of this process."""

    def __init__(self, store, rank):
        self.store, self.number = store, rank

    def get_group_store(self):
        return self.store

    def rank(self):
        return self.number

    def size(self):
        return 2


def test_a_group_that_is_made_again_reads_nothing_of_the_former_one():
    """The store may be the same, and the keys of the last comparisons are in it."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))
    for text in ("first\n", "second\n"):
        with ThreadPoolExecutor(2) as threads:
            # The second rank comes later.
            first = threads.submit(agreement.compare, Group(store, 0), text)
            time.sleep(0.3)
            threads.submit(agreement.compare, Group(store, 1), text).result()
            first.result()


def counted(patched, store):
    """How often this process reads from the store, and how many collectives it begins."""
    counts, names = {"comparisons": 0, "collectives": 0}, ("all_reduce", "all_gather", "broadcast", "barrier")
    of_dist = [(dist, name) for name in names] + [(agreement, "all_gather"), (ranks, "all_gather")]
    for what, (owner, name) in (("comparisons", (type(store), "wait")), *(("collectives", place) for place in of_dist)):

        def call(*arguments, what=what, original=getattr(owner, name), **options):
            counts[what] += 1
            return original(*arguments, **options)

        patched.setattr(owner, name, call)
    return counts


def new_signatures(rank):
    """They are compared once by all ranks, without a collective."""
    group, world = dist.new_group(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patched:
        counts = counted(patched, group.get_group_store())
        for _ in range(3):
            agree(group, {"beta": 0.1}, {"labels": lambda: 7})
        assert counts == {"comparisons": 1, "collectives": 0}
        agree(group, {"beta": 0.1}, {"labels": lambda: rank})  # of a known signature, no value is computed
        for name, call in (
            ("beta", lambda: agree(group, {"loss": "CE", "beta": 0.1 + rank})),
            ("labels", lambda: agree(group, {"loss": "KL"}, {"labels": lambda: rank})),
        ):
            for _ in range(2):  # which has not become known
                with pytest.raises(RankError, match="must make the same call") as error:
                    call()
            lines = str(error.value).splitlines()
            assert [line.split(":")[:2] for line in lines[1:-1]] == [[f"  rank {r}", f" {name}"] for r in range(world)]
            assert lines[-1].startswith("  equal: loss: ")
        assert counts == {"comparisons": 5, "collectives": 0}
        patched.setenv(CHECK_VARIABLE, "1")
        agree(group, {"beta": 0.1}, {"labels": lambda: 7})
        with pytest.raises(ValueError, match="rank 1: labels: 1"):
            agree(group, {"beta": 0.1}, {"labels": lambda: rank})
        assert counts == {"comparisons": 7, "collectives": 0}
    agree(group, {"beta": 0.1}, {"labels": lambda: rank})


def a_rank_that_does_not_come(rank):
    """Those for which the call is new raise an error within the timeout, which lists what they know."""
    group = dist.new_group()
    agree(group, {"call": "known"})
    store, last = group.get_group_store(), rank == dist.get_world_size() - 1
    timeout, begin = store.timeout, time.monotonic()
    dist.barrier()
    if not last:
        store.set_timeout(timedelta(seconds=1))
        with pytest.raises(RankError, match=r"(?s)rank 0: .*nothing within 0:00:01: it has raised") as error:
            agree(group, {"call": "new"})
        assert time.monotonic() - begin < 10
        assert "call: new" in str(error.value)
        store.set_timeout(timeout)
    else:
        agree(group, {"call": "known"})
    dist.barrier()


def calls(rank):
    """Losses and operations of a vocabulary that the ranks share; equal calls are compared once."""
    d, world, other = batch(), dist.get_world_size(), rank == 1
    sizes = (15, 15) if world == 2 else (9, 13, 8)
    rows = Part.of(dist.group.WORLD, sizes).rows
    group = dist.new_group()
    weight, bias = d["weight"][rows], d["bias"][rows]
    head = Head(weight, group=group)
    hidden, labels = d["h"], d["y"]
    single, flipped = Head(weight.float(), group=dist.new_group()), labels.flip(0) if other else labels
    half = hidden.to(torch.float16 if other else torch.bfloat16)

    def separable(statistics, labels):
        return -statistics.logp

    grpo = {"loss_type": "bnpo" if other else "grpo"}
    different = {
        r"the head's hidden size: ": lambda: Head(weight[:, : 8 + other], group=group),
        r"the head's weight: ": lambda: Head(weight.float() if other else weight, group=group),
        r"the head's bias: ": lambda: Head(weight, bias if other else None, group=group),
        r"labels' shapes: ": lambda: linear_logps(hidden[: 2 + other], head, labels[: 2 + other]),
        r"checksum of labels: ": lambda: linear_logps(hidden, head, flipped),
        r"chunk_size: ": lambda: linear_logps(hidden, head, labels, chunk_size=2 + other),
        r"ignore_index: ": lambda: linear_logps(hidden, head, labels.clamp(min=0), ignore_index=-100 - other),
        r"statistics: ": lambda: linear_statistics(hidden, head, labels, ("logp", "entropy")[: 1 + other]),
        r"a loss per token: ": lambda: (
            linear_token_loss(hidden, head, labels, separable) if other else linear_statistics(hidden, head, labels)
        ),
        r"hidden states: ": lambda: torch.autocast("cpu", torch.bfloat16)(linear_logps)(half, single, labels),
        r"logits: ": lambda: linear_logps(hidden, head, labels, temperature=1.0 + other),
        r"gradients: ": lambda: linear_logps(hidden, head.with_partial_gradients() if other else head, labels),
        r"checksum of kept columns: ": lambda: linear_logps(
            hidden, head, labels, support=support({**d, "y": flipped} if other else d, add_label=True)
        ),
        r"loss: ": lambda: (CE() if other else DPO(use_ref_model=False))(head, hidden, labels),
        r"loss_type: ": lambda: policy(GRPO(beta=0.0, **grpo), head, None, d),
    }
    for name, call in different.items():
        with case_named(name), pytest.raises((RankError, TypeError), match=rf"(?s)rank 0: .*{name}.*rank 1: .*{name}"):
            call()
    with pytest.MonkeyPatch.context() as patched:
        head.ranks.least_memory(0, hidden.device)  # which the first call of a group exchanges
        counts = counted(patched, group.get_group_store())
        expected = linear_logps(hidden, d["weight"], labels, softcap=3.0)
        for collectives in (1, 2):  # of statistics
            torch.testing.assert_close(linear_logps(hidden, head, labels, softcap=3.0), expected)
            assert counts == {"comparisons": 1, "collectives": collectives}
        linear_logps(hidden, head, flipped, softcap=3.0)  # of a known signature, labels are not compared
        patched.setenv(CHECK_VARIABLE, "1")
        with pytest.raises(RankError, match="rank 1: checksum of labels: "):
            linear_logps(hidden, head, flipped, softcap=3.0)
    with pytest.raises(ValueError, match="labels must be in"):  # what is wrong on all ranks
        linear_logps(hidden, head, labels + VOCAB + 200)


def slices(rank):
    """The ranks of a loss's ``group=``."""
    d, group, other = batch(), dist.new_group(), rank == 1
    hidden, labels, rows = d["h"], d["y"], 2 + 2 * other
    mask, logps = labels >= 0, -d["logps"].abs()
    different = {
        "beta: ": lambda: DPO(beta=0.1 + other, group=group, use_ref_model=False)(d["weight"], hidden, labels),
        "sequences: ": lambda: DPO(group=group, use_ref_model=False)(d["weight"], hidden[:rows], labels[:rows]),
        "num_items_in_batch: ": lambda: CE(group=group)(
            d["weight"], hidden, labels, num_items_in_batch=7 if other else None
        ),
        "epsilon_low: ": lambda: functional.grpo_loss(
            logps, d["signs"], mask, group=group, epsilon_low=0.1 + 0.1 * other
        ),
    }
    for name, call in different.items():
        with case_named(name), pytest.raises(RankError, match=rf"(?s)rank 0: .*{name}.*rank 1: .*{name}"):
            call()
    # How a rank streams is its own affair, and so are the lengths of its slices.
    length = 3 + rank
    DPO(group=group, use_ref_model=False, chunk_size=2 + rank)(d["weight"], hidden[:, :length], labels[:, :length])


def work(rank):
    for check in (new_signatures, a_rank_that_does_not_come, calls, slices):
        with case_named(check.__name__):
            check(rank)


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_different_calls(tmp_path, world):
    start(work, world, tmp_path)
