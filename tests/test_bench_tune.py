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
    return dict(tune.variant_for(candidate, size, P128W4, query_len, CPU).constants)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=lambda size: size.name)
@pytest.mark.parametrize("query_len", [1, 4, 8])
@pytest.mark.parametrize("together", [False, True])
def test_a_candidate_is_one_form_at_every_size(four_multiprocessors, size, query_len, together):
    before = tune.scorer.SCHEDULE
    (one,) = tune.forms(1, [7], [1], [3], [1], together)
    (several,) = tune.forms(2, [3], [2], [0], [5], together)
    for candidate, stages, resident, chains in ((one, 1, 7, 1), (several, 2, 3, 2)):
        values = constants(candidate, size, query_len)
        found = (values["STAGES"], values["RESIDENT"], values["CHAINS"], values["TOGETHER"])
        assert found == (stages, resident, chains, together)
    work = tune.scorer.plan(several.schedule, 64, 8192, (128, 4), query_len, True, CPU)
    assert (work.rounds, work.stride, work.gaps) == (5, 410, 0)
    work = tune.scorer.plan(one.schedule, 64, 8192, (128, 4), query_len, True, CPU)
    assert (work.rounds, work.stride, work.gaps) == (1, 2048, 3 * 4)
    assert tune.scorer.SCHEDULE is before


def test_the_schedule_comes_back_after_an_error():
    before = tune.scorer.SCHEDULE
    (other,) = tune.forms(1, [3], [1], [0], [1], False)

    def fail():
        with tune.using(other.schedule):
            assert tune.scorer.SCHEDULE is other.schedule
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert tune.scorer.SCHEDULE is before


@needs_nvrtc
def test_what_spills_or_does_not_compile_is_left_out(four_multiprocessors):
    candidates = [
        *tune.forms(1, [4, 16], [1], [0], [1], False),
        tune.Candidate("deep", tune.everywhere(tune.Form(3, 2, 1, False, 0), 4)),  # too much shared memory
    ]
    variants = [tune.variant_for(each, SMALL, P128W4, 8, CPU) for each in candidates]
    reports = tune.compile_all(variants)
    reasons = [tune.why_not([variant], reports) for variant in variants]
    assert reasons[0] is None
    assert "bytes spilled at" in reasons[1]
    assert "bytes of shared memory" in reasons[2]


def row(candidate, plain=None, **us):
    return tune.Row("P128W4", 1, candidate, 40, us, dict.fromkeys(us, plain), True)


def test_means_and_the_best():
    rows = [row("a", 10.0, x=10.0, y=20.0), row("b", 10.0, x=20.0, y=5.0)]
    assert rows[0].ratios == {"x": 1.0, "y": 0.5}
    assert rows[0].mean == pytest.approx(math.sqrt(0.5))
    assert {size: best.candidate for size, best in tune.best_by_size(rows).items()} == {"x": "a", "y": "b"}
    assert row("c", x=4.0).ratios == {"x": 0.25}


def fake_compiler(variants):
    """Every kernel compiles; those of six CTAs spill."""
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
    candidates = [*tune.forms(1, [6, 7], [1], [0], [1], False), *tune.forms(2, [2], [1], [0], [2], False)]
    rows = list(tuner.rows(candidates, ["P256W2"], [1]))
    assert [each.candidate for each in rows] == [tune.PRESENT, *(each.name for each in candidates)]
    assert isinstance(rows[1], tune.LeftOut)
    assert "8 bytes spilled" in rows[1].reason
    assert all(each.us["ragged"] > 0 for each in rows if isinstance(each, tune.Row))

    right = tune.Tuner._score_once

    def wrong(work):
        right(work)
        if tune.scorer.SCHEDULE.forms[0][3] == 2:
            work.score_out[0, 0, 0] += 100

    monkeypatch.setattr(tune.Tuner, "_score_once", staticmethod(wrong))
    with pytest.raises(RuntimeError, match=r"^rounds 2.*other scores than the present schedule"):
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
        "--device cpu --layout P256W4 --query-len 2 --size ragged --form short looping-together "
        "--resident 5 --chains 2 --gaps 1 --rounds 3 4"
    )
    monkeypatch.setattr("sys.argv", ["tune", *arguments.split()])
    script.main()
    names = [
        "rounds 1, chains 2, resident 5, gaps 1",
        "rounds 3, together, resident 5, gaps 1",
        "rounds 4, together, resident 5, gaps 1",
    ]
    assert asked == [["ragged"], (names, ["P256W4"], [2])]
    out = capsys.readouterr().out
    assert "left out, it spills" in out
    table = out[out.index("plain read / ours (us)") :]
    assert table.index("fast") < table.index("slow")
    assert "best: fast" in table


def test_every_knob_has_a_grid():
    """A field of a form that no candidate changes would never be tuned."""
    script = benchmark("tune_decode_score")
    made = [
        *tune.forms(1, script.RESIDENTS["short"], [1, 2], [0, 2], [1], False),
        *tune.forms(2, [5], [1], [0], [2], True),
    ]
    forms = {form for candidate in made for _, _, form, _ in candidate.schedule.forms}
    for field in dataclasses.fields(tune.Form):
        assert len({getattr(form, field.name) for form in forms}) > 1, field.name
