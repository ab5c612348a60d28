"""What products with exponentials are scaled by, to be gradients of a loss on log-probabilities.

See :mod:`liger_losses.chunked.accelerators.linear_exp`. N tokens, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_losses.chunked.accelerators.linear_exp import Exponentials
from liger_losses.chunked.accelerators.tiles import with_contiguous_rows
from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.logit_transform import LogitTransform, inverse_temperature, transform_gradient


def gradient_scales(
    of_logp: Tensor | None,
    of_lse: Tensor | None,
    values: Exponentials,
    hidden: Tensor | None = None,
    transform: LogitTransform = LogitTransform(),
    here: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors of products with exponentials, from ``d loss / d z = (of_lse - of_logp) p + of_logp onehot``.

    ``d loss / d projection = scale out`` at all columns but the label's, with ``out`` of :func:`linear_exponentials`;
    at the label's, it is ``at_label``.

    Args:
        of_logp, of_lse: the loss's derivatives by both statistics, ``[N]`` fp32; ``None`` for 0.
        values: what :func:`linear_exponentials` returned.
        hidden: ``[N, H]``, to be scaled, or ``None``.
        transform: from projections to logits.
        here: ``[N]`` bool, whose label is among these columns; another has ``logp`` of another column, and at all of
            them ``d loss / d z = (of_lse - of_logp) p``. ``None`` for all.

    Returns:
        ``scale [N]``, ``at_label [N]``, and ``scale hidden [N, H]``, rounded once, in its dtype (or ``None``).
    """
    scaled = None if hidden is None else torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    scale, at_label = torch.empty_like(values.lse), torch.empty_like(values.lse)
    hidden = None if hidden is None else with_contiguous_rows(hidden)
    if tokens := scale.shape[0]:
        sizes = (0, 0) if hidden is None else (hidden.stride(0), hidden.shape[1])
        vectors = [None if g is None else g.contiguous() for g in (of_logp, of_lse)]
        _scales_kernel[(tokens,)](
            scale, at_label, scaled, hidden, *sizes, *vectors, *values[:3], here, transform.for_kernel, BLOCK=1024
        )
    return scale, at_label, scaled


@jit
def expm1(x):
    """``exp(x) - 1`` for x <= 0, exact for small x (Kahan's method)."""
    u = tl.exp(x)
    return tl.where(u == 1.0, x, tl.where(u < 1e-7, u - 1.0, (u - 1.0) * x / tl.log(u)))


#: Arguments whose alignment is no reason to compile again: slices of vectors begin anywhere.
_VECTORS = ["offset", "lse", "logp", "of_logp", "of_lse", "at_label_out", "here", "hidden"]


@jit(do_not_specialize_on_alignment=_VECTORS)
def _scales_kernel(
    scale_out, at_label_out, scaled, hidden, hidden_stride, hidden_size,
    of_logp, of_lse, offset, lse, logp, here, transform,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token."""
    row = tl.program_id(0).to(tl.int64)
    label_c = 0.0
    lse_c = 0.0
    if of_logp is not None:
        label_c = tl.load(of_logp + row)
    if of_lse is not None:
        lse_c = tl.load(of_lse + row)
    p_c = lse_c - label_c
    if here is not None:
        label_c = tl.where(tl.load(here + row), label_c, 0.0)
    row_lse = tl.load(lse + row)
    row_logp = tl.load(logp + row)
    s = p_c * tl.exp(tl.load(offset + row) - row_lse)
    # p_coef p + label_coef with p = 1 + expm1(logp), so that p - 1 keeps its digits.
    at_label = (p_c + label_c) + p_c * expm1(row_logp)
    if transform.factor is not None:
        inverse = inverse_temperature(transform, row, True, 0)
        s *= transform.factor
        if transform.temperature is not None:
            s *= inverse
        at_label = transform_gradient(at_label, row_logp + row_lse, transform, inverse)
    tl.store(scale_out + row, s)
    tl.store(at_label_out + row, at_label)
    if hidden is not None:
        for start in range(0, hidden_size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < hidden_size
            h = tl.load(hidden + row * hidden_stride + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(scaled + row * hidden_size + at, (s * h).to(scaled.dtype.element_ty), mask=inside)
