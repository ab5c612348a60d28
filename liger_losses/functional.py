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
  :func:`fipo_weights`, :func:`iw_opd_advantages`, and :func:`sampler_weights`;
- of tokens: :func:`cross_entropy`, :func:`minillm_returns`;
- of tokens, from the vocabulary: :func:`divergence`, :func:`forward_kl`, :func:`reverse_kl`, :func:`jsd`,
  :func:`total_variation`, :func:`alpha_beta_divergence`, :func:`sparse_divergence`.
"""

from liger_losses.chunked.losses.completion_loss import sequence_logps as sequence_logps
from liger_losses.chunked.losses.cross_entropy import cross_entropy as cross_entropy
from liger_losses.chunked.losses.dpo import cpo_loss as cpo_loss
from liger_losses.chunked.losses.dpo import dpo_loss as dpo_loss
from liger_losses.chunked.losses.dpo import orpo_loss as orpo_loss
from liger_losses.chunked.losses.dpo import simpo_loss as simpo_loss
from liger_losses.chunked.losses.policy_estimates import SamplerMetrics as SamplerMetrics
from liger_losses.chunked.losses.policy_estimates import SamplerWeights as SamplerWeights
from liger_losses.chunked.losses.policy_estimates import iw_opd_advantages as iw_opd_advantages
from liger_losses.chunked.losses.policy_estimates import k3 as k3
from liger_losses.chunked.losses.policy_estimates import minillm_returns as minillm_returns
from liger_losses.chunked.losses.policy_estimates import sampler_weights as sampler_weights
from liger_losses.chunked.losses.policy_objectives import grpo_loss as grpo_loss
from liger_losses.chunked.losses.policy_objectives import high_entropy_mask as high_entropy_mask
from liger_losses.chunked.losses.policy_tables import PolicyOptions as PolicyOptions
from liger_losses.chunked.losses.policy_tables import fipo_weights as fipo_weights
from liger_losses.chunked.losses.policy_tables import vespo_weights as vespo_weights
from liger_losses.chunked.losses.softmax_divergences import alpha_beta_divergence as alpha_beta_divergence
from liger_losses.chunked.losses.softmax_divergences import divergence as divergence
from liger_losses.chunked.losses.softmax_divergences import forward_kl as forward_kl
from liger_losses.chunked.losses.softmax_divergences import jsd as jsd
from liger_losses.chunked.losses.softmax_divergences import reverse_kl as reverse_kl
from liger_losses.chunked.losses.softmax_divergences import sparse_divergence as sparse_divergence
from liger_losses.chunked.losses.softmax_divergences import total_variation as total_variation
from liger_losses.chunked.losses.unpaired import bco_loss as bco_loss
from liger_losses.chunked.losses.unpaired import kto_loss as kto_loss
from liger_losses.chunked.losses.unpaired import unpaired_loss as unpaired_loss

#: What is imported above.
__all__ = [name for name in dir() if not name.startswith("_")]
