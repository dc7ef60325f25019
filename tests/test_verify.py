"""`msa-icp verify`: silent when all is right, loud when a backend is wrong."""

from __future__ import annotations

import builtins
import itertools

import pytest
import torch

from msa_icp import cases, dispatch, prefill_cases, torch_backend, verify

pytest.importorskip("rich")


@pytest.fixture
def few_cases(monkeypatch):
    """Two small batches and a window on one layout each."""

    def batches():
        yield cases.decode_case("small", 2, 128, seq_lens=(2500, 70, 0), decode_query_len=2)
        yield cases.nan_keys(cases.decode_case("nan", 2, 128, seq_lens=(2900,)))

    def windows():
        yield prefill_cases.prefill_case("window", 2, 256, qo_lens=(5, 66), kv_lens=(2500, 300))

    monkeypatch.setattr(verify.command, "batches", batches)
    monkeypatch.setattr(verify.command, "windows", windows)


def test_all_equal(few_cases, capsys):
    assert verify.run("torch", "cpu") == 0
    out = capsys.readouterr().out
    assert "all equal" in out
    assert "small" in out
    assert "torch" in out


def test_none_means_every_backend_that_is_there(few_cases, capsys):
    assert verify.run(None, "cpu") == 0
    out = capsys.readouterr().out
    for name, reason in dispatch.backends("cpu").items():
        assert (name in out) == (reason is None)


def wrong_scores(monkeypatch):
    right = torch_backend.decode_index_score_sharded

    def wrong(index_q, index_k, block_table, seq_lens, score_out, **rest):
        right(index_q, index_k, block_table, seq_lens, score_out, **rest)
        score_out[0, 2, 1] += 0.0625

    monkeypatch.setattr(torch_backend, "decode_index_score_sharded", wrong)


def wrong_publish(monkeypatch):
    right = torch_backend.topk_select_publish

    def wrong(scores, num_valid_pages, *rest, **keywords):
        right(scores.flip(0), num_valid_pages.flip(0), *rest, **keywords)

    monkeypatch.setattr(torch_backend, "topk_select_publish", wrong)


def wrong_merge(monkeypatch):
    right = torch_backend.merge_candidates

    def wrong(recv_slot, num_valid_pages, output, *rest, **keywords):
        right(recv_slot, num_valid_pages, output, *rest, **keywords)
        output[0, 0] = output[0, 1]

    monkeypatch.setattr(torch_backend, "merge_candidates", wrong)


def written_too_much(monkeypatch):
    right = torch_backend.decode_index_score_sharded

    def wrong(index_q, index_k, block_table, seq_lens, score_out, **rest):
        right(index_q, index_k, block_table, seq_lens, score_out, **rest)
        score_out[-1, 0, -1] = float("-inf")

    monkeypatch.setattr(torch_backend, "decode_index_score_sharded", wrong)


def wrong_prefill(op, change):
    """A prefill op whose last output is changed afterwards."""

    def fault(monkeypatch):
        right = getattr(torch_backend, op)

        def wrong(*arguments, **keywords):
            right(*arguments, **keywords)
            change(keywords["max_score"] if op == "index_score_sharded" else arguments[-1])

        monkeypatch.setattr(torch_backend, op, wrong)

    return fault


def another_score(scores):
    scores[0, 2, 1] += 0.0625


def another_word(carrier):
    carrier[3, 2, 17] += 1


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (wrong_scores, "scores, W=2 P=128 rank 0"),
        (wrong_publish, "received rows, legacy"),
        (wrong_merge, "merged, tagged, fused"),
        (written_too_much, "scores, W=2 P=128 rank 1"),
        (wrong_prefill("index_score_sharded", another_score), "scores, W=2 P=256 rank 0, compact"),
        (wrong_prefill("topk_select_prefill", another_word), "carrier, W=2 P=256 rank 1"),
        (wrong_prefill("prefill_score_select", another_word), "carrier, fused, W=2 P=256 rank 0"),
        (wrong_merge, "merged, W=2 P=256"),
    ],
)
def test_a_wrong_backend_gives_exit_code_1(few_cases, capsys, monkeypatch, fault, text):
    fault(monkeypatch)
    assert verify.run("torch", "cpu") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert text in out
    assert "cases differ" in out


def test_a_backend_that_raises_fails_its_case_and_no_other(few_cases, capsys, monkeypatch):
    right = torch_backend.topk_select_prefill

    def raises(*arguments, **keywords):
        right(*arguments, **keywords)
        raise LookupError("it [is] Monday")

    monkeypatch.setattr(torch_backend, "topk_select_prefill", raises)
    assert verify.run("torch", "cpu") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "[3/3] prefill window, W=2 P=256, torch: failed" in out
    assert "prefill window, torch, W=2 P=256: failed with LookupError: it [is] Monday" in out
    assert "in 3 cases: 1 cases failed" in out
    assert "Traceback" not in out
    assert "--traceback shows where" in out
    assert verify.run("torch", "cpu", only="prefill", traces=True) == 1
    out = capsys.readouterr().out
    assert "Traceback (most recent call last)" in out
    assert "in raises" in out
    assert verify.run("torch", "cpu", only="decode") == 0


def test_ctrl_c_is_no_failure_of_a_backend(few_cases, monkeypatch):
    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch_backend, "merge_candidates", interrupted)
    with pytest.raises(KeyboardInterrupt):
        verify.run("torch", "cpu")


def test_without_a_terminal_every_case_is_a_line_when_it_is_done(few_cases, capsys, monkeypatch):
    seen = []
    check = verify.decode.check_case

    def watched(*arguments):
        seen.append(capsys.readouterr().out)
        check(*arguments)

    monkeypatch.setattr(verify.decode, "check_case", watched)
    wrong_publish(monkeypatch)
    verify.run("torch", "cpu")
    assert seen[0] == ""
    assert seen[1].startswith("[1/3] decode small, W=2 P=128, torch: 8 differences, ")
    rest = capsys.readouterr().out.splitlines()
    assert rest[0].startswith("[2/3] decode nan, W=2 P=128, torch: ")
    assert rest[1].startswith("[3/3] prefill window, W=2 P=256, torch: equal, ")


def test_what_is_left_out(monkeypatch):
    everything = [*verify.command.batches()], [*verify.command.windows()]
    monkeypatch.setattr(verify.command, "batches", lambda: everything[0])
    monkeypatch.setattr(verify.command, "windows", lambda: everything[1])

    def cases_of(backend, only=None, quick=False):
        work = verify.command._work([backend], "cpu", only, quick)
        assert {name for _, name in work} == {backend}
        return [id(case) for case, _ in work]

    batches, windows = ([id(case) for case in cases] for cases in everything)
    assert cases_of("torch") == batches + windows
    assert cases_of("torch", "decode") == batches
    assert cases_of("torch", "prefill") == windows
    quick, slow = cases_of("torch", quick=True), cases_of("triton")
    assert cases_of("triton", quick=True) == quick
    for case in everything[0] + everything[1]:
        layout = (case.world_size, case.page_size)
        assert (id(case) in quick) == (not case.large and layout == (4, 128) and case.index_q.shape[0] <= 8)
        assert (id(case) in slow) == (not case.large and layout in ((4, 128), (2, 256)))


@pytest.mark.parametrize("choice", [{}, {"only": "decode"}, {"quick": True}], ids=str)
def test_a_backend_that_is_slow_here_is_announced(few_cases, capsys, monkeypatch, choice):
    monkeypatch.setattr(dispatch, "resolve", lambda *_: None)
    monkeypatch.setattr(verify.command, "_check", lambda *_: None)
    assert verify.run("triton", "cpu", **choice) == 0
    first = " ".join(capsys.readouterr().out.split())
    assert first.startswith("triton: interpreted on a CPU") == (choice == {})
    assert verify.run("torch", "cpu", **choice) == 0
    assert "interpreted" not in capsys.readouterr().out


def test_unknown_backends_and_devices_are_refused():
    with pytest.raises(ValueError, match="backend: must be one of"):
        verify.run("numpy", "cpu")
    with pytest.raises(ValueError, match="no backend serves meta"):
        verify.run(None, "meta")
    with pytest.raises(ValueError, match="does not serve meta"):
        verify.run("torch", "meta")


def test_without_rich_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def no_rich(name, *rest, **keywords):
        if name.split(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *rest, **keywords)

    monkeypatch.setattr(builtins, "__import__", no_rich)
    with pytest.raises(ImportError, match=r"pip install 'msa-icp\[cli\]'"):
        verify.run("torch", "cpu")


def test_the_bound_of_inexact_scores():
    """A kernel that adds in FP32 passes; one that drops bits, as an FP8 tensor core does, does not."""
    case = cases.decode_case(
        "", 2, 128, seq_lens=(700,), keys=cases.full_range, queries=cases.full_range, seed=4
    )
    truth = verify.score_truth(case, 1)
    written = truth.written & torch.isfinite(truth.canonical)
    assert (truth.low <= truth.canonical)[written].all()
    assert (truth.canonical <= truth.high)[written].all()
    for digits, passes in ((22, True), (7, False)):
        out = cases.poisoned(truth.canonical.shape, torch.float32)
        out[truth.written] = truth.canonical[truth.written]
        mantissa, exponent = torch.frexp(out[written])
        out[written] = torch.ldexp((mantissa * 2**digits).floor() / 2**digits, exponent)
        assert bool(verify.score_differences(case, 1, out, bitwise=False).any()) != passes
        assert verify.score_differences(case, 1, out, bitwise=True).any()


def test_every_layout_meets_every_case():
    names = [(c.world_size, c.page_size, c.name) for c in verify.command.batches()]
    assert len(names) == len(set(names))
    assert {n[:2] for n in names} == set(cases.LAYOUTS)
    numbers = {name.split()[0] for _, _, name in names}
    assert {"01", "02", "03", "04", "05", "06", "07", "08", "09", "10", "11", "12", "18", "20"} <= numbers
    for left, right in itertools.pairwise(cases.LAYOUTS):
        assert len([n for n in names if n[:2] == left]) == len([n for n in names if n[:2] == right])


def test_every_layout_meets_every_window():
    names = [(c.world_size, c.page_size, c.name) for c in verify.command.windows()]
    assert len(names) == len(set(names))
    for layout in cases.LAYOUTS:
        own = [name for *where, name in names if tuple(where) == layout]
        assert own == [name for *_, name in names[: len(own)]]
        assert {"01", "02", "03", "05", "06", "07", "08", "09", "11", "12", "13", "19"} <= {
            name.split()[0] for name in own
        }
