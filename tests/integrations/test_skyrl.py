"""SkyRL's log-probabilities, called as its own code calls them."""

import importlib

import torch

from liger_losses.integrations import skyrl
from tests.reference import double, plain_statistics, problem, relative_error

SKYRL = """
def _fused_lm_head_logprob_apply(
    backend, hidden, weight, target, vocab_start_index, vocab_end_index, chunk_size, tp_group, inference_only
):
    return "SkyRL's"

def _fused_vocab_parallel_entropy_from_hidden(hidden, lm_head_weight, tp_group, chunk_size=None, temperature=1.0):
    return "SkyRL's"

def from_parallel_hidden_to_logprobs(
    hidden, lm_head_weight, target, vocab_start_index, vocab_end_index, tp_group, inference_only=False, cp_group=None,
    chunk_size=None, temperature=1.0, fused_backend="torch",
):
    if temperature != 1.0:
        lm_head_weight = lm_head_weight / temperature
    target = target.roll(shifts=-1, dims=-1)
    return _fused_lm_head_logprob_apply(
        fused_backend, hidden, lm_head_weight, target, vocab_start_index, vocab_end_index, 4, tp_group, inference_only
    )[:, :-1]

from_parallel_hidden_to_logprobs_packed_sequences = from_parallel_hidden_to_logprobs
"""


def test_skyrl(framework, installed, group):
    module = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
    framework(**{module: SKYRL})
    installed(skyrl)
    utils = importlib.import_module(module)
    hidden, weight, labels, _ = problem(shape=(2, 7), masked=0.0)
    exact = double(hidden, weight)
    values = plain_statistics(*exact, labels.roll(-1, 1), temperature=0.7)
    expected = values["logp"][:, :-1]
    upstream = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    for head in (utils.from_parallel_hidden_to_logprobs, utils.from_parallel_hidden_to_logprobs_packed_sequences):
        logps = head(hidden, weight, labels, 0, 61, tp_group=group, temperature=0.7, fused_backend="triton")
        grads = torch.autograd.grad(logps, (hidden, weight), upstream)
        exact_grads = torch.autograd.grad(expected, exact, upstream.double(), retain_graph=True)
        for ours, value in zip((logps, *grads), (expected, *exact_grads), strict=True):
            assert relative_error(ours, value) < 1e-5
    arguments = "torch", hidden, weight, labels.roll(-1, 1), 0, 61, 4, group
    assert not utils._fused_lm_head_logprob_apply(*arguments, True).requires_grad
    assert relative_error(utils._fused_lm_head_logprob_apply(*arguments, False)[:, :-1] * 0.7, expected) > 1e-3
    entropy = utils._fused_vocab_parallel_entropy_from_hidden(hidden, weight, group, chunk_size=4, temperature=0.7)
    assert relative_error(entropy, values["entropy"]) < 1e-5
    assert not entropy.requires_grad
