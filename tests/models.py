"""Small models of transformers, with random weights."""

import contextlib
import copy
import functools
import warnings

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


def randomised(module):
    """Parameters that a forgotten factor of one would not hide behind."""
    g = torch.Generator().manual_seed(1)
    for p in module.parameters():
        p.data.copy_(torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5 + (p.dim() == 1))
    return module


@contextlib.contextmanager
def without_logits():
    """Nobody computes pending logits, but small products inside of heads, and no head computes its own."""
    from liger_losses.patching.pending import PendingLogits

    values = PendingLogits.values

    def refused(self, operation=""):
        assert self.shape[-1] <= self.hidden_states.shape[-1], f"{operation or 'somebody'} needs the logits"
        return values(self, operation)

    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        patched.setattr(PendingLogits, "values", refused)
        warnings.filterwarnings("error", message=".*(its logits|needs the values)")
        yield


def with_lora(make):
    """The function that makes a model, with LoRA on the model's head and queries too."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    options = {"r": 2, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}
    return lambda *given, **named: peft.get_peft_model(make(*given, **named), peft.LoraConfig(**options))
