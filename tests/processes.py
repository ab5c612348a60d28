"""Tests on several processes of this machine, and how such processes end."""

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pathlib
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: What connects the processes of a test: gloo on CPUs, or NCCL on two GPUs.
BACKENDS = [
    "gloo",
    pytest.param(
        "nccl", marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
    ),
]
#: The process from which those of tests fork, by the connection to it.
_nurseries = []


def make_nursery():
    """Fork the process from which those of tests fork: it has imported the tests, and runs none.

    Each of theirs would take longer for the imports than for a test. (Forked processes share the order of names in a
    set, so one slow test of ranks spawns its processes.)
    """
    ours, theirs = multiprocessing.Pipe()
    if os.fork():
        theirs.close()
        _nurseries.append(ours)
        return
    try:
        ours.close()
        while True:  # until the tests have ended
            arguments, world = theirs.recv()
            try:
                mp.start_processes(member, arguments, nprocs=world, start_method="fork")
                theirs.send(None)
            except Exception as error:
                theirs.send(error)
    finally:
        os._exit(0)


def start(work, world, folder, *arguments, method=None, backend="gloo"):
    """Run ``work(rank, *arguments)`` on ``world`` processes of a group, which meet by a file in ``folder``.

    Without a backend there is no group, and what they print is in the files ``0``, ``1``, ... of ``folder``.
    """
    arguments = (work, world, folder, dict(os.environ), backend, arguments)
    if method or torch.cuda.is_available():  # CUDA does not work in forks of what has used it
        mp.start_processes(member, arguments, nprocs=world, start_method=method or "spawn")
        return
    (nursery,) = _nurseries
    nursery.send((arguments, world))
    if error := nursery.recv():
        raise error


def member(rank, work, world, folder, environment, backend, arguments):
    faulthandler.enable()  # a process that is killed by a signal says where it was
    gc.freeze()  # what was imported before is no garbage, and takes long to look through
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if backend is None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        with open(f"{folder}/{rank}", "w") as sys.stdout:
            work(rank, *arguments)
            leave()
    if "nccl" in backend:
        take_gpu(rank)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, rendezvous, timeout=timedelta(seconds=180), rank=rank, world_size=world)
    work(rank, *arguments)
    gc.collect()  # sharded models are in reference cycles, and must be gone before their process group is
    dist.barrier()  # the first process to leave would close the others' connections
    dist.destroy_process_group()
    leave()


def printed_by(*arguments, cwd=pathlib.Path(__file__).parents[1], **variables):
    """What Python prints in a process of its own, which must end well."""
    command, environment = [sys.executable, *map(str, arguments)], os.environ | variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def take_gpu(rank, assign=setattr):
    """Tensors that name no device are on this process's GPU; those of a CPU's generator have the numbers of a CPU."""
    torch.cuda.set_device(rank)
    torch.set_default_device(f"cuda:{rank}")
    for name in ("rand", "randn", "randint", "randperm"):
        assign(torch, name, functools.partial(drawn, getattr(torch, name)))


def drawn(make, *sizes, generator=None, **options):
    """What ``torch.randn``, for example, returns, on the default device."""
    if generator is None or "device" in options:
        return make(*sizes, generator=generator, **options)
    return make(*sizes, generator=generator, device=generator.device, **options).to(torch.get_default_device())


def device_type():
    """Of the tensors of this process."""
    return torch.get_default_device().type


def whole(tensor):
    """All of a DTensor, and any other tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def leave():
    """End this process without the end of Python's interpreter.

    A thread of gloo may drop the last collective's tensors after ``destroy_process_group``. If the interpreter is
    ending by then, torch aborts the process (https://github.com/pytorch/pytorch/issues/190489).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextlib.contextmanager
def case_named(name):
    """An error within it, or a failed assertion, tells the test which case of several has failed."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise RuntimeError(f"the case {name!r} fails") from error
