"""Heads of frameworks that the models of real.py do not have, and outputs of serving engines."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from liger_losses import DistillationLoss, Divergence, linear_logps
from liger_losses.integrations import megatron, torchtitan
from tests.integrations.real import recipe
from tests.reference import problem


def head_of(name, forward, **options):
    """A linear layer of a class with this ``forward``, of the layer and its input."""
    return type(name, (torch.nn.Linear,), {"forward": forward})(24, 61, **options)


def soft_capped(head, x, cap=None):
    """As the head of torchtitan's muse_glimmer: with a multiplier, and with or without a soft-cap."""
    logits = torch.nn.Linear.forward(head, x).float() * 2.5
    return logits if cap is None else cap * torch.tanh(logits / cap)


HEADS = {"plain": torch.nn.Linear.forward, "scaled": soft_capped}
HEADS["soft-capped"] = functools.partialmethod(soft_capped, cap=3.0)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_head_and_what_it_makes_of_its_logits(name, bias, sharded, one_process):
    hidden, _, labels, _ = problem(n=24)
    head = torch.nn.Linear(24, 61, bias=bias) if name == "plain" else head_of(name, HEADS[name], bias=bias)
    expected = F.cross_entropy(head(hidden), labels, reduction="sum")
    grads = torch.autograd.grad(expected / 2, (hidden, *head.parameters()))
    model = torch.nn.Sequential(torch.nn.Identity(), head)
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(head)
        fully_shard(model)
    loss = torchtitan.cross_entropy_in_forward(head, model[0](hidden), labels)
    torch.testing.assert_close(loss, expected)
    (loss / 2).backward()
    found = [p.grad.full_tensor() if sharded else p.grad for p in head.parameters()]
    torch.testing.assert_close([hidden.grad, *found], list(grads))
    assert "forward" not in vars(head)


def test_a_head_of_tensor_parallelism(one_process):
    """Hidden states and rows of the weight are DTensors of one mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    hidden, _, labels, _ = problem(n=24)
    head, mesh = torch.nn.Linear(24, 61, bias=False), init_device_mesh("cpu", (1,))
    expected = F.cross_entropy(head(hidden), labels, reduction="sum")
    head.weight = torch.nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
    found = torchtitan.cross_entropy_in_forward(head, distribute_tensor(hidden, mesh, [Replicate()]), labels)
    torch.testing.assert_close(found, expected)


LORA = torch.nn.Sequential(torch.nn.Linear(24, 2), torch.nn.Linear(2, 61))
FORWARDS = {
    "Adapted": lambda head, x: torch.nn.Linear.forward(head, x) + head.lora(x),  # as torchtitan's LoRA layers
    "Normalized": lambda head, x: F.linear(x, F.normalize(head.weight, dim=-1)),
    "Shifted": lambda head, x: torch.nn.Linear.forward(head, x) + torch.arange(61),
    "FromOtherInputs": lambda head, x: torch.nn.Linear.forward(head, x * 2),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_head_that_is_no_product_is_refused(name):
    hidden, _, labels, _ = problem(n=24)
    head = head_of(name, FORWARDS[name])
    if name == "Adapted":
        head.lora = LORA
    with pytest.raises(TypeError, match=rf"{name}.*does not compute .*keep torchtitan's ChunkedLossWrapper"):
        torchtitan.cross_entropy_in_forward(head, hidden, labels)


# --- Megatron's output processor on layers that real.py's model does not have -----------------------------------------


@pytest.mark.parametrize("skips", [True, False])
def test_a_bias_that_the_layer_returns_is_not_in_the_logits(skips):
    hidden, weight, labels, bias = problem(shape=(3, 5), bias=True)
    group = SimpleNamespace(size=lambda: 1)
    layer = SimpleNamespace(weight=weight, bias=bias, tp_group=group, skip_bias_add=skips)
    arguments = {"hidden_states": hidden.transpose(0, 1), "output_layer": layer, "output_weight": None}
    labels[0, 0] = 0
    context = megatron.OutputOptions(ignore_index=0)
    losses = megatron.output_processor(**arguments, labels=labels.clamp(min=0), context=context)
    logits = hidden @ weight.t() + (0 if skips else bias)
    labels[labels == 0] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    torch.testing.assert_close(losses, expected)


# --- The recipe for outputs of serving engines; real.py runs those that need a framework ------------------------------


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
