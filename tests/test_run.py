"""Scripts that run patched, from the command line."""

import json
import multiprocessing.spawn
import os
import pathlib
import pickle
import subprocess
import sys

import pytest

import liger_losses
from liger_losses.integrations import loading, processes, replacements
from tests.integrations.models import is_patched, llama

ROOT = pathlib.Path(liger_losses.__file__).parents[1]


def test_run_patches_what_a_script_loads(tmp_path, monkeypatch, capsys):
    llama().save_pretrained(tmp_path / "model")
    (tmp_path / "helper.py").write_text("from transformers import AutoModelForCausalLM as auto\n")
    (tmp_path / "script.py").write_text(
        "import sys, helper\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--model', 'x'], sys.argv\n"
        f"print(helper.auto.from_pretrained({str(tmp_path / 'model')!r}).liger_report)\n"
    )
    from liger_losses.run import main

    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        main([str(tmp_path / "script.py"), "--model", "x"])
        sent = pickle.dumps(multiprocessing.spawn.get_preparation_data("child")["liger_losses"])
    finally:
        loading.leave_loaded_models()
        processes.leave_children()
        sys.modules.pop("helper", None)
    out = capsys.readouterr()
    assert "LazyLinear" in out.out
    assert "patches LlamaForCausalLM" in out.err
    from transformers import AutoModelForCausalLM

    assert "liger_losses" not in multiprocessing.spawn.get_preparation_data("child")
    pickle.loads(sent)  # as the spawned process does first of all
    try:
        assert is_patched(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
        assert "liger_losses" in multiprocessing.spawn.get_preparation_data("grandchild")
    finally:
        loading.leave_loaded_models()
        processes.leave_children()


WHERE = "import sys, json; print(json.dumps([sys.path[0], __file__, sys.argv, sys.path.count({cwd!r})]))"


def test_run_is_like_python(tmp_path, monkeypatch, capfd):
    """With a relative path, a link, and arguments that look like options."""
    from liger_losses.run import main

    work, real = tmp_path / "work", tmp_path / "real"
    work.mkdir()
    real.mkdir()
    (real / "script.py").write_text(WHERE.format(cwd=str(work)))
    (work / "link.py").symlink_to(real / "script.py")
    monkeypatch.chdir(work)
    path, arguments = list(sys.path), ["--trl", "-m", "--", "-x", "--help"]
    for name in ("../real/script.py", "link.py"):
        subprocess.run([sys.executable, name, *arguments], check=True, env={})
        python = json.loads(capfd.readouterr().out)
        monkeypatch.setattr(sys, "argv", [])
        monkeypatch.setattr(sys, "path", [str(work), *path])  # as python -m leaves it
        try:
            main(["--no-patch", name, *arguments])
        finally:
            processes.leave_children()
        ours = json.loads(capfd.readouterr().out)
        assert [ours[0], os.path.normpath(ours[1]), *ours[3:]] == [python[0], os.path.normpath(python[1]), *python[3:]]
        assert ours[2][1:] == python[2][1:] == arguments
    for refused, reason in (
        (["--install", "loading"], "invalid choice: 'loading'"),
        (["--unknown"], "--unknown"),
    ):
        with pytest.raises(SystemExit):
            main([*refused, "link.py"])
        assert reason in capfd.readouterr().err


def test_transformers_is_left_to_the_script(monkeypatch):
    name = "transformers.modeling_utils"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(replacements, "_waiting", {})
    try:
        processes.Preparation(patch={}).apply()
    finally:
        loading.leave_loaded_models()
        processes.leave_children()
    assert name not in sys.modules
    assert len(replacements._waiting[name]) == 1


def test_trl_that_is_not_installed_is_named_before_the_script_runs(monkeypatch, capfd):
    from liger_losses.run import main

    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SystemExit):
        main(["--trl", "script.py"])
    assert '--trl needs TRL: pip install "trl>=1.15"' in capfd.readouterr().err
