"""The benchmarks, as data. To add one, add an entry to `BENCHMARKS` at the end."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_losses
from benchmarks import real_text
from benchmarks.measure import Call, MiB, NotRun, check_host_memory

GEMMS = "bare GEMMs"
IGNORED = -100
BETA = 0.1
#: Width of TRL's vocabulary tiles, as its trainers set it.
TRL_CHUNK = 32768
#: Holds the tiles of a second pass.
LEAN_WORKSPACE = 300 * MiB
#: The bare GEMMs go through blocks of at most this size, so that they fit next to the largest weights.
GEMM_BLOCK_BYTES = 4 * 2**30

Provider = Callable[[Any], Call]


@dataclass(frozen=True)
class Shape:
    """Sizes of a benchmark's inputs.

    Args:
        tokens: all of them, over all sequences.
        hidden: hidden size.
        vocab: vocabulary size.
        dtype: of hidden states and weights.
        sequences: what the tokens are divided into.
        masked: share of each sequence, from its start, that carries no loss.
        workspace: bytes that the providers are told to keep to; `None` for their default.
    """

    tokens: int
    hidden: int
    vocab: int
    dtype: torch.dtype = torch.bfloat16
    sequences: int = 1
    masked: float = 0.0
    workspace: int | None = None

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.tokens // self.sequences

    @property
    def prompt(self) -> int:
        """Tokens of a sequence that carry no loss."""
        return int(self.masked * self.length)

    @property
    def kept(self) -> int:
        """Tokens that carry loss."""
        return self.sequences * (self.length - self.prompt)

    def tiny(self) -> Shape:
        """The same with every size divided by 64, to see that everything runs."""
        return replace(
            self,
            tokens=self.tokens // 64,
            hidden=max(self.hidden // 64, 8),
            vocab=self.vocab // 64,
            workspace=None if self.workspace is None else self.workspace // 64,
        )


@dataclass(frozen=True)
class Benchmark:
    """One table.

    Args:
        name: what to call it on the command line.
        title: what it measures.
        shapes: for each kind of device (`cpu`, `cuda`) that it suits.
        inputs: makes the tensors.
        providers: each takes the inputs and returns a call, which returns the loss and the gradients.
        flops: multiples of tokens that carry loss * hidden size * vocabulary size that the work takes.
        baseline: the provider that the others' times are divided by.
        bounded: providers that must stay within the shape's workspace.
        axis: the size that varies, where there is something to plot.
    """

    name: str
    title: str
    shapes: Mapping[str, tuple[Shape, ...]]
    inputs: Callable[[Shape, torch.device], Any]
    providers: Mapping[str, Provider]
    flops: float
    baseline: str | None = GEMMS
    bounded: tuple[str, ...] = ()
    axis: str | None = None


# --- Inputs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """What all but pairs need.

    Args:
        hidden: `[tokens, H]`, or `[sequences, T, H]` for preference losses.
        weight: `[V, H]`.
        labels: as `hidden` without its last dimension.
    """

    shape: Shape
    hidden: Tensor
    weight: Tensor
    labels: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gradients are taken of."""
        return tuple(tensor for tensor in (self.hidden, self.weight) if tensor.requires_grad)


@dataclass(frozen=True)
class TokenInputs(Inputs):
    """Inputs of losses on tokens; `upstream` `[tokens]` weights log-probabilities before they are summed."""

    upstream: Tensor


@dataclass(frozen=True)
class DPOInputs(Inputs):
    """Stacked pairs, chosen sequences first, and the reference model's hidden states and head."""

    ref_hidden: Tensor
    ref_weight: Tensor


@dataclass(frozen=True)
class GRPOInputs(Inputs):
    """Completions `[sequences, T]` (as labels), advantages `[sequences]`, and what the old policy made of them."""

    advantages: Tensor
    old_logps: Tensor


@dataclass(frozen=True)
class PairInputs:
    """One pair of completions and the weight `[V, H]`."""

    shape: Shape
    weight: Tensor
    chosen: liger_losses.Completions
    rejected: liger_losses.Completions


class Random:
    """Seeded random tensors of a shape's sizes."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *size: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers of standard deviation `scale`, in the shape's dtype by default."""
        dtype = self.shape.dtype if dtype is None else dtype
        return torch.randn(*size, dtype=dtype, device=self.device, generator=self.generator).mul_(scale)

    def weight(self) -> Tensor:
        """`[V, H]`, such that logits have a standard deviation of 1."""
        return self.normal(self.shape.vocab, self.shape.hidden, scale=self.shape.hidden**-0.5)

    def labels(self, sequences: int) -> Tensor:
        """`[sequences, T]`, with prompts masked."""
        size = (sequences, self.shape.length)
        labels = torch.randint(self.shape.vocab, size, device=self.device, generator=self.generator)
        labels[:, : self.shape.prompt] = IGNORED
        return labels


def token_inputs(shape: Shape, device: torch.device) -> TokenInputs:
    """Inputs of losses on tokens."""
    random = Random(shape, device)
    return TokenInputs(
        shape,
        random.normal(shape.tokens, shape.hidden).requires_grad_(),
        random.weight().requires_grad_(),
        random.labels(shape.sequences).flatten(),
        random.normal(shape.tokens, dtype=torch.float32),
    )


def frozen_head_inputs(shape: Shape, device: torch.device) -> TokenInputs:
    """Inputs of losses on tokens whose head is not trained, as under LoRA."""
    inputs = token_inputs(shape, device)
    inputs.weight.requires_grad_(False)
    return inputs


def real_text_inputs(shape: Shape, device: torch.device) -> TokenInputs:
    """Hidden states of real text and the head of the model they come from, as `benchmarks.real_text` left them."""
    if not real_text.FILE.exists():
        raise NotRun("run python -m benchmarks.real_text first")
    tensors = torch.load(real_text.FILE, map_location=device)
    hidden, weight = (tensors[name][:size] for name, size in (("hidden", shape.tokens), ("weight", shape.vocab)))
    labels = tensors["labels"][: shape.tokens].long() % shape.vocab
    hidden, weight = (t[:, : shape.hidden].to(shape.dtype).contiguous().requires_grad_() for t in (hidden, weight))
    return TokenInputs(shape, hidden, weight, labels, torch.ones(shape.tokens, device=device))


def dpo_inputs(shape: Shape, device: torch.device) -> DPOInputs:
    """Pairs, and a reference model close to the policy."""
    random = Random(shape, device)
    hidden, weight = random.normal(shape.sequences, shape.length, shape.hidden), random.weight()
    ref_hidden = hidden + random.normal(*hidden.shape, scale=0.05)
    labels = random.labels(shape.sequences)
    return DPOInputs(
        shape, hidden.requires_grad_(), weight.requires_grad_(), labels, ref_hidden, weight.detach().clone()
    )


def grpo_inputs(shape: Shape, device: torch.device) -> GRPOInputs:
    """Completions without padding, and an old policy close to this one."""
    random = Random(shape, device)
    hidden, weight = random.normal(shape.sequences, shape.length, shape.hidden), random.weight()
    labels = random.labels(shape.sequences)
    advantages = random.normal(shape.sequences, dtype=torch.float32)
    with torch.no_grad():
        old = liger_losses.linear_logps(hidden, weight, labels) + random.normal(*labels.shape, scale=0.1).float()
    return GRPOInputs(shape, hidden.requires_grad_(), weight.requires_grad_(), labels, advantages, old)


def pair_inputs(shape: Shape, device: torch.device) -> PairInputs:
    """One pair, with the reference's log-probabilities precomputed."""
    random = Random(shape, device)
    # What these random logits give on average, so that the loss is not saturated.
    ref_logps = torch.full((1,), -(shape.length - shape.prompt) * (math.log(shape.vocab) + 0.5), device=device)
    weight = random.weight().requires_grad_()
    chosen, rejected = (
        liger_losses.Completions(
            random.normal(1, shape.length, shape.hidden).requires_grad_(), random.labels(1), ref_logps=ref_logps
        )
        for _ in range(2)
    )
    return PairInputs(shape, weight, chosen, rejected)


# --- What providers share ------------------------------------------------------------------------------------------


def with_gradients(loss: Tensor, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The loss and its gradients, by the same call for every provider."""
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def optional(module: str, name: str) -> Any:
    """Something from a package that need not be there."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise NotRun(f"not installed: {(error.name or module).partition('.')[0]}") from None


def needs_cuda(provider: Provider) -> Provider:
    """The provider, where there is a GPU."""

    def build(inputs: Any) -> Call:
        if inputs.weight.device.type != "cuda":
            raise NotRun("needs CUDA")
        return provider(inputs)

    return build


def check_plain_memory(shape: Shape, device: torch.device) -> None:
    """Refuse logits, their log-softmax and the gradients of both, in fp32, where they would not fit."""
    check_host_memory(4 * shape.tokens * shape.vocab * 4, device)


def bare_gemms(logits: int = 1, grad_hidden: int = 1, grad_weight: int = 1) -> Provider:
    """So many products of each kind over the tokens that carry loss, into buffers that are there: the limit."""

    def build(inputs: Inputs) -> Call:
        kept = inputs.hidden.detach()[inputs.labels != IGNORED]
        weight = inputs.weight.detach()
        rows = max(1, min(len(kept), GEMM_BLOCK_BYTES // (len(weight) * weight.element_size())))
        buffer = kept.new_empty(rows, len(weight))
        hidden_out = torch.empty_like(kept) if grad_hidden else kept
        weight_out = torch.zeros_like(weight) if grad_weight else weight

        def call() -> tuple[Tensor, ...]:
            for start in range(0, len(kept), rows):
                block = kept[start : start + rows]
                out = buffer[: len(block)]
                for _ in range(logits):
                    torch.mm(block, weight.t(), out=out)
                for _ in range(grad_hidden):
                    torch.mm(out, weight, out=hidden_out[start : start + rows])
                for _ in range(grad_weight):
                    weight_out.addmm_(out.t(), block, beta=0 if start == 0 else 1)
            return ()

        return call

    return build


# --- Cross-entropy -------------------------------------------------------------------------------------------------


def _plain_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Logits in the inputs' dtype, the loss in fp32, as models compute it."""
    return F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=IGNORED)


def cross_entropy_by(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Provider:
    """A provider from `loss(hidden, weight, labels)`."""
    return lambda i: lambda: with_gradients(loss(i.hidden, i.weight, i.labels), i.leaves)


def plain_cross_entropy(inputs: Inputs) -> Call:
    """Logits of all tokens, then `F.cross_entropy`."""
    check_plain_memory(inputs.shape, inputs.weight.device)
    return cross_entropy_by(_plain_cross_entropy)(inputs)


def compiled_cross_entropy(inputs: Inputs) -> Call:
    """The plain one under `torch.compile`."""
    # Each shape is compiled for itself, and none is refused for having been compiled too often.
    torch._dynamo.reset()
    return cross_entropy_by(torch.compile(_plain_cross_entropy, dynamic=False))(inputs)


def liger_cross_entropy(inputs: Inputs) -> Call:
    """Liger Kernel's chunked loss on a Triton kernel."""
    loss = optional("liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss")()
    return cross_entropy_by(lambda hidden, weight, labels: loss(weight, hidden, labels))(inputs)


def trl_cross_entropy(inputs: Inputs) -> Call:
    """TRL's per-token log-probabilities, averaged."""
    logps = _trl_logps(inputs)
    return lambda: with_gradients(-logps().mean(), inputs.leaves)


def cce_cross_entropy(**options: Any) -> Provider:
    """Cut Cross-Entropy, which by default leaves out small gradients."""

    def build(inputs: Inputs) -> Call:
        loss = optional("cut_cross_entropy", "linear_cross_entropy")
        return cross_entropy_by(lambda hidden, weight, labels: loss(hidden, weight, labels, **options))(inputs)

    return build


def torch_cross_entropy(inputs: Inputs) -> Call:
    """PyTorch's own chunked function."""
    function, options = (
        getattr(at, name, None) for at, name in ((F, "linear_cross_entropy"), (torch.nn, "LinearCrossEntropyOptions"))
    )
    if function is None or options is None:
        raise NotRun(f"torch {torch.__version__} has no linear_cross_entropy")
    return cross_entropy_by(lambda hidden, weight, labels: function(hidden, weight, labels, options=options()))(inputs)


def quack_cross_entropy(inputs: Inputs) -> Call:
    """QuACK's chunked loss on CuTe kernels."""
    return cross_entropy_by(optional("quack.linear_cross_entropy", "chunked_linear_cross_entropy"))(inputs)


def our_cross_entropy(**options: Any) -> Provider:
    """This library's."""
    loss = liger_losses.LigerFusedLinearCrossEntropyLoss(**options)
    return cross_entropy_by(lambda hidden, weight, labels: loss(weight, hidden, labels))


# --- Per-token log-probabilities -----------------------------------------------------------------------------------


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


def lean(provider: Provider) -> Provider:
    """The provider within the default workspace of devices with little memory: no logits are kept until backward."""

    def build(inputs: Any) -> Call:
        call = provider(inputs)

        def within() -> tuple[Tensor, ...]:
            with liger_losses.workspace(LEAN_WORKSPACE):
                return call()

        return within

    return build


# --- DPO -----------------------------------------------------------------------------------------------------------


def _dpo(logratios: Tensor) -> Tensor:
    """DPO's loss of `[2 * pairs]` log-ratios, chosen ones first."""
    chosen, rejected = logratios.chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def plain_dpo(inputs: DPOInputs) -> Call:
    """Logits of all tokens of policy and reference."""
    check_plain_memory(inputs.shape, inputs.weight.device)

    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            reference = _plain_logps(inputs.ref_hidden, inputs.ref_weight, inputs.labels).sum(-1)
        policy = _plain_logps(inputs.hidden, inputs.weight, inputs.labels).sum(-1)
        return with_gradients(_dpo(policy - reference), inputs.leaves)

    return call


def _dpo_by(inputs: DPOInputs, loss: Callable[..., Any]) -> Call:
    """A call of a loss that takes the stacked form."""
    i = inputs
    return lambda: with_gradients(loss(i.weight, i.hidden, i.labels, None, i.ref_hidden, i.ref_weight)[0], i.leaves)


def liger_dpo(inputs: DPOInputs) -> Call:
    """Liger Kernel's chunked loss; compiling it is for GPUs."""
    loss = optional("liger_kernel.chunked_loss", "LigerFusedLinearDPOLoss")
    torch._dynamo.reset()
    return _dpo_by(inputs, loss(beta=BETA, compiled=inputs.weight.device.type == "cuda"))


def trl_dpo(inputs: DPOInputs) -> Call:
    """TRL's chunked log-probabilities of the tokens that carry loss, summed over each sequence."""
    apply = optional("trl.kernels", "ChunkedLogProbFunction").apply
    mask = inputs.labels != IGNORED
    labels, sequence = inputs.labels[mask], mask.nonzero()[:, 0]

    def sums(hidden: Tensor, weight: Tensor) -> Tensor:
        logps = apply(hidden[mask], weight, None, labels, 1.0, TRL_CHUNK, None, 1.0, ())[0]
        return logps.new_zeros(len(mask)).index_add(0, sequence, logps)

    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            reference = sums(inputs.ref_hidden, inputs.ref_weight)
        return with_gradients(_dpo(sums(inputs.hidden, inputs.weight) - reference), inputs.leaves)

    return call


def our_dpo(**options: Any) -> Provider:
    """This library's."""
    return lambda inputs: _dpo_by(inputs, liger_losses.LigerFusedLinearDPOLoss(beta=BETA, **options))


def plain_grpo(inputs: GRPOInputs) -> Call:
    """Logits of all tokens."""
    check_plain_memory(inputs.shape, inputs.weight.device)

    def call() -> tuple[Tensor, ...]:
        ratio = (_plain_logps(inputs.hidden, inputs.weight, inputs.labels) - inputs.old_logps).exp()
        advantages = inputs.advantages[:, None]
        objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return with_gradients(-objective.mean(), inputs.leaves)

    return call


def grpo_by(loss: Any) -> Provider:
    """A provider from a loss that takes Liger's call form."""

    def build(inputs: GRPOInputs) -> Call:
        i, mask = inputs, torch.ones_like(inputs.labels)
        return lambda: with_gradients(
            loss(i.hidden, i.weight, i.labels, mask, i.advantages, old_per_token_logps=i.old_logps)[0], i.leaves
        )

    return build


def liger_grpo(inputs: GRPOInputs) -> Call:
    """Liger Kernel's chunked loss; compiling it is for GPUs."""
    loss = optional("liger_kernel.chunked_loss", "LigerFusedLinearGRPOLoss")
    torch._dynamo.reset()
    on_gpu = inputs.weight.device.type == "cuda"
    return grpo_by(loss(beta=0.0, loss_type="bnpo", compiled=on_gpu, use_ref_model=False))(inputs)


def our_grpo(**options: Any) -> Provider:
    """This library's."""
    return grpo_by(liger_losses.LigerFusedLinearGRPOLoss(beta=0.0, loss_type="bnpo", **options))


def plain_pair(inputs: PairInputs) -> Call:
    """Logits of all tokens."""
    check_plain_memory(inputs.shape, inputs.weight.device)
    sides = (inputs.chosen, inputs.rejected)

    def call() -> tuple[Tensor, ...]:
        logps = [_plain_logps(side.hidden_states, inputs.weight, side.labels).sum(-1) for side in sides]
        reference = [side.ref_logps for side in sides]
        ratios = torch.cat(logps) - torch.cat([value for value in reference if value is not None])
        return with_gradients(_dpo(ratios), (inputs.weight, *(side.hidden_states for side in sides)))

    return call


def our_pair(backward: bool = True) -> Provider:
    """This library's; the forward alone keeps its graph, and whatever that holds, until it returns."""

    def build(inputs: PairInputs) -> Call:
        loss = liger_losses.LigerFusedLinearDPOLoss(beta=BETA, workspace=inputs.shape.workspace)
        leaves = (inputs.weight, inputs.chosen.hidden_states, inputs.rejected.hidden_states)

        def call() -> tuple[Tensor, ...]:
            value, _ = loss(inputs.weight, inputs.chosen, inputs.rejected)
            return with_gradients(value, leaves) if backward else (value.detach(),)

        return call

    return build


# --- The benchmarks ------------------------------------------------------------------------------------------------

#: Llama 3 8B, Qwen 3 1.7B, Qwen 2.5 7B, Gemma 3 1B.
LARGE = (
    Shape(8192, 4096, 128256),
    Shape(8192, 2048, 151936),
    Shape(16384, 3584, 152064),
    Shape(32768, 1024, 262144),
)
#: SmolLM2 135M, half of each sequence a prompt.
SMALL = Shape(4096, 576, 49152, torch.float32, sequences=4, masked=0.5)
LENGTHS = tuple(1024 * 2**i for i in range(7))

#: Providers of the benchmarks that vary one size.
SWEPT: Mapping[str, Provider] = {
    GEMMS: bare_gemms(),
    "plain torch": plain_cross_entropy,
    "liger-kernel": needs_cuda(liger_cross_entropy),
    "TRL": trl_cross_entropy,
    "cut_cross_entropy, exact": needs_cuda(cce_cross_entropy(filter_eps=None)),
    "ours": our_cross_entropy(),
    "ours, 128 MiB workspace": our_cross_entropy(workspace=128 * MiB),
}

BENCHMARKS = (
    Benchmark(
        name="cross_entropy",
        title="Cross-entropy, forward and backward",
        shapes={"cuda": LARGE},
        inputs=token_inputs,
        providers={
            GEMMS: bare_gemms(),
            "plain torch": plain_cross_entropy,
            "torch.compile": needs_cuda(compiled_cross_entropy),
            "liger-kernel": needs_cuda(liger_cross_entropy),
            "TRL": trl_cross_entropy,
            "cut_cross_entropy": needs_cuda(cce_cross_entropy()),
            "cut_cross_entropy, exact": needs_cuda(cce_cross_entropy(filter_eps=None)),
            "quack": needs_cuda(quack_cross_entropy),
            "torch linear_cross_entropy": torch_cross_entropy,
            "ours": our_cross_entropy(),
            "ours, 128 MiB workspace": our_cross_entropy(workspace=128 * MiB),
        },
        flops=6,
    ),
    Benchmark(
        name="cross_entropy_over_tokens",
        title="Cross-entropy, forward and backward, of ever more tokens",
        shapes={"cuda": tuple(Shape(1024 * 2**i, 2048, 151936) for i in range(6))},
        inputs=token_inputs,
        providers=SWEPT,
        flops=6,
        axis="tokens",
    ),
    Benchmark(
        name="cross_entropy_over_vocab",
        title="Cross-entropy, forward and backward, over ever larger vocabularies",
        shapes={"cuda": tuple(Shape(8192, 2048, 16384 * 2**i) for i in range(5))},
        inputs=token_inputs,
        providers=SWEPT,
        flops=6,
        axis="vocab",
    ),
    Benchmark(
        name="real_text",
        title="Cross-entropy, forward and backward, of real text through SmolLM2-135M",
        shapes={"cuda": (Shape(8192, 576, 49152),), "cpu": (Shape(8192, 576, 49152, torch.float32),)},
        inputs=real_text_inputs,
        providers={
            GEMMS: bare_gemms(),
            "plain torch": plain_cross_entropy,
            "liger-kernel": needs_cuda(liger_cross_entropy),
            "TRL": trl_cross_entropy,
            "cut_cross_entropy": needs_cuda(cce_cross_entropy()),
            "cut_cross_entropy, exact": needs_cuda(cce_cross_entropy(filter_eps=None)),
            "ours": our_cross_entropy(),
        },
        flops=6,
    ),
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
    Benchmark(
        name="frozen_head",
        title="Per-token log-probabilities, forward and backward, the head frozen",
        shapes={"cuda": LARGE},
        inputs=frozen_head_inputs,
        providers={
            GEMMS: bare_gemms(grad_weight=0),
            "plain torch": plain_logps(),
            "TRL": trl_logps(),
            "ours": our_logps(),
        },
        flops=4,
    ),
    Benchmark(
        name="dpo",
        title="DPO with a reference model, forward and backward",
        shapes={
            "cuda": (
                Shape(8 * 2048, 4096, 128256, sequences=8, masked=0.5),
                Shape(8 * 4096, 4096, 128256, sequences=8, masked=0.5),
                Shape(8 * 2048, 2048, 151936, sequences=8, masked=0.5),
            )
        },
        inputs=dpo_inputs,
        providers={
            # One more pass over the logits is the reference model's.
            GEMMS: bare_gemms(logits=2),
            "plain torch": plain_dpo,
            "liger-kernel": liger_dpo,
            "TRL": trl_dpo,
            "ours": our_dpo(),
            "ours, 300 MiB by default": lean(our_dpo()),
        },
        flops=8,
    ),
    Benchmark(
        name="grpo",
        title="GRPO's clipped loss per token, forward and backward",
        shapes={"cuda": (Shape(16 * 1024, 4096, 128256, sequences=16),)},
        inputs=grpo_inputs,
        providers={
            GEMMS: bare_gemms(),
            "plain torch": plain_grpo,
            "liger-kernel": liger_grpo,
            "ours": our_grpo(),
            "ours, a completion's ratio": our_grpo(importance_sampling_level="sequence"),
        },
        flops=6,
    ),
    Benchmark(
        name="pair_memory",
        title="DPO on one pair of ever longer completions, precomputed reference, within a fixed workspace",
        shapes={
            "cuda": tuple(Shape(2 * n, 2048, 128256, sequences=2, workspace=256 * MiB) for n in LENGTHS),
            "cpu": tuple(Shape(2 * n, 64, 8192, torch.float32, 2, workspace=48 * MiB) for n in LENGTHS),
        },
        inputs=pair_inputs,
        providers={
            "plain torch": plain_pair,
            "ours": our_pair(),
            # Without gradients among its outputs, which would hide what the forward takes.
            "ours, forward alone": our_pair(backward=False),
        },
        flops=8,
        baseline=None,
        bounded=("ours", "ours, forward alone"),
    ),
    Benchmark(
        name="cross_entropy_cpu",
        title="Cross-entropy, forward and backward",
        shapes={"cpu": (SMALL,)},
        inputs=token_inputs,
        providers={
            GEMMS: bare_gemms(),
            "plain torch": plain_cross_entropy,
            "liger-kernel": needs_cuda(liger_cross_entropy),
            "TRL": trl_cross_entropy,
            "ours": our_cross_entropy(),
            "ours, 64 MiB workspace": our_cross_entropy(workspace=64 * MiB),
        },
        flops=6,
    ),
    Benchmark(
        name="dpo_cpu",
        title="DPO with a reference model, forward and backward",
        shapes={"cpu": (SMALL,)},
        inputs=dpo_inputs,
        providers={
            GEMMS: bare_gemms(logits=2),
            "plain torch": plain_dpo,
            "liger-kernel, not compiled": liger_dpo,
            "ours": our_dpo(),
            "ours, 64 MiB workspace": our_dpo(workspace=64 * MiB),
        },
        flops=8,
    ),
)
