"""Hidden states of any strides on a GPU: what the tensor memory accelerator cannot load, pointers do."""

import pytest
import torch

from liger_losses import (
    EngineOptions,
    LigerFusedLinearJSDLoss,
    LogitTransform,
    Teacher,
    linear_logps,
    linear_statistics,
)
from tests.reference import problem

pytestmark = pytest.mark.gpu
MiB = 2**20

#: Hidden states [N, H] from memory of 2 N + 1 by 2 H entries: N is 300, H is 64.
STRIDES = {
    "one row for all": lambda m: m[0, :64].expand(300, 64),
    "one row of a batch for all": lambda m: m[:1, :64].view(1, 1, 64).expand(1, 300, 64)[0],
    "rows that overlap": lambda m: m.flatten().as_strided((300, 64), (16, 1)),
    "transposed": lambda m: m[:64, :].flatten().as_strided((300, 64), (1, 64)),
    "every other column": lambda m: m[:300, ::2],
    "every other row": lambda m: m[:600:2, :64],
    "from the second entry on": lambda m: m.flatten()[1:].as_strided((300, 64), (128, 1)),
    "rows of an odd length": lambda m: m.flatten().as_strided((300, 64), (65, 1)),
}


@pytest.mark.parametrize("transform", [{}, {"softcap": 12.0}], ids=["plain", "soft-cap"])
@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
def test_hidden_states_of_any_strides(strides, transform):
    """Results and gradients are those of a copy whose rows are contiguous."""
    memory, weight, labels, _ = (None if t is None else t.detach().cuda() for t in problem(601, 128, 2003))
    memory, weight, labels = memory.bfloat16(), weight[:, :64].bfloat16().contiguous(), labels[:300]
    outcomes = []
    for copy in (False, True):
        hidden, head = strides(memory), weight.clone().requires_grad_()
        hidden = (hidden.contiguous() if copy else hidden).requires_grad_()
        options = {"transform": LogitTransform(**transform)}
        with torch.no_grad():
            found = [linear_logps(hidden, head, labels, **transform)]
            found += linear_statistics(hidden, head, labels, ("logp", "entropy"), **options)[:2]
        for strategy in ("two_pass", None):
            logps = linear_statistics(hidden, head, labels, **options, options=EngineOptions(strategy=strategy)).logp
            found += [logps.detach(), *torch.autograd.grad(logps.sum(), [hidden, head])]
        teacher = Teacher(hidden.detach(), weight)
        loss = LigerFusedLinearJSDLoss(workspace=4 * MiB)(head, hidden, labels, teacher)[0]
        outcomes.append([*found, *torch.autograd.grad(loss, [hidden, head])])
    torch.testing.assert_close(*outcomes, rtol=2e-2, atol=2e-3)
