"""Models that transformers splits over processes (``tp_plan="auto"``): patched, they compute what they did."""

import contextlib
import functools
import os
import warnings
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", minversion="5.23", reason="older releases split models in other ways")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing import assert_close

from liger_losses.patching.loss_head import pending_logits
from liger_losses.patching.patch import patch, unpatch
from tests import processes
from tests.models import ids_and_labels, small, without_logits
from tests.processes import BACKENDS, device_type, whole

# --- The models -------------------------------------------------------------------------------------------------------

ROWS, LENGTH = 2, 9
WORDS = 31  # of the inputs: the smallest vocabulary
#: DTensors of torch 2.11 (not 2.13) refuse to redistribute the strided shards of experts, before anything is patched.
LEFT_OUT = "mixtral" if torch.__version__ < (2, 13) else None


def tiny_models():
    """By name, a model of each family, and the classes of its modules that patching must leave alone."""

    def tiny(family, vocab_size, tied, *left, **options):
        options |= {"vocab_size": vocab_size, "tie_word_embeddings": tied, "initializer_range": 0.3}
        options |= {"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
        options |= {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
        return lambda: small(family, **options), set(left)

    return {
        "llama": tiny("Llama", 31, False),
        "llama, tied": tiny("Llama", 40, True),
        "qwen3, tied": tiny("Qwen3", 40, True, "Qwen3RMSNorm", head_dim=8),
        "gemma2, tied": tiny("Gemma2", 33, True, head_dim=4, final_logit_softcapping=2.0),
        "mixtral": tiny("Mixtral", 40, False, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
    }


def save(folder):
    for name, (make, _) in tiny_models().items():
        model = make()
        with torch.no_grad():  # norms and biases that are not all ones or zeros
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn(len(parameter)))
        model.save_pretrained(folder / name)


def load(folder, name, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / name, **options).train()


def load_split(folder, name, plan="auto"):
    from transformers.distributed import DistributedConfig

    return load(folder, name, distributed_config=DistributedConfig(tp_plan=plan))


def mesh_of_two():
    return init_device_mesh(device_type(), (2,))


def batch(rows=ROWS):
    return ids_and_labels(0, WORDS, rows, LENGTH)


def gradients(model):
    found = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def close(found, expected, where=""):
    assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda m: f"{where}: {m}")


def split_over(model, mesh):
    """As transformers does it while it loads a model, which needs all processes for it."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_modules()}
    plan = model._expand_parallel_plan(model.tp_plan)
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if name in names})
    model.tie_weights()
    return model


def fully_sharded(model, mesh, tail):
    """``fully_shard`` of the layers, of the last norm and the head if ``tail``, and of the rest."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if tail:
        fully_shard([model.model.norm, model.lm_head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def work(rank, folder, world, run):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # which accelerate demands, and nobody uses
    for name, case in run(folder).items():
        if name.partition(",")[0] != LEFT_OUT:
            with processes.case_named(name):
                case()


def start(folder, run, world, backend="gloo"):
    """Save the models, and run the cases that ``run(folder)`` names on so many processes."""
    save(folder)
    # Transformers takes the accelerator that it finds.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}
    with mock.patch.dict(os.environ, hidden):
        processes.start(work, world, folder, folder, world, run, backend=backend)


# --- What is computed of a model --------------------------------------------------------------------------------------


def training(model):
    """The model's own loss."""
    ids, labels = batch()
    outputs = model(input_ids=ids, labels=labels)
    outputs.loss.backward()
    return outputs.loss.detach(), gradients(model)


def log_probs(model):
    """Of the labels, weighted, as preference and policy losses take them."""
    ids, labels = batch()
    logits = model(input_ids=ids).logits[:, :-1]
    targets = labels[:, 1:].clamp(min=0)
    logps = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    lse, selected = logits.logsumexp(-1), logits.gather(-1, torch.stack([targets, targets.flip(0)], -1))
    weights = torch.linspace(-1, 1, logps.numel()).view_as(logps)
    (weights * (logps + 0.3 * lse + selected.sum(-1))).sum().backward()
    return logps.detach(), lse.detach(), gradients(model)


def evaluation(model):
    ids, labels = batch()
    with torch.no_grad():
        return model(input_ids=ids, labels=labels).loss


def values(model):
    """The logits themselves, and a loss that needs them, with some of their columns."""
    ids, _ = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = model(input_ids=ids).logits
        loss = logits.exp().mean() + logits[:, 2:5, 13:22].square().sum() + logits[..., 20].sum()
        loss.backward()
        return loss.detach(), logits.argmax(-1), gradients(model)


def generation(model):
    return model.generate(batch()[0][:, :3], max_new_tokens=4, do_sample=False)


WITHOUT_LOGITS = (training, log_probs, evaluation)


def run_model(folder, name, left):
    model = load_split(folder, name)
    forward = vars(model.lm_head)["forward"]
    plain = {check: check(model) for check in (*WITHOUT_LOGITS, values, generation)}
    close(plain[training], training(load(folder, name)), "transformers")

    report = patch(model, eval_logits=False)
    assert {entry.class_name for entry in report.left} == left, str(report)
    for check in (training, evaluation):
        with without_logits():
            close(check(model), plain[check], check.__name__)
    for check in (log_probs, values):
        close(check(model), plain[check], check.__name__)
        with pending_logits(model), without_logits() if check in WITHOUT_LOGITS else contextlib.nullcontext():
            close(check(model), plain[check], check.__name__)
    assert torch.equal(generation(model), plain[generation])

    unpatch(model)
    assert vars(model.lm_head)["forward"] is forward
    loss, found = training(model)
    assert torch.equal(loss, plain[training][0])
    assert all(torch.equal(found[key], gradient) for key, gradient in plain[training][1].items())


# --- TRL's fused head -------------------------------------------------------------------------------------------------

TEMPERATURE = 0.7


def losses_and_gradients(model, add):
    """With the loss alone, with all that is differentiable, and without gradients."""
    add(model, TEMPERATURE, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    (ids, labels), results = batch(), []
    for weighted in (False, True):
        found = model(input_ids=ids, labels=labels, fused_lm_head=True)
        weights = torch.linspace(-1, 1, found.log_probs.numel()).view_as(found.log_probs)
        (found.loss + weighted * (weights * (found.log_probs + 0.3 * found.entropy)).sum()).backward()
        results.append((*outputs_of(found), gradients(model)))
    with torch.no_grad():
        return [*results, outputs_of(model(input_ids=ids, labels=labels, fused_lm_head=True))]


def outputs_of(found):
    return [x.detach() for x in (found.loss, found.log_probs, found.entropy, found.mean_logits, found.is_top1)]


def run_fused(folder, name):
    from trl.trainer.utils import add_fused_lm_head as plain_head

    from liger_losses.trl.fused_head import add_fused_lm_head

    plain, model = load(folder, name), load_split(folder, name)
    for each in (plain, model):
        each.config.output_router_logits = False
    expected = losses_and_gradients(plain, plain_head)
    with without_logits():
        close(losses_and_gradients(model, add_fused_lm_head), expected)


# --- Data parallelism beside it --------------------------------------------------------------------------------------


def run_two_dimensions(folder, name, tail, pairs):
    """Each pair of processes has a batch of its own; their mean is the loss of all."""
    from liger_losses.trl.fused_head import add_fused_lm_head

    mesh = init_device_mesh(device_type(), (pairs, 2), mesh_dim_names=("dp", "tp"))
    ids, labels = batch(pairs * ROWS)
    count = (labels[:, 1:] != -100).sum()
    options = {"output_router_logits": False} if name == "mixtral" else {}  # whose loss is not a sum over tokens
    plain = load(folder, name, **options)
    expected = plain(input_ids=ids, labels=labels, num_items_in_batch=count).loss
    expected.backward()
    expected = expected.detach(), gradients(plain)
    mine = mesh["dp"].get_local_rank()
    ids, labels = (x.split(ROWS)[mine] for x in (ids, labels))
    for fused_head in (False, True):
        model = split_over(load(folder, name, **options), mesh["tp"])
        if fused_head:
            add_fused_lm_head(model)
        else:
            assert patch(model).replaced
        fully_sharded(model, mesh["dp"], tail)
        given = {"num_items_in_batch": count / pairs} | ({"fused_lm_head": True} if fused_head else {})
        with without_logits():
            outputs = model(input_ids=ids, labels=labels, **given)
            assert fused_head or outputs.logits is None
            outputs.loss.backward()
        loss = outputs.loss.detach().clone()
        dist.all_reduce(loss, group=mesh["dp"].get_group())
        close((loss / pairs, gradients(model)), expected, f"fused_head={fused_head}")


def run_trainer(folder):
    """TRL's SFT trainer, plain and enabled: losses, metrics and weights."""
    import accelerate

    from tests.trl import trainers

    def build(output, _, *others, **options):
        return trainers.sft(output, load_split(folder, "llama"), *others, **options)

    # Accelerate allows tensor parallelism on accelerators only.
    with mock.patch.object(accelerate.ParallelismConfig, "_validate_accelerator"):
        trainers.check_training(build, folder / "trainer", optim="sgd", use_cpu=device_type() == "cpu")


# --- What stays as it is ----------------------------------------------------------------------------------------------


def reason_of_head(model):
    (entry,) = (entry for entry in patch(model).entries if entry.path == "lm_head")
    assert entry.replaced_by is None
    return entry.reason


def other_styles(folder):
    """A head whose forward takes or returns something else, or that has columns of the weight."""
    from transformers.distributed import tensor_parallel as split

    styles = {
        "returns (1, 3, 1": split.ColwiseParallel(),
        "returns (1, 6, 31)": split.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "returns a DTensor": split.ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
        "got [Shard(dim=1)]": split.RowwiseParallel(input_layouts=Replicate()),
    }
    for reason, style in styles.items():
        model = load(folder, "llama")
        style.shard_param(model.lm_head, "weight", mesh_of_two())
        style.install_forward(model.lm_head, mesh_of_two())
        hidden = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
        before = model.lm_head(hidden)
        assert reason in reason_of_head(model), reason
        assert torch.equal(whole(model.lm_head(hidden)), whole(before))


def head_that_is_not_split(folder):
    """The plan of a user leaves it whole on each process."""
    plan = {"lm_head": "replicate"}
    plain, model = (load_split(folder, "llama", plan) for _ in range(2))
    assert patch(model, eval_logits=False).left == []
    with without_logits():
        for check in (training, evaluation):
            close(check(model), check(plain), check.__name__)


def torchs_own(folder):
    """A head that parallelize_module has split has hooks, not a forward of its own."""
    model, plan = load(folder, "llama"), {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    expected = training(model)
    parallelize_module(model, mesh_of_two(), plan)
    assert "parallelize_module" in reason_of_head(model)
    close(training(model), expected)
    model = load(folder, "llama")
    patch(model)
    parallelize_module(model, mesh_of_two(), plan)
    with pytest.warns(RuntimeWarning, match="computes its logits"):
        close(training(model), expected)


def patched_too_early(folder):
    """Before transformers splits the model."""
    model = load(folder, "llama")
    expected, evaluated, generated = training(model), evaluation(model), generation(model)
    patch(model)
    split_over(model, mesh_of_two())
    with pytest.warns(RuntimeWarning, match="computes its logits"):
        found = training(model)
    close(found, expected)
    close(evaluation(model), evaluated)
    assert torch.equal(generation(model), generated)


def patched_too_late(folder):
    """After fully_shard, which has split the head's rows again."""
    expected = training(load(folder, "llama"))
    mesh = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("dp", "tp"))
    for tail in (False, True):
        model = fully_sharded(split_over(load(folder, "llama"), mesh["tp"]), mesh["dp"], tail)
        assert "then patch(model), then fully_shard" in reason_of_head(model)
        close(training(model), expected)


MISFITS = (other_styles, head_that_is_not_split, torchs_own, patched_too_early, patched_too_late)


# --- The processes ----------------------------------------------------------------------------------------------------


def on_two(folder):
    families = {name: left for name, (_, left) in tiny_models().items() if name != "llama, tied"}  # as Qwen3
    cases = {name: functools.partial(run_model, folder, name, left) for name, left in families.items()}
    if find_spec("trl"):
        for name in ("llama", "gemma2, tied", "mixtral"):
            cases[f"{name}, fused head"] = functools.partial(run_fused, folder, name)
        cases["trainer"] = functools.partial(run_trainer, folder)
    cases |= {case.__name__: functools.partial(case, folder) for case in MISFITS}
    for name, tail in (("llama", True), ("gemma2, tied", False)):
        cases[f"{name}, mesh of one row"] = functools.partial(run_two_dimensions, folder, name, tail, 1)
    return cases


def on_four(folder):
    cases = [(name, False) for name in ("llama", "llama, tied", "gemma2, tied", "mixtral")]
    cases += [("llama", True), ("mixtral", True)]
    return {f"{name}, {tail}": functools.partial(run_two_dimensions, folder, name, tail, 2) for name, tail in cases}


@pytest.mark.distributed
@pytest.mark.parametrize("backend", BACKENDS)
def test_split_models_compute_what_they_did(tmp_path, backend):
    """All cases in one start of the processes, which takes longer than they do."""
    start(tmp_path, on_two, 2, backend)


@pytest.mark.distributed
@pytest.mark.slow  # 40 seconds
def test_data_parallelism_beside_tensor_parallelism(tmp_path):
    start(tmp_path, on_four, 4)
