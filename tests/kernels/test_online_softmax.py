"""Statistics of parts of the vocabulary make those of the whole."""

import pytest
import torch

from liger_losses.kernels.online_softmax import merge, places
from tests.reference import NAMES, plain_statistics, relative_error
from tests.results.losses import VOCAB


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_statistics_of_parts_make_those_of_the_whole(dtype, scale, weighted):
    sizes, tokens = (9, 1, 12, 8), 200
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, VOCAB, generator=g, dtype=torch.float64) * scale
    logits = logits.to(dtype).double()
    labels = torch.randint(VOCAB, (tokens,), generator=g)
    c = torch.rand(VOCAB, generator=g, dtype=torch.float64) if weighted else None
    unit = torch.eye(VOCAB, dtype=torch.float64)
    expected = plain_statistics(logits, unit, labels, class_weight=c)
    owners = torch.bucketize(labels, torch.tensor(sizes).cumsum(0), right=True)
    starts = [0, 9, 10, 22]
    parts = {name: [] for name in (*NAMES, "argmax", "max_logit")}
    for rank, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        columns = slice(start, start + size)
        local = torch.where(owners == rank, labels - start, 0)
        found = plain_statistics(
            logits[:, columns], unit[:size, :size], local, class_weight=None if c is None else c[columns]
        )
        found["max_logit"], found["argmax"] = logits[:, columns].max(-1)
        for name, values in parts.items():
            values.append(found[name].to(dtype))
    merged = merge({name: torch.stack(values) for name, values in parts.items()}, torch.tensor(sizes), labels, c)
    assert torch.equal(merged["argmax"], logits.argmax(-1))
    for name in NAMES:
        assert merged[name].dtype == dtype
        # Log-sum-exps of 1000 are rounded to 3e-5 in fp32, as the logits are.
        bound = 1e-12 if dtype == torch.float64 else 2e-6 if scale < 300 else 5e-5
        assert relative_error(merged[name], expected[name]) < bound, name


def test_confident_tokens_keep_their_digits():
    """Where 1 - p is far below fp32's rounding of 1."""
    others = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    lse = torch.stack([torch.full((20,), 1000.0), 960 + others[:, 0], 970 + others[:, 1]])
    parts = {"lse": lse, "logp": torch.tensor([[0.0], [-3.0], [-4.0]]).expand(3, 20)}
    found = merge(parts, torch.tensor([1, 7, 9]), torch.zeros(20, dtype=torch.int64))["logp"]
    exact = -(lse[1:].double() - 1000).exp().sum(0).log1p()
    assert found.abs().max() < 1e-11
    assert relative_error(found, exact) < 1e-6


def test_two_statistics_of_one_place_are_refused():
    with pytest.raises(ValueError, match="one is there twice: lse, logp, lse"):
        places(("lse", "logp", "lse"))
