"""From what users give to targets: checks by shapes, dtypes and devices alone, before any work.

T tokens, V vocabulary size, H hidden size; K targets, or K kept columns of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from liger_losses import checks
from liger_losses.checks import FLOATS, LISTS, check_device, check_labels, check_shaped, check_tensor, one_each, see
from liger_losses.chunked.core.compiled import in_graphs, traced
from liger_losses.chunked.core.distilled import Teachers, check_comparison, check_no_temperature
from liger_losses.chunked.core.head import NOT_INVARIANT, Head
from liger_losses.chunked.core.options import EngineOptions
from liger_losses.chunked.core.statistics import SELECTED_LOGITS, asked_for
from liger_losses.chunked.core.stream import counted_once, spread, statistics
from liger_losses.chunked.core.target import Target, wrong_columns
from liger_losses.chunked.core.weights import WithAdapters
from liger_losses.kernels.autograd import autocast_dtype
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.reading import start_reading

#: A teacher, a divergence, and the temperature that divides both models' logits.
Comparison = tuple[Any, Any, float | Tensor]
#: What errors call the first argument.
HIDDEN = "hidden states"


def target_of(hidden_states: Any, head: Head, labels: Any, **fields: Any) -> Target:
    """A target of hidden states ``[..., H]`` and labels ``[...]`` that fit its head; of a DTensor, this rank's.

    Args:
        hidden_states, head, labels: as in :func:`liger_losses.linear_logps`.
        fields: others of :class:`Target`.

    Raises:
        TypeError, ValueError: inputs that do not fit together.
        RuntimeError: the call is within a transform of ``torch.func``.
    """
    hidden, weight = head.ranks.states(hidden_states), head.weight
    check_inputs(hidden, head, labels)
    temperature = fields.setdefault("temperature", head.transform.temperature)
    if isinstance(temperature, Tensor):
        checks.check_temperature(temperature, weight.device, labels.shape)
        fields["temperature"] = temperature.detach().clone()  # which may be changed before backward
    if fields.get("class_weight") is not None:
        checks.check_vector("class_weight", fields["class_weight"], weight, head.vocab_size)
    selected = fields.get("selected")
    if isinstance(selected, int):
        if selected > head.vocab_size:
            raise ValueError(f"k must be at most the {head.vocab_size} columns of the head, got {selected}.")
    elif selected is not None:
        check_tensor("selected", selected, (torch.int64,))
        check_shaped("selected", selected, "label", weight.device, (*labels.shape, *selected.shape[-1:]))
    hidden, head = head.for_call(hidden, whole="kept" not in fields)
    return Target(head, hidden, labels, **fields)


def compared_targets(
    hidden_states: Any, head: Head, labels: Tensor, comparison: Comparison, ignore_index: int
) -> list[Target]:
    """A target for each teacher: of several, each has its tokens."""
    (teacher, *how), pairs = comparison, [(comparison[0], labels)]
    if isinstance(teacher, Teachers):
        check_tensor("labels", labels)
        pairs = list(zip(teacher.teachers, teacher.labels(labels, ignore_index), strict=True))
    return [compared(target_of(hidden_states, head, y), its, *how) for its, y in pairs]


def compared(target: Target, teacher: Any, divergence: Any, temperature: float | Tensor) -> Target:
    """A target with a teacher of its tokens."""
    LogitTransform(temperature)  # raises unless it can be a temperature
    check_comparison(teacher, divergence, target.head, target.labels.shape)
    check_no_temperature("student", target.temperature)
    if isinstance(temperature, Tensor):
        checks.check_temperature(temperature, target.head.weight.device, target.labels.shape)
    return replace(target, teacher=teacher.compared(target.labels, temperature))


def shift_labels(labels: Tensor, ignore_index: int = -100, positions: int = 1) -> Tensor:
    """Move the label of position ``t + positions`` to position ``t``; the last positions get ``ignore_index``.

    The hidden states stay as they are: shortening them instead would copy them.
    """
    if not positions or not labels.shape[-1]:
        return labels
    beyond = min(positions, labels.shape[-1])
    return torch.cat([labels[..., beyond:], labels.new_full((*labels.shape[:-1], beyond), ignore_index)], -1)


def several(hidden_states: Any, weight: Any) -> bool:
    """Whether a call has lists of targets."""
    return isinstance(hidden_states, LISTS) or isinstance(weight, LISTS)


def targets_of(
    hidden_states: Any,
    weight: Any,
    labels: Any,
    ignore_index: int,
    *,
    bias: Any = None,
    transform: LogitTransform | None = None,
    shift: Any = False,
    selected: Any = None,
    class_weight: Tensor | None = None,
    **inputs: Any,
) -> list[Target]:
    """The target of a call; or K, if hidden states or heads are lists, as any other argument may be then.

    Args:
        hidden_states, weight, labels, bias: as in :func:`liger_losses.linear_logps`.
        ignore_index: the label of masked tokens.
        transform: of all heads.
        shift: how many positions labels are moved by.
        selected: columns of each target, or one value for all.
        class_weight: of all targets.
        inputs: other arguments of the call, which may be lists too.
    """
    many = several(hidden_states, weight)
    of_all = {HIDDEN: hidden_states, "heads": weight, "labels": labels}
    of_all |= {"bias": bias, "shift": shift, "selected": selected}
    count = count_targets(**of_all, **inputs) if many else 1
    of_each = [one_each(value, count) if many else [value] for value in of_all.values()]
    states, layers, of_labels, biases, positions, columns = of_each
    heads = [Head.of(layer, its, transform) for layer, its in zip(layers, biases, strict=True)]
    for k, head in enumerate(heads[1:], 1):
        check_device("the weight", heads[0].weight.device, **{f"the weight of head {k}": head.weight})
    for y in of_labels if many or shift else ():
        check_labels(y)
    shifted = [shift_labels(y, ignore_index, int(n)) for y, n in zip(of_labels, positions, strict=True)]
    targets = []
    for i, head in enumerate(heads):
        fields = {"temperature": head.transform.temperature, "selected": columns[i]}
        if many:
            fields = {name: of_target(value, shifted, i) for name, value in fields.items()}
        targets.append(target_of(states[i], head, shifted[i], class_weight=class_weight, **fields))
    return targets


def of_target(values: Any, labels: Sequence[Tensor], i: int) -> Any:
    """One target's part of a tensor ``[T, ...]`` of the tokens of all targets; what is no such tensor as it is."""
    shape = labels[i].shape
    sizes = [part.numel() for part in labels]
    if not isinstance(values, Tensor) or values.shape[:1] != (sum(sizes),) or values.shape[: len(shape)] == shape:
        return values
    return values.split(sizes)[i].view(*shape, *values.shape[1:])


def count_targets(**arguments: Any) -> int:
    """How many targets these arguments are for; ValueError unless all lists among them have the same length.

    A TypeError for a tuple of hidden states alone: transformers has one of all layers.
    """
    lengths = {name: len(value) for name, value in arguments.items() if isinstance(value, LISTS)}
    if lengths.get(HIDDEN) == 0:
        raise ValueError("got an empty sequence; pass at least one tensor of hidden states, and labels for each.")
    if list(lengths) == [HIDDEN] and isinstance(arguments[HIDDEN], tuple):
        raise TypeError(
            f"got a tuple of {lengths[HIDDEN]} hidden states; for the last layer, pass outputs.hidden_states[-1]; for "
            "several heads, pass a list."
        )
    if 0 in lengths.values() or len(set(lengths.values())) > 1:
        numbers = ", ".join([f"{length} of {name}" for name, length in lengths.items()])
        raise ValueError(f"got {numbers}: pass each argument as one value for all, or as a list of one for each.")
    return next(iter(lengths.values()))


def check_inputs(hidden: Any, head: Head, labels: Any) -> None:
    """Raise TypeError or ValueError unless hidden states ``[..., H]``, a head and labels ``[...]`` fit together."""
    advice = "; they come from the model's last layer, and token ids go into labels"
    check_tensor("hidden_states", hidden, FLOATS, advice)
    check_labels(labels)
    size = head.weights.hidden_size
    if hidden.dim() < 2 or hidden.shape[-1] != size or labels.shape != hidden.shape[:-1]:
        problem = _problem(hidden.shape, labels.shape, (len(head.weight), size))
        raise ValueError(problem + see("shapes-dtypes-and-devices"))
    check_device("the weight", head.weight.device, hidden_states=hidden, labels=labels)
    checks.check_values(head.weight)
    weight = head.weight if head.quantized is None else None  # whose rows take the dtype of the hidden states
    named = {"hidden_states": hidden, "weight": weight, "bias": head.bias}
    dtypes = {name: tensor.dtype for name, tensor in named.items() if tensor is not None}
    kinds = {*dtypes.values()}
    if len(kinds) > 1 and (torch.float64 in kinds or autocast_dtype(hidden.device) is None):
        raise TypeError(
            "hidden_states, weight and bias must share a dtype outside autocast, got "
            f"{', '.join([f'{name} {dtype}' for name, dtype in dtypes.items()])}. Cast one side, or run under "
            "torch.autocast." + see("shapes-dtypes-and-devices")
        )


def _problem(hidden: torch.Size, labels: torch.Size, weight: tuple[int, int]) -> str:
    """Why these sizes do not fit together, and what the mistake may be."""
    (columns, size), expected = weight, hidden[:-1]
    if len(hidden) < 2 or hidden[-1] != size:
        problem = (
            f"hidden_states must be [..., {size}] to fit the weight {weight}, got shape {tuple(hidden)}. The weight is "
            "[vocab_size, hidden_size], as in nn.Linear."
        )
        if hidden == (size,):
            problem += f" For one token, pass hidden_states[None], of shape [1, {size}], and labels of shape [1]."
        elif hidden[-1:] == (columns,):
            problem += (
                f" These look like logits: pass the last hidden states; {checks.LOSS_INPUTS}. Of a patched model, take "
                "the model's own loss (labels=)."
            )
        return problem
    if labels == (columns,):
        return (
            f"weight {weight} and hidden states {tuple(hidden)} were swapped: labels {tuple(labels)} are one for "
            f"each row of the weight. {checks.ORDER}."
        )
    advice = "Give positions without a label ignore_index."
    if len(labels) == len(expected) and labels[:-1] == expected[:-1] and abs(labels[-1] - expected[-1]) == 1:
        advice = "Shorten neither: with shift=True, each position predicts the next one's label."
    if labels.numel() == expected.numel() and len(labels) != len(expected):
        advice = f"Give both flat, or both {list(labels if len(labels) > 1 else expected)}."
    return (
        f"labels must have one entry per hidden state: hidden_states {tuple(hidden)} need labels of shape "
        f"{tuple(expected)}, got {tuple(labels)}. {advice}"
    )


# --- Kept columns: softmaxes over those that a sampler kept for each token. P kept columns of all tokens --------------

#: What the host reads.
_FACTS = "which tokens have kept columns; capture the model without its loss"


@in_graphs
@dataclass(frozen=True, eq=False)
class TokenSupport:
    """The vocabulary entries that a sampler kept for each token (by top-k, top-p, min-p ...).

    A token without kept entries is evaluated over the whole vocabulary. The entries of masked tokens have no influence.
    On a GPU, only the kept rows of the ``lm_head`` are read, so time and memory grow with their number, not with the
    vocabulary. Elsewhere, these rows are copied, a block of tokens at a time. Tokens with very many kept entries are
    computed by products with the whole head, which is faster.

    Args:
        ids: int64 or int32 ids of the kept entries. ``[..., K]``, one row for each label (with ``shift`` too), padded
            with -1 at any place; or ``[P]`` with ``offsets``.
        offsets: ``[T + 1]`` int64 or int32: in the order of the flattened labels, token t has
            ``ids[offsets[t]:offsets[t + 1]]``, without padding.
        add_label: if a token's label is not among its kept entries, add it. By default, a missing label is an error.
        sparse_grad: make the gradient of the weight a sparse tensor of the rows that some token keeps, as for
            ``nn.Embedding(sparse=True)``, for optimizers that take one. The kept rows of all tokens are then read, for
            any number of kept entries. If some token has no kept entries, the gradient is dense.

    Raises:
        TypeError, ValueError: not integer tensors, or of other shapes.
    """

    ids: Tensor
    offsets: Tensor | None = None
    add_label: bool = False
    sparse_grad: bool = False

    def __post_init__(self) -> None:
        for name in ("ids",) if self.offsets is None else ("ids", "offsets"):
            check_tensor(f"TokenSupport's {name}", getattr(self, name), (torch.int64, torch.int32))
        for name in ("add_label", "sparse_grad"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"TokenSupport's {name} must be True or False, got {getattr(self, name)!r}.")
        if self.offsets is not None and not self.ids.dim() == self.offsets.dim() == 1:
            raise ValueError(
                f"TokenSupport(ids, offsets) takes ids [P] and offsets [tokens + 1], got {list(self.ids.shape)} and "
                f"{list(self.offsets.shape)}; leave offsets out for padded ids [..., K]."
            )

    def check(self, labels: Tensor, weight: Tensor) -> None:
        """Raise ValueError unless there is a row for each label, on the weight's device, and the weight can have the
        requested kind of gradient."""
        ids, device = self.ids, weight.device
        if self.offsets is None:
            check_shaped("TokenSupport's ids", ids, "label", device, (*labels.shape, *ids.shape[-1:]))
        else:
            check_device("the weight", device, **{"TokenSupport's ids": ids})
            check_shaped("TokenSupport's offsets", self.offsets, "label, and 1", device, (labels.numel() + 1,))
        if ids.numel() and not labels.numel():
            raise ValueError(f"TokenSupport has {ids.numel()} ids, but there are no labels; pass no ids.")
        if self.sparse_grad and torch.is_grad_enabled() and weight.requires_grad and not weight.is_leaf:
            raise ValueError(
                "TokenSupport(sparse_grad=True) needs a weight that is a parameter, or detached, got the result of an "
                "operation, whose backward cannot read sparse gradients; leave sparse_grad out."
            )

    def row(self, token: int) -> Tensor:
        """The ids of one of the flattened labels."""
        if self.offsets is None:
            return self.ids.flatten(0, -2)[token]
        return self.ids[int(self.offsets[token]) : int(self.offsets[token + 1])]


def kept_statistics(
    hidden_states: Tensor,
    head: Head,
    labels: Tensor,
    support: TokenSupport,
    names: tuple[str, ...],
    options: EngineOptions,
    *,
    shift: int = 0,
) -> dict[str, Tensor]:
    """Per-token statistics over the kept columns, differentiable, in the labels' shape.

    Args:
        hidden_states: ``[..., H]``.
        head: labels and kept columns count the whole vocabulary, where ranks share it.
        labels: ``[...]`` int64, not yet shifted.
        support: the kept columns.
        names: of ``logp``, ``entropy`` and ``lse``.
        options: see :class:`liger_losses.EngineOptions`.
        shift: position ``t`` predicts the label at ``t + shift``.

    Raises:
        TypeError, ValueError: inputs that do not fit together; columns out of range, twice, or without the label.
        RuntimeError: a CUDA graph is being captured.
    """
    if not isinstance(support, TokenSupport):
        raise TypeError(f"support must be a TokenSupport(ids), got {type(support).__name__}.")
    whole = target_of(hidden_states, head, labels, kept=None, sparse_grad=support.sparse_grad)
    support.check(labels, head.weight)
    whole = replace(whole, labels=shift_labels(whole.labels, options.ignore_index, shift))
    if not is_dynamo_compiling():
        return statistics_of_kept(whole, support, names, options, shift)[0]
    if support.sparse_grad:
        raise ValueError("a compiled function cannot return sparse gradients; leave sparse_grad=True out.")
    arguments = whole, support, names, options, shift
    return traced("statistics_of_kept", [whole], asked_for(names), *arguments)[1][0]


@in_graphs
def statistics_of_kept(
    whole: Target, support: TokenSupport, names: tuple[str, ...], options: EngineOptions, shift: int, known: Any = None
) -> list[dict[str, Tensor]]:
    """The same of a checked call with shifted labels; what is ``known`` of it is computed again."""
    head = whole.head
    if head.batch_invariant and support.offsets is None:  # to how many columns they are padded belongs to the batch
        is_id = support.ids.flatten(0, -2) != -1
        offsets = F.pad(is_id.sum(-1).cumsum(0), (1, 0))
        support = replace(support, ids=support.ids.flatten(0, -2)[is_id], offsets=offsets)
    split = padded_parts if support.offsets is None else ragged_parts
    parts = checked_parts(split(support, whole, options.ignore_index, shift), whole, support, options, shift, names)
    adapted = head.batch_invariant and isinstance(head.weights, WithAdapters)
    read = head.vocab_size if support.sparse_grad or adapted else most_read(head.vocab_size)
    wide = [part.kept is not None and part.kept.shape[-1] > read for part in parts]
    if any(wide):
        parts = counted_once(parts, options)  # before two calls, each of which would wait
    few, many = ([part for part, wider in zip(parts, wide, strict=True) if wider is which] for which in (False, True))
    of_parts = statistics(few, names, options) if few else []
    of_parts += _of_all_columns(many, names, options) if many else []
    for i, part in enumerate([*few, *many]):
        if part.hidden_rows is not None:
            of_parts[i] = spread(of_parts[i], part.hidden_rows, whole.labels.shape)
    return [{name: sum([values[name] for values in of_parts[1:]], of_parts[0][name]) for name in names}]


def most_read(vocab_size: int) -> int:
    """For how many columns of a token the rows of a head are read: that takes as long as 160 columns of a product."""
    return max(vocab_size // 160, 64)


def _of_all_columns(parts: Sequence[Any], names: Sequence[str], options: EngineOptions) -> list[dict[str, Tensor]]:
    """Statistics over kept columns, whose logits are selected from the logits of all columns."""
    targets = [replace(part, kept=None, selected=part.kept.clamp(min=0)) for part in parts]
    results = list[dict[str, Tensor]]()
    for part, values in zip(parts, statistics(targets, [SELECTED_LOGITS], options), strict=True):
        kept, logits = part.kept, values["selected_logits"]
        at_label = logits.masked_fill(kept != part.labels[..., None], 0.0).sum(-1)
        logits = logits.masked_fill((kept < 0) | (logits == -torch.inf), -1e30)  # 0 times -inf is NaN
        lse = logits.logsumexp(-1)
        logps = logits - lse[..., None]
        of_kept = {"logp": at_label - lse, "lse": lse, "entropy": -(logps.exp() * logps).sum(-1)}
        active = part.labels != options.ignore_index
        results.append({name: torch.where(active, of_kept[name], 0.0) for name in names})
    return results


def padded_parts(support: TokenSupport, whole: Target, ignore_index: int, shift: int) -> list[Target]:
    """Tokens without kept columns, and tokens with some."""
    ids = shift_labels(support.ids.long().mT, -1, shift).mT.contiguous()
    cut = (ids != -1).any(-1)
    parts = [replace(whole, labels=torch.where(cut, ignore_index, whole.labels))]
    if ids.shape[-1]:
        parts.append(replace(whole, labels=torch.where(cut, whole.labels, ignore_index), kept=ids))
    return parts


def ragged_parts(support: TokenSupport, whole: Target, ignore_index: int, shift: int) -> list[Target]:
    """Active tokens by how many columns they keep, up to powers of two; first those that keep none.

    Raises:
        ValueError: offsets that do not rise from 0 to the number of ids.
    """
    assert support.offsets is not None
    ids, offsets, labels = support.ids, support.offsets.long(), whole.labels.flatten()
    after = min(shift, len(labels))
    lengths = F.pad(offsets.diff()[after:], (0, after))
    kinds = torch.where(lengths > 0, lengths.clamp(min=1).log2().ceil().long() + 1, 0)
    kinds.masked_fill_(labels == ignore_index, -1)
    # The host waits once, for the number of tokens of each kind from -1 on and for what is wrong with offsets.
    rises = offsets.diff().amin() if len(labels) else offsets.new_zeros(())
    numbers = (kinds[:, None] == torch.arange(-1, 64, device=kinds.device)).sum(0)
    facts = torch.cat([torch.stack([rises, offsets[0], offsets[-1]]), numbers])
    least, first, last, *counts = start_reading(facts, _FACTS)()
    if least < 0 or (first, last) != (0, len(ids)):
        raise ValueError(
            f"TokenSupport's offsets must rise from 0 to {len(ids)}, the number of ids; they go from {first} to "
            f"{last}, by {least} or more."
        )
    parts, temperature = list[Target](), whole.temperature
    for kind, tokens in enumerate(kinds.argsort(stable=True).split(counts), -1):
        if kind < 0 or (kind and not len(tokens)):
            continue
        its = temperature.flatten()[tokens] if isinstance(temperature, Tensor) else temperature
        part = replace(whole, labels=labels[tokens], temperature=its, hidden_rows=tokens)
        if kind:
            at = torch.arange(2 ** (kind - 1), device=ids.device)
            inside = at < lengths[tokens, None]
            kept = ids[torch.where(inside, offsets[tokens + shift, None] + at, 0)].long()
            # -1 is padding here, and no id of a ragged row.
            part = replace(part, kept=torch.where(inside, kept.masked_fill(kept == -1, -2), -1))
        parts.append(part)
    return parts


def checked_parts(
    parts: list[Target], whole: Target, support: TokenSupport, options: EngineOptions, shift: int, names: Sequence[str]
) -> list[Target]:
    """The parts, with labels among the kept columns if they are added; without the first if it has no token.

    Raises:
        ValueError: for wrong columns, or for a label that is not among its token's, if it must be; names the first.
    """
    ignore_index, size, (uncut, *cut) = options.ignore_index, whole.vocab_size, parts
    # Tokens with columns outside of the vocabulary, with columns twice, and without their label's.
    wrong = whole.labels.new_zeros(3, whole.labels.numel(), dtype=torch.bool)
    for i, part in enumerate(cut):
        kept: Any = part.kept
        lacks = ~(kept == part.labels[..., None]).any(-1)
        of_part = torch.stack([*wrong_columns(kept, size, -1), lacks]) & (part.labels != ignore_index)
        wrong[:, slice(None) if part.hidden_rows is None else part.hidden_rows] = of_part.flatten(1)
        if support.add_label:
            added = torch.where(lacks, part.labels, -1)
            cut[i] = replace(part, kept=torch.cat([kept, added[..., None]], -1))
    if support.add_label or "logp" not in names:
        wrong[2] = False
    others = (uncut.labels != ignore_index).sum()
    *numbers, others = start_reading(torch.cat([wrong.sum(1), others[None]]), _FACTS)()
    if not any(numbers):
        if others and whole.head.batch_invariant and isinstance(whole.head.weights, WithAdapters):
            raise ValueError(NOT_INVARIANT)
        return [uncut, *cut] if others or not cut else cut
    kind = next(kind for kind, number in enumerate(numbers) if number)
    token = int(wrong[kind].int().argmax())
    ids = support.row(token + shift)
    label = int(whole.labels.flatten()[token])
    where = f"token {token + shift} of the flattened labels"
    if kind == 2:
        checks.check_vocabulary([label], size, ignore_index)
        raise ValueError(
            f"the label of {numbers[2]} tokens is not among their kept columns, so its probability is 0 (the first: "
            f"label {label} of {where}). Check that ids and labels belong to the same tokens; or add labels to the "
            "kept columns: TokenSupport(..., add_label=True)."
        )
    if kind == 1:
        values, counts = ids.unique(return_counts=True)
        twice = values[(counts > 1) & (values >= 0)].tolist()[0]
        raise ValueError(f"TokenSupport has ids twice: {where} has {twice} twice; give each once, and pad with -1.")
    padding = ", or -1 for padding" if support.offsets is None else " (offsets need no padding)"
    raise ValueError(
        f"TokenSupport's ids must be in [0, {size}), the rows of the weight{padding}; {where} has ids from "
        f"{int(ids.amin())} to {int(ids.amax())}."
    )
