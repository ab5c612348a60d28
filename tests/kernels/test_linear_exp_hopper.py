"""The warp-specialised kernel for exponentials, on the GPUs that it serves, against float64."""

from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from liger_losses.kernels import hopper_pipeline, linear_exp, linear_exp_hopper, linear_lse, targets
from liger_losses.kernels._triton import triton, warn_once
from liger_losses.kernels.linear_exp import Exponentials, linear_exponentials
from liger_losses.kernels.linear_exp_hopper import group_of_sums, hopper_tiles
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform
from liger_losses.kernels.targets import INTERPRETER, Order, order_of
from tests.kernels.cases import HOPPER

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or hopper_pipeline.gluon is None,
    reason="needs a GPU of compute capability 9.0, and Gluon",
)


def hopper(test):
    """Marks a test of the kernel, which runs on Hopper alone."""
    return pytest.mark.gpu(needs_hopper(test))


EPILOGUES = {
    "plain": lambda bias, tokens: Epilogue(),
    "bias and temperature": lambda bias, tokens: Epilogue(LogitTransform(0.7, 1.2), bias),
    "temperature per token": lambda bias, tokens: Epilogue(
        LogitTransform(torch.linspace(0.5, 2.0, tokens, device="cuda"), 1.2), bias
    ),
}


@hopper
@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(1, 8, 8), (129, 1024, 4112), (300, 272, 1008), (2000, 528, 20016), (128, 4160, 256)])
def test_exponentials(size, dtype, epilogue):
    """Fewer tiles than programs and more, fewer steps than buffers and more; fp32: projections are stored.

    Statistics have the same bits in every run, and with a store or without, if both take tiles in one order.
    """
    tokens, hidden_size, columns = size
    g = torch.Generator("cuda").manual_seed(0)
    half = torch.bfloat16 if dtype == torch.float32 else dtype
    hidden = torch.randn(tokens, hidden_size, device="cuda", generator=g).to(half)
    weight = (torch.randn(columns, hidden_size, device="cuda", generator=g) * hidden_size**-0.5).to(half)
    labels = torch.randint(columns, (tokens,), device="cuda", generator=g)
    epilogue = epilogue(torch.rand(columns, device="cuda", generator=g), tokens)
    projected = hidden.double() @ weight.double().t()
    z = epilogue.transform(projected, None if epilogue.bias is None else epilogue.bias.double())
    alone_or_not, names = [], ("lse", "logp", "mean_logit", "entropy")
    for stored in (torch.full((tokens, columns), float("nan"), dtype=dtype, device="cuda"), None):
        assert hopper_tiles(hidden, weight, epilogue, stored) is not None
        values = {name: torch.full((tokens,), float("nan"), device="cuda") for name in names}
        runs = []
        for _ in range(2):
            found = linear_exponentials(
                hidden, weight, labels, stored, epilogue,
                found=Exponentials.into(values), projections=dtype == torch.float32, backend="triton",
            )  # fmt: skip
            runs.append([t.clone() for t in (*found, stored) if t is not None])
        assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
        alone_or_not.append(runs[0][:4])
        torch.testing.assert_close(found.lse.double(), z.logsumexp(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            found.logp.double(), z.log_softmax(1).gather(1, labels[:, None])[:, 0], rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(found.mean_logit.double(), z.mean(1), rtol=1e-5, atol=1e-5)
        entropy = torch.special.entr(z.softmax(1)).sum(1)
        torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
        if stored is not None:
            e = (z - found.offset.double()[:, None]).exp().scatter(1, labels[:, None], 0.0)
            if dtype == torch.float32:
                torch.testing.assert_close(stored.double(), projected, rtol=1e-5, atol=1e-5)
            else:
                held = e < torch.finfo(dtype).max
                assert ((stored.double() - e).abs() <= 8e-3 * (e + 1e-3))[held].all()
    if len({order_of(hidden.device, stored, *size) for stored in (True, False)}) == 1:
        assert all(torch.equal(*pair) for pair in zip(*alone_or_not, strict=True))


@hopper
def test_hopeless_labels_run_again():
    g = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(n, 256, device="cuda", generator=g).bfloat16() for n in (300, 4096))
    hidden[1] *= 25
    z = hidden.double() @ weight.double().t()
    found = Exponentials.into({name: torch.empty(300, device="cuda") for name in ("lse", "entropy")})
    linear_exponentials(hidden, weight, z.argmin(1), found=found, backend="triton")
    torch.testing.assert_close(found.lse.double(), z.logsumexp(1), rtol=1e-5, atol=1e-4)
    entropy = torch.special.entr(z.softmax(1)).sum(1)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-4, atol=1e-4)
    assert (found.offset != z.min(1).values).any()


@hopper
def test_in_a_cuda_graph_and_batch_invariant():
    """Captured once compiled, replayed on other values. Batch-invariant, some of the tokens have the same bits."""
    g = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(n, 256, device="cuda", generator=g).bfloat16() / 4 for n in (300, 4096))
    labels = torch.randint(4096, (300,), device="cuda", generator=g)
    linear_exponentials(hidden, weight, labels, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear_exponentials(hidden, weight, labels, backend="triton")
    hidden.copy_(hidden.flip(0))
    graph.replay()
    expected = linear_exponentials(hidden, weight, labels, backend="triton")
    assert torch.equal(captured.logp, expected.logp)
    invariant = [
        linear_exponentials(h, weight, y, batch_invariant=True, backend="triton").logp
        for h, y in ((hidden, labels), (hidden[7:], labels[7:]), (hidden.contiguous()[7:8], labels[7:8]))
    ]
    torch.testing.assert_close(invariant[0], expected.logp, rtol=1e-5, atol=1e-5)
    for found in invariant[1:]:
        assert torch.equal(found, invariant[0][7:][: len(found)])


@hopper
@pytest.mark.parametrize("tokens", [300, 600, 1000])
def test_batch_invariant_sums_of_tiles(tokens):
    """A program takes tiles of several row tiles, of which the last has fewer rows, one after the other."""
    g = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(n, 64, device="cuda", generator=g).bfloat16() / 4 for n in (tokens, 32003))
    labels = torch.randint(32003, (tokens,), device="cuda", generator=g)
    z = hidden.double() @ weight.double().t()
    names = ("lse", "mean_logit", "entropy")
    for invariant in (False, True):
        found = Exponentials.into({name: torch.empty(tokens, device="cuda") for name in names})
        linear_exponentials(hidden, weight, labels, found=found, batch_invariant=invariant, backend="triton")
        torch.testing.assert_close(found.lse.double(), z.logsumexp(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.mean_logit.double(), z.mean(1), rtol=1e-5, atol=1e-5)
        entropy = torch.special.entr(z.softmax(1)).sum(1)
        torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=1e-5)


def test_other_calls_have_the_other_kernel(monkeypatch):
    """A soft-cap, rows that the tensor memory accelerator does not take, another GPU."""
    matrix = torch.empty(64, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(hopper_pipeline, "_serves", hopper_pipeline._serves.__wrapped__)
    monkeypatch.setattr(hopper_pipeline, "target_of", lambda device: HOPPER)
    if hopper_pipeline.gluon is not None:
        tiles = hopper_tiles(matrix, matrix, Epilogue(), matrix)
        assert tiles[:2] == (1, 1)
        assert set(tiles.arguments) <= {*linear_exp_hopper.hopper_exponentials_kernel.arg_names, "num_warps"}
    capped = Epilogue(LogitTransform(softcap=3.0))
    for call in (
        (matrix, matrix, capped, None),
        (matrix[:, 1:], matrix[:, 1:], Epilogue(), None),
        (matrix, matrix, Epilogue(), matrix[:, 1:]),
    ):
        assert hopper_tiles(*call) is None
    monkeypatch.setattr(hopper_pipeline, "target_of", lambda device: INTERPRETER)
    assert hopper_tiles(matrix, matrix, Epilogue(), None) is None
    assert linear_exp.hopper_tiles is hopper_tiles


class Pointer(NamedTuple):
    """Elements of a tensor's memory, of which every one that the mask allows must exist."""

    values: torch.Tensor
    at: torch.Tensor | int = 0

    def __add__(self, more):
        return Pointer(self.values, self.at + more)

    def load(self, mask, other):
        assert ((self.at >= 0) & (self.at < self.values.numel()))[mask].all()
        return torch.where(mask, self.values.flatten()[torch.where(mask, self.at, 0)], other)

    def store(self, values, mask):
        assert ((self.at >= 0) & (self.at < self.values.numel()))[mask].all()
        self.values.view(-1)[self.at[mask]] = values[mask]


class OnTheHost:
    """What the parts that multiply do to their tiles, one part after the other, by the kernel's own code on tensors."""

    def __init__(self, monkeypatch):
        self.product = None
        names = {
            "gl": SimpleNamespace(
                float32=torch.float32, int32=torch.int32, int64=torch.int64, static_range=range,
                minimum=lambda a, b: a.clamp(max=b) if isinstance(a, torch.Tensor) else min(a, b),
                NVMMADistributedLayout=self.nothing, SliceLayout=self.nothing,
                program_id=lambda axis: self.program, num_programs=lambda axis: self.programs,
                zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
                arange=lambda start, end, layout: torch.arange(start, end),
                load=lambda pointer, mask, other: pointer.load(mask, other),
                store=lambda pointer, values, mask: pointer.store(values, mask),
                fma=lambda a, b, c: a * b + c,
                full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
                expand_dims=torch.unsqueeze, where=torch.where, exp2=torch.exp2, sum=torch.sum, max=torch.amax,
                maximum=lambda values, least: values.clamp(min=least),
            ),
            "tile_position": self.move, "first_turn": lambda grid, part: (0, 0),
            "multiply": lambda ring, grid, used, turn, part: (self.product, 0, used, turn),
            "finish": lambda z, ring, stage: z.chunk(2, 1), "store_half": self.store,
            "tma": SimpleNamespace(store_wait=self.nothing),
        }  # fmt: skip
        for name, value in names.items():
            monkeypatch.setattr(linear_exp_hopper, name, value)
        monkeypatch.setattr(linear_exp, "AVAILABLE", True)
        monkeypatch.setattr(linear_exp, "order_of", lambda *given: Order(True, 4))
        monkeypatch.setattr(linear_exp, "hopper_exponentials_kernel", self)

    def nothing(self, *arguments, **options):
        return self

    def __getitem__(self, grid):
        self.programs = grid[0]
        return self.launch

    def move(self, tile, row_tiles, column_tiles, group):
        in_group = group * column_tiles
        first = tile // in_group * group
        size = min(row_tiles - first, group)
        row_tile, column_tile = first + tile % in_group % size, tile % in_group // size
        rows, columns = (matrix[at * size :][:size] for matrix, at, size in zip(
            self.matrices, (row_tile, column_tile), self.shape, strict=True
        ))  # fmt: skip
        self.product = torch.zeros(self.shape)
        self.product[: len(rows), : len(columns)] = rows.float() @ columns.float().t()
        return row_tile, column_tile

    def store(self, out, staging, value, first_row, first_column):
        target = out[first_row:, first_column:][: self.shape[0], : self.shape[1] // 2]
        target.copy_(value[: target.shape[0], : target.shape[1]])

    def launch(
        self, hidden, weight, out, tokens, vocab_size, hidden_size, bias, labels, offset, partial, tops, logit_sums,
        moments, needed, group, transform, PROJECTIONS, SUMS_OF_TILES, BLOCK_N, BLOCK_V, slots=None, kept=None,
        **options,
    ):  # fmt: skip
        self.matrices, self.shape = (hidden, weight), (BLOCK_N, BLOCK_V)
        row_tiles, column_tiles = -(-tokens // BLOCK_N), -(-vocab_size // BLOCK_V)
        tiles = row_tiles * column_tiles * (1 if needed is None else int(needed[0]))
        given = (bias, labels, offset, partial, tops, logit_sums, moments, slots, kept)
        *vectors, slots, kept = [None if vector is None else Pointer(vector) for vector in given]
        if transform.temperature is not None:
            transform = transform._replace(temperature=Pointer(transform.temperature))
        ring = SimpleNamespace(hidden=SimpleNamespace(shape=(1, BLOCK_N)), weight=SimpleNamespace(shape=(1, BLOCK_V)))
        grid = hopper_pipeline.Grid(tiles, 1, group, row_tiles, column_tiles, tokens, vocab_size)
        arguments = linear_exp_hopper._Arguments(*vectors, transform, PROJECTIONS, SUMS_OF_TILES, slots, kept)
        for program in range(self.programs):
            self.program = program
            for part in range(2):
                linear_exp_hopper._consume.fn(ring, grid, out, None, arguments, part)


@pytest.mark.skipif(not hopper_pipeline.INTERPRETED, reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    ("row_tiles", "column_tiles", "programs", "group"),
    [(1, 9, 4, 4), (7, 24, 12, 4), (6, 8, 12, 8), (12, 3, 12, 12), (3, 5, 2, None)],
)
def test_sums_of_tiles_and_of_parts(monkeypatch, row_tiles, column_tiles, programs, group):
    """What the parts or tiles write is read as all sums of each token, each once; also where the kernel runs again."""
    g = torch.Generator().manual_seed(0)
    tokens, columns = row_tiles * 128 - 75, column_tiles * 8 - 3
    hidden, weight = (torch.randn(n, 8, generator=g).bfloat16() for n in (tokens, columns))
    weight[:, 0] = 0
    bias, labels = torch.rand(columns, generator=g), torch.randint(columns, (tokens,), generator=g)
    epilogue = Epilogue(LogitTransform(torch.linspace(0.5, 2.0, tokens), 1.2), bias)
    assert group_of_sums(row_tiles, column_tiles, 2 * min(programs, row_tiles * column_tiles), 4) == group

    def tiles(hidden, weight, epilogue, out):
        arguments = {"hidden": hidden, "weight": weight, "out": out, "tokens": tokens, "vocab_size": columns}
        arguments |= {"hidden_size": 8, "bias": bias, "transform": epilogue.transform.for_kernel}
        arguments |= {"BLOCK_N": 128, "BLOCK_V": 8}
        return linear_exp_hopper.Tiles(row_tiles, column_tiles, programs, arguments)

    def statistics(backend, out=None, names=("lse", "mean_logit", "entropy"), **options):
        options |= {"found": Exponentials.into({name: torch.full((tokens,), float("nan")) for name in names})}
        options |= {"label_logit": logits().gather(1, labels[:, None])[:, 0]}
        return linear_exponentials(hidden, weight, labels, out, epilogue, backend=backend, **options)

    def logits():
        return epilogue(hidden.float() @ weight.float().t())

    def sums(*arguments, **options):  # maximum, sum of exponentials, none of a label, and moment, in one part
        top = logits().amax(1)
        e = (logits() - top[:, None]).exp()
        return torch.stack([top, e.sum(1), 0 * top, (e * (logits() - top[:, None])).sum(1)])[:, None].contiguous()

    monkeypatch.setattr(linear_exp, "hopper_tiles", tiles)
    monkeypatch.setattr(linear_exp, "partial_sums", sums)
    OnTheHost(monkeypatch)
    for again in (False, True)[: 2 if row_tiles < 4 else 1]:
        if again:  # too unlikely a label
            weight[labels[1], 0], hidden[1, 0] = -8, 20
        stored, alone, expected_stored = torch.empty(3, tokens, columns, dtype=torch.bfloat16)
        expected = statistics("torch", expected_stored)
        outcomes = [statistics("triton", stored), statistics("triton", batch_invariant=True)]
        outcomes += [statistics("triton", out, names=("lse",)) for out in (None, alone)]  # masks in another order
        assert outcomes[-1].entropy is None
        assert ((expected.offset - expected.logp - expected.lse).abs().max() > 1) == again
        for found in outcomes:
            for ours, exact in zip(found, expected, strict=True):
                if ours is not None:
                    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(stored, expected_stored, rtol=1e-2, atol=1e-5)
        torch.testing.assert_close(alone, expected_stored, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("usual", [4, 8])
def test_parts_of_a_hopper_gpu_have_one_row_tile_of_each_group(usual):
    """Whatever the number of tokens is, up to those of one launch: the sums then take a MiB or two."""
    for row_tiles in range(1, 65):
        group = group_of_sums(row_tiles, 1002, 264, usual)
        assert 4 * -(-row_tiles // group) * 264 * 128 < 2.2 * 2**20
        if row_tiles % usual not in (5, 7):
            assert group == usual
    assert group_of_sums(64, 30, 264, usual) is None  # some part would have no tile
    assert group_of_sums(64, 1002, 254, usual) is None


class Failing:
    """A kernel whose launch raises an error, which is the compiler's or the device's."""

    def __init__(self, error, compiles):
        self.error, self.compiles = error, compiles

    def __getitem__(self, grid):
        return self.launch

    def launch(self, **arguments):
        raise self.error

    def warmup(self, grid, **arguments):
        if not self.compiles:
            raise self.error


def on_hopper(monkeypatch, kernel):
    """Let the kernel for Hopper be this one, and forget why others could not be compiled."""
    monkeypatch.setattr(hopper_pipeline, "unusable", [])
    monkeypatch.setattr(hopper_pipeline, "_serves", cache(hopper_pipeline._serves.__wrapped__))
    monkeypatch.setattr(hopper_pipeline, "target_of", lambda device: HOPPER)
    monkeypatch.setattr(hopper_pipeline, "_descriptor", lambda matrix, columns: matrix)
    monkeypatch.setattr(targets, "target_of", lambda device: HOPPER)
    for module in (linear_exp, linear_lse):
        monkeypatch.setattr(module, "AVAILABLE", True)
        monkeypatch.setattr(module, "hopper_exponentials_kernel", kernel)
    warn_once.cache_clear()


def small_head():
    return (torch.randn(n, 16, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (5, 40))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("out of memory"), RuntimeError("an illegal address")], ids=repr
)
@pytest.mark.parametrize("call", ["exponentials", "log-sum-exps"])
def test_what_a_launch_raises_is_the_users_to_see(monkeypatch, call, error, recwarn):
    """The kernel compiles, and serves the next call."""
    if not linear_exp.tl or not hopper_pipeline.INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    hidden, weight = small_head()
    on_hopper(monkeypatch, Failing(error, compiles=True))
    with pytest.raises(type(error), match=str(error)):
        if call == "exponentials":
            linear_exponentials(hidden, weight, torch.arange(5), backend="triton")
        else:
            linear_lse.log_sum_exps_into(torch.empty(5), hidden, weight, torch.empty(5, 40), backend="triton")
    assert not hopper_pipeline.unusable
    assert hopper_tiles(hidden, weight, Epilogue(), None) is not None
    assert not [w for w in recwarn if "slower" in str(w.message)]


def test_a_kernel_that_cannot_be_compiled(monkeypatch):
    """The other kernel runs, for the rest of the process; the first call warns and names the reason."""
    if not linear_exp.tl or not hopper_pipeline.INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    hidden, weight = small_head()
    labels = torch.arange(5)
    expected = linear_exponentials(hidden, weight, labels)
    on_hopper(monkeypatch, Failing(AttributeError("Gluon has no such layout"), compiles=False))

    def forget():
        warn_once.cache_clear()
        hopper_pipeline._serves.cache_clear()
        hopper_pipeline.unusable.clear()

    with pytest.warns(RuntimeWarning, match=r"slower Triton kernel.*AttributeError: Gluon has no such layout") as seen:
        found = linear_exponentials(hidden, weight, labels, backend="triton")
    again = linear_exponentials(hidden, weight, labels, backend="triton")
    assert len([w for w in seen if "slower Triton kernel" in str(w.message)]) == 1
    for values in (found, again):
        torch.testing.assert_close(values.logp, expected.logp)
    # One that is compiled and does not fit the GPU.
    forget()
    too_large = Failing(triton.OutOfResources(300_000, 232_448, "shared memory"), compiles=True)
    monkeypatch.setattr(linear_exp, "hopper_exponentials_kernel", too_large)
    with pytest.warns(RuntimeWarning, match="OutOfResources"):
        found = linear_exponentials(hidden, weight, labels, backend="triton")
    torch.testing.assert_close(found.logp, expected.logp)
    # A version of Triton whose descriptors are others; and one that lacks what the file imports.
    forget()
    monkeypatch.setattr(hopper_pipeline, "_descriptor", None)  # calling it raises
    with pytest.warns(RuntimeWarning, match="TypeError"):
        assert hopper_tiles(hidden, weight, Epilogue(), None) is None
    forget()
    hopper_pipeline.unusable.append(ImportError("no gluon"))
    with pytest.warns(RuntimeWarning, match="ImportError: no gluon"):
        assert hopper_tiles(hidden, weight, Epilogue(), None) is None
    forget()

    class Broken:
        @staticmethod
        def jit(function, **options):
            raise TypeError("jit() has no such option")

    monkeypatch.setattr(hopper_pipeline, "gluon", Broken)
    assert hopper_pipeline.gluon_jit(len, noinline=True) is len
    assert "no such option" in str(hopper_pipeline.unusable[0])


def test_the_choice_of_the_kernel(monkeypatch):
    """The kernel for Hopper runs where there is a launch for it, and else the other one."""
    hidden, weight = (torch.randn(n, 16, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (5, 40))
    launches = []
    if not linear_exp.tl or not hopper_pipeline.INTERPRETED:
        pytest.skip("needs Triton's interpreter")

    class Kernel:
        def __getitem__(self, grid):
            return lambda **arguments: launches.append((grid, arguments))

    monkeypatch.setattr(linear_exp, "AVAILABLE", True)
    monkeypatch.setattr(linear_exp, "hopper_exponentials_kernel", Kernel())
    monkeypatch.setattr(linear_exp, "hopper_tiles", lambda *call: linear_exp_hopper.Tiles(1, 1, 4, {"out": 7}))
    monkeypatch.setattr(linear_exp, "order_of", lambda *given: Order(True, 4))
    call, options = (hidden, weight, torch.zeros(5, dtype=torch.long)), {"backend": "triton"}
    with_entropy = Exponentials.into({name: torch.empty(5) for name in ("lse", "entropy")})
    linear_exponentials(*call, projections=True, found=with_entropy, **options)
    # Projections are not written again.
    assert [(grid, arguments["out"], arguments["needed"]) for grid, arguments in launches] == [((1,), 7, None)]
    monkeypatch.setattr(linear_exp, "hopper_tiles", lambda *call: None)
    linear_exponentials(*call, **options)
    assert len(launches) == 1
    # Nor where whole programs take fewer bytes from memory: a batch-invariant call does not ask what is stored.
    monkeypatch.setattr(linear_exp, "hopper_tiles", lambda *call: linear_exp_hopper.Tiles(1, 1, 4, {"out": 7}))
    monkeypatch.setattr(linear_exp, "order_of", lambda device, stored, *given: Order(not stored, 4))
    out = torch.empty(5, 40, dtype=torch.bfloat16)
    linear_exponentials(*call, out, **options)
    assert len(launches) == 1
    linear_exponentials(*call, out, batch_invariant=True, **options)
    assert len(launches) == 3
