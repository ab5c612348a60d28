"""How ranks that compute one call together learn that one of them raises, or computes another call.

Ranks compute a call together that share a vocabulary, or hold slices of the same sequences. Each such call, and each
head whose vocabulary is shared, begins with one exchange: every rank gives a message of 4 KiB, which says what it is
about to compute (options, shapes, dtypes), or the error that it raises. All exchanges have one form. So ranks that make
different calls, or of which one raises, still meet in the same collective: no rank waits for one that another never
starts, and no message is taken for something else.

What a rank does with the messages depends on what it has seen before, which is the same on all ranks:

- Of a call of a new signature, a text that no exchange has found equal on all ranks, the host waits for the messages.
  They also hold checksums of the labels and of every other tensor that must be equal. What differs is an error on all
  ranks, which says what.
- Of a call of a known signature, the message was made before, and has no checksums. It is read where that costs
  nothing, on CPUs. On a GPU nobody waits for it, and the exchange begins after the first product: if another rank
  raises, or makes a call that is new there, that rank says so, and this one stays in its next collective until the
  launcher ends it, or the group's timeout does.
- Where the environment variable ``LIGER_LOSSES_CHECK_RANKS`` is 1 on all ranks, every call is compared as a new one is.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses.arguments import wrong_arguments
from liger_losses.kernels.reading import place_weights

CHECK_VARIABLE = "LIGER_LOSSES_CHECK_RANKS"
VOCABULARY, SLICES = "the group that shares the vocabulary", "the loss's group="
_SAME = {
    VOCABULARY: f"all ranks of {VOCABULARY} must make the same call, on the same tokens with the same options",
    SLICES: f"all ranks of {SLICES} must make the same call, each on its slice of the same sequences",
}
#: The older name is deprecated since torch 2.13.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

#: A message is 512 int64 numbers: a checksum of the whole text, or -1 of an error; a number that may differ; the bytes
#: of the text that are there; the number of checksums and the checksums; and the text, compressed.
_SUMS, _TEXT, _SIZE = 4, 32, 512
_MOST_SIGNATURES = 1024
_MOST_TENSORS = 28
_BATCHES = " Where each rank has a batch of its own, give all ranks of the group the same one."


# --- What a call was given ------------------------------------------------------------------------------------------


def checksum(values: Tensor) -> Tensor:
    """A checksum of the bits of a tensor's entries and of their places, 0-dim int64; see :func:`place_weights`."""
    flat = values.detach().reshape(-1)
    if flat.is_floating_point():
        flat = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    return ((flat.long() + 1) * place_weights(0, len(flat), flat.device)).sum()


def lines_of(values: Mapping[str, Any]) -> str:
    """A line for each value."""
    return "".join([f"{name}\t{value}\n" for name, value in values.items()])


class Given:
    """Named values of a call, which are compared as text, and its tensors, by checksums that are computed when needed.

    Attributes:
        values: by name.
        said: lines of text of more values, where they are known.
        tensors: what computes the checksum of each, 0-dim int64.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self.values: dict[str, Any] = dict(values or {})
        self.said = ""
        self.tensors: dict[str, Callable[[], Tensor]] = {}

    def add(self, name: str, value: Any, entries: Callable[[Tensor], Tensor] | None = None) -> None:
        """Add a number, text or tensor, or a list of such; of a tensor, ``entries(tensor)`` are compared."""
        if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
            for i, part in enumerate(value):
                self.add(f"{name}[{i}]", part, entries)
        elif isinstance(value, Tensor):
            self.values[name] = f"{value.dtype} {list(value.shape)}"
            self.tensors[name] = lambda: checksum(value if entries is None else entries(value))
        else:
            self.values[name] = value

    @property
    def text(self) -> str:
        return lines_of(self.values) + self.said

    def checksums(self) -> list[Tensor]:
        """One for each tensor; if there are many, one for the last ones together."""
        sums = [compute() for compute in self.tensors.values()]
        if len(sums) > _MOST_TENSORS:
            sums[_MOST_TENSORS - 1 :] = [checksum(torch.stack(sums[_MOST_TENSORS - 1 :]))]
        return sums


def differences(texts: Sequence[Sequence[str]], tensors: Sequence[str], sums: Sequence[Sequence[int]]) -> str:
    """What differs between ranks: the names, then a line for each rank.

    Args:
        texts: the lines of each rank's :attr:`Given.text`.
        tensors: the names of tensors that have checksums.
        sums: each rank's checksums.
    """
    values = [dict([line.split("\t", 1) for line in lines if "\t" in line]) for lines in texts]
    said: dict[str, list[str]] = {}
    for name in dict.fromkeys([name for named in values for name in named]):
        if len({named.get(name) for named in values}) > 1:
            said[name] = [named.get(name, "not given") for named in values]
    if len(tensors) > _MOST_TENSORS:
        tensors = [*tensors[: _MOST_TENSORS - 1], f"{tensors[_MOST_TENSORS - 1]} and later ones"]
    for name, of_ranks in zip(tensors, zip(*sums, strict=True), strict=False):
        if len(set(of_ranks)) > 1 and not said.get(name):
            said[name] = [f"{'as' if each == of_ranks[0] else 'not as'} rank 0's" for each in of_ranks]
    lines = [f"  rank {r}: {'; '.join([f'{name}: {said[name][r]}' for name in said])}" for r in range(len(texts))]
    return "\n".join([f"{', '.join(said)}.{_BATCHES if 'labels' in said else ''}", *lines])


class _Running(threading.local):
    """The loss whose call runs, what it was given that no exchange has compared yet, and how many exchanges of all
    threads there were."""

    loss: Any = None
    noted: tuple[tuple[Tensor | None, int, dict[str, Any]], ...] = ()
    exchanges: int = 0


running = _Running()


def note(labels: Tensor | None = None, ignore_index: int = -100, /, **given: Any) -> None:
    """Within a loss's call: ranks that share the vocabulary compare these numbers and tensors when it next meets them.

    ``None`` is a value too. In tensors of the labels' shape, entries of tokens without loss do not matter.
    """
    if not torch.compiler.is_dynamo_compiling() and running.loss is not None:
        running.noted = (*running.noted, (labels, ignore_index, given))


def given_to_loss() -> Given:
    """The options of the loss whose call runs, and what it has noted since the last exchange."""
    found, loss = Given(), running.loss
    if loss is None:
        return found
    found.values.update(loss.common_options)
    noted, running.noted = running.noted, ()
    for labels, ignore_index, given in noted:
        for name, value in given.items():
            if isinstance(value, (int, float)):  # of this call, unlike options: its value is no part of the signature
                value = torch.tensor(value, dtype=torch.float64, device="cpu")
            found.add(name, value, partial(_of_active_tokens, labels, ignore_index))
    return found


def _of_active_tokens(labels: Tensor | None, ignore_index: int, value: Tensor) -> Tensor:
    """A tensor's entries, 0 for tokens without loss where it has the shape of the labels."""
    if labels is None or value.shape[: labels.dim()] != labels.shape:
        return value
    active = (labels != ignore_index).view(*labels.shape, *[1] * (value.dim() - labels.dim()))
    return torch.where(active, value.detach(), 0)


# --- The exchange ---------------------------------------------------------------------------------------------------


class RankError(RuntimeError, ValueError):
    """Another rank has raised, or makes another call: this rank raises too."""

    def __init__(self, message: str, *told: Any) -> None:
        super().__init__(message)
        self.told = told


class _Group:
    """What this process knows of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        pairs = [pair.split(":") for pair in dist.get_backend_config(group).split(",")]
        #: The device of messages; its type is the same on all ranks, also on a rank that raises before it sees a
        #: tensor.
        self.device = torch.device(next((device for device, backend in pairs if backend not in ("gloo", "mpi")), "cpu"))
        #: The messages of known signatures, by their texts.
        self.signatures: dict[str, Tensor] = {}
        #: The number of the last exchange.
        self.last = 0
        #: Bytes of the smallest device of the ranks, by its type.
        self.least_memory: dict[str, int] = {}
        #: The message of an exchange that begins with the next collective: see :func:`settle`.
        self.owed: Tensor | None = None

    def exchange(self, group: dist.ProcessGroup, message: Tensor) -> Tensor:
        """The messages of all ranks, in their order."""
        messages = message.new_empty(dist.get_world_size(group), _SIZE)
        all_gather(messages.view(-1), message, group=group)
        type(running).exchanges += 1  # on all threads: backward has its own
        self.last = running.exchanges
        return messages


_groups: WeakKeyDictionary[dist.ProcessGroup, _Group] = WeakKeyDictionary()


def known_of(group: dist.ProcessGroup, device: torch.device | None = None) -> _Group:
    """What is known of a group, whose ranks' tensors are on ``device``."""
    if group not in _groups:
        _groups[group] = _Group(group)
    known = _groups[group]
    if device is not None and device.type == known.device.type:
        known.device = device
    return known


def settle(group: dist.ProcessGroup) -> None:
    """Begin the exchange that was put off until the ranks' next collective, if there is one."""
    known = _groups.get(group)
    if known is not None and known.owed is not None:
        message, known.owed = known.owed, None
        known.exchange(group, message)


class Agreement:
    """Within this context each rank makes its checks; after :meth:`wait` all ranks go on, or each raises an error.

    What a rank was :attr:`given` for the call that it is about to make must be the same on all ranks; :attr:`number`
    may be any, and is read. The exchange begins at the end of the context, and :meth:`wait` comes before any other
    collective. Without a group, nothing is exchanged.

    An exchange that nobody reads may begin :attr:`later`, with the ranks' next collective: the host then launches what
    comes before that first. Whoever sets this calls :func:`settle` before each collective that follows.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, ranks: str = VOCABULARY, device: torch.device | None = None
    ) -> None:
        self.group, self.ranks, self.given = group, ranks, Given()
        self.known: Any = None if group is None else known_of(group, device)
        self.number: int | None = None
        self.messages: Tensor | None = None
        self.later = False

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.group is None or (error is not None and not isinstance(error, Exception)):
            return
        known, message = self.known, None
        if error is None:
            settle(self.group)
        else:  # other ranks find it where they expect what this rank owes
            known.owed, message = None, _message(f"{type(error).__name__}: {error}", known.device, digest=-1)
        if error is None and self.number is None and os.environ.get(CHECK_VARIABLE) != "1":
            message = known.signatures.get(self.given.text)
        reads = message is None or self._reads_all
        if message is None:
            message = _message(self.given.text, known.device, self.number or 0, self.given.checksums())
        if self.later and error is None and not reads:
            known.owed = message
        else:
            messages = known.exchange(self.group, message)
            self.messages = messages if reads else None

    @property
    def _reads_all(self) -> bool:
        """Whether messages of known signatures are read too, which costs nothing on CPUs."""
        return bool(self.known.device.type == "cpu")

    def wait(self) -> tuple[int, ...]:
        """The :attr:`number` of each rank, in their order; empty where nothing is compared.

        Raises:
            RankError: another rank has raised, or the ranks were given different things; says which.
        """
        if self.messages is None:
            return ()
        found, known = self.messages[:, :_TEXT].tolist(), self.known.signatures
        for rank, (digest, *_) in enumerate(found):
            if digest == -1:
                raise RankError(
                    f"rank {rank} of {self.ranks} raised an error, so this rank raises too: {self._texts(found)[rank]}",
                    self.group,
                )
        sums = [numbers[_SUMS:] for numbers in found]
        compared = [numbers for numbers in found if numbers[_SUMS - 1]]  # all ranks' but by mistake
        if len({numbers[0] for numbers in found}) > 1 or len({tuple(n[_SUMS:]) for n in compared}) > 1:
            said = differences([text.splitlines() for text in self._texts(found)], list(self.given.tensors), sums)
            raise RankError(f"{_SAME[self.ranks]}; they differ in {said}", self.group)
        if self.number is None and self.given.text not in known:
            if len(known) >= _MOST_SIGNATURES:
                known.clear()
            known[self.given.text] = _message(self.given.text, self.known.device)
        return tuple([numbers[1] for numbers in found])

    def _texts(self, found: list[list[int]]) -> list[str]:
        """What fits of each rank's text."""
        assert self.messages is not None
        rows = self.messages[:, _TEXT:].contiguous().view(torch.uint8).tolist()
        packed = [bytes(row[: numbers[2]]) for row, numbers in zip(rows, found, strict=True)]
        return [zlib.decompressobj().decompress(each).decode(errors="replace") for each in packed]


def _message(
    text: str, device: torch.device, number: int = 0, sums: Sequence[Tensor] = (), digest: int | None = None
) -> Tensor:
    packed = bytearray(zlib.compress(text.encode())[: 8 * (_SIZE - _TEXT)])
    numbers = [zlib.crc32(text.encode()) if digest is None else digest, number, len(packed), len(sums)]
    made = torch.zeros(_SIZE, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    made[:_SUMS] = torch.tensor(numbers, device="cpu")
    made[_TEXT:].view(torch.uint8)[: len(packed)] = torch.frombuffer(packed, dtype=torch.uint8)
    message = made.to(device, non_blocking=True)  # from pinned memory, for which the host does not wait
    if sums:
        message[_SUMS : _SUMS + len(sums)] = torch.stack([each.to(device) for each in sums])
    return message


def agree(group: Any, **facts: Any) -> None:
    """Raise on all ranks that hold slices of the same sequences unless all get here with the same facts.

    It comes before the sums, which would hang if a rank raised before them, or gave other shapes. So nothing that
    comes after it may raise on one rank alone.

    Raises:
        RankError: see :meth:`Agreement.wait`.
    """
    with Agreement(group, SLICES) as agreement:
        agreement.given = Given(facts)
    agreement.wait()


def meet(head: Any) -> None:
    """Raise on all ranks that share a head if one raises, or if their loss was given different things."""
    if head.ranks.size == 1:
        return
    with head.ranks.agreement(head.weight.device) as agreement:
        agreement.given = given_to_loss()
    agreement.wait()


def tell(group: dist.ProcessGroup, ranks: str, error: Any) -> None:
    """Make the ranks of a group raise in the exchange that they come to next, unless they know of this error."""
    told = getattr(error, "told", ())
    if group not in told:
        error.told = (*told, group)
        with suppress(type(error)), Agreement(group, ranks):
            raise error


@contextmanager
def telling_slices(group: dist.ProcessGroup | None) -> Iterator[None]:
    """What is raised within this context is raised on all ranks that hold slices of the same sequences."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if group is not None:
            tell(group, SLICES, error)
        raise


def raise_on_all_ranks(
    error: Exception, since: int, function: Callable[..., Any], arguments: Any, keywords: Any, loss: Any = None
) -> None:
    """Make all ranks raise that compute this call together, unless they know of its error, which is to be raised next.

    Args:
        error: what a call with these arguments raised. Where a loss or an operation takes no such arguments, this
            function raises a TypeError that says how it is called.
        since: how many exchanges there were before the call. If the ranks that share a head have met since, they know
            of the error, or have gone on, and cannot be told.
        function: what was called: an operation, or the ``forward`` of the ``loss``.
    """
    kind, wrong = None if loss is None else type(loss), None
    if type(error) is TypeError:
        wrong = wrong_arguments(function, len(arguments), keywords, kind)
    error = error if wrong is None else TypeError(wrong)
    ranks = _shared_ranks((*arguments, *keywords.values()))
    if ranks is not None and known_of(ranks.group).last <= since:
        tell(ranks.group, VOCABULARY, error)
    if loss is not None and loss.spans_ranks:
        tell(loss.group, SLICES, error)
    if wrong is not None:
        raise error from None


def _shared_ranks(arguments: Iterable[Any]) -> Any:
    for value in arguments:
        found = _shared_ranks(value) if isinstance(value, (list, tuple)) else getattr(value, "ranks", None)
        if getattr(found, "tells", False):
            return found
    return None
