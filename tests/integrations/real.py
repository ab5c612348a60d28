"""Frameworks as they are on the package index: their own functions with and without this library, on a CPU.

``make test-integrations`` installs them without their dependencies. Each check here runs in a process of its own:
``python -m tests.integrations.real NAME``. Packages that a framework imports and that are not installed are stand-ins,
whose names are empty classes: none of them computes anything that is compared here.
"""

import ast
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import pathlib
import sys
import tempfile
import types
import warnings
from typing import Optional
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from liger_losses.integrations.replacements import announce
from tests.integrations.models import is_patched, llama
from tests.project.test_docs import blocks_of
from tests.reference import assert_close_gradients, problem
from tests.seam import engine_calls


class _Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


def _anything(name):
    """A class that can be subclassed, called with anything, and used as a decorator."""

    def make(cls, *args, **kwargs):
        if cls is made and len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return object.__new__(cls)

    made = _Anything(name, (), {"__new__": make, "__init__": lambda self, *args, **kwargs: None})
    return made


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages of these names, after all other finders."""

    def __init__(self, *names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        known = name.partition(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def exec_module(self, module):
        module.__getattr__ = lambda name: getattr(_anything("stand_in"), name)
        module.__version__ = "1.0"


def stand_in(*names):
    sys.meta_path.append(StandIns(*names))


def recipe(word):
    """What the block of the page with this word defines; it is run."""
    page = pathlib.Path(__file__).parents[2] / "docs" / "integrations.md"
    (block,) = [block for block in blocks_of(page) if word in block.code()]
    module = types.ModuleType("recipe")
    exec(compile(block.code(), str(page), "exec"), vars(module))
    return module


def compare(run, install, announced=True):
    """The same results of ``run`` without and with this library, which is called in the second only."""
    with engine_calls() as calls:
        theirs = run()
        assert not calls
        install()
        ours = run()
        assert announced == (announce.cache_info().currsize == 1)
        assert calls
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return theirs


#: What verl imports and these checks do not use.
_VERL = ("ray", "codetiming", "hydra", "omegaconf", "torchdata", "wandb", "cachetools")


def group():
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return torch.distributed.group.WORLD


def verl_step(module, fused=True, loss_mode=None, temperature=0.7, padded=False, squares=True, **batch):
    """A step of verl's FSDP engine on two sequences, around a module: the loss, and the engine's outputs.

    The loss is a sum over all outputs, or with ``loss_mode`` that of verl's distillation.
    """
    import verl.workers.engine.fsdp.transformer_impl as engine
    from tensordict import TensorDict
    from verl.trainer.distillation import losses
    from verl.utils import tensordict_utils as tu

    def jagged(values, *ends):
        return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, *ends]))

    engine.get_device_id = engine.get_device_name = lambda: "cpu"
    worker = object.__new__(engine.FSDPEngineWithLMHead)
    worker.pad_to_length = worker.use_ulysses_sp = False
    worker._autocast_dtype = torch.float32
    worker.engine_config = types.SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    worker.compute_entropy_from_logits = lambda logits: torch.distributions.Categorical(logits=logits).entropy()
    worker._get_packed_pad_size = lambda size: 0
    worker._gather_and_unpad_packed = lambda values, pad: values
    worker.get_data_parallel_group = lambda: None
    worker.module = module
    mask = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    tensors = {name: jagged(values, 4, 9) for name, values in ({"position_ids": torch.arange(9)} | batch).items()}
    tensors |= {"prompts": jagged(IDS[:4], 2, 4), "responses": jagged(IDS[:5], 2, 5), "response_mask": mask}
    batch = TensorDict(tensors | {"input_ids": jagged(IDS, 4, 9)}, batch_size=[2])
    if isinstance(temperature, torch.Tensor):
        batch["temperature"] = temperature
    else:
        tu.assign_non_tensor(batch, temperature=temperature)
    flags = {"calculate_entropy": loss_mode is None, "calculate_sum_pi_squared": squares and loss_mode is None}
    flags |= {"use_fused_kernels": fused, "use_remove_padding": not padded, "distillation_use_topk": bool(loss_mode)}
    tu.assign_non_tensor(batch, **flags, dp_size=1, batch_num_tokens=5, global_batch_size=2)

    def of_outputs(model_output, **_):
        upstream = torch.linspace(-1, 1, 9)
        upstream[ENDS] = 0
        return sum((values.values() * upstream).sum() for values in model_output.values()), {}

    settings = {"use_task_rewards": False, "use_policy_gradient": False, "loss_max_clamp": None, "topk": 5}
    settings |= {"log_prob_min_clamp": None, "loss_mode": loss_mode}
    actor = {"strategy": "fsdp", "loss_agg_mode": "token-mean", "global_batch_info": {}, "loss_scale_factor": None}
    config, of_loss = (types.SimpleNamespace(**options) for options in (actor, settings))
    options = {"config": config, "distillation_config": types.SimpleNamespace(distillation_loss=of_loss)}
    of_teacher = functools.partial(losses.distillation_ppo_loss, **options)
    loss, output = worker.forward_step(batch, of_teacher if loss_mode else of_outputs, False)
    return loss, {name: values.values().clone() for name, values in output["model_output"].items()}


IDS = torch.arange(5, 14)
TEXTS = torch.arange(5, 23).view(2, 9)
LABELS = TEXTS.masked_fill(torch.arange(9) < 3, -100)
#: Sequences end here. Which token verl takes as the next one depends on their layout, and is of no account.
ENDS = [3, 8]


def verl_engine():
    """What verl's fused heads refuse: sums of squared probabilities, and a temperature per sample."""
    stand_in(*_VERL)
    from verl.models.transformers import dense_common
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    from liger_losses.integrations import verl

    model, backends, fused = llama(), ("torch", "triton"), []

    def run():
        results = []
        for temperature in (0.7, torch.tensor([0.7, 1.3])):
            for padded in (False, True):
                for backend in backends[: 1 if padded else 2]:  # verl reads no flat outputs of padded batches
                    forward = getattr(dense_common, f"forward_with_{backend}_backend")
                    module = functools.partial(forward, model) if fused else model
                    loss, outputs = verl_step(module, bool(fused), temperature=temperature, padded=padded)
                    for values in outputs.values():
                        values[ENDS] = 0
                    results += [loss.detach(), outputs, torch.autograd.grad(loss, tuple(model.parameters()))]
        return results

    def install():
        fused.append(True)
        verl.install()

    results = compare(run, install)
    assert set(results[1]) == {"log_probs", "entropy", "sum_pi_squared"}
    _, outputs = verl_step(functools.partial(dense_common.forward_with_torch_backend, model), squares=False)
    assert set(outputs) == {"log_probs", "entropy"}
    assert verl._thread.sums is None  # nor are they computed
    hidden, weight, labels, _ = problem(masked=0.0)
    by_reduction = [verl.linear_cross_entropy(hidden, weight, labels, 0.7, how)[0] for how in ("none", "sum", "MEAN")]
    torch.testing.assert_close(by_reduction[1:], [by_reduction[0].sum(), by_reduction[0].mean()])
    with pytest.raises(ValueError, match="reduction must be none, sum or mean"):
        verl.linear_cross_entropy(hidden, weight, labels, 0.7, "median")
    verl.uninstall()
    assert FusedLinearForPPO.forward is not verl.fused_linear_for_ppo


def verl_hidden_states():
    """The recipe, from a teacher that sends hidden states; beside the logits of both models."""
    stand_in(*_VERL)
    from safetensors.torch import save_file
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    hidden, weight, *_ = problem(n=9, masked=0.0, shape=(1, 9))
    states, head = (torch.randn(n, 16, generator=torch.Generator().manual_seed(n)) for n in (9, len(weight)))
    teacher = {"teacher_logprobs": states, "teacher_ids": torch.zeros(9, 1, dtype=torch.int32)}

    def module(shift_labels, temperature, **_):
        logps, entropy = FusedLinearForPPO().forward(hidden, weight, shift_labels, temperature)
        return types.SimpleNamespace(log_probs=logps, entropy=entropy)

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), engine_calls() as calls:
        os.mkdir("teacher")
        save_file({"lm_head.weight": head}, "teacher/model.safetensors")
        recipe("fused_linear_aux")
        loss, outputs = verl_step(module, loss_mode="forward_kl_topk", **teacher)
        assert calls
    found = [loss, *torch.autograd.grad(loss, (hidden, weight)), outputs["log_probs"]]
    log_p, log_q = (hidden[0] @ weight.T / 0.7).log_softmax(-1), (states @ head.T).log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    loss = divergence[torch.tensor([1, 2, 5, 6, 7])].mean()  # of the token before each of a response's
    logps = log_p.gather(1, IDS.roll(-1)[:, None])[:, 0]
    expected = [loss, *torch.autograd.grad(loss, (hidden, weight)), logps.detach()]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def torchtitan():
    stand_in("torch_checkpointing", "torchdata")
    from torchtitan.components.loss import ChunkedLossWrapper

    hidden, weight, labels, _ = problem(n=48, shape=(3, 16))
    head = torch.nn.Linear(24, 61, bias=False)
    head.weight.data.copy_(weight)
    tokens = (labels != -100).sum()
    classes = [ChunkedLossWrapper]

    def run():
        states = hidden.detach().requires_grad_()
        results = []
        for arguments in ((states * 1.0, labels, tokens), (hidden.detach(), labels)):  # training, validation
            loss_function = classes[-1](classes[-1].Config())
            loss_function.set_lm_head(head)
            head.weight.grad = None
            loss, metrics = loss_function(*arguments)
            results += [loss, *metrics.values()]
            if loss.requires_grad and len(arguments) == 3:
                loss.backward()
                results += [states.grad, head.weight.grad]
        return [result.detach().clone() for result in results]

    def install():
        from liger_losses.integrations.torchtitan import LinearCrossEntropyLoss

        classes.append(LinearCrossEntropyLoss)
        with pytest.raises(ValueError, match="call its set_lm_head"):
            LinearCrossEntropyLoss(LinearCrossEntropyLoss.Config())(hidden, labels)

    compare(run, install)
    assert issubclass(classes[1], ChunkedLossWrapper)  # the trainer gives heads to these


def gpt_model(tied=False, **others):
    """A GPTModel of one process, and its inputs."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    group()
    parallel_state.initialize_model_parallel()
    torch.cuda.current_device = lambda: "cpu"  # where the model allocates and draws numbers
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    options = {"use_cpu_initialization": True, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    torch.manual_seed(0)
    config = TransformerConfig(**sizes, **options, **others)
    spec, lengths = get_gpt_layer_local_spec(), {"vocab_size": 64, "max_sequence_length": 16}
    model = GPTModel(config, spec, **lengths, share_embeddings_and_output_weights=tied)
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    return model, ids, torch.arange(9).expand(2, -1), torch.ones(9, 9, dtype=torch.bool).triu(1)[None, None]


def megatron():
    """The losses of the model's own output layer and of this library, with MuP's scale, a tied weight, and a mask."""
    from liger_losses.integrations.megatron import OutputOptions, output_processor

    model, *inputs = gpt_model(tied=True, use_mup=True, mup_output_mult=0.5)
    labels, mask, options = inputs[0].roll(-1, 1), (inputs[0] % 3 > 0).float(), {}

    def run():
        model.zero_grad()
        losses = model(*inputs, labels=labels, loss_mask=mask, **options)
        (losses * mask).sum().backward()
        return [(losses * mask).detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    compare(run, lambda: options.update(output_processor=output_processor))
    assert not model(*inputs, labels=labels, loss_mask=mask, **options)[mask == 0].any()
    temperature = torch.linspace(0.5, 2, 18).view(2, 9)
    context = OutputOptions(temperature, entropy=True)
    found = model(*inputs, labels=labels, **options, output_processor_context=context)
    tokens = torch.distributions.Categorical(logits=model(*inputs) / temperature[..., None])
    torch.testing.assert_close(found, (tokens.log_prob(labels), tokens.entropy()))
    with pytest.raises(ValueError, match="give labels="):
        model(*inputs, **options)
    fp8, said = mock.patch.object(model.config, "fp8_output_proj", True), "in MXFP8.*set fp8_output_proj=False"
    with fp8, pytest.raises(TypeError, match=said):
        model(*inputs, labels=labels, **options)
    model.output_layer.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"that contains other layers \(adapter\).*merge"):
        model(*inputs, labels=labels, **options)


def slime():
    """The recipe, in a GPTModel; slime, which is on no package index, is a stand-in that reads the model's output."""
    model, *inputs = gpt_model()
    stand_in("slime")
    loss = importlib.import_module("slime.backends.megatron_utils.loss")

    def statistics(logits, tokens, group, with_entropy=False):
        logps = logits.log_softmax(-1)
        return logps.gather(-1, tokens[:, None]), -(logps.exp() * logps).sum(-1) if with_entropy else None

    loss.calculate_log_probs_and_entropy = statistics
    args = types.SimpleNamespace(rollout_temperature=0.7)

    def run():
        model.zero_grad()
        logits = model(*(tensor[:1] for tensor in inputs)).squeeze(0) / args.rollout_temperature
        tokens, world = inputs[0][0].roll(-1), torch.distributed.group.WORLD
        logps, entropy = loss.calculate_log_probs_and_entropy(logits, tokens, world, with_entropy=True)
        alone, _ = loss.calculate_log_probs_and_entropy(logits, tokens, world)
        ((logps.view(-1) + 0.1 * entropy) * torch.linspace(-1, 1, 9)).sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [logps.detach().view(-1), entropy.detach(), alone.detach().view(-1), *grads]

    compare(run, lambda: recipe("calculate_log_probs_and_entropy").install(args), announced=False)


def skyrl():
    """The recipe."""
    stand_in("loguru", "ray", "omegaconf", "hydra", "wandb", "skyrl_gym", "jaxtyping", "cloudpathlib")
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # which pydantic asks for on Python 3.11
    from skyrl.backends.skyrl_train.distributed.megatron import model_utils

    hidden, weight, labels, _ = problem(n=14, masked=0.0, shape=(2, 7))
    world = group()

    def run():
        given, options = (hidden, weight, labels, 0, 61), {"tp_group": world, "temperature": 0.7, "chunk_size": 4}
        logps = model_utils.from_parallel_hidden_to_logprobs(*given, **options)
        upstream = torch.randn(logps.shape, generator=torch.Generator().manual_seed(1))
        return [logps, *torch.autograd.grad(logps, (hidden, weight), upstream)]

    compare(run, lambda: recipe("_fused_lm_head_logprob_apply").install(), announced=False)


def openrlhf():
    """The recipe."""
    stand_in("deepspeed", "flash_attn", "pylatexenc")
    sys.modules["flash_attn.ops"] = None  # whose cross-entropy it takes if there is one
    from openrlhf.models.actor import Actor

    actor = Actor(llama(), temperature=0.7)
    actor.packing_samples = False
    mask = torch.ones_like(TEXTS)
    mask[1, 6:] = 0

    def run():
        actor.zero_grad()
        logps, output = actor(TEXTS, mask[:, 4:], mask, return_output=True, return_entropy=True)
        (logps.sum() - 0.1 * output.entropy[mask[:, 1:] == 1].sum()).backward()
        entropy = output.entropy[mask[:, 1:] == 1].detach()
        return [logps.detach(), entropy, *(p.grad.clone() for p in actor.parameters())]

    compare(run, lambda: recipe("openrlhf.models.actor"), announced=False)


def scale_tokens(*functions):
    """A framework's losses ``(outputs, labels, num_items_in_batch)``, of a patched model's pending logits."""
    from liger_losses import patch

    plain, patched = llama(), llama()
    patched.load_state_dict(plain.state_dict())
    patch(patched)
    for function in functions:
        expected = function(plain(TEXTS), LABELS, 12)
        with warnings.catch_warnings(), engine_calls() as calls:
            warnings.simplefilter("error", RuntimeWarning)  # of logits that are computed
            found = function(patched.train()(TEXTS, num_items_in_batch=12), LABELS, 12)
            assert calls
        torch.testing.assert_close(found, expected)
        pair = [torch.autograd.grad(loss, list(m.parameters())) for loss, m in ((found, patched), (expected, plain))]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-6)


def axolotl_losses():
    """Axolotl's EAFT."""
    from axolotl.monkeypatch.loss.eaft import eaft_loss

    scale_tokens(eaft_loss)


def llamafactory_losses():
    """LLaMA-Factory's DFT and EAFT, from the source of their module, which would import all of it; and a loss that
    equals its ASFT."""
    from liger_losses import LigerFusedLinearKLLoss, Teacher, loss_inputs

    (folder,) = importlib.util.find_spec("llamafactory").submodule_search_locations
    names = "dft_loss_func", "_dft_cross_entropy", "eaft_loss_func", "_eaft_cross_entropy", "asft_loss_func"
    names, known = (*names, "_asft_cross_entropy", "_kl_divergence"), {"torch": torch, "F": F, "Optional": Optional}
    found = functions_of(pathlib.Path(folder, "train", "trainer_utils.py"), names, known)
    scale_tokens(found["dft_loss_func"], found["eaft_loss_func"])
    model, reference = llama(), llama().requires_grad_(False)
    reference.lm_head.weight.neg_()
    expected = found["asft_loss_func"](model(TEXTS), LABELS, reference(TEXTS).logits)
    inputs, (head, states, _) = (loss_inputs(m, input_ids=TEXTS, labels=LABELS) for m in (model, reference))
    loss, _ = LigerFusedLinearKLLoss(1.0, 0.1, token_scaling="probability")(*inputs, Teacher(states, head))
    torch.testing.assert_close(loss, expected)
    assert_close_gradients(loss, expected, list(model.parameters()), rtol=1e-4, atol=1e-6)


def axolotl():
    """Its plugin manager patches the model with the YAML file's options, also where TRL's version is refused."""
    from axolotl.integrations.base import BasePlugin, PluginManager
    from axolotl.utils.dict import DictDefault

    import liger_losses.trl
    from liger_losses.integrations.axolotl import Args

    manager, name, model = PluginManager.get_instance(), "liger_losses.integrations.axolotl.Plugin", llama()
    manager.register(name)
    assert isinstance(manager.plugins[name], BasePlugin)
    assert "liger_losses.integrations.axolotl.Args" in manager.get_input_args()
    ids, cfg = torch.arange(5, 14)[None], DictDefault(Args(liger_losses={"rope": False}).model_dump())
    expected = model(ids, labels=ids).loss
    with mock.patch.object(liger_losses.trl, "enable", side_effect=RuntimeError("not today")) as enable:
        manager.pre_model_load(cfg)
        assert not enable.called
        with pytest.warns(UserWarning, match="keep TRL's own heads, and the model is patched: not today"):
            manager.pre_model_load(DictDefault(rl="dpo"))
    manager.post_model_load(cfg, model)
    assert is_patched(model)
    assert "rope" not in model.liger_report.counts
    assert announce.cache_info().currsize == 1
    with engine_calls() as calls:
        torch.testing.assert_close(model(ids, labels=ids).loss, expected)
        assert calls


def functions_of(path, names, known):
    """Functions of a source file, beside names that it imports."""
    tree = ast.parse(path.read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    exec("from __future__ import annotations\n" + "\n".join(map(ast.unparse, found)), known)
    return known


def swift():
    """The steps of ms-swift's GRPO and GKD trainers that call liger-kernel's losses: this library's take each keyword.
    Their results are compared in test_liger.py."""
    from liger_losses.integrations.liger.chunked import LOSSES

    (folder,) = importlib.util.find_spec("swift").submodule_search_locations
    for trainer, name in (("grpo", "GRPO"), ("gkd", "JSD")):
        tree, loss = ast.parse(pathlib.Path(folder, "rlhf_trainers", f"{trainer}_trainer.py").read_text()), LOSSES[name]
        of_call = {*inspect.signature(loss.forward).parameters, *loss.parameters_named}
        takes = {f"LigerFusedLinear{name}Loss": {*inspect.signature(loss).parameters}}
        takes[f"self.liger_{name.lower()}_loss"] = of_call
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) in takes]
        assert len(calls) == 2
        for call in calls:
            assert {keyword.arg for keyword in call.keywords} <= takes[ast.unparse(call.func)]


if __name__ == "__main__":
    warnings.filterwarnings("error", ".* was not tested with liger_losses")
    globals()[sys.argv[1]]()
    print("ok")
