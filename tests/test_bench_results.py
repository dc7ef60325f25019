"""A benchmark script that is ended early, by a time limit say, writes what it has."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from loading import ROOT

import msa_icp
from msa_icp.bench import results

SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if path.name != "plots.py")
SMALL = {
    "decode_score.py": ["--backend", "torch", "--max-bytes", "2e6", "--layout", "P256W4"],
    "prefill.py": ["--backend", "torch", "--max-pairs", "1e7"],
    "host_time.py": [],
}


@dataclass(frozen=True)
class Row:
    us: float


@pytest.fixture(autouse=True)
def _handlers_stay():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_measures_until_it_is_interrupted(name):
    source = (ROOT / "benchmarks" / name).read_text()
    assert source.count("with results.until_interrupted():") == 1
    assert "except KeyboardInterrupt" not in source


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_what_was_measured_before_a_signal_is_written(number, tmp_path, capsys):
    measured = []
    with results.until_interrupted():
        measured.append(Row(1.5))
        signal.raise_signal(number)
        measured.append(Row(2.5))
    if number == signal.SIGTERM:
        signal.raise_signal(number)  # the second one of `timeout`
    args = argparse.Namespace(name="card", device="cpu", commit="abc", out=tmp_path)
    results.write(args, "some", measured)
    assert json.loads((tmp_path / "some_card.json").read_text())["rows"] == [{"us": 1.5}]
    assert "interrupted" in capsys.readouterr().out


def test_without_a_signal_everything_is_as_before(capsys):
    before = signal.getsignal(signal.SIGTERM)
    with results.until_interrupted():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(ZeroDivisionError), results.until_interrupted():
        _ = 1 / 0
    assert signal.getsignal(signal.SIGTERM) == before
    assert capsys.readouterr().out == ""


def test_nothing_measured_replaces_no_file(tmp_path, capsys):
    results.write(argparse.Namespace(name="card", device="cpu", commit="abc", out=tmp_path), "some", [])
    assert list(tmp_path.iterdir()) == []
    assert "nothing is written" in capsys.readouterr().out


@pytest.mark.parametrize("name", SMALL)
def test_a_script_that_gets_a_time_limits_signals_writes_its_rows(name, tmp_path):
    command = [
        sys.executable,
        ROOT / "benchmarks" / name,
        "--name",
        "test",
        "--device",
        "cpu",
        "--commit",
        "abc",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(msa_icp.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    script = subprocess.Popen(
        [*command, "--out", tmp_path, *SMALL[name]], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert script.stdout is not None
    first = ""
    while not first or first.startswith(("plain read", "backend")):
        first = script.stdout.readline()  # of a row
    for _ in range(2):
        script.send_signal(signal.SIGTERM)
    rest, _ = script.communicate(timeout=60)
    assert script.returncode == 0, first + rest
    assert rest.count("interrupted\n") == 1
    document = json.loads((tmp_path / f"{name.removesuffix('.py')}_test.json").read_text())
    assert document["commit"] == "abc"
    assert len(document["rows"]) >= 1
