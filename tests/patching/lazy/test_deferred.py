"""Lazy logits that are read late, in evaluation, or in ways that no loss of this package takes."""

import contextlib
import copy
import gc
import random
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liger_losses.patching.lazy import DeferredLogits, LazyLogits, lazy_linear, true_values, warning
from liger_losses.patching.lazy_head import LazyLinear, make_head_lazy
from tests.models import small

transformers = pytest.importorskip("transformers")

B, T, H, V = 3, 40, 16, 97


def llama(**options):
    return small(vocab_size=V, hidden_size=H, intermediate_size=24, num_key_value_heads=2, **options)


def both(**options):
    """A model and its patched copy."""
    plain = llama(**options)
    ours = copy.deepcopy(plain)
    make_head_lazy(ours)
    return plain, ours


def batch():
    ids = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :5] = -100
    return {"input_ids": ids, "labels": labels}


@contextlib.contextmanager
def computed_rows():
    """The numbers of tokens whose logits were computed as values."""
    rows, values = [], DeferredLogits.values

    def counted(self):
        rows.append(self.hidden_states[..., 0].numel())
        return values(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DeferredLogits, "values", counted)
        yield rows


class WritesData(torch.optim.SGD):
    """As optimizers with master weights do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.copy_(p.data - group["lr"] * p.grad)


def plain_loss(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "foreach": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, foreach=True),
    "fused": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True),
    "writes to .data": WritesData,
}


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_of_an_optimizer_that_has_none_of_the_models_parameters_changes_nothing(tied):
    results = []
    for model in both(tie_word_embeddings=tied):
        other = nn.Linear(3, 3)
        other(torch.ones(1, 3)).sum().backward()
        logits = model(input_ids=batch()["input_ids"]).logits
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        loss = plain_loss(logits, batch()["labels"])
        loss.backward()
        results.append([loss.detach(), logits.argmax(-1), *(p.grad for p in model.parameters())])
    assert isinstance(logits, LazyLogits)
    torch.testing.assert_close(*results[::-1])


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("tied", [False, True])
def test_two_models_that_are_trained_side_by_side(tied, optimizer):
    """Both forwards, then loss and step of each."""
    plain, ours = both(tie_word_embeddings=tied)
    results = []
    for first in (plain, ours):
        models = first.double(), copy.deepcopy(first)
        optimizers = [optimizer(model.parameters(), lr=0.1) for model in models]
        for _ in range(2):
            logits = [model(input_ids=batch()["input_ids"]).logits for model in models]
            for z, one, labels in zip(logits, optimizers, (batch()["labels"], batch()["labels"].flip(0)), strict=True):
                one.zero_grad()
                plain_loss(z, labels).backward()
                one.step()
        assert isinstance(z, LazyLogits) == (first is ours)
        results.append([p for model in models for p in (*model.parameters(), *(p.grad for p in model.parameters()))])
    torch.testing.assert_close(*results[::-1])


def test_a_step_of_other_parameters_leaves_the_gradients_of_the_head():
    results = []
    for model in both():
        outputs = model(**batch())
        outputs.loss.backward(retain_graph=True)
        model.model.requires_grad_(False)
        hidden = model.model(batch()["input_ids"]).last_hidden_state
        logits = model.lm_head(hidden)
        model.zero_grad()
        torch.optim.SGD(model.model.parameters(), lr=0.1).step()
        plain_loss(logits, batch()["labels"]).backward()
        results.append(model.lm_head.weight.grad)
    torch.testing.assert_close(*results[::-1])


#: What is read of the logits after the step.
READ = {
    "argmax": lambda z, y: z.argmax(-1),
    "loss": plain_loss,
    "log-probabilities": lambda z, y: z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None]),
    "columns": lambda z, y: z[..., :7].logsumexp(-1),
    "values": lambda z, y: true_values(z.softmax(-1)),
    "detached": lambda z, y: z.detach().float().topk(3),
}


@pytest.mark.filterwarnings("ignore:.*needs the values")
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_cannot_be_read_after_a_step_has_changed_the_head(tied, optimizer):
    _, model = both(tie_word_embeddings=tied)
    outputs = model(**batch())
    with torch.no_grad():
        evaluated = model(**batch()).logits
    outputs.loss.backward()
    optimizer(model.parameters(), lr=0.3).step()
    for read in READ.values():
        for logits in (outputs.logits, evaluated):
            for grad in (True, False):
                words = r"has changed since the forward.*loss\.backward\(\) before optimizer\.step\(\)"
                with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=words):
                    read(logits, batch()["labels"])


@pytest.mark.filterwarnings("ignore:.*needs the values")
def test_values_that_were_computed_before_a_step_stay_and_their_gradients_raise_as_in_torch():
    for model in both():
        logits = model(input_ids=batch()["input_ids"]).logits
        values = logits * torch.ones(B, T, 1)
        expected = values.detach().clone()
        plain_loss(model(input_ids=batch()["input_ids"]).logits, batch()["labels"]).backward()
        torch.optim.SGD(model.parameters(), lr=0.3).step()
        assert torch.equal(values, expected)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            values.sum().backward()


def test_backward_after_a_step_of_a_loss_from_before_it():
    """Gradients that were computed with their loss are those of its forward; others raise as in torch."""
    losses = {
        "cross-entropy": lambda z: F.cross_entropy(z, torch.arange(6)),
        "log-probabilities": lambda z: z.log_softmax(-1).gather(-1, torch.arange(6)[:, None]).square().sum(),
        "largest": lambda z: z.topk(2).values.sum(),
    }
    for name, function in losses.items():
        hidden, weight = torch.randn(6, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
        expected = torch.autograd.grad(function(F.linear(hidden, weight)), [hidden, weight])
        loss = function(lazy_linear(hidden, weight))
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=1.0).step()
        if name == "cross-entropy":
            torch.testing.assert_close(torch.autograd.grad(loss, [hidden, weight]), expected)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_nothing_is_hooked_to_optimizers():
    from torch.optim import optimizer

    _, model = both()
    outputs = model(**batch())
    outputs.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    hooks = [*optimizer._global_optimizer_pre_hooks.values(), *optimizer._global_optimizer_post_hooks.values()]
    assert not [hook for hook in hooks if hook.__module__.startswith("liger_losses")]


def test_the_loss_does_not_keep_its_logits_alive():
    _, model = both()
    outputs = model(**batch())
    loss, logits = outputs.loss, weakref.ref(outputs.logits)
    del outputs
    gc.collect()
    assert logits() is None
    loss.backward()


WRITES = (lambda p: p.mul_(1.5), lambda p: p.data.mul_(1.5))


@pytest.mark.parametrize("write", WRITES)
def test_other_changes_of_the_weights_are_noticed(write):
    _, model = both()
    logits = model(**batch()).logits
    rows = logits.view(-1, V)
    with torch.no_grad():
        write(model.lm_head.weight)
    for late in (logits, rows):
        with pytest.raises(RuntimeError, match="has changed since the forward"):
            late.argmax(-1)
    again = model(**batch()).logits
    assert torch.equal(true_values(again), F.linear(again.deferred.hidden_states, model.lm_head.weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_nan_have_not_changed(dtype):
    model = both()[1].to(dtype)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    assert model(**batch()).loss.isnan()


def test_logits_of_a_forward_before_the_weights_got_other_memory():
    plain, ours = both()
    results = []
    for model in (plain, ours):
        logits = model(input_ids=batch()["input_ids"]).logits
        model.lm_head.weight.data = model.lm_head.weight.detach() * 2
        plain_loss(logits, batch()["labels"]).backward()
        results.append([logits.argmax(-1), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results[::-1])


def test_freed_weights_say_what_to_do():
    hidden, weight = torch.randn(4, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    logits = lazy_linear(hidden, weight)
    logits.logsumexp(-1).sum().backward()
    weight.untyped_storage().resize_(0)  # as fully_shard does after a backward
    with pytest.raises(RuntimeError, match=r"were freed .* before loss\.backward\(\)"):
        logits.argmax(-1)


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_argmax_is_the_models_own_in_half_precision(softcap):
    hidden = torch.randn(300, H, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.randn(5000, H, generator=torch.Generator().manual_seed(1)).bfloat16() * 0.3
    plain, lazy = (make(hidden.requires_grad_(), weight) for make in (F.linear, lazy_linear))
    if softcap is not None:
        plain, lazy = (softcap * torch.tanh(z / softcap) for z in (plain, lazy))
    ties = (plain == plain.amax(-1, keepdim=True)).sum(-1) > 1
    assert ties.sum() > 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(lazy.argmax(-1), plain.argmax(-1))
        found, expected = lazy.topk(1), plain.topk(1)
        assert torch.equal(found.values, expected.values)
        assert torch.equal(lazy.log_softmax(-1).argmax(-1), plain.log_softmax(-1).argmax(-1))
    gradients = [torch.autograd.grad(z.topk(1).values.float().sum(), hidden)[0] for z in (plain, lazy)]
    torch.testing.assert_close(*gradients, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_losses_have_the_dtype_of_the_plain_ones(dtype, autocast):
    hidden = torch.randn(6, H).to(dtype).requires_grad_()
    weight, y = torch.randn(V, H).to(dtype), torch.randint(V, (6,))
    losses = (
        lambda z: F.cross_entropy(z, y),
        lambda z: F.cross_entropy(z, y, reduction="none", label_smoothing=0.1),
        lambda z: F.nll_loss(z.log_softmax(-1), y),
        lambda z: z.logsumexp(-1),
        lambda z: z.sum(-1, keepdim=True, dtype=torch.float32),
        lambda z: z.mean(-1),
    )
    for loss in losses:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected, found = (loss(make(hidden, weight)) for make in (F.linear, lazy_linear))
        assert found.dtype == expected.dtype
        # The plain ones round each logit to half precision, and a sum of them is off by more than this.
        exact = loss(F.linear(hidden.double(), weight.double()))
        torch.testing.assert_close(found, exact.to(found.dtype), rtol=0.02, atol=0.02)


#: What chains of operations are made of: views and copies, operations in place, and results.
VIEWS = {
    "slice": lambda z: z[:, 1:] if z.dim() > 2 else z[1:],
    "first": lambda z: z[0],
    "columns": lambda z: z[..., :7],
    "float": lambda z: z.float(),
    "clone": lambda z: z.clone(),
    "detach": lambda z: z.detach(),
    "scale": lambda z: z * 0.5,
    "tanh": lambda z: z.tanh(),
    "log_softmax": lambda z: z.log_softmax(-1),
    "negative": lambda z: -z,
    "chunk": lambda z: z.chunk(2)[0],
    "unbind": lambda z: z.unbind(0)[0],
    "iterate": lambda z: next(iter(z)),
    "row list": lambda z: z[[0]],
    "bias": lambda z: torch.arange(z.shape[-1]).to(z.dtype) + z,
}
IN_PLACE = {
    "mul_": lambda z: z.mul_(2.0),
    "set": lambda z: z.__setitem__((..., 0), 1.0),
    "masked_fill_": lambda z: z.masked_fill_(z > 0, 0.5),
    "mul_ without grad": lambda z: torch.no_grad()(z.mul_)(3.0),
}
RESULTS = {
    "sum": lambda z: z.sum(),
    "logsumexp": lambda z: z.logsumexp(-1),
    "argmax": lambda z: z.argmax(-1),
    "max": lambda z: z.max(-1).values,
    "gather": lambda z: z.gather(-1, torch.zeros(*z.shape[:-1], 1, dtype=torch.int64)),
    "sin": lambda z: z.sin(),
    "gradient": lambda z: torch.autograd.grad(z.logsumexp(-1).sum(), z)[0],
}


def outcome(linear, names, dtype):
    """The result of a chain and the gradients of its leaves; or that it was refused."""
    g = torch.Generator().manual_seed(len(names))
    sizes = (3, 4, 5), (11, 5)
    leaves = [torch.randn(*size, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]
    *chain, last = names
    try:
        z = linear(*leaves)
        for name in chain:
            z = VIEWS[name](z) if name in VIEWS else (IN_PLACE[name](z), z)[1]
        result = RESULTS[last](z)
        loss = result.double().square().sum()
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None]
    except RuntimeError:
        return None
    return [true_values(result).detach(), *gradients]


@pytest.mark.filterwarnings("ignore:.*needs the values")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_chains_of_operations_do_what_they_do_to_plain_logits(dtype):
    """Give what they give, or raise: after in-place operations, and where there is no gradient of the logits."""
    chooser, compared = random.Random(3), 0
    for _ in range(500):
        names = [chooser.choice([*VIEWS, *VIEWS, *IN_PLACE]) for _ in range(chooser.randint(1, 4))]
        names.append(chooser.choice([*RESULTS]))
        expected, found = outcome(F.linear, names, dtype), outcome(lazy_linear, names, dtype)
        assert found is not None or expected is None or not IN_PLACE.keys().isdisjoint(names) or "gradient" in names
        if expected is None or found is None:
            continue
        compared += 1
        assert found[0].dtype == expected[0].dtype, names
        if dtype == torch.float64:
            for e, f in zip(expected, found, strict=True):
                e, f = (torch.zeros(()) if x is None else x for x in (e, f))
                torch.testing.assert_close(f.expand_as(e), e, rtol=1e-4, atol=1e-4, check_dtype=False, msg=str(names))
    assert compared > 350


def test_label_smoothing_of_the_trainer_takes_no_logits():
    from transformers.trainer_pt_utils import LabelSmoother

    results = []
    for model in both():
        inputs = batch()
        labels = inputs.pop("labels")
        with warnings.catch_warnings(), computed_rows() as rows:
            warnings.simplefilter("error", RuntimeWarning)
            loss = LabelSmoother(0.1)(model(**inputs), labels, shift_labels=True)
            loss.backward()
            with torch.no_grad():
                evaluated = LabelSmoother(0.1)(model.eval()(**inputs), labels, shift_labels=True)
        assert not rows
        results.append([loss.detach(), evaluated, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results[::-1])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_dora_on_the_head_is_computed_of_the_logits(bias, autocast):
    peft = pytest.importorskip("peft")
    results = []
    for patched in (False, True):
        model = llama()
        if bias:
            model.lm_head = nn.Linear(H, V)
        torch.manual_seed(1)
        options = {"r": 2, "use_dora": True, "target_modules": ["lm_head", "q_proj"], "init_lora_weights": False}
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
        if patched:
            make_head_lazy(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*needs the values")
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                outputs = model(**batch())
            outputs.loss.backward()
        assert not isinstance(outputs.logits, LazyLogits)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append([outputs.loss.detach(), *gradients.values()])
    tolerance = {"rtol": 3e-2, "atol": 3e-3} if autocast else {}
    torch.testing.assert_close(*results[::-1], **tolerance)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize("bias", [False, True])
def test_adapters_in_fp32_on_a_head_in_half_precision(bias):
    """As PEFT makes them; logits stay lazy, and losses and gradients are as exact as those of the plain model."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    options = {"r": 2, "target_modules": ["lm_head", "q_proj"], "init_lora_weights": False, "lora_bias": bias}
    model = peft.get_peft_model(llama().bfloat16(), peft.LoraConfig(**options))
    exact, ours = copy.deepcopy(model).double(), copy.deepcopy(model)
    make_head_lazy(ours)
    results = []
    for one in (exact, model, ours):
        outputs = one(**batch())
        assert (type(outputs.logits) is LazyLogits) == (one is ours)
        outputs.loss.backward()
        gradients = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
        assert one is exact or {g.dtype for g in gradients.values()} == {torch.float32}
        results.append([outputs.loss.detach().double(), *(g.double() for g in gradients.values())])
    for expected, plain, found in zip(*results, strict=True):
        error, others = (found - expected).norm(), (plain - expected).norm()
        assert error <= 1.5 * others + 1e-3 * expected.norm()


#: What evaluation makes of logits, without all of them at once.
METRICS = {
    "argmax": lambda z, y: z.argmax(dim=-1),
    "tuple": lambda z, y: (z[0] if isinstance(z, tuple) else z).argmax(-1),
    "logsumexp": lambda z, y: z.logsumexp(-1),
    "logps": lambda z, y: z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0],
    "topk": lambda z, y: z.topk(3, dim=-1).indices,
}


@pytest.mark.parametrize("name", [None, *METRICS])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_evaluation_takes_no_logits(name, smoothing, tmp_path, monkeypatch):
    """With ``prediction_loss_only``, or metrics that reduce the logits."""
    monkeypatch.setattr("liger_losses.patching.lazy.operations._ROWS", 10)
    rows_of = [{name: value[i] for name, value in batch().items()} for i in range(B)]
    results = []
    for model in both():
        arguments = transformers.TrainingArguments(
            tmp_path, per_device_eval_batch_size=2, report_to=[], use_cpu=True, label_smoothing_factor=smoothing,
            prediction_loss_only=name is None,
        )  # fmt: skip
        metrics = {} if name is None else {
            "preprocess_logits_for_metrics": METRICS[name],
            "compute_metrics": lambda p: {"sum": float(p.predictions[p.predictions != -100].sum())},
        }  # fmt: skip
        trainer, kinds = transformers.Trainer(model, arguments, eval_dataset=rows_of, **metrics), set()
        model.lm_head.register_forward_hook(lambda module, args, output, kinds=kinds: kinds.add(type(output)))
        with warnings.catch_warnings(), computed_rows() as rows:
            warnings.filterwarnings("error", message=".*needs the values")
            found = trainer.evaluate()
        assert max(rows, default=0) <= 10
        assert kinds == {LazyLogits if isinstance(model.lm_head, LazyLinear) else torch.Tensor}
        assert bool(rows) == (name in ("argmax", "tuple", "topk") and isinstance(model.lm_head, LazyLinear))
        results.append({key: value for key, value in found.items() if key in ("eval_loss", "eval_sum")})
    assert set(results[0]) == {"eval_loss"} | ({"eval_sum"} if name else set())
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_evaluation_that_needs_logits_has_those_of_the_model(tmp_path, monkeypatch):
    """Once computed, and with one warning."""
    monkeypatch.setattr(warning, "_WARNED", set())
    rows_of = [{name: value[i] for name, value in batch().items()} for i in range(B)]
    results = []
    for model in both():
        options = {"per_device_eval_batch_size": 2, "report_to": [], "use_cpu": True}
        trainer = transformers.Trainer(model, transformers.TrainingArguments(tmp_path, **options))
        with warnings.catch_warnings(record=True) as caught, computed_rows() as rows:
            warnings.simplefilter("always", RuntimeWarning)
            predictions = trainer.predict(rows_of).predictions
        ours = [w for w in caught if "needs the values" in str(w.message)]
        assert len(ours) == isinstance(model.lm_head, LazyLinear)
        assert all("Pass the Trainer a preprocess_logits_for_metrics" in str(w.message) for w in ours)
        assert rows == ([2 * T, T] if ours else [])
        results.append(predictions)
    assert (results[0] == results[1]).all()
    _, model = both()
    with torch.no_grad(), computed_rows() as rows, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        logits = model(**batch()).logits
        probabilities = logits.softmax(-1)
        assert torch.equal(logits.exp() / logits.exp().sum(-1, keepdim=True), logits.exp() / logits.exp().sum(-1, True))
        logits[..., 0] = -5.0
        assert (logits[..., 0] == -5.0).all()
    assert rows == [B * T]
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(B, T))


def test_generation_gets_plain_logits(monkeypatch):
    monkeypatch.setattr(warning, "_WARNED", set())
    plain, model = (m.eval() for m in both())
    ids, kinds = batch()["input_ids"], []
    model.lm_head.register_forward_hook(lambda module, args, output: kinds.append(type(output)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*needs the values")
        for options in ({"do_sample": False}, {"do_sample": True}, {"num_beams": 2}):
            found = []
            for one in (plain, model):
                torch.manual_seed(0)
                found.append(one.generate(ids, max_new_tokens=4, **options))
            assert torch.equal(*found)
        assert set(kinds) == {torch.Tensor}
        with torch.no_grad(), warnings.catch_warnings():  # as models do that do not know logits_to_keep
            warnings.simplefilter("ignore")
            last = model(ids).logits[:, -1].float()
            assert isinstance(last, LazyLogits)
            torch.testing.assert_close(last.softmax(-1), plain(ids).logits[:, -1].softmax(-1))
            hidden = torch.randn(2, 3, H)
            traced = torch.jit.trace(model.lm_head, hidden, check_trace=False)
            torch.testing.assert_close(traced(hidden), plain.lm_head(hidden))


def test_what_was_read_of_an_evaluation_can_be_kept_while_training_goes_on():
    plain, model = both()
    kept = []
    for one in (plain, model):
        with torch.inference_mode() if one is model else torch.no_grad():
            logits = one(**batch()).logits
            kept.append((logits.argmax(-1), logits.exp(), true_values(logits)))
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        for _ in range(2):
            one(**batch()).loss.backward()
            optimizer.step()
    torch.testing.assert_close(*kept[::-1])
    torch.testing.assert_close(true_values(logits), kept[0][2])  # computed once


def test_the_address_of_the_values_is_that_of_values_that_stay():
    hidden, weight = torch.randn(4, H, requires_grad=True), torch.randn(V, H)
    logits = lazy_linear(hidden, weight)
    with pytest.warns(RuntimeWarning, match="data_ptr"):
        address = logits.data_ptr()
    assert address == true_values(logits).data_ptr()
    torch.testing.assert_close(true_values(logits), F.linear(hidden, weight))
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits, torch.arange(4)), hidden)
    (expected,) = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight), torch.arange(4)), hidden)
    torch.testing.assert_close(gradient, expected)
