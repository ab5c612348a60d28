"""Attention of a packed row, by functions that wrap transformers' own, which all other calls reach unchanged.

A model keeps the name of its attention implementation, which other code reads. What tells a packed row apart is the
context of the model's forward, for masks, and the mask itself, for layers: backward of checkpointed layers, which runs
their forward again, has no context.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.caller import warn
from liger_losses.checks import see
from liger_losses.kernels._triton import triton
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.prompts.masks import RowMask, block_mask, mask_function
from liger_losses.prompts.packing import BLOCK, PackedCompletions, pack_completions

#: Layers whose tokens pass nothing on but by attention, by their names in a configuration.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
#: A block mask's tensors, of the blocks that are partly or fully seen by queries, and that see keys.
_BLOCKS = [
    f"{full}{side}_{what}" for side in ("kv", "q") for full in ("", "full_") for what in ("num_blocks", "indices")
]
#: Environment variables that turn torch.compile off: FlexAttention would compute all pairs of tokens.
_DISABLING = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
#: FlexAttention's kernels need this many features of a head.
_LEAST_HEAD_DIM = 16
#: Kernels of one process, of its models' head sizes, dtypes, windows and gradients. Beyond torch.compile's limit, 8 by
#: default, FlexAttention would compute all pairs of tokens.
_MOST_KERNELS = 256


class CannotShareError(ValueError):
    """A model that cannot run a packed row, with the reason."""

    def __init__(self, reason: str, model: Any = None) -> None:
        said = reason if model is None else f"{type(model).__name__} cannot run packed completions: {reason}."
        super().__init__(said + see("packed-completions"))


@dataclass
class _Running:
    """The packed row that a model is running, whether that is a trial, whether it has got a mask, of FlexAttention's
    blocks or dense, and how many layers have attended by one."""

    packed: PackedCompletions
    tries: bool
    has_mask: bool = False
    has_blocks: bool = False
    layers: int = 0


_running: contextvars.ContextVar[_Running | None] = contextvars.ContextVar("packed_completions", default=None)


@contextlib.contextmanager
def attending(model: nn.Module, packed: PackedCompletions, tries: bool = False) -> Iterator[dict[str, Tensor]]:
    """Within this context, attention of ``model(**arguments)`` is that of the packed row; the context's value is the
    arguments. The model is one that :func:`check_model` takes. If it only tries, layers run their attention's backward.

    Raises:
        CannotShareError: the model has attention dropout, or layers that did not attend by the mask of the row.
    """
    owner = transformers_model(model)
    config = owner.config.get_text_config()
    dropouts = [f"{name}={getattr(config, name)}" for name in _DROPOUTS if getattr(config, name, 0) and owner.training]
    if dropouts:
        raise CannotShareError(f"{', '.join(dropouts)}, and FlexAttention has no dropout; set it to 0", owner)
    _wrap_interfaces(str(config._attn_implementation))
    token = _running.set(running := _Running(packed, tries))
    try:
        yield {name: getattr(packed, name) for name in ("input_ids", "position_ids", "attention_mask")}
    finally:
        _running.reset(token)
    layers = config.num_hidden_layers
    if running.layers < layers:
        raise CannotShareError(
            f"of its {layers} layers, {running.layers} took their attention and its mask from transformers' "
            "interfaces, and the others would mix completions",
            owner,
        )


def try_row(model: nn.Module, forward: Callable[..., Any], device: torch.device) -> None:
    """Run a packed row of two tokens, without dropout. Of the backward, only that of each layer's attention runs: the
    kernels of a forward may compile on a GPU, and not those of its backward.

    Raises:
        CannotShareError: the model cannot run it, for whatever reason.
    """
    check_model(model)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode(False), torch.no_grad():
            packed = pack_completions([[0]], [[0]], device=device)
            with attending(model, packed, tries=True) as row:
                forward(**row, use_cache=False, return_dict=True)
    except CannotShareError:
        raise
    except Exception as error:
        raise CannotShareError(f"a row of two tokens raised {type(error).__name__}: {error}", model) from error
    finally:
        for module in training:
            module.training = True


def _now() -> _Running | None:
    """What runs in this thread. torch.compile cannot read it, so that compiled layers are not counted, and refused."""
    return None if torch.compiler.is_dynamo_compiling() else _running.get()


def _is_of_transformers(module: Any) -> bool:
    return hasattr(type(module), "set_attn_implementation")


def transformers_model(model: nn.Module) -> Any:
    """The model of transformers inside wrappers, such as an adapter's."""
    owner = next(filter(_is_of_transformers, model.modules()), None)
    if owner is None:
        raise CannotShareError(f"{type(model).__name__} has no model of transformers, which packed completions need.")
    return owner


def check_model(model: nn.Module) -> None:
    """Raise CannotShareError where a model's layers and configuration tell that it cannot run packed completions.

    That takes milliseconds for a large model with adapters, so that trainers check it once.
    """
    owner = transformers_model(model)
    config, modules = owner.config.get_text_config(), [*owner.modules()]
    kinds = {type(module) for module in modules}
    others = sorted({*(getattr(config, "layer_types", None) or ())} - _ATTENTION)
    mixes = others or any(getattr(kind, "_is_stateful", False) for kind in kinds)
    forwards = (inspect.unwrap(type(m).forward) for m in (owner, getattr(owner, owner.base_model_prefix, owner)))
    takes_positions = any("position_ids" in inspect.signature(forward).parameters for forward in forwards)
    scaled = getattr(config, "attn_temperature_tuning", False)
    # The models inside that read this configuration; towers of images do not.
    models = [m for m in modules if _is_of_transformers(m) and m.config.get_text_config() is config]
    by_interface = all(m._can_set_attn_implementation() for m in models)
    reasons = {
        "it is an encoder-decoder": getattr(owner.config, "is_encoder_decoder", False),
        f"its layers ({', '.join(others) or 'with a state'}) mix tokens by more than masked attention": mixes,
        "its configuration has no num_hidden_layers, so that nobody knows whether all layers are masked": (
            not hasattr(config, "num_hidden_layers")
        ),
        "its positions do not count from 0": any(hasattr(kind, "create_position_ids_from_input_ids") for kind in kinds),
        "its forward takes no position_ids": not takes_positions,
        "its attention is scaled by tokens' places in the row, whatever position_ids say": scaled,
        "its attention does not use transformers' AttentionInterface": not by_interface,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise CannotShareError(reason, owner)


def _wrap_interfaces(name: str) -> None:
    """Put :func:`_mask` before the mask function of this name, and :func:`_attend` before all attention functions.

    They stay, as backward looks functions of checkpointed layers up again. The registry has no function for ``"eager"``
    that could be replaced, as each model brings its own, so that the look-up is.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    make, look_up = ALL_MASK_ATTENTION_FUNCTIONS.get(name), AttentionInterface.get_interface
    if getattr(make, "func", None) is not _mask:
        AttentionMaskInterface.register(name, functools.partial(_mask, name, make))
    if not hasattr(look_up, "wrapped"):

        def get_interface(*args: Any, **kwargs: Any) -> Any:
            return functools.partial(_attend, look_up(*args, **kwargs))

        get_interface.wrapped = look_up  # type: ignore[attr-defined]
        AttentionInterface.get_interface = get_interface


def _mask(name: str, make: Any, *args: Any, **options: Any) -> Any:
    """transformers' mask of a layer type, ``make``'s: of a packed row, if one is running."""
    from transformers.masking_utils import causal_mask_function

    now = _now()
    if now is None:
        return None if make is None else make(*args, **options)
    of_positions = options["mask_function"]
    if options.get("use_vmap") or "allow_is_bidirectional_skip" in options:
        raise CannotShareError("the model adds a pattern to its causal mask, such as that of images.")
    sees = RowMask(now.packed, None if of_positions is causal_mask_function else of_positions)
    lengths, length = (options["q_length"], options["kv_length"]), sees.rows.shape[1]
    if lengths != (length, length):
        raise CannotShareError(
            f"the packed row has {length} tokens, and attention {lengths[0]} queries and {lengths[1]} keys: leave out "
            "caches, and adapters that add tokens."
        )
    now.has_mask = True
    against = reason_against_flex(options["config"], sees.rows.device)
    if against is None:
        now.has_blocks = True
        return block_mask(sees)
    if sees.rows.device.type != "cpu":
        warn(f"packed completions attend by a dense mask of tokens x tokens: {against}." + see("packed-completions"))
    if name not in ("eager", "sdpa"):
        raise CannotShareError(f"{against}, and {name} takes no dense mask; set attn_implementation='sdpa'.")
    replaced = {"mask_function": sees, "attention_mask": None, "allow_is_causal_skip": False}
    return make(*args, **options | replaced)


def reason_against_flex(config: Any, device: torch.device) -> str | None:
    """Why FlexAttention cannot run a model's packed rows; ``None`` if it can."""
    size = vars(config).get("head_dim") or getattr(config, "hidden_size", 0) // config.num_attention_heads
    if device.type != "cuda":
        return f"FlexAttention has no backward on {device.type}"
    if triton is None or "1" in map(os.environ.get, _DISABLING):
        return "FlexAttention needs Triton and torch.compile"
    return f"FlexAttention needs heads of {_LEAST_HEAD_DIM} features, got {size}" if size < _LEAST_HEAD_DIM else None


def _attend(
    function: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, Any]:
    """The attention function of a layer: FlexAttention for a block mask of a packed row, otherwise ``function``."""
    now, by_blocks = _now(), isinstance(getattr(attention_mask, "mask_mod", None), RowMask)
    if now is not None:
        now.layers += by_blocks if now.has_blocks else now.has_mask and attention_mask is not None
    if by_blocks:
        dtype = autocast_dtype(query.device) or query.dtype  # rotated queries and keys may be in fp32, values in bf16
        tensors: Any = [tensor.to(dtype) for tensor in (query, key, value)]
        rest = attention_mask, *map(options.get, ("scaling", "softcap", "s_aux"))
        if now is not None and now.tries:
            with torch.enable_grad():
                leaves: Any = [tensor.detach().requires_grad_() for tensor in tensors]
                torch.autograd.grad((out := flex_attention(*leaves, *rest)).sum(), leaves)
            return out.detach(), None
        return flex_attention(*tensors, *rest), None
    return function(module, query, key, value, attention_mask, *args, **options)


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
    rows = mask.mask_mod.rows.to(query.device).unflatten(1, (-1, BLOCK))
    for tensor, dims in (
        (rows, (1,)),
        *((t, (2,)) for t in tensors),
        *((b, tuple(range(2, b.dim()))) for b in blocks.values()),
    ):
        for dim in dims:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    out, lse = _compiled()(*tensors, blocks, rows, mask.mask_mod.positions_see, scaling, softcap)
    if sinks is not None:
        out = (out * (lse - sinks.float()[:, None]).sigmoid()[..., None]).to(query.dtype)
    return out.transpose(1, 2).contiguous()


@functools.cache
def _compiled(**options: Any) -> Any:
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return torch.compile(_flex, **options | {"recompile_limit": _MOST_KERNELS})
    compiled = torch.compile(_flex, **options)

    def limited(*args: Any) -> Any:
        # torch 2.11 has one limit for the whole process: it is raised while this function is called.
        with torch._dynamo.config.patch(recompile_limit=_MOST_KERNELS):
            return compiled(*args)

    return limited


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
