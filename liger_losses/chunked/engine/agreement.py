"""Errors of one rank alone, of which those that compute with it must know: else they would wait for it.

Every call with a shared head begins with an :class:`Agreement` of its ranks, and every loss of slices of sequences with
a comparison of what the ranks compute. A rank that raises before it gets there, because there is no such argument or
inputs do not fit, takes part in that exchange with its error, and all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from liger_losses.chunked.engine.arguments import wrong_arguments
from liger_losses.chunked.engine.given import Given, differences, given_to_loss
from liger_losses.chunked.engine.plan import device_memory

#: The older name is deprecated since torch 2.13.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class RankError(RuntimeError):
    """Another rank has raised, so that this one raises too."""


class Agreement:
    """Within this context each rank makes its checks; after :meth:`wait` all ranks go on, or each raises an error.

    Without it, a rank that raises would leave the others waiting in their next collective. What a rank was
    :attr:`given` for the call that it is about to make must be the same on all ranks; :attr:`number` may be any. At the
    end of the context the exchange begins, and :meth:`wait` must come before any other collective.
    """

    #: How many this rank has taken part in.
    count: ClassVar[int] = 0

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.given = Given()
        self.number = 0

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        digest, checksum = (-1, None) if error is not None else (self.given.digest, self.given.checksum)
        # From pinned memory: the host would wait for another copy to a GPU.
        on_gpu = self.device.type == "cuda"
        mine = torch.tensor([digest, self.number, 0], dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        mine = mine.to(self.device, non_blocking=True)
        if checksum is not None:
            mine[2] = checksum
        self._gathered = mine.new_empty(3 * self.group.size())
        all_gather(self._gathered, mine, group=self.group)
        Agreement.count += 1
        if error is not None:
            self._gather_objects(f"{type(error).__name__}: {error}")

    def _gather_objects(self, own: Any) -> list[Any]:
        """Each rank's."""
        found: list[Any] = [None] * self.group.size()
        dist.all_gather_object(found, own, group=self.group)
        return found

    def wait(self) -> tuple[int, ...]:
        """The ``number`` of each rank, in their order.

        Raises:
            RankError: another rank has raised.
            ValueError: the ranks were given different things; says which.
        """
        gathered = self._gathered.tolist()
        digests, numbers, checksums = gathered[::3], tuple(gathered[1::3]), gathered[2::3]
        if -1 in digests:
            first = digests.index(-1)
            raise RankError(
                f"rank {first} of the group that shares the vocabulary raised an error, so this rank raises too: "
                f"{self._gather_objects('')[first]}"
            )
        if len(set(digests)) > 1 or len(set(checksums)) > 1:
            raise ValueError(
                "all ranks of the group that shares the vocabulary must make the same call, on the same tokens with "
                f"the same options; they differ in {differences(self._gather_objects(self.given.described()))}"
            )
        return numbers


class NoAgreement(Agreement):
    """That of one process."""

    def __init__(self) -> None:
        self.given = Given()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        pass

    def wait(self) -> tuple[int, ...]:
        return ()


def meet(head: Any, error: Exception | None = None) -> None:
    """Raise on all ranks that share a head if one has an error, or if their loss was given different things.

    It comes before other collectives.
    """
    device = head.weight.device
    head.ranks.least_memory(device_memory(device), device)
    with head.ranks.agreement(device) as agreement:
        if error is not None:
            raise error
        agreement.given = given_to_loss()
    agreement.wait()


@torch.compiler.disable
def raise_on_all_ranks(
    error: Exception, agreements: int, function: Callable[..., Any], arguments: Any, keywords: Any, loss: Any = None
) -> None:
    """Make all ranks raise that compute this call together, unless they know of its error, which is to be raised next.

    Args:
        error: that of a call with these arguments. Where a loss or an operation takes no such arguments, this function
            raises a TypeError that says how it is called.
        agreements: :attr:`Agreement.count` as it was before the call. If it is another now, the ranks know of the
            error, or have gone on, and cannot be told.
        function: what was called: an operation, or the ``forward`` of the ``loss``.
    """
    wrong = wrong_arguments(function, len(arguments), keywords, loss) if type(error) is TypeError else None
    error = error if wrong is None else TypeError(wrong)
    head = _shared_head((*arguments, *keywords.values()))
    if head is not None and Agreement.count == agreements:
        with suppress(type(error)):
            meet(head, error)
    if loss is not None and loss.spans_ranks:
        tell_slices(loss.group, error)
    if wrong is not None:
        raise error from None


def tell_slices(group: dist.ProcessGroup, error: Exception) -> None:
    """Make all ranks raise that hold other slices of the sequences, unless they know of this error.

    They learn it when they next compare what they compute.
    """
    if getattr(error, "ranks_know", False):
        return
    error.ranks_know = True  # type: ignore[attr-defined]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, f"{type(error).__name__}: {error}", group=group)


def _shared_head(given: Iterable[Any]) -> Any:
    for value in given:
        found = _shared_head(value) if isinstance(value, (list, tuple)) else value
        if getattr(getattr(found, "ranks", None), "tells", False):
            return found
    return None
