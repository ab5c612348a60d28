"""Uses of losses and patched models in compiled functions that are not a plain call of a loss."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from torch import nn

import liger_losses
from benchmarks.coverage import model_zoo
from liger_losses import ChunkedLoss, PreferenceLoss, linear_logps, linear_statistics, linear_token_loss
from liger_losses.patching.lazy_head import force_lazy_head, make_head_lazy
from tests.losses import CE

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")


class _ScaledPairs(PreferenceLoss):
    """A loss on pairs with a parameter, which its base class calls."""

    def __init__(self):
        super().__init__(beta=0.1, use_ref_model=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def pair_loss(self, pairs):
        return (self.scale * (pairs.chosen_logps - pairs.rejected_logps) - 1).square()


class _Doubled(CE):
    def __call__(self, hidden_states, head, labels):
        return 2 * super().__call__(head, hidden_states, labels)


class _Named(CE):
    """Cross-entropy times a parameter, in a ``forward`` of its own that returns a dictionary."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, *arguments):
        return {"loss": self.scale * super().forward(*arguments), "tokens": arguments[-1].numel()}


class _Hooked(CE):
    """Cross-entropy with hooks that change what it gets and returns."""

    def __init__(self):
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: (args[0], args[1] * 0.5, *args[2:]))
        self.register_forward_hook(lambda module, args, loss: 2 * loss)


def _head_and_batch(tokens=5):
    torch.manual_seed(tokens)
    head = nn.Linear(8, 13)
    labels = torch.randint(13, (4, tokens))
    labels[0, 2:] = -100
    return head, torch.randn(4, tokens, 8, requires_grad=True), labels


def _results(function, loss, head, hidden_states, labels):
    """Loss and gradients."""
    parameters = [hidden_states, *head.parameters(), *loss.parameters()]
    found = function(head, hidden_states, labels)
    found = found["loss"] if isinstance(found, dict) else found[0] if isinstance(found, tuple) else found
    return [found.detach(), *torch.autograd.grad(found, parameters)]


@pytest.mark.parametrize("make", [_ScaledPairs, _Named, _Hooked], ids=lambda make: make.__name__)
def test_losses_of_users_own(make):
    loss = make()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *inputs: loss(*inputs), backend="eager", fullgraph=True)
    for tokens in (5, 6):
        inputs = _head_and_batch(tokens)
        torch._dynamo.mark_dynamic(inputs[1], 1), torch._dynamo.mark_dynamic(inputs[2], 1)
        torch.testing.assert_close(_results(compiled, loss, *inputs), _results(loss, loss, *inputs))


class _Mean(PreferenceLoss):
    def pair_loss(self, pairs):
        return (pairs.rejected_logps - pairs.chosen_logps).mean()


class _ForgotTheReturn(PreferenceLoss):
    def pair_loss(self, pairs):
        pass


class _Compares(PreferenceLoss):
    def pair_loss(self, pairs):
        return pairs.rejected_logps > pairs.chosen_logps


class _Misspells(PreferenceLoss):
    def pair_loss(self, pairs):
        return -pairs.chosen_logp


class _Counts(ChunkedLoss):
    def loss(self, statistics, mask):
        return mask.sum()


class _WeightsByEntropy(_ScaledPairs):
    def sequence_weight(self, statistics, mask):
        return statistics.entropy.sum(-1)


class _PerToken(ChunkedLoss):
    def loss(self, statistics, mask):
        return -statistics.logp


class _WithEntropy(ChunkedLoss):
    def loss(self, statistics, mask):
        return -statistics.logp.sum() + 0.1 * statistics.entropy.sum()


class _ReadsWhatThereIs(ChunkedLoss):
    def loss(self, statistics, mask):
        assert not hasattr(statistics, "entropy")
        return -statistics.logp.sum() + (getattr(statistics, "lse", None) or 0.0)


def _with_entropy(statistics, labels):
    return -statistics.logp + statistics.entropy


WRONG_LOSSES = {
    "pair_loss, a mean": (
        _Mean(),
        r"_Mean.pair_loss must return one loss per pair, floating point \[2\], got torch.float64 of shape \[\]",
    ),
    "pair_loss, nothing": (_ForgotTheReturn(), r"_ForgotTheReturn.pair_loss must return .*, got NoneType"),
    "pair_loss, a comparison": (_Compares(), r"_Compares.pair_loss must return .*, got torch.bool of shape \[2\]"),
    "pair_loss, a typo": (
        _Misspells(),
        r"pairs have no 'chosen_logp' \(did you mean 'chosen_logps'\?\); they have chos",
    ),
    "loss, a count": (_Counts(), r"_Counts.loss must return .* one floating-point number .*, got torch.int64 of shape"),
    "sequence_weight": (
        _WeightsByEntropy(),
        "_WeightsByEntropy.sequence_weight reads statistics.entropy, but declares only logp, "
        "mean_logit. Add 'entropy' to the metrics that _WeightsByEntropy names",
    ),
    "loss per token": (
        _PerToken(),
        r"_PerToken.loss must return .* one floating-point number .*, got torch.float32 of shape \[4, 5\]",
    ),
    "loss": (
        _WithEntropy(),
        "_WithEntropy reads statistics.entropy, but declares only logp. Add 'entropy' to the "
        "statistics that _WithEntropy names",
    ),
    "token_loss": (
        lambda head, hidden, labels: linear_token_loss(hidden, head, labels, _with_entropy),
        r"token_loss \(_with_entropy\) reads statistics.entropy, but declares only logp. Add 'entropy' to statistics=",
    ),
    "token_loss in two passes": (
        lambda head, hidden, labels: linear_token_loss(hidden.detach(), head.weight.detach(), labels, _with_entropy),
        r"token_loss \(_with_entropy\) reads statistics.entropy",
    ),
    "token_loss, of columns": (
        lambda head, hidden, labels: linear_token_loss(hidden, head, labels, lambda s, y: s.selected_logps.sum(-1)),
        r"declares only logp. Use statistics='selected_logps' of .* with selected=\.$",
    ),
    "token_loss, of indices": (
        lambda head, hidden, labels: linear_token_loss(hidden, head, labels, lambda s, y: s.argmax.float()),
        "declares only logp. Use metrics='argmax', which has no gradient",
    ),
    "no such statistic": (
        lambda head, hidden, labels: linear_token_loss(hidden, head, labels, lambda s, y: s.entropi),
        "there is no statistic 'entropi'; it must be one of logp, entropy",
    ),
    "token_loss, a mean": (
        lambda head, hidden, labels: linear_token_loss(hidden, head, labels, lambda s, y: s.logp.mean()),
        r"token_loss must return one value per token, \[\d+\], got \(\). Return it before any sum or mean",
    ),
    "token_loss in two passes, a mean": (
        lambda head, hidden, labels: linear_token_loss(
            hidden.detach(), head.weight.detach(), labels, lambda s, y: s.logp.mean()
        ),
        "token_loss must return one value per token",
    ),
}


@pytest.mark.parametrize(
    ("name", "compiled"),
    [(name, "") for name in WRONG_LOSSES]
    + [pytest.param("pair_loss, a mean", "graph breaks", marks=pytest.mark.slow), ("token_loss", "full graph")],
)
def test_wrong_losses_of_users_own(name, compiled):
    loss, message = WRONG_LOSSES[name]
    torch._dynamo.reset()
    options = {"backend": "eager", "fullgraph": compiled == "full graph"}
    call = torch.compile(lambda *inputs: loss(*inputs), **options) if compiled else loss
    with pytest.raises(Exception, match=message) as caught:
        call(*_head_and_batch())
    if not compiled:
        assert type(caught.value) in (AttributeError, ValueError)


@pytest.mark.parametrize("operation", [linear_token_loss, linear_statistics])
def test_a_compiled_call_that_asks_for_nothing(operation):
    function = [lambda s, labels: torch.ones(labels.shape)] if operation is linear_token_loss else []

    def call(head, hidden, labels):
        return operation(hidden, head, labels, *function, statistics=())

    inputs = _head_and_batch()
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(*inputs), call(*inputs))


def test_what_a_loss_may_ask_of_its_statistics():
    inputs = _head_and_batch()
    expected = -linear_logps(inputs[1], inputs[0], inputs[2]).sum()
    for compiled in (False, True):
        loss = _ReadsWhatThereIs()
        torch._dynamo.reset()
        call = torch.compile(lambda *given, loss=loss: loss(*given), backend="eager") if compiled else loss
        torch.testing.assert_close(call(*inputs), expected)


def test_an_overridden_call_runs_once():
    loss = _Doubled()
    head, hidden_states, labels = _head_and_batch()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *inputs: loss(*inputs), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden_states, head, labels), loss(hidden_states, head, labels))


@pytest.mark.parametrize("how", ["loss.compile()", "loss.forward"])
def test_a_loss_alone_is_compiled(how):
    loss = CE()
    plain, inputs = copy.deepcopy(loss), _head_and_batch()
    torch._dynamo.reset()
    options = {"backend": "eager", "fullgraph": True}
    if how == "loss.compile()":
        loss.compile(**options)
        compiled = loss
    else:
        compiled = torch.compile(loss.forward, **options)
    torch.testing.assert_close(_results(compiled, loss, *inputs), _results(plain, plain, *inputs))


def test_a_loss_made_in_the_compiled_function():
    def function(head, hidden_states, labels):
        return CE(label_smoothing=0.1)(head, hidden_states, labels)

    inputs = _head_and_batch()
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function, backend="eager")(*inputs), function(*inputs))


def test_a_loss_that_is_gone_before_backward():
    def function(head, hidden_states, labels):
        return CE(reduction="none")(head, hidden_states, labels).sum()

    torch._dynamo.reset()
    inputs = _head_and_batch()
    hidden_states = inputs[1].requires_grad_()
    found = torch.compile(function, backend="aot_eager")(*inputs)
    gc.collect()
    (gradient,) = torch.autograd.grad(found, hidden_states)
    torch.testing.assert_close(gradient, torch.autograd.grad(function(*inputs), hidden_states)[0])


def _llama(**options):
    return model_zoo.build("llama", num_hidden_layers=1, vocab_size=model_zoo.VOCABULARY, **options)


def test_lazy_logits_are_forced_in_one_thread_alone():
    model = _llama().eval()
    liger_losses.patch(model)
    found = []

    def generate():
        with torch.no_grad():
            found.append(model(input_ids=torch.ones(1, 1, dtype=torch.int64)).logits)

    with force_lazy_head():
        thread = threading.Thread(target=generate)
        thread.start()
        thread.join()
    assert type(found[0]) is torch.Tensor


ADAPTERS = {
    "lora on the head": {"target_modules": ["q_proj", "lm_head"]},
    "trainable tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 2]}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_the_head(name):
    """One graph with the loss, with the loss and the gradients of the model without the patch."""
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **ADAPTERS[name])
    plain = peft.get_peft_model(_llama(tie_word_embeddings=name == "trainable tokens"), config)
    model = copy.deepcopy(plain)
    liger_losses.patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids = torch.randint(model_zoo.VOCABULARY, (2, 6))
    results = []
    for function, parameters in ((compiled, model.parameters()), (plain, plain.parameters())):
        loss = function(input_ids=ids, labels=ids).loss
        results.append([loss.detach(), *torch.autograd.grad(loss, [p for p in parameters if p.requires_grad])])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


class _Shifted(nn.Module):
    """A model that applies an operation to its logits before its loss."""

    def __init__(self, operation):
        super().__init__()
        self.lm_head, self.operation = nn.Linear(8, 13), operation

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, hidden_states, labels):
        logits = self.operation(self.lm_head(hidden_states))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.filterwarnings("ignore:.*needs the values of lazy logits")
@pytest.mark.parametrize(
    "operation",
    [
        lambda z: 1 - z,
        lambda z: -z,
        lambda z: z.where(z > 0, 0.0),
        lambda z: torch.cat([z, z], 1)[:, : z.shape[1]],
        lambda z: torch.stack(list(z)),
    ],
    ids=["from one", "negative", "comparison", "list of logits", "iteration"],
)
def test_operations_on_logits_in_the_models_forward(operation):
    model = _Shifted(operation)
    _, hidden_states, labels = _head_and_batch()
    expected = model(hidden_states, labels)
    make_head_lazy(model)
    torch._dynamo.reset()
    found = torch.compile(model, backend="eager")(hidden_states, labels)
    torch.testing.assert_close(found, expected)
