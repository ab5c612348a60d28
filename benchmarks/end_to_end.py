"""Whole training steps, forward to optimizer, on models of real shapes with random weights.

python -m benchmarks.end_to_end [--other FOLDER] [--out FILE.json]

Every provider runs in a process of its own: what liger-kernel patches stays patched for the rest of its process. With
``--rounds``, providers take turns, in the other order every second time, as a card that is warm is slower: the median
of all steps counts. With ``--other``, a folder that holds a ``liger_losses`` package of another commit, SFT steps of
four models are measured with this package and with that one.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.compare import OTHER, import_other, importer
from benchmarks.measure import environment
from benchmarks.trainers import IGNORED, add_plain_head, inputs_of, trainer_of

_LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
_QWEN3 = {
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
        },
    ),
    "Qwen2.5-1.5B": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
        },
    ),
    "Qwen3-0.6B": ("qwen3", {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072}),
    "Qwen3-1.7B": ("qwen3", {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144}),
    "Gemma-2-2B": (
        "gemma2",
        {
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
        },
    ),
    "Llama-3-8B": ("llama", {**_LLAMA_8B, "num_hidden_layers": 32}),
    "Llama-3-8B half": ("llama", {**_LLAMA_8B, "num_hidden_layers": 16}),
    "Llama-3-8B quarter": ("llama", {**_LLAMA_8B, "num_hidden_layers": 8}),
    "tiny": (
        "llama",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
}


@dataclass(frozen=True)
class Case:
    """One row: a task on sequences, of which the share `masked` carries no loss."""

    task: str
    model: str
    sequences: int
    length: int
    masked: float = 0.0
    checkpointing: bool = False


#: The model's own loss on all tokens, as a Trainer takes it.
TRAINER = (
    Case("SFT", "Llama-3.2-1B", 4, 4096),
    Case("SFT", "Llama-3.2-1B", 4, 4096, checkpointing=True),
    Case("SFT", "Llama-3.2-1B", 1, 16384),
    Case("SFT", "Qwen2.5-1.5B", 4, 4096),
    Case("SFT", "Qwen2.5-1.5B", 4, 4096, checkpointing=True),
    Case("SFT", "Llama-3-8B half", 4, 4096),
    Case("SFT", "Llama-3-8B", 4, 4096, checkpointing=True),
)
#: The ``compute_loss`` of TRL's trainers, half of each sequence a prompt.
HEADS = (
    Case("NLL", "Qwen2.5-1.5B", 8, 2048, 0.5, True),
    Case("DPO", "Qwen2.5-1.5B", 8, 2048, 0.5, True),
    Case("GRPO", "Qwen2.5-1.5B", 8, 2048, 0.5, True),
    Case("NLL", "Llama-3-8B", 8, 2048, 0.5, True),
    Case("DPO", "Llama-3-8B", 8, 2048, 0.5, True),
    Case("GRPO", "Llama-3-8B", 8, 2048, 0.5, True),
)
#: Measured with this package and with another commit's.
COMMITS = (
    Case("SFT", "Llama-3.2-1B", 4, 4096),
    Case("SFT", "Qwen3-0.6B", 8, 2048),
    Case("SFT", "Qwen3-1.7B", 4, 2048),
    Case("SFT", "Gemma-2-2B", 2, 2048),
)


def build(case: Case, device: torch.device) -> Any:
    """The model with random weights, in bf16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = MODELS[case.model]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.bfloat16)
    model.train()
    model.config.use_cache = False
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


Step = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def own_loss(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss that the model's forward returns."""
    return model(input_ids=ids, labels=labels).loss


def provide(provider: str, case: Case, model: Any) -> Step:
    """Patch the model as the provider does; the step that it takes.

    ``TRL+liger-kernel`` is TRL's head on a model with liger-kernel's norms, MLPs and rotations.
    """
    if case.task == "SFT":
        if provider == "liger-kernel":
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=model)
        elif provider.startswith("ours"):
            from liger_losses.patching.patch import patch

            patch(model)
        elif provider == "other":
            importer(OTHER)("patching.patch:patch")(model)
        return own_loss
    return trainer_step(provider, case, model)


def trainer_step(provider: str, case: Case, model: Any) -> Step:
    """The ``compute_loss`` of TRL's trainer, with the provider's head and kernels."""
    if provider == "TRL+liger-kernel":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
    elif provider.startswith("ours"):
        import liger_losses.trl

        liger_losses.trl.enable(kernels=provider == "ours+kernels")  # until the process ends
    forward, reference = model.forward, build(Case("DPO", "tiny", 1, 1), torch.device("cpu"))
    length = case.length - int(case.masked * case.length)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(case.task, model, reference, folder, length)
    if provider == "plain":
        add_plain_head(model, forward)
    vocab_size = MODELS[case.model][1]["vocab_size"]

    def step(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        inputs = inputs_of(case.task, ids, labels, vocab_size)
        return trainer.compute_loss(model, inputs, num_items_in_batch=(labels[:, 1:] != IGNORED).sum())

    return step


def attend_without_mask(model: Any) -> None:
    """Let PyTorch's attention be causal without a mask, which transformers always makes while torch.compile traces."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal_sdpa", sdpa_attention_forward)  # no function of that name makes masks
    model.set_attn_implementation("causal_sdpa")


def measure(provider: str, case: Case, device: torch.device, steps: int) -> dict[str, Any]:
    """Tokens per second, peak memory and losses of some steps."""
    model = build(case, device)
    patched_by, _, compiled = provider.partition("+compile")
    step = provide(patched_by, case, model)
    if compiled == "+causal":
        attend_without_mask(model)
    if "+compile" in provider:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(0)
    size = (case.sequences, case.length)
    ids = torch.randint(MODELS[case.model][1]["vocab_size"], size, device=device, generator=generator)
    labels = ids.clone()
    labels[:, : int(case.masked * case.length)] = IGNORED
    losses, times = [], []
    for i in range(steps + 2):  # the first two compile and allocate
        if device.type == "cuda":
            torch.cuda.synchronize()
            if i == 2:
                torch.cuda.reset_peak_memory_stats()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        loss = step(model, ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if device.type == "cuda":
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
    row: dict[str, Any] = {"provider": provider, "losses": [round(x, 4) for x in losses]}
    if device.type == "cuda":
        row["milliseconds"] = [round(time, 1) for time in times[2:]]
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)

        def again() -> None:
            step(model, ids, labels).backward()
            optimizer.step()
            optimizer.zero_grad()

        row["kinds_ms"] = kinds_of_kernels(again)
    return row


#: The first that occurs in a kernel's name.
KINDS = {
    "attention": ("flash", "fmha", "cudnn_generated_fort_native_sdpa"),
    "products": ("nvjet", "gemm", "cutlass", "splitKreduce", "exponentials_kernel", "_linear_"),
    "optimizer": ("multi_tensor_apply", "adam"),
    "everything else": ("",),
}


def kinds_of_kernels(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of one step's kernels, by kind: what a patcher can win is everything else."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    found = dict.fromkeys(KINDS, 0.0)
    for event in profiler.key_averages():
        kind = next(kind for kind, words in KINDS.items() if any(word in event.key for word in words))
        found[kind] += event.self_device_time_total / 1e3
    return {kind: round(ms, 2) for kind, ms in found.items()}


def run(provider: str, cases: list[Case], steps: int) -> list[dict[str, Any]]:
    """All cases of one provider, in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for case in cases:
        gc.collect()  # models hold themselves
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            row = measure(provider, case, device, steps)
        except (ImportError, RuntimeError) as reason:  # no room, or no GPU for a peer
            row = {"provider": provider, "note": f"{type(reason).__name__}: {str(reason)[:100]}"}
        rows.append(rated({**asdict(case), **row}))
        print(line(rows[-1]), flush=True)
    return rows


def rated(row: dict[str, Any]) -> dict[str, Any]:
    """With the tokens per second of the median step."""
    times = sorted(row.get("milliseconds", ()))
    rate = {"tokens_per_second": round(row["sequences"] * row["length"] / median(times) * 1e3)} if times else {}
    return row | rate


def merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each case and provider, of all rounds."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("provider", *asdict(TRAINER[0])))
        if key not in found or "milliseconds" not in found[key]:
            found[key] = row
        elif "milliseconds" in row:
            times = found[key]["milliseconds"] + row["milliseconds"]
            found[key] = rated({**row, "milliseconds": times, "peak_gib": max(row["peak_gib"], found[key]["peak_gib"])})
    return list(found.values())


def compared(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each model: tokens per second and peak memory with this package over the ones with another."""
    found = {(row["model"], row["provider"]): row for row in rows if "tokens_per_second" in row}
    pairs = [
        (model, row, found.get((model, "other"))) for (model, provider), row in found.items() if provider == "ours"
    ]
    return [
        f"{model:15} ours over other: tokens/s {ours['tokens_per_second'] / other['tokens_per_second']:.4f}, "
        f"memory {ours['peak_gib'] / other['peak_gib']:.4f}"
        for model, ours, other in pairs
        if other is not None
    ]


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"{row['task']:5} {row['model']:15} {row['sequences']} x {row['length']:5} "
        f"{'checkpointed' if row['checkpointing'] else '':12} {row['provider']:22} "
        f"{row.get('tokens_per_second', '-'):>8} tokens/s {row.get('peak_gib', '-'):>7} GiB  "
        f"{row.get('note') or row['losses'][-1]}  "
        + ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in row.get("kinds_ms", {}).items())
    )


def main() -> None:
    """Spawn a process for each provider, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that everything runs")
    parser.add_argument("--provider", help=argparse.SUPPRESS)
    parser.add_argument("--providers", help="only these, with commas between them")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="only models whose names contain this")
    parser.add_argument("--first", type=int, help="only so many cases of a group")
    parser.add_argument("--other", type=Path, help="a folder that holds a package of another commit")
    named = ("trainer", "heads", "commits")
    parser.add_argument("--group", choices=named, help="only the model's own loss, TRL's heads, or both commits")
    options = parser.parse_args()
    groups = {"trainer": list(TRAINER), "heads": list(HEADS), "commits": list(COMMITS)}
    groups = {
        name: [case for case in cases if options.only in case.model][: options.first] for name, cases in groups.items()
    }
    if options.tiny:
        groups = {
            name: [Case(c.task, "tiny", 2, 32, c.masked, c.checkpointing) for c in cs] for name, cs in groups.items()
        }
    if options.provider:
        if options.other:
            import_other(options.other)
        rows = run(options.provider, groups[options.group], options.steps)
        if options.out:
            options.out.write_text(json.dumps(rows))
        return
    trainer = ("plain", "liger-kernel", "ours", "plain+compile", "ours+compile")
    trainer += ("plain+compile+causal", "ours+compile+causal")
    providers = {"trainer": trainer, "heads": ("plain", "TRL", "TRL+liger-kernel", "ours", "ours+kernels")}
    passed_on = ["--steps", str(options.steps), "--only", options.only, *["--tiny"] * options.tiny]
    passed_on += ["--first", str(options.first)] if options.first else []
    if options.other:
        providers = {"commits": ("other", "ours")}
        passed_on += ["--other", str(options.other)]
    rows = []
    for group, names in providers.items():
        if options.group not in (None, group):
            continue
        chosen = [name for name in names if options.providers is None or name in options.providers.split(",")]
        for name in [name for i in range(options.rounds) for name in (chosen[::-1] if i % 2 else chosen)]:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "rows.json"
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.end_to_end",
                    *passed_on,
                    "--provider",
                    name,
                    "--group",
                    group,
                ]
                command += ["--out", str(file)]
                subprocess.run(command, check=True)
                rows += json.loads(file.read_text())
                if options.out:  # a run that is stopped keeps what it has measured
                    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
                    result = {"environment": environment(device), "rows": merged(rows)}
                    options.out.write_text(json.dumps(result, indent=1) + "\n")
    rows = merged(rows)
    if options.rounds > 1:
        print("all rounds", *map(line, rows), sep="\n")
    print(*compared(rows), sep="\n")


if __name__ == "__main__":
    main()
