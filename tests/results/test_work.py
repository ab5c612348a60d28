"""Work in N H V, where 2 N H V is a product of all tokens with the head; memory against the workspace."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_losses import EngineOptions, Head, Teacher, TokenSupport, linear_logps, linear_token_loss
from tests.losses import CE, GRPO, KL
from tests.reference import Int8Weight, assert_as_exact_as_plain, double, peak_bytes, problem, tensors_of
from tests.results.losses import ALIKE, LOSSES, OPERATIONS, batch, case_of, policy
from tests.seam import BACKENDS, LowRank, leave_out_zero_rows, small_tiles, train_all_rows

ROWS, LENGTH, H, V = 8, 12, 16, 203


class Work(TorchDispatchMode):
    """The floating-point operations of products, or of those with so many columns or rows; how many fp32 tensors
    ``[V, H]`` are made; and how many entries are cast to bf16."""

    def __init__(self, size=None):
        super().__init__()
        self.size, self.flops, self.wide, self.cast = size, 0, 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        matrices = {"mm": arguments[:2], "bmm": arguments[:2], "addmm": arguments[1:3], "baddbmm": arguments[1:3]}
        if pair := matrices.get(function._schema.name.removeprefix("aten::").rstrip("_")):
            sizes = (*pair[0].shape, pair[1].shape[-1])
            self.flops += 2 * math.prod(sizes) * (self.size in (None, *sizes))
        made = function(*arguments, **(keywords or {}))
        size = made.shape if isinstance(made, torch.Tensor) else ()
        self.wide += tuple(size) == (V, H) and made.dtype == torch.float32
        casts = function is torch.ops.aten._to_copy.default and made.dtype == torch.bfloat16
        self.cast += math.prod(size) if casts and len(size) > 1 else 0
        return made


def inputs(dtype=torch.float32, frozen=False, **sizes):
    d = batch(dtype, **{"rows": ROWS, "length": LENGTH, "hidden_size": H, "vocab_size": V, **sizes})
    hidden, weight = d["h"].requires_grad_(), d["weight"].requires_grad_(not frozen)
    return {**d, "h": hidden}, [tensor for tensor in (hidden, weight) if tensor.requires_grad]


def run(name, d, leaves, **options):
    """The gradients of a loss or operation."""
    found = tensors_of(case_of(name)(Head(d["weight"]), Head(d["ref_weight"]), d, **options))
    return torch.autograd.grad(sum(value.sum() for value in found if value.requires_grad), leaves)


@pytest.mark.parametrize("name", ["cross entropy", "JSD"])
def test_a_head_is_cast_once_a_pass_under_autocast(name):
    """However many blocks there are; and all is as of a head that was cast before, but its gradient, which is wider."""
    pytest.importorskip("triton")
    d, leaves = inputs()
    with torch.autocast("cpu", torch.bfloat16), Work() as work:
        hidden, weight = run(name, d, leaves, backend="triton", chunk_size=8)
    assert work.cast // (V * H) == 1 + (name == "JSD")  # the rest are hidden states, which are fewer
    half = {**d, **{k: d[k].detach().bfloat16().requires_grad_() for k in ("h", "weight", "other", "ref_weight")}}
    before = run(name, half, [half["h"], half["weight"]], backend="triton", chunk_size=8)
    assert torch.equal(hidden.bfloat16(), before[0])
    torch.testing.assert_close(weight.bfloat16(), before[1], rtol=0.02, atol=2e-4)


# --- Products ---------------------------------------------------------------------------------------------------------


_TEACHER = ("JSD", "JSD, whole teacher", "KL", "reverse KL", "TVD", "alpha-beta", "cosine", "mixture")
#: N H V of losses and operations, where forward and both gradients of a token with loss are 6. With all tokens, masked
#: ones too, these are 9.2.
UNITS = {
    **dict.fromkeys(("DPO", "DPO, several", "KTO", "BCO"), 8),  # the reference
    **dict.fromkeys((*_TEACHER, "divergence loss", "token loss, teacher", "KL, anchored"), 8),
    "KL, logits": 9.2,  # which the call computes
    "JSD, smaller teacher": 6.3,
    "soft loss of a smaller teacher": 1.0,
    "divergence": 12,  # per token: the logits of both models again in backward
    "MiniLLM": 12,  # the same
    "cross entropy, many heads": 18,
    **dict.fromkeys(("GRPO, kept columns", "KL, renormalized"), 9.2),  # of a large vocabulary, of these columns alone
    "kept columns, sparse": 1.1,  # some tokens have no cut
    "statistics of several": 8,
    "not compact": 9.2,
    "largest, two passes": 12.2,
    "logps of many heads": 13.3,
}
#: Those that need all tokens' statistics before a gradient: where the logits do not fit, they are computed again.
COUPLED = {
    *("cross entropy, per token", "DPO", "DPO, several", "CPO", "SimPO", "ORPO", "KTO", "BCO", "GRPO, sequences"),
    *("GRPO, two passes", "GRPO, vespo", "GRPO, gmpo", "GRPO, real", "GRPO, off-policy mask"),
}


@pytest.mark.filterwarnings("ignore:the student has")
@pytest.mark.parametrize("name", [*LOSSES, *OPERATIONS])
def test_products(name):
    """A frozen head has one product less, and a workspace without room for all logits one more at most."""
    few = [{"workspace": 60_000}] if name in LOSSES else []
    few += [{"chunk_size": 4}] if name == "cross entropy, many heads" else []
    for frozen, options in ((False, {}), (True, {}), *((False, each) for each in few)):
        d, leaves = inputs(torch.bfloat16 if "chunk_size" in options else torch.float32, frozen)
        with Work() as work:
            run(name, d, leaves, **options)
        units = work.flops / (int((d["y"] >= 0).sum()) * H * V)
        again, less = 2 * (name in COUPLED and bool(options)), 2 * (frozen and name in LOSSES and "soft" not in name)
        assert 0 < units <= UNITS.get(name, 6) + again - less + 0.1, (frozen, options)


@pytest.mark.parametrize("name", ["logps", "statistics", "GRPO, sequences", "KL"])
def test_nothing_is_computed_that_needs_no_gradient(name):
    d, _ = inputs()
    with torch.no_grad(), Work() as work:
        case_of(name)(Head(d["weight"]), Head(d["ref_weight"]), d)
    assert work.flops <= (4.1 if name == "KL" else 2.1) * int((d["y"] >= 0).sum()) * H * V


@pytest.mark.parametrize(
    ("of", "tail", "units"), [("student", "none", 10), ("teacher", "none", 8), ("student", "renormalize", 4.4)]
)
def test_the_columns_of_one_model_are_chosen_once(of, tail, units):
    """The student's in a pass of its own; where only these are read, no other product is of the whole vocabulary."""
    d, leaves = inputs(vocab_size=8 * V)
    loss = KL(0.0, top_k=4, top_k_of=of, tail=tail)
    with Work() as work:
        torch.autograd.grad(loss(d["weight"], d["h"], d["y"], Teacher(d["other"], d["ref_weight"]))[0], leaves)
    assert work.flops <= (units + 0.1) * int((d["y"] >= 0).sum()) * H * 8 * V


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_tokens_without_a_coefficient_have_no_gradient_products(share):
    """Of calls large enough that the search for them pays."""
    hidden, weight, labels, _ = problem(400, 64, 1000, masked=0.0)
    upstream = (torch.rand(400, generator=torch.Generator().manual_seed(0)) < share).float()
    logps = linear_logps(hidden, weight, labels)
    with Work() as work:
        grads = torch.autograd.grad(logps, (hidden, weight), upstream)
    assert work.flops <= 4.1 * float(upstream.sum()) * 64 * 1000
    assert not grads[0][upstream == 0].any()


#: Options and inputs of a policy, and whether tokens without an advantage have another term in the loss.
LEFT_OUT = [
    *(({"loss_type": name}, {}, False) for name in ("dapo", "sapo", "cispo", "dppo_tv")),
    *((options, {}, False) for options in ({"importance_sampling_level": "sequence"}, {"top_entropy_quantile": 0.3})),
    *(({name: 0.1}, {}, True) for name in ("beta", "log_ratio_penalty", "entropy_coef")),
    ({}, {"temperature": torch.linspace(0.5, 2.0, ROWS * LENGTH).view(ROWS, LENGTH)}, False),
    ({}, {"vllm_is_ratio": torch.where(torch.arange(ROWS) % 3 == 0, 1.0, 0.0)}, False),  # a sampler rejects them
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("options", "given", "term"), LEFT_OUT, ids=str)
def test_tokens_without_an_advantage_have_no_gradient_products(options, given, term, backend):
    """Results are those of a call in whose products they are."""
    found, flops = [], []
    for leaving_out in (leave_out_zero_rows, train_all_rows):
        d, leaves = inputs(torch.float32 if backend == "torch" else torch.bfloat16, vocab_size=70)
        if "vllm_is_ratio" not in given:
            d["signs"] = torch.where(torch.arange(ROWS) % 3 == 0, 1.0, 0.0)
        with leaving_out(), small_tiles(), Work() as work:
            loss = GRPO(**{"beta": 0.0, "backend": backend, **options})
            loss, metrics = policy(loss, Head(d["weight"]), None, d, **given)
            found.append([loss, *metrics, *torch.autograd.grad(loss, leaves)])
        flops.append(work.flops)
    torch.testing.assert_close(*found, rtol=2e-2 if backend == "triton" else 1e-5, atol=1e-6, equal_nan=True)
    assert term or backend == "triton" or flops[0] < 0.8 * flops[1]


# --- Blocks and memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 8, 9, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    ["cross entropy", "logps", "statistics of columns", "JSD", "GRPO, sequences", "DPO", "cross entropy, many heads"],
)
def test_the_gradient_of_the_weight_is_as_exact_in_any_number_of_blocks(name, dtype, blocks):
    """As that of one block, without a buffer ``[V, H]`` in fp32."""
    sizes = {"rows": 8, "length": 40}
    wide, narrow = inputs(torch.float64, **sizes), inputs(dtype, **sizes)
    with torch.no_grad():
        for key in ("h", "weight", "ref_weight", "other"):
            wide[0][key].copy_(narrow[0][key])
    tokens = int((narrow[0]["y"] >= 0).sum())
    options = {"chunk_size": -(-tokens // blocks)}
    whole = run(name, *narrow)
    exact = run(name, *wide)
    with Work() as work:
        found = run(name, *narrow, **options)
    for a, p, e in zip(found, whole, exact, strict=True):
        assert_as_exact_as_plain(a, p, e, f"{blocks} blocks", floor=torch.finfo(dtype).eps / 2)
    # Each block adds to all columns, and a head of several targets has as many blocks as they have.
    assert not work.wide or (name in ("statistics of columns", "cross entropy, many heads") and blocks > 1)


def test_kept_columns_take_the_memory_of_their_pairs():
    d, leaves = inputs(rows=4, length=150, hidden_size=64, vocab_size=10_000)
    ids = (d["y"].clamp(min=0)[..., None] + 7 * torch.arange(16)) % 10_000

    def call():
        return torch.autograd.grad(linear_logps(d["h"], d["weight"], d["y"], support=TokenSupport(ids)).sum(), leaves)

    rows = 16 * leaves[0].nbytes  # of all pairs; logits would have ten times as many
    assert peak_bytes(call) < leaves[1].nbytes + 3 * rows


def test_sums_in_fp32_where_asked_for():
    hidden, weight, labels, _ = problem(256, 32, 97, dtype=torch.bfloat16, masked=0.0)
    grad, exact = (
        torch.autograd.grad(linear_token_loss(h, w, labels, lambda s, y: s.logp, options=options)[0], w)[0]
        for (h, w), options in (
            ((hidden, weight), EngineOptions(chunk_size=4, accum_dtype=torch.float32)),
            (double(hidden, weight), EngineOptions()),
        )
    )
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.double(), exact, rtol=2**-8, atol=2**-8 * float(exact.abs().max()))


#: Calls whose inputs are logits, or columns of each token; and losses of two models, of coupled tokens and of heads.
UNBOUNDED, SEVERAL = {"KL, logits", "GRPO, kept columns"}, {"DPO", "GRPO, sequences", "cross entropy, many heads"}


@pytest.mark.filterwarnings("ignore:the student has")
@pytest.mark.parametrize("name", sorted({*LOSSES} - ALIKE - UNBOUNDED | SEVERAL))
def test_bytes_within_the_workspace(name):
    """What a call takes beyond its inputs and gradients, whose logits would be 3.2 MB each."""
    d, leaves = inputs(rows=8, length=100, vocab_size=1000)
    workspace = 1_500_000
    run(name, d, leaves, workspace=workspace)
    gradients = sum(leaf.nbytes for leaf in leaves)
    vectors = 40 * d["y"].numel() * 8  # statistics, labels and inputs of a token
    assert peak_bytes(lambda: run(name, d, leaves, workspace=workspace)) <= workspace + 2 * gradients + vectors


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("what", ["cross entropy", "logps"])
def test_a_quantized_head_never_exists_as_a_whole(what, adapted):
    """In a workspace that its dequantized weight does not fit."""
    size, vocab, tokens = 64, 20_000, 24
    torch.manual_seed(0)
    quantized, whole = Int8Weight(torch.randn(vocab, size)), vocab * size * 4
    hidden, labels = torch.randn(tokens, size, requires_grad=True), torch.randint(vocab, (tokens,))
    a, b = torch.randn(2, size), torch.zeros(vocab, 2, requires_grad=True)
    head, workspace = Head(quantized, adapters=(LowRank(a, b),) if adapted else ()), whole // 2

    def call():
        options = {"workspace": workspace}
        of_logps = what == "logps"
        loss = linear_logps(hidden, head, labels, **options).sum() if of_logps else CE(**options)(head, hidden, labels)
        loss.backward()

    assert peak_bytes(call) < workspace * 1.2 + 2 * b.nbytes
    assert 1 < quantized.most <= vocab // 4


@pytest.mark.parametrize(("dtype", "reduction"), [(torch.float16, "mean"), (torch.float32, "none")])
def test_what_heads_keep_until_backward_fits_one_workspace(dtype, reduction):
    """Where logits stay until backward, as losses of log-probabilities and fp16 have it."""
    n, h, v, count = 64, 16, 1000, 8
    leaves = [torch.randn(size, h, dtype=dtype, requires_grad=True) for size in (n, v) for _ in range(count)]
    workspace = 3 * (n * v * 4 + 2**16)  # the logits of three heads
    loss, labels = CE(reduction=reduction, workspace=workspace), [torch.randint(v, (n,)) for _ in range(count)]

    def call():
        return torch.autograd.grad(
            sum(v.sum() for v in tensors_of(loss(leaves[count:], leaves[:count], labels)[0])), leaves
        )

    assert peak_bytes(call) - sum(leaf.nbytes for leaf in leaves) <= workspace


@pytest.mark.parametrize("wiring", ["one head", "own heads", "one hidden state"])
def test_memory_does_not_grow_with_heads(wiring):
    """Beyond inputs and outputs."""
    n, h, v = 128, 32, 2000

    def extra(count):
        states = [torch.randn(n, h, requires_grad=True) for _ in range(1 if wiring == "one hidden state" else count)]
        weights = [torch.randn(v, h, requires_grad=True) for _ in range(1 if wiring == "one head" else count)]
        labels, loss = [torch.randint(v, (n,)) for _ in range(count)], CE(chunk_size=32)

        def call():
            value, _ = loss(weights * (count // len(weights)), states * (count // len(states)), labels)
            return torch.autograd.grad(value, [*states, *weights])

        return peak_bytes(call) - sum(leaf.nbytes for leaf in (*states, *weights))

    one, many = extra(1), extra(6)
    assert many <= one + 3 * n * h * 4, (one, many)
