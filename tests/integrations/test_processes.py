"""Processes that a script spawns are patched as it is."""

import multiprocessing.spawn
import subprocess
import sys

import pytest

from liger_losses.integrations import processes
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


SPAWNING = """
import sys
import torch.multiprocessing

assert "transformers" not in sys.modules

def work(rank, kind):
    assert "transformers" not in sys.modules
    from transformers import AutoModelForCausalLM
    print(kind, hasattr(AutoModelForCausalLM.from_pretrained(sys.argv[1]), "liger_report"), flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, ("spawn",), nprocs=1)
    process = torch.multiprocessing.get_context("forkserver").Process(target=work, args=(0, "forkserver"))
    process.start()
    process.join()
"""


@pytest.mark.slow
def test_run_patches_what_processes_load_that_a_script_spawns(tmp_path):
    llama().save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(SPAWNING)
    command = [sys.executable, "-m", "liger_losses.run", str(tmp_path / "script.py"), str(tmp_path / "model")]
    out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.split("\n")[:2] == ["spawn True", "forkserver True"], out.stderr
