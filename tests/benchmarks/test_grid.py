"""The grid of tokens and heads, with one tiny cell on the CPU."""

import json

import pytest

from benchmarks import grid


def test_one_cell(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "grid.json"
    monkeypatch.setattr(
        "sys.argv", ["grid", "--tiny", "--rounds", "1", "--without", "torch.compile", "--out", str(out)]
    )
    grid.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["task"] for row in rows] == list(grid.TASKS)
    assert all({"products", "plain", "ours"} == set(row["milliseconds"]) for row in rows)
    assert out.with_suffix(".png").exists()
    assert "over the faster of plain and torch.compile" in capsys.readouterr().out
