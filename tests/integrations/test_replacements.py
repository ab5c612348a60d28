"""Names of frameworks that are replaced when the framework imports them."""

import importlib
import importlib.util
import inspect
import sys
import threading
import time
import warnings

import pytest

from liger_losses.integrations.replacements import Replacement, Replacements


def test_names_are_replaced_when_they_are_imported(framework):
    framework(
        **{
            "fw.early": "def head(): return 'early'",
            "fw.user": "from fw.early import head\nname = head",
            "fw.user_since": "from fw.early import head",
            "fw.late": "class Layer:\n    def forward(self): return 'late'\n",
            "fw.other": "def renamed(): pass",
        }
    )
    early, user = importlib.import_module("fw.early"), importlib.import_module("fw.user")
    replacements = Replacements(
        "fw",
        "1.0",
        Replacement("fw.early", "head", lambda original, module: lambda: f"our {original()} of {module.__name__}"),
        Replacement("fw.late", "Layer.forward", lambda original, module: lambda self: f"our {original(self)}"),
        Replacement("fw.other", "head", lambda original, module: original),
        Replacement("fw.never", "head", lambda original, module: original),
    )
    replacements.install()
    replacements.install()
    assert early.head() == user.head() == "our early of fw.early"
    user_since = importlib.import_module("fw.user_since")
    assert user_since.head is early.head
    late = importlib.import_module("fw.late")
    assert late.Layer().forward() == "our late"
    assert "class Layer" in inspect.getsource(late)
    assert type(late.__spec__.loader) is type(late.__loader__) is type(early.__loader__)
    with pytest.warns(UserWarning, match=r"fw runs with its own code.*fw\.other has no head \(tested with 1\.0\)"):
        importlib.import_module("fw.other")
    replacements.uninstall()
    assert early.head() == user.head() == user_since.head() == "early"
    assert late.Layer().forward() == "late"
    framework(**{"fw.never": "pass"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module("fw.never")


def test_a_module_that_is_looked_for_has_its_own_loader(framework):
    framework(**{"fw.late": "head = 1"})
    replacements = Replacements("fw", "1.0", Replacement("fw.late", "head", lambda original, module: original + 1))
    replacements.install()
    try:
        loader = importlib.util.find_spec("fw.late").loader  # as runpy and importlib.resources do
        assert loader.get_source("fw.late") == "head = 1"
        assert loader.is_package("fw.late") is False
        assert importlib.import_module("fw.late").head == 2
    finally:
        replacements.uninstall()


def test_names_of_a_module_that_is_being_imported(framework):
    """By another thread: they are replaced when it is done. By the code that installs: a warning."""
    framework(
        **{
            "fw.slow": "import time\ntime.sleep(0.1)\nhead = 1",
            "fw.circular": "import sys\nsys.modules['fw_replacements'].install()\nhead = 1",
        }
    )
    replacements = Replacements("fw", "1.0", Replacement("fw.slow", "head", lambda original, module: original + 1))
    thread = threading.Thread(target=importlib.import_module, args=("fw.slow",))
    thread.start()
    while "fw.slow" not in sys.modules:
        time.sleep(0.001)
    replacements.install()
    thread.join()
    assert sys.modules["fw.slow"].head == 2
    replacements.uninstall()
    sys.modules["fw_replacements"] = replacements = Replacements(
        "fw", "1.0", Replacement("fw.circular", "head", lambda original, module: 2)
    )
    with pytest.warns(UserWarning, match=r"replaces nothing in fw\.circular, whose import has led here"):
        assert importlib.import_module("fw.circular").head == 1
    replacements.uninstall()


def test_other_objects_among_the_modules_are_left(framework):
    class Odd:
        __slots__ = ()
        __name__ = "fw.odd"

    framework(**{"fw.early": "def head(): return 1"})
    early = importlib.import_module("fw.early")
    sys.modules["fw.odd"] = Odd()
    sys.modules["fw.nothing"] = None
    replacements = Replacements("fw", "1.0", Replacement("fw.early", "head", lambda original, module: lambda: 2))
    replacements.install()
    assert early.head() == 2
    replacements.uninstall()
    assert early.head() == 1
