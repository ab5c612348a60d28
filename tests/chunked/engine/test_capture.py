"""Calls that a CUDA graph can capture: with ``compact=False`` nothing is read by the host."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_losses import Teacher, linear_logps
from liger_losses.kernels._triton import INTERPRETED, triton
from tests.losses import CE, DPO, GRPO, JSD, KTO, SimPO
from tests.reference import problem

#: For their results the host waits for a GPU; ``lift_fresh`` is ``torch.tensor`` of numbers, a copy from the host.
WAITING = ("_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "lift_fresh")


class NothingWaits(TorchDispatchMode):
    """Raises where the host would wait for a GPU."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            index is not None and index.dtype == torch.bool
            for index in (arguments[1] if isinstance(arguments[1], (list, tuple)) else ())
        )
        if name in WAITING or by_mask:
            raise AssertionError(f"{function} makes the host wait")
        return function(*arguments, **(keywords or {}))


def calls(backend, compact=False):
    """Losses that can be captured, of the tensors they are given."""
    options = {"compact": compact, "backend": backend}

    def cross_entropy(hidden, weight, labels):
        smooth = CE(label_smoothing=0.1, lse_square_scale=1e-3, **options)
        return CE(**options)(weight, hidden, labels) + smooth(weight, hidden, labels)

    def dpo(hidden, weight, labels, loss=DPO):
        reference = {} if loss is SimPO else {"ref_input": hidden.detach().flip(0).view(4, -1, 24)}
        reference |= {"ref_weight": weight.detach()} if reference else {}
        return loss(**options)(weight, hidden.view(4, -1, 24), labels.view(4, -1), **reference)[0]

    def grpo(hidden, weight, labels):
        ids, advantages = labels.clamp(min=0).view(4, -1), torch.linspace(-1, 1, 4, device=labels.device)
        mask = (labels != -100).view(4, -1)
        loss = GRPO(use_ref_model=False, beta=0.0, **options)
        return loss(hidden.view(4, -1, 24), weight, ids, mask, advantages)[0]

    def kto(hidden, weight, labels):
        good = torch.arange(4, device=labels.device) % 2 == 0
        loss = KTO(use_ref_model=False, **options)
        return loss(hidden.view(4, -1, 24), weight, labels.view(4, -1), None, good, kl=0.0)[0]

    def jsd(hidden, weight, labels):
        teacher = Teacher(hidden.detach().flip(0), weight.detach())
        return JSD(**options)(weight, hidden, labels, teacher)[0]

    return {
        "cross-entropy": cross_entropy,
        "cross-entropy, items": lambda h, w, y: CE(**options)(w, h, y, num_items_in_batch=31),
        "log-probs": lambda h, w, y: linear_logps(h, w, y, entropy=True, **options).logp.square().sum(),
        "log-probs, two passes": lambda h, w, y: linear_logps(h, w, y, workspace=2**19, **options).square().sum(),
        "DPO": dpo,
        "DPO, ld_alpha": lambda h, w, y: dpo(h, w, y, partial(DPO, ld_alpha=0.3)),
        "SimPO": lambda h, w, y: dpo(h, w, y, SimPO),
        "GRPO": grpo,
        "KTO": kto,
        "JSD": jsd,
    }


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "torch") for name in calls("torch")]
    + [(name, "triton") for name in ("cross-entropy", "log-probs, two passes", "DPO", "JSD")],
)
def test_nothing_waits_without_compaction(name, backend, monkeypatch):
    if backend == "triton" and (triton is None or not INTERPRETED):
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr("liger_losses.checks.host_checks", lambda device: False)
    sizes, dtype = ((12, 24, 61), torch.bfloat16) if backend == "triton" else ((40, 24, 97), torch.float32)
    hidden, weight, labels, _ = problem(*sizes, dtype=dtype)
    results = []
    for compact in (True, False):  # the first call fills caches
        call = calls(backend, compact)[name]
        with nullcontext() if compact else NothingWaits():
            loss = call(hidden, weight, labels)
            results.append([loss, *torch.autograd.grad(loss, (hidden, weight))])
    torch.testing.assert_close(*results, rtol=2e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(calls("torch")))
def test_a_captured_call_is_replayed_with_new_inputs(name):
    call = calls("triton")[name]

    def inputs(seed):
        tensors = problem(400, 24, 1031, dtype=torch.bfloat16, masked=0.2 + 0.2 * seed, seed=seed)
        return [tensor.detach().cuda() for tensor in tensors[:3]]

    hidden, weight, labels = inputs(0)
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def run():
        loss = call(*leaves, labels)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for seed in (1, 2):
        with torch.no_grad():
            for tensor, new in zip((hidden, weight, labels), inputs(seed), strict=True):
                tensor.copy_(new)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outputs, run(), strict=True))


@pytest.mark.gpu
def test_what_cannot_be_captured_says_so():
    hidden, weight, labels = (tensor.detach().cuda() for tensor in problem(40, 24, 97)[:3])
    linear_logps(hidden, weight, labels)
    with pytest.raises(RuntimeError, match="compact=False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        linear_logps(hidden, weight, labels)
    assert linear_logps(hidden, weight, labels).isfinite().all()
