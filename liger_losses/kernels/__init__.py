"""One file per kernel: the torch reference, the Triton kernel, and the one public function over them."""

from liger_losses.kernels._triton import BACKENDS, choose_backend

__all__ = ["BACKENDS", "choose_backend"]
