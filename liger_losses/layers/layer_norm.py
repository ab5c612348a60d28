"""Layer normalization: :mod:`liger_losses.layers.rms_norm` of rows whose mean is subtracted first."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.layers.rms_norm import normalize


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> Tensor:
    """``y = (x - mean(x)) / sqrt(var(x) + eps) weight + bias``, over the last dimension, in fp32, rounded once.

    Under autocast the inputs are cast to fp32 first, as by ``torch.nn.functional.layer_norm``.

    Args:
        x: ``[..., H]``, floating point.
        weight, bias: ``[H]``, of any floating-point dtype, or None.
        eps: added to the variance, which divides by H.
        backend: ``torch`` or ``triton``; by default chosen from the tensors.

    Returns:
        ``[..., H]`` in ``x.dtype``.

    Raises:
        ValueError: shapes do not fit, or the backend does not support the tensors.

    Source: Ba, Kiros and Hinton, arXiv:1607.06450.
    """
    if autocast_dtype(x.device) is not None and x.dtype != torch.float64:
        x = x.float()
    y: Tensor = normalize((x, None, None, weight, bias), (eps, 0.0, False, "fp32", True), backend)
    return y
