"""The default workspace: what takes more memory for more speed, and how users bound it."""

import importlib.util
import threading
from dataclasses import replace

import pytest
import torch

import liger_losses
from liger_losses import EngineOptions, Head, linear_logps, set_default_workspace
from liger_losses.chunked.engine import plan
from liger_losses.chunked.engine import workspace as settings
from liger_losses.chunked.engine.call import make_call
from liger_losses.chunked.engine.plan import MiB, Workload, default_bound, make_plan
from liger_losses.chunked.engine.query import Query
from tests.kernels.cases import interpreted
from tests.losses import CE
from tests.reference import problem

GiB = 1024 * MiB
H200 = int(139.8 * GiB)


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.setattr(settings.process, "bytes", None)


def work(tokens, hidden_size=4096, vocab_size=128256, memory=H200, **options):
    """Of log-probabilities in bf16 on a GPU."""
    kind = {"fused": True, "exponentials": True, "fused_products": True, "temporaries": 0, **options}
    return Workload(
        tokens, hidden_size, vocab_size, torch.bfloat16, torch.device("cuda", 0),
        device_memory=memory, **kind,
    )  # fmt: skip


def test_text_and_numbers():
    for given, size in ((5, 5), ("5", 5), ("300MiB", 300 * MiB), (" 1.5 gib ", 3 * GiB // 2), ("2GB", 2 * 10**9)):
        assert settings.bytes_of(given) == size
    for wrong, words in (
        (0, "positive"),
        (-1, "positive"),
        ("0", "positive"),
        ("many", "300MiB"),
        ("3 parsecs", "2GiB"),
    ):
        with pytest.raises(ValueError, match=words):
            set_default_workspace(wrong)
    for wrong in (True, 1.5, [1]):
        with pytest.raises(TypeError, match="number of bytes"), liger_losses.workspace(wrong):
            pass
    assert default_bound() is None


def test_settings_nest_and_belong_to_a_thread():
    set_default_workspace("3MiB")
    found = []
    with liger_losses.workspace("2MiB"):
        with liger_losses.workspace(None):
            assert default_bound() is None
        assert default_bound() == 2 * MiB
        thread = threading.Thread(target=lambda: found.append(default_bound()))
        thread.start()
        thread.join()
    assert found == [default_bound()] == [3 * MiB]
    set_default_workspace(None)
    assert default_bound() is None


def test_the_environment_variable(monkeypatch):
    monkeypatch.setenv("LIGER_LOSSES_WORKSPACE", "7 MiB")
    spec = importlib.util.spec_from_file_location("another", settings.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "another", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(settings.process, "bytes", module.process.bytes)
    assert default_bound() == 7 * MiB
    monkeypatch.setenv("LIGER_LOSSES_WORKSPACE", "")
    spec.loader.exec_module(module)
    assert module.process.bytes is None
    monkeypatch.setattr(settings.process, "bytes", "much")
    hidden, weight, labels, _ = problem(20, 8, 31)
    with pytest.raises(ValueError, match="LIGER_LOSSES_WORKSPACE must be"):
        linear_logps(hidden, weight, labels)


@pytest.mark.parametrize(
    ("kind", "tokens", "kept"),
    [
        ({}, 8192, True),  # 2.3 GiB of exponentials
        ({}, 32768, False),  # 9 GiB
        ({"memory": 24 * GiB}, 8192, False),
        ({"memory": 24 * GiB}, 2400, True),
        ({"memory": 0}, 2000, True),  # what keeps the device busy is enough
        ({"memory": 0}, 2400, False),
        ({"exponentials": False}, 7000, True),  # 3.9 GiB of fp32 logits and gradients
        # Their traffic takes as long as the product.
        ({"exponentials": False, "hidden_size": 2048}, 6000, False),
        ({"exponentials": False, "fused": False, "hidden_size": 2048}, 6000, True),
    ],
)
def test_logits_are_kept_if_they_fit_and_it_pays(kind, tokens, kept):
    assert make_plan(work(tokens, **kind)).resident == kept
    # In no other way does the device's memory change a plan.
    assert {**vars(make_plan(work(tokens, **kind))), "resident": 0, "kept": 0} == {
        **vars(make_plan(work(tokens, **{**kind, "memory": 0}))),
        "resident": 0,
        "kept": 0,
    }


def test_a_bound_that_the_user_has_set():
    usual, teacher = make_plan(work(8192)), {"teacher_row_bytes": 8192, "exponentials": False}
    with liger_losses.workspace("300MiB"):
        small = make_plan(work(8192))
        assert not small.resident
        assert small.rows < usual.rows
        assert make_plan(work(8192, **teacher)).part_rows < make_plan(work(8192, **teacher), 1200 * MiB).part_rows
        assert make_plan(work(8192), 3 * GiB).resident  # a call's own workspace comes first
        assert make_plan(work(900)).resident
    with liger_losses.workspace("9GiB"):
        # More memory than a call gains from.
        assert replace(make_plan(work(8192)), kept=usual.kept) == usual
        assert make_plan(work(24000)).resident
        assert make_plan(work(8192), 300 * MiB).rows == small.rows
    with liger_losses.workspace("8MiB"):
        assert make_plan(work(2000)) == make_plan(work(2000), 8 * MiB)  # tiles of a second pass, too
    with liger_losses.workspace(1000), pytest.raises(ValueError, match="default workspace that was set is 1000 bytes"):
        make_plan(work(8192))


@interpreted
def test_calls_read_it(monkeypatch, small_tiles):
    monkeypatch.setattr(plan, "device_memory", lambda device: 32 * 2**20)
    monkeypatch.setattr(Workload, "default_workspace", lambda work: 20_000)
    hidden, weight, labels, _ = problem(100, 24, 97, dtype=torch.bfloat16)

    def strategy(query, **changes):
        call = make_call(hidden, Head(weight), labels, query, EngineOptions(backend="triton", **changes))[1]
        return call.strategy

    coupled, separable = Query(("logp",)), Query(("logp",), token_loss=lambda s, y: s.logp)
    assert strategy(coupled) == "resident"
    assert strategy(separable) == "two_pass"  # its blocks are short here, and none is kept
    assert strategy(coupled, workspace=20_000) == "two_pass"
    with liger_losses.workspace(20_000):
        assert strategy(coupled) == "two_pass"


def test_compiled_functions_read_it_when_they_run(monkeypatch):
    bounds, read = [], plan.default_bound
    monkeypatch.setattr(plan, "default_bound", lambda: bounds.append(read()) or bounds[-1])
    hidden, weight, labels, _ = problem(20, 8, 31)
    loss = CE()
    compiled = torch.compile(lambda h: loss(weight, h, labels), backend="eager")
    for bound in (None, MiB, 2 * MiB):
        bounds.clear()
        with liger_losses.workspace(bound):
            compiled(hidden)
        assert set(bounds) == {bound}
