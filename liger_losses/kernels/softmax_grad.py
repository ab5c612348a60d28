"""The gradient of any mix of softmax statistics, in closed form.

R rows (tokens), C columns (a slice of the vocabulary, or all of it), V the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from liger_losses.kernels._triton import LOGIT_DTYPES, choose_backend, jit, tl
from liger_losses.kernels.logit_transform import Epilogue, inverse_temperature, load_logits, transform_gradient
from liger_losses.kernels.softmax_stats import row_slices, step_of


class SoftmaxGradient(NamedTuple):
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
        return SoftmaxGradient(*[None if value is None else value[start:stop] for value in self])

    def contiguous(self) -> SoftmaxGradient:
        """The coefficients as kernels read them."""
        return SoftmaxGradient(*[None if value is None else value.contiguous() for value in self])


_CLOSED_FORMS: dict[str, Callable[[Tensor, Mapping[str, Tensor], Tensor | None], dict[str, Tensor]]] = {
    "logp": lambda g, values, c: {"p_coef": -g, "label_coef": g},
    "entropy": lambda g, values, c: {"p_coef": -g * values["entropy"], "p_logp_coef": -g},
    "lse": lambda g, values, c: {"p_coef": g},
    "mean_logp": lambda g, values, c: (
        {"p_coef": -g, "uniform_coef": g} if c is None else {"p_coef": -g * c.to(g.dtype).mean(), "class_coef": g}
    ),
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
    scratch: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Gradient of the loss with respect to a slice of the projections; see :class:`SoftmaxGradient`.

    Args:
        out: ``[R, C]``, of any floating-point dtype. It may be ``projected`` itself, or lie in the memory of its rows;
            each row of ``out`` then begins where the row of logits does.
        projected: ``[R, C]``, fp32 or fp64, rows contiguous: columns ``first_column`` to ``first_column + C`` of the
            vocabulary.
        lse: ``[R]``, log-sum-exp over the whole vocabulary.
        labels: ``[R]`` int64, indices into the whole vocabulary.
        coefficients: the rows' coefficients.
        epilogue: from projections to logits, of these columns.
        first_column: where the slice starts in the vocabulary.
        vocab_size: V; ``C`` when the slice is the whole vocabulary.
        scratch: bytes for temporaries; unbounded by default.
        backend: ``torch`` or ``triton``; chosen from the tensor by default.

    Returns:
        ``out``. ``projected`` is overwritten where that saves memory.
    """
    vocab_size = vocab_size or projected.shape[1]
    if choose_backend(backend, [projected], dtypes=LOGIT_DTYPES) == "triton":
        count, columns = projected.shape
        if count:
            _gradient_kernel[(count,)](
                out, out.stride(0), projected, projected.stride(0),
                lse, labels, epilogue.bias, epilogue.class_weight,
                *coefficients.contiguous(),
                first_column, columns, 1.0 / vocab_size, epilogue.transform.for_kernel,
                **step_of(columns),
            )  # fmt: skip
        return out
    for rows in row_slices(projected, scratch):
        part = coefficients.rows(rows.start, rows.stop)
        column = labels[rows] - first_column
        grad = _gradient_torch(projected[rows], lse[rows], column, part, epilogue.rows(rows), vocab_size)
        out[rows].copy_(grad)
        del grad  # its memory is free before the next slice's temporaries are allocated
    return out


def _gradient_torch(
    projected: Tensor, lse: Tensor, column: Tensor, c: SoftmaxGradient, epilogue: Epilogue, vocab_size: int
) -> Tensor:
    """The reference implementation: a new tensor ``[R, C]``. ``column`` is the label's, counted in the slice."""
    width = projected.shape[1]
    logits = epilogue(projected)
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
        assert epilogue.class_weight is not None
        grad.addcmul_(c.class_coef[:, None], epilogue.class_weight[None, :], value=1.0 / vocab_size)
    if c.label_coef is not None:
        inside = (column >= 0) & (column < width)
        column = column.clamp(0, width - 1)[:, None]
        # Gather, add, scatter: one write per row, so the result never depends on the order of threads.
        at_label = grad.gather(1, column) + torch.where(inside, c.label_coef, 0.0)[:, None]
        grad.scatter_(1, column, at_label)
    return epilogue.transform.chain_(grad, logits)


@jit
def _load_coefficient(pointer, row):
    value = 0.0
    if pointer is not None:
        value = tl.load(pointer + row)
    return value


@jit
def load_coefficients(coefficients, row, inverse_vocab_size):
    """A row's values of the six pointers of a :class:`SoftmaxGradient`, 0 for one that is None."""
    p, p_logp, p_squared, label, uniform, classes = coefficients
    return (
        _load_coefficient(p, row),
        _load_coefficient(p_logp, row),
        _load_coefficient(p_squared, row),
        _load_coefficient(label, row),
        _load_coefficient(uniform, row) * inverse_vocab_size,
        _load_coefficient(classes, row) * inverse_vocab_size,
    )


@jit
def gradient_block(z, columns, inside, lse, label, class_weight, coefficients, values, transform, inverse):
    """d loss / d projections of a block of logits ``z``, with which ``columns``, ``lse`` and ``label`` broadcast.

    ``coefficients`` are pointers, which say what is absent; ``values`` is what :func:`load_coefficients` returned, and
    ``inverse`` what :func:`~liger_losses.kernels.logit_transform.inverse_temperature` did.
    """
    _p_coef, p_logp_coef, p_squared_coef, label_coef, uniform_coef, class_coef = coefficients
    p_value, p_logp_value, p_squared_value, label_value, uniform_value, class_value = values
    log_p = z - lse
    grad = tl.exp(log_p)
    if p_logp_coef is not None or p_squared_coef is not None:
        p = grad
        grad = p * p_value
        if p_logp_coef is not None:
            # A probability of 0 has log p = -inf, and 0 * -inf is not 0 in floating point.
            grad += p * p_logp_value * tl.maximum(log_p, -1e4)
        if p_squared_coef is not None:
            grad += p * p_squared_value * p
    else:
        grad *= p_value
    if uniform_coef is not None:
        grad += uniform_value
    if class_coef is not None:
        grad += class_value * tl.load(class_weight + columns, mask=inside, other=0.0)
    if label_coef is not None:
        grad += tl.where(columns == label, label_value, 0.0)
    if transform.factor is not None:
        grad = transform_gradient(grad, z, transform, inverse)
    return grad


#: Arguments whose alignment is no reason to compile again: slices of vectors begin anywhere.
_VECTORS = ["lse", "labels", "bias", "class_weight", *SoftmaxGradient._fields]


@jit(do_not_specialize=["first_column"], do_not_specialize_on_alignment=_VECTORS)
def _gradient_kernel(
    out, out_stride, projected, row_stride, lse, labels, bias, class_weight,
    p_coef, p_logp_coef, p_squared_coef, label_coef, uniform_coef, class_coef,
    first_column, columns, inverse_vocab_size, transform,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    row_lse = tl.load(lse + row)
    label = (tl.load(labels + row) - first_column).to(tl.int32)
    coefficients = (p_coef, p_logp_coef, p_squared_coef, label_coef, uniform_coef, class_coef)
    values = load_coefficients(coefficients, row, inverse_vocab_size)
    inverse = inverse_temperature(transform, row, True, 0)
    out += row * out_stride
    projected += row * row_stride
    for start in range(0, columns, BLOCK):  # from left to right: `out` may begin where `projected` does
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        z = load_logits(projected, bias, at, inside, transform, inverse)
        grad = gradient_block(z, at, inside, row_lse, label, class_weight, coefficients, values, transform, inverse)
        # A narrower `out` overwrites this block and what lies to its left: all of it must have been read.
        tl.debug_barrier()
        tl.store(out + at, grad.to(out.dtype.element_ty), mask=inside)
