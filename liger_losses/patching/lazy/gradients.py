"""``torch.autograd.grad(loss, logits)``: the graph leads from a loss to the hidden states, and not through the logits.

The engine's gradients go from a loss to the hidden states, past the logits. So results that were computed from lazy
logits are marked in the graph with the operations that made them, and these are repeated with the logits' values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

_MARK = "lazy logits"


class GradientHook(torch.autograd.Function):
    """The tensors themselves; ``hook`` gets their gradients, all at once, and returns those that go on."""

    @staticmethod
    def forward(ctx: Any, hook: Callable[[list[Tensor]], list[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.hook = hook
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        changed = iter(ctx.hook([gradient for gradient in gradients if gradient is not None]))
        return None, *(None if gradient is None else next(changed) for gradient in gradients)


@dataclass(frozen=True, eq=False)
class Origin:
    """The operation on lazy logits that a tensor comes from; it keeps neither of them alive.

    Attributes:
        source: the origin of the logits, or ``None`` for those that a head has returned.
        func, args, kwargs: the operation, without its first argument.
        index: which of its results.
    """

    source: Origin | None = None
    func: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Any = None
    index: int | None = None

    def repeat(self, start: Origin, values: Tensor) -> Tensor:
        """The tensor, computed from the ``values`` of the logits whose origin is ``start``."""
        if self is start:
            return values
        assert self.source is not None
        assert self.func is not None
        result = self.func(self.source.repeat(start, values), *self.args, **self.kwargs)
        found: Tensor = result if self.index is None else result[self.index]
        return found

    def comes_from(self, start: Origin) -> bool:
        return self is start or (self.source is not None and self.source.comes_from(start))


def mark(result: Any, origin: Origin) -> None:
    """Note in the graph where a tensor comes from."""
    if isinstance(result, Tensor) and result.grad_fn is not None:
        _metadata(result.grad_fn).setdefault(_MARK, {})[result.output_nr] = origin


def _metadata(node: Node) -> dict[str, Any]:
    metadata: dict[str, Any] = node.metadata  # type: ignore[assignment]
    return metadata


def _marked(outputs: list[Tensor]) -> Iterator[tuple[GradientEdge, Origin]]:
    """The marked tensors that outputs depend on."""
    pending: list[Node | None] = [output.grad_fn for output in outputs]
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        marks = _metadata(node).get(_MARK, {})
        yield from ((GradientEdge(node, number), origin) for number, origin in marks.items())
        if not marks:
            pending.extend(following for following, _ in node.next_functions)


def gradients_of_logits(
    outputs: list[Tensor], inputs: list[Any], starts: dict[int, Origin], values: Callable[[int], Tensor], options: Any
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` of ordinary outputs with respect to inputs, some of which are lazy logits.

    ``starts`` are the origins of lazy logits, by their place in the inputs, and ``values`` computes their values.
    """
    marked = [(e, o) for e, o in _marked(outputs) if any(o.comes_from(start) for start in starts.values())]
    if marked and (options.get("create_graph") or options.get("is_grads_batched")):
        raise NotImplementedError(
            "gradients with respect to lazy logits have no graph and are not batched: call torch.autograd.grad without "
            "create_graph and is_grads_batched, or compute the loss from patching.lazy.true_values(logits)."
        )
    allow_unused, zeros = options.get("allow_unused"), options.get("materialize_grads", False)
    options = {**options, "allow_unused": True, "materialize_grads": False}
    with torch._C.DisableTorchFunctionSubclass():
        found = list(torch.autograd.grad(outputs, [*inputs, *(edge for edge, _ in marked)], **options))
    upstream = found[len(inputs) :]
    for i, start in starts.items():
        reached = [(o, g) for (_, o), g in zip(marked, upstream, strict=True) if g is not None and o.comes_from(start)]
        if not reached:
            continue
        leaf = values(i).detach().requires_grad_()
        with torch.enable_grad():
            repeated = [origin.repeat(start, leaf) for origin, _ in reached]
        pairs = [(r, g.to(r.dtype)) for r, (_, g) in zip(repeated, reached, strict=True) if r.requires_grad]
        if pairs:
            (own,) = torch.autograd.grad([r for r, _ in pairs], leaf, [g for _, g in pairs])
            found[i] = own if found[i] is None else found[i] + own
    result = found[: len(inputs)]
    for i, gradient in enumerate(result):
        if gradient is None and zeros:
            result[i] = torch.zeros(inputs[i].shape, dtype=inputs[i].dtype, device=inputs[i].device)
        elif gradient is None and not allow_unused:
            raise RuntimeError(
                f"the input {i} of torch.autograd.grad was not used to compute the outputs; set allow_unused=True if "
                "that is intended."
            )
    return tuple(result)
