"""What a GPU alone shows: CUDA graphs, waits of the host, peaks of memory, the same bits at real sizes, large offsets.

Losses and statistics on a GPU are those of :mod:`tests.results.test_combinations`, which runs there.
"""

import subprocess
import sys

import pytest
import torch

from liger_losses import EngineOptions, Head, LogitTransform, Teacher, TokenSupport, linear_logps, linear_statistics
from tests.losses import CE, JSD, KL
from tests.reference import Int8Weight, on_gpu
from tests.results.losses import LOSSES
from tests.results.test_life import ASKING, Call

pytestmark = pytest.mark.gpu
MiB = 2**20


# --- The host ---------------------------------------------------------------------------------------------------------


#: A quantile of entropies is one of as many tokens as the host has counted.
NOT_CAPTURED = (*ASKING, "GRPO, two passes")


@pytest.mark.parametrize("name", [name for name in (*LOSSES, "not compact") if name not in NOT_CAPTURED])
def test_a_captured_call_is_replayed_with_new_inputs(name, default_gpu):
    """A CUDA graph has the call and its backward where nothing waits for the GPU, and all buffers are the graph's."""
    call, other = (Call(name, torch.bfloat16, rows=8, length=40, vocab_size=1031, seed=seed) for seed in (0, 1))

    def run():
        loss = call(**({"compact": False} if name in LOSSES else {}))
        return loss.detach(), *call.gradients(loss)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    with torch.no_grad():
        for ours, new in zip((*call.leaves, call.d["y"]), (*other.leaves, other.d["y"]), strict=True):
            ours.copy_(new)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(outputs, run(), strict=True))


def test_what_cannot_be_captured_says_so():
    hidden, weight, labels, _ = on_gpu(40, 24, 97)
    linear_logps(hidden, weight, labels)
    with pytest.raises(RuntimeError, match="compact=False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        linear_logps(hidden, weight, labels)
    assert linear_logps(hidden, weight, labels).isfinite().all()


def kept(labels, vocab, count):
    """Columns of each token: its label's, and others."""
    return (labels.clamp(min=0)[..., None] + 7 * torch.arange(count, device=labels.device)) % vocab


@pytest.mark.parametrize("ragged", [False, True])
def test_a_call_of_kept_columns_waits_for_its_numbers_alone(ragged):
    hidden, weight, labels, _ = on_gpu(300, 64, 20000, dtype=torch.bfloat16)
    ids = kept(labels, 20000, 9)
    offsets = torch.arange(301, device="cuda") * 9
    support = TokenSupport(ids.flatten(), offsets) if ragged else TokenSupport(ids)
    for mode in ("default", "error"):  # the first call compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            linear_logps(hidden, weight, labels, support=support).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_one_wait_and_none_in_backward():
    hidden, weight, labels, _ = on_gpu(64, 32, 101)
    loss = CE()(weight, hidden, labels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- Wrong inputs -----------------------------------------------------------------------------------------------------


#: Calls that leave out no token, of labels outside of the vocabulary.
WRONG = """
import torch
from liger_losses import LigerFusedLinearCrossEntropyLoss, linear_logps
hidden, weight = (torch.zeros(n, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (16, 256))
labels = torch.full((16,), 256, device="cuda")
with torch.set_grad_enabled({}):
    {}
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        "LigerFusedLinearCrossEntropyLoss(compact=False)(weight, hidden, labels)",
        "linear_logps(hidden, weight, labels, compact=False)",
    ],
)
def test_a_gpu_asserts_that_labels_are_right_where_no_token_is_left_out(call, grad):
    """In a process of its own, whose work there ends."""
    ended = subprocess.run(
        [sys.executable, "-c", WRONG.format(grad, call)], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode
    assert "device-side assert" in ended.stderr


def test_wrong_labels_and_kept_columns_are_errors_and_the_gpu_survives():
    hidden, weight, labels, _ = on_gpu(300, 64, 1000, dtype=torch.bfloat16, masked=0.0)
    ids = kept(labels, 1000, 40)
    with pytest.raises(ValueError, match="labels must be in"):
        linear_logps(hidden, weight, labels.index_fill(0, labels[0] * 0, 1000))
    for value, words in ((10**12, "must be in"), (-2, "must be in"), (int(ids[7, 1]), "twice")):
        wrong = ids.clone()
        wrong[7, 2] = value
        for support in (TokenSupport(wrong), TokenSupport(wrong.flatten(), torch.arange(301, device="cuda") * 40)):
            with pytest.raises(ValueError, match=words):
                linear_logps(hidden, weight, labels, support=support)
    for place, value in ((0, 5), (3, 10**9), (300, 10**9), (300, 7)):
        offsets = torch.arange(301, device="cuda") * 40
        offsets[place] = value
        with pytest.raises(ValueError, match="rise from 0 to 12000"):
            linear_logps(hidden, weight, labels, support=TokenSupport(ids.flatten(), offsets))
    assert linear_logps(hidden, weight, labels, support=TokenSupport(ids)).isfinite().all()


# --- Memory and bits --------------------------------------------------------------------------------------------------


def large(tokens, hidden_size, vocab):
    g = torch.Generator("cuda").manual_seed(0)
    sizes = (tokens, hidden_size), (vocab, hidden_size)
    hidden, weight = (torch.randn(*size, device="cuda", generator=g).bfloat16() for size in sizes)
    labels = torch.randint(vocab, (tokens,), device="cuda", generator=g)
    labels[::3] = -100
    return hidden.requires_grad_(), weight.mul_(hidden_size**-0.5).requires_grad_(), labels


def distilled(loss):
    """The soft loss alone."""
    return lambda h, w, y, teacher, _, **o: loss(0.0, 1.0, **o)(w, h, y, teacher)[0]


#: What is computed of hidden states, weight, labels, teacher and quantized weight, in how many MiB beside inputs and
#: gradients; tokens, hidden size and vocabulary.
LARGE = {
    "statistics": (
        lambda h, w, y, *_, **o: sum(linear_logps(h, w, y, entropy=True, **o)[:2]),
        *(192, 100_003, 256, 50257),
    ),
    "few statistics": (lambda h, w, y, *_, **o: linear_logps(h, w, y, **o), 192, 2048, 256, 50257),
    "cross-entropy": (lambda h, w, y, *_, **o: CE(**o)(w, h, y), 192, 100_003, 256, 50257),
    "cross-entropy, options": (
        lambda h, w, y, *_, **o: CE(label_smoothing=0.1, lse_square_scale=1e-4, **o)(w, h, y),
        *(64, 3000, 512, 32003),
    ),
    "JSD": (distilled(JSD), 180, 4000, 512, 131_072),
    "KL": (distilled(KL), 64, 4096, 256, 50257),
    # In 60 MiB beside a copy of the gradient: the head has 62 MiB, so that its rows are dequantized for each block.
    "quantized": (
        lambda h, w, y, teacher, quantized, workspace: sum(
            linear_logps(h, Head(quantized), y, entropy=True, workspace=workspace - h.nbytes)[:2]
        ),
        *(68, 4096, 1024, 32_000),
    ),
    # All rows would have 256 MiB, and logits 393 MiB.
    "kept columns": (
        lambda h, w, y, *_, **o: linear_logps(h, w, y, support=TokenSupport(kept(y, 50257, 32)), **o),
        *(48, 4096, 1024, 50257),
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_call_stays_within_its_workspace_and_repeats_itself(name):
    function, megabytes, *sizes = LARGE[name]
    *leaves, labels = large(*sizes)
    teacher, quantized = Teacher(*[leaf.detach().roll(1, 0) for leaf in leaves]), Int8Weight(leaves[1])
    results = []
    for _ in range(3):  # at the first call, cuBLAS takes workspaces of its own
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = function(*leaves, labels, teacher, quantized, workspace=megabytes * MiB)
        found = torch.autograd.grad(loss.mean(), leaves, allow_unused=True)
        outputs = sum(gradient.nbytes for gradient in found if gradient is not None)
        extra = torch.cuda.max_memory_allocated() - before - outputs
        results.append([loss.detach(), *(gradient for gradient in found if gradient is not None)])
        del loss, found
    assert extra <= megabytes * MiB, f"{extra / MiB:.0f} MiB"
    assert all(torch.equal(a, b) for a, b in zip(*results[1:], strict=True))


@pytest.mark.parametrize(
    "names",
    [
        ("logp", "lse", "mean_logit", "entropy"),
        ("logp", "entropy", "lse"),
        ("logp", "entropy", "lse", "log_sum_sq_probs"),
    ],
    ids="_".join,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("sizes", "softcap"), [((256, 32003), None), ((256, 32003), 20.0), ((1032, 5031), 20.0)])
@pytest.mark.parametrize("trained", ["nothing", "hidden states", "head", "head and bias"])
def test_the_same_bits_in_any_batch(names, dtype, sizes, softcap, trained):
    hidden, weight, labels, bias = on_gpu(3000, *sizes, dtype=dtype, bias=True, masked=0.0)
    hidden.requires_grad_(trained == "hidden states")
    weight.requires_grad_(trained.startswith("head"))
    bias.requires_grad_(trained.endswith("bias"))
    differentiable, metrics = names[:2], names[2:]

    def statistics(tokens, head, mask=None, **options):
        t = torch.linspace(0.5, 2.0, 3000, device="cuda")[tokens]
        y = labels[tokens] if mask is None else labels[tokens].masked_fill(mask, -100)
        head = head.with_fields(transform=LogitTransform(t, 1.2, softcap))
        found = linear_statistics(
            hidden[tokens], head, y, differentiable, metrics=metrics, options=EngineOptions(**options)
        )
        return torch.stack([getattr(found, name).detach() for name in names])

    head = Head(weight, bias, batch_invariant=True)
    with torch.no_grad():
        expected = statistics(torch.arange(3000, device="cuda"), head)
    generator = torch.Generator("cuda").manual_seed(0)
    for count in (1, 2, 5, 127, 300, 1100, 2900):
        tokens = torch.randint(3000, (count,), generator=generator, device="cuda")
        mask = torch.rand(count, generator=generator, device="cuda") < 0.4
        for options in ({}, {"workspace": 64 * MiB}, {"compact": False}):
            assert torch.equal(statistics(tokens, head, **options), expected[:, tokens])
            assert torch.equal(statistics(tokens, head, mask, **options)[:, ~mask], expected[:, tokens[~mask]])


def test_offsets_beyond_2_to_the_31():
    """As many logits at once as overflow 32-bit offsets, against the same in small blocks."""
    hidden, weight, labels = large(17000, 64, 131072)
    big = EngineOptions(workspace=14 * 2**30)
    small = EngineOptions(workspace=512 * MiB, strategy="two_pass")
    results = []
    for options in (big, small):
        logps = linear_statistics(hidden, weight, labels, options=options).logp
        results.append((logps, *torch.autograd.grad(logps.mean(), (hidden, weight))))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-4)
    for a, b in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-6, atol=float(a.abs().max()) * 2**-7)
