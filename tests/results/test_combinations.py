"""Everything that a call may have, together: each row of :mod:`tests.results.combinations` is the plain computation."""

import itertools

import pytest
import torch
import torch.distributed as dist

from liger_losses import DistillationLoss, Teacher, TokenSupport, linear_logps
from tests.losses import CE, DPO, JSD
from tests.processes import case_named
from tests.reference import DIVERGENCES, divergence, double, formula, gradients, problem, relative_error, rounding
from tests.results.combinations import COLUMNS, Row, Sizes, check, found_by, inputs_of, rows, small_workspace
from tests.seam import BACKENDS


def plain(*names):
    """Of these columns, the plain values alone."""
    return {name: COLUMNS[name][:1] for name in names}


#: Through the kernels, which take long in Triton's interpreter: fewer values of some columns.
TRITON = {
    "asks": (
        *("logp", "statistics", "metrics", "token loss", "selected", "kept", "kept, ragged", "reverse KL", "JSD"),
        *("cosine", "loss: cross entropy", "loss: KL, renormalized", "loss: GRPO, score centering"),
    ),
    "weight": ("dense", "frozen", "adapters"),
    "targets": ("one", "two of one head"),
    "teacher": ("model", "wider", "narrower"),
    "blocks": ("default", "chunks", "small workspace", "not compact"),
    "strategy": (None, "two_pass"),
    "sizes": (Sizes(), Sizes((2, 9), 16, 16)),  # rows that pointers load, and descriptors
    "layout": ("contiguous", "strided", "nothing trained"),
    "dtype": ("bfloat16", "float32", "float16"),
    "backend": ("triton",),
    "upstream": ("all", "some"),
}

#: A GPU is fast, and torch's sums on it depend on the number of rows.
ON_A_GPU = {**TRITON, **{name: COLUMNS[name] for name in ("asks", "weight", "targets", "teacher")}, **plain("ranks")}
#: Rows and columns that fill no tile of a kernel on a GPU, one token, and a large vocabulary.
LARGE = {
    **ON_A_GPU,
    **plain("targets", "teacher", "labels", "invariant", "blocks"),
    "asks": ("logp", "statistics", "token loss", "selected", "kept", "JSD", "loss: DPO", "loss: GRPO"),
    "transform": ("none", "soft-cap"),
    "sizes": (
        *(Sizes((2, 259), 576, 96, 1031, 8), Sizes((1, 1), 64, 32, 50257), Sizes((2, 65), 896, 64, 151643, 8)),
        *(Sizes((2, 150), 33, 17, 77), Sizes((4, 1025), 72, 64, 999)),
    ),
}


@pytest.fixture(autouse=True, scope="module")
def group_of_this_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


#: In so small workspaces, quantized rows are dequantized where they are needed, and statistics of tiles merged.
WALKS = {
    **plain("teacher", "strategy", "invariant", "backend"),
    "asks": ("logp", "statistics", "metrics", "token loss"),
    "weight": ("quantized", "quantized with adapters"),
    "targets": ("one", "two heads"),
    "blocks": ("small workspace",),
}
#: Blocks that would add to a half-precision gradient of the weight dozens of times.
MANY_BLOCKS = {
    **plain("transform", "targets", "strategy", "layout", "labels", "invariant", "backend"),
    "asks": ("logp", "token loss", "selected", "reverse KL", "JSD", "cosine"),
    "weight": ("dense", "adapters"),
    "bias": ("none", "trained"),
    "teacher": ("model", "logits"),
    "blocks": ("small workspace", "chunks"),
    "dtype": ("bfloat16", "float16"),
    "sizes": (Sizes((1, 160), 32, 24, 96),),
}
#: Beside the columns of the documentation.
BESIDE = {
    "asks": (*COLUMNS["asks"], "entropy"),
    "layout": (*COLUMNS["layout"], "nothing trained"),
    "sizes": (Sizes(), Sizes((3, 5), 33, 17, 150), Sizes((1, 1), 1, 3, 46), Sizes((2, 20), 5, 4, 61)),
    "upstream": ("all", "some"),
}
ROWS = dict.fromkeys([*rows(backend=("torch",), **BESIDE), *rows(**WALKS)])


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_any_two_together(row):
    check(row)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row(weight="adapters", invariant=True), "a head without adapters"),
        (Row("registered", invariant=True), "a registered statistic is summed in an order that depends on the batch"),
        (Row(weight="quantized", invariant=True, blocks="small workspace"), "a quantized head dequantized as a whole"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(row, words):
    given = inputs_of(row)
    workspace = small_workspace(row, given)
    with pytest.raises(ValueError, match=words):
        found_by(row, given, workspace=workspace)


@pytest.mark.filterwarnings("ignore:a workspace of")
@pytest.mark.parametrize("row", rows(**MANY_BLOCKS), ids=str)
def test_many_blocks(row):
    check(row)


IN_TRITON = [*rows(**TRITON), Row(transform="soft-cap", dtype="bfloat16", backend="triton", upstream="some")]
IN_TRITON += [Row(dtype="bfloat16", backend="triton", labels="one unlikely")]
IN_TRITON += [Row("loss: cross entropy", dtype="bfloat16", backend="triton", blocks="chunks")]
if torch.cuda.is_available():  # fp32 logits of hundreds leave an adapter's gradient few digits, by chance
    noisy = {"labels": "one unlikely", "dtype": "float32"}
    IN_TRITON = [row for row in rows(**ON_A_GPU) if not row.adapted or not noisy.items() <= vars(row).items()]


@pytest.mark.parametrize("row", IN_TRITON, ids=str)
def test_any_two_together_in_triton(row, small_tiles, default_gpu):
    """Whatever torch's default dtype is: buffers of kernels do not take it."""
    pytest.importorskip("triton")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        check(row)
    finally:
        torch.set_default_dtype(before)


#: In fp16, the plain computation of a large head with adapters overflows: there is nothing to compare with.
IN_LARGE_SHAPES = [row for row in rows(**LARGE) if not (row.adapted and row.dtype == "float16")]


@pytest.mark.gpu
@pytest.mark.parametrize("row", IN_LARGE_SHAPES, ids=str)
def test_large_shapes(row, default_gpu):
    check(row)


@pytest.mark.parametrize("shift", [True, 2, 7, 13])
def test_shifted_labels(shift):
    """Each position predicts the label so many later; kept columns belong to labels."""
    hidden, weight, labels, _ = problem(0, 5, 40, shape=(4, 6), masked=0.2)
    moved = torch.full_like(labels, -100)
    moved[:, : max(6 - shift, 0)] = labels[:, shift:]
    ids = (labels.clamp(min=0)[..., None] + torch.tensor([0, 7, 19])) % 40
    ids[1:3, :4, 1:] = -1  # rows are read for these, and products taken for the others
    of_moved = torch.full_like(ids, -1)
    of_moved[:, : max(6 - shift, 0)] = ids[:, shift:]
    for call in (
        lambda y, kept, **shifted: linear_logps(hidden, weight, y, entropy=True, lse=True, **shifted)[:3],
        lambda y, kept, **shifted: linear_logps(hidden, weight, y, support=TokenSupport(kept), **shifted),
        lambda y, kept, **shifted: CE(**shifted)(weight, hidden, y),
        lambda y, kept, **shifted: DPO(use_ref_model=False, **shifted)(weight, hidden, y)[0],
        lambda y, kept, **shifted: JSD(**shifted)(weight, hidden, y, Teacher(hidden.detach() * 2, weight.detach()))[0],
    ):
        torch.testing.assert_close(call(labels, ids, shift=shift), call(moved, of_moved), rtol=0, atol=0)


@pytest.mark.slow
def test_any_three_together():
    for row in rows(3, backend=("torch",)):
        with case_named(str(row)):
            check(row)


@pytest.mark.parametrize("options", [{}, *({"backend": backend, "workspace": 27_000} for backend in BACKENDS)], ids=str)
@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "total variation"])
def test_close_teachers_keep_their_digits(name, options):
    """Where the student differs from the teacher in one rounding of one dimension, bf16 logits would be the same."""
    teacher, weight, labels, _ = problem(19, 32, 200, dtype=torch.bfloat16, masked=0.0)
    teacher = teacher.detach()
    hidden = torch.cat([teacher[:, :1] * (1 + 2**-7), teacher[:, 1:]], 1).requires_grad_()
    loss = DistillationLoss(divergence(name), 0.0, 1.0, **options)
    value, _ = loss(weight, hidden, labels, Teacher(teacher, weight.detach()))
    exact_in = double(hidden, weight, teacher)
    exact = formula(name, exact_in[0] @ exact_in[1].t(), exact_in[2] @ exact_in[1].detach().t()).mean()
    assert 0 < exact < 2e-5
    assert relative_error(value, exact) < 1e-4
    found = zip(gradients(value, (hidden, weight)), gradients(exact, exact_in[:2]), strict=True)
    assert all(relative_error(ours, right) < 4 * rounding(torch.bfloat16) for ours, right in found)


@pytest.mark.skipif("triton" not in BACKENDS, reason="GPUs have more of these")
@pytest.mark.parametrize(("asked", "workspaces"), [("JSD", (60_000, 75_000)), ("statistics", (34_000, 40_000))])
def test_half_precision_gradients_within_any_workspace(asked, workspaces):
    """Of several blocks together, or by tiles of columns: that of the weight is a sum of few parts."""
    hidden, weight, labels, _ = problem(200, 16, 203, dtype=torch.bfloat16, masked=0.0)
    teacher = [tensor.detach().roll(1, 0) for tensor in (hidden, weight)]

    def found(hidden, weight, *teacher, **options):
        if asked == "JSD":
            loss = DistillationLoss(divergence("JSD"), 0.0, 1.0, **options)
            value, _ = loss(weight, hidden, labels, Teacher(*teacher))
        else:
            value = sum(x.sum() for x in linear_logps(hidden, weight, labels, entropy=True, **options)[:2])
        return gradients(value, (hidden, weight))

    exact = found(*double(hidden, weight, *teacher))
    for workspace in workspaces:
        given = {"workspace": workspace, "backend": "triton"}
        for ours, expected in zip(found(hidden, weight, *teacher, **given), exact, strict=True):
            assert relative_error(ours, expected) < 2.5 * rounding(torch.bfloat16), workspace


def test_every_value_meets_every_other():
    """But where they make no sense together, or are refused."""
    met = {pair for row in ROWS for pair in itertools.combinations(vars(row).items(), 2)}
    columns = {**COLUMNS, **BESIDE, "backend": ("torch",)}
    for (a, of_a), (b, of_b) in itertools.combinations(columns.items(), 2):
        for values in itertools.product(of_a, of_b):
            pair = tuple(zip((a, b), values, strict=True))
            assert pair in met or not Row(**dict(pair)).makes_sense, pair
