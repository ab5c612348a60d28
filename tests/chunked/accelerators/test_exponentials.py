"""Exponentials instead of logits, and neither stored: what the combinations of tests/results do not reach."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from liger_losses import EngineOptions, linear_logps, linear_token_loss
from liger_losses.chunked.accelerators import exponentials
from liger_losses.chunked.core import stream
from tests.kernels.cases import DEVICE
from tests.losses import CE
from tests.reference import double, problem, relative_error
from tests.seam import leave_out_zero_rows, planned_blocks

pytestmark = pytest.mark.usefixtures("small_tiles", "default_gpu")
pytest.importorskip("triton")


def plans(call):
    """The names of the plans of a call, and its result."""
    with planned_blocks() as names:
        return names, call()


def inputs(n=40, hidden_size=24, vocab=90, masked=0.2):
    return problem(n, hidden_size, vocab, dtype=torch.bfloat16, masked=masked)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_of_a_block_that_is_kept_are_moved_in_its_memory(backend, monkeypatch):
    """Some at a time, where few tokens have a gradient."""
    monkeypatch.setattr(stream, "MOVED_BYTES", 2000)
    hidden, weight, labels, _ = inputs(masked=0.0)
    upstream, found = torch.linspace(-1, 1, 40) * (torch.arange(40) % 3 > 0), []
    for leaving_out in (leave_out_zero_rows, nullcontext):
        with leaving_out():
            logps = linear_logps(hidden, weight, labels, backend=backend)
            found.append(torch.autograd.grad(logps, (hidden, weight), upstream))
    for ours, whole in zip(*found, strict=True):
        # Products of other rows round other sums to bf16.
        torch.testing.assert_close(ours, whole, rtol=2e-2, atol=1e-2 * float(whole.abs().max()))


def test_many_blocks_are_as_exact_as_one():
    """What labels add, most of the weight's gradient, is rounded once for all blocks."""
    hidden, weight, labels, _ = inputs(96, 16, 200, masked=0.0)
    labels = labels % 20  # of few rows of the weight
    errors, wide = [], double(hidden, weight)
    exact = torch.autograd.grad(-(wide[0] @ wide[1].t()).log_softmax(-1).gather(1, labels[:, None]).sum(), wide[1])[0]
    for chunk in (96, 6):
        loss = CE(reduction="sum", chunk_size=chunk, backend="triton")
        names, value = plans(lambda loss=loss: loss(weight, hidden, labels))
        assert {*names} == {"exponentials"}
        errors.append(relative_error(torch.autograd.grad(value, weight)[0], exact))
    assert errors[1] < 1.5 * errors[0], errors


def test_a_block_without_a_derivative_moves_no_label_terms():
    hidden, weight, labels, _ = inputs(8, 16, 60, masked=0.0)
    k = torch.tensor([0.0] * 4 + [1.0] * 4).to(DEVICE)

    def loss(s, y, k):
        return k * s.logp if k.any() else k * 1.0

    options = EngineOptions(chunk_size=4, backend="triton")
    names, (found, _) = plans(
        lambda: linear_token_loss(hidden, weight, labels, loss, token_inputs={"k": k}, options=options)
    )
    assert names == ["exponentials"]
    wide = double(hidden, weight)
    exact = (wide[0] @ wide[1].t()).log_softmax(-1).gather(1, labels[:, None])[4:].sum()
    for ours, theirs in zip(
        torch.autograd.grad(found, (hidden, weight)), torch.autograd.grad(exact, wide), strict=True
    ):
        assert relative_error(ours, theirs) < 8e-3


def test_only_a_small_workspace_leaves_a_call_to_the_core():
    """And no other error."""
    hidden, weight, labels, _ = inputs()
    loss = CE(backend="triton", workspace=999)
    with pytest.raises(ValueError, match="workspace=999 bytes is too small"):
        loss(weight, hidden, labels)
    with (
        mock.patch.object(exponentials, "by_blocks", side_effect=ValueError("another")),
        pytest.raises(ValueError, match="another"),
    ):
        CE(backend="triton", workspace=10**6)(weight, hidden, labels)


def test_the_first_of_two_passes_stores_nothing():
    """Where blocks are not kept until backward, as in a pass without gradients."""
    hidden, weight, labels, _ = inputs()
    options = {"workspace": 12_000, "backend": "triton"}
    with torch.no_grad():
        alone = linear_logps(hidden, weight, labels, **options)
    used, together = plans(lambda: linear_logps(hidden, weight, labels, **options))
    assert used == ["core", "statistics"]
    assert torch.equal(alone, together)
