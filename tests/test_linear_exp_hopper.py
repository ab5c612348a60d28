"""The warp-specialised kernel for exponentials, on the GPUs that it serves, against float64."""

import pytest
import torch

from liger_losses.kernels import linear_exp, linear_exp_hopper
from liger_losses.kernels.linear_exp import Exponentials, linear_exponentials
from liger_losses.kernels.linear_exp_hopper import hopper_tiles
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
