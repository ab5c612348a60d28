"""Small models of transformers, with random weights."""

import torch

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, **HEADS}


def small(family="Llama", **options):
    """A causal language model of a family; ``options`` of its configuration add to :data:`SIZES` or replace them."""
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES | options))
