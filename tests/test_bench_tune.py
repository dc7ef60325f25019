"""The tuner tries what it says, leaves out what spills, and puts the schedule back."""

from __future__ import annotations

import dataclasses
import math

import cuda_emulation
import pytest
import torch
from loading import benchmark

from msa_icp import cuda_backend
from msa_icp.bench import decode_score, measure
from msa_icp.bench import tune_decode_score as tune
from msa_icp.cuda_backend.loader import Report
from msa_icp.geometry import ShardLayout

CPU = torch.device("cpu")
P128W4 = decode_score.LAYOUTS["P128W4"]
SMALL, LARGE = decode_score.Size("1 x 256", (256,)), decode_score.Size("64 x 32K", (32768,) * 64)
needs_nvrtc = pytest.mark.skipif(
    cuda_backend.not_installed() is not None, reason=str(cuda_backend.not_installed())
)


@pytest.fixture
def four_multiprocessors(monkeypatch):
    monkeypatch.setattr(tune.scorer.Kernel, "multiprocessors", staticmethod(lambda device: 4))


def constants(candidate, size, query_len=1):
    variant = tune.variant_for(candidate, size, P128W4, query_len, CPU)
    return variant.source, dict(variant.constants)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=lambda size: size.name)
@pytest.mark.parametrize("query_len", [1, 4, 8])
def test_a_candidate_is_one_form_at_every_size(four_multiprocessors, size, query_len):
    before = tune.scorer.SCHEDULE
    (one,) = tune.one_piece([7])
    source, values = constants(one, size, query_len)
    assert source == "decode_index_score_sharded"
    assert (values["PIECES"], values["RESIDENT"]) == (1, 7)
    (two,) = tune.two_pieces([3])
    source, values = constants(two, size, query_len)
    assert source == "decode_index_score_sharded"
    assert (values["PIECES"], values["RESIDENT"]) == (2, 3)
    for pieces in (1, 2):
        (group,) = tune.together([5], pieces)
        source, values = constants(group, size, query_len)
        assert source == "decode_index_score_sharded"
        assert (values["PIECES"], values["TOGETHER"], values["RESIDENT"]) == (pieces, 1, 5)
    (stay,) = tune.packed([5], [1], [3])
    source, values = constants(stay, size, query_len)
    assert source == "decode_index_score_packed"
    assert (values["STAGES"], values["RESIDENT"]) == (1, 5)
    with tune.using(stay.schedule):
        _, grid = tune.scorer._launch(64, 8192, P128W4, 1, CPU)
    assert grid == (5 * 4 * 3, 1, 1)
    assert tune.scorer.SCHEDULE is before


def test_a_rule_chooses_by_its_thresholds(four_multiprocessors):
    (rule,) = tune.rules([(4, 16)])
    found = []
    for requests in (3, 4, 15, 16):  # of one tile each
        size = decode_score.Size("", (128,) * requests)
        source, values = constants(rule, size)
        found.append((source.split("_")[-1], values.get("PIECES")))
    assert found == [("sharded", 1), ("sharded", 2), ("sharded", 2), ("packed", None)]


def test_the_schedule_comes_back_after_an_error():
    before = tune.scorer.SCHEDULE
    kept = tune.scorer.short_kernel((128, 4), 1, 1)
    (other,) = tune.one_piece([3])

    def fail():
        with tune.using(other.schedule):
            assert tune.scorer.short_kernel((128, 4), 1, 1).variant != kept.variant
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert tune.scorer.SCHEDULE is before
    assert tune.scorer.short_kernel((128, 4), 1, 1).variant == kept.variant


@needs_nvrtc
def test_what_spills_or_does_not_compile_is_left_out(four_multiprocessors):
    candidates = [*tune.one_piece([8, 16]), *tune.packed([2], [3], [1])]  # 3 stages: too much shared memory
    variants = [tune.variant_for(each, SMALL, P128W4, 8, CPU) for each in candidates]
    reports = tune.compile_all(variants)
    reasons = [tune.why_not([variant], reports) for variant in variants]
    assert "bytes spilled at" in reasons[1]
    assert "bytes of shared memory" in reasons[2]
    fine = tune.variant_for(next(tune.one_piece([4])), SMALL, P128W4, 8, CPU)
    assert tune.why_not([fine], tune.compile_all([fine])) is None


def row(candidate, plain=None, **us):
    return tune.Row("P128W4", 1, candidate, 40, us, dict.fromkeys(us, plain), True)


def test_means_and_the_best():
    rows = [row("a", 10.0, x=10.0, y=20.0), row("b", 10.0, x=20.0, y=5.0)]
    assert rows[0].ratios == {"x": 1.0, "y": 0.5}
    assert rows[0].mean == pytest.approx(math.sqrt(0.5))
    assert {size: best.candidate for size, best in tune.best_by_size(rows).items()} == {"x": "a", "y": "b"}
    assert row("c", x=4.0).ratios == {"x": 0.25}


def fake_compiler(variants):
    """Every kernel compiles; those of six short CTAs spill."""
    return {
        variant: Report(64, 100, 8 if dict(variant.constants)["RESIDENT"] == 6 else 0, serialized=False)
        for variant in variants
    }


@pytest.mark.skipif(not cuda_emulation.REQUESTED, reason="without a GPU it needs the emulator")
@pytest.mark.parametrize("device", ["cpu"], ids=["cuda-cpu"])
def test_the_tuner_over_the_emulator(monkeypatch, device):
    monkeypatch.setattr(measure, "chain_bytes", lambda where: 100_000)
    size = decode_score.Size("ragged", (100, 260))
    tuner = tune.Tuner(torch.device(device), [size], fake_compiler)
    candidates = [*tune.one_piece([6, 7]), *tune.packed([2], [2], [1])]
    rows = list(tuner.rows(candidates, ["P256W2"], [1]))
    assert [each.candidate for each in rows] == [tune.PRESENT, *(each.name for each in candidates)]
    assert isinstance(rows[1], tune.LeftOut)
    assert "8 bytes spilled" in rows[1].reason
    assert all(each.us["ragged"] > 0 for each in rows if isinstance(each, tune.Row))

    right = tune.Tuner._score_once

    def wrong(work):
        right(work)
        if tune.scorer.SCHEDULE.packed_from == 0:
            work.score_out[0, 0, 0] += 100

    monkeypatch.setattr(tune.Tuner, "_score_once", staticmethod(wrong))
    with pytest.raises(RuntimeError, match=r"^packed.*other scores than the present schedule"):
        list(tuner.rows(candidates, ["P256W2"], [1]))


def test_the_script_prints_a_table_in_order(monkeypatch, capsys):
    script = benchmark("tune_decode_score")
    rows = [
        row("slow", 10.0, x=20.0),
        tune.LeftOut("P128W4", 1, "bad", "it spills"),
        row("fast", 10.0, x=5.0),
    ]
    asked = []

    class Tuner:
        def __init__(self, device, sizes):
            asked.append([size.name for size in sizes])

        def rows(self, candidates, layouts, query_lens):
            asked.append(([each.name for each in candidates], layouts, query_lens))
            return iter(rows)

    monkeypatch.setattr(tune, "Tuner", Tuner)
    arguments = (
        "--device cpu --layout P256W4 --query-len 2 --size ragged --form one rule --one 8 --rule 16:32"
    )
    monkeypatch.setattr("sys.argv", ["tune", *arguments.split()])
    script.main()
    names = ["one piece, resident 8", "rule: two pieces from 16, packed from 32"]
    assert asked == [["ragged"], (names, ["P256W4"], [2])]
    out = capsys.readouterr().out
    assert "left out, it spills" in out
    table = out[out.index("plain read / ours (us)") :]
    assert table.index("fast") < table.index("slow")
    assert "best: fast" in table


def test_every_knob_has_a_grid():
    """A field of the schedule that no candidate changes would never be tuned."""
    made = [*tune.one_piece([3]), *tune.two_pieces([3]), *tune.packed([7], [1], [3]), *tune.rules([(1, 2)])]
    made += tune.together([3], 1)
    changed = {
        field.name
        for candidate in made
        for field in dataclasses.fields(candidate.schedule)
        if getattr(candidate.schedule, field.name) != getattr(tune.scorer.SCHEDULE, field.name)
    }
    assert changed == {field.name for field in dataclasses.fields(tune.scorer.SCHEDULE)}
    assert ShardLayout(4, 1, 128) == P128W4
