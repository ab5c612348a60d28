"""NeMo RL's log-probabilities, called as its own code calls them."""

import importlib

import torch

from liger_losses.integrations import nemo_rl
from tests.reference import double, plain_statistics, problem, relative_error

NEMO = """
import torch

class ChunkedDistributedHiddenStatesToLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor_parallel_hidden_states, *arguments):
        return tensor_parallel_hidden_states.sum()

def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states, output_weight_layer, runtime_gather_output, target, vocab_start_index,
    vocab_end_index, tp_group, inference_only=False, cp_group=None, chunk_size=None,
):
    return ChunkedDistributedHiddenStatesToLogprobs.apply(
        tensor_parallel_hidden_states, target.roll(shifts=-1, dims=-1), output_weight_layer, vocab_start_index,
        vocab_end_index, chunk_size, tp_group, inference_only,
    ).contiguous()[:, :-1]
"""


def test_nemo_rl(framework, installed, group):
    module = "nemo_rl.distributed.model_utils"
    framework(**{module: NEMO})
    installed(nemo_rl)
    utils = importlib.import_module(module)
    hidden, weight, labels, _ = problem(shape=(7, 2), masked=0.0)  # [S, B]
    exact = double(hidden, weight)
    expected = plain_statistics(*exact, labels.roll(-1, 0))["logp"].t()[:, :-1]
    upstream = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    for inference in (False, True):
        logps = utils.from_parallel_hidden_states_to_logprobs(
            hidden, weight, None, labels.t(), 0, 61, group, inference_only=inference, chunk_size=4
        )
        assert relative_error(logps, expected) < 1e-5
        assert logps.requires_grad is not inference
        if not inference:
            grads = torch.autograd.grad(logps, (hidden, weight), upstream)
            for ours, value in zip(grads, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
                assert relative_error(ours, value) < 1e-5
    nemo_rl.uninstall()
    assert utils.ChunkedDistributedHiddenStatesToLogprobs.apply(hidden) == hidden.sum()
