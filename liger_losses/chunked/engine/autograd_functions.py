"""The autograd functions behind the operations: statistics, and losses whose gradients are computed in forward.

T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked.engine.call import Call, Tensors
from liger_losses.chunked.engine.query import Statistics
from liger_losses.chunked.engine.stream import Stream, counted_tokens
from liger_losses.kernels.autograd import edges, once_differentiable, scale_

#: Statistics whose gradients do not depend on their values.
_UNREAD = {"logp", "mean_logp", "mean_logit"}


def separable_losses(
    calls: Sequence[tuple[Tensors, Call]], *, statistics: str | None = "per_token"
) -> tuple[Tensor, list[list[Statistics]]]:
    """The sum of the calls' separable losses, and the detached statistics of each call.

    ``statistics`` says which are returned: ``per_token`` for one :class:`Statistics` for each tensor of labels, in its
    shape; ``sum`` for a single one, of 0-dim sums over all tokens; ``None`` for none. A tensor that several calls have
    has one gradient.
    """
    losses, found = list[Tensor](), dict[int, list[Statistics]]()
    one_pass, uses, distinct, numbers = dict[int, Call](), list[list[int]](), list[Any](), dict[int, int]()
    for i, (tensors, call) in enumerate(calls):
        if call.strategy == "one_pass":
            one_pass[i] = call
            uses.append([])
            for tensor in tensors:
                number = numbers.setdefault(id(tensor), len(distinct))
                distinct += [tensor] if number == len(distinct) else []
                uses[-1].append(number)
            continue
        values, query, tokens = compute_statistics(tensors, call), call.query, call.tokens
        active = {name: tokens.gather_flat(value) for name, value in values.items()}
        given = query.token_inputs if query.token_weights is None else query.token_weights
        each = tokens.masked(query.losses(active, tokens.labels, given))
        losses.append(each.sum().to(call.work.logits_dtype))
        found[i] = _returned(call, {name: values[name].detach() for name in call.outputs}, statistics)
    if one_pass:
        loss, *outputs = _OnePassLosses.apply([*one_pass.values()], uses, statistics, *distinct)
        losses.append(loss)
        for i, call in () if statistics is None else one_pass.items():
            found[i] = _returned(call, dict(zip(call.outputs, outputs, strict=False)), statistics)
            del outputs[: len(call.outputs)]
    total = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
    return total, [] if statistics is None else [found[i] for i in range(len(calls))]


def statistics_of(tensors: Tensors, call: Call) -> list[Statistics]:
    """The statistics of each tensor of labels, in its shape."""
    return _returned(call, compute_statistics(tensors, call), "per_token")


def _returned(call: Call, values: Mapping[str, Tensor], statistics: str | None) -> list[Statistics]:
    """Return the statistics ``[T]`` of all tokens as :func:`separable_losses` does."""
    if statistics == "sum":
        return [Statistics(**{name: value.sum() for name, value in values.items()})]
    return [Statistics(**of_one) for of_one in call.tokens.split(values)]


def compute_statistics(
    tensors: Tensors, call: Call, known: Mapping[str, Tensor] | None = None, others: Sequence[str] = ()
) -> dict[str, Tensor]:
    """The statistics and metrics of every token, ``[T]`` each, by any strategy but ``one_pass``; where nothing needs a
    gradient, with ``others`` too.

    ``known`` are these, and ``lse``, of an earlier call without gradients, which are not computed again.
    """
    if call.strategy != "statistics":
        outputs = _LinearStatistics.apply(call, known, *tensors)
        return dict(zip(call.outputs, outputs, strict=True))
    weight, bias, *hidden = tensors
    # Nothing else could need a gradient: entering and leaving the mode takes the host as long as an allocation.
    may_record = call.quantized is not None or call.query.comparison is not None
    with torch.no_grad() if may_record else nullcontext(), without_autocast(weight):
        values, _ = Stream(call, weight, bias, hidden).statistics()
    names = tuple(dict.fromkeys((*call.outputs, *others))) if others else call.outputs
    return dict(zip(names, call.tokens.scatter(values, names), strict=True))


def without_autocast(weight: Tensor) -> AbstractContextManager[Any]:
    """Autocast is off, and the weight's device current, where Triton launches: a model may be spread over several GPUs.

    Switching autocast off costs the host as much as several launches: only where it is on.
    """
    on_device, kind = torch.cuda.device_of(weight), weight.device.type
    if not torch.is_autocast_enabled(kind):
        return on_device
    both = ExitStack()
    both.enter_context(on_device)
    both.enter_context(torch.autocast(kind, enabled=False))
    return both


class _LinearStatistics(torch.autograd.Function):
    """Statistics in forward; in backward the gradient of any function of them."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, known: Mapping[str, Tensor] | None, weight: Tensor, bias: Tensor | None, *hidden: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.block, ctx.unit_gradient = call, None, None
        with without_autocast(weight):
            stream = Stream(call, weight, bias, hidden)
            if known is not None:
                values = {name: call.tokens.gather_all(value) for name, value in known.items()}
            elif call.strategy == "frozen_head":
                values, ctx.unit_gradient = stream.statistics_and_unit_gradient()
            else:
                values, ctx.block = stream.statistics(keep_block=call.strategy == "resident")
        unread = {*call.query.metrics} - {"lse", "columns"} | (_UNREAD if call.query.comparison is None else set())
        needed = {name: value for name, value in values.items() if name not in unread}
        ctx.saved_names = tuple(needed)
        # The labels are saved for their version alone: they may be the user's own, and must not have changed by then.
        saved = weight, bias, *stream.opened.flat, *needed.values(), call.tokens.labels
        ctx.save_for_backward(*saved, *edges(*hidden))
        outputs = call.tokens.scatter(values, call.outputs)
        # Users may change an output in place; what backward needs must not change with it.
        shared = {*map(id, values.values())}
        outputs = [out.clone() if id(out) in shared else out for out in outputs]
        ctx.mark_non_differentiable(*outputs[len(call.query.statistics) :])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        weight, bias, *rest = ctx.saved_tensors
        hidden, saved = rest[: len(call.needs_hidden)], rest[len(call.needs_hidden) :]
        values = dict(zip(ctx.saved_names, saved, strict=False))
        gradients = {
            name: call.tokens.gather_all(g)
            for name, g in zip(call.query.statistics, upstream, strict=False)
            if g is not None
        }
        with without_autocast(weight):
            if ctx.unit_gradient is not None:
                scaled = Stream(call, weight, bias, hidden, multiplies=False).scaled(ctx.unit_gradient, gradients)
                return None, None, None, None, *scaled
            # Gradients overwrite the block, and its memory is wanted back: a second backward computes it again.
            block, ctx.block = ctx.block, None
            index = counted_tokens(call, gradients)
            stream = Stream(call, weight, bias, hidden, multiplies=block is None)
            return None, None, *stream.gradients(values, gradients, block, index)


class _OnePassLosses(torch.autograd.Function):
    """Separable losses, one after another, and their gradients in forward; backward only scales these."""

    @staticmethod
    def forward(
        ctx: Any, calls: Sequence[Call], uses: Sequence[list[int]], statistics: str | None, *tensors: Any
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.calls, ctx.uses = calls, uses
        loss, outputs, ctx.gradients = _run(calls, uses, tensors, statistics)
        ctx.save_for_backward(*tensors, *[call.tokens.labels for call in calls])
        ctx.mark_non_differentiable(*outputs)
        return loss, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *statistics: None) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if upstream is None:
            return (None,) * len(ctx.needs_input_grad)
        if gradients is None:
            # The first backward scaled them in place and returned them: a second one computes them again.
            *_, gradients = _run(ctx.calls, ctx.uses, ctx.saved_tensors[: -len(ctx.calls)], statistics=None)
        backend = ctx.calls[0].backend
        scale_(upstream, [grad for grad in gradients if grad is not None], backend=backend)
        return None, None, None, *gradients


def _run(
    calls: Sequence[Call], uses: Sequence[list[int]], tensors: Sequence[Any], statistics: str | None
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """The loss, all calls' statistics (see :func:`separable_losses`), and the gradient of each tensor, which is added
    up as the calls run."""
    losses, outputs = list[Tensor](), list[Tensor]()
    gradients: list[Tensor | None] = [None] * len(tensors)
    for call, places in zip(calls, uses, strict=True):
        weight, bias, *hidden = [tensors[i] for i in places]
        with without_autocast(weight):
            stream = Stream(call, weight, bias, hidden)
            loss, values, found = stream.token_loss()
        losses.append(loss)
        if statistics == "sum":
            outputs += [call.tokens.masked(values[name]) for name in call.outputs]
        elif statistics is not None:
            outputs += call.tokens.scatter(values, call.outputs)
        for i, grad in zip(places, found, strict=True):
            before = gradients[i]
            if grad is not None:
                gradients[i] = grad if before is None else before.add_(grad)
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum(), outputs, gradients
