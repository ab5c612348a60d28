"""A teacher in another process: its hidden states, batch by batch, and its head once, in files that are memory-mapped.

A folder in memory (``/dev/shm``) makes them shared memory. Ht is the teacher's hidden size, Vt its vocabulary size.

A token takes 2 Ht bytes, and its whole distribution follows from them and the head; k log-probabilities with their
columns take 8 k bytes, all logits 4 Vt.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from liger_losses.checks import FLOATS, check_alike
from liger_losses.chunked.core.distilled import Teacher, check_no_temperature
from liger_losses.chunked.core.head import Head
from liger_losses.kernels.logit_transform import LogitTransform


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
        if dtype not in FLOATS:  # others would round hidden states to nothing, or to NaN
            raise TypeError(f"dtype must be torch.bfloat16, float16, float32 or float64, got {dtype}.")
        self.folder, self.dtype, head = Path(folder), dtype, Head.of(head).merged()
        check_no_temperature("teacher", head.transform.temperature)
        self.hidden_size = head.hidden_size
        self.folder.mkdir(parents=True, exist_ok=True)
        values = {"weight": head.weight} if head.bias is None else {"weight": head.weight, "bias": head.bias}
        digest = hashlib.sha256(_safetensors(values, "")).hexdigest()
        self._head = json.dumps([head.transform.logit_scale, head.transform.softcap, digest])
        _write(self.folder / "head.safetensors", values, self._head)

    def write(self, name: str | int, hidden_states: Tensor) -> None:
        """Write a batch. Readers see it when it is complete. A batch of the same name is replaced.

        Args:
            name: the name of the batch, such as its number.
            hidden_states: ``[..., Ht]``, one for each hidden state of the student.

        Raises:
            TypeError, ValueError: not a floating-point tensor of the head's hidden size.
        """
        check_alike(hidden_states=hidden_states)
        if hidden_states.dim() < 2 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(f"hidden_states must be [..., {self.hidden_size}], got {tuple(hidden_states.shape)}.")
        _write(_path(self.folder, name), {"hidden_states": hidden_states.to(self.dtype)}, self._head)


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
        values, self._head = self._read(self.folder / "head.safetensors", timeout)
        logit_scale, softcap, _ = json.loads(self._head)
        self.head = Head(values["weight"], values.get("bias"), LogitTransform(1.0, logit_scale, softcap))

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
        path = _path(self.folder, name)
        values, head = self._read(path, self.timeout if timeout is None else timeout)
        if head != self._head:
            raise ValueError(f"{path} was written with another head; use a separate folder for each teacher.")
        if remove:
            path.unlink()
        return Teacher(values["hidden_states"], self.head, columns_correspond=self.columns_correspond)

    def names(self) -> list[str]:
        """The names of the batches that are complete, sorted."""
        return sorted(path.stem[len("batch-") :] for path in self.folder.glob("batch-*.safetensors"))

    def _read(self, path: Path, timeout: float) -> tuple[dict[str, Tensor], str]:
        """The tensors of a file, which are memory-mapped, and the head that it was written with."""
        from safetensors import safe_open

        end = time.monotonic() + timeout
        while not path.exists():
            if time.monotonic() >= end:
                raise FileNotFoundError(f"no {path} after {timeout:g} s: start its TeacherWriter, or set timeout=.")
            time.sleep(0.005)
        replaced = True
        while replaced:
            # safe_open opens the path twice, for the header and for the numbers; an open file keeps its inode number.
            with path.open("rb") as opened:
                try:
                    with safe_open(path, "pt") as file:
                        head, names = file.metadata()["head"], file.keys()
                        values = {name: file.get_tensor(name).to(self.device, self.dtype) for name in names}
                    error = None
                except Exception as raised:
                    error = raised
                replaced = not os.path.samestat(os.fstat(opened.fileno()), path.stat())
        if error is not None:
            raise RuntimeError(f"{path} cannot be read ({error}): write it again with a TeacherWriter.") from error
        return values, head


def _path(folder: Path, name: str | int) -> Path:
    if not str(name) or not all(c.isalnum() or c in "-_." for c in str(name)):
        raise ValueError(f"the name of a batch may contain only letters, digits, '-', '_' and '.', got {name!r}.")
    return folder / f"batch-{name}.safetensors"


def _safetensors(values: dict[str, Tensor], head: str) -> bytes:
    from safetensors.torch import save

    return save({name: value.detach().cpu().contiguous() for name, value in values.items()}, {"head": head})


def _write(path: Path, values: dict[str, Tensor], head: str) -> None:
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as folder:
        unfinished = Path(folder, path.name)
        unfinished.write_bytes(_safetensors(values, head))
        os.replace(unfinished, path)
