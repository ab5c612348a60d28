"""Calls that a CUDA graph can capture: with ``compact=False`` nothing is read by the host."""

from functools import partial

import pytest
import torch

from liger_losses import Teacher, linear_logps
from tests.losses import CE, DPO, GRPO, JSD, KTO, SimPO
from tests.reference import problem


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
