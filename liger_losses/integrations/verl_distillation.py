"""verl's top-k distillation (``loss_mode=forward_kl_topk``), installed together with its heads.

With ``use_fused_kernels=True``, its FSDP and Megatron engines then distil without the logits: the head's call that
answers the log-probabilities also returns those of the teacher's columns. N tokens, K columns of a teacher.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.integrations.replacements import Replacement, Replacements
from liger_losses.integrations.token_statistics import logps_and_entropy, token_statistics

_FSDP, _FSDP_ENGINE = "verl.trainer.distillation.fsdp.losses", "verl.workers.engine.fsdp.transformer_impl"
_MEGATRON, _MEGATRON_ENGINE = (name.replace("fsdp", "megatron") for name in (_FSDP, _FSDP_ENGINE))
_MEGATRON_HEAD = "verl.models.mcore.model_forward_fused"


@dataclass
class _Distilled:
    """A micro-batch that is distilled while its head computes log-probabilities.

    Args:
        entropy: whether entropies are wanted.
        columns, teacher: the teacher's ``[1, N, K]``, and their log-probabilities, for the tokens that the head gets.
        student: the log-probabilities ``[1, N, K]`` that the head has found.
        data, loss: Megatron's micro-batch and loss function.
        losses: what is to be returned with Megatron's log-probabilities.
    """

    entropy: bool
    columns: Tensor | None = None
    teacher: Tensor | None = None
    student: Tensor | None = None
    data: Any = None
    loss: Callable[..., dict[str, Tensor]] | None = None
    losses: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> torch.Size:
        """As verl asks the logits, in whose place this goes to its loss function."""
        assert self.student is not None
        return self.student.shape


#: ``batch``: the one that this thread is in, or ``None``.
_thread = threading.local()


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
    batch: _Distilled | None = getattr(_thread, "batch", None)
    if batch is None or batch.columns is None:
        return logps_and_entropy(hidden_states, weight, labels, temperature, group)
    shape, columns = hidden_states.shape[:-1], batch.columns
    tokens = columns.shape[:-1].numel()
    if tokens != shape.numel():
        raise ValueError(
            f"the teacher's columns are of {tokens} tokens, the student's of {shape.numel()}: they must be of the same "
            "packed sequences."
        )
    names = ("logp", "selected_logps")
    selected = columns.reshape(*shape, columns.shape[-1])
    found = token_statistics(hidden_states, weight, labels, names, temperature, group, selected=selected)
    entropy = None
    if batch.entropy:
        entropy = token_statistics(hidden_states, weight, labels, ("entropy",), temperature, group).entropy
    logps, student = _Tie.apply(found.logp, found.selected_logps)
    batch.student = student.reshape(columns.shape)
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
    """verl's ``compute_forward_kl_topk``, which takes the log-probabilities of the teacher's columns too."""

    @functools.wraps(original)
    def compute_forward_kl_topk(student_logits: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(student_logits, _Distilled):
            return original(student_logits, *args, **kwargs)
        student, teacher = student_logits.student, student_logits.teacher
        assert student is not None
        assert teacher is not None
        config = kwargs["config"] if "config" in kwargs else args[2]
        losses, *clamped = forward_kl(student, teacher, config.distillation_loss.log_prob_min_clamp)
        if module.__name__ == _MEGATRON:  # whose masses are those of what it clamps
            student, teacher = clamped
        masses = [logps.detach().float().exp().sum(-1) for logps in (student, teacher)]
        return {"distillation_losses": losses, "student_mass": masses[0], "teacher_mass": masses[1]}

    return compute_forward_kl_topk


def _asked(module: Any, data: Any, key: str, default: bool = False) -> bool:
    return bool(module.tu.get_non_tensor_data(data=data, key=key, default=default))


def _inputs_with_teacher(original: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """FSDP's ``prepare_model_inputs``, which keeps the teacher for the head's call."""

    @functools.wraps(original)
    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        _thread.batch = None
        inputs = original(self, micro_batch)
        asked = functools.partial(_asked, module, micro_batch)
        # Without packed sequences, the engine reads no losses from a fused head.
        packed = asked("use_fused_kernels") and asked("use_remove_padding", True)
        if packed and asked("distillation_use_topk") and "teacher_ids" in micro_batch.keys():  # noqa: SIM118
            parts = [micro_batch[name].values().unsqueeze(0) for name in ("teacher_ids", "teacher_logprobs")]
            if self.use_ulysses_sp:
                from verl.utils.ulysses import slice_input_tensor

                parts = [slice_input_tensor(part, dim=1) for part in parts]
            _thread.batch = _Distilled(asked("calculate_entropy"), parts[0].long(), parts[1])
        return inputs

    return prepare_model_inputs


def _outputs_with_loss(original: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """FSDP's ``prepare_model_outputs``, which finds the distillation's losses where it looks for them."""

    @functools.wraps(original)
    def prepare_model_outputs(
        self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        batch, _thread.batch = getattr(_thread, "batch", None), None
        if batch is not None and batch.student is not None and logits_processor_func is not None:
            losses = logits_processor_func(student_logits=batch, data=micro_batch)
            output.fused_linear_aux = SimpleNamespace(**losses)
        return original(self, output, output_args, micro_batch, logits_processor_func)

    return prepare_model_outputs


def _step_with_loss(original: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Megatron's ``forward_step``, which returns the distillation's losses with the log-probabilities."""

    @functools.wraps(original)
    def forward_step(
        self: Any, batch_iter: Any, model: Any, logits_processor_func: Any, *args: Any, **kwargs: Any
    ) -> Any:
        data = next(batch_iter)
        asked = functools.partial(_asked, module, data)
        fused = asked("use_fused_kernels", self.engine_config.use_fused_kernels) and asked("distillation_use_topk")
        batch = None
        if fused and logits_processor_func is not None and "teacher_ids" in data.keys():  # noqa: SIM118
            batch = _Distilled(asked("calculate_entropy"), data=data, loss=logits_processor_func)
        _thread.batch = batch
        try:
            output, *others = original(self, iter([data]), model, logits_processor_func, *args, **kwargs)
        finally:
            _thread.batch = None
        if batch is not None and batch.losses:
            output.update(batch.losses)
        return output, *others

    return forward_step


def _labels_with_teacher(original: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """``preprocess_thd_engine`` of Megatron's fused head: what it does to the labels, it does to the teacher."""

    @functools.wraps(original)
    def preprocess_thd_engine(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(input_ids, *args, **kwargs)
        batch: _Distilled | None = getattr(_thread, "batch", None)
        if batch is not None and kwargs.get("need_roll"):
            kwargs["need_roll"] = False
            columns, teacher = (
                original(batch.data[name].to(input_ids.device), *args, **kwargs)[0]
                for name in ("teacher_ids", "teacher_logprobs")
            )
            batch.columns, batch.teacher = columns.long(), teacher
        return found

    return preprocess_thd_engine


def _logps_with_loss(original: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """``postprocess_thd_engine`` of Megatron's fused head: what it does to the log-probabilities, to the losses."""

    @functools.wraps(original)
    def postprocess_thd_engine(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        batch: _Distilled | None = getattr(_thread, "batch", None)
        if batch is not None and batch.student is not None and not batch.losses and batch.loss is not None:
            losses = batch.loss(student_logits=batch, data=batch.data, data_format="thd")
            batch.losses = {name: original(value, *args, **kwargs) for name, value in losses.items()}
        return original(output, *args, **kwargs)

    return postprocess_thd_engine


REPLACEMENTS = Replacements(
    "verl",
    "0.9.1",
    Replacement(_FSDP, "compute_forward_kl_topk", _loss_of_columns),
    Replacement(_FSDP_ENGINE, "FSDPEngineWithLMHead.prepare_model_inputs", _inputs_with_teacher),
    Replacement(_FSDP_ENGINE, "FSDPEngineWithLMHead.prepare_model_outputs", _outputs_with_loss),
    Replacement(_MEGATRON, "compute_forward_kl_topk", _loss_of_columns),
    Replacement(_MEGATRON_ENGINE, "MegatronEngineWithLMHead.forward_step", _step_with_loss),
    Replacement(_MEGATRON_HEAD, "preprocess_thd_engine", _labels_with_teacher),
    Replacement(_MEGATRON_HEAD, "postprocess_thd_engine", _logps_with_loss),
)
