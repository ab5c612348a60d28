"""Work and memory of a call: only the products that are needed, within the workspace."""

import pytest
import torch

from liger_losses import (
    Divergence,
    Teacher,
    linear_divergence,
)
from liger_losses.chunked.engine import decision
from liger_losses.chunked.engine import plan as planning
from liger_losses.chunked.engine.plan import MiB, Workload, make_plan
from tests.reference import (
    problem,
)


def test_ranks_that_share_a_vocabulary_take_larger_blocks():
    sizes = {"hidden_size": 4096, "operand_dtype": torch.bfloat16, "device": torch.device("cpu"), "gathers": False}
    kernels = {"temporaries": 0, "fused": True, "exponentials": True, "fused_products": True}
    alone = Workload(tokens=8192, vocab_size=128256, **sizes, **kernels)
    shared = Workload(tokens=8192, vocab_size=64128, ranks=2, **sizes, **kernels)
    assert (make_plan(alone).rows, make_plan(shared).rows) == (2048, 8192)
    assert alone.default_workspace() < shared.default_workspace() <= 1536 * MiB


def test_blocks_leave_room_for_the_buffers_of_an_allocator():
    """A GPU's may be 1 MiB larger than asked for; the least workspace is the same, and blocks of it take all of it."""
    sizes = {"hidden_size": 256, "vocab_size": 50257, "operand_dtype": torch.bfloat16, "temporaries": 0}
    tokens, memory = 10923, 80 * 2**30
    gpu, cpu = (Workload(tokens, device=torch.device(kind), device_memory=memory, **sizes) for kind in ("cuda", "cpu"))
    vectors = tokens * 16 * 4
    least = gpu.row_bytes + vectors
    cases = (gpu, 192 * MiB, 3 * MiB), (gpu, least + 4000, 1000), (gpu, least, 0), (cpu, 192 * MiB, 0)
    for work, bound, spare in cases:
        assert planning._budget(work, bound, False).kept == planning._budget(work, bound, False).blocks
        assert planning._budget(work, bound, False).blocks == bound - vectors - spare
    with pytest.raises(ValueError, match=f"give at least {least} bytes"):
        planning._budget(gpu, least - 1, False)


@pytest.mark.parametrize(
    ("tokens", "gigabytes", "wide"), [(16384, 80, False), (32768, 80, False), (65536, 80, True), (65536, 141, False)]
)
def test_parts_of_many_tokens_are_as_tall_as_those_of_few(tokens, gigabytes, wide):
    """Two models' products of 256 tokens take 1.2 to 1.7 times as long as those of 512 (an H200)."""
    hidden, weight, labels, _ = problem(8, 16, 32, dtype=torch.bfloat16)
    decision._decisions.clear()
    linear_divergence(hidden, weight, labels, Teacher(hidden.detach(), weight.detach()), Divergence.reverse_kl())
    (made,) = decision._decisions.values()
    sizes = {"hidden_size": 2048, "vocab_size": 128256, "operand_dtype": torch.bfloat16, "device": torch.device("cuda")}
    student = {"temporaries": 0, "gathers": False, "fused": True, "fused_products": True}
    work = Workload(tokens, teacher_row_bytes=6 * 2048, device_memory=gigabytes * 2**30, **sizes, **student)
    run = made._chosen(work)
    assert run.plan.part_rows == 512
    assert (run.grad_weight_dtype == torch.float32) == wide != run.plan.few_blocks


def test_tiles_by_default_are_few():
    """However many tokens there are, at the cost of more memory; and a given workspace is kept."""
    sizes = {"hidden_size": 4096, "vocab_size": 128256, "operand_dtype": torch.bfloat16, "device": torch.device("cpu")}
    work = Workload(tokens=2**16, fused=True, exponentials=True, temporaries=0, **sizes)
    assert not make_plan(work).few_tiles
    assert make_plan(work.taller()).few_tiles
    assert make_plan(work, 512 * MiB) == make_plan(work.taller(), 512 * MiB)
