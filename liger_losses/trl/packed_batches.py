"""TRL's batches of prompts, repeated for each completion, as a row in which each prompt stands once.

A trainer's model gets its batch unchanged, so that wrappers such as DistributedDataParallel and ``fully_shard`` see no
difference. Its own forward then runs the packed row, and the head the hidden states that predict completions' tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.caller import warn
from liger_losses.checks import see
from liger_losses.chunked.losses.batches import world_size
from liger_losses.prompts.attention import CannotShareError, attending
from liger_losses.prompts.packing import PackedCompletions, pack_sequences

#: Arguments of a forward that a packed row replaces, or that say nothing about single tokens.
_KNOWN = {"input_ids", "attention_mask", "use_cache", "return_dict"}
#: Unasked, a batch is packed whose padded tokens are more than so many times those of its row.
_LEAST_SAVING = 1.2


def packed_batch(model: Any, labels: Tensor | None, arguments: dict[str, Any]) -> PackedCompletions | None:
    """The batch with each prompt once; ``None`` where its prompts are repeated, and a warning if sharing was asked for.

    Without being asked, a process may pack a batch while another does not, and both call each layer once. A model that
    turns out not to run packed rows calls them twice, so that all processes have to try in the same forward: the first.
    """
    options = model._liger_losses_head
    if torch.compiler.is_dynamo_compiling():  # in the frames of a compiled model's calls, such as this one
        _say(model, "prompts are repeated: torch.compile compiles the model")
        return None
    given = {name for name, value in arguments.items() if value is not None and value is not False}
    reasons = [f"{name} is given" for name in sorted(given - _KNOWN)]
    reasons += ["there are no input_ids"] if "input_ids" not in given else []
    reasons += ["sequences are cut for context parallelism"] if labels is None else []
    if labels is None or reasons:
        _say(model, f"this batch's prompts are repeated: {', '.join(reasons)}")
        return None
    ids, mask = arguments["input_ids"], arguments.get("attention_mask")
    if not options.share_prompts and not suits_sharing(model, ids.device):
        return None
    packed = pack_sequences(ids, torch.ones_like(ids) if mask is None else mask, labels)
    first = not options.has_tried and world_size() > 1
    model._liger_losses_head = replace(options, has_tried=True)
    saves = ids.numel() > _LEAST_SAVING * packed.input_ids.numel()
    return packed if options.share_prompts or first or saves else None


def run_packed(
    model: Any, forward: Callable[..., Any], packed: PackedCompletions, arguments: dict[str, Any]
) -> Any | None:
    """The output of the model's ``forward`` for the packed row; ``None`` from now on for a model that cannot run it."""
    try:
        with attending(model, packed) as row:
            return forward(**arguments | row)
    except CannotShareError as error:
        _say(model, f"prompts are repeated: {error}")
        model._liger_losses_head = replace(model._liger_losses_head, share_prompts=False)
        return None


def suits_sharing(model: Any, device: torch.device) -> bool:
    """Whether a model shares prompts unasked: FlexAttention can take the place of its attention, and is faster.

    A CPU's dense masks take longer than repeated prompts. Flash-attention may be faster than FlexAttention, which is
    not tested in fp32. Images are refused by the batch, in which processes may differ.
    """
    half = torch.is_autocast_enabled(device.type) or model.dtype.itemsize == 2
    alone = model.config.get_text_config() is model.config
    known = model.config._attn_implementation in ("sdpa", "eager")
    return device.type == "cuda" and half and alone and known


@torch.compiler.disable
def _say(model: Any, reason: str) -> None:
    if model._liger_losses_head.share_prompts:
        warn(f"enable(share_prompts=True): for {type(model).__name__}, {reason}." + see("packed-completions"))
