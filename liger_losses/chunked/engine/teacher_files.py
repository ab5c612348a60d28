"""A teacher in another process: its hidden states, batch by batch, and its head once, in files that are memory-mapped.

A folder in memory (``/dev/shm``) makes them shared memory. Ht is the teacher's hidden size, Vt its vocabulary size.

A token takes 2 Ht bytes, and its whole distribution follows from them and the head; k log-probabilities with their
columns take 8 k bytes, all logits 4 Vt.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from liger_losses.checks import check_tensor
from liger_losses.chunked.engine.head import Head
from liger_losses.chunked.engine.teachers import Teacher, check_no_temperature
from liger_losses.kernels.logit_transform import LogitTransform

_HEAD = "head.pt"
#: What hidden states are written in; others would round them to nothing, or to NaN.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class TeacherWriter:
    """Writes a teacher to a folder, for :class:`TeacherFiles` of this or another process.

    Several writers may share a folder if their heads are the same. A batch is only read with the head that it was
    written with.

    Args:
        folder: the folder, which is created if it does not exist. Batches in it are kept; its head is replaced.
        head: the teacher's head: a weight ``[Vt, Ht]``, a linear layer, or a :class:`liger_losses.Head`. It is written
            at once, in its dtype, as one weight: dequantized, and with its adapters added. The ranks of a
            vocabulary-parallel head make the writer together.
        dtype: the dtype of the hidden states in the files: bf16, fp16, fp32 or fp64. The default is exact for a teacher
            that runs in bf16.

    Raises:
        TypeError, ValueError: another dtype; a head that :class:`liger_losses.Head` refuses, or one with a temperature.
    """

    def __init__(
        self, folder: str | os.PathLike[str], head: Tensor | nn.Module | Head, *, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        if dtype not in _DTYPES:
            raise TypeError(f"dtype must be torch.bfloat16, float16, float32 or float64, got {dtype}.")
        self.folder, self.dtype, head = Path(folder), dtype, Head.of(head).merged()
        check_no_temperature("teacher", head)
        self.hidden_size = head.hidden_size
        self.folder.mkdir(parents=True, exist_ok=True)
        transform = {"logit_scale": head.transform.logit_scale, "softcap": head.transform.softcap}
        values = _on_cpu({"weight": head.weight, "bias": head.bias, **transform})
        self._head_digest = _digest(values)
        _write(self.folder / _HEAD, {**values, "digest": self._head_digest})

    def write(self, name: str | int, hidden_states: Tensor) -> None:
        """Write a batch. Readers see it when it is complete. A batch of the same name is replaced.

        Args:
            name: the name of the batch, such as its number.
            hidden_states: ``[..., Ht]``, one for each hidden state of the student.

        Raises:
            TypeError, ValueError: not a floating-point tensor of the head's hidden size.
        """
        check_tensor("hidden_states", hidden_states)
        if not hidden_states.is_floating_point():
            raise TypeError(f"hidden_states must be floating point, got {hidden_states.dtype}.")
        if hidden_states.dim() < 2 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden_states must be [..., {self.hidden_size}] to fit the head, got {tuple(hidden_states.shape)}."
            )
        values = _on_cpu({"hidden_states": hidden_states.detach().to(self.dtype)})
        _write(_path(self.folder, name), {**values, "head": self._head_digest})


class TeacherFiles:
    """Reads the files of a :class:`TeacherWriter`, also while it writes.

    Args:
        folder: the folder of the writer.
        device: the device on which the teacher's logits are computed, which is the student's.
        dtype: the dtype of the teacher's head and hidden states, such as the student's; by default as they were
            written.
        timeout: seconds to wait for the head, and by default also for each batch.
        columns_correspond: see :class:`liger_losses.Teacher`.

    Raises:
        FileNotFoundError: no head within that time.
        RuntimeError: a head that cannot be read.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        timeout: float = 0.0,
        columns_correspond: bool = False,
    ) -> None:
        self.folder, self.device, self.dtype, self.timeout = Path(folder), torch.device(device), dtype, timeout
        self.columns_correspond = columns_correspond
        found = _read(_wait(self.folder / _HEAD, timeout), "the head", "weight")
        self._head_digest = found.get("digest")
        transform = LogitTransform(1.0, found["logit_scale"], found["softcap"])
        bias = None if found["bias"] is None else self._move(found["bias"])
        self.head = Head(self._move(found["weight"]), bias, transform)

    def teacher(self, name: str | int, *, timeout: float | None = None, remove: bool = False) -> Teacher:
        """The teacher of a batch, with hidden states in the shape in which they were written.

        Args:
            name: the name with which the batch was written.
            timeout: seconds to wait for it.
            remove: remove the file after it was read once. (Its memory is freed when the teacher is.)

        Raises:
            FileNotFoundError: no such batch within that time.
            RuntimeError: a file that cannot be read, such as a truncated one.
            ValueError: a batch that was written with another head.
        """
        path = _wait(_path(self.folder, name), self.timeout if timeout is None else timeout)
        found = _read(path, f"the batch {name}", "hidden_states")
        if found.get("head", self._head_digest) != self._head_digest:
            raise ValueError(
                f"the batch {name} in {path} was written with another head than the one that was read from this "
                "folder; use a separate folder for each teacher, and make new TeacherFiles once its head is written."
            )
        hidden_states = self._move(found["hidden_states"])
        if remove:
            path.unlink()
        return Teacher(hidden_states, self.head, columns_correspond=self.columns_correspond)

    def names(self) -> list[str]:
        """The names of the batches that are complete, sorted."""
        return sorted(path.name[len("batch-") : -len(".pt")] for path in self.folder.glob("batch-*.pt"))

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype or tensor.dtype)


def _path(folder: Path, name: str | int) -> Path:
    if not str(name) or not all(c.isalnum() or c in "-_." for c in str(name)):
        raise ValueError(f"the name of a batch may contain only letters, digits, '-', '_' and '.', got {name!r}.")
    return folder / f"batch-{name}.pt"


def _on_cpu(values: dict[str, Any]) -> dict[str, Any]:
    """Contiguous tensors without the rest of their storage, which would be written with them."""
    found = dict(values)
    for name, value in values.items():
        if isinstance(value, Tensor):
            value = value.cpu()
            whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
            found[name] = value if whole else value.contiguous().clone()
    return found


def _digest(values: dict[str, Any]) -> str:
    """A digest of the values; tensors are contiguous, on the CPU, and read in place, without numpy."""
    digest = hashlib.sha256()
    for name, value in values.items():
        if isinstance(value, Tensor):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
            digest.update((ctypes.c_char * value.nbytes).from_address(value.data_ptr()))
        else:
            digest.update(f"{name} {value!r} ".encode())
    return digest.hexdigest()


def _write(path: Path, values: dict[str, Any]) -> None:
    # Process ids repeat in containers that share a folder.
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        torch.save(values, unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read(path: Path, what: str, needed: str) -> dict[str, Any]:
    """Memory-mapped: pages are read where they are used, and shared with other processes."""
    while True:
        # torch.load opens the path twice, for the description and for the numbers: a file that was put in its place
        # between the two would mix them. A file that is open keeps its inode number.
        with path.open("rb") as opened:
            try:
                found, error = torch.load(path, map_location="cpu", mmap=True, weights_only=True), None
                found[needed]
            except Exception as raised:  # torch raises many kinds
                found, error = {}, raised
            if not os.path.samestat(os.fstat(opened.fileno()), path.stat()):
                continue
        if error is None:
            return found
        raise RuntimeError(
            f"{what} in {path} cannot be read: the file was cut off, or was not written by a TeacherWriter "
            f"({type(error).__name__}: {error}); write it again."
        ) from error


def _wait(path: Path, timeout: float) -> Path:
    end = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() >= end:
            what = "head" if path.name == _HEAD else "batch"
            raise FileNotFoundError(
                f"there is no {what} {path} after {timeout:g} s: check that a TeacherWriter writes to this folder, "
                "or wait longer (timeout=)."
            )
        time.sleep(0.005)
    return path
