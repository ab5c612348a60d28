"""verl's distillation in its FSDP engine, installed together with its heads: both need ``use_fused_kernels=True``.

With ``loss_mode=forward_kl_topk``, the call of the head that computes the log-probabilities also returns the
log-probabilities of the teacher's columns, without the logits. With one of :data:`MODES`, the teacher sends its hidden
states, and that call returns a divergence over the whole vocabulary. N tokens, K columns of a teacher, Ht its hidden
size.
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
from torch import Tensor

from liger_losses.chunked.engine import linear_divergence
from liger_losses.chunked.engine.teachers import Teacher
from liger_losses.integrations.token_statistics import token_statistics
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.places import Place, around

LOSSES, ENGINE = "verl.trainer.distillation.fsdp.losses", "verl.workers.engine.fsdp.transformer_impl"
REGISTRY = "verl.trainer.distillation.losses"
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
        entropy: whether entropies are wanted.
        columns, teacher: the teacher's ``[1, N, K]``, and their log-probabilities, for the tokens that the head gets;
            or anything ``[1, N, 1]``, and the teacher's hidden states ``[1, N, Ht]``.
        mode: where they are hidden states, the divergence and the folder of the teacher's checkpoint.
        student: the log-probabilities ``[1, N, K]``, or the divergences ``[1, N]``, that the head has found.
    """

    entropy: bool
    columns: Tensor
    teacher: Tensor
    mode: tuple[Divergence, str] | None = None
    student: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape that verl reads from logits, instead of which its loss function gets this."""
        return self.columns.shape


#: ``mode``: of the step that this thread is in, as in :class:`_Distilled`; ``batch``: its micro-batch, or ``None``.
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


def head_statistics(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropies of a micro-batch, and, if it is distilled, what its loss needs.

    Args:
        hidden_states, weight, labels, temperature, group: as in :func:`token_statistics`.

    Raises:
        ValueError: the teacher's columns are of another number of tokens.
    """
    batch: _Distilled | None = getattr(_thread, "batch", None)
    if batch is None:
        found = token_statistics(hidden_states, weight, labels, temperature=temperature, group=group)
        return found.logp, found.entropy
    shape, columns = hidden_states.shape[:-1], batch.columns
    tokens = columns.shape[:-1].numel()
    if tokens != shape.numel():
        raise ValueError(
            f"the teacher's columns have {tokens} tokens, the student's hidden states {shape.numel()}: pass the "
            "columns of the same packed sequences."
        )
    if batch.mode is not None:
        divergence, folder = batch.mode
        head = teacher_head(folder, hidden_states.device, hidden_states.dtype)
        teacher = Teacher(batch.teacher.reshape(*shape, -1).to(hidden_states.dtype), head)
        # As verl's logits: the student's are divided by the temperature, the teacher's are not.
        transform = LogitTransform(logit_scale=1 / float(temperature))
        found = linear_divergence(
            hidden_states, weight, labels.long(), teacher, divergence, logp=True, transform=transform
        )
        logps, student = _Tie.apply(found.logp, found.divergence)
        batch.student = student.reshape(columns.shape[:-1])
    else:
        names, selected = ("logp", "selected_logps"), columns.reshape(*shape, columns.shape[-1])
        found = token_statistics(hidden_states, weight, labels, names, temperature, group, selected)
        logps, student = _Tie.apply(found.logp, found.selected_logps)
        batch.student = student.reshape(columns.shape)
    entropy = None
    if batch.entropy:
        entropy = token_statistics(hidden_states, weight, labels, ("entropy",), temperature, group).entropy
    return logps, entropy


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


def _loss_of_columns(original: Callable[..., Any], student_logits: Any, *args: Any, **kwargs: Any) -> Any:
    """verl's ``compute_forward_kl_topk``, which takes the log-probabilities of the teacher's columns too.

    ``sum_k q_k (log q_k - log p_k)`` over the teacher's columns; neither distribution sums to 1. Divergences over the
    whole vocabulary are returned as they are, with masses of 1.
    """
    if not isinstance(student_logits, _Distilled):
        return original(student_logits, *args, **kwargs)
    assert student_logits.student is not None
    if student_logits.mode is not None:
        ones = torch.ones_like(student_logits.student)
        return {"distillation_losses": student_logits.student, "student_mass": ones, "teacher_mass": ones}
    config = kwargs["config"] if "config" in kwargs else args[2]
    lowest = config.distillation_loss.log_prob_min_clamp
    student, teacher = student_logits.student.float(), student_logits.teacher.float()
    masses = [logps.detach().exp().sum(-1) for logps in (student, teacher)]
    if lowest is not None:
        student, teacher = student.clamp_min(lowest), teacher.clamp_min(lowest)
    losses = (teacher.exp() * (teacher - student)).sum(-1)
    return {"distillation_losses": losses, "student_mass": masses[0], "teacher_mass": masses[1]}


def _asked(data: Any, key: str, default: bool = False) -> bool:
    from verl.utils import tensordict_utils

    return bool(tensordict_utils.get_non_tensor_data(data=data, key=key, default=default))


def _inputs_with_teacher(original: Callable[..., Any], self: Any, micro_batch: Any) -> Any:
    """``prepare_model_inputs``, which keeps the teacher for the call of the head."""
    _thread.batch = None
    inputs = original(self, micro_batch)
    asked = functools.partial(_asked, micro_batch)
    # Without packed sequences, the engine reads no losses from a fused head.
    packed = asked("use_fused_kernels") and asked("use_remove_padding", True)
    if packed and asked("distillation_use_topk") and "teacher_ids" in micro_batch.keys():  # noqa: SIM118
        parts = [micro_batch[name].values().unsqueeze(0) for name in ("teacher_ids", "teacher_logprobs")]
        if self.use_ulysses_sp:
            from verl.utils.ulysses import slice_input_tensor

            parts = [slice_input_tensor(part, dim=1) for part in parts]
        mode = getattr(_thread, "mode", None)
        _thread.batch = _Distilled(asked("calculate_entropy"), parts[0].long(), parts[1], mode)
    return inputs


def _step_of_mode(
    original: Callable[..., Any], self: Any, micro_batch: Any, loss_function: Any, forward_only: bool
) -> Any:
    """``forward_step``, which notes the loss mode for the call of the head."""
    config: Any = getattr(loss_function, "keywords", {}).get("distillation_config")
    name = None if config is None else config.distillation_loss.loss_mode
    _thread.mode = None
    if name in MODES:
        if not _asked(micro_batch, "use_fused_kernels"):
            raise ValueError(f"loss_mode={name} needs use_fused_kernels=True: it takes hidden states, not logits.")
        folders = [teacher.model_path for teacher in config.teacher_models.values()]
        if len(folders) != 1:
            raise ValueError(f"loss_mode={name} takes one teacher, got {len(folders)}.")
        _thread.mode = MODES[name], folders[0]
    return original(self, micro_batch, loss_function, forward_only)


def _with_modes(registry: Mapping[str, Any]) -> dict[str, Any]:
    """verl's registry of loss modes, with :data:`MODES`, whose losses also come from the engine."""
    return {**registry, **dict.fromkeys(MODES, registry["forward_kl_topk"])}


def _outputs_with_loss(
    original: Callable[..., Any], self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
) -> Any:
    """``prepare_model_outputs``, which finds the distillation's losses where it looks for them."""
    batch, _thread.batch = getattr(_thread, "batch", None), None
    if batch is not None and batch.student is not None and logits_processor_func is not None:
        losses = logits_processor_func(student_logits=batch, data=micro_batch)
        output.fused_linear_aux = SimpleNamespace(**losses)
    return original(self, output, output_args, micro_batch, logits_processor_func)


PLACES = (
    *(Place(REGISTRY, f"DISTILLATION_{kind}_REGISTRY", _with_modes) for kind in ("LOSS", "SETTINGS")),
    Place(LOSSES, "compute_forward_kl_topk", around(_loss_of_columns), takes=("student_logits", "config")),
    Place(ENGINE, "FSDPEngineWithLMHead.forward_step", around(_step_of_mode), takes=("micro_batch", "loss_function")),
    Place(ENGINE, "FSDPEngineWithLMHead.prepare_model_inputs", around(_inputs_with_teacher), takes=("micro_batch",)),
    Place(
        ENGINE,
        "FSDPEngineWithLMHead.prepare_model_outputs",
        around(_outputs_with_loss),
        takes=("output", "output_args", "micro_batch", "logits_processor_func"),
    ),
)
