"""Names of frameworks that are replaced when the framework imports them."""

import importlib
import importlib.util
import logging
import sys
import threading
import time
import warnings
import zipfile
from types import SimpleNamespace

import pytest

from liger_losses.integrations import imports
from liger_losses.integrations.replacements import Replacements, announce
from liger_losses.places import Place


@pytest.fixture
def framework(tmp_path, monkeypatch):
    """Writes modules of a framework ``fw``, by their names, where Python finds them."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])

    def write(**sources):
        for name, source in sources.items():
            (tmp_path / "fw").mkdir(exist_ok=True)
            (tmp_path / "fw" / f"{name}.py").write_text(source)
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def replacements(*places):
    return Replacements("Pytest", pytest.__version__, *places)


def importing(name):
    """A thread that has begun to import a module."""
    thread = threading.Thread(target=importlib.import_module, args=(name,))
    thread.start()
    while name not in sys.modules:
        time.sleep(0.001)
    return thread


def test_names_are_replaced_when_they_are_imported(framework):
    framework(
        early="def head(): return 'early'",
        user_since="from fw.early import head",
        late="class Layer:\n    def forward(self): return 'late'\n    size = staticmethod(lambda n: n)",
        other="def renamed(): pass",
    )
    early = importlib.import_module("fw.early")
    ours = replacements(
        Place("fw.early", "head", lambda original: lambda: f"our {original()}"),
        Place("fw.late", "Layer.forward", lambda original: lambda self: f"our {original(self)}", takes=("self",)),
        Place("fw.late", "Layer.size", lambda original: lambda n: original(n) + 1),
        Place("fw.other", "head", lambda original: original),
        Place("fw.never", "head", lambda original: original),
    )
    ours.install()
    ours.install()
    assert early.head() == importlib.import_module("fw.user_since").head() == "our early"
    loader = importlib.util.find_spec("fw.late").loader  # as runpy and importlib.resources do
    assert loader.get_source("fw.late").startswith("class Layer")
    assert loader.is_package("fw.late") is False
    late = importlib.import_module("fw.late")
    assert late.Layer().forward() == "our late"
    assert late.Layer().size(1) == late.Layer.size(1) == 2
    assert type(late.__spec__.loader) is type(late.__loader__) is type(early.__loader__)
    with pytest.warns(UserWarning, match=r"Pytest runs with its own code.*fw\.other\.head is not there \(tested"):
        importlib.import_module("fw.other")
    ours.uninstall()
    assert early.head() == "early"
    assert late.Layer().forward() == "late"
    assert late.Layer().size(1) == 1
    framework(never="pass")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module("fw.never")


def test_names_of_a_module_that_is_being_imported(framework):
    """By another thread: they are replaced when it is done. By the code that installs: a warning."""
    circular = "import sys\nsys.modules['fw_replacements'].install()\nhead = 1"
    framework(slow="import time\ntime.sleep(0.1)\nhead = 1", circular=circular)
    ours = replacements(Place("fw.slow", "head", lambda original: original + 1))
    thread = importing("fw.slow")
    ours.install()
    thread.join()
    assert sys.modules["fw.slow"].head == 2
    ours.uninstall()
    sys.modules["fw_replacements"] = ours = replacements(Place("fw.circular", "head", lambda original: 2))
    with pytest.warns(UserWarning, match=r"its own code, not with liger_losses: fw\.circular\.head is not there"):
        assert importlib.import_module("fw.circular").head == 1
    ours.uninstall()


def test_parameters_that_differ_are_named(framework):
    framework(calls="def head(hidden, scale, *, cap): pass")
    importlib.import_module("fw.calls")
    for function, said in (
        (lambda hidden, scale: None, "has an unknown parameter cap"),
        (lambda hidden, scale, cap, bias: None, "has no parameter bias"),
    ):
        ours = replacements(Place("fw.calls", "head", lambda original, f=function: f, function))
        with pytest.warns(UserWarning, match=f"fw.calls.head {said}"):
            ours.install()


def test_an_integration_says_that_it_is_active_and_which_versions_were_tested(caplog):
    announce.cache_clear()
    with caplog.at_level(logging.INFO, "liger_losses"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            announce("Pytest", pytest.__version__.partition(".")[0], "the tests")
    assert caplog.messages == [f"liger_losses computes the tests of Pytest {pytest.__version__}."]
    for name, version in (("Pytest", pytest.__version__), ("no-such-package", "of unknown version")):
        with pytest.warns(UserWarning, match=rf"{name} {version} was not tested with .* tested with {name} 0\.1"):
            announce(name, "0.1", "the tests")


def test_another_finder_that_asks_all_the_others(framework):
    """Import hooks of two packages may each ask the finders around them, and wrap the same loader."""
    framework(calls="")
    spec, found = importlib.util.find_spec(imports.__name__), []
    another = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(another)
    for module in (imports, another):
        module.when_imported("fw.calls", found.append)
    assert [importlib.import_module("fw.calls")] * 2 == found


class AsksAllOthers:
    """A finder that finds no module itself."""

    def find_spec(self, name, path=None, target=None):
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        return next(filter(None, others), None) if name.startswith("fw") else None


#: A finder as of Python 2, which nobody can ask.
OLD = SimpleNamespace(find_module=lambda *_: None)


@pytest.mark.filterwarnings("ignore::ImportWarning")
@pytest.mark.parametrize(("place", "finder"), [*((i, AsksAllOthers()) for i in (0, 1, -1)), (1, OLD)])
def test_finders_that_do_not_know_that_they_are_asked(framework, place, finder):
    framework(calls="")
    imported = []
    imports.when_imported("fw.calls", imported.append)
    sys.meta_path.insert(place, finder)
    assert [importlib.import_module("fw.calls")] == imported


@pytest.mark.usefixtures("framework")
def test_modules_of_one_loader_are_told_apart(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        for name in ("fw_awaited", "fw_other"):
            archive.writestr(f"{name}.py", "")
    monkeypatch.syspath_prepend(tmp_path / "archive.zip")
    imported = []
    imports.when_imported("fw_awaited", imported.append)
    assert importlib.util.find_spec("fw_awaited")  # as packages ask whether another is installed
    importlib.import_module("fw_other")
    assert imported == []
    assert [importlib.import_module("fw_awaited")] == imported


def test_a_module_that_another_thread_imports_now_is_whole(framework):
    framework(calls="import time\ntime.sleep(0.3)\ndef head(): pass")
    thread, whole = importing("fw.calls"), []
    imports.when_imported("fw.calls", lambda module: whole.append(hasattr(module, "head")))
    thread.join()
    assert whole == [True]
