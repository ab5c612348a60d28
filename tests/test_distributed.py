"""The head of TRL on two processes: loss, gradients and steps are those of one process with both batches."""

import functools
import itertools
import traceback
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("trl", reason="TRL is not installed")

from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from liger_losses.trl.head import add_fused_lm_head

WORLD = 2
VOCAB, LENGTH = 23, 9
ROWS = (2, 3)  # of each process
LEARNING_RATE = 0.1


def llama(tied=False, checkpointing=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.3,
            tie_word_embeddings=tied,
        )
    )
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def batch():
    """Ids, labels, and weights of the log-probabilities, which are in the loss beside the model's own."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (sum(ROWS), LENGTH), generator=g)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.3, -100)
    return ids, labels, torch.randn(len(ids), LENGTH - 1, generator=g)


def plain_loss(model, weighted):
    """By transformers, of both batches."""
    ids, labels, weights = batch()
    count = (labels[:, 1:] != -100).sum()
    found = model(input_ids=ids, labels=labels, num_items_in_batch=count)
    if not weighted:
        return found.loss
    targets, mask = labels[:, 1:].clamp(min=0), labels[:, 1:] != -100
    log_probs = found.logits[:, :-1].log_softmax(-1).gather(-1, targets[..., None])[..., 0] * mask
    return found.loss + (weights * log_probs).sum() / count


def our_loss(model, weighted, rank):
    """Of this process's batch: the mean over processes, which DDP and FSDP take, is the loss of both."""
    ids, labels, weights = (part.split(ROWS)[rank] for part in batch())
    count = (batch()[1][:, 1:] != -100).sum() / WORLD
    found = model(input_ids=ids, labels=labels, num_items_in_batch=count, fused_lm_head=True)
    return found.loss + (weights * found.log_probs).sum() / count if weighted else found.loss


# --- How the model is spread ------------------------------------------------------------------------------------------


def ddp(model, **options):
    return DistributedDataParallel(model, **options)


def units(model, *, layers=False, parts=(), root=None, **options):
    """``fully_shard`` of the decoder layers, of the named parts as one unit, and of the whole."""
    if layers:
        for layer in model.model.layers:
            fully_shard(layer, **options)
    found = [model.get_submodule(name) for name in parts]
    if found:
        fully_shard(found if len(found) > 1 else found[0], **options)
    kept = {name: value for name, value in options.items() if name != "reshard_after_forward"}
    return fully_shard(model, **kept, **({} if root is None else {"reshard_after_forward": root}))


HEAD, TAIL, TIED_TAIL = ("lm_head",), ("model.norm", "lm_head"), ("model.norm", "model.embed_tokens", "lm_head")
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

#: How the model is made, and how it is spread.
CASES = {
    "DDP": ({}, ddp),
    "DDP, tied": ({"tied": True}, ddp),
    "DDP, unused parameters": ({}, functools.partial(ddp, find_unused_parameters=True)),
    "DDP, static graph": ({}, functools.partial(ddp, static_graph=True)),
    "root": ({}, units),
    "root, tied": ({"tied": True}, units),
    "root, freed after forward": ({}, functools.partial(units, root=True)),
    "layers": ({}, functools.partial(units, layers=True)),
    "layers, tied, checkpointing": (
        {"tied": True, "checkpointing": True},
        functools.partial(units, layers=True),
    ),
    **{
        f"{name}, {'freed' if reshard else 'kept'} after forward": (
            {},
            functools.partial(units, layers=True, parts=parts, reshard_after_forward=reshard),
        )
        for (name, parts), reshard in itertools.product({"tail": TAIL, "head": HEAD}.items(), (True, False))
    },
    **{
        f"tail, tied, {'freed' if reshard else 'kept'} after forward": (
            {"tied": True},
            functools.partial(units, layers=True, parts=TIED_TAIL, reshard_after_forward=reshard),
        )
        for reshard in (True, False)
    },
    "head, checkpointing": ({"checkpointing": True}, functools.partial(units, layers=True, parts=HEAD)),
    "layers, half": ({}, functools.partial(units, layers=True, mp_policy=HALF)),
    "head, half": ({}, functools.partial(units, layers=True, parts=HEAD, mp_policy=HALF)),
}


# --- What each process does -------------------------------------------------------------------------------------------


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(name, model_options, spread, rank, one_pass, weighted):
    tolerance = {"rtol": 0.1, "atol": 0.02} if "half" in name else {"rtol": 1e-4, "atol": 3e-5}
    plain, ours = llama(**model_options), llama(**model_options)
    add_fused_lm_head(ours, one_pass=one_pass)
    spread_model = spread(ours)
    optimizers = [torch.optim.SGD(model.parameters(), LEARNING_RATE) for model in (plain, ours)]
    for step in range(2):
        expected = plain_loss(plain, weighted)
        expected.backward()
        with torch.no_grad():
            evaluated = our_loss(spread_model, weighted, rank)
        found = our_loss(spread_model, weighted, rank)
        found.backward()
        for loss in (evaluated.clone(), found.detach().clone()):
            dist.all_reduce(loss)
            torch.testing.assert_close(loss / WORLD, expected.detach(), **tolerance, msg=lambda m: f"loss: {m}")
        gradients = {key: whole(p.grad) for key, p in ours.named_parameters() if p.grad is not None}
        assert gradients.keys() == {key for key, p in plain.named_parameters() if p.grad is not None}
        for key, parameter in plain.named_parameters():
            torch.testing.assert_close(
                gradients[key], parameter.grad, **tolerance, msg=lambda m, at=(step, key): f"step {at[0]}, {at[1]}: {m}"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if "half" in name:  # rounding has moved the weights apart
            break


def run_case(name, rank):
    model_options, spread = CASES[name]
    for one_pass, weighted in itertools.product((True, False), (False, True)):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*needs the values")
            try:
                compare(name, model_options, spread, rank, one_pass, weighted)
            except BaseException as error:
                raise type(error)(f"one_pass={one_pass}, log_probs in the loss: {weighted}: {error}") from error


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD, timeout=timedelta(seconds=30)
    )
    results = {}
    for name in CASES:
        try:
            run_case(name, rank)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    torch.save(results, folder / f"results{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What went wrong on each process, case by case; all of them in one start of processes."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(work, (folder,), nprocs=WORLD)
    return [torch.load(folder / f"results{rank}") for rank in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(name, results):
    wrong = [f"process {rank}:\n{found[name]}" for rank, found in enumerate(results) if found[name]]
    assert not wrong, "\n".join(wrong)
