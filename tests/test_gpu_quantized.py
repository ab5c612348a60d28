"""Quantized heads on a GPU: Triton's kernels on logits, products on a second stream, in bf16."""

import pytest
import torch
import torch.nn.functional as F

from liger_losses import Head, LigerFusedLinearCrossEntropyLoss, LigerFusedLinearJSDLoss, Teacher, linear_logps
from liger_losses.chunked.engine.adapters import LowRank
from tests.quantized_layers import Int8Weight
from tests.reference import assert_as_exact_as_plain, double, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
T, H, V = 700, 256, 5003


def inputs():
    torch.manual_seed(0)
    quantized = Int8Weight(torch.randn(V, H, device="cuda") / 16)
    hidden = torch.randn(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(V, (T,), device="cuda")
    labels[:50] = -100
    a = torch.randn(8, H, device="cuda", dtype=torch.bfloat16).div(16).requires_grad_()
    b = torch.randn(V, 8, device="cuda", dtype=torch.bfloat16).div(4).requires_grad_()
    return quantized, hidden, labels, a, b


@pytest.mark.parametrize("workspace", [None, 2**23])
def test_cross_entropy_and_lora(workspace):
    quantized, hidden, labels, a, b = inputs()
    head = Head(quantized, adapters=(LowRank(a, b, 0.5),))
    loss = LigerFusedLinearCrossEntropyLoss(workspace=workspace)(head, hidden, labels)
    found = (loss, *torch.autograd.grad(loss, (hidden, a, b)))

    def plain(x, a, b, w):
        return F.cross_entropy(
            (x @ w.t() + 0.5 * (x @ a.t()) @ b.t()).to(torch.promote_types(x.dtype, torch.float32)), labels
        )

    results = []
    for tensors in ((hidden, a, b), double(hidden, a, b)):
        value = plain(*tensors, quantized.rows(0, V).to(tensors[0].dtype))
        results.append((value, *torch.autograd.grad(value, tensors)))
    for ours, rounded, exact in zip(found, *results, strict=True):
        assert_as_exact_as_plain(ours, rounded, exact)


def test_log_probabilities_and_distillation():
    quantized, hidden, labels, *_ = inputs()
    weight = quantized.rows(0, V).bfloat16()
    teacher_hidden = hidden.detach() * 1.1
    results = []
    for head in (Head(quantized), weight):
        found = linear_logps(hidden, head, labels, entropy=True)
        value = found.logp.sum() + found.entropy.sum()
        loss, _ = LigerFusedLinearJSDLoss()(head, hidden, labels, Teacher(teacher_hidden, head))
        results.append((value, *torch.autograd.grad(value, hidden), loss, *torch.autograd.grad(loss, hidden)))
    assert all(relative_error(a, b) < 1e-2 for a, b in zip(*results, strict=True))
