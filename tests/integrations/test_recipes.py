"""The recipe for outputs of serving engines; real.py runs those that need a framework."""

from types import SimpleNamespace

import torch

from liger_losses import DistillationLoss, Divergence, linear_logps
from tests.integrations.real import recipe
from tests.reference import problem


def test_teachers_of_vllm_and_sglang():
    hidden, weight, labels, _ = problem(shape=(2, 5), masked=0.0)
    labels[0, 0] = labels[1, 3:] = -100
    logps = torch.randn(2, 5, 61, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    best = logps.topk(4, dim=-1)
    tokens = [[(best.values[b, t].tolist(), best.indices[b, t].tolist()) for t in range(5)] for b in range(2)]
    sglang = [[[(p, i, None) for p, i in zip(*token, strict=True)] for token in row] for row in tokens]
    # vLLM returns the sampled token too, first, and it may be beyond the k.
    sampled = {60: SimpleNamespace(logprob=-99.0)}
    vllm = [[sampled | {i: SimpleNamespace(logprob=p) for p, i, _ in token} for token in row] for row in sglang]
    for given in (vllm, sglang):
        teacher = recipe("def teacher_topk").teacher_topk([[None, *given[0][1:]], given[1][:3]], 4)
        scored = labels != -100
        torch.testing.assert_close(teacher.logps[scored], best.values[scored])
        assert torch.equal(teacher.indices[scored], best.indices[scored])
        loss, *_ = DistillationLoss(Divergence.forward_kl())(weight, hidden, labels, teacher)
        assert torch.autograd.grad(loss, hidden)[0].isfinite().all()


def test_kept_columns():
    hidden, weight, labels, _ = problem(shape=(2, 3), masked=0.0)
    kept = [[[int(y), (int(y) + 1) % 61, 7] for y in row] for row in labels]
    kept[0][1], kept[1], labels[1, 2] = None, kept[1][:2], -100
    support = recipe("def token_support").token_support(kept)
    assert support.ids.tolist()[0][1] == support.ids.tolist()[1][2] == [-1] * 3
    logits = hidden @ weight.t()
    columns = torch.tensor(sorted(set(kept[0][0])))
    found = linear_logps(hidden, weight, labels, support=support)
    torch.testing.assert_close(found[0, 0], logits[0, 0, labels[0, 0]] - logits[0, 0, columns].logsumexp(-1))
    torch.testing.assert_close(found[0, 1], logits[0, 1].log_softmax(-1)[labels[0, 1]])  # without a cut
