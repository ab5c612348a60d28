"""verl's fused heads and the distillation of its FSDP engine, computed by this library.

Both need ``use_fused_kernels=True``, and :func:`install` in each of verl's processes.
``fused_kernel_options.impl_backend`` then makes no difference.

In distillation with ``loss_mode=forward_kl_topk``, the call of the head that computes the log-probabilities also
computes the losses, without the logits. With one of :data:`MODES`, the teacher sends its hidden states, and the losses
are a divergence over the whole vocabulary. N tokens, K columns of a teacher, Ht its hidden size.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_losses.chunked import Head, Teacher, linear_divergence
from liger_losses.integrations.replacements import Replacements
from liger_losses.integrations.token_statistics import token_statistics
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.places import Place, around

#: Loss modes that verl gets: ``teacher_logprobs`` are then the teacher's last hidden states ``[tokens, Ht]``.
MODES = {
    "forward_kl_hidden_states": Divergence.forward_kl(),
    "reverse_kl_hidden_states": Divergence.reverse_kl(),
    "jsd_hidden_states": Divergence.mixture(0.5, 0.5, 0.5),
}
#: Where checkpoints of transformers have the head; the second is tied to the embeddings.
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")


@dataclass
class _Distilled:
    """A micro-batch that is distilled while its head computes log-probabilities.

    Args:
        config: verl's configuration of the distillation.
        entropy: whether entropies are wanted.
        columns, teacher: the teacher's ``[1, N, K]``, and their log-probabilities, for the tokens that the head gets;
            or with one of :data:`MODES` anything ``[1, N, 1]``, and the teacher's hidden states ``[1, N, Ht]``.
        losses: what the head has computed, ``[1, N]`` each, by the names of verl's outputs.
    """

    config: Any
    entropy: bool
    columns: Tensor
    teacher: Tensor
    losses: dict[str, Tensor] | None = None


#: Of this thread: ``config``, of the distillation of its step, or ``None``; ``batch``: its micro-batch, or ``None``.
_thread = threading.local()


@functools.lru_cache(maxsize=1)
def teacher_head(folder: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The head ``[V, Ht]`` of a checkpoint of transformers in safetensors, which stays on the device.

    Raises:
        ValueError: there is no such file, or no head in it.
    """
    from safetensors import safe_open

    index = Path(folder, "model.safetensors.index.json")
    files = (
        json.loads(index.read_text())["weight_map"] if index.exists() else dict.fromkeys(_HEADS, "model.safetensors")
    )
    for name in _HEADS:
        path = Path(folder, files.get(name, ""))
        if path.is_file():
            with safe_open(path, "pt", device=str(device)) as file:
                if name in file.keys():  # noqa: SIM118
                    return file.get_tensor(name).to(dtype)
    raise ValueError(
        f"the teacher's head is read from {' or '.join(_HEADS)} in model.safetensors, or the files of its index, but "
        f"{folder!r} has none of these; set the teacher's model_path to a folder that contains one of them."
    )


def fused_linear_for_ppo(
    self: nn.Module | None,
    hidden_states: Tensor,
    vocab_weights: Tensor,
    input_ids: Tensor,
    temperature: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Replaces ``FusedLinearForPPO.forward``: log-probabilities and entropies in the shape of ``input_ids``.

    If the micro-batch is distilled, it also computes the losses. ``group`` are the ranks that share the vocabulary.

    Raises:
        ValueError: the teacher's columns are of another number of tokens.
    """
    of_tokens = functools.partial(token_statistics, hidden_states, vocab_weights, input_ids)
    batch: _Distilled | None = getattr(_thread, "batch", None)
    if batch is None:
        found = of_tokens(temperature=temperature, group=group)
        return found.logp, found.entropy
    shape, columns, mode = hidden_states.shape[:-1], batch.columns, batch.config.distillation_loss.loss_mode
    if columns.shape[:-1].numel() != shape.numel():
        raise ValueError(
            f"the teacher's columns have {columns.shape[:-1].numel()} tokens, the student's hidden states "
            f"{shape.numel()}: pass the columns of the same packed sequences."
        )
    if mode in MODES:
        (teacher_model,) = batch.config.teacher_models.values()
        head = teacher_head(teacher_model.model_path, hidden_states.device, hidden_states.dtype)
        states = batch.teacher.reshape(*shape, batch.teacher.shape[-1])
        # As verl's logits: the student's are divided by the temperature, the teacher's are not.
        student = Head(vocab_weights, transform=LogitTransform(logit_scale=1 / float(temperature)))
        teacher = Teacher(states.to(hidden_states.dtype), head)
        of_both = linear_divergence(hidden_states, student, input_ids.long(), teacher, MODES[mode], logp=True)
        logps, losses = _Tie.apply(of_both.logp, of_both.divergence.reshape(columns.shape[:-1]))
        ones = torch.ones_like(losses)
        batch.losses = {"distillation_losses": losses, "student_mass": ones, "teacher_mass": ones}
    else:
        selected = columns.reshape(*shape, columns.shape[-1])
        found = of_tokens(("logp", "selected_logps"), temperature, group, selected)
        logps, student_logps = _Tie.apply(found.logp, found.selected_logps.reshape(columns.shape))
        batch.losses = _forward_kl(student_logps.float(), batch.teacher.float(), batch.config.distillation_loss)
    entropy = of_tokens(("entropy",), temperature, group).entropy if batch.entropy else None
    return logps, entropy


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Replaces ``linear_cross_entropy``: log-probabilities and entropies of all tokens, flat.

    Args:
        hidden, weight, labels, temperature, dist_process_group: as in
            :func:`liger_losses.integrations.token_statistics.token_statistics`.
        reduction: of the log-probabilities: ``none``, ``sum`` or ``mean``.

    Raises:
        ValueError: another reduction.
    """
    if reduction.lower() not in ("none", "sum", "mean"):
        raise ValueError(f"reduction must be none, sum or mean, got {reduction!r}.")
    hidden = hidden.reshape(-1, hidden.shape[-1])
    logps, entropy = fused_linear_for_ppo(None, hidden, weight, labels, temperature, dist_process_group)
    return {"none": logps, "sum": logps.sum(), "mean": logps.mean()}[reduction.lower()], entropy


class _Tie(torch.autograd.Function):
    """Two tensors as they are, whose gradients arrive here together, before the head's backward.

    Hooks on the model's output, the first one, then run whichever of the two has a gradient: FSDP's gathers the weight.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, other: Tensor) -> Any:
        return output.view_as(output), other.view_as(other)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads


def _forward_kl(student: Tensor, teacher: Tensor, loss_config: Any) -> dict[str, Tensor]:
    """As verl's ``compute_forward_kl_topk``: ``sum_k q_k (log q_k - log p_k)`` over the teacher's columns.

    Neither distribution sums to 1.
    """
    masses = [logps.detach().exp().sum(-1) for logps in (student, teacher)]
    if loss_config.log_prob_min_clamp is not None:
        student, teacher = (logps.clamp_min(loss_config.log_prob_min_clamp) for logps in (student, teacher))
    losses = (teacher.exp() * (teacher - student)).sum(-1)
    return {"distillation_losses": losses, "student_mass": masses[0], "teacher_mass": masses[1]}


def _asked(data: Any, key: str, default: bool = False) -> bool:
    from verl.utils import tensordict_utils

    return bool(tensordict_utils.get_non_tensor_data(data=data, key=key, default=default))


def _distilled_step(
    original: Callable[..., Any], self: Any, micro_batch: Any, loss_function: Any, forward_only: bool
) -> Any:
    """``forward_step``, which notes the configuration of the distillation for the call of the head."""
    config: Any = getattr(loss_function, "keywords", {}).get("distillation_config")
    _thread.config = config
    name = None if config is None else config.distillation_loss.loss_mode
    if name in MODES:
        if not _asked(micro_batch, "use_fused_kernels"):
            raise ValueError(f"loss_mode={name} needs use_fused_kernels=True: it takes hidden states, not logits.")
        if len(config.teacher_models) != 1:
            raise ValueError(f"loss_mode={name} takes one teacher, got {len(config.teacher_models)}.")
    return original(self, micro_batch, loss_function, forward_only)


def _inputs_with_teacher(original: Callable[..., Any], self: Any, micro_batch: Any) -> Any:
    """``prepare_model_inputs``, which keeps the teacher for the call of the head."""
    _thread.batch, config = None, getattr(_thread, "config", None)
    inputs = original(self, micro_batch)
    asked = functools.partial(_asked, micro_batch)
    # Without packed sequences, the engine reads no losses from a fused head.
    packed = config is not None and asked("use_fused_kernels") and asked("use_remove_padding", True)
    if packed and asked("distillation_use_topk") and "teacher_ids" in micro_batch.keys():  # noqa: SIM118
        parts = [micro_batch[name].values().unsqueeze(0) for name in ("teacher_ids", "teacher_logprobs")]
        if self.use_ulysses_sp:
            from verl.utils.ulysses import slice_input_tensor

            parts = [slice_input_tensor(part, dim=1) for part in parts]
        _thread.batch = _Distilled(config, asked("calculate_entropy"), parts[0].long(), parts[1])
    return inputs


def _outputs_with_losses(original: Callable[..., Any], self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
    """``prepare_model_outputs``, which finds the distillation's losses where it looks for them."""
    batch, _thread.batch = getattr(_thread, "batch", None), None
    if batch is not None and batch.losses is not None:
        output.fused_linear_aux = SimpleNamespace(**batch.losses)
    return original(self, output, *args, **kwargs)


def _with_modes(registry: Mapping[str, Any]) -> dict[str, Any]:
    """verl's registry of loss modes, with :data:`MODES`, whose losses also come from the engine."""
    return {**registry, **dict.fromkeys(MODES, registry["forward_kl_topk"])}


_TORCH_HEAD = "verl.utils.experimental.torch_functional"
_ENGINE, _REGISTRY = "verl.workers.engine.fsdp.transformer_impl", "verl.trainer.distillation.losses"
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
    "the fused heads and the top-k distillation",
    Place(_TORCH_HEAD, "FusedLinearForPPO.forward", lambda original: fused_linear_for_ppo, fused_linear_for_ppo),
    *(Place(module, "linear_cross_entropy", lambda original: linear_cross_entropy) for module in _TRITON_HEAD),
    *(Place(_REGISTRY, f"DISTILLATION_{kind}_REGISTRY", _with_modes) for kind in ("LOSS", "SETTINGS")),
    _of_engine("forward_step", _distilled_step, "micro_batch", "loss_function"),
    _of_engine("prepare_model_inputs", _inputs_with_teacher, "micro_batch"),
    _of_engine("prepare_model_outputs", _outputs_with_losses, "output", "micro_batch"),
)


def install() -> None:
    """Replace verl's fused heads and its distillation, now or when verl imports them.

    The heads are ``FusedLinearForPPO.forward``, of the FSDP engine with the backends ``torch`` and ``liger``, and
    ``linear_cross_entropy``, of the FSDP engine with the backend ``triton`` and of the Megatron engine.
    """
    REPLACEMENTS.install()


def uninstall() -> None:
    """Restore what :func:`install` replaced."""
    REPLACEMENTS.uninstall()
