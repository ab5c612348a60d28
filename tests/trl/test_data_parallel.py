"""HSDP: sharded over some processes, replicated over others. It takes the gradients of one process."""

import itertools

import pytest
import torch.distributed as dist

pytest.importorskip("trl", reason="TRL is not installed")

from torch.distributed.device_mesh import init_device_mesh

from tests.processes import BACKENDS, case_named, device_type, start
from tests.trl import test_distributed as two

ROWS = {4: (1, 1, 2, 1), 2: (2, 3)}  # of each process
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
    found, rows = 0, ROWS[mesh.size()]
    for step in range(steps):
        ours.set_requires_all_reduce(step == steps - 1)
        loss = two.loss_of_head(head, ours, rank, rows) / steps
        loss.backward()
        found += loss.detach()
    expected = two.plain_loss(plain, head != "patched")
    expected.backward()
    tolerance = {"rtol": 0.1, "atol": 0.02} if "half" in layout else {"rtol": 1e-4, "atol": 3e-5}
    dist.all_reduce(found)
    two.assert_close(found / len(rows), expected.detach(), **tolerance)
    two.check_gradients(ours, plain, **tolerance)


def work(rank, sizes):
    mesh = init_device_mesh(device_type(), sizes, mesh_dim_names=("replicate", "shard"))
    for case in itertools.product(LAYOUTS, two.HEADS, (1, 3)):
        with case_named(case):
            check(rank, mesh, *case)


@pytest.mark.distributed
@pytest.mark.slow
def test_hybrid_sharding_on_four_processes(tmp_path):
    start(work, 4, tmp_path, (2, 2))


@pytest.mark.distributed
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_hybrid_sharding_on_two_gpus(tmp_path, sizes, backend):
    start(work, 2, tmp_path, sizes, backend=backend)
