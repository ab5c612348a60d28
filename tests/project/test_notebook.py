"""The notebook runs from top to bottom, and shows what its text says."""

import ast
import json
import pathlib

import pytest

PATH = pathlib.Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def code_cells():
    cells = json.loads(PATH.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_it_has_no_outputs_and_is_python():
    cells = json.loads(PATH.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    assert len({cell["id"] for cell in cells}) == len(cells)
    for source in code_cells():
        ast.parse(source)


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(monkeypatch):
    pytest.importorskip("trl", reason="TRL is not installed")
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = []
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(pyplot.gcf()))
    namespace = {"__name__": "__main__"}
    for number, source in enumerate(code_cells()):
        exec(compile(source, f"{PATH.name}, code cell {number}", "exec"), namespace)
    pyplot.close("all")
    assert len(shown) == 3
    assert namespace["ours"].item() == pytest.approx(namespace["plain"].item(), rel=1e-6)
    assert namespace["difference"] < 1e-5
    plain, ours = namespace["peaks"].values()
    assert ours[-1] < plain[-1] / 4
    plain, ours = namespace["curves"].values()
    assert ours == pytest.approx(plain, abs=0.02)
    assert ours[-1] < ours[0] - 2
    assert namespace["dpo"][-1]["loss"] < 0.5
