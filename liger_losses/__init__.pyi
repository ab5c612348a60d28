"""Types for checkers and editors, written by tests/project/stubs.py (`make stubs`): do not edit."""

# mypy: disable-error-code="override, misc, overload-overlap, overload-cannot-match"
# pyright: reportIncompatibleMethodOverride=false, reportOverlappingOverload=false
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypedDict, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import TypeVar, Unpack

from liger_losses import functional as functional
from liger_losses import modules as modules
from liger_losses import trl as trl
from liger_losses.chunked import EngineOptions as EngineOptions
from liger_losses.chunked import Head as Head
from liger_losses.chunked import Largest as Largest
from liger_losses.chunked import QuantizedWeight as QuantizedWeight
from liger_losses.chunked import Statistics as Statistics
from liger_losses.chunked import Teacher as Teacher
from liger_losses.chunked import TeacherLogits as TeacherLogits
from liger_losses.chunked import Teachers as Teachers
from liger_losses.chunked import TeacherTopK as TeacherTopK
from liger_losses.chunked import TokenSupport as TokenSupport
from liger_losses.chunked import linear_labels_loss as linear_labels_loss
from liger_losses.chunked import linear_topk as linear_topk
from liger_losses.chunked import projected_teacher as projected_teacher
from liger_losses.chunked import register_quantized_weight as register_quantized_weight
from liger_losses.chunked import register_statistic as register_statistic
from liger_losses.chunked import set_default_workspace as set_default_workspace
from liger_losses.chunked import workspace as workspace
from liger_losses.chunked.assertions import assert_no_logits as assert_no_logits
from liger_losses.chunked.losses import base as _base
from liger_losses.chunked.losses import cross_entropy as _cross_entropy
from liger_losses.chunked.losses import distillation as _distillation
from liger_losses.chunked.losses import dpo as _dpo
from liger_losses.chunked.losses import minillm as _minillm
from liger_losses.chunked.losses import pairs as _pairs
from liger_losses.chunked.losses import policy as _policy
from liger_losses.chunked.losses import reference_free as _reference_free
from liger_losses.chunked.losses import unpaired as _unpaired
from liger_losses.chunked.losses.batches import AdaptiveEntropy as AdaptiveEntropy
from liger_losses.chunked.losses.columns import teacher_topk as teacher_topk
from liger_losses.chunked.losses.completion_loss import Completions as Completions
from liger_losses.chunked.losses.cross_entropy import CrossEntropyOutput as CrossEntropyOutput
from liger_losses.chunked.losses.cross_entropy import ManyHeadsMetrics as ManyHeadsMetrics
from liger_losses.chunked.losses.distillation import DistillationMetrics as DistillationMetrics
from liger_losses.chunked.losses.pairs import Pairs as Pairs
from liger_losses.chunked.losses.pairs import PreferenceMetrics as PreferenceMetrics
from liger_losses.chunked.losses.policy import PolicyMetrics as PolicyMetrics
from liger_losses.chunked.losses.policy import PolicyMetricsWithoutKL as PolicyMetricsWithoutKL
from liger_losses.chunked.losses.reference_free import ORPOMetrics as ORPOMetrics
from liger_losses.chunked.losses.registration import register_divergence as register_divergence
from liger_losses.chunked.losses.registration import register_objective as register_objective
from liger_losses.chunked.losses.unpaired import UnpairedMetrics as UnpairedMetrics
from liger_losses.chunked.teacher_files import TeacherFiles as TeacherFiles
from liger_losses.chunked.teacher_files import TeacherWriter as TeacherWriter
from liger_losses.kernels.divergence_forms import Divergence as Divergence
from liger_losses.kernels.logit_transform import LogitTransform as LogitTransform
from liger_losses.patching.loss_inputs import LossInputs as LossInputs
from liger_losses.patching.loss_inputs import loss_inputs as loss_inputs
from liger_losses.patching.patch import AutoLigerModelForCausalLM as AutoLigerModelForCausalLM
from liger_losses.patching.patch import patch as patch
from liger_losses.patching.patch import unpatch as unpatch
from liger_losses.patching.report import PatchReport as PatchReport
from liger_losses.prompts.attention import CannotShareError as CannotShareError
from liger_losses.prompts.packing import PackedCompletions as PackedCompletions
from liger_losses.prompts.packing import pack_completions as pack_completions
from liger_losses.prompts.packing import pack_sequences as pack_sequences
from liger_losses.sequences import split_by_coefficient as split_by_coefficient

R = TypeVar("R", default=Tensor)
__version__: str
__all__ = [
    "AdaptiveEntropy",
    "AutoLigerModelForCausalLM",
    "CannotShareError",
    "ChunkedLoss",
    "Completions",
    "CrossEntropyOutput",
    "DistillationLoss",
    "DistillationMetrics",
    "Divergence",
    "EngineOptions",
    "Head",
    "Largest",
    "LigerFusedLinearAlphaBetaLoss",
    "LigerFusedLinearBCOLoss",
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKLLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearMiniLLMLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearReverseKLLoss",
    "LigerFusedLinearSimPOLoss",
    "LigerFusedLinearTVDLoss",
    "LogitTransform",
    "LossInputs",
    "ManyHeadsMetrics",
    "ORPOMetrics",
    "PackedCompletions",
    "Pairs",
    "PatchReport",
    "PolicyMetrics",
    "PolicyMetricsWithoutKL",
    "PreferenceLoss",
    "PreferenceMetrics",
    "QuantizedWeight",
    "Statistics",
    "Teacher",
    "TeacherFiles",
    "TeacherLogits",
    "TeacherTopK",
    "TeacherWriter",
    "Teachers",
    "TokenSupport",
    "UnpairedMetrics",
    "assert_no_logits",
    "functional",
    "linear_divergence",
    "linear_divergence_loss",
    "linear_labels_loss",
    "linear_logps",
    "linear_statistics",
    "linear_token_loss",
    "linear_topk",
    "loss_inputs",
    "pack_completions",
    "pack_sequences",
    "patch",
    "projected_teacher",
    "register_divergence",
    "register_objective",
    "register_quantized_weight",
    "register_statistic",
    "set_default_workspace",
    "split_by_coefficient",
    "teacher_topk",
    "unpatch",
    "workspace",
]

class _ChunkedLossOptions(TypedDict, total=False):
    logit_scale: float
    shift: Any
    compact: bool
    workspace: int | None
    backend: str | None
    group: dist.ProcessGroup | None

class _DistillationLossOptions(_ChunkedLossOptions, total=False):
    softcap: float | None
    accum_dtype: torch.dtype | None
    temperature_squared: bool
    top_k: int | None
    top_k_of: str
    tail: str
    entry_limit: float | None

class _PreferenceLossOptions(_ChunkedLossOptions, total=False):
    temperature: float
    softcap: float | None
    accum_dtype: torch.dtype | None

class ChunkedLoss(_base.ChunkedLoss):
    def __init__(
        self, *, ignore_index: int = ..., chunk_size: int | None = ..., **options: Unpack[_PreferenceLossOptions]
    ) -> None: ...
    def __call__(
        self,
        head: Tensor | nn.Module | Head,
        hidden_states: Tensor,
        labels: Tensor,
        bias: Tensor | None = ...,
        **inputs: Any,
    ) -> Any: ...

class DistillationLoss(ChunkedLoss, _distillation.DistillationLoss):
    def __init__(
        self,
        divergence: Divergence,
        weight_hard_loss: float = ...,
        weight_soft_loss: float = ...,
        ignore_index: int = ...,
        temperature: float = ...,
        compiled: bool = ...,
        chunk_size: int | None = ...,
        return_soft_hard_loss: bool = ...,
        **options: Unpack[_DistillationLossOptions],
    ) -> None: ...
    @overload
    def __call__(
        self,
        head: Tensor | nn.Module | Head,
        hidden_states: Tensor,
        labels: Tensor,
        teacher: Teacher | TeacherLogits | TeacherTopK | Teachers,
        *,
        bias: Tensor | None = ...,
        num_items_in_batch: Tensor | int | None = ...,
        temperature: Tensor | None = ...,
    ) -> tuple[Tensor, DistillationMetrics]: ...
    @overload
    def __call__(
        self,
        student_input: Tensor,
        student_weight: Tensor | nn.Module | Head,
        teacher_input: Tensor,
        teacher_weight: Tensor | nn.Module | Head,
        true_labels: Tensor,
        student_bias: Tensor | None = ...,
        teacher_bias: Tensor | None = ...,
        *,
        teacher: Teacher | TeacherLogits | TeacherTopK | Teachers = ...,
        bias: Tensor | None = ...,
        num_items_in_batch: Tensor | int | None = ...,
        temperature: Tensor | None = ...,
    ) -> Any: ...

class LigerFusedLinearCrossEntropyLoss(ChunkedLoss, _cross_entropy.LigerFusedLinearCrossEntropyLoss, Generic[R]):
    @overload
    def __init__(
        self: LigerFusedLinearCrossEntropyLoss[Tensor],
        ce_weight: Tensor | None = ...,
        ignore_index: int = ...,
        lse_square_scale: float = ...,
        label_smoothing: float = ...,
        reduction: str = ...,
        softcap: float | None = ...,
        return_z_loss: Literal[False] = ...,
        accum_dtype: torch.dtype | None = ...,
        use_token_scaling: bool = ...,
        return_token_accuracy: Literal[False] = ...,
        return_predicted_tokens: Literal[False] = ...,
        *,
        temperature: float = ...,
        chunk_size: int | None = ...,
        head_weights: Sequence[float] | None = ...,
        **options: Unpack[_ChunkedLossOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: LigerFusedLinearCrossEntropyLoss[Any],
        ce_weight: Tensor | None = ...,
        ignore_index: int = ...,
        lse_square_scale: float = ...,
        label_smoothing: float = ...,
        reduction: str = ...,
        softcap: float | None = ...,
        return_z_loss: bool = ...,
        accum_dtype: torch.dtype | None = ...,
        use_token_scaling: bool = ...,
        return_token_accuracy: bool = ...,
        return_predicted_tokens: bool = ...,
        *,
        temperature: float = ...,
        chunk_size: int | None = ...,
        head_weights: Sequence[float] | None = ...,
        **options: Unpack[_ChunkedLossOptions],
    ) -> None: ...
    @overload
    def __call__(
        self,
        head: Tensor | nn.Module | Head,
        hidden_states: Tensor,
        labels: Tensor,
        bias: Tensor | None = ...,
        *,
        num_items_in_batch: Tensor | int | None = ...,
        token_weights: Tensor | None = ...,
    ) -> R: ...
    @overload
    def __call__(
        self,
        head: Tensor | nn.Module | Head | Sequence[Tensor | nn.Module | Head],
        hidden_states: Tensor | Sequence[Tensor],
        labels: Tensor | Sequence[Tensor],
        bias: Tensor | Sequence[Tensor] | None = ...,
        *,
        num_items_in_batch: Any = ...,
        token_weights: Tensor | Sequence[Tensor] | None = ...,
    ) -> tuple[Any, ManyHeadsMetrics]: ...
    @overload
    def __call__(
        self,
        lin_weight: Tensor | nn.Module | Head,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = ...,
        *,
        num_items_in_batch: Tensor | int | None = ...,
        token_weights: Tensor | None = ...,
    ) -> R: ...
    @overload
    def __call__(
        self,
        lin_weight: Tensor | nn.Module | Head | Sequence[Tensor | nn.Module | Head],
        _input: Tensor | Sequence[Tensor],
        target: Tensor | Sequence[Tensor],
        bias: Tensor | Sequence[Tensor] | None = ...,
        *,
        num_items_in_batch: Any = ...,
        token_weights: Tensor | Sequence[Tensor] | None = ...,
    ) -> tuple[Any, ManyHeadsMetrics]: ...

class LigerFusedLinearMiniLLMLoss(ChunkedLoss, _minillm.LigerFusedLinearMiniLLMLoss):
    def __init__(
        self,
        gamma: float = ...,
        length_normalization: bool = ...,
        single_step: bool = ...,
        *,
        ignore_index: int = ...,
        chunk_size: int | None = ...,
        **options: Unpack[_PreferenceLossOptions],
    ) -> None: ...
    def __call__(
        self,
        head: Tensor | nn.Module | Head,
        hidden_states: Tensor,
        labels: Tensor,
        teacher: Teacher | TeacherLogits | TeacherTopK | Teachers,
        bias: Tensor | None = ...,
        *,
        old_logps: Tensor | None = ...,
    ) -> tuple[Tensor, DistillationMetrics]: ...

class LigerFusedLinearAlphaBetaLoss(DistillationLoss, _distillation.LigerFusedLinearAlphaBetaLoss):
    def __init__(
        self,
        alpha: float,
        beta: float | None = ...,
        weight_hard_loss: float = ...,
        weight_soft_loss: float = ...,
        ignore_index: int = ...,
        temperature: float = ...,
        compiled: bool = ...,
        chunk_size: int | None = ...,
        return_soft_hard_loss: bool = ...,
        **options: Unpack[_DistillationLossOptions],
    ) -> None: ...

class LigerFusedLinearCosineSimilarityLoss(DistillationLoss, _distillation.LigerFusedLinearCosineSimilarityLoss):
    def __init__(
        self,
        weight_hard_loss: float = ...,
        weight_soft_loss: float = ...,
        beta: float = ...,
        ignore_index: int = ...,
        temperature: float = ...,
        compiled: bool = ...,
        chunk_size: int | None = ...,
        return_soft_hard_loss: bool = ...,
        **options: Unpack[_DistillationLossOptions],
    ) -> None: ...

class LigerFusedLinearGRPOLoss(ChunkedLoss, _policy.LigerFusedLinearGRPOLoss):
    def __init__(
        self,
        beta: float = ...,
        compiled: bool = ...,
        use_ref_model: bool = ...,
        chunk_size: int | None = ...,
        epsilon_low: float = ...,
        epsilon_high: float | None = ...,
        loss_type: str = ...,
        max_completion_length: int | None = ...,
        importance_sampling_level: str = ...,
        sapo_temperature_pos: float = ...,
        sapo_temperature_neg: float = ...,
        temperature: float = ...,
        delta: float | None = ...,
        use_bias_correction_kl: bool = ...,
        vespo_k_pos: float = ...,
        vespo_lambda_pos: float = ...,
        vespo_k_neg: float = ...,
        vespo_lambda_neg: float = ...,
        *,
        ignore_index: int = ...,
        softcap: float | None = ...,
        accum_dtype: torch.dtype | None = ...,
        off_policy_mask_threshold: float | None = ...,
        kl_estimator: str = ...,
        normalizer: str = ...,
        token_mask: str = ...,
        mask_low: float | None = ...,
        mask_high: float | None = ...,
        log_ratio_penalty: float | None = ...,
        cispo_low: float = ...,
        fipo_half_life: float = ...,
        fipo_low: float = ...,
        fipo_high: float = ...,
        fipo_safe_ratio: float = ...,
        real_temperature: float = ...,
        cov_share: float = ...,
        cov_low: float = ...,
        cov_high: float = ...,
        cov_penalty: float = ...,
        objective_options: Mapping[str, float] | None = ...,
        top_entropy_quantile: float = ...,
        entropy_coef: float | AdaptiveEntropy = ...,
        **options: Unpack[_ChunkedLossOptions],
    ) -> None: ...
    @overload
    def __call__(
        self,
        head: Tensor | nn.Module | Head,
        hidden_states: Tensor,
        labels: Tensor,
        mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = ...,
        ref_per_token_logps: Tensor | None = ...,
        old_per_token_logps: Tensor | None = ...,
        ref_input: Tensor | None = ...,
        ref_weight: Tensor | nn.Module | Head | None = ...,
        ref_bias: Tensor | None = ...,
        vllm_is_ratio: Tensor | None = ...,
        num_items_in_batch: Tensor | int | None = ...,
        *,
        sampling_per_token_logps: Tensor | None = ...,
        support: TokenSupport | None = ...,
        temperature: Tensor | None = ...,
        prompts: Tensor | None = ...,
    ) -> tuple[Tensor, PolicyMetrics | PolicyMetricsWithoutKL]: ...
    @overload
    def __call__(
        self,
        head: Tensor | nn.Module | Head,
        hidden_states: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = ...,
        ref_per_token_logps: Tensor | None = ...,
        old_per_token_logps: Tensor | None = ...,
        ref_input: Tensor | None = ...,
        ref_weight: Tensor | nn.Module | Head | None = ...,
        ref_bias: Tensor | None = ...,
        vllm_is_ratio: Tensor | None = ...,
        num_items_in_batch: Tensor | int | None = ...,
        *,
        sampling_per_token_logps: Tensor | None = ...,
        support: TokenSupport | None = ...,
        temperature: Tensor | None = ...,
        prompts: Tensor | None = ...,
    ) -> tuple[Tensor, PolicyMetrics | PolicyMetricsWithoutKL]: ...
    @overload
    def __call__(
        self,
        _input: Tensor,
        lin_weight: Tensor | nn.Module | Head,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = ...,
        ref_per_token_logps: Tensor | None = ...,
        old_per_token_logps: Tensor | None = ...,
        ref_input: Tensor | None = ...,
        ref_weight: Tensor | nn.Module | Head | None = ...,
        ref_bias: Tensor | None = ...,
        vllm_is_ratio: Tensor | None = ...,
        num_items_in_batch: Tensor | int | None = ...,
        *,
        sampling_per_token_logps: Tensor | None = ...,
        support: TokenSupport | None = ...,
        temperature: Tensor | None = ...,
        prompts: Tensor | None = ...,
    ) -> tuple[Tensor, PolicyMetrics | PolicyMetricsWithoutKL]: ...

class LigerFusedLinearJSDLoss(DistillationLoss, _distillation.LigerFusedLinearJSDLoss):
    def __init__(
        self,
        weight_hard_loss: float = ...,
        weight_soft_loss: float = ...,
        beta: float = ...,
        ignore_index: int = ...,
        temperature: float = ...,
        compiled: bool = ...,
        chunk_size: int | None = ...,
        return_soft_hard_loss: bool = ...,
        *,
        convention: str = ...,
        **options: Unpack[_DistillationLossOptions],
    ) -> None: ...

class LigerFusedLinearKLLoss(DistillationLoss, _distillation.LigerFusedLinearKLLoss):
    def __init__(
        self,
        weight_hard_loss: float = ...,
        weight_soft_loss: float = ...,
        ignore_index: int = ...,
        temperature: float = ...,
        compiled: bool = ...,
        chunk_size: int | None = ...,
        return_soft_hard_loss: bool = ...,
        *,
        skew: float = ...,
        **options: Unpack[_DistillationLossOptions],
    ) -> None: ...

class LigerFusedLinearTVDLoss(DistillationLoss, _distillation.LigerFusedLinearTVDLoss):
    def __init__(
        self,
        weight_hard_loss: float = ...,
        weight_soft_loss: float = ...,
        ignore_index: int = ...,
        temperature: float = ...,
        compiled: bool = ...,
        chunk_size: int | None = ...,
        return_soft_hard_loss: bool = ...,
        **options: Unpack[_DistillationLossOptions],
    ) -> None: ...

class PreferenceLoss(ChunkedLoss, _pairs.PreferenceLoss):
    def __init__(
        self,
        ignore_index: int = ...,
        beta: float = ...,
        alpha: float = ...,
        compute_nll_loss: bool = ...,
        average_log_prob: bool | None = ...,
        use_ref_model: bool = ...,
        chunk_size: int | None = ...,
        compiled: bool = ...,
        **options: Unpack[_PreferenceLossOptions],
    ) -> None: ...
    @overload
    def __call__(
        self,
        head: Tensor | nn.Module | Head,
        chosen: Completions | tuple[Tensor, Tensor],
        rejected: Completions | tuple[Tensor, Tensor],
        *,
        bias: Tensor | None = ...,
        ref_input: Tensor | None = ...,
        ref_weight: Tensor | nn.Module | Head | None = ...,
        ref_bias: Tensor | None = ...,
        ref_chosen_logps: Tensor | None = ...,
        ref_rejected_logps: Tensor | None = ...,
        nll_target: Tensor | None = ...,
        temperature: Tensor | None = ...,
    ) -> tuple[Tensor, PreferenceMetrics]: ...
    @overload
    def __call__(
        self,
        head: Tensor | nn.Module | Head,
        hidden_states: Tensor,
        labels: Tensor,
        bias: Tensor | None = ...,
        ref_input: Tensor | None = ...,
        ref_weight: Tensor | nn.Module | Head | None = ...,
        ref_bias: Tensor | None = ...,
        *,
        ref_chosen_logps: Tensor | None = ...,
        ref_rejected_logps: Tensor | None = ...,
        nll_target: Tensor | None = ...,
        temperature: Tensor | None = ...,
    ) -> tuple[Tensor, PreferenceMetrics]: ...
    @overload
    def __call__(
        self,
        lin_weight: Tensor | nn.Module | Head,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = ...,
        ref_input: Tensor | None = ...,
        ref_weight: Tensor | nn.Module | Head | None = ...,
        ref_bias: Tensor | None = ...,
        *,
        ref_chosen_logps: Tensor | None = ...,
        ref_rejected_logps: Tensor | None = ...,
        nll_target: Tensor | None = ...,
        temperature: Tensor | None = ...,
    ) -> tuple[Tensor, PreferenceMetrics]: ...

class _UnpairedPreferenceLoss(ChunkedLoss):
    def __init__(
        self,
        ignore_index: int = ...,
        beta: float = ...,
        compiled: bool = ...,
        use_ref_model: bool = ...,
        average_log_prob: bool | None = ...,
        chunk_size: int | None = ...,
        *,
        loss_type: str = ...,
        desirable_weight: float = ...,
        undesirable_weight: float = ...,
        **options: Unpack[_PreferenceLossOptions],
    ) -> None: ...
    @overload
    def __call__(
        self,
        head: Tensor | nn.Module | Head,
        desirable: Completions | tuple[Tensor, Tensor],
        undesirable: Completions | tuple[Tensor, Tensor],
        *,
        bias: Tensor | None = ...,
        preference_labels: Tensor | None = ...,
        ref_input: Tensor | None = ...,
        ref_weight: Tensor | nn.Module | Head | None = ...,
        ref_bias: Tensor | None = ...,
        kl: Tensor | float | None = ...,
        ref_logps: Tensor | None = ...,
        kl_completions: Any = ...,
        sample_weights: Tensor | None = ...,
        temperature: Tensor | None = ...,
    ) -> tuple[Tensor, UnpairedMetrics]: ...
    @overload
    def __call__(
        self,
        head: Tensor | nn.Module | Head,
        completions: Completions | tuple[Tensor, Tensor],
        *,
        bias: Tensor | None = ...,
        preference_labels: Tensor | None = ...,
        ref_input: Tensor | None = ...,
        ref_weight: Tensor | nn.Module | Head | None = ...,
        ref_bias: Tensor | None = ...,
        kl: Tensor | float | None = ...,
        ref_logps: Tensor | None = ...,
        kl_completions: Any = ...,
        sample_weights: Tensor | None = ...,
        temperature: Tensor | None = ...,
    ) -> tuple[Tensor, UnpairedMetrics]: ...
    @overload
    def __call__(
        self,
        head: Tensor | nn.Module | Head,
        hidden_states: Tensor,
        labels: Tensor,
        bias: Tensor | None = ...,
        preference_labels: Tensor | None = ...,
        ref_input: Tensor | None = ...,
        ref_weight: Tensor | nn.Module | Head | None = ...,
        ref_bias: Tensor | None = ...,
        kl: Tensor | float | None = ...,
        *,
        ref_logps: Tensor | None = ...,
        kl_completions: Any = ...,
        sample_weights: Tensor | None = ...,
        temperature: Tensor | None = ...,
    ) -> tuple[Tensor, UnpairedMetrics]: ...
    @overload
    def __call__(
        self,
        _input: Tensor,
        lin_weight: Tensor | nn.Module | Head,
        target: Tensor,
        bias: Tensor | None = ...,
        preference_labels: Tensor | None = ...,
        ref_input: Tensor | None = ...,
        ref_weight: Tensor | nn.Module | Head | None = ...,
        ref_bias: Tensor | None = ...,
        kl: Tensor | float | None = ...,
        *,
        ref_logps: Tensor | None = ...,
        kl_completions: Any = ...,
        sample_weights: Tensor | None = ...,
        temperature: Tensor | None = ...,
    ) -> tuple[Tensor, UnpairedMetrics]: ...

class LigerFusedLinearBCOLoss(_UnpairedPreferenceLoss, _unpaired.LigerFusedLinearBCOLoss): ...

class LigerFusedLinearCPOLoss(PreferenceLoss, _reference_free.LigerFusedLinearCPOLoss):
    def __init__(
        self,
        ignore_index: int = ...,
        beta: float = ...,
        alpha: float = ...,
        label_smoothing: float = ...,
        compute_nll_loss: bool = ...,
        compiled: bool = ...,
        average_log_prob: bool | None = ...,
        chunk_size: int | None = ...,
        *,
        use_ref_model: bool = ...,
        loss_type: str = ...,
        gamma: float = ...,
        reward_alpha: float = ...,
        **options: Unpack[_PreferenceLossOptions],
    ) -> None: ...

class LigerFusedLinearDPOLoss(PreferenceLoss, _dpo.LigerFusedLinearDPOLoss):
    def __init__(
        self,
        ignore_index: int = ...,
        beta: float = ...,
        alpha: float = ...,
        compute_nll_loss: bool = ...,
        compiled: bool = ...,
        use_ref_model: bool = ...,
        average_log_prob: bool | None = ...,
        chunk_size: int | None = ...,
        loss_type: str | Sequence[str] = ...,
        label_smoothing: float = ...,
        discopop_tau: float = ...,
        *,
        loss_weights: Sequence[float] | None = ...,
        f_divergence_type: str = ...,
        f_alpha_divergence_coef: float = ...,
        ld_alpha: float | None = ...,
        use_weighting: bool = ...,
        **options: Unpack[_PreferenceLossOptions],
    ) -> None: ...

class LigerFusedLinearKTOLoss(_UnpairedPreferenceLoss, _unpaired.LigerFusedLinearKTOLoss): ...

class LigerFusedLinearORPOLoss(PreferenceLoss, _reference_free.LigerFusedLinearORPOLoss):
    def __init__(
        self,
        ignore_index: int = ...,
        beta: float = ...,
        compute_nll_loss: bool = ...,
        compiled: bool = ...,
        chunk_size: int | None = ...,
        *,
        average_log_prob: bool | None = ...,
        use_ref_model: bool = ...,
        alpha: float = ...,
        **options: Unpack[_PreferenceLossOptions],
    ) -> None: ...
    @overload
    def __call__(
        self,
        head: Tensor | nn.Module | Head,
        chosen: Completions | tuple[Tensor, Tensor],
        rejected: Completions | tuple[Tensor, Tensor],
        *,
        bias: Tensor | None = ...,
        nll_target: Tensor | None = ...,
    ) -> tuple[Tensor, ORPOMetrics]: ...
    @overload
    def __call__(
        self,
        head: Tensor | nn.Module | Head,
        hidden_states: Tensor,
        labels: Tensor,
        bias: Tensor | None = ...,
        nll_target: Tensor | None = ...,
    ) -> tuple[Tensor, ORPOMetrics]: ...
    @overload
    def __call__(
        self,
        lin_weight: Tensor | nn.Module | Head,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = ...,
        nll_target: Tensor | None = ...,
    ) -> tuple[Tensor, ORPOMetrics]: ...

class LigerFusedLinearReverseKLLoss(LigerFusedLinearKLLoss, _distillation.LigerFusedLinearReverseKLLoss): ...

class LigerFusedLinearSimPOLoss(LigerFusedLinearCPOLoss, _reference_free.LigerFusedLinearSimPOLoss):
    def __init__(
        self,
        ignore_index: int = ...,
        beta: float = ...,
        alpha: float = ...,
        label_smoothing: float = ...,
        compute_nll_loss: bool = ...,
        compiled: bool = ...,
        gamma: float = ...,
        chunk_size: int | None = ...,
        *,
        average_log_prob: bool | None = ...,
        use_ref_model: bool = ...,
        loss_type: str = ...,
        reward_alpha: float = ...,
        **options: Unpack[_PreferenceLossOptions],
    ) -> None: ...

class _linear_logps_options(TypedDict, total=False):
    support: TokenSupport | None
    ignore_index: int
    temperature: float | Tensor
    logit_scale: float
    softcap: float | None
    compact: bool
    workspace: int | None
    chunk_size: int | None
    backend: str | None

@overload
def linear_logps(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    labels: Tensor,
    *,
    bias: Tensor | None = ...,
    entropy: Literal[False] = ...,
    lse: Literal[False] = ...,
    shift: bool | int = ...,
    **options: Unpack[_linear_logps_options],
) -> Tensor: ...
@overload
def linear_logps(
    hidden_states: Tensor,
    head: Tensor | nn.Module | Head,
    labels: Tensor,
    *,
    bias: Tensor | None = ...,
    entropy: Literal[False] = ...,
    lse: Literal[False] = ...,
    shift: bool | int = ...,
    **options: Unpack[_linear_logps_options],
) -> Tensor: ...
@overload
def linear_logps(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    labels: Tensor,
    *,
    bias: Tensor | None = ...,
    entropy: bool = ...,
    lse: bool = ...,
    shift: bool | int = ...,
    **options: Unpack[_linear_logps_options],
) -> Statistics: ...
@overload
def linear_logps(
    hidden_states: Tensor,
    head: Tensor | nn.Module | Head,
    labels: Tensor,
    *,
    bias: Tensor | None = ...,
    entropy: bool = ...,
    lse: bool = ...,
    shift: bool | int = ...,
    **options: Unpack[_linear_logps_options],
) -> Statistics: ...
@overload
def linear_logps(
    hidden_states: Tensor | Sequence[Tensor],
    weight: Tensor | nn.Module | Head | Sequence[Tensor | nn.Module | Head],
    labels: Tensor | Sequence[Tensor],
    *,
    bias: Tensor | Sequence[Tensor] | None = ...,
    entropy: bool = ...,
    lse: bool = ...,
    shift: Any = ...,
    **options: Unpack[_linear_logps_options],
) -> list[Any]: ...
@overload
def linear_logps(
    hidden_states: Tensor | Sequence[Tensor],
    head: Tensor | nn.Module | Head | Sequence[Tensor | nn.Module | Head],
    labels: Tensor | Sequence[Tensor],
    *,
    bias: Tensor | Sequence[Tensor] | None = ...,
    entropy: bool = ...,
    lse: bool = ...,
    shift: Any = ...,
    **options: Unpack[_linear_logps_options],
) -> list[Any]: ...

class _linear_statistics_options(TypedDict, total=False):
    metrics: Iterable[str] | str
    selected: Any
    class_weight: Tensor | None
    transform: LogitTransform | None
    options: EngineOptions

@overload
def linear_statistics(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    labels: Tensor,
    statistics: Iterable[str] | str = ...,
    *,
    bias: Tensor | None = ...,
    **options: Unpack[_linear_statistics_options],
) -> Statistics: ...
@overload
def linear_statistics(
    hidden_states: Tensor,
    head: Tensor | nn.Module | Head,
    labels: Tensor,
    statistics: Iterable[str] | str = ...,
    *,
    bias: Tensor | None = ...,
    **options: Unpack[_linear_statistics_options],
) -> Statistics: ...
@overload
def linear_statistics(
    hidden_states: Tensor | Sequence[Tensor],
    weight: Tensor | nn.Module | Head | Sequence[Tensor | nn.Module | Head],
    labels: Tensor | Sequence[Tensor],
    statistics: Iterable[str] | str = ...,
    *,
    bias: Tensor | Sequence[Tensor] | None = ...,
    **options: Unpack[_linear_statistics_options],
) -> list[Statistics]: ...
@overload
def linear_statistics(
    hidden_states: Tensor | Sequence[Tensor],
    head: Tensor | nn.Module | Head | Sequence[Tensor | nn.Module | Head],
    labels: Tensor | Sequence[Tensor],
    statistics: Iterable[str] | str = ...,
    *,
    bias: Tensor | Sequence[Tensor] | None = ...,
    **options: Unpack[_linear_statistics_options],
) -> list[Statistics]: ...

class _linear_token_loss_options(TypedDict, total=False):
    metrics: Iterable[str] | str
    token_inputs: Mapping[str, Any] | None
    selected: Any
    class_weight: Tensor | None
    transform: LogitTransform | None
    options: EngineOptions

@overload
def linear_token_loss(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    labels: Tensor,
    token_loss: Callable[..., Any],
    statistics: Iterable[str] | str = ...,
    *,
    bias: Tensor | None = ...,
    **options: Unpack[_linear_token_loss_options],
) -> tuple[Tensor, Statistics]: ...
@overload
def linear_token_loss(
    hidden_states: Tensor,
    head: Tensor | nn.Module | Head,
    labels: Tensor,
    token_loss: Callable[..., Any],
    statistics: Iterable[str] | str = ...,
    *,
    bias: Tensor | None = ...,
    **options: Unpack[_linear_token_loss_options],
) -> tuple[Tensor, Statistics]: ...
@overload
def linear_token_loss(
    hidden_states: Tensor | Sequence[Tensor],
    weight: Tensor | nn.Module | Head | Sequence[Tensor | nn.Module | Head],
    labels: Tensor | Sequence[Tensor],
    token_loss: Callable[..., Any],
    statistics: Iterable[str] | str = ...,
    *,
    bias: Tensor | Sequence[Tensor] | None = ...,
    **options: Unpack[_linear_token_loss_options],
) -> tuple[Tensor, list[Statistics]]: ...
@overload
def linear_token_loss(
    hidden_states: Tensor | Sequence[Tensor],
    head: Tensor | nn.Module | Head | Sequence[Tensor | nn.Module | Head],
    labels: Tensor | Sequence[Tensor],
    token_loss: Callable[..., Any],
    statistics: Iterable[str] | str = ...,
    *,
    bias: Tensor | Sequence[Tensor] | None = ...,
    **options: Unpack[_linear_token_loss_options],
) -> tuple[Tensor, list[Statistics]]: ...
@overload
def linear_divergence(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    labels: Tensor,
    teacher: Teacher | TeacherLogits | Teachers,
    divergence: Divergence,
    *,
    logp: bool = ...,
    temperature: float | Tensor = ...,
    bias: Tensor | None = ...,
    transform: LogitTransform | None = ...,
    options: EngineOptions = ...,
) -> Statistics: ...
@overload
def linear_divergence(
    hidden_states: Tensor,
    head: Tensor | nn.Module | Head,
    labels: Tensor,
    teacher: Teacher | TeacherLogits | Teachers,
    divergence: Divergence,
    *,
    logp: bool = ...,
    temperature: float | Tensor = ...,
    bias: Tensor | None = ...,
    transform: LogitTransform | None = ...,
    options: EngineOptions = ...,
) -> Statistics: ...
@overload
def linear_divergence_loss(
    hidden_states: Tensor,
    weight: Tensor | nn.Module | Head,
    labels: Tensor,
    teacher: Teacher | TeacherLogits | Teachers,
    divergence: Divergence,
    weights: Mapping[str, Tensor],
    *,
    metrics: tuple[str, ...] = ...,
    temperature: float | Tensor = ...,
    bias: Tensor | None = ...,
    transform: LogitTransform | None = ...,
    options: EngineOptions = ...,
) -> tuple[Tensor, Statistics]: ...
@overload
def linear_divergence_loss(
    hidden_states: Tensor,
    head: Tensor | nn.Module | Head,
    labels: Tensor,
    teacher: Teacher | TeacherLogits | Teachers,
    divergence: Divergence,
    weights: Mapping[str, Tensor],
    *,
    metrics: tuple[str, ...] = ...,
    temperature: float | Tensor = ...,
    bias: Tensor | None = ...,
    transform: LogitTransform | None = ...,
    options: EngineOptions = ...,
) -> tuple[Tensor, Statistics]: ...
