"""Objectives and divergences of a user's own, as rows of the tables that losses read.

Registration runs each of them once on random numbers in float64. It raises an error for a wrong shape, for a value or a
gradient that is not finite, and for a derivative that disagrees with autograd.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from liger_losses.checks import check_names, check_new, described
from liger_losses.chunked.losses import policy_estimates, policy_tables
from liger_losses.chunked.losses.policy import GRPOOptions
from liger_losses.chunked.losses.policy_objectives import PolicyInputs, PolicyTensors, coupled_terms, policy_terms
from liger_losses.chunked.losses.policy_tables import LossType, Objective, PolicyOptions
from liger_losses.kernels.divergence_forms import FORMS, Divergence, Form, finite_logs
from liger_losses.kernels.divergence_terms import series_of
from liger_losses.kernels.divergence_terms import terms as series_terms

#: Sizes of the random batch: completions, and tokens of the longest.
_B, _T, _V = 4, 5, 12


def register_objective(
    name: str,
    value: Callable[..., Tensor],
    *,
    normalizer: str = "token_mean",
    level: str = "token",
    mask: str = "none",
    cut: Callable[..., Tensor] | None = None,
    coupled: bool = False,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    replace: bool = False,
) -> None:
    """Make ``loss_type=name`` a policy loss: ``sum_t weight_t (-value_t + beta kl_t)``.

    Parameters of ``value`` whose default is a number are options of the loss: of
    ``value(log_ratio, logps, advantages, options, power=2.0)``, ``LigerFusedLinearGRPOLoss(loss_type=name,
    power=1.5)``. So are keyword-only parameters without a default, which must be given.

    Args:
        name: a name that no other loss type has. A function of the same module and qualified name replaces the row.
        value: the objective, which is maximized: ``(log_ratio, logps, advantages, options) -> [...]``, elementwise over
            any number of tokens. It gets the log-ratios to the old policy, log-probabilities, advantages, and the
            loss's :class:`PolicyOptions`. Autograd differentiates it; detach all constants.
        normalizer: the divisor of the tokens, a row of ``NORMALIZERS``.
        level: the definition of the ratio, a row of ``RATIOS``.
        mask: which tokens have an objective, a row of ``MASKS``.
        cut: a function of (ratios, advantages, options) that returns bools, true where clipping removes the gradient.
            It is for the metric ``clip_ratio``.
        coupled: set it if a token's value depends on other tokens. ``value`` then gets ``[B, T]`` with zeros at
            padding, and a fifth argument, a :class:`Batch`, whose ``mask``, ``lengths`` and ``sequence_sums`` it may
            use.
        defaults: values of options that are ``None`` by default.
        replace: replace a row of this name that another function was registered for.

    Raises:
        TypeError, ValueError: a name that is taken or unknown; a value of the wrong shape, that is not finite, without
            a gradient, or that depends on other tokens without ``coupled``.
    """
    earlier = policy_tables.OBJECTIVES.get(name) if name in policy_tables.LOSS_TYPES else None
    check_new("objective", name, policy_tables.LOSS_TYPES, value, earlier and earlier.value, replace)
    check_names([normalizer], policy_estimates.NORMALIZERS, "normalizer")
    check_names([level], policy_tables.RATIOS, "level")
    check_names([mask], policy_tables.MASKS, "mask")
    options = {
        p.name: p.default
        for p in inspect.signature(value).parameters.values()
        if type(p.default) in (int, float) or (p.default is p.empty and p.kind is p.KEYWORD_ONLY)
    }
    taken = sorted({*options} & {*GRPOOptions.__dataclass_fields__})
    if taken:
        raise ValueError(f"{', '.join(taken)}: all policy losses have an option of this name; take another one.")
    objective = Objective(value, cut, coupled, whole=coupled, options=options)
    row = LossType(name, normalizer, level != "token", level, mask, {**defaults})
    with _on_trial(name, (policy_tables.OBJECTIVES, objective), (policy_tables.LOSS_TYPES, row)):
        _check_objective(name, coupled or level != "token", options)


def _check_objective(name: str, coupled: bool, defaults: Mapping[str, Any]) -> None:
    g = torch.Generator().manual_seed(0)
    logps, old = (-torch.rand(_B, _T, generator=g, dtype=torch.float64) * 3 - 0.1 for _ in range(2))
    mask = torch.arange(_T) < torch.tensor([_T, 2, 3, 1])[:, None]
    advantages = torch.randn(_B, generator=g, dtype=torch.float64)
    values = {option: 0.5 if value is Parameter.empty else value for option, value in defaults.items()}
    options = PolicyOptions(loss_type=name, beta=0.0, max_completion_length=_T, objective_options=values)
    leaf = torch.where(mask, logps, 0.0).requires_grad_()
    prompts = torch.arange(_B) // 2
    tensors = PolicyTensors(advantages, mask, old_logps=old, sampling_logps=old, prompts=prompts)
    inputs, said = PolicyInputs(options, tensors), f"the objective {name!r}"
    terms = coupled_terms(leaf, inputs)
    if not isinstance(terms, Tensor) or terms.shape not in ((_B, _T), (_B, 1)):
        raise ValueError(f"{said} must return a value for each token, [{_B}, {_T}], got {described(terms)}.")
    terms = torch.where(mask, terms, 0.0)
    advice = "limit what exp takes, such as log_ratio.clamp(max=80), and divisors and roots from below"
    _check_finite(said, terms, advice=advice)
    if not terms.requires_grad:
        raise ValueError(f"{said} has no gradient with respect to log_ratio or logps: do not detach all of it.")
    (gradient,) = torch.autograd.grad(terms.sum(), leaf, retain_graph=True)
    _check_finite(f"the gradient of {said}", gradient, advice=advice)
    if not gradient.any():
        raise ValueError(f"the gradient of {said} is 0 for every token: do not detach all of it.")
    if coupled:
        return
    (first,) = torch.autograd.grad(terms[0, 0], leaf)
    of_first = {name: value[:1, 0] for name, value in inputs.tensors.items()}
    alone = policy_terms(leaf[:1, 0], of_first, inputs.options)
    first[0, 0] = 0.0
    if first.any() or not torch.allclose(alone, terms[0, :1]):
        raise ValueError(f"{said} depends on other tokens: pass coupled=True.")


def register_divergence(
    name: str,
    terms: Callable[..., Any],
    *,
    triton: Any = None,
    balanced: bool = False,
    smooth: bool = False,
    power: Callable[[float, float, float], float] = lambda a, b, c: 1.0,
    replace: bool = False,
) -> Callable[..., Divergence]:
    """Make ``sum_v f(log p_v, log q_v)`` of the student's p and the teacher's q a divergence.

    Args:
        name: a name that no other divergence has. A function of the same module and qualified name replaces the row.
        terms: ``(log_p, log_q) -> f`` or ``-> (f, h)``, elementwise, in torch. If ``h = df / d log p`` is not returned,
            autograd computes it. Up to three more parameters are numbers, the parameters of the divergence.
        triton: the same in Triton, a ``@jit`` function ``(log_p, log_q, a, b, c) -> (f, h)``. Without it, torch
            computes the terms on every device; the matrix products are as fast.
        balanced: say that ``sum_v h`` is 0 for all p and q, as for the forward KL. Gradients then leave it out.
        smooth: compute f and h close to the teacher as power series in ``log p - log q``. The series are found by
            evaluating ``terms`` on complex numbers, so it must accept them, use no ``abs``, ``sign``, ``clamp`` or
            ``where``, and return ``(f, h)``.
        replace: replace a row of this name that another function was registered for.
        power: with ``smooth``, a function of (a, b, c) that returns the s for which ``f / q^s`` depends only on
            ``log p - log q``.

    Returns:
        A function that makes the :class:`Divergence` of parameters, with their names and defaults in ``terms``, for
        :class:`liger_losses.DistillationLoss`, :func:`liger_losses.linear_divergence` and
        :func:`liger_losses.functional.divergence`.

    Raises:
        TypeError, ValueError: a name that is taken; terms of the wrong shape or that are not finite (of probabilities
            of 0 too, which are logarithms of -10,000); an h that is not the derivative of f; another sum of h than 0
            with ``balanced``; a divergence that is not 0 at p = q, or negative.
    """
    earlier = FORMS.get(name)
    check_new("divergence", name, {**FORMS, "cosine": None}, terms, earlier and earlier.torch, replace)
    of_terms = inspect.signature(terms)
    parameters = list(of_terms.parameters.values())
    variadic = any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters)
    if variadic or not 2 <= len(parameters) <= 5:
        raise TypeError(f"terms must take log_p, log_q and up to three parameters, got {of_terms}.")
    signature = inspect.Signature(parameters[2:])

    def called(*values: Any) -> Any:
        bound = inspect.BoundArguments(of_terms, OrderedDict(zip(of_terms.parameters, values, strict=False)))
        return terms(*bound.args, **bound.kwargs)

    @functools.wraps(terms)
    def with_parameters(log_p: Tensor, log_q: Tensor, a: float, b: float, c: float) -> tuple[Tensor, Tensor]:
        result = called(log_p, log_q, a, b, c)
        if isinstance(result, tuple):
            return result
        if log_p.is_complex():
            raise TypeError(f"the divergence {name!r} must return (f, h) for smooth=True.")
        with torch.enable_grad():
            leaf = log_p.detach().requires_grad_()
            summed = called(leaf, log_q, a, b, c).sum()
            if not summed.requires_grad:
                raise ValueError(
                    f"the divergence {name!r} must be torch code that autograd differentiates, or return (f, h)."
                )
            (h,) = torch.autograd.grad(summed, leaf)
        return result, h

    def make(*values: float, **named: float) -> Divergence:
        """The divergence of these parameters."""
        try:
            bound = signature.bind(*values, **named)
        except TypeError as error:
            raise TypeError(f"the divergence {name!r} takes {signature}: {error}.") from None
        bound.apply_defaults()
        return Divergence(name, *bound.arguments.values())

    make.__signature__ = signature  # type: ignore[attr-defined]
    values = [
        value if parameter.default is parameter.empty else parameter.default
        for parameter, value in zip(parameters[2:], (0.3, 0.4, 0.5), strict=False)
    ]
    with _on_trial(name, (FORMS, Form(with_parameters, triton, balanced, power, smooth))):
        series_of.cache_clear()  # of the form that this one replaces
        _check_divergence(Divergence(name, *values))
    return make


def _check_divergence(which: Divergence) -> None:
    g = torch.Generator().manual_seed(0)
    log_p, log_q = (torch.randn(3, _V, generator=g, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    form, said, parameters = FORMS[which.form], f"the divergence {which.form!r}", (which.a, which.b, which.c)
    for p, q in ((log_p, log_q), (log_q, log_q)):
        f, h = form.torch(p, q, *parameters)
        if not all(isinstance(x, Tensor) and x.shape == p.shape for x in (f, h)):
            raise ValueError(f"{said} must return a term for each entry, of shape {tuple(p.shape)}.")
        _check_finite(said, f, h)
        leaf = p.clone().requires_grad_()
        value, _ = form.torch(leaf, q, *parameters)
        (derivative,) = torch.autograd.grad(value.sum(), leaf)
        if not torch.allclose(h, derivative, rtol=1e-6, atol=1e-9):
            worst = float((h - derivative).abs().max())
            raise ValueError(f"{said}: h is not the derivative of f by log p; the two differ by up to {worst:.3g}.")
        total, largest = f.sum(-1), float(h.sum(-1).abs().max())
        if form.balanced and largest > 1e-9:
            raise ValueError(f"{said} is not balanced: the sum of h is {largest:.3g}, and not 0.")
        if float(total.min()) < -1e-9 or (p is q and float(total.abs().max()) > 1e-9):
            raise ValueError(f"{said} must be 0 where p = q, and positive elsewhere; got {total.tolist()}.")
    cut = log_p.clone()
    cut[:, 0] = -torch.inf
    cut = finite_logs(cut)
    for p, q in ((cut, log_q), (log_q, cut), (cut, cut)):
        _check_finite(f"{said} of a probability of 0", *form.torch(p, q, *parameters))
    near = log_q + 0.005 * (log_p - log_q)
    for series, exact in zip(series_terms(which, near, log_q), form.torch(near, log_q, *parameters), strict=True):
        if not torch.allclose(series, exact, rtol=1e-6, atol=1e-12):
            raise ValueError(
                f"{said} is no power series in log p - log q close to the teacher, as smooth=True says: write it "
                "without abs, sign, clamp and where, give power= if f / q^s depends on log p - log q for another s "
                "than 1, or leave out smooth=."
            )


@contextlib.contextmanager
def _on_trial(name: str, *rows: tuple[dict[str, Any], Any]) -> Iterator[None]:
    """Rows of tables, which are again as before if what runs here raises."""
    before = [(table, dict(table)) for table, _ in rows]
    for table, row in rows:
        table[name] = row
    try:
        yield
    except BaseException:
        for table, earlier in before:
            table.clear()
            table.update(earlier)
        raise


def _check_finite(
    what: str,
    *values: Tensor,
    advice: str = "limit them, such as log_q.clamp(min=-20), or a divisor: 0.99 * q + 0.01 * p for q, p + q + 1e-30 "
    "for p + q",
) -> None:
    for value in values:
        if not value.isfinite().all():
            raise ValueError(
                f"{what} is not finite for finite log-probabilities: {value[~value.isfinite()][:3].tolist()}; {advice}."
            )
