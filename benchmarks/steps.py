"""Whole training steps, forward to optimizer, of models of real shapes with random weights: providers in turns.

python -m benchmarks.steps [--only REGEX] [--providers NAMES] [--rounds 6] [--other FOLDER] [--out FILE.json]
python -m benchmarks.steps --only "FSDP2|TP"     # the cases of several GPUs, which run where only they are chosen
python -m benchmarks.steps --tiny                # tiny models, on a CPU too: to see that everything runs

An SFT step is the model's own loss; steps of TRL's are its trainers' own ``compute_loss`` on given tokens, half of each
sequence a prompt. Providers' models are in one process, if they fit. A peak is what the provider's model, gradients and
optimizer take, and what a step takes beyond. On several GPUs, a time is the slowest rank's. FOLDER holds a
``liger_losses`` package of another commit.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.compare import OTHER, import_other, importer
from benchmarks.measure import NotRun, Timed, extra_bytes, in_turns, interval, release, save, slowest, start_ranks
from benchmarks.models import IGNORED, build
from benchmarks.trainers import add_plain_head, inputs_of, trainer_of

GiB = 2**30
#: By default, of a model's own loss, and of TRL's trainers.
SFT = ("plain", "liger-kernel", "ours")
TRL = ("plain", "TRL", "TRL+liger-kernel", "ours", "ours+kernels")
PROVIDERS = (*dict.fromkeys(SFT + TRL), "ours+tiles", "ours+kernels, repeated", "other", "other+kernels")
PROVIDERS += ("plain+compile", "ours+compile", "plain+causal+compile", "ours+causal+compile")
WARM_UP = 3


@dataclass(frozen=True)
class Case:
    """One table: a task on sequences, of which the share ``masked`` carries no loss.

    Args:
        task: ``"SFT"`` by the model's own loss; ``"NLL"`` (SFT), ``"DPO"`` or ``"GRPO"`` by TRL's trainer.
        prompts: how many different ones there are, if not one a sequence.
        mixed: fp32 weights under bf16 autocast, as TRL loads and trains models by default.
        parallel: ``"FSDP2"``, where each rank has a batch of its own, or ``"TP"``, where all have the same.
        alone: whether one provider is measured after another, as their models do not fit together.
        providers: the names in the table.
    """

    task: str
    model: str
    sequences: int
    length: int
    masked: float = 0.0
    checkpointing: bool = False
    prompts: int = 0
    mixed: bool = False
    parallel: str = ""
    alone: bool = False
    providers: tuple[str, ...] = SFT

    @property
    def name(self) -> str:
        """As ``--only`` matches it."""
        checkpointed = ", checkpointing" * self.checkpointing + ", autocast" * self.mixed
        task = f"{self.task} in TRL" if self.task in ("NLL", "DPO", "GRPO") else self.task
        return f"{self.parallel} {task} {self.model} {self.sequences} x {self.length}{checkpointed}".strip()


CASES = (
    Case("SFT", "Llama-3.2-1B", 4, 4096),
    Case("SFT", "Llama-3.2-1B", 4, 4096, checkpointing=True),
    Case("SFT", "Llama-3.2-1B", 1, 16384),
    Case("SFT", "Llama-3.2-1B", 1, 65536, checkpointing=True, providers=("ours", "ours+tiles")),
    Case("SFT", "Qwen2.5-1.5B", 4, 4096),
    Case("SFT", "Qwen2.5-1.5B", 4, 4096, checkpointing=True),
    Case("SFT", "Llama-3-8B half", 4, 4096, alone=True),
    Case("SFT", "Llama-3-8B", 4, 4096, checkpointing=True, alone=True),
    *(
        Case(task, model, 8, 2048, 0.5, True, prompts, providers=TRL)
        for model in ("Qwen2.5-1.5B", "Llama-3-8B quarter")
        for task, prompts in (("NLL", 0), ("DPO", 4), ("GRPO", 1))
    ),
    Case("SFT", "Llama-3.2-1B", 4, 4096, mixed=True),
    *(
        Case(task, "Qwen2.5-1.5B", 8, 2048, 0.5, True, prompts, True, providers=TRL[1:])
        for task, prompts in (("NLL", 0), ("DPO", 4), ("GRPO", 1))
    ),
    Case("SFT", "Llama-3.2-1B", 4, 4096, parallel="FSDP2"),
    Case("SFT", "Llama-3-8B", 4, 4096, checkpointing=True, parallel="FSDP2"),
    Case("SFT", "Llama-3.2-1B", 4, 4096, parallel="TP", providers=("plain", "ours")),
    Case("SFT", "Llama-3-8B quarter", 4, 4096, parallel="TP", providers=("plain", "ours")),
)


# --- Models as providers patch them -----------------------------------------------------------------------------------

#: Loss of a batch: of token ids and labels.
Loss = Callable[[Tensor, Tensor], Tensor]


def liger_kernel(model: Any, **options: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Patch the model with liger-kernel; what steps run within, as it replaces functions of all models, too."""
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise NotRun(str(error)) from None
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    _apply_liger_kernel_to_instance(model=model, **options)
    replaced = {name: value for name, value in vars(module).items() if before.get(name) is not value}
    vars(module).update(before)
    return lambda: mock.patch.multiple(module, **replaced) if replaced else contextlib.nullcontext()


def provide(provider: str, case: Case, model: Any, folder: str) -> tuple[Loss, Callable[[], Any]]:
    """Patch the model as the provider does: its loss, and what steps run within."""
    package = importer(OTHER if provider.startswith("other") else "liger_losses")
    ours = provider.startswith(("ours", "other"))
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    if case.task == "SFT":
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if provider == "liger-kernel":
            within = liger_kernel(model)
        elif ours:
            package("patch")(model, tile_mlps=provider.endswith("+tiles"))
        if "+causal" in provider:  # torch.compile of a model without a mask (docs/compatibility.md)
            AttentionInterface.register("causal", sdpa_attention_forward)
            model.set_attn_implementation("causal")
        if provider.endswith("+compile"):
            model.compile()
        autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=case.mixed)
        return autocast(lambda ids, labels: model(input_ids=ids, labels=labels).loss), within
    if provider == "TRL+liger-kernel":
        within = liger_kernel(model, fused_linear_cross_entropy=False, cross_entropy=False)
    elif ours:
        options: dict[str, Any] = {"kernels": "+kernels" in provider}
        options |= {"share_prompts": False} if provider.endswith(", repeated") else {}
        within = functools.partial(package("trl:enabled"), **options)
    forward, reference = model.forward, build("tiny", torch.device("cpu"))
    with within():
        length = case.length - int(case.masked * case.length)
        trainer = trainer_of(case.task, model, reference, folder, length)
    if provider == "plain":
        add_plain_head(model, forward)
    trainer.accelerator.prepare_model(model)  # as before training: autocast is within its forward
    vocab_size = model.config.vocab_size

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        inputs = inputs_of(case.task, ids, labels, vocab_size)
        return trainer.compute_loss(model, inputs, num_items_in_batch=(labels[:, 1:] != IGNORED).sum())

    return loss, within


def placed(provider: str, case: Case, device: torch.device, folder: str) -> tuple[Any, Loss, Callable[[], Any]]:
    """The model that the provider has patched, sharded or split over the ranks where the case says so."""
    if case.parallel == "TP":
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        path = Path(folder).parent / "saved"
        if dist.get_rank() == 0 and not (path / "config.json").exists():
            build(case.model, device).save_pretrained(path)
        dist.barrier()
        plan = DistributedConfig(tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, distributed_config=plan).train()
        model.config.use_cache = False
    else:
        model = build(case.model, device, case.checkpointing, torch.float32 if case.mixed else torch.bfloat16)
    loss, within = provide(provider, case, model, folder)
    if case.parallel == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model, loss, within


def step_of(provider: str, case: Case, device: torch.device, folder: str) -> Timed:
    """A training step, which returns the loss."""
    model, loss, within = placed(provider, case, device, folder)
    options: dict[str, Any] = {"foreach": case.parallel == "FSDP2"} if case.parallel else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **options)
    seed = dist.get_rank() if case.parallel == "FSDP2" else 0
    generator = torch.Generator(device).manual_seed(seed)
    size = (case.sequences, case.length)
    ids = torch.randint(2, model.config.vocab_size, size, device=device, generator=generator)
    prompt = int(case.masked * case.length)
    if case.prompts:
        ids[:, :prompt] = ids[torch.arange(len(ids), device=device) % case.prompts, :prompt]
    labels = ids.clone()
    labels[:, :prompt] = IGNORED

    def step() -> tuple[Tensor, ...]:
        value = loss(ids, labels)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (value.detach(),)

    return Timed(step, within)


# --- Measuring --------------------------------------------------------------------------------------------------------


def measure(case: Case, providers: list[str], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """One row for each provider."""
    if case.alone and len(providers) > 1:
        return [row for provider in providers for row in measure(case, [provider], rounds, device)]
    rows, steps = dict[str, dict[str, Any]](), dict[str, Timed]()
    ranks = dist.get_world_size() if case.parallel else 1
    with contextlib.ExitStack() as stack:
        shared = shared_folder(stack, case)
        for provider in providers:
            rows[provider] = {"case": case.name, "provider": provider, "ranks": ranks}
            release(device)
            before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            try:
                folder = Path(shared) / provider
                folder.mkdir(exist_ok=True)
                timed = step_of(provider, case, device, str(folder))
                with timed.within():
                    losses = [float(timed.call()[0]) for _ in range(WARM_UP)]
                    resident = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else 0
                    peak = slowest((resident + extra_bytes(timed.call, device)) / GiB)
            except (NotRun, ImportError, RuntimeError) as reason:  # no room, or no GPU for a peer
                rows[provider]["note"] = f"{type(reason).__name__}: {str(reason).splitlines()[0]}"[:150]
                continue
            rows[provider] |= {"losses": losses, "peak_gib": round(peak, 2)}
            steps[provider] = timed
        gc.collect()
        gc.freeze()  # to look through all that was imported takes longer than a step
        times = in_turns(steps, rounds, device)
        gc.unfreeze()
    tokens = case.sequences * case.length * (ranks if case.parallel == "FSDP2" else 1)
    baseline = next((name for name in times if name.startswith("ours")), "")
    for provider, found in times.items():
        ratios = [other / ours for other, ours in zip(found, times.get(baseline, found), strict=True)]
        rows[provider] |= {
            "milliseconds": round(median(found), 2),
            "tokens_per_second": round(tokens / median(found) * 1e3),
            "baseline": baseline or provider,
            "over_baseline": [round(ratio, 4) for ratio in (median(ratios), *interval(ratios))],
            "rounds": [round(ms, 2) for ms in found],
        }
    return [asdict(case) | row for row in rows.values()]


def shared_folder(stack: contextlib.ExitStack, case: Case) -> str:
    """A temporary folder, of all ranks."""
    folder: list[Any] = [stack.enter_context(tempfile.TemporaryDirectory())]
    if case.parallel:
        stack.callback(dist.barrier)
        dist.broadcast_object_list(folder)
    return str(folder[0])


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    start = f"{row['case']:46} {row['provider']:17}"
    if "note" in row:
        return f"{start} {row['note']}"
    ratio, low, high = row["over_baseline"]
    return (
        f"{start} {row['milliseconds']:9.2f} ms {row['tokens_per_second']:>8} tokens/s {row['peak_gib']:7.2f} GiB  "
        f"x {ratio:.3f} of {row['baseline']} ({low:.3f} to {high:.3f})  loss {row['losses'][-1]:.4f}"
    )


def run(device: torch.device, cases: list[Case], options: argparse.Namespace) -> None:
    """Print the rows of the cases, and write them."""
    rows: list[dict[str, Any]] = []
    if options.other:
        import_other(options.other)
    for case in cases:
        providers = options.providers or list(case.providers)
        rows += measure(case, providers, options.rounds, device)
        release(device)
        torch._dynamo.reset()
        if not case.parallel or dist.get_rank() == 0:
            print(*map(line, rows[-len(providers) :]), sep="\n", flush=True)
            if options.out:
                save(options.out, device, rows, map(line, rows))


def chosen(providers: str) -> list[str]:
    """The names on the command line."""
    names = re.split(",(?! )", providers)
    if unknown := {*names} - {*PROVIDERS}:
        raise argparse.ArgumentTypeError(f"unknown providers {', '.join(sorted(unknown))}")
    return names


def main() -> None:
    """Measure the cases of one GPU in this process, and each of several in processes of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="a regular expression that the names of cases match")
    parser.add_argument("--providers", type=chosen, help=f"instead of the case's, with commas: {','.join(PROVIDERS)}")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--other", type=Path, help="a folder that holds a package of another commit")
    parser.add_argument("--ranks", type=int, help="processes; all GPUs, or two processes on a CPU, by default")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that everything runs")
    options = parser.parse_args()
    cases = [case for case in CASES if re.search(options.only, case.name)]
    if options.list:
        return print(*(case.name for case in cases), sep="\n")
    if options.tiny:
        cases = [replace(case, model="tiny", sequences=4, length=32) for case in cases]
    alone, together = ([case for case in cases if bool(case.parallel) == several] for several in (False, True))
    if alone:
        run(torch.device("cuda" if torch.cuda.is_available() else "cpu"), alone, options)
    else:
        start_ranks(run, options.ranks, together, options)
    return None


if __name__ == "__main__":
    main()
