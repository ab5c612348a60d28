"""Without Triton, as on macOS, on Windows and beside CPU builds of torch, and without what else need not be there."""

import re

import pytest

from tests.processes import printed_by

#: Prints what losses, ``patch`` and TRL do, without the modules that are named, once torch is imported.
SCRIPT = """
import sys
for name in {absent}:
    sys.modules[name] = None
import torch, warnings
warnings.simplefilter("error")  # torch warns where NumPy is first missed: at its own import, and not at this library's
import liger_losses
from liger_losses import Completions, LigerFusedLinearCrossEntropyLoss, LigerFusedLinearDPOLoss, Teacher
from liger_losses import LigerFusedLinearJSDLoss, doctor
weight, hidden = torch.randn(50, 16, requires_grad=True), torch.randn(2, 8, 16, requires_grad=True)
labels = torch.arange(16).view(2, 8)
pair = Completions(hidden, labels, ref_logps=torch.zeros(2))
for loss in (
    LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels),
    LigerFusedLinearDPOLoss()(weight, pair, pair)[0],
    LigerFusedLinearJSDLoss()(weight, hidden, labels, Teacher(torch.randn(2, 8, 16), torch.randn(50, 16)))[0],
    liger_losses.modules.RMSNorm(16)(hidden).sum(),
):
    loss.backward()
print(*doctor.devices(), sep="\\n")
warnings.simplefilter("ignore")  # other packages' own
def tried(call):
    try:
        print(call())
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}")
def patched():
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    report = liger_losses.patch(model)
    model(input_ids=labels, labels=labels).loss.backward()
    return f"trained with {{report.replaced[-1].path}}"
tried(patched)
tried(lambda: f"enabled: {{liger_losses.trl.enable()}}")
tried(lambda: liger_losses.linear_logps(hidden, weight, labels, backend="triton"))
"""
#: Modules that are absent, and what is then said, in this order.
ABSENT = {("triton",): "trained with lm_head.*enabled: None"}
ABSENT["numpy", "triton", "transformers", "trl"] = "NotFoundError: .*transformers.*ImportError: .*trl needs TRL"
ALWAYS = "CPU, .* threads: torch operations.*{}.*ValueError: backend='triton' cannot serve this call: triton is not "


@pytest.mark.slow
@pytest.mark.parametrize("absent", ABSENT, ids=" ".join)
def test_what_works_without_a_module(absent):
    """Losses and their gradients always; what needs a module says its name."""
    if "trl" not in absent:
        pytest.importorskip("trl", reason="trl is not installed")
    printed = printed_by("-c", SCRIPT.format(absent=absent), TRITON_INTERPRET="0")
    assert re.search(ALWAYS.format(ABSENT[absent]), printed, re.DOTALL), printed
