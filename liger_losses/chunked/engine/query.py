"""What a call computes for each token: statistics, a divergence from a teacher, or a loss of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from liger_losses.checks import check_like_labels, check_names, check_new, check_temperature, check_vector
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.ranks import Ranks
from liger_losses.chunked.engine.teachers import Teacher, TeacherLogits, check_comparison
from liger_losses.chunked.engine.tokens import Tokens
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.logit_transform import LogitTransform
from liger_losses.kernels.softmax_stats import STATISTICS

T = TypeVar("T")

_DIFFERENTIABLE: tuple[str, ...] = tuple(name for name in STATISTICS if name != "argmax")


class Statistics(NamedTuple):
    """Per-token statistics of the softmax of the logits; ``None`` if not requested, 0 for masked tokens.

    :func:`liger_losses.kernels.softmax_stats.softmax_statistics` defines most of them. ``selected_logps [..., k]`` are
    the log-probabilities of the selected vocabulary entries. ``divergence`` is the divergence from a teacher.
    ``columns [..., k]`` are the ids of the largest log-probabilities. ``rest`` is the log-probability of all entries
    together that are not selected. ``registered [..., m]`` are statistics of :func:`liger_losses.register_statistic`,
    in the order of the request.
    """

    logp: Any = None
    entropy: Any = None
    lse: Any = None
    mean_logp: Any = None
    log_sum_sq_probs: Any = None
    mean_logit: Any = None
    argmax: Any = None
    selected_logps: Any = None
    divergence: Any = None
    columns: Any = None
    rest: Any = None
    registered: Any = None


#: Statistics that not every place takes: how to ask for them.
_HOW_TO_ASK = {
    "argmax": "metrics='argmax', which has no gradient",
    "selected_logps": "statistics='selected_logps' of linear_statistics or linear_token_loss, with selected=",
    "columns": "metrics='columns' of linear_statistics or linear_token_loss, with selected=Largest(k)",
    "rest": "metrics='rest' of linear_statistics or linear_token_loss, with selected=",
    "divergence": "linear_divergence",
    "registered": "the registered names in statistics=",
}


class DeclaredStatistics:
    """The :class:`Statistics` that a custom loss reads: reading an undeclared one is an AttributeError.

    It is not a named tuple, since torch.compile reads all fields of a named tuple.

    Args:
        values: the statistics, ``None`` for those not asked for.
        reader: the name of the loss.
        place: where it names its statistics.
        registered: the names of ``values.registered``.
    """

    def __init__(self, values: Sequence[Any], reader: str, place: str, registered: Sequence[str] = ()) -> None:
        self._reader, self._place = reader, place
        for name, value in zip(Statistics._fields, values, strict=True):
            if value is not None:
                setattr(self, name, value)
        if registered:
            for name, value in zip(registered, self.registered.unbind(-1), strict=True):
                setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in Statistics._fields and name not in REGISTERED:
            raise AttributeError(f"there is no statistic {name!r}; it must be one of {', '.join(Statistics._fields)}.")
        how = _HOW_TO_ASK.get(name, f"statistics={name!r}" if name in REGISTERED else None)
        known = ", ".join([field for field in Statistics._fields if field in self.__dict__])
        declared = f"only {known}" if known else "none"
        advice = f"Add {name!r} to {self._place}" if how is None else f"Use {how}"
        raise AttributeError(f"{self._reader} reads statistics.{name}, but declares {declared}. {advice}.")


@dataclass(frozen=True)
class Comparison:
    """What a student is compared with, and how: see :func:`liger_losses.linear_divergence`."""

    teacher: Teacher | TeacherLogits
    divergence: Divergence
    temperature: float | Tensor = 1.0  # what both models' logits are divided by in the divergence

    def __post_init__(self) -> None:
        if type(self.temperature) is not float or not 0.0 < self.temperature < math.inf:
            LogitTransform(self.temperature)  # raises unless it can be one


@dataclass(frozen=True)
class Largest:
    """``selected=Largest(k)``: the k most likely vocabulary entries of each token, in descending order."""

    k: int

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, Integral) or self.k < 1:
            raise ValueError(f"k must be a positive integer, got {self.k!r}.")


class EqualWeights(NamedTuple):
    """The same weight ``scale / total`` for every token that carries loss; ``None`` is their number."""

    scale: float
    total: Any = None  # a number, or a tensor [] on the labels' device


def changed(given: T, **fields: Any) -> T:
    """Return a copy with other values of some fields, as ``dataclasses.replace``, but without running the constructor.

    The constructor's checks take host time, and the fields have passed them.
    """
    made = copy.copy(given)
    made.__dict__.update(fields)
    return made


@dataclass(frozen=True)
class Query:
    """What a call computes for each token.

    Per-token tensors (``selected``, ``token_inputs``, ``token_weights``, temperatures) have the labels' shape in what a
    user gives, and are ``[N]`` or ``[N, k]`` in a :class:`Call`.
    """

    statistics: tuple[str, ...]  # names of Statistics that are differentiated
    metrics: tuple[str, ...] = ()  # further names, without gradient
    class_weight: Tensor | None = None  # [V], the c of mean_logp
    selected: Tensor | None = None  # the columns of selected_logps
    largest: int = 0  # or how many columns, of the largest log-probabilities of each token
    registered: tuple[str, ...] = ()  # what users have registered, whose statistic is called "registered"
    comparison: Comparison | None = None  # the other side of the divergence
    token_loss: Callable[..., Any] | None = None  # of a separable loss: (statistics, labels, **inputs) -> [n]
    token_inputs: Mapping[str, Tensor] = field(default_factory=dict)  # what it gets as keywords
    token_weights: Mapping[str, Any] | None = None  # of a separable loss that is a weighted sum of statistics
    counts: Tensor | None = None  # of a separable loss: bool, false for tokens whose term is a constant 0

    @property
    def separable(self) -> bool:
        """Whether the loss is a sum over tokens, each term a function of one token's statistics."""
        return self.token_loss is not None or self.token_weights is not None

    @property
    def of_exponentials(self) -> bool:
        """Whether blocks may hold exponentials of the logits instead of the logits."""
        return {*self.statistics} <= {"logp", "lse"} and {*self.metrics} <= {"logp", "lse", "mean_logit", "entropy"}

    @property
    def needs_logits(self) -> bool:
        """Whether blocks must hold whole rows of fp32 logits."""
        return self.selects or self.comparison is not None or bool(self.registered)

    @property
    def selects(self) -> bool:
        """Whether there are columns of selected_logps."""
        return self.selected is not None or self.largest > 0

    @property
    def in_torch(self) -> bool:
        """Whether PyTorch computes something of whole rows of logits, on every device."""
        without_kernel = self.comparison is not None and not self.comparison.divergence.has_kernel
        return bool(self.registered) or without_kernel

    def of_active_tokens(self, tokens: Tokens, dtype: torch.dtype, ranks: Ranks, numbers: bool = False) -> Query:
        """The query with its per-token tensors gathered; tensors that enter the arithmetic are cast to ``dtype``.

        With ``numbers``, equal weights may be numbers.
        """
        selected, weights, comparison = self.selected, self.token_weights, self.comparison
        of_tokens = self.token_inputs or selected is not None or weights is not None or comparison is not None
        if not of_tokens and self.class_weight is None and not self.metrics:
            return self
        if comparison is not None and isinstance(comparison.temperature, Tensor):
            comparison = replace(comparison, temperature=tokens.temperatures(comparison.temperature, dtype))
        if selected is not None:
            selected = tokens.gather_like_labels(selected)
            selected = tokens.masked(selected)  # tokens without loss may hold anything
            ranks.check_selected(selected)
        if weights is not None:
            weights = {
                name: tokens.equal_weights(*weight, dtype, numbers)
                if isinstance(weight, EqualWeights)
                else tokens.masked(tokens.gather_like_labels(weight.detach())).to(dtype)
                for name, weight in weights.items()
            }
        made = object.__new__(Query)  # whose constructor takes the host longer
        made.__dict__.update(
            self.__dict__,
            metrics=self.metrics and tuple([name for name in self.metrics if name not in self.statistics]),
            class_weight=None if self.class_weight is None else self.class_weight.detach().to(dtype).contiguous(),
            selected=selected,
            comparison=comparison,
            token_inputs=self.token_inputs
            and {n: tokens.masked_values(value) for n, value in self.token_inputs.items()},
            token_weights=weights,
            counts=None if self.counts is None else tokens.gather_like_labels(self.counts),
        )
        return made

    def losses(self, statistics: Mapping[str, Tensor], labels: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        """The tokens' losses ``[n]``, differentiable by their statistics; ``given`` are the token weights or inputs.

        Where a token loss returns values and derivatives, a function that has both.
        """
        if self.token_loss is None:
            terms = [weight * statistics[name] for name, weight in given.items()]
            return sum(terms[1:], terms[0])
        losses, derivatives = self.evaluated(statistics, labels, given)
        if derivatives is None:
            return losses
        terms = [g.detach() * (statistics[n] - statistics[n].detach()) for n, g in derivatives.items()]
        return losses.detach() + sum([term.sum(-1) if term.dim() > 1 else term for term in terms])

    def evaluated(self, statistics: Mapping[str, Tensor], labels: Tensor, inputs: Mapping[str, Tensor]) -> Any:
        """What the token loss returns, the tokens' losses ``[n]``, and the derivatives that it returns, or ``None``.

        Raises:
            ValueError: it has not returned one value for each token.
        """
        function: Any = self.token_loss
        reader = f"token_loss ({getattr(function, '__name__', type(function).__name__)})"
        place = "statistics=, or to metrics= where it needs no gradient"
        named: Any = DeclaredStatistics(Statistics(**statistics), reader, place, self.registered)
        result = function(named, labels, **inputs)
        losses, derivatives = result if isinstance(result, tuple) else (result, None)
        if not isinstance(losses, Tensor) or losses.shape != labels.shape:
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"token_loss must return one value per token, [{len(labels)}], got {got}. Return it before any sum or "
                "mean: the loss is the sum over the tokens; a mean's divisor goes into token_inputs."
            )
        return losses, derivatives

    @property
    def weight_tensors(self) -> dict[str, Tensor]:
        """The token weights that are not equal ones."""
        weights = (self.token_weights or {}).items()
        return {name: weight for name, weight in weights if not isinstance(weight, EqualWeights)}

    def subset(self, index: Tensor, losses: bool = False) -> Query:
        """The query for these of the active tokens; with what their ``losses`` read, unless these are
        known."""
        comparison = self.comparison
        if comparison is not None and isinstance(comparison.temperature, Tensor):
            comparison = replace(comparison, temperature=comparison.temperature[index])
        selected = None if self.selected is None else self.selected[index]
        inputs = {name: value[index] for name, value in self.token_inputs.items()} if losses else {}
        return changed(self, selected=selected, comparison=comparison, token_inputs=inputs, token_weights=None)


def check_query(query: Query, head: Head, shapes: Sequence[torch.Size]) -> int:
    """Raise TypeError or ValueError for a query that does not fit; return the number of columns that are computed."""
    if query.class_weight is not None:
        check_vector("class_weight", query.class_weight, head.weight, head.vocab_size)
    names, vocab_size = _DIFFERENTIABLE, head.vocab_size
    metrics: tuple[str, ...] = STATISTICS
    if query.selects:
        names, metrics = ("selected_logps", *names), ("rest", *metrics)
    if query.largest:
        metrics = ("columns", *metrics)
        if query.largest > vocab_size:
            raise ValueError(f"k must be at most the {vocab_size} columns of the head, got {query.largest}.")
    if query.registered:
        names = ("registered", *names)
        if head.batch_invariant:
            raise ValueError(
                f"{', '.join(query.registered)}: a registered statistic is summed in an order that depends on the "
                "batch; use a head without batch_invariant=True."
            )
    if query.comparison is not None:
        names = ("divergence", "logp")
        check_comparison(query.comparison.teacher, query.comparison.divergence, head, shapes[0])
        if "logp" not in query.statistics:
            # The divergence is of the columns that both models have; the student's log-probabilities, of all it has.
            vocab_size = min(vocab_size, query.comparison.teacher.vocab_size)
    divided = head.transform if query.comparison is None else query.comparison
    if isinstance(divided.temperature, Tensor):
        check_temperature(divided.temperature, head.weight.device, shapes)
    check_names(query.statistics, names, "differentiable statistic", _HOW_TO_ASK)
    check_names(query.metrics, ("entropy",) if query.comparison is not None else metrics, "statistic", _HOW_TO_ASK)
    like = shapes[0] if len(shapes) == 1 else torch.Size([sum([math.prod(shape) for shape in shapes])])
    if query.selected is not None:
        check_like_labels("selected", query.selected, like, head.weight)
        if query.selected.dtype != torch.int64 or query.selected.shape[:-1] != like:
            raise ValueError(
                f"selected must be int64 [..., k], k columns for each of the labels {tuple(like)}, got "
                f"{query.selected.dtype} of shape {tuple(query.selected.shape)}."
            )
    for name, value in {**query.token_inputs, **query.weight_tensors}.items():
        check_like_labels(name, value, like, head.weight)
    return vocab_size


# --- Statistics of a user's own: sums over the vocabulary of a function of the log-probabilities ----------------------

#: The terms t of what :func:`register_statistic` was given, by name. With ``S = sum_v t(log p_v)``, the gradient is
#: ``dS / dz_v = t'(log p_v) - p_v sum_u t'(log p_u)``, where t' comes from autograd.
REGISTERED: dict[str, Callable[[Tensor], Tensor]] = {}


def register_statistic(name: str, term: Callable[[Tensor], Tensor]) -> None:
    """Make ``sum_v term(log p_v)`` a statistic that losses may read, differentiable by hidden states, weight and bias.

    PyTorch computes it from blocks of fp32 logits, on every device.

    Args:
        name: a name that no other statistic has. A function of the same module and qualified name replaces the term.
        term: ``log_p [R, V] -> [R, V]``, elementwise and differentiable; ``log_p`` is at least -10,000.

    Raises:
        TypeError, ValueError: a name that is taken; terms of another shape, that are not finite, whose derivative is
            not, or that are not elementwise.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(f"the name of a new statistic must be an identifier, got {name!r}.")
    taken = {*REGISTERED, *STATISTICS, "selected_logps", "divergence", "columns", "rest", "registered"}
    check_new("statistic", name, taken, term, REGISTERED.get(name))
    g = torch.Generator().manual_seed(0)
    log_p = torch.randn(3, 7, generator=g, dtype=torch.float64).log_softmax(-1)
    log_p[0, 0] = -1e4
    found, derivative = _term_and_derivative(term, log_p)
    if not isinstance(found, Tensor) or found.shape != log_p.shape:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"the term of {name!r} must return one value per entry, {tuple(log_p.shape)}, got {got}.")
    if not (found.isfinite().all() and derivative.isfinite().all()):
        raise ValueError(f"the term of {name!r}, or its derivative, is not finite for log-probabilities down to -1e4.")
    if not torch.allclose(term(log_p[1:, 2:]), found[1:, 2:]):
        raise ValueError(f"the term of {name!r} must be elementwise: an entry's value depends on other entries.")
    REGISTERED[name] = term


def _term_and_derivative(term: Callable[[Tensor], Tensor], log_p: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = log_p.detach().requires_grad_()
        found = term(leaf)
        if not isinstance(found, Tensor) or not found.requires_grad:
            return found, torch.zeros_like(log_p)
        (derivative,) = torch.autograd.grad(found.sum(), leaf)
    return found.detach(), derivative


def registered_gradient(names: Sequence[str], log_p: Tensor, upstream: Tensor, ranks: Ranks) -> Tensor:
    """d loss / d logits ``[R, V]`` from d loss / d statistics ``[R, m]``."""
    derivative = torch.zeros_like(log_p)
    for name, g in zip(names, upstream.unbind(1), strict=True):
        derivative += g[:, None] * _term_and_derivative(REGISTERED[name], log_p)[1]
    total = ranks.sum_(derivative.sum(1))
    return derivative.addcmul_(log_p.exp(), total[:, None], value=-1.0)
