"""Outputs of serving engines, in the shapes that vLLM and SGLang return, as arguments of losses."""

from dataclasses import dataclass

import pytest
import torch

from liger_losses import DistillationLoss, Divergence, linear_logps
from liger_losses.integrations.serving import teacher_topk, token_support
from tests.reference import problem


@dataclass
class Logprob:
    """vLLM's."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def teacher(labels, k, vocab_size=61):
    """A teacher's log-probabilities, as vLLM (with the sampled token beyond the k) and SGLang return them."""
    logps = torch.randn(*labels.shape, vocab_size, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    best = logps.topk(k, dim=-1)
    vllm, sglang = [], []
    for sequence, (values, columns) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
        tokens = [dict(zip(c, map(Logprob, v), strict=True)) for c, v in zip(columns, values, strict=True)]
        for position, token in enumerate(tokens):
            sampled = max(int(labels[sequence, position]), 0)
            tokens[position] = {sampled: Logprob(float(logps[sequence, position, sampled])), **token}
        vllm.append(tokens)
        sglang.append([[(v, c, None) for v, c in zip(*row, strict=True)] for row in zip(values, columns, strict=True)])
    return best, vllm, sglang


def test_teachers_of_vllm_and_sglang():
    hidden, weight, labels, _ = problem(shape=(2, 5))
    labels[0, 0] = labels[1, 3:] = -100
    best, vllm, sglang = teacher(labels, 4)
    json = [[{str(c): {"logprob": p.logprob} for c, p in token.items()} for token in tokens] for tokens in vllm]
    for given in (vllm, sglang, json):
        cut = [[None, *given[0][1:]], given[1][:3]]
        found = teacher_topk(cut, 4, tail="renormalize")
        assert found.tail == "renormalize"
        scored = torch.ones(2, 5, dtype=torch.bool)
        scored[0, 0] = scored[1, 3:] = False
        torch.testing.assert_close(found.logps[scored], best.values[scored])
        assert torch.equal(found.indices[scored], best.indices[scored])
        assert found.logps[~scored].isnan().all()
        loss, *_ = DistillationLoss(Divergence.forward_kl())(weight, hidden, labels, found)
        assert loss.isfinite()
        assert torch.autograd.grad(loss, hidden)[0].isfinite().all()
    assert teacher_topk(vllm, 2, 7).logps.shape == (2, 7, 2)


def test_kept_columns_of_vllm_and_sglang():
    hidden, weight, labels, _ = problem(shape=(2, 3), masked=0.0)
    labels[1, 2] = -100
    kept = [[[int(y), (int(y) + 1) % 61, 7] for y in row] for row in labels]
    kept[0][1], kept[1] = None, kept[1][:2]
    support = token_support(kept, add_label=True)
    assert support.add_label
    assert support.ids.shape == (2, 3, 3)
    assert (support.ids[0, 1] == -1).all()
    assert (support.ids[1, 2] == -1).all()
    logits = hidden @ weight.t()
    columns = torch.tensor(sorted(set(kept[0][0])))
    expected = logits[0, 0, labels[0, 0]] - logits[0, 0, columns].logsumexp(-1)
    logps = linear_logps(hidden, weight, labels, support=support)
    torch.testing.assert_close(logps[0, 0], expected)
    torch.testing.assert_close(logps[0, 1], logits[0, 1].log_softmax(-1)[labels[0, 1]])  # without a cut
    assert token_support([]).ids.shape == (0, 0, 0)


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"token 1 of completion 0 has 1 log-probabilities, fewer than k=2: ask vLLM"):
        teacher_topk([[{3: -0.1, 4: -2.0}, {3: -0.1}]], 2)
    with pytest.raises(TypeError, match="wrap it in a list"):
        token_support([[3, 4], [5]])
    with pytest.raises(TypeError, match="expected a list for each completion"):
        teacher_topk([{3: Logprob(-0.1)}], 1)
    with pytest.raises(ValueError, match="3 tokens, more than length=2"):
        token_support([[[1], [2], [3]]], 2)
    with pytest.raises(ValueError, match="k must be positive"):
        teacher_topk([], 0)
