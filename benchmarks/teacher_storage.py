"""Bytes and times of a teacher from files, by what is written: `python -m benchmarks.teacher_storage`.

Hidden states in bf16 (and the head once), log-probabilities of the k most likely tokens, or all logits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import liger_losses


def bytes_per_token(hidden_size: int, vocab_size: int, k: int) -> dict[str, int]:
    """Of a token: hidden states in bf16; k fp32 log-probabilities with int32 columns; all logits in fp32."""
    return {"hidden states": 2 * hidden_size, f"top {k}": 8 * k, "all logits": 4 * vocab_size}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what the call returns."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def measure(folder: Path, tokens: int, hidden_size: int, vocab_size: int, k: int) -> dict[str, Any]:
    """Bytes a token on disk, and milliseconds a thousand tokens to write and to read."""
    hidden, head = torch.randn(tokens, hidden_size).bfloat16(), torch.randn(vocab_size, hidden_size).bfloat16()
    writer = liger_losses.TeacherWriter(folder, head)
    report: dict[str, Any] = {"head, once, MiB": head.nbytes / 2**20}

    def add(name: str, path: Path, write: Callable[[], Any], read: Callable[[], Tensor]) -> None:
        written, _ = timed(write)
        seconds, _ = timed(lambda: read().sum())  # memory-mapped: touches every page
        to_ms = 1e6 / tokens
        size = path.stat().st_size / tokens
        report[name] = {"bytes a token": size, "write, ms": written * to_ms, "read, ms": seconds * to_ms}
        path.unlink()

    files = liger_losses.TeacherFiles(folder)
    path = folder / "batch-0.safetensors"
    add("hidden states", path, lambda: writer.write(0, hidden), lambda: files.teacher(0).hidden_states)
    logits = torch.randn(tokens, vocab_size)
    top = logits.topk(k)
    pair = {"logps": top.values.clone(), "indices": top.indices.int()}
    path = folder / "other.pt"

    def read() -> Tensor:
        found = torch.load(path, mmap=True, weights_only=True)
        return sum(tensor.float().sum() for tensor in found.values())

    add(f"top {k}", path, lambda: torch.save(pair, path), read)
    add("all logits", path, lambda: torch.save({"logits": logits}, path), read)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--folder", help="where to write (a temporary folder by default; /dev/shm is memory)")
    args = parser.parse_args()
    print("by the sizes:", json.dumps(bytes_per_token(args.hidden_size, args.vocab_size, args.k)))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        report = measure(Path(folder), args.tokens, args.hidden_size, args.vocab_size, args.k)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
