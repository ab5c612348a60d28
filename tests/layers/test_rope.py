"""Rotary embeddings: as exact as eager PyTorch, by every backend, in every dtype it serves."""

import pytest
import torch

from liger_losses.layers.rope import rope
from tests.layers.eager import check, normal


def plain_rope(q, k, cos, sin, interleaved=False, unsqueeze_dim=1):
    cos, sin = (x.unsqueeze(unsqueeze_dim) if x.dim() == 3 else x[None].unsqueeze(unsqueeze_dim) for x in (cos, sin))

    def turn(x):
        if interleaved:
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    def rotate(x):
        x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        return torch.cat((x * cos + turn(x) * sin, rest), -1)

    return rotate(q), rotate(k)


@pytest.mark.parametrize(
    ("angles", "interleaved", "unsqueeze_dim", "rotated"),
    [
        *(("each", False, 1, 20), ("each", False, 2, 12), ("each", True, 2, 12), ("shared", False, 2, 2)),
        *(("shared", True, 1, 20), ("flat", False, 1, 12), ("flat", True, 2, 2)),
    ],
)
def test_rope(backend, dtype, angles, interleaved, unsqueeze_dim, rotated):
    """Also with angles that differ between the halves, which only the transpose gets right."""
    q, k = normal(2, 5, 3, 20, dtype=dtype), normal(2, 5, 1, 20, dtype=dtype)
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    shape = {"each": (2, 5), "shared": (1, 5), "flat": (5,)}[angles]
    cos, sin = (normal(*shape, rotated, dtype=dtype, seed=i, grad=False) for i in range(2))
    options = {"interleaved": interleaved, "unsqueeze_dim": unsqueeze_dim}
    check(
        lambda q, k: rope(q, k, cos.to(q.dtype), sin.to(q.dtype), backend=backend, **options),
        lambda q, k: plain_rope(q, k, cos.to(q.dtype), sin.to(q.dtype), **options),
        (q, k),
    )


@pytest.mark.parametrize(
    "heads", [(3, 3, 4, 8, torch.float16), (41, 7, 2, 256, torch.float32)], ids=["promotes", "many"]
)
def test_rope_promotes_as_eager_pytorch_and_takes_many_heads(backend, heads):
    count, others, length, width, half = heads
    q, k = normal(1, count, length, width, dtype=half), normal(1, others, length, width, dtype=half, seed=1)
    cos, sin = normal(length, width, grad=False), normal(length, width, seed=1, grad=False)

    def angles(q):
        return [x.to(torch.promote_types(q.dtype, x.dtype)) for x in (cos, sin)]

    check(lambda q, k: rope(q, k, *angles(q), backend=backend), lambda q, k: plain_rope(q, k, *angles(q)), (q, k))


@pytest.mark.usefixtures("with_gradients_or_without")
def test_rope_keeps_the_layout_and_leaves_inputs_alone(backend):
    qkv = normal(2, 5, 9, 8, grad=False)
    q, k = qkv[:, :, :6].transpose(1, 2), qkv[:, :, 6:].transpose(1, 2)
    before, cos, sin = qkv.clone(), normal(5, 8, grad=False), normal(5, 8, seed=1, grad=False)
    found = rope(q, k, cos, sin, backend=backend)
    assert torch.equal(qkv, before)
    torch.testing.assert_close(found, plain_rope(q, k, cos, sin))
    dense = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert rope(dense, dense, cos, sin, backend=backend)[0].stride() == dense.stride()


@pytest.mark.filterwarnings("ignore:A slower torch kernel")
def test_rope_gives_gradients_to_angles_that_ask(backend):
    q, k, cos, sin = normal(1, 2, 5, 8), normal(1, 1, 5, 8), normal(5, 8), normal(5, 8, seed=1)
    check(lambda *x: rope(*x, backend=backend), plain_rope, (q, k, cos, sin))
