"""verl's top-k distillation (``loss_mode=forward_kl_topk``) in its FSDP engine, installed together with its heads.

With ``use_fused_kernels=True``, the engine then distils without the logits: the call of the head that computes the
log-probabilities also returns those of the teacher's columns. N tokens, K columns of a teacher.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.integrations.token_statistics import token_statistics
from liger_losses.places import Place

LOSSES, ENGINE = "verl.trainer.distillation.fsdp.losses", "verl.workers.engine.fsdp.transformer_impl"


@dataclass
class _Distilled:
    """A micro-batch that is distilled while its head computes log-probabilities.

    Args:
        entropy: whether entropies are wanted.
        columns, teacher: the teacher's ``[1, N, K]``, and their log-probabilities, for the tokens that the head gets.
        student: the log-probabilities ``[1, N, K]`` that the head has found.
    """

    entropy: bool
    columns: Tensor
    teacher: Tensor
    student: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape that verl reads from logits, instead of which its loss function gets this."""
        return self.columns.shape


#: ``batch``: the one that this thread is in, or ``None``.
_thread = threading.local()


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
            f"the teacher's columns are of {tokens} tokens, the student's of {shape.numel()}: they must be of the same "
            "packed sequences."
        )
    names = ("logp", "selected_logps")
    selected = columns.reshape(*shape, columns.shape[-1])
    found = token_statistics(hidden_states, weight, labels, names, temperature, group, selected)
    entropy = None
    if batch.entropy:
        entropy = token_statistics(hidden_states, weight, labels, ("entropy",), temperature, group).entropy
    logps, student = _Tie.apply(found.logp, found.selected_logps)
    batch.student = student.reshape(columns.shape)
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


def _loss_of_columns(original: Callable[..., Any]) -> Callable[..., Any]:
    """verl's ``compute_forward_kl_topk``, which takes the log-probabilities of the teacher's columns too.

    ``sum_k q_k (log q_k - log p_k)`` over the teacher's columns; neither distribution sums to 1.
    """

    @functools.wraps(original)
    def compute_forward_kl_topk(student_logits: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(student_logits, _Distilled):
            return original(student_logits, *args, **kwargs)
        assert student_logits.student is not None
        config = kwargs["config"] if "config" in kwargs else args[2]
        lowest = config.distillation_loss.log_prob_min_clamp
        student, teacher = student_logits.student.float(), student_logits.teacher.float()
        masses = [logps.detach().exp().sum(-1) for logps in (student, teacher)]
        if lowest is not None:
            student, teacher = student.clamp_min(lowest), teacher.clamp_min(lowest)
        losses = (teacher.exp() * (teacher - student)).sum(-1)
        return {"distillation_losses": losses, "student_mass": masses[0], "teacher_mass": masses[1]}

    return compute_forward_kl_topk


def _asked(data: Any, key: str, default: bool = False) -> bool:
    from verl.utils import tensordict_utils

    return bool(tensordict_utils.get_non_tensor_data(data=data, key=key, default=default))


def _inputs_with_teacher(original: Callable[..., Any]) -> Callable[..., Any]:
    """``prepare_model_inputs``, which keeps the teacher for the call of the head."""

    @functools.wraps(original)
    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
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
            _thread.batch = _Distilled(asked("calculate_entropy"), parts[0].long(), parts[1])
        return inputs

    return prepare_model_inputs


def _outputs_with_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """``prepare_model_outputs``, which finds the distillation's losses where it looks for them."""

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


PLACES = (
    Place(LOSSES, "compute_forward_kl_topk", _loss_of_columns, takes=("student_logits", "config")),
    Place(ENGINE, "FSDPEngineWithLMHead.prepare_model_inputs", _inputs_with_teacher, takes=("micro_batch",)),
    Place(
        ENGINE,
        "FSDPEngineWithLMHead.prepare_model_outputs",
        _outputs_with_loss,
        takes=("output", "output_args", "micro_batch", "logits_processor_func"),
    ),
)
