"""Distillation beside its golden results: digits close to the teacher, TRL's divergences, and wrong inputs."""

import pytest
import torch
import torch.nn.functional as F

from liger_losses import DistillationLoss, Divergence, Head, Teacher, TeacherLogits, TeacherTopK, linear_divergence_loss
from tests.losses import JSD, Cosine, MiniLLM
from tests.results.losses import VOCAB, batch


def problem():
    """Hidden states, weight and bias of the student, labels, and the teacher's."""
    d = batch(torch.float32)
    return (
        *(d[name].requires_grad_() for name in ("h", "weight", "bias")),
        d["y"],
        d["other"],
        d["ref_weight"],
        d["bias"],
    )


@pytest.mark.peers
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_equals_trl(beta):
    peer = pytest.importorskip("trl.experimental.gkd", reason="trl is not installed")
    hidden, weight, bias, labels, *teacher = problem()
    student, theirs = F.linear(hidden, weight, bias), F.linear(*teacher)
    expected = peer.GKDTrainer.generalized_jsd_loss(student, theirs, labels, beta=beta, temperature=2.0)
    loss = JSD(0.0, 1.0, beta, temperature=2.0)
    value, _ = loss(weight, hidden, labels, Teacher(*teacher), bias=bias)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("over", ["all", "largest"])
def test_weights_of_tokens(over):
    """Which may be anything at masked ones; ``shift`` moves them with the labels."""
    hidden, weight, _, labels, *teacher = problem()
    g, (b, t) = torch.Generator().manual_seed(0), labels.shape
    weights = torch.rand(b, t, generator=g).masked_fill_(labels < 0, torch.nan)
    weights[:, 3] = 0.0
    loss = JSD(0.4, 0.6, **({"top_k": 7, "tail": "renormalize"} if over == "largest" else {}))
    call = lambda loss, *given, **more: loss(weight, hidden, *given, Teacher(*teacher[:2]), **more)  # noqa: E731
    each = [torch.where(torch.arange(b * t).view(b, t) == i, labels, -100) for i in range(b * t)]
    parts = [call(loss, one, num_items_in_batch=(labels >= 0).sum())[0] for one in each]
    kept = [w * part for w, part in zip(weights.flatten(), parts, strict=True) if not w.isnan()]
    value, metrics = call(loss, labels, token_weights=weights)
    torch.testing.assert_close(value, torch.stack(kept).sum())
    torch.testing.assert_close(metrics, call(loss, labels)[1])
    grads = torch.autograd.grad(value, (hidden, weight))
    torch.testing.assert_close(grads, torch.autograd.grad(torch.stack(kept).sum(), (hidden, weight)))
    before, of_before = (F.pad(x[:, :-1], (1, 0), value=fill) for x, fill in ((labels, -100), (weights, 0.0)))
    shifted = call(loss.replace(shift=True), before, token_weights=of_before)[0]
    last = labels.clone()
    last[:, -1] = -100
    torch.testing.assert_close(shifted, call(loss, last, token_weights=weights)[0])


def test_token_scaling_of_distillation():
    hidden, weight, _, labels, *teacher = problem()
    for options in (
        {"token_scaling": "entropy"},
        {"token_scaling": "probability", "top_k": 3},
        {"weight_hard_loss": 0.0, "token_scaling": "probability"},
    ):
        with pytest.raises(ValueError, match="token_scaling="):
            JSD(**options)(weight, hidden, labels, Teacher(*teacher[:2]))


def test_bad_input_is_refused():
    hidden, weight, _, labels, states, rows, theirs = problem()
    loss, good = JSD(), Teacher(states, rows, theirs)

    def refuses(message, teacher, error=ValueError):
        with pytest.raises(error, match=message):
            loss(weight, hidden, labels, teacher)

    refuses("one per hidden state of the student", Teacher(states[:, :-1], rows))
    refuses("one per hidden state of the student", Teacher(states, rows[:, :-1]))
    with pytest.raises(ValueError, match="bias must be"):
        Teacher(states, rows, theirs[:-1])
    refuses("floating point", Teacher(states.long(), rows), TypeError)
    refuses("one per hidden state of the student", TeacherLogits(F.linear(states, rows)[:, 1:]))
    refuses("must return logits", TeacherLogits(lambda positions: torch.zeros(2, 2), columns=VOCAB))
    logps, indices = F.linear(states, rows).log_softmax(-1).topk(4)
    refuses("indices must be in", TeacherTopK(logps, indices + VOCAB))
    refuses("twice", TeacherTopK(logps, indices[..., :1].expand_as(indices)))
    refuses("at most 0", TeacherTopK(-logps, indices))
    refuses("int64", TeacherTopK(logps, indices.int()), TypeError)
    refuses("unknown tail", TeacherTopK(logps, indices, tail="drop"))
    refuses("'lump'; use 'bucket'", TeacherTopK(logps, indices, tail="lump"))
    refuses("one per hidden state of the student", TeacherTopK(logps[1:], indices[1:]))
    with pytest.raises(TypeError, match=r"got Head first: of head, states, labels = .*Teacher\(states, head\)"):
        Teacher(Head(rows), states)
    with pytest.raises(TypeError, match=r"DistillationLoss\(Divergence.reverse_kl\(\)\), got a function; call it"):
        DistillationLoss(Divergence.jsd)
    with pytest.raises(TypeError, match="has no option 'top_k'"):
        MiniLLM(top_k=3)
    with pytest.raises(ValueError, match="with a teacher, the call is"):
        loss(weight, hidden, labels, good, labels)
    with pytest.raises(ValueError, match="there is no teacher"):
        loss(weight, hidden, labels)
    with pytest.raises(ValueError, match="given twice"):
        loss(weight, hidden, labels, good, teacher=good)
    with pytest.raises(ValueError, match="cosine needs"):
        Cosine()(weight, hidden, labels, TeacherTopK(logps, indices))
    with pytest.raises(ValueError, match="divergence must be .*, one per label"):
        linear_divergence_loss(
            hidden, weight, labels, good, Divergence.forward_kl(), {"divergence": torch.ones(len(labels))}
        )
