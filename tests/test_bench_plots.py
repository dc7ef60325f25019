"""The pictures of the benchmarks: which are drawn, and that their axes can be read."""

from __future__ import annotations

import shutil

import pytest
from loading import ROOT, benchmark

pytest.importorskip("matplotlib")
MEASURED = ROOT / "benchmarks" / "results"


@pytest.fixture
def plots(monkeypatch, tmp_path):
    """The script, to which the folder of the results is one that holds two files."""
    script = benchmark("plots")
    folder = tmp_path / "results"
    folder.mkdir()
    for name in ("decode_chain_h200.json", "host_time_h200.json"):
        shutil.copy(MEASURED / name, folder)
    monkeypatch.setattr(script, "RESULTS", folder)
    return script


def drawn(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))


def test_help_draws_nothing(plots, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        plots.main(["--help"])
    assert ended.value.code == 0
    assert "[FILE ...]" in capsys.readouterr().out
    assert drawn(tmp_path) == []


def test_only_the_files_that_are_named_are_drawn(plots, tmp_path, capsys):
    mine = shutil.copy(MEASURED / "prefill_h200.json", tmp_path / "prefill_mine.json")
    plots.main([str(mine)])
    assert drawn(tmp_path) == ["prefill_mine.png"]
    with pytest.raises(SystemExit):
        plots.main([str(tmp_path / "results" / "host_time_h200.json")])
    assert "host_time_h200.json: a file that is drawn begins with decode_score" in capsys.readouterr().err


def test_every_ratio_of_the_chain_can_be_read(plots, tmp_path, monkeypatch):
    """Labelled in decimals in every panel, at 1 and at two more at least; a column has one range."""
    figures = []
    monkeypatch.setattr(plots.plt, "close", figures.append)
    plots.main([])
    assert drawn(tmp_path) == ["results/decode_chain_h200.png"]
    (figure,) = figures
    panels = figure.axes
    for panel in panels:
        low, high = panel.get_ylim()
        ticks = [tick for tick in panel.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
        assert len(ticks) >= 3
        assert 1 in [tick.get_loc() for tick in ticks]
        assert [float(tick.label1.get_text()) for tick in ticks] == [tick.get_loc() for tick in ticks]
    for column in (panels[::2], panels[1::2]):
        assert len({panel.get_ylim() for panel in column}) == 1
