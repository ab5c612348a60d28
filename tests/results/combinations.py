"""What a call may have, as columns of one table, and one plain computation that every row must equal.

:data:`COLUMNS` names the features and their values. :func:`rows` chooses rows in which every pair of values of any two
columns meets (and every triple, with ``together=3``); :func:`check` compares one with the plain computation in float64.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
from dataclasses import dataclass, make_dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import liger_losses as ll
from tests import reference
from tests.results import losses
from tests.results.losses import LOSSES, Part
from tests.seam import REGISTERED, LowRank, leave_out_zero_rows, read_rows_up_to


class Sizes(NamedTuple):
    """Tokens (of one tensor of labels), hidden sizes of student and teacher, vocabulary; and the rank of adapters."""

    shape: tuple[int, int] = (2, 9)
    hidden: int = 12
    other: int = 10
    vocab: int = 45
    rank: int = 3

    def __str__(self) -> str:
        return f"{self.shape} x {self.hidden} x {self.vocab}"


WITH_FORMULA = tuple(name for name, loss in LOSSES.items() if loss.formula is not None)
#: Those of a teacher, whose temperature is an option of the loss.
DISTILLED = tuple(
    n for n in WITH_FORMULA if n.startswith(("JSD", "KL", "reverse", "TVD", "alpha", "cosine", "MiniLLM"))
)
METRICS = ("entropy", "lse", "argmax", "mean_logit")
REGISTERED["second_moment_of_shares"] = lambda log_p: log_p.exp() * log_p.square()

#: The features of a call; the first value of each is the plain one.
COLUMNS: dict[str, tuple[Any, ...]] = {
    "asks": (
        *("logp", "statistics", "metrics", "registered", "token loss", "selected", "largest"),
        "token loss, derivatives",
        *("kept", "kept, ragged", *reference.DIVERGENCES, "cosine"),
        *(f"loss: {name}" for name in WITH_FORMULA),
    ),
    "weight": ("dense", "frozen", "quantized", "adapters", "quantized with adapters"),
    "bias": ("none", "trained", "frozen"),
    "transform": ("none", "soft-cap", "per token"),
    "targets": ("one", "two of one head", "two heads", "two heads of one hidden state", "two biases"),
    "ranks": ("alone", "shared", "DTensor"),
    "teacher": ("model", "logits", "function", "quantized", "wider", "narrower", "several"),
    "blocks": ("default", "chunks", "small workspace", "not compact", "no active token"),
    "strategy": (None, "two_pass"),
    "dtype": ("float64", "float32", "bfloat16", "float16"),
    "layout": ("contiguous", "strided", "frozen hidden states"),
    "labels": ("random", "one unlikely"),
    "invariant": (False, True),
    "backend": ("torch", "triton"),
}


#: Beside the columns of the documentation: sizes, and for which tokens the results' upstream gradients are not 0.
EVERY_COLUMN = {**COLUMNS, "sizes": (Sizes(),), "upstream": ("all", "some")}
#: The token without a cut, in calls of kept columns.
UNCUT = slice(13, 14)
#: Columns whose values say little without their name.
SAID = ("weight", "bias", "ranks", "teacher")


class Row(make_dataclass("Values", [(name, Any, values[0]) for name, values in EVERY_COLUMN.items()], frozen=True)):
    """One value of each column."""

    def __str__(self) -> str:
        """The values that are not the plain ones."""
        plain = Row()
        others = [(name, value) for name, value in vars(self).items() if value != getattr(plain, name)]
        words = [name if value is True else f"{name} {value}" if name in SAID else str(value) for name, value in others]
        return ", ".join(words) or "plain"

    @property
    def compares(self) -> bool:
        return self.asks in (*reference.DIVERGENCES, "cosine")

    @property
    def loss(self) -> str | None:
        """The name of a loss."""
        return self.asks.removeprefix("loss: ") if self.asks.startswith("loss: ") else None

    @property
    def of_teacher(self) -> bool:
        """Temperatures are those of a distillation, of both models."""
        return self.compares or self.loss in DISTILLED

    @property
    def kept(self) -> bool:
        return self.asks.startswith("kept")

    @property
    def statistics(self) -> tuple[str, ...]:
        """Those that are differentiated, where a call asks for statistics."""
        return {"statistics": reference.NAMES, "entropy": ("entropy", "mean_logp")}.get(self.asks, ("logp",))

    @property
    def count(self) -> int:
        """How many targets there are."""
        return 1 if self.targets == "one" else 2

    @property
    def heads(self) -> int:
        return 1 if self.targets in ("one", "two of one head") else 2

    @property
    def weights(self) -> int:
        """How many weights there are; two heads of one weight have a bias each."""
        return 2 if "two heads" in self.targets else 1

    @property
    def quantized(self) -> bool:
        return "quantized" in self.weight

    @property
    def adapted(self) -> bool:
        return "adapters" in self.weight

    @property
    def trained_head(self) -> bool:
        return self.weight not in ("frozen", "quantized") or self.bias == "trained"

    @property
    def makes_sense(self) -> bool:
        """Whether the columns say something about the same call."""
        of_one_tensor_of_labels = self.kept or self.compares or self.loss
        return not (
            (self.teacher != "model" and not self.compares)
            or (self.kept and self.sizes.shape == (1, 1))  # of several tokens, one keeps all columns
            or (of_one_tensor_of_labels and (self.targets != "one" or self.strategy is not None))  # refused
            or (self.loss and not self._is_a_sensible_loss)
            or (self.ranks != "alone" and not self._may_be_shared)
            # Logits that are nearly equal may change places, and several of the largest may be at the cap.
            or (self.asks == "largest" and self.dtype in ("bfloat16", "float16"))
            or (self.labels == "one unlikely" and self.asks in ("metrics", "largest") and self.transform != "none")
            or (self.layout == "frozen hidden states" and not self.trained_head)
            or (self.invariant and (self.adapted or self.asks == "registered"))  # refused
            # The same, but where so small a head fits.
            or (self.invariant and self.quantized and self.blocks == "small workspace")
            or (self.backend == "triton" and self.dtype == "float64")
        )

    @property
    def _is_a_sensible_loss(self) -> bool:
        of_probabilities = self.asks.startswith("loss: cross entropy")
        return (
            (self.sizes.shape[0] % 2 == 0 and self.sizes.shape[1] > 1)  # of pairs
            # Ratios and odds of an unlikely token are beyond all floats.
            and (self.labels != "one unlikely" or of_probabilities)
            and not (self.of_teacher and self.transform == "per token")  # an argument of the call
            and (self.blocks != "no active token" or self.of_teacher or of_probabilities or "GRPO" in self.asks)
        )

    @property
    def _may_be_shared(self) -> bool:
        """With a group of this process alone, which does all that ranks do."""
        return (
            self.strategy is None
            and self.layout in ("contiguous", "nothing trained")
            and not self.invariant
            and self.teacher in ("model", "narrower")
            and self.targets in ("one", "two heads")
            and (self.ranks == "shared" or (self.weight in ("dense", "frozen") and self.targets == "one"))
        )


# --- Inputs -----------------------------------------------------------------------------------------------------------


@dataclass
class Inputs:
    """The tensors of a row; ``leaves`` are those that get a gradient, by name."""

    tensors: dict[str, Tensor]
    labels: list[Tensor]
    leaves: list[str]
    quantized: dict[str, reference.Int8Weight]

    def cast(self, dtype: torch.dtype) -> Inputs:
        """Copies of another dtype, which need gradients where these do."""
        copies = {
            name: value.detach()
            .to(dtype if value.is_floating_point() else value.dtype)
            .requires_grad_(name in self.leaves)
            for name, value in self.tensors.items()
        }
        return Inputs(copies, self.labels, self.leaves, self.quantized)

    def hidden(self, k: int) -> Tensor:
        """Of a target, which may be those of the first."""
        return self.tensors.get(f"hidden {k}", self.tensors["hidden 0"])

    def of_leaves(self) -> list[Tensor]:
        return [self.tensors[name] for name in self.leaves]


def exactly_quantized(weight: Tensor) -> reference.Int8Weight:
    """Codes of 8 bits times powers of two, which every dtype represents."""
    made = reference.Int8Weight(weight)
    made.scales = 2.0 ** made.scales.log2().ceil()
    made.codes = (weight / made.scales).round().to(torch.int8)
    return made


def inputs_of(row: Row) -> Inputs:
    """Random tensors of a row, in its dtype."""
    g = torch.Generator().manual_seed(7)
    dtype = getattr(torch, row.dtype)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=g, dtype=torch.float64) * scale).to(dtype)

    tokens, hidden_size, other_size, vocab, rank = row.sizes
    teacher_vocab = {"wider": vocab + 9, "narrower": vocab - 7}.get(row.teacher, vocab)
    tensors, leaves, quantized = dict[str, Tensor](), list[str](), dict[str, reference.Int8Weight]()
    for k in range(1 if "one hidden" in row.targets else row.count):
        shape = tokens if k == 0 or row.heads == 2 else (5,)
        hidden = normal(*shape, hidden_size)
        if row.layout == "strided":
            hidden = torch.stack([hidden, -hidden], -1)[..., 0]
        tensors[f"hidden {k}"] = hidden
        leaves += [] if row.layout == "frozen hidden states" else [f"hidden {k}"]
    for k in range(row.weights):
        weight = normal(vocab, hidden_size, scale=hidden_size**-0.5)
        if row.quantized:
            quantized[f"weight {k}"] = exactly_quantized(weight)
            weight = quantized[f"weight {k}"].rows(0, vocab).to(dtype)
        elif row.layout == "strided":
            weight = torch.cat([weight, weight], 1)[:, :hidden_size]
        tensors[f"weight {k}"] = weight
        leaves += [f"weight {k}"] if not row.quantized and row.weight != "frozen" else []
        if row.adapted:
            tensors[f"a {k}"], tensors[f"b {k}"] = normal(rank, hidden_size, scale=0.3), normal(vocab, rank, scale=0.3)
            leaves += [f"a {k}", f"b {k}"]
    for k in range(row.heads if row.bias != "none" else 0):
        tensors[f"bias {k}"] = normal(2 * vocab)[::2] if row.layout == "strided" else normal(vocab)
        leaves += [f"bias {k}"] if row.bias == "trained" else []
    tensors["other"] = normal(*tokens, other_size)
    tensors["teacher"] = normal(teacher_vocab, other_size, scale=other_size**-0.5)
    if row.teacher == "quantized":
        quantized["teacher"] = exactly_quantized(tensors["teacher"])
        tensors["teacher"] = quantized["teacher"].rows(0, teacher_vocab).to(dtype)
    labels = []
    for k in range(row.count):
        hidden = tensors.get(f"hidden {k}", tensors["hidden 0"])
        y = torch.randint(vocab, hidden.shape[:-1], generator=g)
        masked = 1.1 if row.blocks == "no active token" else 0.3 if y.numel() > 1 else 0.0
        without_loss = torch.rand(y.shape, generator=g) < masked
        if row.kept and row.blocks != "no active token":
            without_loss.view(-1)[UNCUT] = False  # what the whole vocabulary refuses, such a call always refuses
        y[without_loss] = -100
        labels.append(torch.stack([y, y], -1)[..., 0] if row.layout == "strided" else y)
    if row.loss:
        tensors |= losses.extras(labels[0], tensors["other"], tensors["teacher"], g)
    if row.labels == "one unlikely" and row.blocks != "no active token":  # its probability is below all floats
        tensors["hidden 0"][0, 0] *= 80
        labels[0][0, 0] = (tensors["hidden 0"][0, 0].double() @ tensors["weight 0"].double().t()).argmin()
    leaves = [] if row.layout == "nothing trained" else leaves
    for name in leaves:
        tensors[name].requires_grad_()
    return Inputs(tensors, labels, leaves, quantized)


@torch.no_grad()
def spoil(row: Row, given: Inputs) -> None:
    """Make hidden states of masked tokens NaN, which must reach no result; adapters multiply all of them."""
    if row.adapted or row.count > 1:
        return
    masked = given.labels[0] == -100
    given.tensors["hidden 0"][masked] = torch.nan
    if row.blocks != "not compact":
        given.tensors["other"][masked] = torch.nan


def temperature_of(row: Row, labels: Tensor) -> Any:
    """A number, or one for each token."""
    if row.transform == "per token":
        return torch.linspace(0.5, 2.0, labels.numel()).view(labels.shape)
    return 1.0 if row.transform == "none" else 0.7


def transform_of(row: Row) -> dict[str, Any]:
    return {} if row.transform == "none" else {"logit_scale": 1.3, "softcap": 4.0}


def columns_of(labels: Tensor, vocab: int) -> Tensor:
    """Columns of each token: the label's, one twice."""
    return (labels.clamp(min=0)[..., None] + torch.tensor([0, 7, 7, 19])) % vocab


def kept_of(labels: Tensor, vocab: int) -> Tensor:
    """Kept columns of each token: the label's among them, fewer of some, none (the whole vocabulary) of one."""
    ids = (labels.clamp(min=0)[..., None] + torch.tensor([0, 7, 20, 19])) % vocab
    ids[0, ::2, 2:], ids.flatten(0, -2)[UNCUT] = -1, -1
    return ids


# --- The plain computation --------------------------------------------------------------------------------------------


def plain(row: Row, given: Inputs) -> list[Tensor]:
    """The results of a row from logits in memory, in the dtype of ``given``."""
    found, t = list[Tensor](), given.tensors
    for k, labels in enumerate(given.labels):
        head, of_bias = k if row.weights == 2 else 0, k if row.heads == 2 else 0
        hidden, weight, bias = given.hidden(k), t[f"weight {head}"], t.get(f"bias {of_bias}")
        temperature = temperature_of(row, labels)
        if isinstance(temperature, Tensor):
            temperature = temperature.to(hidden.dtype)[..., None]
        if row.adapted:
            weight = weight + 0.5 * t[f"b {head}"] @ t[f"a {head}"]
        own = {"temperature": 1.0 if row.of_teacher else temperature, **transform_of(row)}
        logits = reference.plain_logits(hidden, weight, bias, **own)
        logits, active = logits.to(torch.promote_types(logits.dtype, torch.float32)), labels != -100
        if row.compares:
            found += _plain_divergence(row, logits, t, temperature, labels)
        elif row.loss:
            others = (t["other"] @ t["teacher"].t()).to(logits.dtype)
            found.append(LOSSES[row.loss].formula(losses.Plain(logits, others, _batch(row, given))))
        elif row.kept:
            vocab, ids = row.sizes.vocab, kept_of(labels, row.sizes.vocab)
            size = torch.where(ids < 0, vocab, ids)
            mask = torch.zeros(*labels.shape, vocab + 1, dtype=torch.bool).scatter(-1, size, True)[..., :vocab]
            mask = mask | ~mask.any(-1, keepdim=True)
            logits = logits.masked_fill(~mask, -1e30)
            log_p = logits.log_softmax(-1)
            logp = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            entropy = -(log_p.exp() * log_p.where(mask, 0.0)).sum(-1)
            found += [value.where(active, 0.0) for value in (logp, entropy, logits.logsumexp(-1))]
        elif row.asks in ("selected", "largest", "registered"):
            logps = logits.log_softmax(-1)
            columns = logps.topk(3).indices if row.asks == "largest" else columns_of(labels, row.sizes.vocab)
            of_columns = logps.gather(-1, columns)
            if row.asks == "registered":
                of_columns = (logps.exp() * logps.square()).sum(-1, keepdim=True)
            found += [of_columns.where(active[..., None], 0.0)]
            found += [logps.gather(-1, labels.clamp(min=0)[..., None])[..., 0].where(active, 0.0)]
        else:
            values = reference.plain_statistics(hidden, weight, labels, bias, class_weight(row, hidden.dtype), **own)
            if row.asks.startswith("token loss"):
                found += [_token_loss(values, labels, torch.ones(())).where(active, 0.0).sum()]
            else:
                found += [values[name] for name in row.statistics]
            if row.asks == "metrics":
                values["argmax"] = logits.argmax(-1).where(active, 0)
                found += [values[name].detach() for name in METRICS]
    return [torch.stack(found).sum()] if row.asks.startswith("token loss") else found


def _batch(row: Row, given: Inputs) -> dict[str, Tensor]:
    """What the losses of :mod:`tests.results.losses` are called with."""
    return {
        **given.tensors,
        "h": given.tensors["hidden 0"],
        "y": given.labels[0],
        "ref_weight": given.tensors["teacher"],
    }


def _plain_divergence(row: Row, logits: Tensor, t: dict[str, Tensor], temperature: Any, labels: Tensor) -> list[Tensor]:
    theirs = (t["other"] @ t["teacher"].t()).to(logits.dtype)
    if row.teacher == "several":
        theirs = theirs * (1 - 2 * (torch.arange(len(theirs)) % 2))[:, None, None]
    shared, active = min(theirs.shape[-1], logits.shape[-1]), labels != -100
    found = reference.formula(row.asks, logits[..., :shared] / temperature, theirs[..., :shared] / temperature)
    logp = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return [found.where(active, 0.0), logp.where(active, 0.0)]


def class_weight(row: Row, dtype: torch.dtype) -> Tensor | None:
    """In the row's dtype, whose rounding is no error of a result."""
    if row.asks != "statistics":
        return None
    return torch.linspace(0.2, 1.4, row.sizes.vocab).to(getattr(torch, row.dtype)).to(dtype)


def _token_loss(statistics: Any, labels: Tensor, w: Tensor) -> Tensor:
    """Not linear in several statistics, and not finite where an input is 0, as those of masked tokens are."""
    s = SimpleNamespace(**statistics) if isinstance(statistics, dict) else statistics
    return (s.logp.exp() + 0.3 * s.entropy * s.lse - s.logp) / w


def _with_derivatives(s: Any, labels: Tensor, w: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The same, with derivatives that replace autograd's, which would be others."""
    of = {"logp": s.logp.exp() - 1, "entropy": 0.3 * s.lse, "lse": 0.3 * s.entropy}
    return _token_loss(s, labels, w) + s.logp - s.logp.detach(), {name: value / w for name, value in of.items()}


# --- The library ------------------------------------------------------------------------------------------------------


def on_mesh(value: Tensor | None, placement: Any) -> DTensor | None:
    return None if value is None else DTensor.from_local(value, init_device_mesh("cpu", (1,)), [placement])


def heads_of(row: Row, given: Inputs, part: Part | None = None) -> list[ll.Head]:
    """The heads of a row; ``part`` says which rows of the vocabulary this rank of a group has."""
    heads, t, group = list[ll.Head](), given.tensors, None if part is None else part.group

    def rows_of(name: str) -> Tensor | None:
        whole = t.get(name)
        return whole if part is None or whole is None else whole[part.rows]

    for k in range(row.heads):
        of = k if row.weights == 2 else 0
        weight: Any = rows_of(f"weight {of}")
        if row.quantized:
            weight = given.quantized[f"weight {of}"]
            weight = weight if part is None else weight.part(*part.rows.indices(row.sizes.vocab)[:2])
        labels = given.labels if row.heads == 1 else given.labels[k : k + 1]
        transform = ll.LogitTransform(1.0 if row.of_teacher else _temperature(row, labels), **transform_of(row))
        adapters = (LowRank(t[f"a {of}"], rows_of(f"b {of}"), 0.5),) if row.adapted else ()
        bias = rows_of(f"bias {k}")
        if row.ranks == "DTensor":
            weight, bias = on_mesh(weight, Shard(0)), on_mesh(bias, Shard(0))
            heads.append(ll.Head(weight, bias, transform))
        else:
            heads.append(ll.Head(weight, bias, transform, group, row.invariant or None, adapters))
    return heads


def found_by(row: Row, given: Inputs, part: Any = None, workspace: int | None = None) -> list[Tensor]:
    """The results of a row as the library computes them."""
    labels, heads = given.labels, heads_of(row, given, part)
    hidden = [given.hidden(k) for k in range(row.count)]
    how = {"compact": row.blocks != "not compact", "chunk_size": 4 if row.blocks == "chunks" else None}
    how |= {"backend": row.backend, "workspace": workspace}
    if row.ranks == "DTensor":
        hidden = [on_mesh(states, Replicate()) for states in hidden]
    if row.loss:
        theirs = given.tensors["teacher"]
        ref = ll.Head(theirs) if part is None else ll.Head(theirs[part.rows], group=part.group)
        d = {**_batch(row, given), "h": hidden[0]}
        if row.ranks == "DTensor" and row.loss != "KL, logits":
            ref, d["other"] = ll.Head(on_mesh(theirs, Shard(0))), on_mesh(d["other"], Replicate())
        return reference.tensors_of(LOSSES[row.loss](heads[0], ref, d, **how))[:1]
    options = ll.EngineOptions(strategy=row.strategy, **how)
    if row.compares:
        given_to = hidden[0], heads[0], labels[0], _teacher(row, given), reference.divergence(row.asks)
        found = ll.linear_divergence(*given_to, logp=True, temperature=_temperature(row, labels), options=options)
        return [found.divergence, found.logp]
    if row.kept:
        ids = kept_of(labels[0], row.sizes.vocab)
        support = ll.TokenSupport(ids)
        if row.asks == "kept, ragged":  # of half of the tokens, the label is added
            ids = ids.masked_fill(
                (ids == labels[0][..., None]) & (torch.arange(labels[0].shape[1]) % 2 == 0)[:, None], -1
            )
            counts = (ids.flatten(0, -2) >= 0).sum(-1)
            offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            support = ll.TokenSupport(ids[ids >= 0].int(), offsets, add_label=True)
        with read_rows_up_to(1 if row.asks == "kept" else row.sizes.vocab // 3):
            found = ll.linear_logps(hidden[0], heads[0], labels[0], support=support, entropy=True, lse=True, **how)
        return [found.logp, found.entropy, found.lse]
    one = row.targets == "one"
    head = heads if row.heads == 2 else heads[0]
    hidden = hidden[:1] if "one hidden" in row.targets else hidden
    arguments = (hidden[0] if len(hidden) == 1 else hidden, head, labels[0] if one else labels)
    common = {"class_weight": class_weight(row, hidden[0].dtype), "options": options}
    if row.asks.startswith("token loss"):  # whose inputs have no part in the dtypes of results
        masks = [torch.where(y != -100, 1.0, torch.nan).double() for y in labels]
        common["token_inputs"] = {"w": masks[0] if one else masks}
        function = _with_derivatives if "derivatives" in row.asks else _token_loss
        return [ll.linear_token_loss(*arguments, function, ("logp", "entropy", "lse"), **common)[0]]
    of_columns, metrics = ("selected_logps", "logp"), {"metrics": METRICS, "largest": ("columns",)}.get(row.asks, ())
    asked = {"selected": of_columns, "largest": of_columns, "registered": ("second_moment_of_shares", "logp")}
    if row.asks in ("selected", "largest"):
        columns: Any = [columns_of(y, row.sizes.vocab) for y in labels]
        common["selected"] = ll.Largest(3) if row.asks == "largest" else columns[0] if one else columns
    found = ll.linear_statistics(*arguments, asked.get(row.asks, row.statistics), metrics=metrics, **common)
    names = {"registered": ("registered", "logp"), "metrics": (*row.statistics, *METRICS)}
    read = names.get(row.asks, asked.get(row.asks, row.statistics))
    return [getattr(each, name) for each in ([found] if one else found) for name in read]


def _temperature(row: Row, labels: list[Tensor]) -> Any:
    """A temperature per token is one tensor for all tensors of labels; what masked tokens have does not matter."""
    each = [temperature_of(row, y) for y in labels]
    if not isinstance(each[0], Tensor):
        return each[0]
    each = [part.where(y != -100, float("nan")) for part, y in zip(each, labels, strict=True)]
    return each[0] if len(each) == 1 else torch.cat([part.flatten() for part in each])


def _teacher(row: Row, given: Inputs) -> Any:
    states, weight = given.tensors["other"], given.tensors["teacher"]
    if row.teacher == "several":  # one of which each sequence has
        teachers = [ll.Teacher(states, weight), ll.Teacher(states, -weight)]
        return ll.Teachers(teachers, torch.arange(len(states)) % 2)
    if row.teacher in ("logits", "function"):
        logits = states @ weight.t()
        if row.teacher == "logits":
            return ll.TeacherLogits(logits)
        return ll.TeacherLogits(lambda at: logits.flatten(0, 1)[at].t().contiguous().t(), columns=len(weight))
    if row.teacher == "quantized":
        weight = ll.Head(given.quantized["teacher"])
    return ll.Teacher(states, weight, columns_correspond=True)


# --- Comparisons ------------------------------------------------------------------------------------------------------


def small_workspace(row: Row, given: Inputs, part: Any = None, workspace: int = 1) -> int | None:
    """A little more than the bytes that errors of smaller workspaces ask for, of such a row."""
    if row.blocks != "small workspace":
        return None
    try:
        found_by(row, given, part, workspace)
    except ValueError as error:
        if least := re.search(r"give at least (\d+) bytes", str(error)):
            return small_workspace(row, given, part, int(least[1]) * 5 // 4)
    return workspace


def gradients(values: list[Tensor], leaves: list[Tensor], row: Row) -> list[Tensor]:
    """Of a sum in which no two entries count alike; zeros where nothing depends on a leaf, and none without leaves."""
    if not leaves:
        assert not any(value.requires_grad for value in values)
        return []
    g = torch.Generator().manual_seed(3)
    upstream = [torch.randn(v.shape, generator=g, dtype=torch.float64) for v in values]
    if row.upstream == "some":
        upstream = [u * _some(u, row) for u in upstream]
    pairs = [(v, u.to(v)) for v, u in zip(values, upstream, strict=True) if v.requires_grad]
    outputs, weights = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, leaves, weights, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if f is None else f for f, leaf in zip(found, leaves, strict=True)]


def _some(upstream: Tensor, row: Row) -> Tensor:
    """1 for some tokens, and 0 for the others; the same ones for each result."""
    tokens = upstream.shape[: 2 if upstream.shape[:2] == row.sizes.shape else 1]
    counts = torch.rand(tokens, generator=torch.Generator().manual_seed(5)) < 0.5
    return counts.view([*tokens, *[1] * (upstream.dim() - len(tokens))])


def check(row: Row, part: Part | None = None) -> None:
    """Raise AssertionError unless the library computes a row as exactly as the plain computation does in its dtype.

    Of a rank's part of the vocabulary, its rows of the gradients are compared. Where few tokens make most of the error,
    the plain computation's is one draw of what rounding does, ours is another, and their ratio may be anything. So the
    bound is twice the largest of several draws.
    """
    given, clean = inputs_of(row), inputs_of(row)
    if row.ranks != "alone":  # of a group of this process alone, which has all rows of the vocabulary
        part = Part(dist.group.WORLD, slice(None))
    spoil(row, given)
    outputs = found_by(row, given, part, small_workspace(row, given, part))
    found = [value.detach().clone() for value in outputs]
    for value, before in zip(outputs, found, strict=True):
        assert torch.equal(value, before), "results share memory"
        value.data.zero_()  # what backward needs is not what was returned
    with leave_out_zero_rows() if row.upstream == "some" else contextlib.nullcontext():
        first = gradients(outputs, given.of_leaves(), row)
        ours = [value.clone() for value in first]
        for value in first:
            value.zero_()  # it belongs to the caller
        again = gradients(outputs, given.of_leaves(), row)
    for a, b in zip(ours, again, strict=True):
        # PyTorch adds up kept columns in any order on a GPU, and the second time, tokens that were left out are back.
        # Such sums are rounded to either side, and small entries that cancel have the rounding of large ones.
        other_order = a.numel() and (a.is_cuda or row.ranks != "alone" or row.upstream == "some")
        unit = max(torch.finfo(a.dtype).eps, reference.rounding(a.dtype))
        close = unit * float(a.detach().abs().max()) if other_order else 0.0
        torch.testing.assert_close(a, b, rtol=reference.rounding(a.dtype), atol=1e-6 if row.invariant else close)
    wide = clean if row.dtype == "float64" else clean.cast(torch.float64)
    exact = plain(row, wide)
    rough = exact if wide is clean else plain(row, clean)
    # On a GPU, each shape has an order of sums in cuBLAS.
    least = 1e-12 if found[0].dtype == torch.float64 else 1e-5 if found[0].is_cuda else 1e-6
    floor = max(2 * reference.rounding(getattr(torch, row.dtype)), least)
    exact_gradients = gradients(exact, wide.of_leaves(), row)
    near = [of_rounded_inputs(row, wide, seed) for seed in range(4)]
    for i, (a, p, e) in enumerate(zip(found, rough, exact, strict=True)):
        if not a.is_floating_point():
            assert torch.equal(a, e), f"result {i}"
            continue
        wide_dtype = torch.promote_types(getattr(torch, row.dtype), torch.float32)
        assert a.dtype == wide_dtype or (row.loss and a.dtype == torch.float32)
        # Close to 0 (log-probabilities next to 1), values are judged on an absolute scale.
        error, rounded, *others = (_largest_difference(v, e) for v in (a, p, *[results[i] for results, _ in near]))
        size = 1 + float(e.detach().abs().max())
        allowed = 2 * max(rounded, *others) + (1e-12 if a.dtype == torch.float64 else 1e-5) * size
        assert error <= allowed, f"result {i}: error {error:.3e}, allowed {allowed:.3e}"
    norms = [float(tensor.norm()) for tensor in wide.tensors.values() if tensor.is_floating_point()]
    size = 0.0 if row.labels == "random" else 4 * max(norms)  # of terms that cancel
    others = exact_gradients if wide is clean else gradients(rough, clean.of_leaves(), row), exact_gradients
    # A weight's gradient is rounded to half precision after each of up to eight blocks: 1.9 times plain PyTorch's error
    # on average, and of a small matrix a little more.
    slack = 2.2 if row.blocks == "small workspace" else 2.0
    for name, a, p, e, *rest in zip(given.leaves, ours, *others, *[found for _, found in near], strict=True):
        if part is not None and name.split()[0] in ("weight", "bias", "b"):
            a, p, e, *rest = (gradient[part.rows] for gradient in (a, p, e, *rest))
        assert a.dtype == given.tensors[name].dtype
        least = max(floor, *[slack * reference.relative_error(other, e) for other in rest])
        reference.assert_as_exact_as_plain(a, p, e, f"the gradient of {name}", slack, least, size)


def of_rounded_inputs(row: Row, wide: Inputs, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients in fp32 (fp64) of inputs each of whose entries is off by the row's dtype's epsilon.

    As in all that computes logits in blocks, log-sum-exps are numbers of this dtype, and logits are computed again:
    where they are large, their rounding is in every probability.
    """
    g, dtype = torch.Generator().manual_seed(seed), getattr(torch, row.dtype)
    near = wide.cast(torch.promote_types(dtype, torch.float32))

    def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
        return value * (1 + torch.finfo(dtype).eps * (2 * torch.randint(2, value.shape, generator=g) - 1))

    def log_softmax(logits: Tensor, dim: int) -> Tensor:
        lse = rounded(logits.detach(), logits.dtype).logsumexp(dim, keepdim=True)
        change = ((logits.detach() - lse).exp() * logits).sum(dim, keepdim=True)  # whose gradient is the probabilities
        return logits - (lse + change - change.detach())

    with torch.no_grad():
        for value in filter(torch.is_floating_point, near.tensors.values()):
            value.copy_(rounded(value, dtype))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tensor, "log_softmax", log_softmax)
        results = plain(row, near)
        return results, gradients(results, near.of_leaves(), row)


def _largest_difference(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach()).abs().max())


# --- Rows -------------------------------------------------------------------------------------------------------------


def rows(together: int = 2, seed: int = 0, **fixed: Any) -> list[Row]:
    """Rows in which all values of any ``together`` columns meet, but where they make no sense together.

    ``fixed`` are columns with the values that they may have. A greedy choice: of some random rows with a set of values
    that has not met yet, the one with the most such sets.
    """
    draw, columns = random.Random(seed), {name: list(values) for name, values in (COLUMNS | fixed).items()}
    names, missing = list(columns), set[tuple[tuple[str, Any], ...]]()
    for chosen in itertools.combinations(names, together):
        missing |= {
            tuple(zip(chosen, values, strict=True)) for values in itertools.product(*(columns[n] for n in chosen))
        }
    found = list[Row]()
    for wanted in sorted(missing, key=str):
        if wanted not in missing:
            continue
        candidates = [row for _ in range(20) if (row := _drawn(dict(wanted), columns, draw)).makes_sense]
        best = max(candidates, key=lambda row: len(_sets(row, together) & missing), default=None)
        if best is None:  # these values make no sense together
            missing.discard(wanted)
            continue
        found.append(best)
        missing -= _sets(best, together)
    return found


def _drawn(wanted: dict[str, Any], columns: dict[str, list[Any]], draw: random.Random) -> Row:
    """Random values beside those that are wanted; plain ones until they make sense together."""
    row = Row(**{name: wanted.get(name, draw.choice(values)) for name, values in columns.items()})
    others = [name for name in columns if name not in wanted]
    for name in draw.sample(others, len(others)):
        if row.makes_sense:
            break
        row = replace(row, **{name: columns[name][0]})
    return row


def _sets(row: Row, together: int) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations(vars(row).items(), together))
