"""Divergences in small workspaces on a GPU: log-sum-exps of rows, memory, and close teachers."""

import pytest
import torch

from liger_losses import DistillationLoss, Divergence, Teacher
from tests.kernels.test_row_lse import check_rows
from tests.losses import JSD

pytestmark = pytest.mark.gpu
MiB = 2**20
DIVERGENCES = {
    "forward KL": Divergence.forward_kl(),
    "reverse KL": Divergence.reverse_kl(),
    "JSD": Divergence.mixture(0.5, 0.5, 0.5),
    "mixture": Divergence.mixture(0.3, 0.3, 0.7),
    "total variation": Divergence.total_variation(),
    "alpha beta": Divergence.alpha_beta(0.4, 0.8),
    "cosine": Divergence.cosine(),
}


@pytest.mark.parametrize("every_option", [False, True], ids=["plain", "every option"])
@pytest.mark.parametrize("size", [(1, 8), (64, 4096), (192, 20013), (320, 9008)])
def test_rows_that_exist(size, every_option):
    check_rows(*size, every_option, "triton")


def inputs(tokens, hidden_size, teacher_size, vocab, masked=False, close=False):
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*size, scale=1.0):
        return (torch.randn(*size, device="cuda", generator=g) * scale).bfloat16()

    theirs, head = normal(tokens, teacher_size), normal(vocab, teacher_size, scale=2 * teacher_size**-0.5)
    hidden, weight = normal(tokens, hidden_size), normal(vocab, hidden_size, scale=2 * hidden_size**-0.5)
    if close:
        hidden, weight = theirs.clone(), head.clone()
        hidden[:, : teacher_size // 16] *= 1 + 2**-6
    labels = torch.randint(vocab, (tokens,), device="cuda", generator=g)
    if masked:
        labels[::3] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels, theirs, head


@pytest.mark.parametrize("close", [False, True], ids=["far", "close"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_small_workspaces_agree_with_large_ones(name, close):
    """Whose logits of all tokens are in memory once."""
    if close and name == "total variation":
        pytest.skip("its derivative is a sign, which is that of roundings where both logits are the same")
    hidden, weight, labels, theirs, head = inputs(1500, 512, 512 if close else 1024, 20016, close=close)
    found = []
    for workspace in (40 * MiB, 2000 * MiB):
        loss = DistillationLoss(DIVERGENCES[name], 0.2, 0.8, temperature=1.5, workspace=workspace)
        value = loss(weight, hidden, labels, Teacher(theirs, head))[0]
        found.append((value.detach(), *torch.autograd.grad(value, (hidden, weight))))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-8)
    for small, large in zip(*(gradients[1:] for gradients in found), strict=True):
        distance = (small.float() - large.float()).norm() / large.float().norm()
        assert distance < 5e-3


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("workspace", [180, 250])
def test_memory(workspace, masked, beta):
    """A call takes no more than its workspace beside the gradients that it returns."""
    hidden, weight, labels, theirs, head = inputs(4000, 512, 1024, 131072, masked)
    loss = JSD(0.0, 1.0, beta, workspace=workspace * MiB)
    for measured in (False, True):  # the first time, cuBLAS takes a workspace of its own
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        value = loss(weight, hidden, labels, Teacher(theirs, head))[0]
        gradients = torch.autograd.grad(value, (hidden, weight))
        torch.cuda.synchronize()
        if measured:
            taken = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in gradients)
            assert taken <= workspace * MiB
        del value, gradients
