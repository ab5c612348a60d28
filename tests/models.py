"""Small models of transformers, with random weights."""

import copy
import functools

import pytest
import torch

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def small(family="Llama", **options):
    """A causal language model of a family; ``options`` of its configuration add to :data:`SIZES` or replace them."""
    import transformers

    torch.manual_seed(0)
    kinds = (getattr(transformers, f"{family}{kind}") for kind in ("Config", "ForCausalLM"))
    model, random_state = _made(*kinds, *options.items())
    torch.set_rng_state(random_state)
    return copy.deepcopy(model)


@functools.cache
def _made(config, model, *options):
    """The model, and the random state after it: making one takes three times as long as copying it."""
    return model(config(**SIZES | dict(options))), torch.get_rng_state()


def with_lora(make):
    """The function that makes a model, with LoRA on the model's head and queries too."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    options = {"r": 2, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}
    return lambda *given, **named: peft.get_peft_model(make(*given, **named), peft.LoraConfig(**options))
