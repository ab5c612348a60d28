"""The warp-specialised kernel for exponentials, on the GPUs that it serves, against float64."""

from functools import cache

import pytest
import torch

from liger_losses.kernels import linear_exp, linear_exp_hopper
from liger_losses.kernels._triton import warn_once
from liger_losses.kernels.linear_exp import Exponentials, linear_exponentials
from liger_losses.kernels.linear_exp_hopper import group_of_sums, hopper_tiles
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or linear_exp_hopper.gluon is None,
    reason="needs a GPU of compute capability 9.0, and Gluon",
)
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

    Statistics have the same bits in every run, and with a store or without.
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
    """Captured once compiled, replayed on other values. Contracted or not, the kernel's bits are the same."""
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
    invariant = linear_exponentials(hidden, weight, labels, batch_invariant=True, backend="triton")
    assert torch.equal(invariant.logp, expected.logp)


def test_other_calls_have_the_other_kernel(monkeypatch):
    """A soft-cap, rows that the tensor memory accelerator does not take, another GPU."""
    matrix = torch.empty(64, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(linear_exp_hopper, "_serves", linear_exp_hopper._serves.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    if linear_exp_hopper.gluon is not None:
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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert hopper_tiles(matrix, matrix, Epilogue(), None) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert hopper_tiles(matrix, matrix, Epilogue(), None) is None
    assert linear_exp.hopper_tiles is hopper_tiles


def deal(row_tiles, column_tiles, parts, group):
    """``{(group of row tiles, part): [(row tile, column tile)]}``, as the kernel deals its tiles."""
    dealt = {}
    for tile in range(row_tiles * column_tiles):
        in_group = group * column_tiles
        first = tile // in_group * group
        size = min(row_tiles - first, group)
        place = first + tile % in_group % size, tile % in_group // size
        dealt.setdefault((tile // in_group, tile % parts), []).append(place)
    return dealt


@pytest.mark.skipif(not linear_exp_hopper.INTERPRETED, reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    ("row_tiles", "column_tiles", "parts"), [(1, 9, 8), (7, 24, 24), (11, 100, 24), (5, 30, 24), (3, 90, 264)]
)
def test_each_part_adds_up_the_sums_of_its_tiles(row_tiles, column_tiles, parts):
    """What the parts write is read as all sums of the row, each once."""
    g = torch.Generator().manual_seed(0)
    tokens, rows = row_tiles * 128 - 5, linear_exp_hopper._ROWS
    sums, logits = (torch.rand(row_tiles, column_tiles, rows, generator=g) for _ in range(2))
    group = group_of_sums(row_tiles, column_tiles, parts)
    written, logits_written = (torch.full((-(-row_tiles // group) * parts, rows), float("nan")) for _ in range(2))
    for (of_group, part), places in deal(row_tiles, column_tiles, parts, group).items():
        assert len({row_tile for row_tile, _ in places}) == 1
        for matrix, values in ((written, sums), (logits_written, logits)):
            matrix[of_group * parts + part] = sum(values[place] for place in places)
    offset, lse, logp, mean = torch.empty(4, tokens)
    linear_exp._row_statistics_kernel[(-(-tokens // 32),)](
        written, logits_written, torch.zeros(tokens), offset, lse, logp, mean, torch.zeros((), dtype=torch.int32),
        column_tiles, tokens, 0.5, 1e26, parts, group, BLOCK=32, TILES=32,
    )  # fmt: skip
    torch.testing.assert_close(lse, sums.sum(1).flatten()[:tokens].log1p())
    torch.testing.assert_close(mean, logits.sum(1).flatten()[:tokens] / 2)


def test_parts_of_an_h200_have_one_row_tile_of_each_group():
    """Whatever the number of tokens is, up to those of one launch: the sums then take a MiB or two."""
    for row_tiles in range(1, 65):
        group = group_of_sums(row_tiles, 1002, 264)
        assert 4 * -(-row_tiles // group) * 264 * 128 < 2.2 * 2**20
        if row_tiles % 8 not in (5, 7):
            assert group == 8
    assert group_of_sums(64, 30, 264) is None  # some part would have no tile
    assert group_of_sums(64, 1002, 254) is None


def test_a_kernel_that_cannot_be_compiled(monkeypatch):
    """The other kernel runs, for the rest of the process; the first call warns and names the reason."""
    if not linear_exp.tl or not linear_exp_hopper.INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    hidden, weight = (torch.randn(n, 16, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (5, 40))
    labels = torch.arange(5)
    expected = linear_exponentials(hidden, weight, labels)

    class Kernel:
        def __getitem__(self, grid):
            return self.launch

        def launch(self, **arguments):
            raise AttributeError("Gluon has no such layout")

    monkeypatch.setattr(linear_exp_hopper, "unusable", [])
    monkeypatch.setattr(linear_exp_hopper, "_serves", cache(linear_exp_hopper._serves.__wrapped__))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(linear_exp_hopper, "_descriptor", lambda matrix, columns: matrix)
    monkeypatch.setattr(linear_exp, "AVAILABLE", True)
    monkeypatch.setattr(linear_exp, "hopper_exponentials_kernel", Kernel())

    def forget():
        warn_once.cache_clear()
        linear_exp_hopper._serves.cache_clear()
        linear_exp_hopper.unusable.clear()

    forget()
    with pytest.warns(RuntimeWarning, match=r"slower Triton kernel.*AttributeError: Gluon has no such layout") as seen:
        found = linear_exponentials(hidden, weight, labels, backend="triton")
    again = linear_exponentials(hidden, weight, labels, backend="triton")
    assert len([w for w in seen if "slower Triton kernel" in str(w.message)]) == 1
    for values in (found, again):
        torch.testing.assert_close(values.logp, expected.logp)
    # A version of Triton whose descriptors are others; and one that lacks what the file imports.
    forget()
    monkeypatch.setattr(linear_exp_hopper, "_descriptor", None)
    with pytest.warns(RuntimeWarning, match="TypeError"):
        assert hopper_tiles(hidden, weight, Epilogue(), None) is None
    forget()
    linear_exp_hopper.unusable.append(ImportError("no gluon"))
    with pytest.warns(RuntimeWarning, match="ImportError: no gluon"):
        assert hopper_tiles(hidden, weight, Epilogue(), None) is None
    forget()

    class Broken:
        @staticmethod
        def jit(function, **options):
            raise TypeError("jit() has no such option")

    monkeypatch.setattr(linear_exp_hopper, "gluon", Broken)
    assert linear_exp_hopper.gluon_jit(len, noinline=True) is len
    assert "no such option" in str(linear_exp_hopper.unusable[0])


def test_the_choice_of_the_kernel(monkeypatch):
    """The kernel for Hopper runs where there is a launch for it, and else the other one."""
    hidden, weight = (torch.randn(n, 16, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (5, 40))
    launches = []
    if not linear_exp.tl or not linear_exp_hopper.INTERPRETED:
        pytest.skip("needs Triton's interpreter")

    class Kernel:
        def __getitem__(self, grid):
            return lambda **arguments: launches.append((grid, arguments))

    monkeypatch.setattr(linear_exp, "AVAILABLE", True)
    monkeypatch.setattr(linear_exp, "hopper_exponentials_kernel", Kernel())
    monkeypatch.setattr(linear_exp, "hopper_tiles", lambda *call: linear_exp_hopper.Tiles(1, 1, 4, {"out": 7}))
    linear_exponentials(hidden, weight, torch.zeros(5, dtype=torch.long), projections=True, backend="triton")
    assert [grid for grid, _ in launches] == [(1,), (1,)]
    assert [arguments["out"] for _, arguments in launches] == [7, None]  # projections are not written again
    monkeypatch.setattr(linear_exp, "hopper_tiles", lambda *call: None)
    linear_exponentials(hidden, weight, torch.zeros(5, dtype=torch.long), backend="triton")
    assert len(launches) == 2
