"""How calls run: all numbers that a plan chooses, of shapes that no test computes."""

from dataclasses import replace

import pytest
import torch

from liger_losses import EngineOptions
from liger_losses.chunked.core.plan import MiB, Signature, least_bytes, plan, plans, row_bytes
from liger_losses.chunked.core.stream import PLANNERS
from liger_losses.chunked.core.weights import Dense, Quantized

pytest.importorskip("triton")

#: A loss of single tokens on an H200.
CALL = Signature(
    tokens=16384, trained=16384, hidden_size=2048, columns=128256, kept=False, statistics=frozenset({"logp"}),
    metrics=frozenset(), operand=torch.bfloat16, device=torch.device("cuda"), backend="triton", trains_weight=True,
    trains_hidden=True, copied_bytes=0, weights=(Dense,), gradients_in_backward=False, memory=140 * 2**30,
)  # fmt: skip
COUPLED = {"gradients_in_backward": True}
WITHOUT_GRADIENTS = {"trains_weight": False, "trains_hidden": False}
OF_CORE = {"statistics": frozenset({"logp", "mean_logp"})}  # of which no accelerator has gradients
TEACHER = {"teacher_columns": 128256, "teacher_size": 2048, "statistics": frozenset({"divergence"})}
#: Of a matrix in fp32 under autocast.
CAST = {"copied_bytes": 6 * 2048, "copy_bytes": 2 * 2048}
SMALL = {"options": EngineOptions(workspace=64 * MiB)}
ON_CPU = {"device": torch.device("cpu"), "memory": 0, "operand": torch.float32, "backend": "torch"}

#: What differs from the call, and the block, the tokens whose gradients are added together, those whose logits exist
#: at a time, and whether blocks are kept.
PLANS = [
    ({}, ("exponentials", 16384, 2048, False)),
    ({"tokens": 100}, ("exponentials", 128, 128, False)),
    (COUPLED, ("exponentials", 16384, 16384, True)),
    (COUPLED | {"hidden_size": 4096}, ("exponentials", 16384, 16384, True)),
    ({"ranks": 2}, ("exponentials", 16384, 4096, False)),
    ({"ranks": 2, "statistics": frozenset({"logp", "entropy"})}, ("core", 2048, 2048, False)),
    (WITHOUT_GRADIENTS, ("statistics", 16384, 16384, False)),
    ({"kept": True, "columns": 64}, ("kept", 16384, 16384, False)),
    (OF_CORE, ("core", 2048, 512, False)),
    (OF_CORE | {"tokens": 8192}, ("core", 1024, 1024, False)),
    (OF_CORE | {"options": EngineOptions(chunk_size=300)}, ("core", 300, 300, False)),
    (TEACHER | {"teacher_columns": 1, "teacher_size": 0} | WITHOUT_GRADIENTS, ("core", 512, 512, False)),
    # Logits are kept up to 1/32 of the GPU's memory.
    (OF_CORE | COUPLED | {"tokens": 8938}, ("core", 8938, 8938, True)),
    (OF_CORE | COUPLED | {"tokens": 8939}, ("core", 1024, 1024, False)),
    (OF_CORE | COUPLED | {"tokens": 4470, "memory": 70 * 2**30}, ("core", 896, 896, False)),
    (OF_CORE | COUPLED | {"tokens": 800, "options": EngineOptions(keep=0)}, ("core", 896, 896, False)),
    (TEACHER, ("core", 2048, 512, False)),
    (TEACHER | {"tokens": 2048}, ("core", 1024, 1024, False)),
    (TEACHER | {"tokens": 32768}, ("core", 4096, 512, False)),
    (SMALL, ("core", 152, 37, False)),
    (CAST, ("exponentials", 16384, 2048, False)),
    (CAST | COUPLED | {"tokens": 8192}, ("exponentials", 8192, 8192, True)),
    (CAST | {"memory": 8 * 2**30}, ("exponentials", 16384, 2048, False)),
    (CAST | WITHOUT_GRADIENTS, ("statistics", 16384, 16384, False)),
    (CAST | {"options": EngineOptions(workspace=300 * MiB)}, ("core", 661, 164, False)),
    (ON_CPU, ("core", 1024, 1024, False)),
]


def call_of(changed):
    return replace(CALL, **({"trained": changed["tokens"]} if "tokens" in changed else {}), **changed)


@pytest.mark.parametrize(("changed", "expected"), PLANS)
def test_numbers_of_plans(changed, expected):
    made = plan(call_of(changed), tuple(PLANNERS))
    assert (made.name, made.tokens, made.block_tokens, made.keeps) == expected


def test_a_sum_of_many_parts_is_taken_by_tiles_or_in_fp32():
    """A weight's gradient in half precision has at most 8 parts."""
    calls = [call_of(OF_CORE | COUPLED | {"tokens": n, "targets_of_many_parts": 1}) for n in (8192 + 1024, 65536)]
    assert [plan(call, tuple(PLANNERS)).tile for call in calls] == [(9216, 11968), (16384, 5376)]
    of_two = [call_of(OF_CORE | {"tokens": n, "targets_of_many_parts": 2}) for n in (4096, 4224)]
    made = [plan(call, tuple(PLANNERS)) for call in of_two]
    assert [(of_one.tile, of_one.accumulate) for of_one in made] == [(None, None), (None, torch.float32)]


@pytest.mark.parametrize(
    ("teacher", "copied", "block_rows"),
    [({}, 32000, 512), (TEACHER | {"teacher_columns": 32000, "quantized_teacher": True}, 768, 970)],
)
def test_a_dequantized_head_takes_of_the_workspace_its_copy_and_a_part_as_it_is_made(teacher, copied, block_rows):
    heads = 1 + bool(teacher)
    quantized = {"weights": (Quantized,), "copied_bytes": heads * 12 * 2048, "copy_bytes": heads * 2 * 2048}
    quantized["trains_weight"] = False
    within = {"columns": 32000, "tokens": 8192, "options": EngineOptions(workspace=300 * MiB)}
    made = plan(call_of(OF_CORE | quantized | within | teacher), tuple(PLANNERS))
    assert (made.products.columns, made.block_tokens) == (copied, block_rows)


def test_the_least_workspace():
    call = call_of(OF_CORE)
    least = least_bytes(call, row_bytes(call))
    given = [replace(call, options=EngineOptions(workspace=least - less)) for less in (0, 1)]
    assert plan(given[0], tuple(PLANNERS)).block_tokens == 1
    with pytest.raises(ValueError, match=f"give at least {least} bytes"):
        plan(given[1], tuple(PLANNERS))


def plans_of(*changes, shared=True):
    """Of several targets of one head, or of a head each."""
    heads = tuple((0 if shared else i,) for i in range(len(changes)))
    return plans(tuple(call_of(changed) for changed in changes), heads, tuple(PLANNERS))


def test_several_targets_have_many_parts_together():
    """Of exponentials, four times as many: their largest terms are added once."""
    assert {made.accumulate for made in plans_of(*[{"tokens": 32768}] * 4)} == {torch.float32}
    few = plans_of(*[{"tokens": 128}] * 9)
    assert {(made.name, made.accumulate) for made in few} == {("exponentials", None)}


def test_blocks_of_several_targets_live_together():
    half = OF_CORE | COUPLED | {"tokens": 5000}
    assert [made.keeps for made in plans_of(half, half, shared=False)] == [False, False]
    others = [OF_CORE | COUPLED | {"tokens": 8192, "columns": 32000}, OF_CORE | COUPLED | {"tokens": 2048}]
    assert [made.keeps for made in plans_of(*others, shared=False)] == [True, True]


def test_losses_of_many_parts_keep_nothing():
    """The second pass of losses of single tokens, by tiles, takes no more memory than their first would alone."""
    (made,) = plans_of(OF_CORE | {"tokens": 24576, "hidden_size": 4096, "columns": 32000})
    assert not made.keeps
    assert made.tile == (4096, 4928)
