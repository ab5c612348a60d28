"""The notebook runs from top to bottom, shows what its text says, and is saved with what it shows.

python -m tests.project.test_notebook  # runs it, and saves it with its outputs: `make notebook`
"""

import base64
import contextlib
import io
import json
import pathlib

import pytest

PATH = pathlib.Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def read():
    return json.loads(PATH.read_text(encoding="utf-8"))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook):
    """The variables that its cells leave; each cell gets its outputs: what it prints, and its plots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    namespace, show = {"__name__": "__main__"}, pyplot.show
    try:
        for number, cell in enumerate(code_cells(notebook), 1):
            plots, printed = [], io.StringIO()
            pyplot.show = lambda plots=plots: plots.append(saved(pyplot.gcf()))
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"{PATH.name}, code cell {number}", "exec"), namespace)
            text = printed.getvalue().splitlines(True)
            texts = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
            cell["execution_count"], cell["outputs"] = number, [*plots, *texts]
    finally:
        pyplot.show = show
        pyplot.close("all")
    return namespace


def saved(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    picture = base64.b64encode(buffer.getvalue()).decode()
    return {"output_type": "display_data", "metadata": {}, "data": {"image/png": picture}}


def kinds(notebook):
    """Which outputs each code cell has."""
    return [[output["output_type"] for output in cell["outputs"]] for cell in code_cells(notebook)]


@pytest.mark.slow
def test_it_runs_from_top_to_bottom():
    pytest.importorskip("trl", reason="TRL is not installed")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    notebook = read()
    expected = kinds(notebook)
    namespace = run(notebook)
    assert kinds(notebook) == expected
    assert namespace["ours"].item() == pytest.approx(namespace["plain"].item(), rel=1e-6)
    assert namespace["difference"] < 1e-5
    plain, ours = namespace["peaks"].values()
    assert ours[-1] < plain[-1] / 4
    plain, ours = namespace["curves"].values()
    assert ours == pytest.approx(plain, abs=0.02)
    assert ours[-1] < ours[0] - 2
    assert namespace["dpo"][-1]["loss"] < 0.5


if __name__ == "__main__":
    executed = read()
    run(executed)
    PATH.write_text(json.dumps(executed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
