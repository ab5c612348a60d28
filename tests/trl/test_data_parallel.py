"""HSDP on four processes: sharded over two, replicated over two. It takes the gradients of one process."""

import faulthandler
import gc
import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("trl", reason="TRL is not installed")

from torch.distributed.device_mesh import init_device_mesh

from tests.trl import test_distributed as two

ROWS = (1, 1, 2, 1)  # of each process
#: Tied, and how the model is sharded beside the mesh.
LAYOUTS = {
    "root": (False, {}),
    "root, tied": (True, {}),
    "tail": (False, {"layers": True, "parts": two.TAIL}),
    "tail, kept": (False, {"layers": True, "parts": two.TAIL, "reshard_after_forward": False}),
    "tail, tied": (True, {"layers": True, "parts": two.TIED_TAIL}),
    "head, half": (False, {"layers": True, "parts": two.HEAD, "mp_policy": two.HALF}),
}


def check(rank, mesh, layout, head, steps):
    """With several steps, the last one's backward alone reduces gradients over the replicas."""
    tied, options = LAYOUTS[layout]
    plain, ours = two.llama(tied), two.llama(tied)
    two.HEADS[head](ours)
    two.units(ours, mesh=mesh, **options)
    found = 0
    for step in range(steps):
        ours.set_requires_all_reduce(step == steps - 1)
        loss = two.loss_of_head(head, ours, rank, ROWS) / steps
        loss.backward()
        found += loss.detach()
    expected = two.plain_loss(plain, head != "lazy")
    expected.backward()
    tolerance = {"rtol": 0.1, "atol": 0.02} if "half" in layout else {"rtol": 1e-4, "atol": 3e-5}
    dist.all_reduce(found)
    torch.testing.assert_close(found / len(ROWS), expected.detach(), **tolerance)
    two.check_gradients(ours, plain, **tolerance)


def work(rank, rendezvous):
    faulthandler.enable()  # a process that is killed by a signal says where it was
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=len(ROWS), timeout=timedelta(seconds=180)
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for case in itertools.product(LAYOUTS, two.HEADS, (1, 3)):
        try:
            check(rank, mesh, *case)
        except Exception as error:
            raise RuntimeError(f"the case {case!r} fails") from error
    gc.collect()  # sharded models are in reference cycles, and must be gone before their process group is
    dist.barrier()  # the first process to leave would close the others' connections
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.slow
def test_hybrid_sharding_on_four_processes(tmp_path):
    mp.spawn(work, (tmp_path / "rendezvous",), nprocs=len(ROWS))
