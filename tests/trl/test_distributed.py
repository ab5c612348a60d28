"""The head of TRL on two processes: loss, gradients and steps are those of one process with both batches."""

import contextlib
import functools
import itertools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl", reason="TRL is not installed")

from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from liger_losses.patching.loss_head import pending_logits, prepare_head
from liger_losses.patching.patch import patch, unpatch
from liger_losses.patching.pending import PendingLogits
from liger_losses.sequences import split_by_coefficient
from liger_losses.trl import packed_batches
from liger_losses.trl.divergences import chosen
from liger_losses.trl.fused_head import add_fused_lm_head
from tests.models import adapted, ids_and_labels, patch_head, small, without_logits
from tests.processes import BACKENDS, case_named, device_type, start, whole
from tests.reference import relative_error

WORLD = 2
VOCAB, LENGTH = 23, 9
ROWS = (2, 3)  # of each process
LEARNING_RATE = 0.1


def llama(tied=False, checkpointing=False):
    model = small(vocab_size=VOCAB, initializer_range=0.3, tie_word_embeddings=tied)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def batch():
    """Ids, labels, weights of the log-probabilities, which are in the loss beside the model's own, and the labels that
    count."""
    ids, labels = ids_and_labels(0, VOCAB, sum(ROWS), LENGTH)
    weights = torch.linspace(-2, 2, ids[:, 1:].numel()).sin().view(len(ids), -1)
    return ids, labels, weights, (labels[:, 1:] != -100).sum()


def own_batch(rank, rows=ROWS):
    """Of a process: with this count, the mean over processes, which DDP and FSDP take, is the loss of all."""
    *parts, count = batch()
    return *(part.split(rows)[rank] for part in parts), count / len(rows)


def plain_log_probs(logits, labels):
    return logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]


def plain_loss(model, weighted):
    """By transformers, of both batches."""
    ids, labels, weights, count = batch()
    found = model(input_ids=ids, labels=labels, num_items_in_batch=count)
    if not weighted:
        return found.loss
    return found.loss + (weights * plain_log_probs(found.logits, labels) * (labels[:, 1:] != -100)).sum() / count


def our_loss(model, rank, rows=ROWS, weighted=False, **options):
    """Of this process's batch."""
    ids, labels, weights, count = own_batch(rank, rows)
    found = model(input_ids=ids, labels=labels, num_items_in_batch=count, **(options or {"fused_lm_head": True}))
    if not weighted:
        return found.loss
    return found.loss + (weights.to(found.log_probs.device) * found.log_probs).sum() / count  # fully_shard takes a GPU


def log_probs_alone(model, rank, rows=ROWS):
    """The loss that is returned takes no part in the backward."""
    ids, labels, _, count = own_batch(rank, rows)
    return -model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs.sum() / count


def pending_loss(model, rank, rows=ROWS):
    """Of logits that outlive the forward."""
    ids, labels, _, count = own_batch(rank, rows)
    with pending_logits(model):
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    assert isinstance(logits, PendingLogits)
    labels = labels[:, 1:].flatten().to(logits.device)
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / count


def with_kernels(model):
    assert patch(model, loss_head=False).counts
    add_fused_lm_head(model)


weighted_loss = functools.partial(our_loss, weighted=True)
#: What serves a model, and its loss; whether log-probabilities, weighted, are in that of the plain model.
KINDS = {
    "log-probs": (add_fused_lm_head, weighted_loss, True),
    "loss": (add_fused_lm_head, our_loss, False),
    "log-probs alone": (add_fused_lm_head, log_probs_alone, False),
    "kernels": (with_kernels, weighted_loss, True),
    "patched": (patch_head, functools.partial(our_loss, use_cache=False), False),
    "pending": (prepare_head, pending_loss, False),
    "shared prompts": (functools.partial(add_fused_lm_head, groups=True), weighted_loss, True),
}


# --- How the model is spread ------------------------------------------------------------------------------------------


def units(model, *, layers=False, parts=(), root=None, **options):
    """``fully_shard`` of the decoder layers, of the named parts as one unit, and of the whole."""
    if layers:
        for layer in model.model.layers:
            fully_shard(layer, **options)
    if "offload_policy" in options:
        for buffer in model.cpu().buffers():
            buffer.data = buffer.to(torch.get_default_device())
    found = [model.get_submodule(name) for name in parts]
    if found:
        fully_shard(found if len(found) > 1 else found[0], **options)
    kept = {name: value for name, value in options.items() if name != "reshard_after_forward"}
    return fully_shard(model, **kept, **({} if root is None else {"reshard_after_forward": root}))


def head_in_fp32(model, **options):
    """The head casts to fp32 in its forward."""
    layer = model.lm_head
    units(model, layers=True, parts=HEAD, **options)
    layer.forward = lambda hidden: torch.nn.functional.linear(hidden.float(), layer.weight.float())
    return model


HEAD, TAIL, TIED_TAIL = ("lm_head",), ("model.norm", "lm_head"), ("model.norm", "model.embed_tokens", "lm_head")
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Case:
    """How the model is spread and made, how often its forward runs before one backward, whether it is spread before it
    is served, and how exact it is."""

    spread: Callable
    tied: bool = False
    checkpointing: bool = False
    forwards: int = 1
    adapter: bool = False
    first: bool = False
    tolerance: tuple[float, float] = (1e-4, 3e-5)


def sharded(*parts, **options):
    case = {name: options.pop(name) for name in vars(Case).keys() & options.keys()}
    if "mp_policy" in options:
        case["tolerance"] = 0.1, 0.02
    return Case(functools.partial(units, layers=True, parts=parts, **options), **case)


CASES = {
    "DDP": Case(DDP),
    "DDP, tied, checkpointing": Case(DDP, tied=True, checkpointing=True),
    "DDP, unused parameters": Case(functools.partial(DDP, find_unused_parameters=True)),
    "DDP, static graph": Case(functools.partial(DDP, static_graph=True)),
    "DDP, first": Case(DDP, first=True),
    "root": Case(units),
    "root, tied": Case(units, tied=True),
    "root, freed": Case(functools.partial(units, root=True)),
    "layers": sharded(),
    "layers, tied, checkpointing": sharded(tied=True, checkpointing=True),
    "layers, half": sharded(mp_policy=HALF),
    "tail, freed": sharded(*TAIL, reshard_after_forward=True),
    "tail, kept": sharded(*TAIL, reshard_after_forward=False),
    "tail, tied, freed": sharded(*TIED_TAIL, tied=True, reshard_after_forward=True),
    "tail, tied, kept": sharded(*TIED_TAIL, tied=True, reshard_after_forward=False),
    "tail, two forwards": sharded(*TAIL, forwards=2),
    "tail, half": sharded(*TAIL, mp_policy=HALF),
    "head, freed": sharded(*HEAD, reshard_after_forward=True),
    "head, kept": sharded(*HEAD, reshard_after_forward=False),
    "head, checkpointing": sharded(*HEAD, checkpointing=True),
    "head, two forwards": sharded(*HEAD, forwards=2),
    "head, half": sharded(*HEAD, mp_policy=HALF),
    "head, adapter": sharded(*HEAD, adapter=True),
    "parts of the adapter": sharded("lm_head.base_layer", adapter=True),
    "tail, offloaded": sharded(*TAIL, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "head, first": sharded(*HEAD, first=True),
    "head in fp32, first": Case(head_in_fp32, first=True),
}
#: By kind of the loss, the cases that are trained.
TRAINED = {
    "log-probs": [*CASES],
    "loss": ["DDP", "root", "layers, tied, checkpointing", "tail, tied, freed", "head, freed", "head, two forwards"],
    "log-probs alone": ["head, freed"],
    "kernels": ["DDP", "root, freed", "layers", "layers, tied, checkpointing"],
    "patched": ["head, freed", "head, half", "layers, half", "root, tied", "tail, tied, freed", "tail, tied, kept"]
    + ["tail, offloaded", "head, first", "head in fp32, first"]
    + ["DDP", "DDP, unused parameters", "DDP, static graph", "DDP, first"],
    "pending": ["root", "head, kept"],
}


# --- What each process does -------------------------------------------------------------------------------------------


def made(case):
    model = llama(case.tied, case.checkpointing)
    if case.adapter:  # whose layers are put into the model
        adapted(model, "q_proj", "lm_head", task_type="CAUSAL_LM")
    return model


def pair(name, kind, **options):
    """A model by transformers; one that is served, spread as in a case; and what runs it until backward."""
    case, serve = CASES[name], KINDS[kind][0]
    plain, ours = made(case), made(case)
    if not case.first:
        serve(ours)
    spread = case.spread(ours, **options)
    if case.first:
        serve(spread if kind == "patched" else ours)
    return plain, ours, spread


def assert_close(found, expected, rtol=1e-4, atol=3e-5, where=""):
    """Entry by entry; of what bf16 rounds, ``rtol`` above 0.01, as a whole."""
    found = found.to(expected.device)  # where there is a GPU, fully_shard moves models to it
    if rtol > 1e-2:
        assert relative_error(found, expected) < rtol, where
    else:
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda m: f"{where}: {m}")


def check_gradients(ours, plain, rtol=1e-4, atol=3e-5, where=""):
    gradients = {key: whole(p.grad) for key, p in ours.named_parameters() if p.grad is not None}
    assert gradients.keys() == {key for key, p in plain.named_parameters() if p.grad is not None}
    for key, gradient in gradients.items():
        assert_close(gradient, plain.get_parameter(key).grad, rtol, atol, f"{where}{key}")


def compare(name, kind, rank, steps=2):
    """Two steps: the second starts from the weights that the first has found."""
    case, (_, loss_of, weighted) = CASES[name], KINDS[kind]
    plain, ours, spread = pair(name, kind)
    optimizers = [torch.optim.SGD(model.parameters(), LEARNING_RATE) for model in (plain, ours)]
    for step in range(1 if case.tolerance[0] > 1e-2 else steps):  # rounding moves the weights apart
        expected = plain_loss(plain, weighted)
        expected.backward()
        with without_logits():
            warnings.filterwarnings("error", message=".*returned a view")
            found = sum(loss_of(spread, rank) for _ in range(case.forwards)) / case.forwards
        assert found.dtype == torch.float32
        with torch.no_grad():  # before the backward, which must not miss what this one frees
            evaluated = loss_of(spread, rank)
        found.backward()
        for loss in (evaluated.clone(), found.detach().clone()):
            dist.all_reduce(loss)
            assert_close(loss / WORLD, expected.detach(), *case.tolerance, "loss")
        check_gradients(ours, plain, *case.tolerance, f"step {step}, ")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    unpatch(ours)
    ids, labels, *_ = batch()
    assert kind != "patched" or spread(input_ids=ids, labels=labels).logits is not None


def shared_prompts(rank):
    """Batches are packed within the model's forward, where wrappers do not see it."""
    chosen.share_prompts = True
    for name in ("DDP, tied, checkpointing", "DDP, static graph", "layers, tied, checkpointing", "head, freed"):
        compare(name, "shared prompts", rank)
    # Unasked, the second process alone packs its batches.
    chosen.share_prompts, packed_batches._LEAST_SAVING = None, 0 if rank else 1e9
    packed_batches.suits_sharing = lambda model, device: True
    compare("layers, tied, checkpointing", "shared prompts", rank)


def shared_prompts_refused(rank):
    """A model that turns out in its forward not to run packed rows, and a first batch that one process alone can pack:
    both processes gather the layers as often."""
    chosen.share_prompts = True
    plain, ours, spread = pair("layers", "shared prompts")
    ours.config.num_hidden_layers += 1
    for step in range(2):
        positions = {} if rank or step else {"position_ids": torch.arange(LENGTH)[None]}
        weighted_loss(spread, rank, fused_lm_head=True, **positions).backward()
        plain_loss(plain, True).backward()
        check_gradients(ours, plain)


def accumulate(rank, name, kind, steps=3, rows=ROWS, **options):
    """Gradients are reduced with the last of several backward passes; with a mesh, over the replicas."""
    (plain, ours, spread), (_, loss_of, weighted), total = pair(name, kind, **options), KINDS[kind], 0
    for last in [False] * (steps - 1) + [True]:
        if options:
            ours.set_requires_all_reduce(last)
        elif name != "DDP":
            spread.set_requires_gradient_sync(last)
        with spread.no_sync() if name == "DDP" and not last else contextlib.nullcontext():
            loss = loss_of(spread, rank, rows) / steps
            loss.backward()
        total += loss.detach()
    expected, tolerance = plain_loss(plain, weighted), CASES[name].tolerance
    expected.backward()
    dist.all_reduce(total)
    assert_close(total / len(rows), expected.detach(), *tolerance)
    check_gradients(ours, plain, *tolerance)


def accumulated(rank):
    for case in itertools.product(("head, freed", "root", "tail, tied, freed", "DDP"), ("log-probs", "patched")):
        accumulate(rank, *case)


def to_save(tied, patched):
    """A model that is spread, and its optimizer."""
    model = llama(tied)
    if patched:
        patch(model)
    CASES["tail, tied, freed" if tied else "head, freed"].spread(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model, optimizer, rank):
    KINDS["patched"][1](model, rank).backward()
    optimizer.step()
    optimizer.zero_grad()


def checkpoints(rank):
    """``torch.distributed.checkpoint`` of patched models and their optimizers loads into plain ones, and reversed."""
    directory = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(directory)
    for tied, from_patched in ((False, True), (True, False)):
        place = {"checkpoint_id": f"{directory[0]}/{tied}"}
        model, optimizer = to_save(tied, from_patched)
        train_step(model, optimizer, rank)
        weights, moments = get_state_dict(model, optimizer)
        assert weights.keys() == llama(tied).state_dict().keys()
        checkpoint.save({"model": weights, "optimizer": moments}, **place)
        train_step(model, optimizer, rank)
        for to_patched in (True, False):
            other, optimizer = to_save(tied, to_patched)
            weights, moments = get_state_dict(other, optimizer)
            checkpoint.load({"model": weights, "optimizer": moments}, **place)
            set_state_dict(other, optimizer, model_state_dict=weights, optim_state_dict=moments)
            train_step(other, optimizer, rank)
            for key, value in model.state_dict().items():
                torch.testing.assert_close(whole(other.state_dict()[key]), whole(value), rtol=1e-4, atol=1e-5, msg=key)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(directory[0])


def tensor_parallel(rank):
    for layout in (Replicate(), Shard(-1)):
        model = llama()
        add_fused_lm_head(model)
        plan = ColwiseParallel(output_layouts=layout)
        parallelize_module(model, init_device_mesh(device_type(), (WORLD,)), {"lm_head": plan})
        with pytest.raises(TypeError, match="tensor parallelism"):
            our_loss(model, 0)  # the same batch on both


def first_fsdp(rank):
    """FullyShardedDataParallel: the whole model is served, a head of its own is not."""
    for use_orig_params in (True, False):
        options = {"use_orig_params": use_orig_params, "device_id": torch.get_default_device()}
        model = llama()
        add_fused_lm_head(model)
        model.lm_head = FullyShardedDataParallel(model.lm_head, **options)
        with pytest.raises(TypeError, match="last layer"):
            our_loss(FullyShardedDataParallel(model, **options), rank)
    plain, model = llama(), llama()
    add_fused_lm_head(model)
    spread = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.get_default_device())
    weighted_loss(spread, rank).backward()
    plain_loss(plain, True).backward()
    with FullyShardedDataParallel.summon_full_params(spread, with_grads=True):
        check_gradients(model, plain)


#: Coefficients of the sequences of both processes, and how many run without a gradient on each. The last column is
#: whether a short input stands in on a process where no sequence has a coefficient; otherwise the first one runs.
#: Every spread takes the first row, and two all of them.
COEFFICIENTS = (
    ([0.0, 1.0, 0.0, 0.0, -2.0], (1, 2), True),
    ([1.0, 0.0, 0.0, 0.0, 0.0], (1, 3), True),
    ([1.0, 0.0, 0.0, 0.0, 0.0], (1, 2), False),
    ([0.0] * 5, (2, 3), True),
    ([1.0, 0.5, 0.0, 1.0, 0.0], (0, 0), True),  # the second would wait for the first
)


def without_coefficient(rank):
    """Sequences without a coefficient take no part in the backward, and all processes run the same collectives."""
    ids, labels, weights, _ = batch()
    weights = weights * (labels[:, 1:] != -100)
    cases = [
        *itertools.product(("DDP", "layers, tied, checkpointing"), COEFFICIENTS),
        *itertools.product(("DDP, tied, checkpointing", "root", "head, freed"), COEFFICIENTS[:1]),
    ]
    for name, (values, left_out, short) in cases:
        coefficients = torch.tensor(values)
        plain, ours, spread = pair(name, "loss")
        batches = (part.split(ROWS)[rank] for part in (ids, labels, weights, coefficients))
        (*given, own_weights, own), ran = batches, []

        def log_probs(rows, length=LENGTH, spread=spread, ran=ran, given=given):
            ran.append((torch.is_grad_enabled(), len(rows)))
            chosen, targets = (part[rows, :length] for part in given)
            return spread(input_ids=chosen, labels=targets, fused_lm_head=True).log_probs

        stand_in = functools.partial(log_probs, torch.tensor([0]), 4) if short else None
        found = split_by_coefficient(log_probs, own, stand_in=stand_in)
        (found * (own_weights * own[:, None]).to(found.device)).sum().mul(WORLD).backward()
        logps = plain_log_probs(plain(input_ids=ids).logits, labels)
        (logps * weights * coefficients[:, None]).sum().backward()
        check_gradients(ours, plain)
        counted = max(1, ROWS[rank] - left_out[rank])
        assert ran == [(True, counted)] + [(False, left_out[rank])] * (left_out[rank] > 0), ran


CHECKS = (accumulated, shared_prompts, shared_prompts_refused, without_coefficient, checkpoints, tensor_parallel)
CHECKS += (first_fsdp,)


def work(rank):
    todo = {f"{name}, {kind}": functools.partial(compare, name, kind) for kind in TRAINED for name in TRAINED[kind]}
    for name, run in (todo | {check.__name__: check for check in CHECKS}).items():
        if find_spec("peft") or "adapter" not in name:
            with case_named(name):
                run(rank=rank)


@pytest.mark.distributed
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_on_two_processes_is_that_of_one(tmp_path, backend):
    """All cases in one start of the processes, which takes longer than they do."""
    start(work, WORLD, tmp_path, backend="cpu:gloo,cuda:nccl" if backend == "nccl" else backend)


# --- HSDP: sharded over some processes, replicated over others --------------------------------------------------------

#: Sequences of each process, by their number.
HYBRID_ROWS = {4: (1, 1, 2, 1), 2: ROWS}
HYBRID = ("root", "root, tied", "tail, freed", "tail, kept", "tail, tied, freed", "head, half")


def hybrid(rank, sizes):
    mesh = init_device_mesh(device_type(), sizes, mesh_dim_names=("replicate", "shard"))
    for name, kind, steps in itertools.product(HYBRID, ("log-probs", "patched"), (1, 3)):
        with case_named(f"{name}, {kind}, {steps}"):
            accumulate(rank, name, kind, steps, HYBRID_ROWS[mesh.size()], mesh=mesh)


@pytest.mark.distributed
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [pytest.param((2, 2), marks=pytest.mark.slow), (2, 1), (1, 2)])
def test_hybrid_sharding(tmp_path, sizes, backend):
    if (backend == "gloo") != (sizes == (2, 2)):
        pytest.skip("four processes on CPUs, or two GPUs")
    start(hybrid, sizes[0] * sizes[1], tmp_path, sizes, backend=backend)


# --- TRL's trainers under accelerate's configurations ----------------------------------------------------------------

#: Environment variables, as ``accelerate launch`` sets them.
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
REPLICAS = {f"PARALLELISM_CONFIG_DP_{kind}_SIZE": "2" for kind in ("REPLICATE", "SHARD")}
CONFIGURATIONS = {"DDP": {}, "FSDP2": FSDP2, "HSDP": {**FSDP2, **REPLICAS, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}}


def trainers_of_trl(rank, folder):
    import accelerate
    from accelerate.state import AcceleratorState, PartialState

    from tests.trl import trainers

    def on_cpu(state):  # accelerate would shard nothing on CPUs
        state.device, state.distributed_type = torch.device("cpu"), accelerate.DistributedType.MULTI_GPU

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")

    def build_anew(build, *arguments, **options):
        PartialState._reset_state()
        AcceleratorState._reset_state()
        chosen.share_prompts = True
        return build(*arguments, **options)

    # Rewards leave half of the prompts without advantage, on other processes in each step.
    builds = {"SFT": trainers.sft, "GRPO": functools.partial(trainers.grpo, beta=0.0, rewards=trainers.reward_half)}
    for (name, variables), trainer in itertools.product(CONFIGURATIONS.items(), builds):
        with pytest.MonkeyPatch.context() as patched, case_named(f"{name}, {trainer}"):
            for variable, value in variables.items():
                patched.setenv(variable, value)
            if variables:
                patched.setattr(PartialState, "set_device", on_cpu)
            build = functools.partial(build_anew, builds[trainer])
            for found, expected in trainers.check_training(build, folder / name / trainer, optim="sgd"):
                assert isinstance(found, DTensor) == bool(variables)
                assert relative_error(whole(found), whole(expected)) < 2e-6


@pytest.mark.distributed
@pytest.mark.slow
def test_trainers_on_four_processes(tmp_path):
    start(trainers_of_trl, 4, tmp_path, tmp_path)
