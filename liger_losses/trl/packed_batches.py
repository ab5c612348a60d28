"""TRL's batches of prompts, repeated for each completion, as a row in which each prompt stands once.

A trainer's model gets its batch unchanged, so that wrappers such as DistributedDataParallel and ``fully_shard`` see no
difference. Its own forward then runs the packed row, and the head the hidden states that predict completions' tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_losses.caller import warn
from liger_losses.checks import see
from liger_losses.kernels._triton import choose_backend
from liger_losses.prompts.attention import CannotShareError, attending, reason_against_flex, try_row
from liger_losses.prompts.packing import PackedCompletions, pack_sequences

#: Arguments of a forward that a packed row replaces, or that say nothing about single tokens.
_KNOWN = {"input_ids", "attention_mask", "use_cache", "return_dict"}
#: Unasked, a batch is packed whose padded tokens are more than so many times those of its row.
_LEAST_SAVING = 1.2


def packed_batch(model: Any, forward: Any, labels: Tensor | None, batch: dict[str, Any]) -> PackedCompletions | None:
    """The batch with each prompt once; ``None`` where its prompts are repeated, and a warning if sharing was asked for.

    A process may pack a batch while another does not, and both call each layer once. A model that turns out not to run
    packed rows calls them twice. Therefore all processes try in their first forward, with a row of two tokens, whatever
    their batches are: what it raises is a reason to repeat prompts.
    """
    options, ids, mask = model._liger_losses_head, batch.get("input_ids"), batch.get("attention_mask")
    compiles = torch.compiler.is_dynamo_compiling()  # also in the frames of a compiled model's calls, such as this one
    if ids is None or compiles:
        reason = "torch.compile compiles the model" if compiles else "there are no input_ids"
        return _say(model, f"prompts are repeated: {reason}." + see("packed-completions"))
    if not options.share_prompts and not suits_sharing(model, ids.device):
        return None
    if not options.has_tried:
        model._liger_losses_head = replace(options, has_tried=True)
        try:
            try_row(model, forward, ids.device)
        except CannotShareError as error:
            return _refuse(model, error)
    present = {name for name, value in batch.items() if value is not None and value is not False}
    reasons = [f"{name} is given" for name in sorted(present - _KNOWN)]
    reasons += ["sequences are cut for context parallelism"] if labels is None else []
    if labels is None or reasons:
        return _say(model, f"this batch's prompts are repeated: {', '.join(reasons)}." + see("packed-completions"))
    packed = pack_sequences(ids, torch.ones_like(ids) if mask is None else mask, labels)
    return packed if options.share_prompts or ids.numel() > _LEAST_SAVING * packed.input_ids.numel() else None


def run_packed(model: Any, forward: Any, packed: PackedCompletions, arguments: dict[str, Any]) -> Any | None:
    """The output of the model's ``forward`` for the packed row; ``None`` from now on for a model that cannot run it."""
    try:
        with attending(model, packed) as row:
            return forward(**arguments | row)
    except CannotShareError as error:
        return _refuse(model, error)


def _refuse(model: Any, error: CannotShareError) -> Any:
    _say(model, f"prompts are repeated: {error}")
    model._liger_losses_head = replace(model._liger_losses_head, share_prompts=False)


def suits_sharing(model: Any, device: torch.device) -> bool:
    """Whether a model shares prompts unasked: FlexAttention can take the place of its attention, and is faster.

    A CPU's dense masks take longer than repeated prompts. Flash-attention may be faster than FlexAttention, which is
    not tested in fp32, nor on ROCm. TRL counts positions from the left padding, and a row from the prompt: rotary
    positions alone, whose differences count, give the same log-probabilities. Images are refused by the batch, in which
    processes may differ. Of a model whose parameters ZeRO-3 gathers, a packed row was not tried on GPUs.
    """
    config, rope = model.config, getattr(model.config, "rope_parameters", None) or {}
    kinds = {r["rope_type"] for r in (rope, *rope.values()) if isinstance(r, dict) and "rope_type" in r}
    # The frequencies of these change with the longest position of a batch.
    rotary = kinds and kinds.isdisjoint({"dynamic", "longrope"})
    alone = config.get_text_config() is config and config._attn_implementation in ("sdpa", "eager")
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    if not (rotary and alone and nvidia) or hasattr(next(model.parameters()), "ds_id"):
        return False
    half = torch.is_autocast_enabled(device.type) or model.dtype.itemsize == 2
    flex = reason_against_flex(config, device) is None
    return half and flex and choose_backend(None, [(device, torch.bfloat16)]) == "triton"


@torch.compiler.disable
def _say(model: Any, reason: str) -> Any:
    if model._liger_losses_head.share_prompts:
        warn(f"enable(share_prompts=True): for {type(model).__name__}, {reason}")
