"""Heads that are changed after patching, or before it by others: they stay lazy, or the first forward says why not."""

import copy
import functools
import pickle
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_losses import patch, unpatch
from liger_losses.patching.lazy import LazyLogits, true_values
from liger_losses.patching.lazy_head import LazyLinear, force_lazy_head
from tests.models import small

pytest.importorskip("transformers", reason="transformers is not installed")


patch_head = functools.partial(patch, norms=False, mlps=False, rope=False)


def small_model(tied):
    return small(vocab_size=19, num_hidden_layers=2, tie_word_embeddings=tied)


def adapter(**options):
    def add(model):
        peft = pytest.importorskip("peft", reason="peft is not installed")
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.get_peft_model(model, config)

    return add


def resize(model):
    torch.manual_seed(1)
    model.resize_token_embeddings(32, mean_resizing=False)
    return model


def in_fp32(model):
    """As TRL's ``cast_lm_head_to_fp32``."""
    head = model.lm_head.float()
    head.forward = lambda hidden_states: F.linear(hidden_states.float(), head.weight.float())
    return model


def unloaded(model):
    return adapter(target_modules=["lm_head"])(model).merge_and_unload().requires_grad_()


#: A change, and whether the model's embeddings are tied.
CHANGES = {
    "resized": (resize, False),
    "resized, tied": (resize, True),
    "LoRA": (adapter(target_modules=["q_proj", "lm_head"]), False),
    "LoRA, merged": (unloaded, False),
    "modules_to_save": (adapter(target_modules=["q_proj"], modules_to_save=["lm_head"]), False),
    "modules_to_save, tied": (adapter(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]), True),
    "trainable tokens": (adapter(target_modules=["q_proj"], trainable_token_indices={"lm_head": [3, 4]}), False),
    "trainable tokens, tied": (adapter(target_modules=["q_proj"], trainable_token_indices=[3, 4]), True),
    "forward in fp32": (in_fp32, False),
}


def step(model):
    """Logits, loss and gradients of a training step."""
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 19, (2, 7), generator=g)
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits, out.loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("patched_first", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_the_head_stays_lazy(name, patched_first):
    change, tied = CHANGES[name]
    _, expected_loss, expected = step(change(small_model(tied)).train())
    model = small_model(tied)
    if patched_first:
        patch_head(model)
        changed = change(model).train()
    else:
        changed = change(model).train()
        patch_head(changed)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        logits, loss, found = step(changed)
    assert isinstance(logits, LazyLogits)
    torch.testing.assert_close(loss, expected_loss)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-6, msg=key)
    assert any(entry.replaced_by in ("LazyLinear", "LazyTokens") for entry in patch_head(changed).replaced)
    assert not any("lm_head" in entry.path for entry in patch_head(changed).left)
    unpatch(changed)
    assert not any(isinstance(module, LazyLinear) or module._forward_pre_hooks for module in changed.modules())
    assert type(step(changed)[0]) is torch.Tensor


def test_copies_keep_their_heads_lazy():
    model = small_model(False)
    patch_head(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(step(resize(other).train())[0], LazyLogits)


def test_a_head_that_cannot_be_lazy_any_more_is_reported_once():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = small_model(False).train()
    patch_head(model)
    own = model.lm_head
    model.lm_head = Scaled(16, 19, bias=False)
    with pytest.warns(RuntimeWarning, match=r"changed after patch.*lm_head \(.*Scaled is not .*liger_losses.patch"):
        assert type(step(model)[0]) is torch.Tensor
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        step(model)
    model.lm_head = own
    patch_head(model)
    assert isinstance(step(model)[0], LazyLogits)


FORWARDS = {
    "plain": lambda head, x: F.linear(x, head.weight, head.bias),
    "in fp32": lambda head, x: F.linear(x.float(), head.weight.float(), head.bias.float()),
    "in fp32 and back": lambda head, x: F.linear(x.float(), head.weight.float(), head.bias.float()).to(x.dtype),
    "in fp64": lambda head, x: F.linear(x.double(), head.weight.double(), head.bias.double()),
    "scaled, without its bias": lambda head, x: F.linear(x, head.weight) * 2 / 3,
    "with a weight of its own": lambda head, x: F.linear(x, head.weight * 2, bias=head.bias),
    "of some hidden states": lambda head, x: F.linear(x.detach() + x, head.weight, head.bias),
    "its result in fp32": lambda head, x: nn.Linear.forward(head, x).float(),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(8, 13)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, x):
        return self.lm_head(x)


#: Of the hidden states and of the weight; only the forwards that cast take two.
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [(name, dtypes) for name in FORWARDS for dtypes in DTYPES if dtypes[0] == dtypes[1] or name.startswith("in fp")],
)
def test_linear_forwards_on_the_instance(name, dtypes):
    torch.manual_seed(0)
    model, x = Model().to(dtypes[1]), torch.randn(3, 5, 8).to(dtypes[0])
    model.lm_head.forward = types.MethodType(FORWARDS[name], model.lm_head)
    labels, own = torch.arange(15) % 13, vars(model.lm_head)["forward"]
    results = []
    for patched in (False, True):
        if patched:
            assert [entry.replaced_by for entry in patch_head(model).entries] == ["LazyLinear"]
        model.zero_grad()
        logits = model(x)
        assert isinstance(logits, LazyLogits) == patched
        loss = F.cross_entropy(logits.float().view(-1, 13), labels)
        loss.backward()
        with torch.no_grad():
            assert torch.equal(true_values(model(x)), own(x))
            assert torch.equal(true_values(logits), own(x))
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        results.append([logits.dtype, loss.detach(), *grads])
    assert results[0][0] == results[1][0]
    for a, b in zip(results[0][1:], results[1][1:], strict=True):
        tolerance = 1e-5 if dtypes[0] == torch.float32 else 2e-2
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
    unpatch(model)
    assert vars(model.lm_head)["forward"] == own


@pytest.mark.parametrize(
    "forward",
    [
        lambda head, x: F.linear(x, head.weight, head.bias).relu(),
        lambda head, x: F.linear(x, head.weight, head.bias)[..., :-1],
        lambda head, x: x @ head.weight.t() + head.bias,
        lambda head, x: F.linear(x, head.weight, head.bias).log_softmax(-1),
        lambda head, x: F.linear(x, torch.ones(13, 8), head.bias),
        lambda head, x: [x],
    ],
)
def test_other_forwards_are_left_alone(forward):
    model = Model()
    own = model.lm_head.forward = types.MethodType(forward, model.lm_head)
    (entry,) = patch_head(model).entries
    assert entry.replaced_by is None
    assert "replaced on the instance" in entry.reason
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.forward is own
    assert all(parameter.shape[0] == 13 for parameter in model.parameters())


def test_a_forward_that_calls_the_lazy_one_stays():
    model, x = Model().train(), torch.randn(3, 5, 8)
    patch_head(model)
    lazy = model.lm_head.forward
    model.lm_head.forward = lambda hidden_states: lazy(hidden_states).float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(model(x), LazyLogits)
    with torch.no_grad():
        assert isinstance(model(x), LazyLogits)
        with force_lazy_head():
            assert isinstance(model(x), LazyLogits)
