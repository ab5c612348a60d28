"""What is asked of the softmax of a token: names of :data:`STATISTICS`, or instances of :class:`Statistic`.

R rows (tokens), C columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_losses.checks import check_names, check_new, described
from liger_losses.kernels.divergence_forms import Divergence
from liger_losses.kernels.online_softmax import STATISTICS as OF_KERNELS

#: Of log-probabilities ``[R, C]`` (at least -10,000) and the size of the whole vocabulary, terms ``[R, C]``.
Terms = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Statistic:
    """A number for each token: ``S = sum_v phi(log p_v)``.

    With ``psi = d phi / d log p``, ``d S / d z_v = psi_v - p_v sum_u psi_u``. Ranks, blocks, kept columns, two passes
    and zero rows know nothing of it. Without ``psi``, autograd computes it. Without both, it has a row of its own in
    kernels (their names are ``OF_KERNELS``, whose gradients are rows of ``SoftmaxGradient``), or reads single columns.
    A divergence compares with the target's teacher.
    """

    name: str
    phi: Terms | None = None
    psi: Terms | None = None
    divergence: Divergence | None = None
    differentiable: bool = True

    def derivative(self, log_p: Tensor, vocab_size: int) -> Tensor:
        """psi ``[R, C]``."""
        if self.psi is not None:
            return self.psi(log_p, vocab_size)
        assert self.phi is not None
        with torch.enable_grad():
            leaf = log_p.detach().requires_grad_()
            terms = self.phi(leaf, vocab_size)
            if not terms.requires_grad:
                return torch.zeros_like(log_p)
            (derivative,) = torch.autograd.grad(terms.sum(), leaf)
        return derivative


STATISTICS: dict[str, Statistic] = {
    s.name: s
    for s in (
        *(Statistic(name, differentiable=name != "argmax") for name in OF_KERNELS),
        #: Log-probabilities ``[R, k]`` of the target's selected columns, or of its k largest.
        Statistic("selected_logps"),
        #: The ids ``[R, k]`` of the k largest.
        Statistic("columns", differentiable=False),
        #: The log-probability of all columns that are not selected.
        Statistic("rest", differentiable=False),
        #: The entropy at the teacher's temperature, of the columns that both models have.
        Statistic("soft_entropy", differentiable=False),
    )
}
#: Logits ``[R, k]`` of the target's selected columns, on which no other column has an influence.
SELECTED_LOGITS = Statistic("selected_logits")


def registered(names: Iterable[Any]) -> list[str]:
    """Those that users have registered: the rows of the table that have terms."""
    return [name for name in names if isinstance(name, str) and name in STATISTICS and STATISTICS[name].phi is not None]


def asked_for(names: Sequence[str | Statistic], metrics: Sequence[str | Statistic] = ()) -> tuple[Statistic, ...]:
    """The statistics of these names, each once; metrics have no gradient."""
    asked = {s.name: s for s in (STATISTICS[name] if isinstance(name, str) else name for name in names)}
    for name in metrics:
        s = STATISTICS[name] if isinstance(name, str) else name
        asked.setdefault(s.name, replace(s, differentiable=False))
    return tuple(asked.values())


# --- As users have them ---------------------------------------------------------------------------------------------


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
HOW_TO_ASK = {
    "argmax": "metrics='argmax', which has no gradient",
    "selected_logps": "statistics='selected_logps' of linear_statistics or linear_token_loss, with selected=",
    "columns": "metrics='columns' of linear_statistics or linear_token_loss, with selected=Largest(k)",
    "rest": "metrics='rest' of linear_statistics or linear_token_loss, with selected=",
    "divergence": "linear_divergence, or teacher= and divergence= of linear_token_loss",
    "registered": "the registered names in statistics=",
}


class DeclaredStatistics:
    """The :class:`Statistics` that a custom loss reads: reading an undeclared one is an AttributeError.

    It is not a named tuple, since torch.compile reads all fields of a named tuple.

    Args:
        values: the statistics, ``None`` for those not asked for.
        reader: the name of the loss.
        place: where it names its statistics.
        names: of all statistics, registered ones too.
    """

    def __init__(self, values: Sequence[Any], reader: str, place: str, names: Sequence[str] = ()) -> None:
        self._reader, self._place = reader, place
        for name, value in zip(Statistics._fields, values, strict=True):
            if value is not None:
                setattr(self, name, value)
        for i, name in enumerate(registered(names)):
            setattr(self, name, self.registered[..., i])

    def __getattr__(self, name: str) -> Any:
        if name not in Statistics._fields and not registered([name]):
            raise AttributeError(f"there is no statistic {name!r}; it must be one of {', '.join(Statistics._fields)}.")
        how = f"Use statistics={name!r}" if registered([name]) else f"Add {name!r} to {self._place}"
        how = f"Use {HOW_TO_ASK[name]}" if name in HOW_TO_ASK else how
        known = ", ".join([field for field in Statistics._fields if field in self.__dict__])
        declared = f"only {known}" if known else "none"
        raise AttributeError(f"{self._reader} reads statistics.{name}, but declares {declared}. {how}.")


def of_user(token_loss: Callable[..., Any], names: Sequence[str], values: Any, labels: Tensor, **inputs: Tensor) -> Any:
    """What a user's token loss returns, the losses ``[n]``, and derivatives if it has any.

    Raises:
        ValueError: it has not returned one value for each token.
    """
    reader = f"token_loss ({getattr(token_loss, '__name__', type(token_loss).__name__)})"
    place = "statistics=, or to metrics= where it needs no gradient"
    declared: Any = DeclaredStatistics(named(values, names), reader, place, names)
    result = token_loss(declared, labels, **inputs)
    losses = result[0] if isinstance(result, tuple) else result
    if not isinstance(losses, Tensor) or losses.shape != labels.shape:
        raise ValueError(
            f"token_loss must return one value per token, [{len(labels)}], got {described(losses)}. Return it before a "
            "sum or mean: the loss is the sum over the tokens; a mean's divisor goes into token_inputs."
        )
    return result


@dataclass(frozen=True)
class Largest:
    """``selected=Largest(k)``: the k most likely vocabulary entries of each token, in descending order."""

    k: int

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, Integral) or self.k < 1:
            raise ValueError(f"k must be a positive integer, got {self.k!r}.")


def register_statistic(name: str, term: Callable[[Tensor], Tensor], *, replace: bool = False) -> None:
    """Make ``sum_v term(log p_v)`` a statistic that losses may read, differentiable by hidden states, weight and bias.

    PyTorch computes it from blocks of fp32 logits, on every device.

    Args:
        name: a name that no other statistic has. A function of the same module and qualified name replaces the term.
        term: ``log_p [R, V] -> [R, V]``, elementwise and differentiable; ``log_p`` is at least -10,000.
        replace: replace a statistic of this name that another function was registered for.

    Raises:
        TypeError, ValueError: a name that is taken; terms of another shape, that are not finite, whose derivative is
            not, or that are not elementwise.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(f"the name of a new statistic must be an identifier, got {name!r}.")
    earlier = STATISTICS[name].phi if registered([name]) else None
    check_new("statistic", name, {*STATISTICS, "divergence", "registered"}, term, earlier, replace)
    g = torch.Generator().manual_seed(0)
    log_p = torch.randn(3, 7, generator=g, dtype=torch.float64).log_softmax(-1)
    log_p[0, 0] = -1e4
    terms = term(log_p)
    if not isinstance(terms, Tensor) or terms.shape != log_p.shape:
        raise ValueError(f"the term of {name!r} must return one value per entry, {(3, 7)}, got {described(terms)}.")
    row = Statistic(name, functools.wraps(term)(lambda log_p, vocab_size: term(log_p)))
    derivative = row.derivative(log_p, log_p.shape[-1])
    if not (terms.isfinite().all() and derivative.isfinite().all()):
        raise ValueError(f"the term of {name!r}, or its derivative, is not finite for log-probabilities down to -1e4.")
    if not torch.allclose(term(log_p[1:, 2:]), terms[1:, 2:]):
        raise ValueError(f"the term of {name!r} must be elementwise: an entry's value depends on other entries.")
    STATISTICS[name] = row


def named(values: Mapping[str, Tensor], names: Sequence[str] = ()) -> Statistics:
    """Statistics by their names, those that users have registered together."""
    of_users, fields = registered(names), dict(values)
    if of_users:
        fields["registered"] = torch.stack([fields.pop(name) for name in of_users], -1)
    return Statistics(**fields)


def check_asked(targets: Sequence[Any], names: Sequence[str], metrics: Sequence[str]) -> None:
    """Raise ValueError for names that are no statistics of the targets, differentiable ones first."""
    target, of_users = targets[0], registered(names)
    selected = target.selected is not None
    both = ["selected_logps"] * selected + ["divergence"] * (target.teacher is not None)
    known = [*both, *[name for name in OF_KERNELS if name != "argmax"]]
    others = [*["columns"] * isinstance(target.selected, int), *["rest"] * selected, *both, *OF_KERNELS]
    if of_users and target.head.batch_invariant:
        raise ValueError(
            f"{', '.join(of_users)}: a registered statistic is summed in an order that depends on the batch; use a "
            "head without batch_invariant=True."
        )
    check_names([name for name in names if name not in of_users], known, "differentiable statistic", HOW_TO_ASK)
    check_names(metrics, others, "statistic", HOW_TO_ASK)
