"""verl's fused heads, computed by this library, with what verl's own refuse in its FSDP engine: the sum of squared
probabilities (``calculate_sum_pi_squared``), and a temperature per sample.

They need ``use_fused_kernels=True``, and :func:`install` in each of verl's processes.
``fused_kernel_options.impl_backend`` then makes no difference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from liger_losses.chunked import Head, linear_statistics
from liger_losses.integrations.replacements import Replacements, announce
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.places import Place, around

#: Of this thread: ``wanted``, whether the head computes the sums of squared probabilities, and ``sums``, the result.
_thread = threading.local()


def fused_linear_for_ppo(
    self: nn.Module | None,
    hidden_states: Tensor,
    vocab_weights: Tensor,
    input_ids: Tensor,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Replaces ``FusedLinearForPPO.forward``: log-probabilities and entropies, differentiable, without the logits.

    Args:
        hidden_states: ``[..., H]``.
        vocab_weights: ``[V, H]``, or this rank's rows of it, any number of them, with ``group``.
        input_ids: ``[...]``, the labels, of the whole vocabulary; tokens labelled -100 get 0.
        temperature: what the logits are divided by: a number, or one for each token.
        group: the ranks that share the vocabulary. All have the same hidden states and labels, and get the same
            results. Each gets its columns' part of the hidden states' gradient, as from verl's own head: Megatron sums
            them where it gathers the sequence.

    Returns:
        Two tensors ``[...]``, fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit together, labels outside the vocabulary.
    """
    shape, group = hidden_states.shape[:-1], None if group is None or dist.get_world_size(group) == 1 else group
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(shape) if temperature.numel() != 1 else float(temperature)
    head = Head(vocab_weights, transform=LogitTransform(temperature), group=group).with_partial_gradients()
    wanted = getattr(_thread, "wanted", False)
    names = ("logp", "entropy", "log_sum_sq_probs") if wanted else ("logp", "entropy")
    found = linear_statistics(hidden_states, head, input_ids.long().reshape(shape), names)
    if wanted:
        _thread.sums = found.log_sum_sq_probs.exp()
    return found.logp, found.entropy


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Replaces ``linear_cross_entropy``: :func:`fused_linear_for_ppo` of all tokens, flat.

    Args:
        reduction: of the log-probabilities: ``none``, ``sum`` or ``mean``.

    Raises:
        ValueError: another reduction.
    """
    if reduction.lower() not in ("none", "sum", "mean"):
        raise ValueError(f"reduction must be none, sum or mean, got {reduction!r}.")
    hidden = hidden.reshape(-1, hidden.shape[-1])
    logps, entropy = fused_linear_for_ppo(None, hidden, weight, labels, temperature, dist_process_group)
    return {"none": logps, "sum": logps.sum(), "mean": logps.mean()}[reduction.lower()], entropy


def _asked(batch: Any, key: str, default: bool = False) -> bool:
    from verl.utils import tensordict_utils

    return bool(tensordict_utils.get_non_tensor_data(data=batch, key=key, default=default))


def _wants_sums(batch: Any) -> bool:
    return _asked(batch, "use_fused_kernels") and _asked(batch, "calculate_sum_pi_squared")


def _with(batch: Any, **flags: bool) -> Any:
    """A shallow copy of a micro-batch with other flags."""
    from verl.utils import tensordict_utils

    batch = batch.copy()
    tensordict_utils.assign_non_tensor(batch, **flags)
    return batch


def _model_inputs(original: Callable[..., Any], self: Any, micro_batch: Any) -> Any:
    """``prepare_model_inputs``: verl's fused heads take no temperature per sample, but its logits do, as one per token,
    with Ulysses' slices and padding: the head gets that one."""
    _thread.wanted = _wants_sums(micro_batch)
    if not _asked(micro_batch, "use_fused_kernels") or not isinstance(micro_batch["temperature"], Tensor):
        return original(self, micro_batch)
    inputs, others = original(self, _with(micro_batch, use_fused_kernels=False))
    if _asked(micro_batch, "use_remove_padding", True):
        labels, temperature = others["input_ids_rmpad_rolled"], others["temperature_rmpad"]
        head = {"shift_labels": labels.unsqueeze(0), "temperature": temperature.unsqueeze(0)}
    else:
        head = {"temperature": others["temperature"][:, None].expand_as(inputs["input_ids"])}
    return inputs | head | {"return_dict": True}, others


def _model_outputs(
    original: Callable[..., Any], self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
) -> Any:
    """``prepare_model_outputs``: verl lays the sums of squared probabilities out as it does log-probabilities."""
    if not _wants_sums(micro_batch):
        return original(self, output, output_args, micro_batch, logits_processor_func)
    others = _with(micro_batch, calculate_sum_pi_squared=False)
    outputs = original(self, output, output_args, others, logits_processor_func)
    alone = _with(others, calculate_entropy=False)
    sums, _thread.sums = SimpleNamespace(log_probs=_thread.sums), None
    outputs["sum_pi_squared"] = original(self, sums, output_args, alone, logits_processor_func)["log_probs"]
    return outputs


_TORCH_HEAD = "verl.utils.experimental.torch_functional"
_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
#: The module of the second head's function, and those that import it by name.
_TRITON_HEAD = (
    "verl.utils.kernel.linear_cross_entropy",
    *("verl.models.mcore.model_forward_fused", "verl.models.mcore.model_forward_1f1b_overlap"),
)


def _of_engine(method: str, function: Callable[..., Any], *takes: str) -> Place:
    return Place(_ENGINE, f"FSDPEngineWithLMHead.{method}", around(function), takes=takes)


REPLACEMENTS = Replacements(
    "verl",
    "0.9",
    Place(_TORCH_HEAD, "FusedLinearForPPO.forward", lambda original: fused_linear_for_ppo, fused_linear_for_ppo),
    *(Place(module, "linear_cross_entropy", lambda original: linear_cross_entropy) for module in _TRITON_HEAD),
    _of_engine("prepare_model_inputs", _model_inputs, "micro_batch"),
    _of_engine("prepare_model_outputs", _model_outputs, "output", "output_args", "logits_processor_func"),
)


def install() -> None:
    """Replace verl's fused heads, now or when verl imports them.

    The heads are ``FusedLinearForPPO.forward``, of the FSDP engine with the backends ``torch`` and ``liger``, and
    ``linear_cross_entropy``, of the FSDP engine with the backend ``triton`` and of the Megatron engine.
    """
    announce("verl", "0.9", "the fused heads")
    REPLACEMENTS.install()


def uninstall() -> None:
    """Restore what :func:`install` replaced."""
    REPLACEMENTS.uninstall()
