"""The gradient of any mix of softmax statistics, in closed form.

R rows (tokens), C columns (a slice of the vocabulary, or all of it), V the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from liger_losses.kernels._triton import LOGIT_DTYPES, choose_backend, jit, tl, triton
from liger_losses.kernels.logit_transform import Epilogue, LogitTransform, transform_block
from liger_losses.kernels.softmax_stats import row_slices


@dataclass(frozen=True)
class SoftmaxGradient:
    """Coefficients of one row's gradient with respect to its logits, each ``[R]`` or ``None`` for 0.

    ``d loss / d z = p * (p_coef + p_logp_coef log p + p_squared_coef p) + label_coef onehot(label)
    + uniform_coef / V + class_coef c / V``

    Every statistic is a row of this table (g is the loss's gradient with respect to the statistic):

    ====================  =========  ============  ===============  ==========  ============  ==========
    statistic             p_coef     p_logp_coef   p_squared_coef   label_coef  uniform_coef  class_coef
    ====================  =========  ============  ===============  ==========  ============  ==========
    ``logp``              -g                                        g
    ``entropy``           -g H       -g
    ``lse``               g
    ``mean_logp``         -g                                                    g
    ``mean_logp`` with c  -g mean c                                                           g
    ``log_sum_sq_probs``  -2 g                     2 g / sum p^2
    ``mean_logit``                                                              g
    ====================  =========  ============  ===============  ==========  ============  ==========
    """

    p_coef: Tensor | None = None
    p_logp_coef: Tensor | None = None
    p_squared_coef: Tensor | None = None
    label_coef: Tensor | None = None
    uniform_coef: Tensor | None = None
    class_coef: Tensor | None = None

    @classmethod
    def of(
        cls, upstream: Mapping[str, Tensor], values: Mapping[str, Tensor], class_weight: Tensor | None = None
    ) -> SoftmaxGradient:
        """Add up the table's rows for ``upstream``: d loss / d statistic, each ``[R]``, by name."""
        total: dict[str, Tensor] = {}
        for statistic, g in upstream.items():
            for coefficient, value in _CLOSED_FORMS[statistic](g, values, class_weight).items():
                total[coefficient] = total[coefficient] + value if coefficient in total else value
        return cls(**total)

    def rows(self, start: int, stop: int) -> SoftmaxGradient:
        """The coefficients of rows ``start`` to ``stop``."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return SoftmaxGradient(**{k: v[start:stop] if v is not None else None for k, v in named.items()})


def _mean_logp_coefficients(g: Tensor, values: Mapping[str, Tensor], class_weight: Tensor | None) -> dict[str, Tensor]:
    if class_weight is None:
        return {"p_coef": -g, "uniform_coef": g}
    return {"p_coef": -g * class_weight.mean(), "class_coef": g}


_CLOSED_FORMS: dict[str, Callable[[Tensor, Mapping[str, Tensor], Tensor | None], dict[str, Tensor]]] = {
    "logp": lambda g, values, c: {"p_coef": -g, "label_coef": g},
    "entropy": lambda g, values, c: {"p_coef": -g * values["entropy"], "p_logp_coef": -g},
    "lse": lambda g, values, c: {"p_coef": g},
    "mean_logp": _mean_logp_coefficients,
    "log_sum_sq_probs": lambda g, values, c: {
        "p_coef": -2 * g,
        "p_squared_coef": 2 * g * torch.exp(-values["log_sum_sq_probs"]),
    },
    "mean_logit": lambda g, values, c: {"uniform_coef": g},
}


def softmax_gradient_into(
    out: Tensor,
    projected: Tensor,
    lse: Tensor,
    labels: Tensor,
    coefficients: SoftmaxGradient,
    epilogue: Epilogue = Epilogue(),
    *,
    first_column: int = 0,
    vocab_size: int | None = None,
    grad_bias: Tensor | None = None,
    scratch: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Gradient of the loss with respect to a slice of projections; see :class:`SoftmaxGradient`.

    Args:
        out: ``[R, C]``, of any floating-point dtype. It may be ``projected`` itself, or lie in the memory of its
            rows, each row of ``out`` at the beginning of its own row.
        projected: ``[R, C]``, fp32 or fp64, rows contiguous: columns ``first_column`` to ``first_column + C`` of the
            vocabulary.
        lse: ``[R]``, log-sum-exp over the whole vocabulary.
        labels: ``[R]`` int64, indices into the whole vocabulary.
        coefficients: the rows' coefficients.
        epilogue: from projections to logits, of these columns.
        first_column: where the slice starts in the vocabulary.
        vocab_size: V; ``C`` when the slice is the whole vocabulary.
        grad_bias: ``[C]``, to which the sum over the rows is added.
        scratch: bytes for temporaries; unbounded by default.
        backend: ``torch`` or ``triton``; chosen from the tensor by default.

    Returns:
        ``out``. ``projected`` is overwritten where that saves memory.
    """
    vocab_size = vocab_size or projected.shape[1]
    if choose_backend(backend, [projected], dtypes=LOGIT_DTYPES) == "triton":
        # The bias's gradient is a sum over all tokens: it is taken before anything is rounded.
        target = out if grad_bias is None else projected
        _gradient_triton(target, projected, lse, labels, coefficients, first_column, vocab_size, *epilogue)
        if grad_bias is not None:
            grad_bias += projected.sum(0, dtype=grad_bias.dtype)
            for rows in row_slices(projected, scratch):
                out[rows].copy_(projected[rows].to(out.dtype))
        return out
    for rows in row_slices(projected, scratch):
        grad = _gradient_torch(
            projected[rows],
            lse[rows],
            labels[rows],
            coefficients.rows(rows.start, rows.stop),
            first_column,
            vocab_size,
            *epilogue,
        )
        if grad_bias is not None:
            grad_bias += grad.sum(0)
        out[rows].copy_(grad)
        del grad  # or it would still be there beside the next slice's
    return out


def _gradient_torch(
    projected: Tensor,
    lse: Tensor,
    labels: Tensor,
    c: SoftmaxGradient,
    first_column: int,
    vocab_size: int,
    transform: LogitTransform,
    bias: Tensor | None,
    class_weight: Tensor | None,
) -> Tensor:
    """The reference: a new tensor ``[R, C]``."""
    width = projected.shape[1]
    logits = transform(projected, bias)
    log_p = logits - lse[:, None]
    if c.p_logp_coef is None and c.p_squared_coef is None:
        grad = log_p.exp_()
        grad = grad.zero_() if c.p_coef is None else grad.mul_(c.p_coef[:, None])
    else:
        p = log_p.exp()
        grad = torch.zeros_like(p)
        if c.p_coef is not None:
            grad.add_(c.p_coef[:, None])
        if c.p_logp_coef is not None:
            # A probability of 0 has log p = -inf, and 0 * -inf is not 0 in floating point.
            grad.add_(log_p.clamp_(min=-1e4).mul_(c.p_logp_coef[:, None]))
        if c.p_squared_coef is not None:
            grad.addcmul_(p, c.p_squared_coef[:, None])
        grad.mul_(p)
        del p, log_p
    if c.uniform_coef is not None:
        grad.add_(c.uniform_coef[:, None], alpha=1.0 / vocab_size)
    if c.class_coef is not None:
        assert class_weight is not None
        grad.addcmul_(c.class_coef[:, None], class_weight[None, :], value=1.0 / vocab_size)
    if c.label_coef is not None:
        column = labels - first_column
        inside = (column >= 0) & (column < width)
        column = column.clamp(0, width - 1)[:, None]
        # Gather, add, scatter: one write per row, so the result never depends on the order of threads.
        at_label = grad.gather(1, column) + torch.where(inside, c.label_coef, 0.0)[:, None]
        grad.scatter_(1, column, at_label)
    return transform.chain_(grad, logits)


def _gradient_triton(
    out: Tensor,
    projected: Tensor,
    lse: Tensor,
    labels: Tensor,
    c: SoftmaxGradient,
    first_column: int,
    vocab_size: int,
    transform: LogitTransform,
    bias: Tensor | None,
    class_weight: Tensor | None,
) -> None:
    rows, columns = projected.shape
    if not rows:
        return
    given = {f.name: getattr(c, f.name) for f in fields(c)}
    _gradient_kernel[(rows,)](
        out,
        out.stride(0),
        projected,
        projected.stride(0),
        lse,
        labels,
        bias,
        class_weight,
        *(None if value is None else value.contiguous() for value in given.values()),
        first_column,
        columns,
        1.0 / vocab_size,
        **transform.kernel_arguments(),
        HAS_BIAS=bias is not None,
        **{f"HAS_{name.removesuffix('_coef').upper()}": value is not None for name, value in given.items()},
        BLOCK=min(4096, triton.next_power_of_2(columns)),
        num_warps=8,
    )


@jit
def gradient_block(
    z,
    lse,
    at_label,
    class_weight,
    p_coef,
    p_logp_coef,
    p_squared_coef,
    label_coef,
    uniform_coef,
    class_coef,
    scale,
    softcap,
    inverse_temperature,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_P_LOGP: tl.constexpr,
    HAS_P_SQUARED: tl.constexpr,
    HAS_LABEL: tl.constexpr,
    HAS_UNIFORM: tl.constexpr,
    HAS_CLASS: tl.constexpr,
):
    """Gradient of a block of logits ``z`` with respect to projections; everything else broadcasts against them."""
    log_p = z - lse
    grad = tl.exp(log_p)
    if HAS_P_LOGP or HAS_P_SQUARED:
        p = grad
        grad = p * p_coef
        if HAS_P_LOGP:
            # A probability of 0 has log p = -inf, and 0 * -inf is not 0 in floating point.
            grad += p * p_logp_coef * tl.maximum(log_p, -1e4)
        if HAS_P_SQUARED:
            grad += p * p_squared_coef * p
    else:
        grad *= p_coef
    if HAS_UNIFORM:
        grad += uniform_coef
    if HAS_CLASS:
        grad += class_coef * class_weight
    if HAS_LABEL:
        grad += tl.where(at_label, label_coef, 0.0)
    if HAS_SOFTCAP:
        t = z / (softcap * inverse_temperature)
        grad *= 1 - t * t
    if HAS_SCALE:
        grad *= scale * inverse_temperature
    return grad


@jit(
    do_not_specialize=["first_column"],
    do_not_specialize_on_alignment=[
        "lse",
        "labels",
        "bias",
        "class_weight",
        "p_coef",
        "p_logp_coef",
        "p_squared_coef",
        "label_coef",
        "uniform_coef",
        "class_coef",
    ],
)
def _gradient_kernel(
    out,
    out_stride,
    projected,
    row_stride,
    lse,
    labels,
    bias,
    class_weight,
    p_coef,
    p_logp_coef,
    p_squared_coef,
    label_coef,
    uniform_coef,
    class_coef,
    first_column,
    columns,
    inverse_vocab_size,
    scale,
    softcap,
    inverse_temperature,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_P_LOGP: tl.constexpr,
    HAS_P_SQUARED: tl.constexpr,
    HAS_LABEL: tl.constexpr,
    HAS_UNIFORM: tl.constexpr,
    HAS_CLASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row, from left to right: a row of ``out`` may begin where its row of projections does."""
    row = tl.program_id(0).to(tl.int64)
    row_lse = tl.load(lse + row)
    label = (tl.load(labels + row) - first_column).to(tl.int32)
    p_c = tl.load(p_coef + row) if HAS_P else 0.0
    p_logp_c = tl.load(p_logp_coef + row) if HAS_P_LOGP else 0.0
    p_squared_c = tl.load(p_squared_coef + row) if HAS_P_SQUARED else 0.0
    label_c = tl.load(label_coef + row) if HAS_LABEL else 0.0
    uniform_c = tl.load(uniform_coef + row) * inverse_vocab_size if HAS_UNIFORM else 0.0
    class_c = tl.load(class_coef + row) * inverse_vocab_size if HAS_CLASS else 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        x = tl.load(projected + row * row_stride + offsets, mask=inside, other=0.0)
        if HAS_BIAS:
            x += tl.load(bias + offsets, mask=inside, other=0.0).to(tl.float32)
        z = transform_block(x, scale, softcap, inverse_temperature, HAS_SCALE, HAS_SOFTCAP)
        grad = gradient_block(
            z,
            row_lse,
            offsets == label,
            tl.load(class_weight + offsets, mask=inside, other=0.0) if HAS_CLASS else 0.0,
            p_c,
            p_logp_c,
            p_squared_c,
            label_c,
            uniform_c,
            class_c,
            scale,
            softcap,
            inverse_temperature,
            HAS_SCALE,
            HAS_SOFTCAP,
            HAS_P,
            HAS_P_LOGP,
            HAS_P_SQUARED,
            HAS_LABEL,
            HAS_UNIFORM,
            HAS_CLASS,
        )
        # A narrower `out` overwrites what lies to the left of this block, and part of it: all must have been read.
        tl.debug_barrier()
        tl.store(out + row * out_stride + offsets, grad.to(out.dtype.element_ty), mask=inside)
