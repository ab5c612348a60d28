"""DeepSpeed's ZeRO-3 on two processes: the head of TRL must be that of one process with both batches, and TRL's
trainers must train as they do without this library.

DeepSpeed is not among the project's dependencies: ``make test-zero`` installs it beside them and runs these.
"""

import gc
import itertools
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl", reason="TRL is not installed")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed, so ZeRO-3 is not tested: run `make test-zero`")

from tests.processes import case_named, start
from tests.trl.test_distributed import KINDS, LEARNING_RATE, ROWS, WORLD, assert_close, llama, plain_loss

#: Tied weights, gradient checkpointing, and the smallest weights that are split.
CASES = {"split": (False, False, 0), "tied": (True, False, 0), "checkpointing": (False, True, 0)}
CASES |= {"tied, checkpointing": (True, True, 0), "the small ones whole": (False, False, 300)}
CASES |= {"all whole": (False, False, 10**6)}


def zero_3(threshold, **others):
    """DeepSpeed's configuration."""
    stage = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    return {"zero_optimization": stage, "zero_allow_untested_optimizer": True, **others}


def split(model, threshold):
    import deepspeed

    config = zero_3(threshold, train_micro_batch_size_per_gpu=ROWS[0], gradient_clipping=0.0)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def run_case(rank, tied, checkpointing, threshold, kind):
    from deepspeed.utils import safe_get_full_grad

    plain, model = llama(tied, checkpointing), llama(tied, checkpointing)
    serve, loss_of, weighted = KINDS[kind]
    serve(model)
    engine, optimizer = split(model, threshold), torch.optim.SGD(plain.parameters(), LEARNING_RATE)
    for step in range(2):
        expected = plain_loss(plain, weighted)
        expected.backward()
        found = loss_of(engine, rank)
        with torch.no_grad():  # between a forward and its backward
            loss = loss_of(engine, rank).clone()
        engine.backward(found)
        dist.all_reduce(loss)
        assert_close(loss / WORLD, expected.detach(), where=f"step {step}")
        for name, parameter in model.named_parameters():
            assert_close(safe_get_full_grad(parameter), plain.get_parameter(name).grad, where=f"step {step}, {name}")
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        assert {p.ds_status.name for p in model.parameters() if not p.ds_persist} <= {"NOT_AVAILABLE"}
    engine.destroy()


#: Of tests/trl/test_trainers.py, the last two with sequences without advantage. Online DPO is not here, as TRL makes
#: its reference model without ZeRO-3.
TRAINERS = ("distillation", "CPO", "ORPO, LoRA", "ORPO, checkpointing", "TPO", "GKD", "GOLD", "IW-OPD", "SDFT")
TRAINERS += ("SDFT, whole vocabulary", "SDPO, top-k", "GMPO", "GRPO, accumulated, checkpointing")


def train_trainers(rank, directory):
    """Plain and enabled: the same numbers, and no logits where it is enabled."""
    from accelerate.state import DistributedType, PartialState
    from transformers import Trainer

    from tests.trl import trainers

    given = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = zero_3(0, **dict.fromkeys(given, "auto"))

    def train_and_check(self, *args, train=Trainer.train, **kwargs):
        result = train(self, *args, **kwargs)
        assert {p.ds_status.name for p in self.model.parameters()} == {"NOT_AVAILABLE"}
        return result

    with pytest.MonkeyPatch.context() as patch:
        # accelerate would not make out DeepSpeed's processes on a CPU.
        patch.setattr(PartialState, "_prepare_backend", lambda *_: ("gloo", DistributedType.MULTI_CPU))
        patch.setattr(Trainer, "train", train_and_check)
        for name in TRAINERS:
            build, options = trainers.CASES[name]
            for kind in ("plain", "ours"):
                (directory / name / kind).mkdir(parents=True, exist_ok=True)
            with case_named(name):
                trainers.check_training(build, directory / name, deepspeed=config, use_cpu=False, **options)


def train_models(rank, directory):
    for (name, case), kind in itertools.product(CASES.items(), ("loss", "log-probs", "pending", "kernels")):
        with case_named(f"{name} with {kind}"):
            run_case(rank, *case, kind)


def work(rank, run, directory):
    import deepspeed

    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=180))
    run(rank, directory)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("run", [train_models, train_trainers])
def test_training_on_two_processes(run, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
    for name, value in (variables | {"LOCAL_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}).items():
        monkeypatch.setenv(name, str(value))
    start(work, WORLD, tmp_path, run, tmp_path, method="spawn", backend=None)
