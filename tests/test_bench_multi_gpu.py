"""The multi-GPU run with two processes on the CPU: what it finds right, wrong and dead, and its document."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from loading import benchmark

import msa_icp
from msa_icp.bench.multi_gpu import correctness, faults, prefill, runner, together
from msa_icp.bench.multi_gpu import team as teams
from msa_icp.bench.multi_gpu.team import RanksFailed, Setting, Team
from msa_icp.bench.prefill import Window

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts processes")
TWO = Setting(2, "cpu", ("torch",))
TINY = runner.Sizes(
    steps=24,
    tokens=(2,),
    columns=(20,),
    contexts=(2048,),
    batches=(2,),
    page_sizes=(256,),
    windows=(Window("16", ((16, 500),)),),
)


def run(tmp_path, parts, setting=TWO, **options):
    """What a run of these parts leaves in its file."""
    path = tmp_path / "multi_gpu_test.json"
    document = runner.Document(runner.facts(setting, "abc", TINY), path)
    lines: list[str] = []
    runner.run(setting, parts, TINY, document, say=lines.append, **options)
    return json.loads(path.read_text()), document, lines


def by_what(part):
    found = {}
    for row in part["rows"]:
        found.setdefault(row["what"], []).append(row)
    return found


# ---------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), runner.PARTS)


def test_the_document(whole):
    saved, document, lines = whole
    assert {"card", "torch", "triton", "date", "plain_read_tb_s"} <= saved.keys()
    assert (saved["ranks"], saved["backends"], saved["commit"], saved["multicast"]) == (
        2,
        ["torch"],
        "abc",
        False,
    )
    assert "say nothing about GPUs" in saved["timings"]
    assert tuple(saved["parts"]) == runner.PARTS
    for name, part in saved["parts"].items():
        assert part["complete"], name
        assert part["problem"] is None
        assert part["seconds"] > 0
        for row in part["rows"]:
            assert any(runner.words(row) == line for line in lines)
    assert document.wrong == []


def test_what_was_compared(whole):
    rows = by_what(whole[0]["parts"]["correctness"])
    assert [(r["form"], r["run"]) for r in rows["exchange"]] == [
        (form, run) for form in ("legacy", "tagged") for run in ("control", "eager")
    ]
    for row in rows["exchange"]:
        # A control's wrong row is that of one layer, and of one rank.
        assert row["wrong_rows"] == ([row["steps"] // 12, 0] if row["run"] == "control" else [0, 0])
        assert row["first_wrong"] == ([[5, 0, 0], None] if row["run"] == "control" else [None, None])
        assert row["errors"] == ["", ""]
        assert row["steps"] >= 24
    assert len(rows["selection"]) == 12
    for row in rows["selection"]:
        assert row["wrong_rows"] == [0, 0], row
    control, eager = rows["prefill all-to-all"]
    assert control["wrong_words"] == [12, 0]
    assert eager["wrong_words"] == [0, 0]
    assert eager["over"] == "gloo"


def test_what_was_timed(whole):
    parts = whole[0]["parts"]
    for row in parts["latency"]["rows"]:
        assert row["producer_us"] > 0
        assert row["us"] > 0
        assert row["goal_us"] is None  # which is a GPU's
        assert (row["publish_us"] is None) == (row["form"] == "legacy")
    chain = parts["chain"]["rows"]
    assert [row["what"] for row in chain] == ["chain", "chain_fused", "replicated"]
    assert [row.get("ok") for row in chain] == [True, True, None]
    assert {row["place"] for row in [*chain, *parts["latency"]["rows"]]} == {"the processor"}
    assert all(row["us"] > 0 and row["context"] == 2048 and row["of_plain_read"] is None for row in chain)
    assert len(runner.summary(whole[1])) == 1
    prefill = parts["prefill"]["rows"]
    assert [row["form"] for row in prefill] == ["score, select", "fused"]
    for row in prefill:
        assert row["query_tokens"] == 16
        assert min(row[f"{name}_us"] for name in ("layer", "local", "exchange", "merge")) > 0


def test_a_killed_rank_is_named(whole):
    tagged, legacy = whole[0]["parts"]["faults"]["rows"]
    for row, dead, lives in ((tagged, 1, "0"), (legacy, 0, "1")):
        assert row["dead"] == dead
        assert row["named"] == {lives: [dead]}
        assert f"rank {dead} did not come within the spin limit" in row["errors"][lives]
        assert row["resets"][lives]
        assert row["seconds"] < 20
        assert row["again"]["wrong_rows"] == [0, 0]
        assert row["ok"]


def test_the_plot(whole, tmp_path):
    pytest.importorskip("matplotlib")
    benchmark("plots").multi_gpu(whole[0], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


# ---------------------------------------------------------------- what goes wrong


def test_a_planted_wrong_row_is_reported(tmp_path):
    saved, document, lines = run(tmp_path, ["correctness"], plant=True)
    for row in saved["parts"]["correctness"]["rows"]:
        assert row["ok"] == (row["run"] == "control"), row
    assert len(document.wrong) == 3 + 2 * 2 * 2 + 2 * 2
    wrong = [line for line in lines if line.endswith("WRONG, first at rank 0, layer 5, token 0, head 0")]
    assert len(wrong) == 2
    assert saved["parts"]["correctness"]["complete"]


def test_the_planted_row_is_wrong_for_one_owner():
    """Whatever the scores are: both ranks' truth is as before but for head 0 of one token."""
    group = msa_icp.ReceiveStorage.in_process(2, capacity=len(correctness.NUM_VALID))
    layers = [correctness.Layers(s, "torch", tagged=True, spin_limit=9) for s in group]
    for each in layers:
        each.plant()
    for each in layers:
        each.publish(5, 0)
    for each in layers:
        each.merge(5, 0)
    assert [each.found()["wrong"] for each in layers] == [1, 0]
    assert layers[0].found()["first"] == [5, 0, 0]


@pytest.mark.parametrize(
    ("run", "wrong", "error", "right"),
    [
        ("eager", [0, 0], "", True),
        ("eager", [0, 1], "", False),
        ("eager", [0, 0], "slot set 1: rank 0 did not come", False),
        ("control", [2, 0], "", True),
        ("control", [0, 0], "", False),
        ("control", [1, 0], "", False),
        ("control", [2, 1], "", False),
        ("control", [0, 2], "", False),
    ],
)
def test_a_run_is_judged(run, wrong, error, right):
    """24 steps are two cycles: a control's planted row is wrong twice, for the owner of head 0."""
    row = {"run": run, "steps": 24, "wrong_rows": wrong, "errors": ["", error]}
    assert correctness._right(row) == right


@pytest.mark.parametrize(
    ("named", "usable", "reset", "again", "right"),
    [
        ([1], True, "gone", True, True),
        ([1, 0], True, "gone", True, True),
        ([], True, "gone", True, False),
        ([0], True, "gone", True, False),  # nobody names the dead one
        ([1], False, "gone", True, False),
        ([1], True, "", True, False),  # a reset that goes well without a rank
        ([1], True, "gone", False, False),
    ],
)
def test_a_dead_rank_that_nobody_names(named, usable, reset, again, right):
    living = {"named": named, "error": "late", "reset": reset, "usable": usable, "seconds": 0.5}

    class Ranks:
        found = iter([[living, None], [{"ok": again, "steps": 12, "wrong_rows": [0, 0]}] * 2])

        def run(self, *arguments, dying=()):
            return next(self.found)

        def prepare(self, number):
            assert number == 1

        def replace(self):
            pass

    row = faults.kill(Ranks(), "torch", "tagged", False, 1)
    assert row["ok"] == right
    assert runner.words(row).splitlines()[0].endswith("ok" if right else "WRONG")


def test_what_is_there_is_written_when_it_is_interrupted(tmp_path):
    path = tmp_path / "found.json"
    document = runner.Document(runner.facts(TWO, "abc", TINY), path)

    def interrupted(text):
        if "eager" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(TWO, ["correctness"], TINY, document, say=interrupted)
    part = json.loads(path.read_text())["parts"]["correctness"]
    assert [row["run"] for row in part["rows"]] == ["control", "eager"]
    assert not part["complete"]


def test_a_part_that_fails_does_not_keep_the_next_from_running(tmp_path):
    saved, document, _ = run(tmp_path, ["correctness", "latency"], replace(TWO, backends=("cuda",)))
    for part in saved["parts"].values():
        assert "'cuda' does not serve cpu" in part["problem"]
    assert len(document.wrong) == 2


def test_no_part_begins_after_its_time(tmp_path):
    document = runner.Document({})
    lines: list[str] = []
    now = time.time()
    runner.run(TWO, ["chain"], TINY, document, until=now - 1, say=lines.append)
    runner.run(TWO, ["chain", "faults"], TINY, document, until=now - 1, say=lines.append)
    assert set(lines) == {"chain: the time is over", "faults: the time is over"}
    assert document.parts == {}


# ---------------------------------------------------------------- the ranks


@pytest.fixture
def team():
    with Team(TWO, lambda kind, content: None) as made:
        yield made


def slow_on_one(rank):
    gate = together.Gate(rank, "torch")
    try:
        return gate.time(lambda layer: time.sleep(0.01 * rank.number), 3)
    finally:
        gate.close()


def late_on_one(rank):
    """Seconds that a rank's gate takes, where rank 1 comes 0.6 s later."""
    gate = together.Gate(rank, "torch")
    dist.barrier()
    time.sleep(0.6 * rank.number)
    began = time.monotonic()
    gate()
    return time.monotonic() - began


def killed_on_one(rank):
    if rank.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wrong_on_one(rank):
    if rank.number == 1:
        raise KeyError("planted")
    dist.barrier()


def ranks_of(rank):
    return rank.gather(rank.number)


def test_ranks_are_timed_together(team):
    assert [round(us, -3) >= 10_000 for us in team.run(slow_on_one)] == [True, True]
    waited, late = team.run(late_on_one)
    assert waited > 0.3
    assert late < waited
    with pytest.raises(RanksFailed, match=r"(?s)^rank 1 killed by SIGKILL\nrank 0 failed: RuntimeError"):
        team.run(killed_on_one)


def test_a_rank_that_raises_is_named_first(team, monkeypatch):
    monkeypatch.setattr(teams, "GRACE_S", 0.5)
    assert team.run(ranks_of) == [[0, 1], [0, 1]]
    with pytest.raises(RanksFailed, match=r"(?s)^rank 1 failed: KeyError: 'planted'.*rank 0 did not come"):
        team.run(wrong_on_one)


def test_a_rank_that_was_to_die_and_lives(team):
    with pytest.raises(RanksFailed, match="rank 1 lived on"):
        team.run(ranks_of, dying=(1,))


def test_a_replay_is_timed_from_the_gate_on(monkeypatch):
    """What a GPU's stream gets, and in which order, over stand-ins."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            self.place = None

        def record(self):
            self.place = len(log)
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return float(end.place - self.place)

    class Passed(together.Gate):
        def __init__(self):
            self._rank = SimpleNamespace(device=torch.device("cuda"))

        def __call__(self):
            log.append("gate")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    monkeypatch.setattr(dist, "barrier", lambda: log.append("barrier"))
    assert Passed()._once(lambda: log.append("replay")) == 2e-3
    assert log == ["barrier", "sleep", "gate", "event", "replay", "event", "wait"]


# ---------------------------------------------------------------- where ranks run


@pytest.mark.parametrize(
    ("cards", "allowed", "place"),
    [(4, "0", teams.OWN_CARDS), (1, "1", teams.ONE_CARD), (1, "0", None), (0, "1", None)],
)
def test_places(monkeypatch, cards, allowed, place):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", allowed)
    setting = Setting(4, "cuda", ("triton",))
    if place is None:
        with pytest.raises(ValueError, match=f"4 ranks need as many cards, there are {cards}"):
            assert setting.place
        return
    assert setting.place == place
    timed = {"latency", "chain", "prefill"} & set(runner.parts_for(place))
    assert bool(timed) == (place == teams.OWN_CARDS)


def test_a_backend_without_a_plan_is_mixed_with_another():
    both = ["score, select", "fused"]
    assert prefill.served(["torch"]) == [("torch", both)]
    assert prefill.served(["cuda"]) == [("cake", both[:1])]
    assert prefill.served(["cuda", "torch"]) == [("torch", both), ("cake", both[:1])]


def test_the_kills():
    """Each backend's, in both forms or in one; in the middle of graphs where there are any."""
    setting = Setting(4, "cuda", ("cuda", "triton"))
    tagged, legacy = ("tagged", True, 3), ("legacy", False, 0)
    both = [("cuda", [tagged, legacy]), ("triton", [tagged, legacy])]
    assert faults.planned(setting, True) == both
    assert faults.planned(setting, False) == [("cuda", [tagged]), ("triton", [legacy])]
    assert faults.planned(TWO, False) == [("torch", [("tagged", False, 1)])]


def test_a_ruler_that_fails_is_noted(monkeypatch):
    def broken(device):
        raise OSError("no NVRTC")

    monkeypatch.setattr(runner.ruler, "speed", broken)
    team = SimpleNamespace(run=lambda task: [task(SimpleNamespace(device=torch.device("cpu")))] * 2)
    document, lines = runner.Document({}), []
    runner._note_speed(team, document, lines.append)
    assert document.facts["plain_read_tb_s"] == ["OSError: no NVRTC"] * 2
    assert lines == ["plain read of 268 MB, TB/s: OSError: no NVRTC, OSError: no NVRTC"]


def test_a_goal_that_is_missed_is_no_fault():
    row = {"what": "publish+merge", "backend": "cuda", "form": "tagged", "tokens": 64, "columns": 1024}
    row |= {"publish_us": 4.0, "merge_us": 3.0, "us": 7.0, "alone_us": 5.0, "goal_us": 6.0, "met": False}
    document = runner.Document({})
    document.parts["latency"] = {"problem": None, "rows": [row]}
    assert document.wrong == []
    assert "publish + merge    7.00 us (4.00 + 3.00), alone 5.00, goal 6.0: missed" in runner.words(row)


def test_the_script(tmp_path, monkeypatch, capsys):
    arguments = ["--device", "cpu", "--quick", "--steps", "12", "--parts", "correctness", "--name", "here"]
    monkeypatch.setattr(sys, "argv", ["multi_gpu.py", *arguments, "--commit", "abc", "--out", str(tmp_path)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert benchmark("multi_gpu").main() == 0
    saved = json.loads((tmp_path / "multi_gpu_here.json").read_text())
    assert saved["parts"]["correctness"]["complete"]
    assert "say nothing about GPUs" in capsys.readouterr().out
