"""A teacher from files: exactly the teacher beside the student, in the dtype that was written."""

import threading
import time
from pathlib import Path

import pytest
import torch

from liger_losses import Head, LogitTransform, Teacher, TeacherFiles, TeacherWriter
from liger_losses.chunked.core.head import LowRank
from tests.losses import JSD
from tests.reference import Int8Weight, problem

T, H, WIDE, V = 20, 24, 40, 61


def models(dtype=torch.float32):
    hidden, weight, labels, _ = problem(T, H, V, dtype=dtype)
    states, teacher_weight, _, bias = problem(T, WIDE, V, dtype=dtype, bias=True, seed=3)
    head = Head(teacher_weight, bias, LogitTransform(1.0, 1.3, 4.0))
    return hidden, weight, labels, states.detach(), head


*_, STATES, HEAD = models()


def loss_and_gradients(hidden, weight, labels, teacher):
    loss, _ = JSD(0.3, 0.7)(weight, hidden, labels, teacher)
    return loss, *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_what_was_written(dtype, tmp_path):
    hidden, weight, labels, states, head = models(dtype)
    writer = TeacherWriter(tmp_path / "teacher", head, dtype=dtype)
    writer.write(0, states * 2)
    writer.write("b", states.view(4, 5, WIDE)[:, 1:])  # a view
    writer.write(0, states)  # replaces the first
    files = TeacherFiles(tmp_path / "teacher")
    assert files.names() == ["0", "b"]
    assert torch.equal(files.teacher("b").hidden_states, states.view(4, 5, WIDE)[:, 1:])
    writer.write("c", torch.zeros(5000, WIDE, dtype=dtype)[:3])
    assert (tmp_path / "teacher" / "batch-c.safetensors").stat().st_size < 10_000  # not all of what it is a view of
    found = loss_and_gradients(hidden, weight, labels, files.teacher(0))
    expected = loss_and_gradients(hidden, weight, labels, Teacher(states, head))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not [path for path in (tmp_path / "teacher").iterdir() if path.name.startswith(".")]


def test_half_precision_and_casts(tmp_path):
    TeacherWriter(tmp_path, HEAD).write(0, STATES)
    assert TeacherFiles(tmp_path).teacher(0).hidden_states.dtype == torch.bfloat16
    teacher = TeacherFiles(tmp_path, dtype=torch.float64).teacher(0, remove=True)
    assert teacher.head.weight.dtype == teacher.hidden_states.dtype == torch.float64
    assert torch.equal(teacher.hidden_states, STATES.bfloat16().double())
    assert TeacherFiles(tmp_path).names() == []
    with pytest.raises(FileNotFoundError, match=r"no .*batch-0.safetensors after 0 s.*TeacherWriter"):
        TeacherFiles(tmp_path).teacher(0)


def test_a_reader_waits_for_the_writer(tmp_path):

    def write():
        time.sleep(0.05)
        writer = TeacherWriter(tmp_path / "later", HEAD, dtype=torch.float32)
        time.sleep(0.05)
        writer.write(7, STATES)

    thread = threading.Thread(target=write)
    thread.start()
    files = TeacherFiles(tmp_path / "later", timeout=60)
    assert torch.equal(files.teacher(7).hidden_states, STATES)
    thread.join()


def test_two_writers_of_one_folder_do_not_mix(tmp_path, monkeypatch):
    """In one process, or with the same process id in two containers, at the same time."""
    first, second = (TeacherWriter(tmp_path, HEAD, dtype=torch.float32) for _ in range(2))
    write_bytes, interrupted = Path.write_bytes, []

    def write_while_the_other_writes(path, data):
        write_bytes(path, data)
        if not interrupted:
            interrupted.append(path)
            second.write(0, STATES * 2)

    monkeypatch.setattr(Path, "write_bytes", write_while_the_other_writes)
    first.write(0, STATES)
    assert torch.equal(TeacherFiles(tmp_path).teacher(0).hidden_states, STATES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch-0.safetensors", "head.safetensors"]


@pytest.mark.parametrize("shape", [(T, WIDE), (5, 4, WIDE)])
def test_a_batch_that_is_replaced_while_it_is_read_is_read_whole(shape, tmp_path, monkeypatch):
    """Between the header, which safe_open reads first, and the numbers, which it maps then."""
    writer, later, mapped = TeacherWriter(tmp_path, HEAD, dtype=torch.float32), [STATES * 2], []
    writer.write(0, STATES)
    files, from_file = TeacherFiles(tmp_path), torch.UntypedStorage.from_file

    def replace_and_map(*arguments, **keywords):
        mapped.append(arguments)
        if later:
            writer.write(0, later.pop().view(shape))
        return from_file(*arguments, **keywords)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replace_and_map)
    assert torch.equal(files.teacher(0).hidden_states, (STATES * 2).view(shape))
    assert len(mapped) == 2


def test_nothing_is_left_of_what_could_not_be_written(tmp_path, monkeypatch):
    writer = TeacherWriter(tmp_path, HEAD)

    def fill_the_disk(path, data):
        path.write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        writer.write(0, STATES)
    assert [path.name for path in tmp_path.iterdir()] == ["head.safetensors"]


def test_batches_of_another_head_are_refused(tmp_path):
    first = TeacherWriter(tmp_path, HEAD)
    first.write("ours", STATES)
    before = TeacherFiles(tmp_path)
    TeacherWriter(tmp_path, HEAD).write("same", STATES)
    assert TeacherFiles(tmp_path).teacher("ours").hidden_states.shape == STATES.shape
    TeacherWriter(tmp_path, HEAD.weight).write("other", STATES)  # without its bias, scale and soft-cap
    after = TeacherFiles(tmp_path)
    for files, name in ((before, "other"), (after, "ours"), (after, "same")):
        with pytest.raises(ValueError, match=f"batch-{name}.* was written with another head.*a separate folder"):
            files.teacher(name)
    assert before.teacher("same").hidden_states.shape == after.teacher("other").hidden_states.shape == STATES.shape


@pytest.mark.parametrize("length", [0, 10, 600])
def test_a_truncated_file_is_named(length, tmp_path):
    TeacherWriter(tmp_path, HEAD).write("step-3", STATES)
    path = tmp_path / "batch-step-3.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(RuntimeError, match=r"batch-step-3\.safetensors cannot be read.*write it again"):
        TeacherFiles(tmp_path).teacher("step-3")
    path = tmp_path / "head.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(RuntimeError, match=r"head\.safetensors cannot be read"):
        TeacherFiles(tmp_path)


def test_what_is_refused(tmp_path):
    writer = TeacherWriter(tmp_path, HEAD)
    with pytest.raises(ValueError, match=r"\[..., 40\], got \(20, 30\)"):
        writer.write(0, STATES[:, :30])
    with pytest.raises(TypeError, match="floating point"):
        writer.write(0, STATES.long())
    for name in ("../other", ""):
        with pytest.raises(ValueError, match="the name of a batch may contain only letters"):
            writer.write(name, STATES)
    for temperature in (0.7, torch.ones(T)):
        with pytest.raises(ValueError, match="the teacher's head has temperature .*, which must be 1"):
            TeacherWriter(tmp_path / "other", Head(HEAD.weight, transform=LogitTransform(temperature)))
    for dtype in (torch.int8, torch.bool, torch.float8_e4m3fn, "float32"):  # which ruin values
        with pytest.raises(TypeError, match=r"dtype must be torch\.bfloat16, float16, float32 or float64, got"):
            TeacherWriter(tmp_path / "other", torch.ones(V, WIDE), dtype=dtype)
    assert not (tmp_path / "other").exists()
    with pytest.raises(FileNotFoundError, match=r"no .*head\.safetensors"):
        TeacherFiles(tmp_path / "nothing")


@pytest.mark.parametrize("kind", ["adapters", "quantized", "quantized and adapters"])
def test_heads_of_any_kind(kind, tmp_path):
    """A teacher beside the student, and one from files, as with one merged weight."""
    hidden, weight, labels, states, head = models()
    g = torch.Generator().manual_seed(5)
    rows, quantized = head.weight.detach(), None
    if "quantized" in kind:
        quantized = Int8Weight(rows)
        rows = quantized.rows(0, V)
    adapters, merged = (), rows
    if "adapters" in kind:
        a, b = torch.randn(3, WIDE, generator=g), torch.randn(V, 3, generator=g) / 4
        adapters, merged = (LowRank(a, b, 0.7),), rows + 0.7 * b @ a
    given = Head(rows if quantized is None else quantized, head.bias, head.transform, adapters=adapters)
    expected = loss_and_gradients(hidden, weight, labels, Teacher(states, Head(merged, head.bias, head.transform)))
    TeacherWriter(tmp_path, given, dtype=torch.float32).write(0, states)
    for teacher in (Teacher(states, given), TeacherFiles(tmp_path).teacher(0)):
        torch.testing.assert_close(loss_and_gradients(hidden, weight, labels, teacher), expected, rtol=1e-4, atol=1e-6)
