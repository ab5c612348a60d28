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
from liger_losses.prompts.attention import CannotShareError, attending
from liger_losses.prompts.packing import PackedCompletions, pack_sequences

#: Arguments of a forward that a packed row replaces, or that say nothing about single tokens.
_KNOWN = {"input_ids", "attention_mask", "use_cache", "return_dict"}


def packed_batch(model: Any, labels: Tensor | None, arguments: dict[str, Any]) -> PackedCompletions | None:
    """The batch with each prompt once, or ``None`` and a warning with the reason."""
    if torch.compiler.is_dynamo_compiling():  # in the frames of a compiled model's calls, such as this one
        _say(model, "prompts are repeated: torch.compile compiles the model")
        return None
    given = {name for name, value in arguments.items() if value is not None and value is not False}
    reasons = [f"{name} is given" for name in sorted(given - _KNOWN)]
    reasons += ["there are no input_ids"] if "input_ids" not in given else []
    if labels is None:
        reasons.append("sequences are cut for context parallelism")
    if not reasons:
        assert labels is not None
        ids, mask = arguments["input_ids"], arguments.get("attention_mask")
        return pack_sequences(ids, torch.ones_like(ids) if mask is None else mask, labels)
    _say(model, f"this batch's prompts are repeated: {', '.join(reasons)}")
    return None


def run_packed(
    model: Any, forward: Callable[..., Any], packed: PackedCompletions, arguments: dict[str, Any]
) -> Any | None:
    """The output of the model's ``forward`` for the packed row; ``None`` from now on for a model that cannot run it."""
    try:
        with attending(model, packed) as row:
            return forward(**arguments | row)
    except CannotShareError as error:
        model._liger_losses_head = replace(model._liger_losses_head, share_prompts=False)
        _say(model, f"prompts are repeated: {error}")
        return None


@torch.compiler.disable
def _say(model: Any, reason: str) -> None:
    warn(f"enable(share_prompts=True): for {type(model).__name__}, {reason}." + see("packed-completions"))
