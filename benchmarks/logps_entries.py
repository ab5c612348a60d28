"""The benchmarks of log-probabilities, as data."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import liger_losses
from benchmarks.entries import (
    GEMMS,
    IGNORED,
    LARGE,
    TRL_CHUNK,
    Benchmark,
    Inputs,
    Provider,
    TokenInputs,
    bare_gemms,
    check_plain_memory,
    lean,
    optional,
    token_inputs,
    with_gradients,
)
from benchmarks.measure import Call


def _plain_logps(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """`[...]` log-probabilities in fp32, 0 where the label is masked."""
    logps = (hidden @ weight.T).float().log_softmax(-1)
    mask = labels != IGNORED
    return logps.gather(-1, labels.where(mask, 0)[..., None])[..., 0] * mask


def _trl_logps(inputs: Inputs) -> Callable[[], Tensor]:
    """TRL's log-probabilities of the tokens that carry loss, dropping the others first, as its trainers do on GPUs."""
    apply = optional("trl.kernels", "ChunkedLogProbFunction").apply
    mask = inputs.labels != IGNORED
    labels = inputs.labels[mask]
    masked = len(labels) < len(mask)

    def logps() -> Tensor:
        hidden = inputs.hidden[mask] if masked else inputs.hidden
        return apply(hidden, inputs.weight, None, labels, 1.0, TRL_CHUNK, None, 1.0, ())[0]

    return logps


def _weighted(inputs: TokenInputs, logps: Callable[[], Tensor], gradients: bool) -> Call:
    """The log-probabilities' weighted sum: with gradients, or under `no_grad`."""

    def forward_and_backward() -> tuple[Tensor, ...]:
        return with_gradients((logps() * inputs.upstream).sum(), inputs.leaves)

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return ((logps() * inputs.upstream).sum(),)

    return forward_and_backward if gradients else forward


def plain_logps(gradients: bool = True) -> Provider:
    """Logits of all tokens, their log-softmax, and the labels' entries of it."""

    def build(inputs: TokenInputs) -> Call:
        check_plain_memory(inputs.shape, inputs.weight.device)
        return _weighted(inputs, lambda: _plain_logps(inputs.hidden, inputs.weight, inputs.labels), gradients)

    return build


def trl_logps(gradients: bool = True) -> Provider:
    """TRL's."""
    return lambda inputs: _weighted(inputs, _trl_logps(inputs), gradients)


def our_logps(gradients: bool = True) -> Provider:
    """This library's."""
    return lambda i: _weighted(i, lambda: liger_losses.linear_logps(i.hidden, i.weight, i.labels), gradients)


BENCHMARKS = (
    Benchmark(
        name="logps",
        title="Per-token log-probabilities, forward and backward of their weighted sum",
        shapes={"cuda": LARGE},
        inputs=token_inputs,
        providers={
            GEMMS: bare_gemms(logits=2),
            "plain torch": plain_logps(),
            "TRL": trl_logps(),
            "ours": our_logps(),
            "ours, 300 MiB by default": lean(our_logps()),
        },
        flops=8,
    ),
    Benchmark(
        name="logps_no_grad",
        title="Per-token log-probabilities, forward alone",
        shapes={"cuda": LARGE},
        inputs=token_inputs,
        providers={
            GEMMS: bare_gemms(grad_hidden=0, grad_weight=0),
            "plain torch": plain_logps(gradients=False),
            "TRL": trl_logps(gradients=False),
            "ours": our_logps(gradients=False),
        },
        flops=2,
    ),
)
