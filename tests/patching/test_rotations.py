"""Which rotary embeddings are recognised, and which near misses are left."""

import gc

import pytest
import torch

from benchmarks.coverage import model_zoo
from liger_losses.patching.patch import patch, unpatch
from liger_losses.patching.probing import Mismatch
from liger_losses.patching.rotations import match as match_rotation

pytest.importorskip("transformers")


# Rotary embedding


def _half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _rotation(turn=_half, scale=1.0, cast=False):
    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple(
            ((x.float() * cos + turn(x.float()) * sin).to(x.dtype) if cast else x * cos + turn(x) * sin) * scale
            for x in (q, k)
        )

    return rotate


def _partial(tail=False):
    def rotate(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin, width = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), cos.shape[-1]
        rotated = []
        for x in (q, k):
            first, second = x.split((x.shape[-1] - width, width) if tail else (width, x.shape[-1] - width), -1)
            parts = [first, second * cos + _half(second) * sin] if tail else [first * cos + _half(first) * sin, second]
            rotated.append(torch.cat(parts, -1))
        return tuple(rotated)

    return rotate


def _one_by_one(x, cos, sin, unsqueeze_dim=1):
    return x * cos.unsqueeze(unsqueeze_dim) + _half(x) * sin.unsqueeze(unsqueeze_dim)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_rotation(), {"interleaved": False, "cast_back": False}),
        (_rotation(_pairs), {"interleaved": True, "cast_back": False}),
        (_rotation(cast=True), {"interleaved": False, "cast_back": True}),
        (_partial(), {"interleaved": False, "angles": "full"}),
        (_one_by_one, {"tensors": 1}),
    ],
)
def test_rotations_are_recognised(function, expected):
    rotation = match_rotation(function)
    assert {name: getattr(rotation, name) for name in expected} == expected


@pytest.mark.parametrize(
    "function",
    [
        _rotation(lambda x: -_half(x)),
        _rotation(lambda x: _half(x).detach()),
        _rotation(scale=1.0001),
        _rotation(lambda x: x.flip(-1)),
        _rotation(lambda x: _half(x.clamp(-2, 2))),
        _partial(tail=True),
        lambda q, k, cos, sin: _rotation()(k, q, cos, sin),
        lambda q, k, cos, sin: _rotation()(q, k, sin, cos),
        lambda q, k, cos, sin: (_rotation()(q, k, cos, sin)[0], k),
        lambda q, k, cos, sin: list(_rotation()(q, k, cos, sin)),
        lambda q, k, sin, cos: _rotation()(q, k, cos, sin),
        lambda q, k, cos, sin, position_ids: _rotation()(q, k, cos, sin),
        lambda q, k, cos, sin: (q * cos + _half(q) * sin, k * cos + _half(k) * sin),
        lambda q, k, cos, sin: _rotation()(q, k, cos.mul_(1.0), sin.add_(0.1)),
    ],
)
def test_near_misses_of_rotations_are_left(function):
    with pytest.raises(Mismatch):
        match_rotation(function)


def test_a_rotation_stays_until_its_last_model_goes():
    from transformers.models.llama import modeling_llama

    gc.collect()  # models that other tests have patched
    original = modeling_llama.apply_rotary_pos_emb
    one, other, third = (model_zoo.build("llama") for _ in range(3))
    patch(one, loss_head=False)
    patch(one, loss_head=False)
    patch(other, loss_head=False)
    patch(third, loss_head=False)
    unpatch(one)
    assert modeling_llama.apply_rotary_pos_emb is not original
    unpatch(other)
    assert modeling_llama.apply_rotary_pos_emb is not original
    del third
    gc.collect()
    assert modeling_llama.apply_rotary_pos_emb is original
