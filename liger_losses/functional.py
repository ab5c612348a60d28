"""The losses as pure functions of log-probabilities, for log-probabilities that come from elsewhere.

These are the functions that the classes compute their losses with. p is the policy or student, B completions or pairs,
T tokens, n tokens, C columns of the vocabulary::

    import torch
    from liger_losses import functional

    chosen, rejected = torch.tensor([-12.0, -9.5], requires_grad=True), torch.tensor([-14.0, -9.0])
    reference = torch.tensor([-12.5, -9.5]), torch.tensor([-13.0, -9.5])
    loss = functional.dpo_loss(chosen, rejected, *reference, beta=0.1).mean()
    loss.backward()

- of pairs: :func:`dpo_loss`, :func:`cpo_loss`, :func:`simpo_loss`, :func:`orpo_loss`;
- of completions: :func:`kto_loss`, :func:`bco_loss`, :func:`unpaired_loss`; from tokens: :func:`sequence_logps`;
- of a batch: :func:`grpo_loss`, with :func:`k3`, :func:`high_entropy_mask`, :func:`vespo_weights`,
  :func:`fipo_weights`, and :func:`sampler_weights`;
- of tokens: :func:`cross_entropy`, :func:`minillm_returns`;
- of tokens, from the vocabulary: :func:`divergence`, :func:`forward_kl`, :func:`reverse_kl`, :func:`jsd`,
  :func:`total_variation`, :func:`alpha_beta_divergence`, :func:`sparse_divergence`.
"""

from liger_losses.chunked.losses.completion_loss import sequence_logps
from liger_losses.chunked.losses.cross_entropy_terms import cross_entropy
from liger_losses.chunked.losses.dpo import dpo_loss
from liger_losses.chunked.losses.minillm import minillm_returns
from liger_losses.chunked.losses.policy_estimates import k3
from liger_losses.chunked.losses.policy_objectives import grpo_loss, high_entropy_mask
from liger_losses.chunked.losses.policy_tables import PolicyOptions, fipo_weights, vespo_weights
from liger_losses.chunked.losses.reference_free import cpo_loss, orpo_loss, simpo_loss
from liger_losses.chunked.losses.sampler import SamplerMetrics, SamplerWeights, sampler_weights
from liger_losses.chunked.losses.softmax_divergences import (
    alpha_beta_divergence,
    divergence,
    forward_kl,
    jsd,
    reverse_kl,
    sparse_divergence,
    total_variation,
)
from liger_losses.chunked.losses.unpaired import bco_loss, kto_loss, unpaired_loss

__all__ = [
    "PolicyOptions",
    "SamplerMetrics",
    "SamplerWeights",
    "alpha_beta_divergence",
    "bco_loss",
    "cpo_loss",
    "cross_entropy",
    "divergence",
    "dpo_loss",
    "fipo_weights",
    "forward_kl",
    "grpo_loss",
    "high_entropy_mask",
    "jsd",
    "k3",
    "kto_loss",
    "minillm_returns",
    "orpo_loss",
    "reverse_kl",
    "sampler_weights",
    "sequence_logps",
    "simpo_loss",
    "sparse_divergence",
    "total_variation",
    "unpaired_loss",
    "vespo_weights",
]
