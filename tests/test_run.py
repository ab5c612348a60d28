"""Scripts that run patched, from the command line."""

import importlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

import liger_losses
from liger_losses.integrations import loading
from liger_losses.integrations.imports import Awaited
from liger_losses.run import main
from tests.integrations.models import llama

ROOT = pathlib.Path(liger_losses.__file__).parents[1]


@pytest.fixture(autouse=True)
def arguments_and_path_stay(monkeypatch):
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))


@pytest.mark.parametrize(("rank", "options"), [("0", []), ("1", []), ("0", ["--no-patch"])])
def test_run_patches_what_a_script_loads(rank, options, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    llama().save_pretrained(tmp_path / "model")
    (tmp_path / "helper.py").write_text("from transformers import AutoModelForCausalLM as auto\n")
    (tmp_path / "script.py").write_text(
        "import sys, helper\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--model', 'x'], sys.argv\n"
        f"print(vars(helper.auto.from_pretrained({str(tmp_path / 'model')!r})).get('liger_report'))\n"
    )
    try:
        main([*options, str(tmp_path / "script.py"), "--model", "x"])
    finally:
        loading.leave_loaded_models()
        sys.modules.pop("helper", None)
    out = capsys.readouterr()
    assert ("lm_head" in out.out) == (not options)
    assert ("patches LlamaForCausalLM" in out.err) == (rank == "0" and not options)  # once per job


WHERE = "import sys, json; print(json.dumps([sys.path[0], __file__, sys.argv, sys.path.count({cwd!r})]))"


def test_run_is_like_python(tmp_path, monkeypatch, capfd):
    """With a relative path, a link, a folder or a module, and arguments that look like options."""
    work, real = tmp_path / "work", tmp_path / "real"
    work.mkdir()
    real.mkdir()
    (real / "script.py").write_text(WHERE.format(cwd=str(work)))
    (work / "link.py").symlink_to(real / "script.py")
    (work / "folder").mkdir()
    for name in ("module.py", "folder/__main__.py"):
        (work / name).write_text(WHERE.format(cwd=str(work)))
    monkeypatch.chdir(work)
    path, arguments = list(sys.path), ["--trl", "-m", "--", "-x", "--help"]
    for name in (["../real/script.py"], ["link.py"], ["folder"], ["-m", "module"]):
        subprocess.run([sys.executable, *name, *arguments], check=True, env={})
        python = json.loads(capfd.readouterr().out)
        monkeypatch.setattr(sys, "argv", [])
        monkeypatch.setattr(sys, "path", [str(work), *path])  # as python -m leaves it
        main(["--no-patch", *name, *arguments])
        ours = json.loads(capfd.readouterr().out)
        assert [ours[0], os.path.normpath(ours[1]), *ours[3:]] == [python[0], os.path.normpath(python[1]), *python[3:]]
        assert ours[2][1:] == python[2][1:] == arguments
    for refused, reason in ((["--install", "loading"], "invalid choice: 'loading'"), (["--unknown"], "--unknown")):
        with pytest.raises(SystemExit):
            main([*refused, "link.py"])
        assert reason in capfd.readouterr().err


def test_transformers_and_trl_are_left_to_the_script(tmp_path, monkeypatch):
    """Its trainers get this library's heads when the script imports TRL."""
    import liger_losses.trl

    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    enabled = []
    monkeypatch.setattr(liger_losses.trl, "enable", lambda: enabled.append("trl" in sys.modules))
    (tmp_path / "trl.py").write_text("")
    (tmp_path / "script.py").write_text(
        "import sys\nassert not {'trl', 'transformers.modeling_utils'} & set(sys.modules)\nimport trl\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    try:
        main(["--trl", str(tmp_path / "script.py")])
    finally:
        sys.modules.pop("trl", None)
    assert enabled == [True]
    assert [each.name for each in sys.meta_path if isinstance(each, Awaited)] == ["transformers.modeling_utils"]


def test_trl_that_is_not_installed_is_named_before_the_script_runs(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SystemExit):
        main(["--trl", "script.py"])
    assert '--trl needs TRL: pip install "trl>=1.15"' in capfd.readouterr().err


def test_what_is_installed_before_the_script_runs(tmp_path, monkeypatch):
    installed = []
    for name in ("liger", "verl"):
        module = importlib.import_module(f"liger_losses.integrations.{name}")
        monkeypatch.setattr(module, "install", lambda name=name: installed.append(name))
    (tmp_path / "script.py").write_text("")
    main(["--no-patch", "--liger", "--install", "verl", str(tmp_path / "script.py")])
    assert installed == ["liger", "verl"]
