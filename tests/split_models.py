"""Tiny models that transformers splits over processes, and how tests compare them."""

import os
from unittest import mock

import torch
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

from tests import processes
from tests.models import small

ROWS, LENGTH = 2, 9
WORDS = 31  # of the inputs: the smallest vocabulary
#: DTensors of torch 2.11 (not 2.13) refuse to redistribute the strided shards of experts, before anything is patched.
LEFT_OUT = "mixtral" if torch.__version__ < (2, 13) else None


def tiny_models():
    """By name, a model of each family, and the classes of its modules that patching must leave alone."""

    def tiny(family, vocab_size, tied, *left, **options):
        options |= {"vocab_size": vocab_size, "tie_word_embeddings": tied, "initializer_range": 0.3}
        options |= {"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
        options |= {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
        return lambda: small(family, **options), set(left)

    return {
        "llama": tiny("Llama", 31, False),
        "llama, tied": tiny("Llama", 40, True),
        "qwen3, tied": tiny("Qwen3", 40, True, "Qwen3RMSNorm", head_dim=8),
        "gemma2, tied": tiny("Gemma2", 33, True, head_dim=4, final_logit_softcapping=2.0),
        "mixtral": tiny("Mixtral", 40, False, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
    }


def save(folder):
    for name, (make, _) in tiny_models().items():
        model = make()
        with torch.no_grad():  # norms and biases that are not all ones or zeros
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn(len(parameter)))
        model.save_pretrained(folder / name)


def load(folder, name, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / name, **options)


def load_split(folder, name, plan="auto"):
    from transformers.distributed import DistributedConfig

    return load(folder, name, distributed_config=DistributedConfig(tp_plan=plan)).train()


def batch(rows=ROWS):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (rows, LENGTH), generator=g)
    return ids, ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.3, -100)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model):
    found = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def close(found, expected, where=""):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            close(found[name], value, f"{where}, {name}")
    elif isinstance(expected, (list, tuple)):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            close(one, other, f"{where}, {number}")
    else:
        atol = 1e-6 + 1e-5 * float(expected.double().abs().max())
        assert_close(found, expected, rtol=0, atol=atol, msg=lambda m: f"{where}: {m}")


def split_over(model, mesh):
    """As transformers does it while it loads a model, which needs all processes for it."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_modules()}
    plan = model._expand_parallel_plan(model.tp_plan)
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if name in names})
    model.tie_weights()
    return model


def fully_sharded(model, mesh, tail):
    """``fully_shard`` of the layers, of the last norm and the head if ``tail``, and of the rest."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if tail:
        fully_shard([model.model.norm, model.lm_head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def work(rank, folder, world, run):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # which accelerate demands, and nobody uses
    for name, case in run(folder).items():
        if name.partition(",")[0] != LEFT_OUT:
            with processes.case_named(name):
                case()


def start(folder, run, world, backend="gloo"):
    """Save the models, and run the cases that ``run(folder)`` names on so many processes."""
    save(folder)
    # Transformers takes the accelerator that it finds.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}
    with mock.patch.dict(os.environ, hidden):
        processes.start(work, world, folder, folder, world, run, backend=backend)
