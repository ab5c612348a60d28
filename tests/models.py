"""Small models of transformers, with random weights."""

import contextlib
import copy
import functools
import warnings

import pytest
import torch

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def small(family="Llama", kind="ForCausalLM", **options):
    """A model of a family; ``options`` of its configuration add to :data:`SIZES` or replace them."""
    import transformers

    torch.manual_seed(0)
    kinds = (getattr(transformers, f"{family}{end}") for end in ("Config", kind))
    model, random_state = _made(*kinds, *options.items())
    torch.set_rng_state(random_state)
    return copy.deepcopy(model)


@functools.cache
def _made(config, model, *options):
    """The model, and the random state after it: making one takes three times as long as copying it."""
    return model(config(**SIZES | dict(options))), torch.get_rng_state()


def ids_and_labels(low, high, *shape, seed=0):
    """Drawn ids, and labels of which three tenths do not count."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(low, high, shape, generator=g)
    return ids, ids.masked_fill(torch.rand(shape, generator=g) < 0.3, -100)


def randomised(module):
    """Parameters that a forgotten factor of one would not hide behind."""
    g = torch.Generator().manual_seed(1)
    for p in module.parameters():
        p.data.copy_(torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5 + (p.dim() == 1))
    return module


def patch_head(model, **options):
    """Patch the last layer and the loss alone."""
    from liger_losses import patch  # which tests without private names must not have imported

    return patch(model, norms=False, mlps=False, rope=False, **options)


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


WORDS = [f"word{i}" for i in range(16)]


def word_tokenizer(*more, **options):
    """Of some words, behind three special tokens and ``more``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {word: i for i, word in enumerate((*names.values(), *more, *WORDS))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, **names, **options)


def tiny_model():
    """A random model, its tokenizer, and a function that makes texts for it."""
    tokenizer, g = word_tokenizer(), torch.Generator().manual_seed(0)

    def text(length):
        return " " + " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (length,), generator=g).tolist())

    return small(vocab_size=len(tokenizer), num_hidden_layers=2, tie_word_embeddings=True), tokenizer, text


def adapted(model, *targets, r=2, **options):
    """The model with LoRA, whose weights are the same in each call."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=r, target_modules=list(targets), init_lora_weights=False, **options)
        return peft.get_peft_model(model, config)
