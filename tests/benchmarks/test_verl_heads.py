"""verl's heads, without verl, at a tiny size on the CPU."""

from benchmarks import verl_heads


def test_ours_runs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["verl_heads", "--tiny", "--rounds", "1"])
    verl_heads.main()
    lines = [line.split()[1:3] for line in capsys.readouterr().out.splitlines()]
    assert lines == [[mode, name] for mode in ("both", "forward") for name in ("products", "ours")]
