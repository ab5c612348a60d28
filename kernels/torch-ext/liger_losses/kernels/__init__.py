"""One file per kernel: the torch reference, the Triton kernel, and the one public function over them."""

from ..kernels._triton import BACKENDS, LOGIT_DTYPES, choose_backend

__all__ = ["BACKENDS", "LOGIT_DTYPES", "choose_backend"]
