"""Use this library's classes in trainers that build losses of ``liger_kernel.chunked_loss``.

TRL up to 1.12 builds them with ``use_liger_kernel=True``. This library's classes have the same names, constructor
keywords, calls and metrics, so only the import changes: call :func:`use_instead_of_liger` before you import a trainer.

    python examples/trl_liger_compat.py
"""

from __future__ import annotations

import sys
import types

import torch

import liger_losses


def use_instead_of_liger():
    """Let ``from liger_kernel.chunked_loss import LigerFusedLinear...`` give this library's classes.

    The rest of liger-kernel stays as it is, and need not be installed for this.

    Returns:
        The module that stands in for ``liger_kernel.chunked_loss``.

    Raises:
        RuntimeError: ``liger_kernel.chunked_loss`` has been imported before, so that its classes may be in use already.
    """
    name = "liger_kernel.chunked_loss"
    if name in sys.modules:
        raise RuntimeError(
            f"{name} has been imported already: call use_instead_of_liger() before any trainer's import."
        )
    module = types.ModuleType(name)
    for class_name in liger_losses.__all__:
        if class_name.startswith("LigerFusedLinear"):
            setattr(module, class_name, getattr(liger_losses, class_name))
    sys.modules[name] = module
    return module


def main():
    use_instead_of_liger()
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss  # as in trl/trainer/dpo_trainer.py

    torch.manual_seed(0)
    lm_head, ref_lm_head = (torch.nn.Linear(64, 1000, bias=False) for _ in range(2))
    hidden_states = torch.randn(4, 24, 64, requires_grad=True)  # two chosen completions, then two rejected
    ref_hidden_states = torch.randn(4, 24, 64)
    labels = torch.randint(1000, (4, 24))
    labels[:, :8] = -100  # the prompts

    # What that trainer does with it.
    loss_function = LigerFusedLinearDPOLoss(beta=0.1, loss_type="sigmoid")
    loss, metrics = loss_function(
        lm_head.weight, hidden_states, labels, lm_head.bias, ref_hidden_states, ref_lm_head.weight, ref_lm_head.bias
    )
    loss.backward()
    chosen_logps, rejected_logps, _, _, _, chosen_rewards, rejected_rewards = metrics
    print(f"{type(loss_function).__module__}: loss {loss.item():.4f}")
    print(f"log-probabilities {chosen_logps.tolist()} and {rejected_logps.tolist()}")
    print(f"reward margins {(chosen_rewards - rejected_rewards).tolist()}")


if __name__ == "__main__":
    main()
