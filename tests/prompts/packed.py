"""Small models of several families, drawn prompts and completions, and what each completion computes behind a copy of
its prompt."""

import torch

from liger_losses import LigerFusedLinearCrossEntropyLoss, LigerFusedLinearGRPOLoss, loss_inputs, pack_completions

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2}
BOTH_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
#: Families, with what is special in their attention, positions and logits.
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": BOTH_LAYERS,
    "mistral": {"sliding_window": None},
    "mistral, window": {"sliding_window": 7},
    "phi3": {"sliding_window": 9},
    "olmo2": {},
    "gpt_oss": BOTH_LAYERS | {"num_local_experts": 4, "num_experts_per_tok": 2},  # its attention has sinks
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 3.0},
    "cohere2": BOTH_LAYERS | {"logit_scale": 0.3},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0, "resid_pdrop": 0}
    | {"embd_pdrop": 0},
}


def family(name, attention="eager", **options):
    """A model of a family, whose parameters, sinks among them, are far from their initial values."""
    import transformers

    config = transformers.AutoConfig.for_model(name.partition(",")[0], **SIZES | FAMILIES.get(name, {}) | options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.train()


def drawn(seed, longest=12):
    """Lists of prompts, of completions, and of each completion's prompt: groups of one, and empty completions."""
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    def ids(least):
        return torch.randint(3, SIZES["vocab_size"], (number(least, longest),), generator=generator).tolist()

    prompts, completions, groups = [ids(1) for _ in range(number(2, 4))], [[]], [0]
    for group in range(len(prompts)):
        for _ in range(1 if group == 1 else number(2, 5)):
            completions.append(ids(0))
            groups.append(group)
    return prompts, completions, groups


def shared(model, prompts, completions, groups, device=None):
    """The arguments of a loss, from one packed row."""
    return loss_inputs(model, pack_completions(prompts, completions, groups=groups, device=device))


def repeated(model, prompts, completions, groups, device=None):
    """The same from the completions, each behind its prompt."""
    rows = [prompts[group] + completion for group, completion in zip(groups, completions, strict=True)]
    length, longest = max(map(len, rows)), max(map(len, completions))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=device)
    head, hidden_states, shifted = loss_inputs(model, input_ids=ids, attention_mask=mask)
    starts = torch.tensor([len(prompts[group]) for group in groups], device=device)[:, None]
    steps = torch.arange(longest, device=device)
    index = (starts - 1 + steps).clamp(max=length - 1)
    counts = steps < torch.tensor([len(c) for c in completions], device=device)[:, None]
    rows = torch.arange(len(ids), device=device)[:, None]
    return head, hidden_states[rows, index], shifted[rows, index].where(counts, -100)


def loss_and_gradients(model, inputs):
    """The losses of SFT and of GRPO with drawn advantages, and the gradients of all parameters."""
    head, hidden_states, labels = inputs
    advantages = torch.randn(len(labels), generator=torch.Generator().manual_seed(1)).to(labels.device)
    counts = labels != -100
    loss, _ = LigerFusedLinearGRPOLoss(beta=0.0)(hidden_states, head, labels.clamp(min=0), counts, advantages)
    loss = loss + LigerFusedLinearCrossEntropyLoss()(head, hidden_states, labels)
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return loss.detach(), {name: g for name, g in zip(parameters, found, strict=True) if g is not None}


def apart(found, expected):
    """The relative differences of all gradients together, and of the parameter where it is largest."""
    assert found.keys() == expected.keys()
    differences = torch.stack([(found[name].double() - g.double()).norm() for name, g in expected.items()])
    norms = torch.stack([g.double().norm() for g in expected.values()])
    return float(differences.norm() / norms.norm()), float((differences / norms.clamp(min=1e-3 * norms.max())).max())
