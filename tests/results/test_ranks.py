"""Several processes: results and gradients are those of one, where they share a vocabulary or cut the sequences."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from liger_losses import Head, linear_logps
from tests.processes import BACKENDS, case_named, device_type, start
from tests.reference import relative_error, tensors_of
from tests.results.combinations import COLUMNS, Row, check, rows
from tests.results.losses import LOSSES, OPERATIONS, VARIANTS, Part, batch, case_of, compare, gradients, run
from tests.seam import BACKENDS as OF_CPUS
from tests.seam import faster, small_tiles

#: How many rows of the vocabulary each of two and three ranks has, how many of the table's, and how many positions.
VOCABULARIES = {2: (23, 7), 3: (9, 1, 20)}
OF_TABLE = {2: (33, 12), 3: (13, 1, 31)}
POSITIONS = {2: (4, 2), 3: (2, 3, 1)}
#: Rows of the table of combinations, and those that take the Triton kernels.
ALONE = {
    "strategy": (None,), "layout": ("contiguous",), "invariant": (False,), "teacher": ("model", "narrower"),
    "ranks": ("alone",),
}  # fmt: skip
ASKS = tuple(a for a in COLUMNS["asks"] if a not in ("total variation", "alpha-beta 0.2 0.7") and "loss:" not in a)
SHARED = rows(**ALONE, asks=ASKS, targets=("one", "two heads"), dtype=("float64",), backend=("torch",))
IN_TRITON = rows(
    **ALONE, asks=("logp", "metrics", "token loss", "kept", "JSD"), weight=("dense", "frozen"), targets=("one",),
    blocks=("default", "chunks"), dtype=("bfloat16",), backend=("triton",),
)  # fmt: skip
OF_EXPONENTIALS = [
    Row(asks, bias="trained", transform=transform, dtype="bfloat16", backend="triton")
    for asks, transform in (("logp", "per token"), ("loss: cross entropy", "soft-cap"))
]


def turn(names, world):
    """Those of a number of ranks; the others are the other number's."""
    return [*names][world % 2 :: 2]


def shared_vocabulary(world):
    """The cases take turns with the numbers of ranks, and the variants of the head with the cases."""
    d, part = batch(), Part.of(dist.group.WORLD, VOCABULARIES[world])
    for i, name in enumerate(turn([*LOSSES, *OPERATIONS], world)):
        variant = list(VARIANTS)[(i + world) % len(VARIANTS)]
        with case_named(f"{name}, {variant}"):
            compare(case_of(name), d, VARIANTS[variant], part)


def combinations(world):
    """The rows take turns with the numbers of ranks."""
    for row in SHARED[world - 2 :: 2]:
        with case_named(str(row)):
            check(row, Part.of(dist.group.WORLD, OF_TABLE[world]))


def in_triton(world, chosen=None):
    """Some of them, and all whose blocks hold exponentials."""
    with faster(), small_tiles():
        for row in chosen or [*OF_EXPONENTIALS, *IN_TRITON[world - 2 : 13 : 4]]:
            with case_named(str(row)):
                check(row, Part.of(dist.group.WORLD, OF_TABLE[world]))


#: Losses of later tokens' rewards, with a result for each token, and with items that processes divide among them.
WHOLE = ("MiniLLM", "cross entropy, per token", "GRPO, by items")


def slices_of_sequences(world, group=None, part=None):
    """Context parallelism: each process has some positions of all sequences, and the whole head, or its part of the
    vocabulary. The losses take turns with the numbers of ranks."""
    group = group or dist.group.WORLD
    d, rank, cut = batch(), dist.get_rank(group), POSITIONS[group.size()]
    d["y"][0, cut[0] :] = d["y"][1, : cut[0]] = d["y"][2] = -100  # none on some ranks
    names = ("h", "other", "y", "logps", "columns", "top_logps")
    mine = {**d, **{name: d[name].split(cut, 1)[rank].clone() for name in names}}
    for name in turn((name for name in LOSSES if name not in WHOLE), world):
        with case_named(name):
            found, grads = run(functools.partial(LOSSES[name], group=group), mine, VARIANTS["bias"], part)
            expected, (of_hidden, *of_head) = run(LOSSES[name], d, VARIANTS["bias"])
            for a, b in zip(found, expected, strict=True):
                if b.dim() < 2:  # other metrics are of tokens
                    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)
            torch.testing.assert_close(grads[0], of_hidden.split(cut, 1)[rank], rtol=1e-6, atol=1e-9)
            for a, b in zip(grads[1:], of_head, strict=True):
                dist.all_reduce(a, group=group)
                torch.testing.assert_close(a, b if part is None else b[part.rows], rtol=1e-6, atol=1e-9)


def dtensors(world):
    """Weights [Shard(0)], and hidden states that are replicated or sharded along the sequence."""
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    d, variant = batch(), VARIANTS["bias"]
    names = ("cross entropy", "DPO", "GRPO", "KTO", "JSD", "logps", "GRPO, kept columns")
    for name, placement in itertools.product(names, (Replicate(), Shard(1))):
        call = case_of(name)
        expected, expected_grads = run(call, d, variant)
        hidden, other = (distribute_tensor(d[key], mesh, [placement]) for key in ("h", "other"))
        weight, bias, ref = (distribute_tensor(d[key], mesh, [Shard(0)]) for key in ("weight", "bias", "ref_weight"))
        for leaf in (hidden, weight, bias):
            leaf.requires_grad_()
        with case_named(f"{name}, DTensors, {placement}"):
            found = tensors_of(call(Head(weight, bias), Head(ref), {**d, "h": hidden, "other": other}))
            torch.testing.assert_close(found, expected)
            grads = gradients(found, (hidden, weight, bias))
            placements = [Partial() if placement == Replicate() else placement], [Shard(0)], [Shard(0)]
            for grad, at, b in zip(grads, placements, expected_grads, strict=True):
                assert list(grad.placements) == at, (grad.placements, at)
                torch.testing.assert_close(grad.full_tensor(), b)
    with case_named("compiled"):
        loss, parts = LOSSES["cross entropy"].build(), (weight.to_local(), bias.to_local())
        for head, states in ((Head(weight, bias), hidden), (Head(*parts, group=mesh.get_group()), d["h"])):
            compiled = torch.compile(lambda h, head=head: loss(head, h, d["y"]), backend="eager")
            torch.testing.assert_close(compiled(states), loss(d["weight"], d["h"], d["y"], bias=d["bias"]))
    with pytest.raises(TypeError, match=r"plain tensor.*group=weight.device_mesh.get_group.*full_tensor"):
        linear_logps(d["h"], weight, d["y"], bias=bias)
    with pytest.raises(TypeError, match="the weight is a DTensor and bias is not"):
        Head(weight, d["bias"])
    with pytest.raises(ValueError, match="Shard\\(dim=1\\)"):
        Head(distribute_tensor(d["weight"], mesh, [Shard(1)]))
    with pytest.raises(TypeError, match="hidden_states is a DTensor"):
        linear_logps(hidden, d["weight"], d["y"])


def single_precision(world):
    """In fp32, gradients are those of one process."""
    d, part = batch(torch.float32), Part.of(dist.group.WORLD, VOCABULARIES[world])
    for name in turn([*LOSSES, *OPERATIONS], world + 1):  # the other cases
        with case_named(f"{name}, fp32"):
            (_, grads), (_, expected) = (run(case_of(name), d, VARIANTS["bias"], each) for each in (part, None))
            for which, (a, b) in enumerate(zip(grads, expected, strict=True)):
                assert relative_error(a, b if which == 0 else b[part.rows]) < 4e-6, f"gradient {which}"


CHECKS = (shared_vocabulary, combinations, slices_of_sequences, dtensors, single_precision)


def work(rank, world):
    # Half-precision gradients of the hidden states are rounded by each rank: of three, by more than the table allows.
    for run_check in (*CHECKS, in_triton)[: None if world == 2 and "triton" in OF_CPUS else -1]:
        with case_named(run_check.__name__):
            run_check(world)


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "backend"), [(2, BACKENDS[0]), (3, BACKENDS[0])])
def test_several_processes(world, backend, tmp_path):
    """All cases in one start of the processes."""
    start(work, world, tmp_path, world, backend=backend)


def slices_and_vocabulary(rank):
    """Of four processes, two have each half of the positions, and two each part of the vocabulary."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("cp", "tp"))
    slices_of_sequences(2, mesh.get_group("cp"), Part.of(mesh.get_group("tp"), VOCABULARIES[2]))
    slices_of_sequences(3, mesh.get_group("cp"), Part.of(mesh.get_group("tp"), VOCABULARIES[2]))


@pytest.mark.distributed
@pytest.mark.slow
def test_two_dimensions(tmp_path):
    start(slices_and_vocabulary, 4, tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_two_gpus(backend, tmp_path):
    start(work, 2, tmp_path, 2, backend=backend)


@pytest.mark.distributed
@pytest.mark.slow
def test_all_rows_in_triton(tmp_path):
    """In spawned processes, each of which has its own order of the names in a set."""
    start(all_in_triton, 2, tmp_path, method="spawn")


def all_in_triton(rank):
    in_triton(2, IN_TRITON)
