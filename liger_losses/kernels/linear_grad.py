"""The softmax's gradient in the epilogue of ``hidden @ weight.T``: the logits never leave the registers.

N tokens, H hidden size, C columns (a slice of the vocabulary, or all of it), V the whole vocabulary.
"""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor

from liger_losses.kernels._tiles import (
    Tiling,
    aligned,
    descriptor,
    processors,
    product_arguments,
    project_tile,
    tile_position,
)
from liger_losses.kernels._triton import jit, tl
from liger_losses.kernels.logit_transform import Epilogue, transform_block
from liger_losses.kernels.softmax_grad import SoftmaxGradient, gradient_block, softmax_gradient_into

_TILING = Tiling(tokens=128, columns=256, depth=64, group=8, programs=1, warps=8, stages=3)


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
        weight: ``[C, H]``, rows contiguous, of the same dtype: the head's from ``first_column`` on.
        lse, labels, coefficients, epilogue, first_column, vocab_size: as in :func:`softmax_gradient_into`.
        backend: ``torch`` holds the tile's logits besides; ``triton`` does not, for fp16 and bf16.

    Returns:
        ``out``.
    """
    vocab_size = len(weight) if vocab_size is None else vocab_size
    if backend == "torch":
        return softmax_gradient_into(
            out,
            hidden.float() @ weight.float().t(),
            lse,
            labels,
            coefficients,
            epilogue,
            first_column=first_column,
            vocab_size=vocab_size,
            backend=backend,
        )
    if not len(hidden):
        return out
    transform, bias, class_weight = epilogue
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    operands = product_arguments(hidden, weight, _TILING)
    tma_store = operands["TMA"] and aligned(out)
    tiles = -(-len(hidden) // _TILING.tokens) * -(-len(weight) // _TILING.columns)
    programs = min(_TILING.programs * processors(hidden.device), tiles)
    given = {f.name: getattr(coefficients, f.name) for f in fields(coefficients)}
    _linear_gradient_kernel[(programs,)](
        **operands,
        out=descriptor(out, _TILING.tokens, _TILING.columns // 2) if tma_store else out,
        out_stride=out.stride(0),
        lse=lse,
        labels=labels,
        bias=bias,
        class_weight=class_weight,
        **{name: None if value is None else value.contiguous() for name, value in given.items()},
        first_column=first_column,
        inverse_vocab_size=1.0 / vocab_size,
        programs=programs,
        **transform.kernel_arguments(),
        HAS_BIAS=bias is not None,
        **{f"HAS_{name.removesuffix('_coef').upper()}": value is not None for name, value in given.items()},
        TMA_STORE=tma_store,
        GROUP=_TILING.group,
        **_TILING.launch(),
    )
    return out


@jit(
    do_not_specialize=["tokens", "first_column", "programs", "vocab_size"],
    do_not_specialize_on_alignment=[
        "hidden",
        "weight",
        "out",
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
def _linear_gradient_kernel(
    hidden,
    weight,
    hidden_stride,
    weight_stride,
    tokens,
    vocab_size,
    hidden_size,
    out,
    out_stride,
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
    inverse_vocab_size,
    programs,
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
    TMA: tl.constexpr,
    TMA_STORE: tl.constexpr,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Persistent programs; each tile's gradient is taken and stored in two halves, which takes fewer registers."""
    row_tiles = tl.cdiv(tokens, BLOCK_N)
    column_tiles = tl.cdiv(vocab_size, BLOCK_V)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, programs, flatten=True):
        row_tile, column_tile = tile_position(tile, row_tiles, column_tiles, GROUP)
        first_row = row_tile * BLOCK_N
        first_of_tile = column_tile * BLOCK_V
        z = project_tile(
            hidden,
            weight,
            hidden_stride,
            weight_stride,
            first_row,
            first_of_tile,
            tokens,
            vocab_size,
            hidden_size,
            TMA,
            UPCAST,
            BLOCK_N,
            BLOCK_V,
            BLOCK_H,
        )
        rows = first_row + tl.arange(0, BLOCK_N)
        valid = rows < tokens
        row_lse = tl.load(lse + rows, mask=valid, other=0.0)
        label = tl.load(labels + rows, mask=valid, other=-1).to(tl.int32) - first_column
        p_c = tl.load(p_coef + rows, mask=valid, other=0.0)[:, None] if HAS_P else 0.0
        p_logp_c = tl.load(p_logp_coef + rows, mask=valid, other=0.0)[:, None] if HAS_P_LOGP else 0.0
        p_squared_c = tl.load(p_squared_coef + rows, mask=valid, other=0.0)[:, None] if HAS_P_SQUARED else 0.0
        label_c = tl.load(label_coef + rows, mask=valid, other=0.0)[:, None] if HAS_LABEL else 0.0
        uniform_c = 0.0
        class_c = 0.0
        if HAS_UNIFORM:
            uniform_c = (tl.load(uniform_coef + rows, mask=valid, other=0.0) * inverse_vocab_size)[:, None]
        if HAS_CLASS:
            class_c = (tl.load(class_coef + rows, mask=valid, other=0.0) * inverse_vocab_size)[:, None]
        left, right = tl.split(tl.permute(tl.reshape(z, (BLOCK_N, 2, BLOCK_V // 2)), (0, 2, 1)))
        for half in tl.static_range(2):
            start = first_of_tile + half * (BLOCK_V // 2)
            columns = start + tl.arange(0, BLOCK_V // 2)
            inside = columns < vocab_size
            z = left if half == 0 else right
            if HAS_BIAS:
                z += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
            z = transform_block(z, scale, softcap, inverse_temperature, HAS_SCALE, HAS_SOFTCAP)
            grad = gradient_block(
                z,
                row_lse[:, None],
                columns[None, :] == label[:, None],
                tl.load(class_weight + columns, mask=inside, other=0.0)[None, :] if HAS_CLASS else 0.0,
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
            if TMA_STORE:
                out.store([first_row, start], grad.to(out.dtype))
            else:
                pointers = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
                tl.store(pointers, grad.to(out.dtype.element_ty), mask=valid[:, None] & inside[None, :])
