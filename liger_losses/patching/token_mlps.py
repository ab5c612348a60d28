"""Finds MLPs, gated or not, that compute each token by itself, so that they can be computed for some tokens at a time.

Nothing of them is replaced by a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from liger_losses.kernels.plain import is_plain
from liger_losses.patching import probing
from liger_losses.patching.mlps import LinearsStay, linears_of, with_cheap_layers
from liger_losses.patching.probing import Mismatch
from liger_losses.patching.swap import original_class
from liger_losses.patching.tiles import Tiles, compute_tiled


@dataclass(frozen=True)
class TokenMLP(LinearsStay):
    """A module of linear layers that computes each token from that token alone.

    Attributes:
        tiles: how many tokens it is computed for at a time.
    """

    tiles: Tiles = Tiles()

    def __str__(self) -> str:
        return str(self.tiles)

    def in_tiles(self, tiles: Tiles) -> TokenMLP:
        return replace(self, tiles=tiles)

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not is_plain(*args):
            return NotImplemented
        return compute_tiled(original_class(module).forward, module, args[0], self.tiles)

    @classmethod
    def is_candidate(cls, module: nn.Module) -> bool:
        """At least two linear layers, one of them wider than the others' input, and nothing else with parameters."""
        return len(linears_of(module)) >= 2 and cls.only_linears(module)

    @classmethod
    def match(cls, module: nn.Module) -> TokenMLP:
        """Runs a copy, whose linear layers are cheap ones, on tokens together and one by one."""
        with probing.isolated():
            for training, dtype in ((True, torch.float32), (False, torch.float32), (True, torch.bfloat16)):
                _check(module, training, dtype)
        return cls()


def _check(module: nn.Module, training: bool, dtype: torch.dtype) -> None:
    """Raise Mismatch unless tokens give the same together and in parts, in forward and in backward."""
    generator = torch.Generator().manual_seed(23)
    copy, calls = with_cheap_layers(module, generator)
    layers = linears_of(copy)
    x = probing.random((1, 6, next(iter(layers.values())).in_features), generator, dtype)
    with probing.unchanged("float32", copy.train(training), layers):
        whole, (grad,) = probing.observe(copy, [x])
        if set(calls) != set(layers):
            raise Mismatch("it does not call each of its layers")
        if whole.shape[:2] != x.shape[:2] or whole.dim() != 3:
            raise Mismatch(f"it returns {tuple(whole.shape)} for {tuple(x.shape)}")
        tolerance = 1e-5 if dtype is torch.float32 else 2**-6
        for tokens, by_parts in (
            ("two sequences", lambda x: copy(x.reshape(2, 3, -1)).reshape(whole.shape)),
            ("some tokens", lambda x: torch.cat([copy(part) for part in x.split((1, 3, 2), 1)], 1)),
        ):
            output, (of_input,) = probing.observe(by_parts, [x])
            probing.check_close(f"the output of {tokens}", output, whole, tolerance)
            probing.check_close(f"the gradient of {tokens}", of_input, grad, tolerance)
