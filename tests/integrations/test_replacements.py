"""Heads of frameworks that are replaced when the framework imports them, each called as its own code calls it.

The frameworks' modules are stand-ins, which have the names and the signatures of the real ones.
"""

import importlib
import importlib.util
import inspect
import sys
import threading
import time
import types
import warnings

import pytest
import torch
import torch.distributed as dist

from liger_losses.integrations import nemo_rl, prime_rl, skyrl, verl_distillation
from liger_losses.integrations.replacements import Replacement, Replacements
from tests.reference import double, plain_statistics, problem, relative_error

PRIME = """
import torch

class {name}(torch.nn.Linear):
    def __init__(self, in_features, out_features, chunk_size{more}):
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size = chunk_size
        {keep}

    def forward(self, hidden_states, labels=None, temperature=None):
        return "prime-rl's"
"""
SKYRL = """
def _fused_lm_head_logprob_apply(
    backend, hidden, weight, target, vocab_start_index, vocab_end_index, chunk_size, tp_group, inference_only
):
    return "SkyRL's"

def _fused_vocab_parallel_entropy_from_hidden(hidden, lm_head_weight, tp_group, chunk_size=None, temperature=1.0):
    return "SkyRL's"

def from_parallel_hidden_to_logprobs(
    hidden, lm_head_weight, target, vocab_start_index, vocab_end_index, tp_group, inference_only=False, cp_group=None,
    chunk_size=None, temperature=1.0, fused_backend="torch",
):
    if temperature != 1.0:
        lm_head_weight = lm_head_weight / temperature
    target = target.roll(shifts=-1, dims=-1)
    return _fused_lm_head_logprob_apply(
        fused_backend, hidden, lm_head_weight, target, vocab_start_index, vocab_end_index, 4, tp_group, inference_only
    )[:, :-1]

from_parallel_hidden_to_logprobs_packed_sequences = from_parallel_hidden_to_logprobs
"""
NEMO = """
import torch

class ChunkedDistributedHiddenStatesToLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor_parallel_hidden_states, *arguments):
        return tensor_parallel_hidden_states.sum()

def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states, output_weight_layer, runtime_gather_output, target, vocab_start_index,
    vocab_end_index, tp_group, inference_only=False, cp_group=None, chunk_size=None,
):
    return ChunkedDistributedHiddenStatesToLogprobs.apply(
        tensor_parallel_hidden_states, target.roll(shifts=-1, dims=-1), output_weight_layer, vocab_start_index,
        vocab_end_index, chunk_size, tp_group, inference_only,
    ).contiguous()[:, :-1]
"""


@pytest.fixture
def framework(tmp_path, monkeypatch):
    """Writes a framework's modules, by their names, where Python finds them."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def write(**sources):
        for name, source in sources.items():
            path = tmp_path.joinpath(*name.split("."))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".py").write_text(source.lstrip())
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def installed():
    """Installs an integration, and takes it back."""
    done = []

    def install(module):
        done.append(module)
        module.install()

    yield install
    for module in done:
        module.uninstall()


def test_names_are_replaced_when_they_are_imported(framework):
    framework(
        **{
            "fw.early": "def head(): return 'early'",
            "fw.user": "from fw.early import head\nname = head",
            "fw.user_since": "from fw.early import head",
            "fw.late": "class Layer:\n    def forward(self): return 'late'\n",
            "fw.other": "def renamed(): pass",
        }
    )
    early, user = importlib.import_module("fw.early"), importlib.import_module("fw.user")
    replacements = Replacements(
        "fw",
        "1.0",
        Replacement("fw.early", "head", lambda original, module: lambda: f"our {original()} of {module.__name__}"),
        Replacement("fw.late", "Layer.forward", lambda original, module: lambda self: f"our {original(self)}"),
        Replacement("fw.other", "head", lambda original, module: original),
        Replacement("fw.never", "head", lambda original, module: original),
    )
    replacements.install()
    replacements.install()
    assert early.head() == user.head() == "our early of fw.early"
    user_since = importlib.import_module("fw.user_since")
    assert user_since.head is early.head
    late = importlib.import_module("fw.late")
    assert late.Layer().forward() == "our late"
    assert "class Layer" in inspect.getsource(late)
    assert type(late.__spec__.loader) is type(late.__loader__) is type(early.__loader__)
    with pytest.warns(UserWarning, match=r"fw runs with its own code.*fw\.other has no head \(tested with 1\.0\)"):
        importlib.import_module("fw.other")
    replacements.uninstall()
    assert early.head() == user.head() == user_since.head() == "early"
    assert late.Layer().forward() == "late"
    framework(**{"fw.never": "pass"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module("fw.never")


def test_a_module_that_is_looked_for_has_its_own_loader(framework):
    framework(**{"fw.late": "head = 1"})
    replacements = Replacements("fw", "1.0", Replacement("fw.late", "head", lambda original, module: original + 1))
    replacements.install()
    try:
        loader = importlib.util.find_spec("fw.late").loader  # as runpy and importlib.resources do
        assert loader.get_source("fw.late") == "head = 1"
        assert loader.is_package("fw.late") is False
        assert importlib.import_module("fw.late").head == 2
    finally:
        replacements.uninstall()


def test_names_of_a_module_that_is_being_imported(framework):
    """By another thread: they are replaced when it is done. By the code that installs: a warning."""
    framework(
        **{
            "fw.slow": "import time\ntime.sleep(0.1)\nhead = 1",
            "fw.circular": "import sys\nsys.modules['fw_replacements'].install()\nhead = 1",
        }
    )
    replacements = Replacements("fw", "1.0", Replacement("fw.slow", "head", lambda original, module: original + 1))
    thread = threading.Thread(target=importlib.import_module, args=("fw.slow",))
    thread.start()
    while "fw.slow" not in sys.modules:
        time.sleep(0.001)
    replacements.install()
    thread.join()
    assert sys.modules["fw.slow"].head == 2
    replacements.uninstall()
    sys.modules["fw_replacements"] = replacements = Replacements(
        "fw", "1.0", Replacement("fw.circular", "head", lambda original, module: 2)
    )
    with pytest.warns(UserWarning, match=r"replaces nothing in fw\.circular, whose import has led here"):
        assert importlib.import_module("fw.circular").head == 1
    replacements.uninstall()


def test_other_objects_among_the_modules_are_left(framework):
    class Odd:
        __slots__ = ()
        __name__ = "fw.odd"

    framework(**{"fw.early": "def head(): return 1"})
    early = importlib.import_module("fw.early")
    sys.modules["fw.odd"] = Odd()
    sys.modules["fw.nothing"] = None
    replacements = Replacements("fw", "1.0", Replacement("fw.early", "head", lambda original, module: lambda: 2))
    replacements.install()
    assert early.head() == 2
    replacements.uninstall()
    assert early.head() == 1


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_prime_rl(softcap, framework, installed):
    name, module = "FusedOutputLinear", "prime_rl.trainer.models.layers.lm_head"
    plain = PRIME.format(name=name, more="", keep="")
    gemma = PRIME.format(name=f"Gemma{name}", more=", softcap", keep="self.softcap = softcap")
    framework(**{module: plain, f"{module}_gemma": gemma})
    installed(prime_rl)
    hidden, weight, labels, _ = problem(shape=(2, 7), masked=0.0, dtype=torch.float32)
    if softcap is None:
        layer = importlib.import_module(module).FusedOutputLinear(24, 61, 512)
    else:
        layer = importlib.import_module(f"{module}_gemma").GemmaFusedOutputLinear(24, 61, 512, softcap)
    layer.weight = torch.nn.Parameter(weight.detach().clone())
    temperature = torch.linspace(0.5, 1.5, 14).view(2, 7)
    found = layer(hidden, labels, temperature=temperature)
    out = found["logprobs"], found["entropy"]
    exact = double(hidden, layer.weight)
    values = plain_statistics(*exact, labels, temperature=temperature.double()[..., None], softcap=softcap)
    expected = values["logp"], values["entropy"]
    upstream = torch.randn(2, 7, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, (hidden, layer.weight), (upstream, -upstream))
    exact_grads = torch.autograd.grad(expected, exact, (upstream.double(), -upstream.double()))
    for ours, value in zip((*out, *grads), (*expected, *exact_grads), strict=True):
        assert relative_error(ours, value) < 1e-5
    nothing = layer(hidden[:, :0], labels[:, :0], temperature=temperature[:, :0])
    assert nothing["logprobs"].shape == nothing["entropy"].shape == (2, 0)
    assert not torch.autograd.grad(nothing["logprobs"].sum(), layer.weight)[0].any()
    with pytest.raises(ValueError, match=r"FusedOutputLinear takes labels= and temperature="):
        layer(hidden, labels)
    prime_rl.uninstall()
    assert layer(hidden) == "prime-rl's"


def test_skyrl(framework, installed, group):
    module = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
    framework(**{module: SKYRL})
    installed(skyrl)
    utils = importlib.import_module(module)
    hidden, weight, labels, _ = problem(shape=(2, 7), masked=0.0)
    exact = double(hidden, weight)
    values = plain_statistics(*exact, labels.roll(-1, 1), temperature=0.7)
    expected = values["logp"][:, :-1]
    upstream = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    for head in (utils.from_parallel_hidden_to_logprobs, utils.from_parallel_hidden_to_logprobs_packed_sequences):
        logps = head(hidden, weight, labels, 0, 61, tp_group=group, temperature=0.7, fused_backend="triton")
        grads = torch.autograd.grad(logps, (hidden, weight), upstream)
        exact_grads = torch.autograd.grad(expected, exact, upstream.double(), retain_graph=True)
        for ours, value in zip((logps, *grads), (expected, *exact_grads), strict=True):
            assert relative_error(ours, value) < 1e-5
    arguments = "torch", hidden, weight, labels.roll(-1, 1), 0, 61, 4, group
    assert not utils._fused_lm_head_logprob_apply(*arguments, True).requires_grad
    assert relative_error(utils._fused_lm_head_logprob_apply(*arguments, False)[:, :-1] * 0.7, expected) > 1e-3
    entropy = utils._fused_vocab_parallel_entropy_from_hidden(hidden, weight, group, chunk_size=4, temperature=0.7)
    assert relative_error(entropy, values["entropy"]) < 1e-5
    assert not entropy.requires_grad


def test_nemo_rl(framework, installed, group):
    module = "nemo_rl.distributed.model_utils"
    framework(**{module: NEMO})
    installed(nemo_rl)
    utils = importlib.import_module(module)
    hidden, weight, labels, _ = problem(shape=(7, 2), masked=0.0)  # [S, B]
    exact = double(hidden, weight)
    expected = plain_statistics(*exact, labels.roll(-1, 0))["logp"].t()[:, :-1]
    upstream = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    for inference in (False, True):
        logps = utils.from_parallel_hidden_states_to_logprobs(
            hidden, weight, None, labels.t(), 0, 61, group, inference_only=inference, chunk_size=4
        )
        assert relative_error(logps, expected) < 1e-5
        assert logps.requires_grad is not inference
        if not inference:
            grads = torch.autograd.grad(logps, (hidden, weight), upstream)
            for ours, value in zip(grads, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
                assert relative_error(ours, value) < 1e-5
    nemo_rl.uninstall()
    assert utils.ChunkedDistributedHiddenStatesToLogprobs.apply(hidden) == hidden.sum()


# --- verl's distillation ----------------------------------------------------------------------------------------------

LOSSES = """
def get_ulysses_sequence_parallel_world_size():
    return 1

def compute_forward_kl_topk(student_logits, teacher_topk_log_probs, teacher_topk_ids, config, data_format):
    return "verl's"
"""
ENGINE = """
import types

tu = types.SimpleNamespace(get_non_tensor_data=lambda data, key, default: data.get(key, default))

class FSDPEngineWithLMHead:
    use_ulysses_sp = False

    def prepare_model_inputs(self, micro_batch):
        return {"input_ids": micro_batch["input_ids"]}, {}

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        return output
"""


PACKING = """
import torch

def preprocess_thd_engine(input_ids, need_roll=False, pad=0):
    rows = torch.cat([row.roll(-1, 0) if need_roll else row for row in input_ids.unbind()])
    return torch.cat([rows, rows.new_zeros(pad, *rows.shape[1:])])[None], None

def postprocess_thd_engine(output, input_ids):
    return torch.nested.nested_tensor_from_jagged(output[0, :input_ids.values().shape[0]], input_ids.offsets())
"""
FUSED = """
from verl.models.mcore.util import postprocess_thd_engine, preprocess_thd_engine

def fused_forward(model, input_ids, labels):
    packed, _ = preprocess_thd_engine(labels, need_roll=True, pad=2)
    logps, entropy = model(packed)
    return {"log_probs": postprocess_thd_engine(logps.view(1, -1), input_ids)}
"""
MEGATRON_ENGINE = """
import types

from verl.models.mcore.model_forward_fused import fused_forward

tu = types.SimpleNamespace(get_non_tensor_data=lambda data, key, default: data.get(key, default))

class MegatronEngineWithLMHead:
    engine_config = types.SimpleNamespace(use_fused_kernels=True)

    def forward_step(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func):
        batch = next(batch_iter)
        return fused_forward(model, batch["input_ids"], batch["input_ids"]), postprocess_micro_batch_func
"""


def distilled(engine, hidden, weight, labels, batch, loss):
    """What verl's engine does with a micro-batch of packed sequences."""
    from liger_losses.integrations.verl import fused_linear_for_ppo

    _, arguments = engine.prepare_model_inputs(batch)
    logps, entropy = fused_linear_for_ppo(None, hidden, weight, labels, 0.7)
    output = types.SimpleNamespace(log_probs=logps, entropy=entropy)
    return engine.prepare_model_outputs(output, arguments, batch, loss)


@pytest.fixture
def verl_engine(framework, installed):
    losses, engine = verl_distillation._FSDP, verl_distillation._FSDP_ENGINE
    framework(**{losses: LOSSES, engine: ENGINE})
    installed(verl_distillation.REPLACEMENTS)
    return importlib.import_module(engine).FSDPEngineWithLMHead(), importlib.import_module(losses)


def test_distillation_of_verl(verl_engine):
    engine, losses = verl_engine
    hidden, weight, labels, _ = problem(shape=(1, 9), masked=0.0)
    exact = double(hidden, weight)
    teacher = torch.randn(9, 61, generator=torch.Generator().manual_seed(3)).mul(3).log_softmax(-1).topk(5)
    nested = [torch.nested.nested_tensor_from_jagged(value, torch.tensor([0, 4, 9])) for value in teacher]
    batch = {"input_ids": labels, "teacher_logprobs": nested[0], "teacher_ids": nested[1], "use_fused_kernels": True}
    config = types.SimpleNamespace(distillation_loss=types.SimpleNamespace(log_prob_min_clamp=-4.0))

    def loss(student_logits, data):
        return losses.compute_forward_kl_topk(student_logits, data["teacher_logprobs"], data["teacher_ids"], config, "")

    plain = distilled(engine, hidden, weight, labels, batch, loss)
    assert not hasattr(plain, "fused_linear_aux")
    batch["distillation_use_topk"] = True
    found = distilled(engine, hidden, weight, labels, {**batch, "calculate_entropy": True}, loss)
    torch.testing.assert_close((found.log_probs, found.entropy), (plain.log_probs, plain.entropy))
    log_p = (exact[0] @ exact[1].t() / 0.7).log_softmax(-1).squeeze(0).gather(-1, teacher.indices)
    q, p = teacher.values.double(), log_p.clamp(min=-4.0)
    assert (log_p < -4.0).any()
    assert (log_p > -4.0).any()
    expected = (q.clamp(min=-4.0).exp() * (q.clamp(min=-4.0) - p)).sum(-1)
    aux = found.fused_linear_aux
    for name, value in (
        ("distillation_losses", expected),
        ("student_mass", log_p.exp().sum(-1)),
        ("teacher_mass", q.exp().sum(-1)),
    ):
        assert getattr(aux, name).shape == (1, 9)
        assert relative_error(getattr(aux, name).squeeze(0), value) < 1e-5, name
    upstream = torch.linspace(-1, 1, 9)
    grads = torch.autograd.grad(
        (aux.distillation_losses, found.log_probs), (hidden, weight), (upstream[None], upstream[None])
    )
    logp = plain_statistics(*exact, labels, temperature=0.7)["logp"].squeeze(0)
    exact_grads = torch.autograd.grad((expected, logp), exact, (upstream.double(), upstream.double()))
    for ours, value in zip(grads, exact_grads, strict=True):
        assert relative_error(ours, value) < 1e-5
    # FSDP gathers the head's weight in a hook on the model's output, before the head's backward.
    alone = distilled(engine, hidden, weight, labels, batch, loss)
    assert alone.entropy is None
    order = []
    hidden.register_hook(lambda grad: order.append("hidden states"))
    alone.log_probs.register_hook(lambda grad: order.append("output"))
    alone.fused_linear_aux.distillation_losses.sum().backward()
    assert order == ["output", "hidden states"]
    assert losses.compute_forward_kl_topk(hidden, None, None, None, "") == "verl's"


def test_distillation_of_verls_megatron_engine(framework, installed):
    names = verl_distillation
    framework(
        **{
            names._MEGATRON: LOSSES,
            "verl.models.mcore.util": PACKING,
            names._MEGATRON_HEAD: FUSED,
            names._MEGATRON_ENGINE: MEGATRON_ENGINE,
        }
    )
    installed(verl_distillation.REPLACEMENTS)
    from liger_losses.integrations.verl import linear_cross_entropy

    losses = importlib.import_module(names._MEGATRON)
    engine = importlib.import_module(names._MEGATRON_ENGINE).MegatronEngineWithLMHead()
    hidden, weight, _, _ = problem(n=12, masked=0.0)  # 10 tokens and 2 of padding
    exact = double(hidden, weight)
    teacher = torch.randn(10, 61, generator=torch.Generator().manual_seed(3)).mul(3).log_softmax(-1).topk(5)
    ids = torch.arange(10)
    ids, logps, columns = (
        torch.nested.nested_tensor_from_jagged(value, torch.tensor([0, 5, 10])) for value in (ids, *teacher)
    )
    batch = {"input_ids": ids, "teacher_logprobs": logps, "teacher_ids": columns, "distillation_use_topk": True}
    config = types.SimpleNamespace(distillation_loss=types.SimpleNamespace(log_prob_min_clamp=-4.0))

    def loss(student_logits, data, data_format):
        assert data_format == "thd"
        return losses.compute_forward_kl_topk(
            student_logits=student_logits,
            teacher_topk_log_probs=data["teacher_logprobs"],
            teacher_topk_ids=data["teacher_ids"],
            config=config,
            data_format=data_format,
        )

    def model(labels):
        return linear_cross_entropy(hidden[:, None], weight, labels, 0.7)

    def step(**changes):
        return engine.forward_step(
            iter([{**batch, **changes}]), model, logits_processor_func=loss, postprocess_micro_batch_func="post"
        )

    found, post = step()
    assert post == "post"
    labels = torch.tensor([*range(1, 5), 0, *range(6, 10), 5])
    logp = plain_statistics(exact[0][:10], exact[1], labels, temperature=0.7)["logp"]
    log_p = (exact[0][:10] @ exact[1].t() / 0.7).log_softmax(-1).gather(-1, teacher.indices).clamp(min=-4.0)
    q = teacher.values.double().clamp(min=-4.0)
    expected = (q.exp() * (q - log_p)).sum(-1)
    for name, value in (
        ("log_probs", logp),
        ("distillation_losses", expected),
        ("student_mass", log_p.exp().sum(-1)),
        ("teacher_mass", q.exp().sum(-1)),
    ):
        assert relative_error(found[name].values(), value) < 1e-5, name
    upstream = torch.linspace(-1, 1, 10)
    grads = torch.autograd.grad(found["distillation_losses"].values(), (hidden, weight), upstream)
    for ours, value in zip(grads, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        assert relative_error(ours, value) < 1e-5
    assert set(step(distillation_use_topk=False)[0]) == {"log_probs"}
    assert importlib.import_module("verl.models.mcore.util").preprocess_thd_engine.__name__ == "preprocess_thd_engine"
    assert not hasattr(importlib.import_module("verl.models.mcore.util").preprocess_thd_engine, "__wrapped__")


def test_distillation_of_verl_says_what_does_not_fit(verl_engine):
    engine, _ = verl_engine
    hidden, weight, labels, _ = problem(shape=(1, 9), masked=0.0)
    columns = torch.nested.nested_tensor_from_jagged(torch.zeros(8, 5, dtype=torch.int64), torch.tensor([0, 8]))
    batch = {"input_ids": labels, "teacher_ids": columns, "teacher_logprobs": columns.float()}
    batch |= {"use_fused_kernels": True, "distillation_use_topk": True}
    try:
        with pytest.raises(ValueError, match="columns are of 8 tokens, the student's of 9"):
            distilled(engine, hidden, weight, labels, batch, None)
    finally:
        engine.prepare_model_inputs({"input_ids": labels})


def test_distillation_of_verl_of_no_tokens(verl_engine):
    engine, _ = verl_engine
    hidden, weight, labels, _ = problem(shape=(1, 9), masked=0.0)
    columns = torch.nested.nested_tensor_from_jagged(torch.zeros(0, 5, dtype=torch.int64), torch.tensor([0, 0]))
    batch = {"input_ids": labels[:, :0], "teacher_ids": columns, "teacher_logprobs": columns.float()}
    batch |= {"use_fused_kernels": True, "distillation_use_topk": True}
    try:
        found = distilled(engine, hidden[:, :0], weight, labels[:, :0], batch, None)
    finally:
        engine.prepare_model_inputs({"input_ids": labels})
    assert found.log_probs.shape == (1, 0)
