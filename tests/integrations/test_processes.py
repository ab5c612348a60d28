"""Processes that a script spawns are patched as it is."""

import importlib
import importlib.util
import multiprocessing.spawn
import subprocess
import sys

import pytest

from liger_losses.integrations import processes, replacements
from tests.integrations.models import llama
from tests.test_run import ROOT


def test_all_preparations_are_sent():
    preparations = [processes.Preparation(trl=trl) for trl in (False, True)]
    try:
        for preparation in preparations:
            processes._prepare_children(preparation)
        sent = multiprocessing.spawn.get_preparation_data("child")["liger_losses"]
    finally:
        processes.leave_children()
    assert [applied.preparation for applied in sent] == preparations
    assert "liger_losses" not in multiprocessing.spawn.get_preparation_data("child")


def test_trl_is_left_to_the_script(tmp_path, monkeypatch):
    """Its trainers get this library's heads when the script imports it, here and in processes that it spawns."""
    import liger_losses.trl

    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(replacements, "_waiting", {})
    enabled = []
    monkeypatch.setattr(liger_losses.trl, "enable", lambda: enabled.append("trl" in sys.modules))
    (tmp_path / "trl.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        processes.Preparation(trl=True).apply()
        assert "trl" not in sys.modules
        assert not enabled
        importlib.import_module("trl")
        assert enabled == [True]
    finally:
        processes.leave_children()
        sys.modules.pop("trl", None)


SPAWNING = """
import sys
import torch.multiprocessing

assert not {"transformers", "trl"} & set(sys.modules)

def work(rank, kind):
    assert not {"transformers", "trl"} & set(sys.modules)
    from transformers import AutoModelForCausalLM
    patched = hasattr(AutoModelForCausalLM.from_pretrained(sys.argv[1]), "liger_report")
    import trl
    from liger_losses.trl import is_enabled
    print(kind, patched, is_enabled(), flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, ("spawn",), nprocs=1)
    process = torch.multiprocessing.get_context("forkserver").Process(target=work, args=(0, "forkserver"))
    process.start()
    process.join()
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="TRL is not installed")
def test_run_patches_what_processes_load_that_a_script_spawns(tmp_path):
    llama().save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(SPAWNING)
    script, model = str(tmp_path / "script.py"), str(tmp_path / "model")
    command = [sys.executable, "-m", "liger_losses.run", "--trl", script, model]
    out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.split("\n")[:2] == ["spawn True True", "forkserver True True"], out.stderr
