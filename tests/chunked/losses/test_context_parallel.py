"""Losses of sequences that are cut over two processes: loss, metrics and gradients are those of one process."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import liger_losses
from liger_losses import Completions, Teacher, TeacherTopK, TokenSupport, functional
from liger_losses.chunked.engine.agreement import RankError, agree
from liger_losses.chunked.engine.operators import loss_operator
from liger_losses.chunked.losses.unpaired import mean_over_processes
from tests.processes import BACKENDS, case_named, start
from tests.reference import tensors_of

WORLD, ROWS, LENGTH, HIDDEN, VOCAB = 2, 4, 9, 6, 13
CUT = 5  # the first rank has the first five tokens of each sequence, the second the other four
KINDS = torch.tensor([True, False, True, False])


def problem(rank=None):
    """Whole sequences, or a rank's slices of them; in float64."""
    g = torch.Generator().manual_seed(0)

    def states():
        return torch.randn(ROWS, LENGTH, HIDDEN, generator=g, dtype=torch.float64)

    labels = torch.randint(VOCAB, (ROWS, LENGTH), generator=g)
    labels[torch.rand(ROWS, LENGTH, generator=g) < 0.3] = -100
    labels[0, CUT:] = labels[1, :CUT] = labels[3] = -100  # no tokens on one rank, or on neither
    top = torch.randn(ROWS, LENGTH, VOCAB, generator=g, dtype=torch.float64).log_softmax(-1).topk(3)
    cut = {
        "hidden": states(),
        "ref_hidden": states(),
        "labels": labels,
        "nll_labels": labels.where(torch.rand(ROWS, LENGTH, generator=g) < 0.8, 1),
        "token_weights": torch.rand(ROWS, LENGTH, generator=g, dtype=torch.float64),
        "logps": -torch.rand(ROWS, LENGTH, generator=g, dtype=torch.float64) * 3,
        "old_logps": torch.randn(ROWS, LENGTH, generator=g, dtype=torch.float64) / 4,
        "token_advantages": torch.randn(ROWS, LENGTH, generator=g, dtype=torch.float64),
        "teacher_logps": top.values,
        "teacher_indices": top.indices,
    }
    whole = {
        "weight": torch.randn(VOCAB, HIDDEN, generator=g, dtype=torch.float64),
        "bias": torch.randn(VOCAB, generator=g, dtype=torch.float64),
        "ref_weight": torch.randn(VOCAB, HIDDEN, generator=g, dtype=torch.float64),
        "class_weights": torch.rand(VOCAB, generator=g, dtype=torch.float64),
        "advantages": torch.randn(ROWS, generator=g, dtype=torch.float64),
        "sums": torch.randn(ROWS, generator=g, dtype=torch.float64),
    }
    # Close to the policy, whose ratios of whole completions are near 1.
    logps = (cut["hidden"] @ whole["weight"].t() + whole["bias"]).log_softmax(-1)
    cut["old_logps"] += logps.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    if rank is not None:
        cut = {name: value.split([CUT, LENGTH - CUT], 1)[rank].clone() for name, value in cut.items()}
    p = SimpleNamespace(**cut, **whole)
    for tensor in (p.hidden, p.weight, p.bias):
        tensor.requires_grad_()
    return p


# --- Losses, and how each is called -----------------------------------------------------------------------------------


def build(name, **options):
    return functools.partial(getattr(liger_losses, f"LigerFusedLinear{name}Loss"), **options)


def shared(name, **options):
    """A loss of sequences that both processes share."""
    return build(name, group=dist.group.WORLD, **options)()


def unpaired(loss, p, **options):
    kinds = KINDS.to(p.labels.device)
    return loss(p.hidden, p.weight, p.labels, p.bias, kinds, p.ref_hidden, p.ref_weight, **options)


def unpaired_with_kl(loss, p):
    mismatched = Completions(p.ref_hidden.flip(0), p.nll_labels, ref_logps=p.logps - 4)
    return unpaired(loss, p, kl_completions=mismatched, sample_weights=p.sums.abs())


def policy(loss, p, per_token=False, **options):
    mask, ids = p.labels != -100, p.labels.clamp(min=0)
    advantages = p.token_advantages if per_token else p.advantages
    options = {"old_per_token_logps": p.old_logps, "ref_per_token_logps": p.logps} | options
    return loss(p.hidden, p.weight, ids, mask, advantages, p.bias, **options)


def tokens(loss, p, **options):
    return loss(p.weight, p.hidden, p.labels, p.bias, **options)


def weighted_tokens(loss, p):
    return tokens(loss, p, token_weights=p.token_weights)


def distilled(loss, p):
    return loss(p.weight, p.hidden, p.labels, Teacher(p.ref_hidden, p.ref_weight), bias=p.bias)


def distilled_from_top_k(loss, p):
    return loss(p.weight, p.hidden, p.labels, TeacherTopK(p.teacher_logps, p.teacher_indices), bias=p.bias)


def numbers(found):
    """All tensors of a result, detached."""
    return [tensor.detach().clone() for tensor in tensors_of(found)]


# --- What each process does -------------------------------------------------------------------------------------------


def check_functional(rank):
    """A loss of log-probabilities."""
    results = []
    for p, group in ((problem(), None), (problem(rank), dist.group.WORLD)):
        logps, mask = p.logps.requires_grad_(), p.labels != -100
        options = {"loss_type": "grpo", "importance_sampling_level": "sequence", "old_logps": p.old_logps}
        loss = functional.grpo_loss(logps, p.advantages, mask, group=group, **options)
        loss.backward()
        results.append((loss.detach(), logps.grad))
    (expected, gradient), (found, cut) = results
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(cut, gradient.split([CUT, LENGTH - CUT], 1)[rank], check_dtype=False)


def check_means_of_processes(rank):
    """KTO's and BCO's, over processes with batches of different sizes: of all values, not of the processes' means."""
    values = torch.tensor([[1.0, 2.0, 3.0], [10.0]][rank])
    assert mean_over_processes(values).item() == 4.0


def check_averaged_gradients(rank):
    """DDP averages over the group: the loss is multiplied by its size."""
    gradients = []
    for p, group in ((problem(), None), (problem(rank), dist.group.WORLD)):
        torch.manual_seed(0)
        layer = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        model = layer if group is None else nn.parallel.DistributedDataParallel(layer)
        loss, _ = build("ORPO", group=group)()(p.weight, model(p.hidden), p.labels)
        (loss * (1 if group is None else dist.get_world_size(group))).backward()
        gradients.append(layer.weight.grad)
    torch.testing.assert_close(*gradients)


def check_compiled(rank):
    """Under torch.compile, the call runs outside of the graph."""
    p = problem(rank)
    loss = shared("SimPO")
    compiled = torch.compile(lambda hidden, labels: loss(p.weight, hidden * 2, labels)[0] * 3, backend="eager")
    found = compiled(p.hidden, p.labels)
    torch.testing.assert_close(found, loss(p.weight, p.hidden * 2, p.labels)[0] * 3)
    found.backward()


def check_batch_sizes(rank):
    p = problem(rank)
    rows = 2 + 2 * rank
    for call in (
        lambda: shared("DPO", use_ref_model=False)(p.weight, p.hidden[:rows], p.labels[:rows]),
        lambda: policy(
            shared("GRPO", beta=0.0),
            SimpleNamespace(**{k: v[:rows] if len(v) == ROWS else v for k, v in vars(p).items()}),
        ),
    ):
        with pytest.raises(ValueError, match=r"(?s)same sequences.*rank 0: sequences: .*rank 1: "):
            call()


def check_wrong_inputs(rank):
    """Wrong inputs on one rank are an error on both, which names the rank and what is wrong."""
    p = problem(rank)
    outside, short = p.labels.clone(), p.hidden
    outside[2, 1] = VOCAB
    labels, kinds = outside if rank else p.labels, KINDS.to(outside.device)
    hidden = short[..., 1:] if rank else short
    words = "labels must be in" if rank else "rank 1 .*: ValueError: labels must be in"
    for call in (
        lambda: shared("ORPO")(p.weight, p.hidden, labels),
        lambda: shared("CrossEntropy")(p.weight, p.hidden, labels),
        lambda: shared("KL")(p.weight, p.hidden, labels, Teacher(p.ref_hidden, p.ref_weight)),
        lambda: shared("GRPO", beta=0.0)(p.hidden, p.weight, labels.clamp(min=0), labels != -100, p.advantages),
        lambda: shared("KTO")(p.hidden, p.weight, labels, None, kinds, kl_completions=(p.hidden, p.labels)),
        lambda: shared("KTO")(p.hidden, p.weight, p.labels, None, kinds, kl_completions=(p.hidden, labels)),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    for call in (
        lambda: shared("ORPO")(p.weight, hidden, p.labels),
        lambda: shared("CrossEntropy")(p.weight, hidden, p.labels),
        lambda: shared("GRPO", beta=0.0)(hidden, p.weight, p.labels.clamp(min=0), p.labels != -100, p.advantages),
    ):
        with pytest.raises(ValueError, match="to fit the weight"):
            call()


def check_wrong_arguments(rank):
    """Arguments that there are not, and inputs of policies that do not fit, on one rank."""
    p, group = problem(rank), {"group": dist.group.WORLD}
    unknown, short = {"ref_inputs": p.hidden} if rank else {}, p.advantages[: ROWS - rank]
    old = p.old_logps[:, : p.old_logps.shape[1] - rank]
    mask = p.labels != -100
    for words, call in (
        ("no ref_inputs=", lambda: shared("ORPO")(p.weight, p.hidden, p.labels, **unknown)),
        ("no ref_inputs=", lambda: policy(shared("GRPO"), p, **unknown)),
        ("^advantages must be", lambda: policy(shared("GRPO"), SimpleNamespace(**{**vars(p), "advantages": short}))),
        ("^old_per_token_logps must be", lambda: policy(shared("GRPO"), p, old_per_token_logps=old)),
        ("no argument 'ref_inputs'", lambda: functional.grpo_loss(p.logps, p.advantages, mask, **group, **unknown)),
        ("^advantages must be", lambda: functional.grpo_loss(p.logps, short, mask, **group)),
    ):
        words = words if rank else f"rank 1 .*: (Type|Value)Error: .*{words.strip('^')}"
        with pytest.raises((TypeError, ValueError), match=words):
            call()
    functional.grpo_loss(p.logps, p.advantages, mask, **group)


def check_workspaces(rank):
    """A workspace that is too small on one rank is an error on both."""
    p = problem(rank)
    options = {"workspace": 100 if rank else 10**6}
    words = "too small for" if rank else "rank 1 .*: ValueError: workspace=100 bytes is too small"
    heads = ([p.weight, p.ref_weight], [p.hidden, p.ref_hidden], p.labels)
    for call in (
        lambda: shared("ORPO", **options)(p.weight, p.hidden, p.labels),
        lambda: shared("CrossEntropy", **options)(p.weight, p.hidden, p.labels),
        lambda: shared("CrossEntropy", **options)(*heads),
        lambda: distilled(shared("KL", **options), p),
        lambda: distilled_from_top_k(shared("KL", **options), p),
        lambda: policy(shared("GRPO", **options), p),
        lambda: policy(shared("GRPO", **options, importance_sampling_level="sequence"), p),
        lambda: unpaired_with_kl(shared("KTO", use_ref_model=True, **options), p),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    wrong = TokenSupport(torch.full((*p.labels.shape, 1), VOCAB if rank else -1))
    words = "ids must be in" if rank else "rank 1 .* ValueError: .*ids must be in"
    with pytest.raises(ValueError, match=words):
        policy(shared("GRPO"), p, support=wrong)
    p.token_weights = p.token_weights.to("meta") if rank else p.token_weights
    with pytest.raises(ValueError, match="token_weights is on meta"):
        weighted_tokens(shared("CrossEntropy"), p)


def check_errors_of_one_rank_alone(rank):
    """A loss per token exchanges nothing, not even errors."""
    p = problem(rank)
    loss = shared("CrossEntropy", reduction="none")
    if rank:
        with pytest.raises(ValueError, match="labels must be in"):
            loss(p.weight, p.hidden, p.labels + VOCAB + 100)
    loss(p.weight, p.hidden, p.labels)


def check_errors_of_other_groups(rank):
    """A rank whose head is shared with a rank that has raised: those with the other slices raise too."""
    p = problem(rank)
    group = dist.new_group([0, 1])
    words = "another group" if rank else "rank 1 .*: RankError: another group"

    class Raising(liger_losses.ChunkedLoss):
        @loss_operator
        def forward(self):
            if rank:
                raise RankError("another group", group)
            agree(self.group)

    with pytest.raises((ValueError, RankError), match=words):
        Raising(group=dist.group.WORLD)()
    shared("ORPO")(p.weight, p.hidden, p.labels)


def check_options(rank):
    """Ranks whose losses have other options would wait for each other, or get another loss each."""
    p = problem(rank)
    for call in (
        lambda: shared("ORPO", beta=0.1 + rank)(p.weight, p.hidden, p.labels),
        lambda: shared(("CPO", "SimPO")[rank])(p.weight, p.hidden, p.labels),
        lambda: shared("CrossEntropy", return_z_loss=rank == 1)(p.weight, p.hidden, p.labels),
        lambda: distilled(shared("KL", weight_hard_loss=0.5 + rank), p),
        lambda: policy(shared("GRPO", epsilon_low=0.1 + rank), p),
    ):
        with pytest.raises(ValueError, match=r"(?s)make the same call.*rank 0: .*rank 1: "):
            call()
    # How a rank streams is its own affair.
    shared("ORPO", chunk_size=2 + rank, compact=rank == 1, workspace=(None, 10**6)[rank])(p.weight, p.hidden, p.labels)


def check_members(rank):
    group = dist.new_group([0])
    if rank:
        with pytest.raises(TypeError, match="this rank is a member"):
            build("ORPO", group=group)()
    else:
        values = []
        for options in ({}, {"group": group}):
            loss, metrics = build("ORPO", **options)()(*(getattr(problem(), x) for x in ("weight", "hidden", "labels")))
            values.append(numbers([loss, metrics]))
        torch.testing.assert_close(*values)


CHECKS = (
    check_functional,
    check_means_of_processes,
    check_averaged_gradients,
    check_compiled,
    check_batch_sizes,
    check_wrong_inputs,
    check_wrong_arguments,
    check_workspaces,
    check_errors_of_one_rank_alone,
    check_errors_of_other_groups,
    check_options,
    check_members,
)


#: On GPUs. Of known signatures, they read no messages, so that errors of one rank leave the others waiting.
CHECKS_OF_GPUS = (check_functional, check_means_of_processes, check_averaged_gradients, check_compiled, check_members)


def work(rank, backend):
    for check in CHECKS if backend == "gloo" else CHECKS_OF_GPUS:
        with case_named(check.__name__):
            check(rank)


@pytest.mark.distributed
@pytest.mark.parametrize("backend", BACKENDS)
def test_slices_of_sequences_on_two_processes(tmp_path, backend):
    """In one start of the processes. Losses, metrics and gradients: tests/results/test_ranks.py."""
    start(work, WORLD, tmp_path, backend, backend=backend)


# --- Options ----------------------------------------------------------------------------------------------------------


def test_what_no_group_can_be_given_to(one_process):
    group = dist.group.WORLD
    with pytest.raises(ValueError, match=r"shift the labels before you cut the sequences, and pass"):
        build("CrossEntropy", group=group)(shift=True)
    with pytest.raises(ValueError, match="ld_alpha depends on the position of tokens"):
        build("DPO", group=group)(ld_alpha=0.5)
    with pytest.raises(ValueError, match="later tokens' rewards depends on the position of tokens"):
        build("MiniLLM", group=group)()

    class Own(liger_losses.ChunkedLoss):
        def loss(self, statistics, mask):
            return -statistics.logp.sum()

    p = problem()
    with pytest.raises(ValueError, match="Own defines loss"):
        Own(group=group)(p.weight, p.hidden, p.labels)
    loss = build("ORPO")()
    loss.group = group
    with pytest.raises(ValueError, match="shift=False"):
        loss.shift = True
    with pytest.raises(TypeError, match=r"mesh\['cp'\]\.get_group\(\)"):
        build("ORPO", group="cp")()
