"""Frameworks as they are on the package index: their own functions with and without this library, on a CPU.

``make test-integrations`` installs them without their dependencies. Each check here runs in a process of its own:
``python -m tests.integrations.real NAME``. Packages that a framework imports and that are not installed are stand-ins,
whose names are empty classes: none of them computes anything that is compared here.
"""

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import tempfile
import types
from unittest import mock

import torch

from tests.reference import problem
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
        if name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: getattr(_anything("stand_in"), name)
        module.__version__ = "1.0"
        return module

    def exec_module(self, module):
        pass


def stand_in(*names):
    sys.meta_path.append(StandIns(*names))


@contextlib.contextmanager
def logged():
    """What this library logs at INFO."""
    lines = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("liger_losses")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def compare(run, install, rtol=1e-4, atol=1e-5):
    """The same results of ``run`` without and with this library, which is called in the second only."""
    with engine_calls() as calls:
        theirs = run()
        assert not calls
        with logged() as lines:
            install()
            ours = run()
        assert any("liger_losses computes" in line for line in lines), lines
        assert calls
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    return theirs


#: What verl imports and these checks do not use.
_VERL = ("ray", "codetiming", "hydra", "omegaconf", "torchdata", "wandb", "cachetools")


def group():
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return torch.distributed.group.WORLD


def verl_heads():
    stand_in(*_VERL)
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    from liger_losses.integrations import verl

    hidden, weight, labels, _ = problem(n=40, masked=0.0, shape=(2, 20))

    def run():
        results = []
        for backend in ("torch", "liger"):
            logps, entropy = FusedLinearForPPO(impl_backend=backend)(hidden, weight, labels, temperature=0.7)
            results += [logps, entropy, *torch.autograd.grad(logps.sum() - 0.1 * entropy.sum(), (hidden, weight))]
        return results

    compare(run, verl.install)


def verl_before_its_import():
    """As a hook in Ray's workers installs it, which says so."""
    stand_in(*_VERL)
    from liger_losses.integrations import verl

    with logged() as lines:
        verl.install()
    from verl.utils.kernel import linear_cross_entropy as module

    assert any("the fused heads and the top-k distillation of verl 0.9" in line for line in lines), lines
    assert module.linear_cross_entropy is verl.linear_cross_entropy
    hidden, weight, labels, _ = problem(n=40, masked=0.0)
    logps, entropy = module.linear_cross_entropy(hidden, weight, labels, 0.7)
    exact = (hidden @ weight.T / 0.7).log_softmax(-1)
    torch.testing.assert_close(logps, exact.gather(1, labels[:, None])[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, -(exact.exp() * exact).sum(-1), rtol=1e-4, atol=1e-5)


def verl_step(config, teacher, module):
    """A step of verl's FSDP engine and loss on a packed batch, around a module that gets the next tokens' ids.

    Returns the loss, log-probabilities, and what else the engine has computed of each token, as one row.
    """
    import verl.workers.engine.fsdp.transformer_impl as engine
    from tensordict import TensorDict
    from verl.trainer.distillation import losses
    from verl.utils import tensordict_utils as tu

    jagged, offsets, responses = (
        torch.nested.nested_tensor_from_jagged,
        torch.tensor([0, 4, 9]),
        torch.tensor([0, 2, 5]),
    )
    settings = {"use_task_rewards": False, "use_policy_gradient": False, "loss_max_clamp": None}
    actor = {"strategy": "fsdp", "loss_agg_mode": "token-mean", "global_batch_info": {}, "loss_scale_factor": None}
    config = {"log_prob_min_clamp": None, "topk": 5, "fused": True, "path": None} | config
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
    ids = teacher["ids"]
    batch = TensorDict(
        {
            "input_ids": jagged(ids, offsets),
            "position_ids": jagged(torch.arange(9), offsets),
            "prompts": jagged(ids[:4], torch.tensor([0, 2, 4])),
            "responses": jagged(ids[:5], responses),
            "response_mask": torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "teacher_logprobs": jagged(teacher["values"], offsets),
            "teacher_ids": jagged(teacher["columns"], offsets),
        },
        batch_size=[2],
    )
    flags = {"distillation_use_topk": True, "temperature": 0.7, "calculate_entropy": True}
    tu.assign_non_tensor(batch, **flags, use_fused_kernels=config["fused"])
    tu.assign_non_tensor(batch, dp_size=1, batch_num_tokens=5, global_batch_size=2)
    teachers = {"default": types.SimpleNamespace(model_path=config["path"])}
    distillation = types.SimpleNamespace(
        distillation_loss=types.SimpleNamespace(**settings, **config), teacher_models=teachers
    )
    of_step = functools.partial(
        losses.distillation_ppo_loss, config=types.SimpleNamespace(**actor), distillation_config=distillation
    )
    loss, output = worker.forward_step(batch, of_step, False)
    names = ("log_probs", "entropy", "distillation_losses", "student_mass", "teacher_mass")
    return [loss, *(output["model_output"][name].values() for name in names)]


def verl_distillation():
    """From logits, and with fused kernels, from this library's head."""
    stand_in(*_VERL)
    from liger_losses.integrations import verl

    hidden, weight, ids, _ = problem(n=9, masked=0.0, shape=(1, 9))
    topk = torch.randn(9, 61, generator=torch.Generator().manual_seed(3)).mul(3).log_softmax(-1).topk(5)
    teacher = {"ids": ids[0], "values": topk.values, "columns": topk.indices}

    def step(fused):
        def module(shift_labels=None, **_):
            if not fused:
                logits = hidden @ weight.T
                seen.append((logits / 0.7).log_softmax(-1).gather(-1, ids.roll(-1)[..., None])[..., 0])
                return types.SimpleNamespace(logits=logits)
            logps, entropy = verl.fused_linear_for_ppo(None, hidden, weight, shift_labels, 0.7)
            seen.append(logps)
            return types.SimpleNamespace(log_probs=logps, entropy=entropy)

        seen, config = [], {"loss_mode": "forward_kl_topk", "log_prob_min_clamp": -4.0, "fused": fused}
        loss, *others = verl_step(config, teacher, module)
        total = loss + (seen[0] * torch.linspace(-1, 1, 9)).sum()
        return [loss.detach(), *others, *torch.autograd.grad(total, (hidden, weight))]

    fused = iter((False, True))
    compare(lambda: step(next(fused)), verl.install)


def verl_hidden_states():
    """From a teacher that sends hidden states; beside the logits of both models."""
    stand_in(*_VERL)
    from safetensors.torch import save_file

    from liger_losses.integrations import verl

    hidden, weight, ids, _ = problem(n=9, masked=0.0, shape=(1, 9))
    states, head = (torch.randn(n, 16, generator=torch.Generator().manual_seed(n)) for n in (9, len(weight)))
    teacher = {"ids": ids[0], "values": states, "columns": torch.zeros(9, 1, dtype=torch.int32)}

    def module(shift_labels, **_):
        logps, entropy = verl.fused_linear_for_ppo(None, hidden, weight, shift_labels, 0.7)
        return types.SimpleNamespace(log_probs=logps, entropy=entropy)

    verl.install()
    with tempfile.TemporaryDirectory() as folder:
        save_file({"lm_head.weight": head}, f"{folder}/model.safetensors")
        loss, logps, *_ = verl_step({"loss_mode": "reverse_kl_hidden_states", "path": folder}, teacher, module)
    found = [loss, *torch.autograd.grad(loss, (hidden, weight)), logps]
    log_p, log_q = (hidden[0] @ weight.T / 0.7).log_softmax(-1), (states @ head.T).log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    loss = divergence[torch.tensor([1, 2, 5, 6, 7])].mean()  # of the token before each of a response's
    logps = log_p.gather(1, ids[0].roll(-1)[:, None])[:, 0]
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

    compare(run, install)


def megatron():
    """A GPTModel of one process, with the losses of its own output layer and of this library."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    group()
    parallel_state.initialize_model_parallel()
    torch.cuda.current_device = lambda: "cpu"  # where the model allocates and draws numbers
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    torch.manual_seed(0)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16)
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    labels, positions = ids.roll(-1, 1), torch.arange(9).expand(2, -1)
    mask = torch.ones(9, 9, dtype=torch.bool).triu(1)[None, None]
    options = {}

    def run():
        model.zero_grad()
        losses = model(ids, positions, mask, labels=labels, **options)
        losses.sum().backward()
        return [losses.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    def install():
        from liger_losses.integrations.megatron import output_processor

        options["output_processor"] = output_processor

    compare(run, install)


def skyrl():
    stand_in("loguru", "ray", "omegaconf", "hydra", "wandb", "skyrl_gym", "jaxtyping", "cloudpathlib")
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # which pydantic asks for on Python 3.11
    from skyrl.backends.skyrl_train.distributed.megatron import model_utils

    from liger_losses.integrations import skyrl as ours

    hidden, weight, labels, _ = problem(n=14, masked=0.0, shape=(2, 7))
    world = group()

    def run():
        logps = model_utils.from_parallel_hidden_to_logprobs(
            hidden, weight, labels, 0, 61, tp_group=world, temperature=0.7, chunk_size=4
        )
        upstream = torch.randn(logps.shape, generator=torch.Generator().manual_seed(1))
        entropy = model_utils._fused_vocab_parallel_entropy_from_hidden(hidden, weight, world, temperature=0.7)
        return [logps, entropy, *torch.autograd.grad(logps, (hidden, weight), upstream)]

    compare(run, ours.install)


def axolotl():
    from axolotl.integrations.base import BasePlugin, PluginManager
    from axolotl.utils.dict import DictDefault

    from tests.integrations.models import is_patched, llama

    with logged() as lines:
        manager = PluginManager.get_instance()
        name = "liger_losses.integrations.axolotl.Plugin"
        manager.register(name)
        assert isinstance(manager.plugins[name], BasePlugin)
        model = llama()
        ids = torch.arange(5, 14)[None]
        expected = model(ids, labels=ids).loss
        cfg = DictDefault(liger_losses={"rope": False})
        manager.pre_model_load(cfg)
        manager.post_model_load(cfg, model)
    assert is_patched(model)
    assert any("Axolotl 0.21" in line for line in lines), lines
    with engine_calls() as calls:
        torch.testing.assert_close(model(ids, labels=ids).loss, expected)
        assert calls
    assert "liger_losses.integrations.axolotl.Args" in manager.get_input_args()


def llamafactory():
    """Its function that applies liger-kernel's, to a model that is then patched by this library."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from liger_losses.integrations import liger
    from liger_losses.patching.lazy_head import patched_heads

    liger.install()
    module = importlib.import_module("llamafactory.v1.plugins.model_plugins.kernels.liger_kernel_ops")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=2, head_dim=8))
    ids = torch.arange(5, 14)[None]
    expected = model(ids, labels=ids).loss
    with mock.patch.object(module.LigerKernel, "check_deps", return_value=True):  # it asks for a GPU
        module.LigerKernel.apply(model=model, use_kernels="auto")
    assert patched_heads(model)
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("ok")
