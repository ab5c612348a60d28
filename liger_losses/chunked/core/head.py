""":class:`Head`: a matrix, a bias, what is done to logits, and who has which columns.

T tokens, H hidden size, V vocabulary size, C columns of a slice of the vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from liger_losses.checks import check_vector, check_weight, described, is_weight_and_bias
from liger_losses.chunked.core.buffers import local_part
from liger_losses.chunked.core.quantizers import QuantizedWeight, find_quantized
from liger_losses.chunked.core.ranks import ALONE, Ranks, local_rows, share_mesh, share_vocabulary
from liger_losses.chunked.core.weights import Concatenated, Dense, Products, Quantized, Weights, WithAdapters
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.logit_transform import LogitTransform

#: The default of ``Head(batch_invariant=)``.
BATCH_INVARIANT_VARIABLE = "LIGER_LOSSES_BATCH_INVARIANT"
NOT_INVARIANT = (
    "batch_invariant=True needs a head without adapters, because torch's product with them depends on the number of "
    "tokens; merge them into the weight, or leave batch_invariant out."
)
_BATCH_INVARIANT = os.environ.get(BATCH_INVARIANT_VARIABLE) == "1"


@dataclass(frozen=True, eq=False)
class LowRank:
    """``scale (dropout(h) A^T) B^T``, which is added to a head's products ``h W^T``.

    Args:
        a, b: ``[r, H]``, ``[V, r]``, both differentiable.
        scale: ``lora_alpha / r``, for example.
        dropout: the probability with which hidden states are dropped before A.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0
    dropout: float = 0.0


@dataclass(frozen=True, eq=False, init=False)
class Head:
    """A language model's last layer: ``logits = transform(hidden_states @ weight.T + bias)``.

    Every operation and every loss takes a head as its weight. Policy, reference and teacher may have different heads. A
    head is checked once, when it is made.

    With ``group``, the head is vocabulary-parallel: each rank of a process group passes some rows of weight and bias,
    any number of them, in the order of the ranks. Labels, selected columns, class weights and a teacher's columns refer
    to the whole vocabulary. All ranks must make the head, and every call with it, together, on the same hidden states
    and labels. Each rank gets the same results, the whole gradient of the hidden states, and the gradients of its rows
    of weight and bias.

    A weight that is a DTensor with placements ``[Shard(0)]`` is shared by the ranks of its mesh. Hidden states are then
    DTensors on this mesh, replicated or sharded along the sequence, and so are gradients.

    A quantized weight is frozen. It is dequantized for each pass, some rows at a time if it is large.

    Args:
        weight: ``[V, H]``, floating point, as in ``nn.Linear``, or quantized; with ``group``, this rank's rows.
        bias: ``[V]`` or ``None``; with ``group``, this rank's entries.
        transform: temperature, scale and soft-cap of the logits.
        group: the process group whose ranks hold the rows.
        batch_invariant: compute each token's forward statistics with the same bits in any batch, for any number and
            order of tokens, mask and workspace. The default is True if the environment variable
            ``LIGER_LOSSES_BATCH_INVARIANT`` was 1 when the package was imported.
        adapters: LoRA adapters; their output is added to the logits.
        quantized, ranks, weights: of another head, for a copy of it.

    Raises:
        TypeError: not tensors, or neither floating point nor of a known quantized type; a group of which this rank is
            not a member.
        ValueError: shapes or devices that do not fit together; heads of the ranks that do not fit together; a DTensor
            with other placements, or together with ``group``; ``batch_invariant`` of a vocabulary-parallel head.
        RuntimeError: another rank of the group has a head of another kind or hidden size.
    """

    weight: Tensor
    bias: Tensor | None
    transform: LogitTransform
    ranks: Ranks
    batch_invariant: bool
    adapters: tuple[LowRank, ...]
    quantized: QuantizedWeight | None
    # All of it but adapters with dropout, which a call adds; ``replace`` makes it again of the other parts.
    weights: Weights = field(init=False)
    #: The vocabulary size V, over all ranks.
    vocab_size: int = field(init=False)

    # What the constructor takes, as graphs and what is saved for backward make a head again with a call's weights.
    __match_args__ = ("weight", "bias", "transform", "ranks", "batch_invariant", "adapters", "quantized", "weights")

    # Written out, because torch.compile cannot trace a generated one with an object as a default.
    def __init__(
        self,
        weight: Tensor | nn.Module | QuantizedWeight,
        bias: Tensor | None = None,
        transform: LogitTransform | None = None,
        group: dist.ProcessGroup | None = None,
        batch_invariant: bool | None = None,
        adapters: tuple[LowRank, ...] = (),
        quantized: QuantizedWeight | None = None,
        ranks: Ranks | None = None,
        weights: Weights | None = None,
    ) -> None:
        if not (transform is None or isinstance(transform, LogitTransform)):
            raise TypeError(f"transform must be a liger_losses.LogitTransform(...), got {transform!r}.")
        batch_invariant = _BATCH_INVARIANT if batch_invariant is None else batch_invariant
        if ranks is None:  # otherwise, all of these are of a head that was checked
            weight, bias, quantized, ranks = _checked(weight, bias, group, quantized)
            if batch_invariant and ranks is not ALONE:
                raise ValueError(
                    "batch_invariant=True needs a head that is not shared among ranks, whose sums have no fixed order; "
                    "gather the weight, or leave batch_invariant out."
                )
        if weights is None:
            weights = _matrix(weight, quantized, adapters)  # type: ignore[arg-type]
        fields = (weight, bias, transform or LogitTransform(), ranks, batch_invariant, adapters, quantized, weights)
        for name, value in zip(Head.__match_args__, fields, strict=True):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "vocab_size", sum(ranks.sizes) or weights.columns)

    @classmethod
    def of(
        cls, weight: Tensor | nn.Module | Head, bias: Tensor | None = None, transform: LogitTransform | None = None
    ) -> Head:
        """Make a head from tensors, from a module such as ``model.lm_head``, or from a head.

        Args:
            weight: ``[V, H]``; or an ``nn.Linear`` (or ``nn.Embedding``, for tied weights) that holds it and the bias;
                or a quantized layer, or PEFT's LoRA around any of these; or a head, which is returned.
            bias: ``[V]``, for a weight without a bias.
            transform: combined with the head's transform: an option that has its default in one of them is taken from
                the other.

        Raises:
            TypeError: a module that is not a linear layer: a whole model, an adapter that is not LoRA, an unknown
                quantized layer, a subclass of ``nn.Linear`` that overrides ``forward``.
            ValueError: a bias, temperature, scale or soft-cap that is given twice.
        """
        if isinstance(weight, nn.Module):
            weight = _of_module(weight)
        if not isinstance(weight, Head):
            return cls(weight, bias, transform)
        if bias is not None:
            if weight.bias is not None:
                raise ValueError("the bias was given twice: the head has one, and bias= is another; leave bias= out.")
            check_vector("bias", bias, weight.weight)
            weight = weight.with_fields(bias=bias)
        return weight if transform is None else weight.with_fields(transform=_joined(weight.transform, transform))

    @property
    def vocabulary_ranks(self) -> int:
        """The number of ranks that hold rows of the head."""
        return self.ranks.size

    @property
    def hidden_size(self) -> int:
        return self.weights.hidden_size

    def for_call(self, hidden_states: Tensor, whole: bool = True) -> tuple[Tensor, Head]:
        """Hidden states and head of one call, of the ``whole`` vocabulary or of some columns, for which what adapters
        drop of hidden states is drawn. Temperatures of tokens are the target's.

        Raises:
            ValueError: its product with all columns depends on the number of tokens, and must not.
        """
        if whole and self.batch_invariant and self.adapters:
            raise ValueError(NOT_INVARIANT)
        transform, weights = self.transform, self.weights
        if isinstance(transform.temperature, Tensor):
            transform = replace(transform, temperature=1.0)
        if any(adapter.dropout for adapter in self.adapters):
            hidden_states, columns = side_by_side(hidden_states, self.adapters)
            weights = Concatenated(weights, Dense(columns))
        if transform is self.transform and weights is self.weights:
            return hidden_states, self
        return hidden_states, self.with_fields(transform=transform, weights=weights)

    def open(self, products: Products) -> Head:
        """The same for one pass, with the weight cast or dequantized if all of its rows are copied together."""
        return self.with_fields(weights=self.weights.open(products))

    def local_bias(self, columns: slice | Tensor) -> Tensor | None:
        """The bias of some of this rank's columns."""
        return None if self.bias is None else local_part(self.bias.detach())[columns].contiguous()

    def with_fields(self, **changes: Any) -> Head:
        """A copy with other fields, which are not checked again."""
        fields = {name: getattr(self, name) for name in Head.__match_args__}
        return Head(**{**fields, "weights": None, **changes})

    def with_partial_gradients(self) -> Head:
        """A copy of this head with which each rank gets only its columns' part of the hidden states' gradients.

        For callers that sum these parts over the ranks in backward, such as Megatron's gather of a sharded sequence,
        whose backward is a reduce-scatter. Without a group, the result is the head itself.
        """
        if self.ranks is ALONE:
            return self
        return self.with_fields(ranks=replace(self.ranks, sums_hidden=False))

    def scaled(self, scale: Tensor) -> Head:
        """The same head with each entry's logit, before the transform, times ``scale [V]``, which may be trained.

        Its weight is a copy. With ``group``, ``scale`` has this rank's entries.

        Raises:
            TypeError, ValueError: another shape; a quantized weight, whose rows are frozen codes.
        """
        if self.quantized is not None:
            raise ValueError("a quantized head takes no scale per vocabulary entry: dequantize it, or leave it out.")
        if not isinstance(scale, Tensor) or scale.shape != self.weight.shape[:1] or scale.is_complex():
            raise ValueError(
                f"scale must be a real number for each of {len(self.weight)} rows, got {described(scale)}."
            )

        return self._with_rows(lambda x: (x * (scale[:, None] if x.dim() > 1 else scale)).to(x.dtype))

    def _with_rows(self, change: Callable[[Tensor], Tensor], **changes: Any) -> Head:
        """A copy whose weight, bias and rows of adapters a function makes of these."""
        adapters = tuple([replace(adapter, b=change(adapter.b)) for adapter in self.adapters])
        bias = None if self.bias is None else change(self.bias)
        return self.with_fields(weight=change(self.weight), bias=bias, adapters=adapters, **changes)

    def columns(self, columns: slice) -> Head:
        """The head of some of its rows."""
        quantized = self.quantized
        if quantized is not None:
            quantized = quantized.part(*columns.indices(quantized.shape[0])[:2])
        return self._with_rows(lambda rows: rows[columns], quantized=quantized)

    @torch.no_grad()
    def merged(self) -> Head:
        """The same head as one floating-point weight: dequantized, with its adapters added, of all ranks; a constant.

        All ranks of a vocabulary-parallel head call it together.
        """
        weight = self.weight if self.quantized is None else self.quantized.rows(0, self.quantized.shape[0])
        for adapter in self.adapters:
            weight = (weight.float() + adapter.scale * adapter.b.float() @ adapter.a.float()).to(weight.dtype)
        bias = None if self.bias is None else self.ranks.whole(self.bias)
        return Head(self.ranks.whole(weight.detach()), bias, self.transform, batch_invariant=self.batch_invariant)

    def detach(self) -> Head:
        """The same head as a constant."""
        constant = self._with_rows(Tensor.detach)
        adapters = tuple([replace(adapter, a=adapter.a.detach()) for adapter in constant.adapters])
        return constant.with_fields(adapters=adapters) if adapters else constant


def _checked(
    weight: Any, bias: Any, group: dist.ProcessGroup | None, quantized: QuantizedWeight | None
) -> tuple[Tensor, Tensor | None, QuantizedWeight | None, Ranks]:
    """This rank's matrix (``[V, 0]`` of a quantized weight) and bias, once they fit together, and who has others."""
    if quantized is None and (quantized := find_quantized(weight)) is not None:
        weight = torch.empty(quantized.shape[0], 0, dtype=quantized.dtype, device=quantized.device)
    ranks = ALONE
    if quantized is None and hasattr(weight, "full_tensor"):  # a DTensor
        if group is not None:
            raise ValueError("a DTensor weight has a device mesh, whose group the head uses; leave group= out.")
        mesh, whole = weight.device_mesh, weight
        weight, bias = local_rows("weight", whole, mesh), None if bias is None else local_rows("bias", bias, mesh)
        ranks = share_mesh(whole)
    if quantized is None:
        check_weight(weight)
    if bias is not None:
        check_vector("bias", bias, weight)
    if group is not None:
        hidden_size = weight.shape[1] if quantized is None else quantized.shape[1]
        kind = f"{weight.dtype}" if quantized is None else f"{type(quantized).__name__} for {weight.dtype}"
        facts = {"weight": kind, "hidden size": hidden_size, "bias": "none" if bias is None else "given"}
        ranks = share_vocabulary(group, len(weight), weight.device, facts)
    return weight, bias, quantized, ranks


def _matrix(weight: Tensor, quantized: QuantizedWeight | None, adapters: tuple[LowRank, ...]) -> Weights:
    """What multiplies hidden states; adapters with dropout are not in it."""
    matrix: Weights = Dense(weight) if quantized is None else Quantized(quantized)
    if quantized is not None and weight.shape[1]:  # columns beside it, as of an adapter
        matrix = Concatenated(matrix, Dense(weight))
    drops = any(adapter.dropout for adapter in adapters)
    for adapter in adapters:
        if adapter.a.shape[1:] != (matrix.hidden_size,) or adapter.b.shape != (matrix.columns, len(adapter.a)):
            raise ValueError(
                f"the adapter's a {tuple(adapter.a.shape)} and b {tuple(adapter.b.shape)} must be [rank, hidden_size] "
                f"and [vocab_size, rank], for a weight {(matrix.columns, matrix.hidden_size)}."
            )
        matrix = matrix if drops else WithAdapters(matrix, Dense(adapter.b), adapter.a, adapter.scale)
    return matrix


def _joined(ours: LogitTransform, theirs: LogitTransform) -> LogitTransform:
    values, none = {}, LogitTransform()
    for name in LogitTransform.__match_args__:
        first = getattr(ours, name)
        second = getattr(theirs, name)
        values[name] = first if _differ(first, getattr(none, name)) else second
        if _differ(second, getattr(none, name)) and _differ(second, values[name]):
            raise ValueError(f"{name} was given twice: the head has {first!r}, and {second!r} is beside it; give one.")
    return LogitTransform(**values)


def _of_module(module: nn.Module) -> Head:
    """The head of a linear layer, a quantized one, or LoRA around any of these."""
    if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
        base, adapters = adapters_of(module)
        return Head.of(base).with_fields(adapters=adapters)
    weight = None if type(module) is nn.Linear else find_quantized(module)
    if weight is None and not is_weight_and_bias(module):
        raise TypeError(_say_what_to_pass(module))
    return Head(module.weight if weight is None else weight, getattr(module, "bias", None))


def _differ(a: object, b: object) -> bool:
    """Whether two values of a transform are not the same; a temperature per token is the same as itself alone."""
    return a is not b and (isinstance(a, Tensor) or isinstance(b, Tensor) or a != b)


def _say_what_to_pass(module: nn.Module) -> str:
    kind = type(module).__name__
    if hasattr(module, "get_output_embeddings"):
        return f"got the whole model, {kind}; pass its head, model.get_output_embeddings(), or that layer's weight."
    if hasattr(module, "base_layer"):
        return (
            f"got {kind}, an adapter around the head, whose weight is not all of it; pass Head(merged_weight, bias) or "
            "patch the model (liger_losses.patch), which keeps adapters."
        )
    if isinstance(module, nn.Linear):
        return (
            f"got {kind}, a linear layer that has a forward of its own, which may do more than weight and bias; pass "
            "Head(layer.weight, layer.bias, LogitTransform(logit_scale=..., softcap=...)), with what it does to logits."
        )
    return (
        f"got {kind}, which is no nn.Linear; pass a floating-point weight [vocab_size, hidden_size] instead, or "
        "tell how its rows are dequantized (liger_losses.register_quantized_weight)."
    )


# --- LoRA on a head: its product is added without merging it into the weight -----------------------------------------


def side_by_side(hidden_states: Tensor, adapters: tuple[LowRank, ...]) -> tuple[Tensor, Tensor]:
    """``[h, scale dropout(h) A^T]``, and the columns ``B`` that multiply what is added."""
    autocast = None if hidden_states.dtype == torch.float64 else autocast_dtype(hidden_states.device)
    parts, dtype = [hidden_states], autocast or hidden_states.dtype
    for adapter in adapters:
        dropped = F.dropout(hidden_states, adapter.dropout)  # itself where nothing is dropped
        parts.append(F.linear(dropped.to(adapter.a.dtype), adapter.a) * adapter.scale)
    # Adapters may be wider than the model, as PEFT's are: they are rounded to the dtype in which products are taken.
    hidden = torch.cat([part.to(dtype) for part in parts], -1)
    columns = [adapter.b for adapter in adapters]
    return hidden, columns[0] if len(columns) == 1 else torch.cat(columns, -1)


def adapters_of(layer: Any) -> tuple[nn.Module, tuple[LowRank, ...]]:
    """The layer inside PEFT's LoRA layer, and the active adapters, as its forward adds them.

    Raises:
        TypeError: another kind of adapter than plain LoRA (DoRA, biases, embeddings).
    """
    base = layer.base_layer
    if layer.disable_adapters and layer.merged:
        layer.unmerge()
    if layer.disable_adapters or layer.merged:
        return base, ()
    adapters, kind = [], type(layer).__name__
    for name in layer.active_adapters:
        if name in getattr(layer, "lora_embedding_A", ()):
            raise TypeError(
                f"the adapter {name!r} of {kind} belongs to an embedding: it is added to embeddings, not to logits. "
                "Pass the head's layer, or Head(merged_weight, bias)."
            )
        if name not in layer.lora_A:
            continue
        a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        plain = type(dropout) in (nn.Identity, nn.Dropout) and isinstance(a, nn.Linear) and isinstance(b, nn.Linear)
        if not plain or a.bias is not None or b.bias is not None or name in getattr(layer, "lora_variant", {}):
            raise TypeError(
                f"the adapter {name!r} of {kind} is not plain LoRA (it is DoRA, or has a bias); patch the model "
                "(liger_losses.patch), or pass Head(merged_weight, bias)."
            )
        p = dropout.p if isinstance(dropout, nn.Dropout) and layer.training else 0.0
        adapters.append(LowRank(a.weight, b.weight, layer.scaling[name], p))
    return base, tuple(adapters)
