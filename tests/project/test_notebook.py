"""The notebook runs from top to bottom, shows what its text says, and is saved with what it shows.

python -m tests.project.test_notebook  # runs it, and saves it with its outputs: `make notebook`
"""

import json
import pathlib

import pytest

PATH = pathlib.Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(monkeypatch):
    pytest.importorskip("trl", reason="TRL is not installed")
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    cells = [cell for cell in json.loads(PATH.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    shown, variables = [], {"__name__": "__main__"}
    monkeypatch.setattr(pyplot, "show", lambda: shown.append("display_data"))
    for cell in cells:
        exec(compile("".join(cell["source"]), PATH.name, "exec"), variables)
    assert shown == [o["output_type"] for cell in cells for o in cell["outputs"] if "data" in o]
    assert variables["ours"].item() == pytest.approx(variables["plain"].item(), rel=1e-6)
    assert variables["difference"] < 1e-5
    plain, ours = variables["peaks"].values()
    assert ours[-1] < plain[-1] / 4
    plain, ours = variables["curves"].values()
    assert ours == pytest.approx(plain, abs=0.02)
    assert ours[-1] < ours[0] - 2
    assert variables["dpo"][-1]["loss"] < 0.5


if __name__ == "__main__":
    import nbclient
    import nbformat

    notebook = nbclient.NotebookClient(nbformat.read(PATH, 4), record_timing=False).execute()
    for cell in notebook.cells:  # what packages say on stderr, as of devices that are absent, is of one machine
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, PATH)
