"""Models whose head is made lazy, and made plain again."""

import copy
import pickle

import pytest
import torch
from torch import nn

from liger_losses.chunked import linear_logps
from liger_losses.patching.lazy import LazyLogits, lazy_linear, true_values
from liger_losses.patching.lazy_head import force_lazy_head, make_head_lazy, unpatch_head
from tests.patching.lazy.test_tensor import B, H, T, V, problem


class Model(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.body, self.lm_head = nn.Linear(H, H), head

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, x):
        return self.lm_head(self.body(x))


def test_patch_head_and_back():
    model, x = Model(nn.Linear(H, V)), torch.randn(B, T, H)
    before = model(x)
    (change,) = make_head_lazy(model)
    assert (change.path, change.replaced_by) == ("lm_head", "LazyLinear")
    assert make_head_lazy(model) == []
    assert isinstance(model(x), LazyLogits)
    assert list(model.state_dict()) == ["body.weight", "body.bias", "lm_head.weight", "lm_head.bias"]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.lm_head.weight.add_(1.0)
        assert not torch.equal(true_values(other(x)), before)
        assert torch.equal(true_values(model(x)), before)
    with torch.no_grad():
        assert isinstance(model(x), LazyLogits)
        assert type(model(x[:, :1])) is torch.Tensor  # generation
    model.eval()
    with torch.inference_mode():
        assert torch.equal(true_values(model(x)), before)
    assert unpatch_head(model) == 1
    assert type(model.lm_head) is nn.Linear
    assert torch.equal(model(x), before)


def test_heads_that_are_left_alone():
    class Other(nn.Linear):
        pass

    hooked = nn.Linear(H, V)
    hooked.register_full_backward_hook(lambda *arguments: None)
    replaced = nn.Linear(H, V)
    replaced.forward = lambda x: x
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(H, V))
    for head, reason in (
        (Other(H, V), "not torch.nn.Linear"),
        (hooked, "hooks"),
        (replaced, "replaced on the instance"),
        (weighted, "not torch.nn.Linear"),
        (None, "no output embedding"),
    ):
        (change,) = make_head_lazy(Model(head))
        assert change.replaced_by is None
        assert reason in change.reason
    (change,) = make_head_lazy(Model(nn.Linear(H, V)), lambda module, path: path != "lm_head")
    assert change.reason == "left out by filter_fn"


def test_the_head_of_lazy_logits_is_that_of_the_engine():
    """Scale, soft-cap, bias and slices of the vocabulary are in it, and the values are still the model's own."""
    hidden, weight, bias, labels = problem()
    lazy = 3.0 * torch.tanh(lazy_linear(hidden, weight, bias)[..., :7] * 0.5 / 3.0)
    head = lazy.deferred.head
    assert (head.transform.logit_scale, head.transform.softcap) == (pytest.approx(0.5), 3.0)
    labels = labels.clamp(0, 6)
    found = linear_logps(hidden, head, labels)
    torch.testing.assert_close(found, true_values(lazy).log_softmax(-1).gather(-1, labels[..., None])[..., 0])
    # A scale that no head has is the values' business.
    with pytest.warns(RuntimeWarning, match="mul, called in .* needs the values"):
        assert type(lazy_linear(hidden, weight, bias).tanh() * -1.0) is torch.Tensor


def test_heads_that_are_lazy_only_when_forced():
    model, x = Model(nn.Linear(H, V)), torch.randn(B, T, H)
    (change,) = make_head_lazy(model, only_when_forced=True)
    assert (change.path, change.replaced_by, change.reason) == ("lm_head", "LazyLinear", "")
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other(x)) is torch.Tensor
        with force_lazy_head(), torch.no_grad():
            assert isinstance(other(x), LazyLogits)
        assert make_head_lazy(other, only_when_forced=True) == []
        assert unpatch_head(other) == 0  # it belongs to whoever forces it
    # make_head_lazy makes it lazy everywhere, and that stays so.
    assert [c.replaced_by for c in make_head_lazy(model)] == ["LazyLinear"]
    assert make_head_lazy(model, only_when_forced=True) == []
    assert isinstance(model(x), LazyLogits)
    assert unpatch_head(model) == 1
    assert type(model.lm_head) is nn.Linear
    assert "only_when_forced" not in vars(model.lm_head)
