"""Two custom losses. Both inherit call forms, checks and memory bounds; neither materializes the logits.

- Cal-DPO (arXiv:2412.14516), a preference loss in under 10 lines: DPO and a calibration term, which pulls the chosen
  completion's reward to 1/2 and the rejected one's to -1/2.
- The focal loss (arXiv:1708.02002), on the general base class: any function of per-token statistics.

    python examples/custom_loss.py
"""

import torch
import torch.nn.functional as F

from liger_losses import ChunkedLoss, Completions, PreferenceLoss


class CalDPOLoss(PreferenceLoss):
    """``-log sigmoid(w - l) + (w - 1 / (2 beta))^2 + (l + 1 / (2 beta))^2`` with log-ratios w and l."""

    def __init__(self, beta=0.1, **options):
        super().__init__(beta=beta, use_ref_model=True, **options)

    def pair_loss(self, pairs):
        chosen, rejected = pairs.chosen_logratios, pairs.rejected_logratios
        target = 1 / (2 * self.beta)
        return -F.logsigmoid(chosen - rejected) + (chosen - target).square() + (rejected + target).square()


class FocalLoss(ChunkedLoss):
    """``- mean (1 - p)^2 log p`` (arXiv:1708.02002, eq. 5), and the mean entropy as a metric."""

    statistics = ("logp",)
    metrics = ("entropy",)

    def loss(self, statistics, mask):
        tokens = mask.sum().clamp(min=1)
        focal = -(1 - statistics.logp.exp()).square() * statistics.logp
        return focal.sum() / tokens, {"entropy": statistics.entropy.sum() / tokens}


def main():
    torch.manual_seed(0)
    vocab_size, hidden_size, pairs = 1000, 64, 4
    weight = torch.nn.Parameter(torch.randn(vocab_size, hidden_size) / hidden_size**0.5)
    sides = []
    for length in (24, 31):  # chosen and rejected may differ in length
        hidden_states = torch.randn(pairs, length, hidden_size, requires_grad=True)
        labels = torch.randint(vocab_size, (pairs, length))
        labels[:, :8] = -100  # the prompt
        sides.append(Completions(hidden_states, labels, ref_logps=torch.full((pairs,), -150.0)))

    loss, metrics = CalDPOLoss(beta=0.1)(weight, chosen=sides[0], rejected=sides[1])
    loss.backward()
    assert weight.grad is not None
    print(f"Cal-DPO {loss.item():.3f}, chosen rewards {metrics.chosen_rewards.tolist()}")
    print(f"gradient of lm_head: {tuple(weight.grad.shape)}, norm {weight.grad.norm().item():.3f}")

    loss, metrics = FocalLoss()(weight, sides[0].hidden_states, sides[0].labels)
    print(f"focal loss {loss.item():.3f}, entropy {metrics['entropy'].item():.3f} nats")


if __name__ == "__main__":
    main()
