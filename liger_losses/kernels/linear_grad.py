"""The softmax's gradient in the epilogue of ``hidden @ weight.T``: the logits never leave the registers.

N tokens, H hidden size, C columns (a slice of the vocabulary, or all of it), V the whole vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from liger_losses.kernels._tiles import project_tile, split_tile, store_tile, tile_position, tiles_of
from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.logit_transform import Epilogue, inverse_temperature, transform_block
from liger_losses.kernels.softmax_grad import (
    GRADIENT_VECTORS,
    SoftmaxGradient,
    gradient_block,
    load_coefficients,
    softmax_gradient_into,
)

#: Row tiles that walk the vocabulary together, so that the cache serves each part of the head to all of them.
_GROUP = 8


def linear_softmax_gradient_into(
    out: Tensor,
    hidden: Tensor,
    weight: Tensor,
    lse: Tensor,
    labels: Tensor,
    coefficients: SoftmaxGradient,
    epilogue: Epilogue = Epilogue(),
    *,
    first_column: int = 0,
    vocab_size: int | None = None,
    backend: str = "torch",
) -> Tensor:
    """:func:`softmax_gradient_into` of ``hidden @ weight.T``, rounded once, into ``out``.

    Args:
        out: ``[N, C]``, rows contiguous.
        hidden: ``[N, H]``.
        weight: ``[C, H]``, rows contiguous, of the same dtype: the head's rows from ``first_column`` on.
        lse, labels, coefficients, epilogue, first_column, vocab_size: as in :func:`softmax_gradient_into`.
        backend: ``torch`` also holds the tile's logits; ``triton`` does not, for fp16 and bf16.

    Returns:
        ``out``.
    """
    vocab_size = len(weight) if vocab_size is None else vocab_size
    if backend == "torch":
        projected = hidden.float() @ weight.float().t()
        return softmax_gradient_into(
            out, projected, lse, labels, coefficients, epilogue,
            first_column=first_column, vocab_size=vocab_size, backend=backend,
        )  # fmt: skip
    if not len(hidden):
        return out
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    row_tiles, column_tiles, programs, arguments = tiles_of(hidden, weight, epilogue, out)
    programs = min(programs, row_tiles * column_tiles)
    vectors = {"lse": lse, "labels": labels, "class_weight": epilogue.class_weight}
    vectors |= {name: v if v is None else v.contiguous() for name, v in coefficients._asdict().items()}
    _linear_gradient_kernel[(programs,)](
        **arguments, **vectors, first_column=first_column, inverse_vocab_size=1.0 / vocab_size, programs=programs,
        GROUP=_GROUP,
    )  # fmt: skip
    return out


@jit(
    do_not_specialize=["tokens", "first_column", "programs", "vocab_size"],
    do_not_specialize_on_alignment=GRADIENT_VECTORS,
)
def _linear_gradient_kernel(
    hidden, weight, hidden_stride, weight_stride, tokens, vocab_size, hidden_size,
    lse, labels, bias, class_weight,
    p_coef, p_logp_coef, p_squared_coef, label_coef, uniform_coef, class_coef,
    first_column, inverse_vocab_size, programs, transform,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
    out=None, out_stride=None,
):  # fmt: skip
    """Persistent programs, which take and store each tile's gradient in two halves."""
    row_tiles = tl.cdiv(tokens, BLOCK_N)
    column_tiles = tl.cdiv(vocab_size, BLOCK_V)
    coefficients = (p_coef, p_logp_coef, p_squared_coef, label_coef, uniform_coef, class_coef)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, programs, flatten=True):
        row_tile, column_tile = tile_position(tile, row_tiles, column_tiles, GROUP)
        first_row = row_tile * BLOCK_N
        first_of_tile = column_tile * BLOCK_V
        z = project_tile(
            hidden, weight, hidden_stride, weight_stride, first_row, first_of_tile, tokens, vocab_size, hidden_size,
            BLOCK_N, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        rows = first_row + tl.arange(0, BLOCK_N)
        valid = rows < tokens
        row_lse = tl.load(lse + rows, mask=valid, other=0.0)[:, None]
        label = (tl.load(labels + rows, mask=valid, other=-1).to(tl.int32) - first_column)[:, None]
        values = load_coefficients(coefficients, rows, valid, inverse_vocab_size, 1)
        inverse = inverse_temperature(transform, rows, valid, 1)
        left, right = split_tile(z, BLOCK_N, BLOCK_V)
        for half in tl.static_range(2):
            start = first_of_tile + half * (BLOCK_V // 2)
            columns = start + tl.arange(0, BLOCK_V // 2)
            inside = columns < vocab_size
            z = left if half == 0 else right
            if bias is not None or transform.factor is not None:
                z = transform_block(z, bias, columns, inside, transform, inverse)
            grad = gradient_block(
                z, columns, inside, row_lse, label, class_weight, coefficients, values, transform, inverse
            )
            store_tile(out, out_stride, grad, rows, columns, first_row, start, tokens, vocab_size)
