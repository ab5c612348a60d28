"""Attention of a packed row, through transformers' registries of attention and mask functions.

A model that has run a packed row keeps an attention implementation of ours, which does what its former one did unless
it gets a block mask. Backward of checkpointed layers, which runs their forward again, therefore needs no context.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.caller import warn
from liger_losses.checks import see
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.prompts.masks import RowMask, block_mask, mask_function
from liger_losses.prompts.packing import BLOCK, PackedCompletions

_PREFIX = "packed_completions_"
#: Layers whose tokens pass nothing on but by attention, by their names in a configuration.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
#: A block mask's tensors, of the blocks that are partly or fully seen by queries, and that see keys.
_BLOCKS = [
    f"{full}{side}_{what}" for side in ("kv", "q") for full in ("", "full_") for what in ("num_blocks", "indices")
]
#: FlexAttention's kernels need this many features of a head.
_LEAST_HEAD_DIM = 16
#: Kernels of one process, of its models' head sizes, dtypes, windows and gradients. Beyond torch.compile's limit, 8 by
#: default, FlexAttention would compute all pairs of tokens.
_MOST_KERNELS = 256


class CannotShareError(ValueError):
    """A model that cannot run a packed row, with the reason."""


@dataclass
class _Running:
    """The packed row that a model is running, and how many attention layers it has passed."""

    packed: PackedCompletions
    layers: int = 0


_running: contextvars.ContextVar[_Running | None] = contextvars.ContextVar("packed_completions", default=None)


@contextlib.contextmanager
def attending(model: nn.Module, packed: PackedCompletions) -> Iterator[dict[str, Tensor]]:
    """Within this context, attention of ``model(**arguments)`` is that of the packed row; the context's value is the
    arguments. The model is changed by its attention implementation, which does what it did for other batches.

    Raises:
        CannotShareError: the model's tokens pass something on otherwise than by attention that this can mask.
    """
    owner = transformers_model(model)
    reason = reason_against(owner)
    if reason is not None:
        raise CannotShareError(
            f"{type(owner).__name__} cannot run packed completions: {reason}." + see("packed-completions")
        )
    token = _running.set(running := _Running(packed))
    try:
        yield {name: getattr(packed, name) for name in ("input_ids", "position_ids", "attention_mask")}
    finally:
        _running.reset(token)
    layers = owner.config.get_text_config().num_hidden_layers
    if running.layers < layers:
        raise CannotShareError(
            f"{type(owner).__name__} cannot run packed completions: of its {layers} layers, {running.layers} took "
            "their attention from transformers' AttentionInterface, and the others would mix completions."
            + see("packed-completions")
        )


def _now() -> _Running | None:
    """What runs in this thread. torch.compile cannot read it, so that compiled layers are not counted, and refused."""
    return None if torch.compiler.is_dynamo_compiling() else _running.get()


def transformers_model(model: nn.Module) -> Any:
    """The model of transformers inside wrappers, such as an adapter's."""
    owner = next((module for module in model.modules() if hasattr(type(module), "set_attn_implementation")), None)
    if owner is None:
        raise CannotShareError(f"{type(model).__name__} has no model of transformers, which packed completions need.")
    return owner


def reason_against(model: Any) -> str | None:
    """Why a model of transformers cannot run packed completions; ``None`` if its attention can from now on."""
    config = model.config.get_text_config()
    reason = None if str(config._attn_implementation).startswith(_PREFIX) else _reason_against_layers(model, config)
    dropouts = [name for name in _DROPOUTS if getattr(config, name, 0) and model.training]
    if reason is None and dropouts:
        return f"{dropouts[0]}={getattr(config, dropouts[0])}, and FlexAttention has no dropout; set it to 0"
    return reason


def _reason_against_layers(model: Any, config: Any) -> str | None:
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    others = sorted({*(getattr(config, "layer_types", None) or ())} - _ATTENTION)
    if others or any(getattr(module, "_is_stateful", False) for module in model.modules()):
        return f"its layers ({', '.join(others) or 'with a state'}) mix tokens by more than masked attention"
    if not hasattr(config, "num_hidden_layers"):
        return "its configuration has no num_hidden_layers, so that nobody knows whether all layers are masked"
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        return "its positions do not count from 0"
    modules = (model, getattr(model, model.base_model_prefix, model))
    if not any("position_ids" in inspect.signature(inspect.unwrap(type(m).forward)).parameters for m in modules):
        return "its forward takes no position_ids"
    return _reason_against_setting(model, config)


def _reason_against_setting(model: Any, config: Any) -> str | None:
    """Give the model the implementation of ours that wraps its own, or return why it keeps its own."""
    from transformers import AttentionInterface, AttentionMaskInterface

    original = str(config._attn_implementation)
    name = f"{_PREFIX}{original.replace('/', '_')}"
    AttentionInterface.register(name, functools.partial(_attend, original))
    AttentionMaskInterface.register(name, functools.partial(_mask, original))
    model.set_attn_implementation(name)
    return (
        None if config._attn_implementation == name else "its attention does not use transformers' AttentionInterface"
    )


def _mask(original: str, *args: Any, **options: Any) -> Any:
    """transformers' mask of a layer type: of a packed row, if one is running."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

    now, make = _now(), ALL_MASK_ATTENTION_FUNCTIONS.get(original)
    if now is None:
        return None if make is None else make(*args, **options)
    of_positions = options["mask_function"]
    if options.get("use_vmap") or "allow_is_bidirectional_skip" in options:
        raise CannotShareError("the model adds a pattern to its causal mask, such as that of images.")
    sees = RowMask(now.packed, None if of_positions is causal_mask_function else of_positions)
    against = _reason_against_flex(options["config"], sees.rows.device)
    if against is None:
        return block_mask(sees)
    if sees.rows.device.type != "cpu":
        warn(f"packed completions attend by a dense mask of tokens x tokens: {against}." + see("packed-completions"))
    if original not in ("eager", "sdpa"):
        raise CannotShareError(f"{against}, and {original} takes no dense mask; set attn_implementation='sdpa'.")
    replaced = {"mask_function": sees, "attention_mask": None, "allow_is_causal_skip": False}
    return make(*args, **options | replaced)


def _reason_against_flex(config: Any, device: torch.device) -> str | None:
    size = vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads
    if device.type != "cuda":
        return f"FlexAttention has no backward on {device.type}"
    return f"FlexAttention needs heads of {_LEAST_HEAD_DIM} features, got {size}" if size < _LEAST_HEAD_DIM else None


def _attend(
    original: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, Any]:
    """The attention function of a layer: FlexAttention for a block mask of a packed row, otherwise ``original``."""
    now = _now()
    if now is not None:
        now.layers += 1
    if isinstance(getattr(attention_mask, "mask_mod", None), RowMask):
        names = ("scaling", "softcap", "s_aux")
        dtype = autocast_dtype(query.device) or query.dtype  # rotated queries and keys may be in fp32, values in bf16
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        return flex_attention(query, key, value, attention_mask, *map(options.get, names)), None
    return _function(original, module)(module, query, key, value, attention_mask, *args, **options)


def _function(original: str, module: nn.Module) -> Any:
    """transformers' function of this name; of ``"eager"``, the one beside the layer's class."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    files: Any = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    eager = next((f.eager_attention_forward for f in files if hasattr(f, "eager_attention_forward")), None)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
    if function is None:
        raise CannotShareError(f"the file of {type(module).__name__} has no eager_attention_forward.")
    return function


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """FlexAttention of a packed row, compiled once for all lengths.

    Args:
        query, key, value: ``[1, heads, T, D]``; keys and values may have fewer heads.
        mask: the block mask of :func:`~liger_losses.prompts.masks.block_mask`.
        scaling, softcap: of the scores, as transformers passes them.
        sinks: ``[heads]``, a logit of each head that takes part in the softmax and has no value.

    Returns:
        ``[1, T, heads, D]``.
    """
    blocks = {name: getattr(mask, name) for name in _BLOCKS}
    # Lengths as blocks times their tokens: the compiled code then knows that no block is cut.
    tensors = [tensor.unflatten(2, (-1, BLOCK)) for tensor in (query, key, value)]
    rows = mask.mask_mod.rows.unflatten(1, (-1, BLOCK))
    for tensor, dims in (
        (rows, (1,)),
        *((t, (2,)) for t in tensors),
        *((b, tuple(range(2, b.dim()))) for b in blocks.values()),
    ):
        for dim in dims:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    with torch._dynamo.config.patch(recompile_limit=_MOST_KERNELS):
        out, lse = _compiled()(*tensors, blocks, rows, mask.mask_mod.positions_see, scaling, softcap)
    if sinks is not None:
        out = (out * (lse - sinks.float()[:, None]).sigmoid()[..., None]).to(query.dtype)
    return out.transpose(1, 2).contiguous()


@functools.cache
def _compiled() -> Any:
    return torch.compile(_flex)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: dict[str, Any],
    rows: Tensor,
    positions_see: Any,
    scaling: float | None,
    softcap: float | None,
) -> Any:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask
    from torch.nn.attention.flex_attention import flex_attention as attention

    query, key, value = (tensor.flatten(2, 3) for tensor in (query, key, value))
    # Backward has one program for a block of keys of a head. A prompt's keys are seen by all of its completions: with
    # keys for each head of queries, these programs are shorter by as many times, and the others do not wait for them.
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for tensor in (key, value))

    def score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)  # type: ignore[operator]

    lengths = query.shape[2], key.shape[2]
    sees = mask_function(rows.flatten(1), positions_see)
    mask = BlockMask(seq_lengths=lengths, **blocks, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=sees)
    out, aux = attention(
        query,
        key,
        value,
        score_mod=None if softcap is None else score,
        block_mask=mask,
        scale=scaling,
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse
