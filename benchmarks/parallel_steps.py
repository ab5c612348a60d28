"""Whole training steps on several GPUs: FSDP2, and tensor parallelism as transformers has it.

    python -m benchmarks.parallel_steps               # on all GPUs of this machine
    python -m benchmarks.parallel_steps --tiny        # on two CPU processes, a tiny model: to see that it runs

Every provider runs in processes of its own, and providers take turns with ``--rounds``. A time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.end_to_end import MODELS, Case, build, provide
from benchmarks.measure import environment

#: Of FSDP2, each rank has a batch of its own; of tensor parallelism, all have the same.
CASES = (
    ("FSDP2", Case("SFT", "Llama-3.2-1B", 4, 4096)),
    ("FSDP2", Case("SFT", "Llama-3-8B", 4, 4096, checkpointing=True)),
    ("TP", Case("SFT", "Llama-3.2-1B", 4, 4096)),
    ("TP", Case("SFT", "Llama-3-8B quarter", 4, 4096)),
)
PROVIDERS = {"FSDP2": ("plain", "liger-kernel", "ours"), "TP": ("plain", "ours")}
WARMUP, STEPS = 2, 5


def sharded(case: Case, provider: str, device: torch.device) -> Any:
    """A model that the provider has patched, each of whose layers FSDP2 shards."""
    from torch.distributed.fsdp import fully_shard

    model = build(case, device)
    provide(provider, case, model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def split(case: Case, provider: str, device: torch.device, folder: Path) -> Any:
    """A model that transformers splits over all ranks while it is loaded, and that the provider has patched."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0 and not (folder / "config.json").exists():
        build(case, device).save_pretrained(folder)
    dist.barrier()
    plan = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, distributed_config=plan).train()
    model.config.use_cache = False
    provide(provider, case, model)
    return model


def measure(kind: str, case: Case, provider: str, device: torch.device, folder: Path) -> dict[str, Any]:
    """Milliseconds of each step, the peak of memory and the last loss, of the rank that has most of each."""
    if kind == "FSDP2":
        model = sharded(case, provider, device)
    else:
        model = split(case, provider, device, folder / case.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=kind == "FSDP2")
    generator = torch.Generator(device).manual_seed(dist.get_rank() if kind == "FSDP2" else 0)
    size = (case.sequences, case.length)
    ids = torch.randint(MODELS[case.model][1]["vocab_size"], size, device=device, generator=generator)
    times, loss = [], 0.0
    for i in range(WARMUP + STEPS):
        if device.type == "cuda":
            dist.barrier()
            torch.cuda.synchronize()
            if i == WARMUP:
                torch.cuda.reset_peak_memory_stats()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        found = model(input_ids=ids, labels=ids).loss
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = float(found.detach())
        if device.type == "cuda":
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
    facts = torch.tensor([*times, loss], device=device)
    if device.type == "cuda":
        facts = torch.cat([facts, torch.tensor([torch.cuda.max_memory_allocated() / 2**30], device=device)])
    dist.all_reduce(facts, dist.ReduceOp.MAX)
    row: dict[str, Any] = {
        "kind": kind,
        **asdict(case),
        "provider": provider,
        "loss": round(float(facts[len(times)]), 4),
    }
    if times:
        row["milliseconds"] = [round(x, 1) for x in facts[WARMUP : len(times)].tolist()]
        row["peak_gib"] = round(float(facts[-1]), 2)
    return row


def work(rank: int, port: int, ranks: int, which: tuple[int, str], folder: Path, tiny: bool) -> None:
    kind, case = cases(tiny)[which[0]]
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))  # which transformers reads
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if gpu else "gloo", init_method=address, rank=rank, world_size=ranks)
    try:
        row = measure(kind, case, which[1], device, folder)
    except (ImportError, RuntimeError) as reason:  # no room, or no GPU for a peer
        row = {
            "kind": kind,
            **asdict(case),
            "provider": which[1],
            "note": f"{type(reason).__name__}: {str(reason).splitlines()[0]}"[:150],
        }
    if rank == 0:
        (folder / "row.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def cases(tiny: bool) -> list[tuple[str, Case]]:
    if not tiny:
        return list(CASES)
    return [(kind, Case("SFT", "tiny", 2, 32, checkpointing=case.checkpointing)) for kind, case in CASES]


def rated(row: dict[str, Any], ranks: int) -> dict[str, Any]:
    """With the tokens per second of all ranks, from the median step."""
    if "milliseconds" not in row:
        return row
    tokens = row["sequences"] * row["length"] * (ranks if row["kind"] == "FSDP2" else 1)
    return row | {"tokens_per_second": round(tokens / median(row["milliseconds"]) * 1e3)}


def line(row: dict[str, Any]) -> str:
    checkpointed = "checkpointed" if row["checkpointing"] else ""
    return (
        f"{row['kind']:6} {row['model']:18} {row['sequences']} x {row['length']:5} {checkpointed:12} "
        f"{row['provider']:13} {row.get('tokens_per_second', '-'):>8} tokens/s {row.get('peak_gib', '-'):>7} GiB  "
        f"{row.get('note') or row['loss']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file, beside which the table is written as text")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help=f"which cases, from 0 to {len(CASES) - 1}")
    parser.add_argument("--providers", nargs="*", help="which of plain, liger-kernel and ours; all by default")
    parser.add_argument("--ranks", type=int, help="processes; all GPUs, or two processes on a CPU, by default")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    options = parser.parse_args()
    ranks = options.ranks or torch.cuda.device_count() or 2
    found: dict[tuple[int, str], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        for index, (kind, _) in enumerate(cases(options.tiny)):
            if options.only is not None and index not in options.only:
                continue
            for turn in range(options.rounds):
                for provider in PROVIDERS[kind][:: -1 if turn % 2 else 1]:
                    if options.providers and provider not in options.providers:
                        continue
                    with socket.socket() as listening:
                        listening.bind(("127.0.0.1", 0))
                        port = listening.getsockname()[1]
                    key, folder = (index, provider), Path(name)
                    mp.spawn(work, (port, ranks, key, folder, options.tiny), nprocs=ranks)
                    row = json.loads((folder / "row.json").read_text())
                    if key in found and "milliseconds" in row:
                        row["milliseconds"] += found[key].get("milliseconds", [])
                    found[key] = rated(row, ranks)
                    print(line(found[key]), flush=True)
    if options.out:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        facts = {"environment": environment(device), "ranks": ranks, "rows": list(found.values())}
        options.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        options.out.with_suffix(".txt").write_text("\n".join(map(line, found.values())) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
