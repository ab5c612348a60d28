"""Compiled losses and patched models on a GPU: with inductor, and with its CUDA graphs."""

import copy

import pytest
import torch

from liger_losses import linear_logps
from liger_losses.patching.patch import patch
from tests.losses import CE, DPO
from tests.models import small
from tests.reference import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.filterwarnings("ignore"),  # inductor's own
]
MODES = ("default", "reduce-overhead")
H, V = 256, 5003


def batch(length, rows=4):
    g = torch.Generator("cuda").manual_seed(length)
    hidden = torch.randn(rows, length, H, device="cuda", generator=g).bfloat16()
    labels = torch.randint(V, (rows, length), device="cuda", generator=g)
    labels[:, : length // 3] = -100
    return hidden, labels


CALLS = {
    "cross-entropy": lambda loss: lambda w, h, y: loss(w, torch.tanh(h), y),
    "DPO": lambda loss: lambda w, h, y: loss(w, torch.tanh(h), y, None, h.detach(), w.detach())[0],
    "log-probs": lambda loss: lambda w, h, y: sum(linear_logps(torch.tanh(h), w, y, entropy=True)[:2]).sum(),
}
LOSSES = {"cross-entropy": CE, "DPO": DPO, "log-probs": lambda: None}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_compiled_losses_give_what_the_uncompiled_give(name, mode):
    function = CALLS[name](LOSSES[name]())
    compiled = torch.compile(function, mode=mode, fullgraph=True)
    weight = (torch.randn(V, H, device="cuda") * 0.1).bfloat16()
    for length in (300, 301, 517, 300):  # CUDA graphs are recorded at the second call, and replayed after
        torch.compiler.cudagraph_mark_step_begin()
        results = []
        for call in (function, compiled):
            hidden, labels = batch(length)
            leaves = hidden.requires_grad_(), weight.clone().requires_grad_()
            loss = call(leaves[1], leaves[0], labels)
            results.append([loss.detach().clone(), *(g.clone() for g in torch.autograd.grad(loss, leaves))])
        for expected, got in zip(*results, strict=True):
            assert relative_error(got.float(), expected.float()) < 1e-2, (name, mode, length)


def llama():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    return small(vocab_size=50257, num_key_value_heads=2, tie_word_embeddings=True, **sizes).cuda().bfloat16()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_patched_models_train_as_uncompiled_and_make_no_logits(mode, checkpointing):
    models = [llama()]
    models.append(copy.deepcopy(models[0]))
    for model in models:
        patch(model)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    models[1].compile(mode=mode)
    losses = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses.append([])
        for step in range(5):
            length = (1024, 1024, 1536, 1024, 6144)[step]
            g = torch.Generator("cuda").manual_seed(step)
            ids = torch.randint(50257, (4, length), device="cuda", generator=g)
            torch.compiler.cudagraph_mark_step_begin()
            if step == 4:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            loss = model(input_ids=ids, labels=ids).loss
            losses[-1].append(loss.item())
            loss.backward()
            del loss
            if step == 4:
                extra = torch.cuda.max_memory_allocated() - before
                assert extra < 4 * length * 50257 * 2, (mode, extra)  # less than the logits alone in bf16
            optimizer.step()
            optimizer.zero_grad()
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
