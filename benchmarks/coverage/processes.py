"""Checks of many model types, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.coverage import model_zoo

#: Seconds for one type.
LIMIT = 150


def in_processes(types: Iterable[str], check: Callable[[str], dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What ``check`` returns for each type; the text of its ``error`` if it raises, dies or takes too long."""
    model_zoo.build("llama")  # imports once what most models need, which takes ten times as long as a check
    context = multiprocessing.get_context("fork")
    for model_type in types:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_in_child, args=(check, model_type, sender))
        process.start()
        sender.close()
        try:
            result = receiver.recv() if receiver.poll(LIMIT) else {"error": f"over {LIMIT} s"}
        except EOFError:
            result = {"error": "the process died"}
        process.kill()
        process.join()
        yield model_type, result


def _in_child(check: Callable[[str], dict[str, Any]], model_type: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(check(model_type))
    except Exception as error:  # part of the table
        pipe.send({"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]})
