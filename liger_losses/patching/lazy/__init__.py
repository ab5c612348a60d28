"""Logits that are computed when their values are needed, and often never are.

A patched ``lm_head`` returns :class:`LazyLogits`: a tensor of the right shape, dtype and device that holds the hidden
states, the head, and what was done to the logits since (:class:`DeferredLogits`). Reshaping, slicing, casting, scaling
and soft-capping leave it lazy; losses and reductions over the vocabulary are computed by the engine
(``operations.py``); anything else gets the true values, with one warning that names the operation and its caller.

It has a ``grad_fn``: gradients pass through it (``gradients.py``), so that hooks, DDP and autograd functions that never
look at the Python class get them. Once an optimizer's step has changed the head, reading them is an error
(:class:`HeadWeights`).
"""

from liger_losses.patching.lazy.deferred import DeferredLogits
from liger_losses.patching.lazy.tensor import LazyLogits, lazy_linear, true_values
from liger_losses.patching.lazy.traced_logits import TracedLogits, is_one_graph, traced_linear
from liger_losses.patching.lazy.warning import allow_materialization

__all__ = [
    "DeferredLogits",
    "LazyLogits",
    "TracedLogits",
    "allow_materialization",
    "is_one_graph",
    "lazy_linear",
    "traced_linear",
    "true_values",
]
