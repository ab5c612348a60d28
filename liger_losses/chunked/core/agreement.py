"""How ranks that compute a call together notice that they were to compute different ones.

Ranks compute a call together that share a vocabulary, or hold slices of the same sequences. What must be equal on all
of them is the call's *signature*, a text: the operation, options, shapes and dtypes. Where a signature is new to a rank
and group, the rank publishes it in the group's store, under the number of this comparison, and waits for those of the
other ranks. Where these differ, all ranks raise one error that lists them. No collective takes part, so that none can
be mistaken for another, and a known signature costs no communication.

Signatures become known to all ranks of a group at once. What is not seen, unless the environment variable
``LIGER_LOSSES_CHECK_RANKS`` is 1 on all ranks, so that every call is compared:

- Ranks make different calls that they all know, or tensors of a known call differ.
- A call is new to one rank, and another makes a known one, or has raised an error. The first waits for the timeout of
  ``init_process_group`` (of the store, if that was given), and raises an error that says from which ranks it has heard
  nothing. The other waits in its next collective, for the timeout of the group. The group cannot be used any more.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from liger_losses.checks import see

CHECK_VARIABLE = "LIGER_LOSSES_CHECK_RANKS"
#: The older name is deprecated since torch 2.13.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class RankError(RuntimeError, ValueError):
    """The ranks of a group were to compute different calls."""


@dataclass
class Known:
    """What this process knows of a process group."""

    comparisons: int = 0
    life: int = 0  # how many groups of this name the store has had: one that is made again counts from 1 again
    signatures: set[int] = field(default_factory=set)  # hashes
    least_memory: dict[str, int] = field(default_factory=dict)  # bytes of the ranks' smallest device, by its type


_groups: WeakKeyDictionary[dist.ProcessGroup, Known] = WeakKeyDictionary()


def known_of(group: dist.ProcessGroup) -> Known:
    return _groups.setdefault(group, Known())


def checksum(values: Tensor) -> int:
    """A checksum of a tensor's entries and of their order."""
    return zlib.crc32(repr(values.detach().flatten().tolist()).encode())


def agree(group: Any, signature: Mapping[str, Any], values: Mapping[str, Callable[[], Any]] | None = None) -> None:
    """Raise on all ranks unless they get here with the same signature, which is compared if it is new.

    Args:
        group: the process group.
        signature: named options, shapes and dtypes.
        values: what computes values that must be equal too, such as checksums; of calls that are compared.

    Raises:
        RankError: the signatures differ, or a rank has published none within the timeout.
    """
    signatures, text = known_of(group).signatures, lines_of(signature)
    if hash(text) in signatures and os.environ.get(CHECK_VARIABLE) != "1":
        return
    compare(group, text + lines_of({name: value() for name, value in (values or {}).items()}))
    signatures.add(hash(text))


def lines_of(values: Mapping[str, Any]) -> str:
    return "".join([f"{name}: {value}\n" for name, value in values.items()])


def compare(group: Any, text: str) -> None:
    """Raise RankError on all ranks unless all get here with the same lines of text."""
    store, rank, known = group.get_group_store(), group.rank(), known_of(group)
    known.life = known.life or store.add(f"liger_losses/lives/{rank}", 1)
    known.comparisons += 1
    name, cause = f"liger_losses/{known.life}", None
    keys = [f"{name}/{known.comparisons}/{r}" for r in range(group.size())]
    # All have read those of the comparison before the last one, or they would not have come to the last one.
    store.delete_key(f"{name}/{known.comparisons - 2}/{rank}")
    store.set(keys[rank], text)
    try:
        store.wait(keys)
    except RuntimeError as error:
        cause = error
    texts = [store.get(key).decode() if cause is None or store.check([key]) else "" for key in keys]
    if len(set(texts)) == 1:
        return
    lines = [text.splitlines() for text in texts]
    common = set.intersection(*[set(of_rank) for of_rank in lines if of_rank])
    silence = (
        f"nothing within {store.timeout}: it has raised an error, or makes a call that the ranks have compared before, "
        "or none with this group"
    )
    differ = ["; ".join([line for line in of_rank if line not in common]) if of_rank else silence for of_rank in lines]
    said = [f"  rank {r}: {of_rank}\n" for r, of_rank in enumerate(differ)]
    raise RankError(
        "all ranks of the group must make the same call, on the same tokens or each on its slice of the same "
        "sequences, but they are about to make different ones. Where each rank has a batch of its own, give all ranks "
        f"of a vocabulary-parallel head the same one.{see('ranks-that-differ')}\n{''.join(said)}"
        f"  equal: {'; '.join([line for line in lines[rank] if line in common])}"
    ) from cause
