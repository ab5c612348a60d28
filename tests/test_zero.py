"""The head of TRL under DeepSpeed's ZeRO-3, on two processes: it must be that of one process with both batches.

DeepSpeed is not among the project's dependencies: ``pip install --no-build-isolation deepspeed`` runs these.
"""

import itertools
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

from liger_losses.patching.lazy.tensor import deferred_logits
from liger_losses.patching.lazy_head import make_head_lazy
from liger_losses.patching.patch import patch
from liger_losses.trl.fused_head import add_fused_lm_head
from tests.test_distributed import LEARNING_RATE, ROWS, WORLD, batch, llama, our_loss, plain_loss

#: Tied weights, gradient checkpointing, and the smallest weights that are split.
CASES = {
    "split": (False, False, 0),
    "tied": (True, False, 0),
    "checkpointing": (False, True, 0),
    "tied, checkpointing": (True, True, 0),
    "the small ones whole": (False, False, 300),
    "all whole": (False, False, 10**6),
}
#: What the loss is of: the head's own, computed at once or in two passes; beside it the log-probabilities; or neither.
KINDS = ("one pass", "two passes", "one pass, log-probs", "two passes, log-probs", "lazy logits", "kernels")


def split(model, threshold):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": ROWS[0],
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": threshold},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def lazy_loss(model, rank):
    """Of logits that have left the model, with DeepSpeed's hooks on their gradient."""
    ids, labels, _ = (part.split(ROWS)[rank] for part in batch())
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    assert deferred_logits(logits) is not None
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return loss * WORLD / (batch()[1][:, 1:] != -100).sum()


def run_case(rank, tied, checkpointing, threshold, kind):
    from deepspeed.utils import safe_get_full_grad

    plain, model = llama(tied, checkpointing), llama(tied, checkpointing)
    weighted = "log-probs" in kind
    if kind == "kernels":
        patch(model, loss_head=False)
    if kind == "lazy logits":
        make_head_lazy(model)
        loss_of = lazy_loss
    else:
        add_fused_lm_head(model, one_pass="one pass" in kind)

        def loss_of(engine, rank):
            return our_loss(engine, weighted, rank)

    engine = split(model, threshold)
    optimizer = torch.optim.SGD(plain.parameters(), LEARNING_RATE)
    for step in range(2):
        expected = plain_loss(plain, weighted)
        expected.backward()
        found = loss_of(engine, rank)
        with torch.no_grad():  # between a forward and its backward
            evaluated = our_loss(engine, weighted, rank) if kind != "lazy logits" else found.detach()
        engine.backward(found)
        loss = evaluated.clone()
        dist.all_reduce(loss)
        torch.testing.assert_close(
            loss / WORLD, expected.detach(), rtol=1e-4, atol=3e-5, msg=lambda m, step=step: f"step {step}: {m}"
        )
        for name, parameter in model.named_parameters():
            wanted = plain.get_parameter(name).grad
            torch.testing.assert_close(
                safe_get_full_grad(parameter), wanted, rtol=1e-4, atol=3e-5, msg=lambda m, name=name: f"{name}: {m}"
            )
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        assert {p.ds_status.name for p in model.parameters() if not p.ds_persist} <= {"NOT_AVAILABLE"}
    engine.destroy()


def work(rank, port):
    torch.set_num_threads(1)
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_SIZE": WORLD}
    os.environ.update({key: str(value) for key, value in where.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    import deepspeed

    deepspeed.init_distributed("gloo")
    for (name, case), kind in itertools.product(CASES.items(), KINDS):
        try:
            run_case(rank, *case, kind)
        except Exception as error:
            raise RuntimeError(f"the case {name!r} fails with {kind}") from error
    dist.destroy_process_group()


def test_training_on_two_processes_is_that_of_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (port,), nprocs=WORLD)
