"""Exponentials instead of logits, and neither stored: what the combinations of tests/results do not reach."""

import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import liger_losses as ll
from liger_losses.chunked.accelerators import exponentials
from liger_losses.chunked.accelerators.linear_exp import Exponentials, linear_exponentials
from liger_losses.chunked.core import stream
from tests.kernels.cases import DEVICE
from tests.losses import CE
from tests.reference import assert_as_exact_as_plain, double, plain_logits, plain_statistics, problem, relative_error
from tests.results.test_work import H, V, Work, run
from tests.results.test_work import inputs as of_losses
from tests.seam import leave_out_zero_rows, planned_blocks

pytestmark = pytest.mark.usefixtures("small_tiles", "default_gpu")
pytest.importorskip("triton")
TRITON = ll.EngineOptions(backend="triton")


def plans(call):
    """The names of the plans of a call, and its result."""
    with planned_blocks() as names:
        return names, call()


def inputs(n=40, hidden_size=24, vocab=90, masked=0.2):
    return problem(n, hidden_size, vocab, dtype=torch.bfloat16, masked=masked)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_of_a_block_that_is_kept_are_moved_in_its_memory(backend, monkeypatch):
    """Some at a time, where few tokens have a gradient."""
    monkeypatch.setattr(stream, "MOVED_BYTES", 2000)
    hidden, weight, labels, _ = inputs(masked=0.0)
    upstream, found = torch.linspace(-1, 1, 40) * (torch.arange(40) % 3 > 0), []
    for leaving_out in (leave_out_zero_rows, nullcontext):
        with leaving_out():
            logps = ll.linear_logps(hidden, weight, labels, backend=backend)
            found.append(torch.autograd.grad(logps, (hidden, weight), upstream))
    for ours, whole in zip(*found, strict=True):
        # Products of other rows round other sums to bf16.
        torch.testing.assert_close(ours, whole, rtol=2e-2, atol=1e-2 * float(whole.abs().max()))


def test_many_blocks_are_as_exact_as_one():
    """What labels add, most of the weight's gradient, is rounded once for all blocks."""
    hidden, weight, labels, _ = inputs(96, 16, 200, masked=0.0)
    labels = labels % 20  # of few rows of the weight
    errors, wide = [], double(hidden, weight)
    exact = torch.autograd.grad(-(wide[0] @ wide[1].t()).log_softmax(-1).gather(1, labels[:, None]).sum(), wide[1])[0]
    for chunk in (96, 6):
        loss = CE(reduction="sum", chunk_size=chunk, backend="triton")
        names, value = plans(lambda loss=loss: loss(weight, hidden, labels))
        assert {*names} == {"exponentials"}
        errors.append(relative_error(torch.autograd.grad(value, weight)[0], exact))
    assert errors[1] < 1.5 * errors[0], errors


def test_only_a_small_workspace_leaves_a_call_to_the_core():
    """And no other error."""
    hidden, weight, labels, _ = inputs()
    loss = CE(backend="triton", workspace=999)
    with pytest.raises(ValueError, match="workspace=999 bytes is too small"):
        loss(weight, hidden, labels)
    with (
        mock.patch.object(exponentials, "by_blocks", side_effect=ValueError("another")),
        pytest.raises(ValueError, match="another"),
    ):
        CE(backend="triton", workspace=10**6)(weight, hidden, labels)


def test_the_first_of_two_passes_stores_nothing():
    """Where blocks are not kept until backward, as in a pass without gradients."""
    hidden, weight, labels, _ = inputs()
    options = {"workspace": 12_000, "backend": "triton"}
    with torch.no_grad():
        alone = ll.linear_logps(hidden, weight, labels, **options)
    used, together = plans(lambda: ll.linear_logps(hidden, weight, labels, **options))
    assert used == ["exponentials", "statistics"]
    assert torch.equal(alone, together)


# --- Several columns of each token ------------------------------------------------------------------------------------


def check(call, plain, *leaves):
    """A loss that exponentials serve, and its gradients, against the plain computation from logits."""
    names, loss = plans(call)
    assert {*names} == {"exponentials"}
    of_all = []
    for dtype in (torch.bfloat16, torch.float64):
        copies = [t.detach().to(dtype).requires_grad_() for t in leaves]
        value = plain(*copies)
        of_all.append((value, *torch.autograd.grad(value, copies)))
    for ours, rough, exact in zip((loss, *torch.autograd.grad(loss, leaves)), *of_all, strict=True):
        assert_as_exact_as_plain(ours, rough, exact)


def wide(logits):
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@pytest.mark.parametrize("k", [3, 40])
@pytest.mark.parametrize(
    ("transform", "options"),
    [
        (ll.LogitTransform(), {}),
        (ll.LogitTransform(0.7, 1.3, 4.0), {"chunk_size": 12}),
        (ll.LogitTransform(torch.linspace(0.5, 2.0, 40, device=DEVICE), softcap=3.0), {"compact": False}),
        (ll.LogitTransform(0.7, 1.3, 4.0), None),
    ],
    ids=["plain", "chunks, soft-cap", "not compact, temperatures, soft-cap", "kept until backward, soft-cap"],
)
def test_selected_columns(transform, options, k):
    """Some are the same or the label, some have no derivative, and terms cancel: each gradient is rounded once."""
    hidden, weight, labels, bias = problem(40, 24, 90, dtype=torch.bfloat16, masked=0.2, bias=True)
    g, by, known = torch.Generator().manual_seed(1), transform.temperature, labels.clamp(min=0)
    ids = torch.randint(0, 90, (40, k), generator=g)
    ids[::3, 1], ids[::4, 2] = ids[::3, 0], known[::4]
    each, of_label = torch.randn(40, k, generator=g), torch.randn(40, generator=g)
    each[5], of_label[5] = 0.0, 0.0
    each[7, 1:], of_label[7] = -each[7, :1] / (k - 1), 0.0  # all other columns' gradients are 0
    each[8] *= 1e-4
    names = ("logp", "selected_logps", "lse")

    def losses(s, labels, each, of_label):
        return (each * s.selected_logps).sum(-1) + of_label * s.logp + 0.1 * s.lse

    def call():
        on = {"selected": ids, "options": ll.EngineOptions(backend="triton", **(options or {}))}
        arguments = hidden, ll.Head(weight, bias, transform), labels
        if options is not None:
            inputs = {"each": each, "of_label": of_label}
            return ll.linear_token_loss(*arguments, losses, names, token_inputs=inputs, **on)[0]
        s = ll.linear_statistics(*arguments, names, **on)
        return torch.where(labels >= 0, losses(s, labels, each, of_label), 0.0).sum()

    def plain(*leaves):
        divisor = by[:, None] if isinstance(by, torch.Tensor) else by
        logits = wide(plain_logits(*leaves, divisor, transform.logit_scale, transform.softcap))
        log_p, s = logits.log_softmax(-1), SimpleNamespace(lse=logits.logsumexp(-1))
        s.logp, s.selected_logps = log_p.gather(1, known[:, None])[:, 0], log_p.gather(1, ids)
        return torch.where(labels >= 0, losses(s, labels, each, of_label), 0.0).sum()

    check(call, plain, hidden, weight, bias)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("by", [1.0, torch.linspace(0.5, 2.0, 40, device=DEVICE)], ids=["1", "temperatures"])
def test_entropies(by, softcap):
    """Whose derivative is by each column's log-probability; of confident, flat and impossible tokens too."""
    hidden, weight, labels, bias = problem(40, 24, 90, dtype=torch.bfloat16, masked=0.2, bias=True)
    of_entropy, of_logp = torch.randn(2, 40, generator=torch.Generator().manual_seed(1))
    of_entropy[5], of_logp[6] = 0.0, 0.0
    with torch.no_grad():
        hidden *= torch.logspace(-2, 1.5, 40)[:, None]
    divisor = by[:, None] if isinstance(by, torch.Tensor) else by

    def total(s):
        return (of_entropy * s.entropy + of_logp * s.logp + 0.1 * s.lse).sum()

    def call():
        head, names = ll.Head(weight, bias, ll.LogitTransform(by, 1.3, softcap)), ("logp", "entropy", "lse")
        s = ll.linear_statistics(hidden, head, labels, names, metrics="argmax", options=TRITON)
        logits = plain_logits(hidden.float(), weight.float(), bias.float(), divisor, 1.3, softcap)[labels >= 0]
        torch.testing.assert_close(logits.gather(1, s.argmax[labels >= 0, None])[:, 0], logits.amax(-1))
        return total(s)

    def plain(h, w, b):
        given = {"temperature": divisor, "logit_scale": 1.3, "softcap": softcap}
        return total(SimpleNamespace(**plain_statistics(h, w, labels, b, **given)))

    check(call, plain, hidden, weight, bias)


@pytest.mark.parametrize(("scale", "sure"), [(0.3, 20), (0.01, 0)], ids=["sure of another column", "flat"])
def test_entropies_whose_terms_cancel(scale, sure):
    """What is left is not what exponentials are rounded by."""
    hidden, weight, labels, _ = inputs()
    with torch.no_grad():
        rows = weight[(labels + 1) % 90]
        hidden.mul_(scale).add_(sure * rows / rows.norm(dim=1, keepdim=True))

    def call():
        return ll.linear_statistics(hidden, weight, labels, "entropy", options=TRITON).entropy.sum()

    check(call, lambda h, w: plain_statistics(h, w, labels)["entropy"].sum(), hidden, weight)


@pytest.mark.parametrize(("name", "times"), [("logp", 1), ("entropy", 0)])
def test_exponentials_that_no_gradient_reads_are_not_computed_again(name, times):
    hidden, weight, labels, _ = inputs()
    options = ll.EngineOptions(strategy="two_pass", backend="triton")
    with planned_blocks() as names:
        s = ll.linear_statistics(hidden, weight, labels, ("logp", "entropy"), options=options)
    assert names == ["exponentials", "statistics"]
    with mock.patch.object(exponentials, "linear_exponentials", wraps=linear_exponentials) as computed:
        torch.autograd.grad(getattr(s, name).sum(), (hidden, weight))
    assert computed.call_count == times


def test_a_label_that_is_impossible_has_no_term_of_the_entropy():
    hidden, weight, labels, _ = inputs()
    bias = torch.zeros(90, dtype=torch.bfloat16, device=DEVICE)
    bias[7] = -torch.inf
    others, found = torch.where(labels == 7, 8, labels), []
    for y in (torch.where(others >= 0, 7, others), others):
        s = ll.linear_statistics(hidden, weight, y, "entropy", bias=bias, options=TRITON)
        found.append(torch.autograd.grad(s.entropy.sum(), (hidden, weight)))
    for of_label, of_another in zip(*found, strict=True):
        torch.testing.assert_close(of_label, of_another, rtol=2e-2, atol=1e-2 * float(of_another.abs().max()))


def test_the_largest_columns_of_confident_and_flat_tokens():
    """Whose entropy is a factor. Some labels are the likeliest; of unlikely ones, exponentials are taken again."""
    hidden, weight, labels, _ = problem(30, 24, 700, dtype=torch.bfloat16, masked=0.1)
    with torch.no_grad():
        hidden *= torch.logspace(-2, 1.5, 30)[:, None]
        labels[::4] = (hidden @ weight.t()).argmax(-1)[::4]

    def plain(h, w):
        log_p = wide(h @ w.t()).log_softmax(-1)
        top = log_p.detach().topk(20, -1).values.log_softmax(-1)
        logp = log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        return (torch.special.entr(top.exp()).sum(-1) / math.log(20) * -logp)[labels >= 0].mean()

    check(lambda: CE(token_scaling="entropy", backend="triton")(weight, hidden, labels), plain, hidden, weight)


@pytest.mark.parametrize(("vocab", "scale"), [(700, 1.0), (700, 10.0), (90, 1.0), (21, 1.0)])
def test_the_largest_columns_are_of_few_half_tiles(vocab, scale):
    """And of the columns of no whole one; labels, whose exponentials are not stored, are likely, or among these."""
    hidden, weight, labels, _ = inputs(vocab=vocab, masked=0.0)
    with torch.no_grad():
        hidden *= scale
    z = hidden.float() @ weight.float().t()
    labels[::2], labels[1::4] = z.argmax(-1)[::2], vocab - 1
    values = Exponentials(*torch.empty(3, len(z), device=DEVICE))
    out = torch.empty(z.shape, dtype=torch.bfloat16, device=DEVICE)
    top = linear_exponentials(hidden, weight, labels, values, out=out, k=20)
    assert [len({*row}) for row in top.tolist()] == [20] * len(z)
    torch.testing.assert_close(z.gather(1, top).sort(descending=True).values, z.topk(20).values, rtol=0, atol=8e-3)
    assert not out.gather(1, labels[:, None]).any()


@pytest.mark.parametrize("served", [True, False])
def test_only_anonymous_largest_columns_are_of_exponentials(served):
    """Of those whose ids are asked for, or that have a gradient, none is another that rounds to the same; many have no
    number in a kernel."""
    hidden, weight, labels, _ = inputs(n=8, vocab=600)
    # The slope of a soft-cap is in exponentials.
    loss = CE(token_scaling="entropy", softcap=None if served else 5.0, backend="triton")
    assert ("exponentials" in plans(lambda: loss(weight, hidden, labels))[0]) == served
    for names, metrics, k in (
        (["logp"], ["columns"], 3),
        (["selected_logps"], [], 3),
        (["logp"], ["selected_logps"], 513),
    ):
        call = partial(ll.linear_statistics, hidden, weight, labels, names, metrics=metrics, selected=ll.Largest(k))
        assert plans(partial(call, options=TRITON))[0] == ["core"]


@pytest.mark.parametrize("name", ["GRPO, score centering", "GRPO, near the sampler", "cross entropy, by entropy"])
def test_several_columns_take_the_products_of_one(name):
    """Both gradients': logits are a kernel's. No logits are stored."""
    d, leaves = of_losses(torch.bfloat16)
    with Work() as work, planned_blocks() as names:
        run(name, d, leaves, backend="triton")
    assert {*names} == {"exponentials"}
    assert work.flops == 4 * int((d["y"] >= 0).sum()) * H * V


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device assertion, after which a process can use no GPU")
@pytest.mark.parametrize("outside", [-1, 90])
def test_columns_outside_of_the_vocabulary_are_an_error_before_they_are_read(outside):
    """Of tokens with a label; those of others may be anything."""
    hidden, weight, labels, _ = inputs()
    ids, where = torch.arange(40)[:, None].repeat(1, 3), {"options": ll.EngineOptions(backend="triton", compact=False)}
    ids[labels < 0] = outside

    def call():
        given = hidden, weight, labels, lambda s, y: s.logp
        return ll.linear_token_loss(*given, selected=ids, metrics="selected_logps", **where)

    assert plans(call)[0] == ["exponentials"]
    ids[labels.argmax(), 1] = outside
    with (
        mock.patch.object(exponentials, "logits_of_columns") as read,
        pytest.raises(RuntimeError, match="out of bounds"),
    ):
        call()
    assert not read.called
