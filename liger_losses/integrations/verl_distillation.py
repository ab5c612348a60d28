"""verl's top-k distillation (``loss_mode=forward_kl_topk``), installed together with its heads.

With ``use_fused_kernels=True``, its FSDP engine distils without the logits: the head's call that answers the
log-probabilities also returns those of the teacher's columns. Without it, and in its Megatron engine, the loss is
computed from the logits that the engine has. N tokens, K columns of a teacher, V vocabulary size.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.integrations.seams import Seam, Seams
from liger_losses.integrations.token_statistics import logps_and_entropy, token_statistics

_FSDP, _FSDP_ENGINE = "verl.trainer.distillation.fsdp.losses", "verl.workers.engine.fsdp.transformer_impl"
#: Of the micro-batch that this thread is in: ``columns [N, K]`` of the teacher, whether ``entropy`` is wanted, and what
#: the head has found, ``selected [N, K]``.
_thread = threading.local()


class StudentColumns:
    """The student's log-probabilities ``[1, N, K]`` of the teacher's columns, in the place of its logits."""

    def __init__(self, logps: Tensor) -> None:
        self.logps, self.shape = logps, logps.shape


def answer(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropies of a micro-batch, and, if it is distilled, what its loss needs.

    Args:
        hidden_states, weight, labels, temperature, group: as in :func:`logps_and_entropy`.

    Raises:
        ValueError: the teacher's columns are of another number of tokens.
    """
    columns = getattr(_thread, "columns", None)
    if columns is None:
        return logps_and_entropy(hidden_states, weight, labels, temperature, group)
    shape = hidden_states.shape[:-1]
    if len(columns) != shape.numel():
        raise ValueError(f"the teacher's columns are of {len(columns)} tokens, the student's of {shape.numel()}.")
    columns = columns.view(*shape, -1)
    names = ("logp", "selected_logps")
    found = token_statistics(hidden_states, weight, labels, names, temperature, group, selected=columns)
    entropy = None
    if _thread.entropy:
        entropy = token_statistics(hidden_states, weight, labels, ("entropy",), temperature, group).entropy
    logps, _thread.selected = _Tie.apply(found.logp, found.selected_logps)
    return logps, entropy


class _Tie(torch.autograd.Function):
    """Two tensors as they are, whose gradients arrive here together, before the head's backward.

    Hooks on the model's output, the first one, are then run whichever of the two has a gradient: FSDP's gathers the
    weight.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, other: Tensor) -> Any:
        return output.view_as(output), other.view_as(other)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads


def forward_kl(student: Tensor, teacher: Tensor, lowest: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """``sum_k q_k (log q_k - log p_k)`` over the teacher's columns, neither distribution summing to 1.

    Args:
        student: ``log p [..., K]``.
        teacher: ``log q [..., K]``.
        lowest: log-probabilities below are taken as this.

    Returns:
        The loss ``[...]``, and the log-probabilities that it was taken of.
    """
    student, teacher = student.float(), teacher.float()
    if lowest is not None:
        student, teacher = student.clamp_min(lowest), teacher.clamp_min(lowest)
    return (teacher.exp() * (teacher - student)).sum(-1), student, teacher


def _loss_of_columns(original: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """FSDP's ``compute_forward_kl_topk``, which takes :class:`StudentColumns` too."""

    @functools.wraps(original)
    def compute_forward_kl_topk(
        student_logits: Any, teacher_topk_log_probs: Tensor, teacher_topk_ids: Tensor, config: Any, data_format: str
    ) -> dict[str, Tensor]:
        if not isinstance(student_logits, StudentColumns):
            return original(student_logits, teacher_topk_log_probs, teacher_topk_ids, config, data_format)
        teacher = teacher_topk_log_probs.values().unsqueeze(0)
        if module.get_ulysses_sequence_parallel_world_size() > 1:
            teacher = module.slice_input_tensor(teacher, dim=1)
        student = student_logits.logps
        losses, *_ = forward_kl(student, teacher, config.distillation_loss.log_prob_min_clamp)
        return {
            "distillation_losses": losses,
            "student_mass": student.detach().exp().sum(-1),
            "teacher_mass": teacher.float().exp().sum(-1),
        }

    return compute_forward_kl_topk


def _inputs_with_teacher(original: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """The engine's ``prepare_model_inputs``, which keeps the teacher's columns for the head's call."""

    @functools.wraps(original)
    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        _thread.columns = _thread.selected = None
        inputs = original(self, micro_batch)

        def asked(key: str, default: bool = False) -> bool:
            return module.tu.get_non_tensor_data(data=micro_batch, key=key, default=default)

        # Without packed sequences, the engine reads no losses from a fused head.
        packed = asked("use_fused_kernels") and asked("use_remove_padding", True)
        if packed and asked("distillation_use_topk") and "teacher_ids" in micro_batch.keys():  # noqa: SIM118
            columns = micro_batch["teacher_ids"].values()
            if self.use_ulysses_sp:
                from verl.utils.ulysses import slice_input_tensor

                columns = slice_input_tensor(columns, dim=0)
            _thread.columns, _thread.entropy = columns.long(), asked("calculate_entropy")
        return inputs

    return prepare_model_inputs


def _outputs_with_loss(original: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """The engine's ``prepare_model_outputs``, which finds the distillation's losses where it looks for them."""

    @functools.wraps(original)
    def prepare_model_outputs(
        self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        selected = getattr(_thread, "selected", None)
        _thread.columns = _thread.selected = None
        if selected is not None and logits_processor_func is not None:
            student = StudentColumns(selected.flatten(0, -2).unsqueeze(0))
            losses = logits_processor_func(student_logits=student, data=micro_batch)
            output.fused_linear_aux = SimpleNamespace(**losses)
        return original(self, output, output_args, micro_batch, logits_processor_func)

    return prepare_model_outputs


SEAMS = Seams(
    "verl",
    "0.9.1",
    Seam(_FSDP, "compute_forward_kl_topk", _loss_of_columns),
    Seam(_FSDP_ENGINE, "FSDPEngineWithLMHead.prepare_model_inputs", _inputs_with_teacher),
    Seam(_FSDP_ENGINE, "FSDPEngineWithLMHead.prepare_model_outputs", _outputs_with_loss),
)
