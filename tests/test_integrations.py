"""Integrations in frameworks: against the frameworks where they are installed, else at the functions that they call."""

import importlib
import json
import multiprocessing.spawn
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import liger_losses
from liger_losses.integrations import llamafactory, loading, megatron, processes, replacements, torchtitan, verl
from tests.reference import double, plain_statistics, problem, relative_error

ROOT = pathlib.Path(liger_losses.__file__).parents[1]


def verl_modules(monkeypatch):
    """Modules with verl's names, and one that has imported a head by name."""
    for name in ("verl", "verl.utils", "verl.utils.experimental", "verl.utils.kernel"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    torch_head, triton_head, caller = (
        types.ModuleType(name)
        for name in (verl._TORCH_HEAD, verl._TRITON_HEAD, "verl.models.mcore.model_forward_fused")
    )
    for module in (torch_head, triton_head, caller):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    torch_head.FusedLinearForPPO = type("FusedLinearForPPO", (torch.nn.Module,), {"forward": lambda self, *a: "verl's"})
    triton_head.linear_cross_entropy = caller.linear_cross_entropy = lambda *a: "verl's"
    caller.preprocess_thd_engine = caller.postprocess_thd_engine = lambda *a, **k: None
    return torch_head, triton_head, caller


def test_verl_plugin_installs_both_heads(monkeypatch):
    torch_head, triton_head, caller = verl_modules(monkeypatch)
    monkeypatch.delitem(sys.modules, "liger_losses.integrations.verl_plugin", raising=False)
    try:
        importlib.import_module("liger_losses.integrations.verl_plugin")
        hidden, weight, labels, _ = problem(shape=(2, 7), masked=0.0)
        arguments = {"hidden_states": hidden, "vocab_weights": weight, "input_ids": labels, "temperature": 0.7}
        logps, entropy = torch_head.FusedLinearForPPO().forward(**arguments)
        assert logps.shape == entropy.shape == labels.shape
        for head in (triton_head, caller):
            flat = head.linear_cross_entropy(hidden, weight, labels.int(), 0.7, "none")
            torch.testing.assert_close(flat, (logps.flatten(), entropy.flatten()))
            assert head.linear_cross_entropy(hidden, weight, labels, 0.7, "sum")[0] == logps.flatten().sum()
        grads = torch.autograd.grad(logps.sum() - 0.1 * entropy.sum(), (hidden, weight))
        exact = double(hidden, weight)
        statistics = plain_statistics(*exact, labels, temperature=0.7)
        expected = torch.autograd.grad(statistics["logp"].sum() - 0.1 * statistics["entropy"].sum(), exact)
        values = (statistics["logp"], statistics["entropy"], *expected)
        for found, value in zip((logps, entropy, *grads), values, strict=True):
            assert relative_error(found, value) < 1e-5
        verl.install()
        assert len(verl._REPLACEMENTS._replaced) == 3
        with pytest.raises(ValueError, match="reduction must be none, sum or mean"):
            caller.linear_cross_entropy(hidden, weight, labels, 0.7, "median")
        since = types.ModuleType("verl.imported_since")
        since.linear_cross_entropy = triton_head.linear_cross_entropy
        monkeypatch.setitem(sys.modules, since.__name__, since)
    finally:
        verl.uninstall()
    assert since.linear_cross_entropy is triton_head.linear_cross_entropy
    assert torch_head.FusedLinearForPPO().forward() == caller.linear_cross_entropy() == "verl's"


def test_verl_of_another_version_is_left_with_a_warning(monkeypatch):
    torch_head, _, _ = verl_modules(monkeypatch)
    del torch_head.FusedLinearForPPO
    monkeypatch.delitem(sys.modules, "liger_losses.integrations.verl_plugin", raising=False)
    with pytest.warns(UserWarning, match=r"verl runs with its own.*has no .*FusedLinearForPPO"):
        importlib.import_module("liger_losses.integrations.verl_plugin")
    assert not verl._REPLACEMENTS._replaced


def test_a_verl_that_fails_otherwise_is_left_with_a_warning(monkeypatch):
    def fail():
        raise AttributeError("partially initialized module")

    monkeypatch.setattr(verl, "install", fail)
    monkeypatch.delitem(sys.modules, "liger_losses.integrations.verl_plugin", raising=False)
    with pytest.warns(UserWarning, match=r"verl runs with its own.*AttributeError\('partially"):
        importlib.import_module("liger_losses.integrations.verl_plugin")


def test_verl_finds_the_entry_point():
    tomllib = pytest.importorskip("tomllib")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["verl.plugins"]
    for module in points.values():
        assert importlib.util.find_spec(module), module


def test_the_same_as_verls_own_head():
    real = pytest.importorskip(verl._TORCH_HEAD, reason="verl is not installed")
    hidden, weight, labels, _ = problem(n=600, masked=0.0, shape=(2, 300))
    found = []
    verl.uninstall()
    for ours in (False, True):
        if ours:
            verl.install()
        logps, entropy = real.FusedLinearForPPO()(hidden, weight, labels, temperature=0.7)
        found.append((logps, entropy, *torch.autograd.grad(logps.sum() - 0.1 * entropy.sum(), (hidden, weight))))
    verl.uninstall()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_megatron_output_processor():
    hidden, weight, labels, bias = problem(shape=(3, 5), bias=True)
    group = types.SimpleNamespace(size=lambda: 1)
    layer = types.SimpleNamespace(weight=weight, bias=bias, tp_group=group, sequence_parallel=False)
    arguments = {"hidden_states": hidden.transpose(0, 1), "output_layer": layer, "output_weight": None}
    mask = (labels != -100).float()
    losses = megatron.output_processor(
        **arguments, labels=labels.clamp(min=0), loss_mask=mask, scale_logits=lambda logits: logits * 0.5, config=None
    )
    logits = (hidden @ weight.t() + bias) * 0.5
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    torch.testing.assert_close(losses, expected)
    tied = {**arguments, "output_weight": weight.detach()[:40]}
    layer.bias = None
    losses = megatron.output_processor(**tied, labels=labels.clamp(0, 39))
    logits = (hidden @ tied["output_weight"].t()).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.clamp(0, 39).flatten(), reduction="none").view_as(labels)
    torch.testing.assert_close(losses, expected)
    with pytest.raises(ValueError, match="give labels="):
        megatron.output_processor(**arguments, labels=None)


def test_torchtitan_loss_under_fully_shard(tmp_path):
    from torch.distributed.fsdp import fully_shard

    hidden, weight, labels, _ = problem(n=24)
    head = torch.nn.Linear(24, 61, bias=False)
    head.weight.data.copy_(weight)
    expected = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    expected_grads = torch.autograd.grad(expected, (hidden, weight))
    loss = torchtitan.cross_entropy_in_forward(head, hidden, labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, head.weight)), expected_grads)
    assert "forward" not in vars(head)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Identity(), head)
        fully_shard(head)
        fully_shard(model)
        states = hidden.detach().requires_grad_()
        loss = torchtitan.cross_entropy_in_forward(head, model[0](states), labels)
        (loss / 2).backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(states.grad, expected_grads[0] / 2)
        torch.testing.assert_close(head.weight.grad.full_tensor(), expected_grads[1] / 2)
    finally:
        dist.destroy_process_group()


def test_torchtitan_loss_class(monkeypatch):
    from dataclasses import dataclass

    loss_module = types.ModuleType("torchtitan.components.loss")

    class ChunkedLossWrapper:
        @dataclass(kw_only=True, slots=True)
        class Config:
            num_chunks: int = 8

        def set_lm_head(self, lm_head):
            self.lm_head = lm_head

    loss_module.ChunkedLossWrapper = ChunkedLossWrapper
    for name in ("torchtitan", "torchtitan.components"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "torchtitan.components.loss", loss_module)
    torchtitan._loss_class.cache_clear()
    loss_class = torchtitan.LinearCrossEntropyLoss
    torchtitan._loss_class.cache_clear()
    assert issubclass(loss_class, ChunkedLossWrapper)
    loss = loss_class(loss_class.Config())
    hidden, _, labels, _ = problem(n=10)
    with pytest.raises(ValueError, match="call set_lm_head"):
        loss(hidden, labels)
    head = torch.nn.Linear(24, 61)
    loss.set_lm_head(head)
    value, metrics = loss(hidden, labels, torch.tensor(4.0))
    torch.testing.assert_close(value, F.cross_entropy(head(hidden), labels, reduction="sum") / 4)
    assert metrics == {}


# --- Those that patch models ------------------------------------------------------------------------------------------


def is_patched(model):
    from liger_losses.patching.lazy_head import patched_heads

    return bool(patched_heads(model)) and "LazyLinear" in str(model.liger_report)


def llama():
    pytest.importorskip("transformers")
    from tests.model_zoo import build

    return build("llama")


def test_axolotl_plugin(monkeypatch):
    base = types.ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {"__init__": lambda self: None})
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", base)
    from liger_losses.integrations import axolotl

    axolotl._plugin_class.cache_clear()
    plugin = axolotl.Plugin()
    axolotl._plugin_class.cache_clear()
    model = llama()
    cfg = types.SimpleNamespace(rl=None, liger_losses={"rope": False})
    plugin.pre_model_load(cfg)
    plugin.post_model_load(cfg, model)
    assert is_patched(model)
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        axolotl.Other  # noqa: B018


def test_llamafactory_kernel(monkeypatch):
    registered = {}
    base = types.ModuleType("base")
    base.KernelPlugin = lambda name: types.SimpleNamespace(register=lambda: lambda cls: registered.update({name: cls}))
    path = "llamafactory.v1.plugins.model_plugins.kernels.base"
    parts = path.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(parts[end - 1]))
    monkeypatch.setitem(sys.modules, path, base)
    llamafactory.register()
    config = {"name": "liger_losses", "patch_options": {"rope": False}}
    model = registered["liger_losses"].apply(model=llama(), config=config, require_logits=True)
    assert is_patched(model)


def test_trainer_callback(tmp_path):
    model = llama()
    from transformers import Trainer, TrainingArguments

    from liger_losses.integrations.trainer import PatchCallback

    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    trainer = Trainer(model, arguments, callbacks=[PatchCallback(rope=False)])
    assert is_patched(model)
    trainer.model = trainer.callback_handler.model = llama()  # as train() does with model_init=
    trainer.callback_handler.on_train_begin(arguments, trainer.state, trainer.control)
    assert is_patched(trainer.model)
    assert pickle.loads(pickle.dumps(PatchCallback(rope=False))).options == {"rope": False}


def test_models_that_are_loaded_later(tmp_path):
    model = llama()
    from transformers import AutoModel, AutoModelForCausalLM

    model.save_pretrained(tmp_path)
    with loading.patched_loading(rope=False):
        assert is_patched(AutoModelForCausalLM.from_pretrained(tmp_path))
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert is_patched(loaded)
        assert not info["missing_keys"]
        assert is_patched(AutoModelForCausalLM.from_config(model.config))
        assert not hasattr(AutoModel.from_pretrained(tmp_path), "liger_report")  # without a head
    assert not hasattr(AutoModelForCausalLM.from_pretrained(tmp_path), "liger_report")


def test_models_that_are_loaded_by_several_threads(monkeypatch):
    config = llama().config
    from transformers import LlamaForCausalLM

    made, both = LlamaForCausalLM.__init__, threading.Barrier(2, timeout=60)

    def make(self, config):
        both.wait()  # both threads are in the constructor at the same time
        made(self, config)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", make)
    with loading.patched_loading(rope=False), ThreadPoolExecutor(2) as threads:
        models = list(threads.map(LlamaForCausalLM._from_config, [config, config]))
    assert all(is_patched(model) for model in models)


def test_leaving_one_leaves_the_others(monkeypatch):
    pytest.importorskip("transformers")
    outer = loading.patch_loaded_models(lambda model: None)
    try:
        with loading.patched_loading(rope=False):
            assert len(loading._wanted) == 2
        assert loading._wanted == [outer]
        assert loading._originals
    finally:
        loading.leave_loaded_models()
    assert not loading._wanted
    assert not loading._originals


def test_leaving_one_of_two_that_are_the_same_leaves_the_other():
    pytest.importorskip("transformers")

    def options(model):
        return None

    with loading.patched_loading(options):
        with loading.patched_loading(options):
            pass
        assert loading._wanted == [options]
    assert not loading._wanted
    assert not loading._originals


def test_a_model_within_a_model_is_patched_with_it():
    config = llama().config
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    class WithDraft(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.draft = AutoModelForCausalLM.from_config(type(config)(**config.to_dict()))

    seen = []
    with loading.patched_loading(lambda model: seen.append(type(model).__name__)):
        WithDraft._from_config(config)
    assert seen == ["WithDraft"]


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
        (["--no-patch", "--residuals"], "not allowed with argument --no-patch"),
    ):
        with pytest.raises(SystemExit):
            main([*refused, "link.py"])
        assert reason in capfd.readouterr().err


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


def test_trl_that_is_not_installed_is_named_before_the_script_runs(monkeypatch, capfd):
    from liger_losses.run import main

    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SystemExit):
        main(["--trl", "script.py"])
    assert '--trl needs TRL: pip install "trl>=1.16"' in capfd.readouterr().err


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
