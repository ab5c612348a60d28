"""Models of the sizes of released ones, with random weights."""

from __future__ import annotations

from typing import Any

import torch

#: The label of tokens that carry no loss.
IGNORED = -100
_LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
        },
    ),
    "Qwen2.5-1.5B": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
        },
    ),
    "Qwen3-0.6B": (
        "qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
            "max_position_embeddings": 40960,
        },
    ),
    "Llama-3-8B": ("llama", {**_LLAMA_8B, "num_hidden_layers": 32}),
    "Llama-3-8B half": ("llama", {**_LLAMA_8B, "num_hidden_layers": 16}),
    "Llama-3-8B quarter": ("llama", {**_LLAMA_8B, "num_hidden_layers": 8}),
    "tiny": (
        "llama",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
}


def build(name: str, device: torch.device, checkpointing: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model, training."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=dtype)
    model.train()
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model
