"""The plain read beside the figures: its ratios are printed, and a slow card is not measured."""

from __future__ import annotations

import pytest
import torch
from loading import benchmark

from msa_icp.bench import command, decode_chain, decode_score, exchange, prefill, results, ruler, serving

CPU = torch.device("cpu")
SLOW = ruler.Judgement(4.02, 4.1)
SCRIPTS = ("decode_chain", "decode_score", "prefill", "serving")
FIGURES = (
    (decode_score, "rows"),
    (decode_chain, "rows"),
    (exchange, "rows"),
    (prefill, "rows"),
    (serving, "production_mix"),
    (serving, "serving_chain"),
    (serving, "layer_replay"),
)


@pytest.mark.parametrize(
    ("card", "speed", "too_slow"),
    [
        ("NVIDIA H200", 4.099, True),
        ("NVIDIA H200", 4.1, False),
        ("NVIDIA GH200 480GB", 3.0, False),
        ("NVIDIA H200 MIG 3g.71gb", 2.0, False),
        ("NVIDIA A10", 0.5, False),
    ],
)
def test_a_card_is_judged_by_its_own_rule(monkeypatch, card, speed, too_slow):
    monkeypatch.setattr(ruler, "unavailable", lambda device: None)
    monkeypatch.setattr(ruler, "speed", lambda device: speed)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    found = ruler.judge(torch.device("cuda"))
    assert found.too_slow == too_slow
    assert str(found).startswith(f"plain read of 268 MB: {speed} TB/s")
    assert ("something else is on the card" in str(found)) == too_slow


def test_where_it_cannot_be_measured_there_is_a_reason_and_no_rule():
    found = ruler.judge(CPU)
    assert not found.too_slow
    assert str(found) == "plain read of 268 MB: not measured, the plain read is a CUDA kernel"


@pytest.fixture
def slow(monkeypatch, tmp_path):
    """Runs a script on a slow card; returns what it would have written, document by document."""
    written, begun = [], []
    monkeypatch.setattr(ruler, "judge", lambda device: SLOW)
    for module, name in FIGURES:
        monkeypatch.setattr(module, name, lambda *_, **__: begun.append(1) or iter(()))
    monkeypatch.setattr(results, "write", lambda args, stem, rows, **facts: written.append((stem, facts)))

    def run(name, *options):
        arguments = ("--name", "slow", "--device", "cpu", "--backend", "torch", "--out", str(tmp_path))
        if name == "serving":
            options += ("--part", "mix", "chain")
        monkeypatch.setattr("sys.argv", [name, *arguments, *options])
        benchmark(name).main()

    return run, written, begun


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_slow_card_ends_a_script_before_it_measures(slow, capsys, name):
    run, written, begun = slow
    with pytest.raises(SystemExit) as end:
        run(name)
    assert end.value.code == 1
    assert not written + begun
    out = capsys.readouterr().out
    assert "4.02 TB/s, below 4.1 TB/s: something else is on the card" in out
    assert "--keep-slow" in out


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_slow_card_is_measured_where_that_is_asked_for(slow, capsys, name):
    run, written, begun = slow
    run(name, "--keep-slow")
    assert begun
    assert written == [(name, {"plain_read_tb_s": 4.02})]
    assert "below 4.1 TB/s" in capsys.readouterr().out


def row(us, plain, chained):
    return decode_score.Row("triton", "P128W4", 1, 32, "ragged / 4", 1_233_000_000, us, plain, chained)


def test_rows_have_the_ratios_to_both_reads():
    assert (row(20.0, 22.0, 18.0).of_plain_read, row(20.0, 22.0, 18.0).of_chained_read) == (1.1, 0.9)
    assert (row(20.0, None, None).of_plain_read, row(20.0, 22.0, None).of_chained_read) == (None, None)


@pytest.mark.parametrize("judgement", [SLOW, ruler.Judgement(4.4, 4.1)], ids=["slow", "fast"])
def test_the_command_prints_both_ratios_and_warns(monkeypatch, capsys, judgement):
    monkeypatch.setattr(ruler, "judge", lambda device: judgement)
    rows = [row(912.34, 843.25, 801.75), row(123456.7, 0.88, None)]
    monkeypatch.setattr(decode_score, "rows", lambda *_, **__: iter(rows))
    command.run(CPU, ["triton"], ["P128W4"], [1], 1e12)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"plain read of 268 MB: {judgement.speed} TB/s")
    assert lines[2:5] == [decode_score.HEADING, *map(decode_score.words, rows)]
    assert [line.startswith("Throw these figures away") for line in lines[5:]] == [True] * judgement.too_slow


def test_a_row_stands_below_its_heading_in_100_columns():
    line = decode_score.words(row(912.34, 843.25, 801.75))
    assert len(line) == len(decode_score.HEADING) <= 100
    assert line.split()[-5:] == ["912.34", "1351.47", "843.25", "0.92", "0.88"]
    for heading in ("MB", " us", "GB/s", "plain read us", "plain/ours", "chained/ours"):
        end = decode_score.HEADING.index(heading) + len(heading)
        assert line[end - 1] != " "
        assert line[end : end + 1] in ("", " ")
    assert decode_score.words(row(2.0, None, None)).split()[-3:] == ["-", "-", "-"]
