"""Losses of sequences that are cut over two processes: loss, metrics and gradients are those of one process."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import liger_losses
from liger_losses import Completions, Teacher, TeacherLogits, TeacherTopK, TokenSupport, functional
from liger_losses.chunked.losses.dpo import DPO_LOSSES
from liger_losses.chunked.losses.policy import AdaptiveEntropy
from liger_losses.chunked.losses.policy_tables import LOSS_TYPES
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


def pairs(loss, p):
    return loss(p.weight, p.hidden, p.labels, p.bias)


def pairs_with_reference(loss, p):
    return loss(p.weight, p.hidden, p.labels, p.bias, p.ref_hidden, p.ref_weight)


def pairs_with_reference_per_token(loss, p):
    parts = zip(*(x.chunk(2) for x in (p.hidden, p.labels, p.logps)), strict=True)
    chosen, rejected = (Completions(hidden, labels, ref_logps=logps) for hidden, labels, logps in parts)
    return loss(p.weight, chosen, rejected, bias=p.bias)


def pairs_with_reference_per_sequence(loss, p):
    chosen, rejected = p.sums.chunk(2)
    return loss(p.weight, p.hidden, p.labels, p.bias, ref_chosen_logps=chosen, ref_rejected_logps=rejected)


def pairs_with_other_nll(loss, p):
    return loss(p.weight, p.hidden, p.labels, p.bias, nll_target=p.nll_labels)


def unpaired(loss, p, **options):
    kinds = KINDS.to(p.labels.device)
    return loss(p.hidden, p.weight, p.labels, p.bias, kinds, p.ref_hidden, p.ref_weight, **options)


def unpaired_with_kl(loss, p):
    mismatched = Completions(p.ref_hidden.flip(0), p.nll_labels, ref_logps=p.logps - 4)
    return unpaired(loss, p, kl_completions=mismatched, sample_weights=p.sums.abs())


def unpaired_twice(loss, p):
    """The second loss reads the running mean of both."""
    unpaired(loss, p)
    found, metrics = unpaired(loss, p)
    return found, (metrics, loss.running_shift, loss.batches)


def policy(loss, p, per_token=False, **options):
    mask, ids = p.labels != -100, p.labels.clamp(min=0)
    advantages = p.token_advantages if per_token else p.advantages
    options = {"old_per_token_logps": p.old_logps, "ref_per_token_logps": p.logps} | options
    return loss(p.hidden, p.weight, ids, mask, advantages, p.bias, **options)


def policy_with_reference(loss, p):
    options = {"ref_per_token_logps": None, "ref_input": p.ref_hidden, "ref_weight": p.ref_weight}
    return policy(loss, p, **options, num_items_in_batch=17)


def policy_per_token(loss, p):
    return policy(loss, p, per_token=True, vllm_is_ratio=p.token_weights, sampling_per_token_logps=p.logps)


def policy_per_sequence(loss, p):
    return policy(loss, p, vllm_is_ratio=p.sums.exp())


def policy_over_kept_columns(loss, p):
    """Some tokens have no cut."""
    ids = (p.labels.clamp(min=0)[..., None] + torch.tensor([0, 3, 7])) % VOCAB
    ids[2, :, 2:], ids[1, -1], ids[0, 0] = -1, -1, -1
    options = {"ref_per_token_logps": None, "ref_input": p.ref_hidden, "ref_weight": p.ref_weight}
    return policy(loss, p, **options, support=TokenSupport(ids))


def policy_of_prompts(loss, p):
    return policy(loss, p, prompts=torch.arange(len(p.labels)) // 2, sampling_per_token_logps=p.logps)


def policy_observed(loss, p):
    found, metrics = policy(loss, p)
    loss.entropy_coef.step()
    return found, (metrics, torch.tensor(loss.entropy_coef.last_entropy))


def tokens(loss, p, **options):
    return loss(p.weight, p.hidden, p.labels, p.bias, **options)


def weighted_tokens(loss, p):
    return tokens(loss, p, token_weights=p.token_weights)


def counted_tokens(loss, p):
    return tokens(loss, p, num_items_in_batch=31)


def distilled(loss, p):
    return loss(p.weight, p.hidden, p.labels, Teacher(p.ref_hidden, p.ref_weight), bias=p.bias)


def distilled_from_logits(loss, p):
    return loss(p.weight, p.hidden, p.labels, TeacherLogits(p.ref_hidden @ p.ref_weight.t()), bias=p.bias)


def distilled_from_top_k(loss, p):
    return loss(p.weight, p.hidden, p.labels, TeacherTopK(p.teacher_logps, p.teacher_indices), bias=p.bias)


def distilled_in_ligers_form(loss, p):
    return loss(p.hidden, p.weight, p.ref_hidden, p.ref_weight, p.labels, p.bias)


SAMPLERS = ("icepop", "kpop")  # of which the sampler's log-probabilities are read
WITHOUT_EXTRAS = {"exo_pair": {"label_smoothing": 0.1}, "robust": {"label_smoothing": 0.1}}
EVERYTHING = {"return_z_loss": True, "return_token_accuracy": True, "lse_square_scale": 0.1}
CASES = {
    **{
        f"DPO, {name}": (build("DPO", loss_type=name, **WITHOUT_EXTRAS.get(name, {})), pairs_with_reference)
        for name in DPO_LOSSES
    },
    "DPO, several": (
        build("DPO", loss_type=["sigmoid_norm", "sft"], loss_weights=[0.3, 2.0], label_smoothing=0.2),
        pairs_with_reference_per_token,
    ),
    "DPO, averages": (build("DPO", average_log_prob=True), pairs_with_reference_per_token),
    "DPO, given": (build("DPO", compute_nll_loss=True), pairs_with_reference_per_sequence),
    "DPO, weighted": (build("DPO", use_weighting=True, f_divergence_type="js_divergence"), pairs_with_reference),
    "DPO, small blocks": (build("DPO", workspace=8000, compact=False), pairs_with_reference),
    "ORPO": (build("ORPO"), pairs),
    "ORPO, other tokens": (build("ORPO"), pairs_with_other_nll),
    **{f"CPO, {name}": (build("CPO", loss_type=name), pairs) for name in ("sigmoid", "hinge", "ipo")},
    "CPO, alphapo": (build("CPO", loss_type="alphapo", reward_alpha=0.2), pairs),
    "SimPO": (build("SimPO", label_smoothing=0.1), pairs_with_other_nll),
    "KTO": (build("KTO", use_ref_model=True, undesirable_weight=0.7), unpaired_with_kl),
    "KTO, averages": (build("KTO", use_ref_model=True, average_log_prob=True, loss_type="apo_zero_unpaired"), unpaired),
    "BCO": (build("BCO"), unpaired_twice),
    **{
        f"GRPO, {name}": (build("GRPO", loss_type=name, max_completion_length=7), call)
        for name, call in itertools.product(LOSS_TYPES, (policy, policy_per_token))
        if (name == "vespo" or call is policy) and name not in ("fipo", "real", "clip_cov", "kl_cov", "dro", *SAMPLERS)
    },
    **{f"GRPO, {name}": (build("GRPO", loss_type=name), policy_of_prompts) for name in ("real", *SAMPLERS)},
    "GRPO, prompts": (
        build("GRPO", importance_sampling_level="sequence_token", normalizer="prompt_mean", log_ratio_penalty=0.1),
        policy_of_prompts,
    ),
    **{
        f"GRPO, {name}, {level}": (build("GRPO", loss_type=name, importance_sampling_level=level, beta=0.3), call)
        for name, level, call in (
            ("grpo", "sequence", policy_per_sequence),
            ("dapo", "sequence", policy_per_token),
            ("luspo", "sequence", policy),
            ("bnpo", "sequence_sum", policy_per_token),
        )
    },
    "GRPO, ratios of completions in the KL": (
        build("GRPO", importance_sampling_level="sequence", use_bias_correction_kl=True),
        policy,
    ),
    "GRPO, a reference": (build("GRPO"), policy_with_reference),
    "GRPO, no KL": (build("GRPO", beta=0.0), policy),
    "GRPO, kept columns": (build("GRPO"), policy_over_kept_columns),
    "GRPO, kept columns, sequences": (
        build("GRPO", importance_sampling_level="sequence", top_entropy_quantile=0.6, entropy_coef=0.1),
        policy_over_kept_columns,
    ),
    "GRPO, vespo of completions": (build("GRPO", loss_type="vespo"), policy_per_sequence),
    "GRPO, off-policy mask": (build("GRPO", off_policy_mask_threshold=0.3), policy_per_token),
    "GRPO, high entropy": (build("GRPO", top_entropy_quantile=0.5, entropy_coef=0.1), policy),
    "GRPO, entropy bonus": (build("GRPO", entropy_coef=0.1), policy),
    "GRPO, adaptive bonus": (
        lambda **o: build("GRPO")(entropy_coef=AdaptiveEntropy(0.1, target=2.0), **o),
        policy_observed,
    ),
    "cross-entropy": (build("CrossEntropy", label_smoothing=0.1, **EVERYTHING), tokens),
    "cross-entropy, weighted": (
        lambda **o: build("CrossEntropy", use_token_scaling=True, **EVERYTHING)(problem().class_weights, **o),
        weighted_tokens,
    ),
    "cross-entropy, many heads": (
        build("CrossEntropy", head_weights=[1.0, 0.5], **EVERYTHING),
        lambda loss, p: loss([p.weight, p.ref_weight], [p.hidden, p.hidden + 1], p.labels, [p.bias, None]),
    ),
    "cross-entropy, items": (build("CrossEntropy"), counted_tokens),
    "cross-entropy, sum": (build("CrossEntropy", reduction="sum", **EVERYTHING), tokens),
    "JSD": (build("JSD", temperature=2.0), distilled),
    "KL": (build("KL"), distilled_from_logits),
    "reverse KL": (build("ReverseKL"), distilled_from_top_k),
    "cosine": (build("CosineSimilarity", return_soft_hard_loss=True), distilled_in_ligers_form),
}
CASES["GRPO, vespo"] = (build("GRPO", loss_type="vespo"), policy_per_token)


def numbers(found):
    """All tensors of a result, detached."""
    return [tensor.detach().clone() for tensor in tensors_of(found)]


def run(name, rank=None, group=None):
    """Loss and metrics, and the gradients of hidden states, weight and bias."""
    make, call = CASES[name]
    p = problem(rank)
    found = call(make(group=group) if group is not None else make(), p)
    loss = found if isinstance(found, torch.Tensor) else found[0]
    loss.backward()
    return numbers(found), [tensor.grad for tensor in (p.hidden, p.weight, p.bias)]


# --- What each process does -------------------------------------------------------------------------------------------


def check_case(name, expected, rank):
    values, (hidden, weight, bias) = run(name, rank, dist.group.WORLD)
    expected_values, (expected_hidden, *expected_head) = expected
    close = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=1e-9)
    close(values, expected_values, msg=lambda m: f"values: {m}")
    close(hidden, expected_hidden.split([CUT, LENGTH - CUT], 1)[rank], msg=lambda m: f"hidden states: {m}")
    for found, whole in zip((weight, bias), expected_head, strict=True):
        dist.all_reduce(found)
        close(found, whole, msg=lambda m: f"head: {m}")
    assert expected_hidden.abs().sum() > 0


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
    check_members,
)


def work(rank, folder, backend):
    expected = torch.load(folder / "expected.pt", map_location=torch.get_default_device())
    todo = {name: functools.partial(check_case, name, expected[name]) for name in CASES}
    for name, check in (todo | {check.__name__: check for check in CHECKS}).items():
        with case_named(name):
            check(rank)


@pytest.mark.distributed
@pytest.mark.parametrize("backend", BACKENDS)
def test_slices_of_sequences_on_two_processes(tmp_path, backend):
    """All cases in one start of the processes."""
    torch.save({name: run(name) for name in CASES}, tmp_path / "expected.pt")
    start(work, WORLD, tmp_path, tmp_path, backend, backend=backend)


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
