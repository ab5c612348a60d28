"""Heads whose vocabulary two or four processes share: losses, metrics and gradients are those of a whole head."""

import contextlib
import functools
import os
import types

import pytest
import torch
import torch.distributed as dist

from liger_losses import (
    ChunkedLoss,
    Divergence,
    Head,
    LogitTransform,
    Teacher,
    TeacherTopK,
    TokenSupport,
    linear_divergence,
    linear_logps,
    linear_statistics,
    linear_token_loss,
    workspace,
)
from liger_losses.chunked.engine.agreement import CHECK_VARIABLE, VOCABULARY, Agreement, Given, RankError, known_of
from liger_losses.chunked.engine.weights import Projection
from liger_losses.integrations import skyrl
from liger_losses.integrations.megatron import OutputOptions, output_processor
from liger_losses.integrations.verl import linear_cross_entropy
from tests.losses import DPO, GRPO, JSD, KL, KTO
from tests.processes import BACKENDS, case_named, start
from tests.reference import problem
from tests.results.losses import (
    CE,
    LENGTH,
    ROWS,
    VARIANTS,
    VOCAB,
    Part,
    batch,
    case_of,
    compare,
    support,
)

WORLD, CUTS = 4, {"two even": (15, 15), "two uneven": (23, 7), "four": (9, 1, 12, 8)}
#: What ranks with other labels are told.
LABELS = r"they differ in labels\. Where each rank has a batch"


def errors(parts):
    """Every rank raises; none waits for another."""
    rank, d = dist.get_rank(), batch()
    part = parts["four"]
    rows, group = part.rows, part.group
    weight, bias, hidden, labels = d["weight"], d["bias"], d["h"], d["y"]
    head = Head(weight[rows], group=group)

    def expect(one, others, call, only=1):
        """What the rank ``only`` gets, and what the others get."""
        with (
            case_named(f"error {one!r}"),
            pytest.raises((ValueError, RuntimeError, TypeError), match=one if rank == only else others),
        ):
            call()

    same = "they differ in"
    expect(same, same, lambda: linear_logps(hidden[: 2 + (rank == 1)], head, labels[: 2 + (rank == 1)]))
    fewer = labels.masked_fill(labels == labels.max(), -100) if rank == 1 else labels
    expect(LABELS, LABELS, lambda: linear_logps(hidden, head, fewer))
    expect(same, same, lambda: linear_logps(hidden, head, labels, chunk_size=2 + rank))
    expect(same, same, lambda: Head(weight[rows], bias[rows] if rank == 1 else None, group=group))
    expect(same, same, lambda: Head(weight[rows, : 8 + rank], group=group))
    expect(
        "weight must be a tensor", "rank 1 .* raised", lambda: Head([1.0] if rank == 1 else weight[rows], group=group)
    )
    expect(
        "must not be empty", "rank 1 .* raised", lambda: Head(weight[:0] if rank == 1 else weight[rows], group=group)
    )
    expect("labels must be in", "rank 1 .* raised", lambda: linear_logps(hidden, head, labels + 100 * (rank == 1)))
    expect(
        "one entry per hidden state", "rank 1 .* raised", lambda: linear_logps(hidden, head, labels[: 4 - (rank == 1)])
    )
    other_labels = labels.flip(0) if rank == 1 else labels
    expect(LABELS, LABELS, lambda: linear_logps(hidden, head, other_labels))
    wrong = support(d).ids.clone()
    wrong[..., 1] = VOCAB if rank == 1 else -1
    expect(
        r"ids must be in \[0, 30\)",
        "rank 1 .* raised",
        lambda: linear_logps(hidden, head, labels, support=TokenSupport(wrong)),
    )
    given = support(d).ids.flip(-1) if rank == 1 else support(d).ids
    kept = r"differ in kept columns\."
    expect(kept, kept, lambda: linear_logps(hidden, head, labels, support=TokenSupport(given)))
    # Column 29 is of the first token on one rank, of the second on the other.
    offsets = torch.arange(labels.numel() + 1) + 1
    offsets[0], offsets[1] = 0, 2 if rank == 1 else 1
    ids = labels.flatten().clamp(min=0)
    ids = torch.cat([ids[:1], ids.new_tensor([29]), ids[1:]])
    ragged = TokenSupport(ids, offsets, add_label=True)
    kept = r"differ in offsets of kept columns\."
    expect(kept, kept, lambda: linear_logps(hidden, head, labels, support=ragged))
    at_vocabulary = torch.full((*labels.shape, 1), VOCAB)
    expect(
        "selected columns must be",
        "selected columns must be",
        lambda: linear_statistics(hidden, head, labels, "selected_logps", selected=at_vocabulary),
    )
    teacher = Teacher(d["other"], Head(d["ref_weight"][rows], group=group))
    forms = Divergence.reverse_kl(), Divergence.forward_kl()
    expect(same, same, lambda: linear_divergence(hidden, head, labels, teacher, forms[rank == 1]))
    expect(same, same, lambda: linear_logps(hidden, head, labels, temperature=1.0 + rank))
    expect("ce_weight must be", "ce_weight must be", lambda: CE(weight[rows, 0])(head, hidden, labels))
    expect("must be a torch.distributed", "must be a torch.distributed", lambda: Head(weight[rows], group="tp"))
    teacher = Teacher(d["other"], Head(weight[rows], group=group))
    said = "make both vocabulary-parallel"
    expect(said, said, lambda: linear_divergence(hidden, weight, labels, teacher, Divergence.forward_kl()))
    other = Part.of(group, (8, 2, 12, 8)).rows
    teacher = Teacher(d["other"], Head(weight[other], group=group))
    alike = "must hold the same part" if rank in (0, 1) else "rank 0 .* raised"
    expect(alike, alike, lambda: linear_divergence(hidden, head, labels, teacher, Divergence.forward_kl()))
    small = Teacher(d["other"], weight[:20])
    expect(
        "has some of these",
        "rank 3 .* raised",
        lambda: linear_divergence(hidden, head, labels, small, Divergence.forward_kl()),
        only=3,
    )
    # Tokens that are selected beforehand have the same labels at other positions, or as masked tokens.
    first, last = torch.full((2, 6), -100), torch.full((2, 6), -100)
    first[:, 0], last[:, -1] = 3, 3
    rejected = hidden[:2] + 1
    for options in ({}, {"compact": False}):
        dpo = DPO(use_ref_model=False, **options)
        placed = last if rank == 1 else first
        call = functools.partial(dpo, head, (hidden[:2], placed), (rejected, first))
        expect(LABELS, LABELS, call)
    zeros = torch.zeros(2, 6, dtype=torch.int64)
    masked = zeros.masked_fill(torch.arange(6) == rank, -100)
    dpo = DPO(use_ref_model=False, compact=False)
    expect(LABELS, LABELS, lambda: dpo(head, (hidden[:2], masked), (rejected, zeros)))
    picked = torch.arange(12).view(2, 6, 1) + 2 * (rank == 1)
    expect(
        "differ in selected columns",
        "differ in selected columns",
        lambda: linear_statistics(hidden[:2], head, first + 0, "selected_logps", selected=picked),
    )
    half = hidden.half() if rank == 1 else hidden.bfloat16()
    single = Head(weight[rows].float(), group=group)
    with torch.autocast("cpu", torch.bfloat16):
        expect(same, same, lambda: linear_logps(half, single, labels))
    apart = head.with_partial_gradients() if rank == 1 else head
    expect(same, same, lambda: linear_logps(hidden, apart, labels))
    expect(same, same, lambda: linear_logps(hidden, apart, labels, support=support(d)))
    expect(same, same, lambda: linear_logps(hidden, head, labels.clamp(min=0), ignore_index=-100 - rank))
    c = torch.ones(VOCAB, dtype=torch.float64) if rank == 1 else None
    expect(same, same, lambda: linear_statistics(hidden, head, labels, "mean_logp", class_weight=c))

    def separable(statistics, labels):
        return statistics.logp

    of_losses = linear_token_loss if rank == 1 else linear_statistics
    arguments = (separable, "logp") if rank == 1 else ("logp",)
    expect(same, same, lambda: of_losses(hidden, head, labels, *arguments))
    transposed = Head(weight[rows].t().contiguous().t() if rank == 1 else weight[rows], group=group)
    teacher = Teacher(d["other"][..., : 8 + (rank == 1)], Head(d["ref_weight"][:, : 8 + (rank == 1)].contiguous()))
    expect(same, same, lambda: linear_divergence(hidden, head, labels, teacher, forms[0]))
    whole = linear_logps(hidden, weight, labels)
    torch.testing.assert_close(linear_logps(hidden, transposed, labels), whole)
    torch.testing.assert_close(linear_logps(hidden, head, labels), whole)


def errors_of_losses(parts):
    """Ranks whose losses have other options, or were given other numbers, compute different losses: all raise."""
    (part, *_), d, other = parts.values(), batch(), dist.get_rank() == 1
    group = dist.new_group(dist.get_process_group_ranks(part.group))  # which knows no call
    head, ref = (Head(d[name][part.rows].clone().requires_grad_(), group=group) for name in ("weight", "ref_weight"))
    mask, ids = d["y"] >= 0, d["y"].clamp(min=0)
    ones, advantages = torch.ones(d["y"].shape), d["signs"] + other * torch.tensor([0.0, 0.0, 0.0, 1.0])
    distilled = Teacher(d["other"], ref)
    logps, columns = (d["other"] @ d["ref_weight"][:20].t()).log_softmax(-1).topk(4)

    def one_more(value, place=(0, 1)):
        """On one rank, another value at a token that carries loss, and at one that does not on the other ranks."""
        value = value.clone()
        assert d["y"][place] >= 0
        value[place] += other
        value[d["y"] < 0] = float("nan") if value.is_floating_point() and not other else 0
        return value

    def ce(**options):
        return lambda **given: CE(**options)(head, d["h"], d["y"], **given)

    def grpo(**options):
        loss = GRPO(**options)
        return lambda signs=d["signs"], **given: loss(d["h"], head, ids, mask, signs, **given)

    def kto(**given):
        given = {"preference_labels": d["signs"] > 0, "kl": 0.3} | given
        return KTO()(d["h"], head, d["y"], **given)

    two = [head, head], [d["h"], d["other"]], d["y"]
    calls = {
        "label_smoothing": ce(label_smoothing=0.1 + 0.1 * other),
        "reduction": ce(reduction="sum" if other else "mean"),
        "ce_weight": ce(ce_weight=torch.linspace(0.5 + 0.1 * other, 1.5, VOCAB)),
        "use_token_scaling": ce(use_token_scaling=other),
        "token_weights": lambda: ce()(token_weights=one_more(ones)),
        "num_items_in_batch": lambda: ce()(num_items_in_batch=7 + other),
        "head_weights": lambda: CE(head_weights=[1.0, 0.5 + other])(*two),
        r"token_weights\[1\]": lambda: CE()(*two, token_weights=[ones, one_more(ones)]),
        "beta": lambda: DPO(beta=0.1 + other)(head, d["h"], d["y"], None, d["other"], ref),
        "loss_type": grpo(beta=0.0, loss_type="bnpo" if other else "grpo"),
        "epsilon_low": grpo(beta=0.0, epsilon_low=0.2 + 0.1 * other),
        "advantages": lambda: grpo(beta=0.0, loss_type="bnpo")(advantages),
        "old_logps": lambda: grpo(beta=0.0, loss_type="bnpo")(old_per_token_logps=one_more(d["logps"])),
        "preference_labels": lambda: kto(preference_labels=d["signs"] > 0.2 + 0.2 * other),
        "kl": lambda: kto(kl=0.3 + other),
        "weight_soft_loss": lambda: JSD(0.5, 0.5 + other)(head, d["h"], d["y"], distilled),
        "the teacher's columns, selected columns": lambda: KL()(
            head, d["h"], d["y"], TeacherTopK(logps, one_more(columns))
        ),
        "the teacher's logps": lambda: KL()(head, d["h"], d["y"], TeacherTopK(one_more(logps - 9), columns)),
        r"token_inputs\['w'\]": lambda: linear_token_loss(
            d["h"], head, d["y"], lambda s, labels, w: w * s.logp, token_inputs={"w": one_more(ones)}
        ),
        r"temperatures": lambda: linear_logps(d["h"], head, d["y"], temperature=one_more(ones)),
    }
    for name, call in calls.items():
        with case_named(name), pytest.raises(ValueError, match=rf"they differ in {name}\."):
            call()


def errors_of_labels(parts):
    """On GPUs, labels are checked while the ranks' facts are on their way."""
    d, (part, *_) = batch(), parts.values()
    head, other = Head(d["weight"][part.rows], group=part.group), dist.get_rank() == 1
    words = "labels must be in" if other else f"{LABELS}|rank 1 .* raised"
    for labels, match in ((d["y"] + 100 * other, words), (d["y"].flip(0) if other else d["y"], LABELS)):
        with pytest.raises((ValueError, RuntimeError), match=match):
            linear_logps(d["h"], head, labels)
    torch.testing.assert_close(linear_logps(d["h"], head, d["y"]), linear_logps(d["h"], d["weight"], d["y"]))


def agreements(parts):
    """Calls of a new signature are compared; those of a known one by their text alone, and not read on a GPU."""
    rank, d = dist.get_rank(), batch()
    group = dist.new_group(range(WORLD))
    head = Head(d["weight"][parts["four"].rows], group=group)
    other = d["y"].where(d["y"] < 0, 29 - d["y"]) if rank == 1 else d["y"]  # as many as on the other ranks
    known, sums, checksums = known_of(group), [], Given.checksums

    def call(labels=d["y"], length=LENGTH):
        return linear_logps(d["h"][:, :length], head, labels[:, :length])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Given, "checksums", lambda given: sums.extend(given.tensors) or checksums(given))
        for times in (1, 2):
            with pytest.raises(ValueError, match=LABELS):  # still unknown
                call(other)
            assert len(sums) == times
        for _ in range(3):
            torch.testing.assert_close(call(), linear_logps(d["h"], d["weight"], d["y"]))
        assert len(sums) == 3
        assert len(known.signatures) == 1
        call(other)  # no tensor is compared
        with pytest.raises(ValueError, match=r"labels' shapes.*(?s:.)*rank 1: .*\(4, 5\)"):  # new on one rank alone
            call(length=LENGTH - (rank == 1))
        with pytest.raises((TypeError, RankError), match="must be int64" if rank == 1 else "rank 1 .* raised"):
            call(d["y"].float() if rank == 1 else d["y"])
        patched.setenv(CHECK_VARIABLE, "1")
        with pytest.raises(ValueError, match=LABELS):
            call(other)
        patched.delenv(CHECK_VARIABLE)
        patched.setattr(known, "device", torch.device("cuda"))  # whose messages would be waited for
        patched.setattr(Agreement, "_texts", None)
        call(other)
        patched.undo()
    call()
    for last, expected in ((35, pytest.raises(ValueError, match="differ in tensor 27 and later ones")), (40, None)):
        with expected or contextlib.nullcontext():
            with Agreement(group, VOCABULARY) as agreement:
                agreement.given = Given({"options": "x" * 9000})
                for i in range(40):
                    agreement.given.add(f"tensor {i}", torch.tensor([i, 2 + (i == last and rank == 1)]))
            agreement.wait()


def order_of_names(parts):
    """Spawned processes have an order each for the names in a set; what the ranks exchange must not depend on it."""
    (part, *_), d = parts.values(), batch()
    rows, ranks = part.rows, Head(d["weight"][part.rows], group=part.group).ranks
    logits = d["h"].flatten(0, 1) @ d["weight"].t()
    values = {"mean_logit": logits[:, rows].mean(1), "lse": logits[:, rows].logsumexp(1)}
    names = sorted(values, reverse=dist.get_rank() % 2 == 1)
    merged = {name: values[name].clone() for name in names}
    ranks.merge_(d["y"].flatten(), merged)
    torch.testing.assert_close(merged["lse"], logits.logsumexp(1))
    torch.testing.assert_close(merged["mean_logit"], logits.mean(1))


def devices(parts):
    """Ranks with different devices choose by the smallest; a setting of one rank alone is an error where it is read."""
    rank, d, group = dist.get_rank(), batch(), dist.new_group(range(WORLD))
    rows = parts["four"].rows
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("liger_losses.chunked.engine.plan.default_workspace", lambda *work: 8000)
        patched.setattr("liger_losses.chunked.engine.call.device_memory", lambda device: 2**24 if rank == 1 else 0)
        head = Head(d["weight"][rows].clone().requires_grad_(), group=group)
        for _ in range(2):  # the second time, nothing is exchanged
            logps = linear_logps(d["h"], head, d["y"])
        torch.testing.assert_close(logps, linear_logps(d["h"], d["weight"], d["y"]))
        patched.setattr(Agreement, "wait", lambda agreement: (5, 6))
        memories = [head.ranks.least_memory(8, torch.device(kind)) for kind in ("cpu", "meta")]
        assert memories == [0, 5]  # of each type of device
        patched.undo()
        with workspace(9000 + (rank == 1)), pytest.raises(ValueError, match="default workspace 9001"):
            linear_logps(d["h"], head, d["y"])
        with workspace(9000 + (rank == 1)):
            linear_logps(d["h"], head, d["y"], workspace=9000)


def partial_gradients(parts):
    """What verl and Megatron sum themselves: each rank's part of the hidden states' gradients."""
    d = batch()
    hidden, labels = d["h"].detach().requires_grad_(), d["y"].clamp(min=0)
    expected = linear_statistics(hidden, d["weight"], labels, ("logp", "entropy"), transform=LogitTransform(0.7))
    upstream = torch.arange(1.0, 1 + labels.numel()).cos().view_as(labels).to(hidden)
    (whole,) = torch.autograd.grad([expected.logp, expected.entropy], hidden, [upstream, -upstream])
    for name, part in parts.items():
        rows = d["weight"][part.rows].detach().requires_grad_()
        group = types.SimpleNamespace(size=lambda: 1)  # of the layer, where the vocabulary is whole
        whole_head = {"output_layer": types.SimpleNamespace(weight=d["weight"], tp_group=group), "output_weight": None}
        context = OutputOptions(0.7, entropy=True)
        with case_named(name):
            found = linear_cross_entropy(hidden, rows, labels, 0.7, "none", part.group)
            (own,) = torch.autograd.grad(found, hidden, [upstream.flatten(), -upstream.flatten()])
            torch.testing.assert_close(
                torch.stack(found), torch.stack([v.flatten() for v in expected if v is not None])
            )
            dist.all_reduce(own, group=part.group)
            torch.testing.assert_close(own, whole)
            head = Head(rows, group=part.group)
            kept = TokenSupport(torch.stack([labels, (labels + 1) % len(d["weight"])], -1))
            each = [linear_logps(hidden, h, labels, support=kept) for h in (head, head.with_partial_gradients())]
            summed, own = (torch.autograd.grad(logps, hidden, upstream)[0] for logps in each)
            dist.all_reduce(own, group=part.group)
            torch.testing.assert_close(own, summed)
            layer = types.SimpleNamespace(weight=rows, tp_group=part.group)
            shared_head = {"output_layer": layer, "output_weight": None}
            for arguments in (whole_head, shared_head):
                logps, entropy = output_processor(
                    hidden_states=hidden.transpose(0, 1), labels=labels, context=context, **arguments
                )
                torch.testing.assert_close((logps, entropy), (expected.logp, expected.entropy))
                (own,) = torch.autograd.grad([logps, entropy], hidden, [upstream, -upstream])
                torch.testing.assert_close(own, whole)


def heads_of_frameworks(parts):
    """SkyRL's, whose ranks have parts of the vocabulary, against the whole head."""
    for part in parts.values():
        hidden, weight, labels, _ = problem(shape=(8, 2), masked=0.0)  # [S, B]
        upstream = torch.randn(labels.shape, generator=torch.Generator().manual_seed(1))
        expected = linear_logps(hidden, weight, labels)
        grads = torch.autograd.grad(expected, (hidden, weight), upstream)
        rank, ranks = dist.get_rank(part.group), dist.get_world_size(part.group)
        cuts = [round(61 * i / ranks) for i in range(ranks + 1)]
        mine = slice(cuts[rank], cuts[rank + 1])
        rows = weight.detach()[mine].requires_grad_()
        share = (mine.start, mine.stop, 4, part.group)
        logps = skyrl.fused_lm_head_logprob("torch", hidden.transpose(0, 1), rows, labels.t(), *share, False)
        torch.testing.assert_close(logps, expected.t())
        grad_hidden, grad_rows = torch.autograd.grad(logps, (hidden, rows), upstream.t())
        grad_hidden = grad_hidden.contiguous()
        dist.all_reduce(grad_hidden, group=part.group)  # as Megatron does
        torch.testing.assert_close(grad_rows, grads[1][mine])
        torch.testing.assert_close(grad_hidden, grads[0])


def exchanges_after_the_first_product(parts):
    """As on GPUs, where nobody reads the messages of known signatures: these are exchanged before the first merge."""
    (part, *_), order = parts.values(), []
    part = Part(dist.new_group(dist.get_process_group_ranks(part.group)), part.rows)  # which knows no signatures

    def noting(owner, name):
        original = getattr(owner, name)

        def noted(*args, **options):
            order.append(name)
            return original(*args, **options)

        patched.setattr(owner, name, noted)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Agreement, "_reads_all", False)
        d, logps = batch(), lambda d, rows: linear_logps(d["h"][:rows], head, d["y"][:rows])
        for name in ("cross entropy", "DPO", "GRPO, by items", "KL, top-k", "cross entropy"):
            compare(case_of(name), d, VARIANTS["bias"], part)
        head = Head(d["weight"][part.rows], group=part.group)
        expected, none = logps(d, 7), logps(d, 0)
        noting(Projection, "into")
        noting(type(known_of(part.group)), "exchange")
        noting(type(head.ranks), "merge_")
        assert torch.equal(logps(d, 7), expected)
        assert order == ["into", "merge_", "exchange"], order
        assert torch.equal(logps(d, 0), none)
        assert order[3:] == ["exchange"]  # also where no collective follows
        with pytest.raises(ValueError, match="labels"):  # which takes the place of the exchange
            linear_logps(d["h"], head, d["y"] + VOCAB)


class RaisingLoss(ChunkedLoss):
    def loss(self, statistics, mask):
        if dist.get_rank() == 1:
            raise ValueError("on rank 1")
        return -statistics.logp.sum()


def compiled(function, given):
    return torch.compile(function, backend="eager")(given)


def errors_before_a_call(parts):
    """What is wrong on one rank before it compares its call with the others' is an error on all, which says what."""
    rank, d = dist.get_rank(), batch()
    bad = rank == 1
    group = dist.new_group(range(WORLD))  # whose ranks do not know yet how much memory they have
    head = Head(d["weight"][parts["four"].rows].detach(), group=group)
    ids, mask, signs = d["y"].clamp(min=0), d["y"] >= 0, d["signs"][: ROWS - bad]
    unknown, late = {"labls": d["y"]} if bad else {}, d["logps"][:, bad:]
    grpo, ppo = GRPO(beta=0.0), GRPO(beta=0.0, loss_type="ppo")
    reference = {"ref_input": d["other"], "ref_weight": Head(d["ref_weight"][parts["four"].rows], group=group)}
    labels = d["y"].tolist() if bad else d["y"]
    calls = {
        "advantages must be": lambda: grpo(d["h"], head, ids, mask, signs),
        "old_per_token_logps must be": lambda: ppo(d["h"], head, ids, mask, d["signs"], old_per_token_logps=late),
        "it has no labls=": lambda: grpo(d["h"], head, ids, mask, d["signs"], **unknown),
        "num_items_in_batch must": lambda: grpo(
            d["h"], head, ids, mask, d["signs"], num_items_in_batch=-3 if bad else 3
        ),
        "ref_per_token_logps must be": lambda: GRPO()(
            d["h"], head, ids, mask, d["signs"], **({"ref_per_token_logps": late} if bad else reference)
        ),
        "CrossEntropyLoss: it has no labls=": lambda: CE()(head, d["h"], d["y"], **unknown),
        "token_weights must have": lambda: CE()(head, d["h"], d["y"], token_weights=late),
        "got 2 of hidden states": lambda: CE()(head, [d["h"]] * 2, [d["y"]] * (2 + bad)),
        "kl must be one number": lambda: KTO()(
            d["h"], head, d["y"], preference_labels=d["signs"] > 0, kl=torch.zeros(ROWS - bad)
        ),
        "labels must be a tensor, got list": lambda: linear_logps(d["h"], head, labels),
        "linear_logps: it has no labls=": lambda: linear_logps(d["h"], head, d["y"], **unknown),
        "support must be a TokenSupport": lambda: linear_logps(
            d["h"], head, d["y"], support=support(d).ids if bad else support(d)
        ),
        "token_loss must be a function": lambda: linear_token_loss(
            d["h"], head, d["y"], None if bad else lambda statistics, labels: -statistics.logp
        ),
        "labels must be int64": lambda: compiled(lambda y: CE()(head, d["h"], y), d["y"].int() if bad else d["y"]),
        "advantages must be .* as the completions": lambda: compiled(lambda a: grpo(d["h"], head, ids, mask, a), signs),
        "linear_logps: it has no labl=": lambda: compiled(
            lambda y: linear_logps(d["h"], head, y, **({"labl": y} if bad else {})), d["y"]
        ),
    }
    for words, call in calls.items():
        told = words if bad else f"rank 1 of the group .* raises too: (Type|Value)Error: .*{words}"
        with case_named(words), pytest.raises((TypeError, ValueError, RankError), match=told):
            call()
    # Ranks with other slices of the sequences learn it from those that share their rows.
    slices = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    _, part = parts.values()
    head = Head(d["weight"][part.rows], group=part.group)
    told = {1: "^advantages must", 0: "rank 1 of", 2: "rank 0 .* RankError: rank 1", 3: "rank 0 .* ValueError"}[rank]
    with case_named("slices"), pytest.raises((ValueError, RankError), match=f"{told}.*"):
        GRPO(beta=0.0, group=slices)(d["h"], head, ids, mask, signs)
    # The others have gone on when a loss of one's own raises: they cannot be told, and are in step afterwards.
    with case_named("own loss"), pytest.raises(ValueError, match="on rank 1") if bad else contextlib.nullcontext():
        RaisingLoss()(head, d["h"], d["y"])
    torch.testing.assert_close(linear_logps(d["h"], head, d["y"]), linear_logps(d["h"], d["weight"], d["y"]))


CHECKS = (
    exchanges_after_the_first_product,
    errors,
    errors_of_losses,
    errors_before_a_call,
    order_of_names,
    devices,
    agreements,
    partial_gradients,
    heads_of_frameworks,
)


def work(rank, checks):
    os.environ["TRITON_INTERPRET"] = "1"
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    cut = ("two even", "two uneven")[rank // 2]
    parts = {"four": Part.of(dist.group.WORLD, CUTS["four"]), cut: Part.of(pairs[rank // 2], CUTS[cut])}
    for run_check in checks:
        with case_named(run_check.__name__):
            run_check(parts)


@pytest.mark.distributed
def test_a_shared_vocabulary_on_four_processes(tmp_path):
    """All cases in one start of the processes, which takes longer than they do."""
    start(work, WORLD, tmp_path, CHECKS)


@pytest.mark.distributed
@pytest.mark.slow
def test_spawned_processes(tmp_path):
    """Each of which has its own order of the names in a set."""
    start(work, WORLD, tmp_path, (order_of_names,), method="spawn")


def messages_without_a_wait(parts):
    """On GPUs, the host waits for the messages of a new signature alone."""
    (part, *_), rank, d = parts.values(), dist.get_rank(), batch()
    group = dist.new_group(dist.get_process_group_ranks(part.group))

    def exchange(text):
        with Agreement(group, VOCABULARY) as agreement:
            agreement.given = Given({"text": text})
        return agreement

    assert exchange("known").wait() == (0, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            agreement = exchange("known")
            assert agreement.messages is None
            assert agreement.wait() == ()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # A rank for which the call is new learns what the other computes, which goes on.
    agreement, words = exchange(("known", "new")[rank]), r"(?s)rank 0: text: known.*rank 1: text: new"
    with pytest.raises(RankError, match=words) if rank else contextlib.nullcontext():
        agreement.wait()
    head = Head(d["weight"][part.rows], group=group)
    other = d["y"].where(d["y"] < 0, VOCAB - 1 - d["y"]) if rank else d["y"]
    with pytest.raises(ValueError, match=LABELS):
        linear_logps(d["h"], head, other)
    expected = linear_logps(d["h"], d["weight"], d["y"])
    found = [linear_logps(d["h"], head, d["y"]) for _ in range(30)]
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], expected)
    linear_logps(d["h"], head, other)  # no tensor is compared
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(CHECK_VARIABLE, "1")
        with pytest.raises(ValueError, match=LABELS):
            linear_logps(d["h"], head, other)


CHECKS_OF_GPUS = (
    messages_without_a_wait,
    errors_of_losses,
    errors_of_labels,
    order_of_names,
    partial_gradients,
    heads_of_frameworks,
)


def work_on_gpus(rank, checks):
    parts = {cut: Part.of(dist.group.WORLD, CUTS[cut]) for cut in ("two even", "two uneven")}
    for run_check in checks:
        with case_named(run_check.__name__):
            run_check(parts)


@pytest.mark.distributed
@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("checks", [CHECKS_OF_GPUS], ids=lambda c: c[0].__name__)
def test_a_shared_vocabulary_on_two_gpus(tmp_path, checks, backend):
    """In several tests, which may run at the same time."""
    start(work_on_gpus, 2, tmp_path, checks, backend=backend)
