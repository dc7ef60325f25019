"""Replays in one process: the same selections whatever the layout, and every difference is found."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from replay_cases import CONVERSATION, small_plan

import msa_icp
from msa_icp import indexer
from msa_icp.indexer import MSAIcpDecodeStep, MSAIcpPrefillStep
from msa_icp.replay import engine, report
from msa_icp.replay import rank as rank_module
from msa_icp.replay.plan import Plan, k_bytes
from msa_icp.replay.run import Outcome, replay


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> Outcome:
    """What all other replays are compared with: W = 4, P = 128, tagged, every row checked."""
    return replay(small_plan(tmp_path_factory.mktemp("trace"), check_every=1, check_rows=10**6))


def test_every_row_of_every_layer_is_checked_and_right(outcome):
    tokens = sum(output for _, _, output, _ in CONVERSATION)
    assert outcome.tokens == tokens
    prompts = outcome.progress.prefill_tokens
    assert prompts == outcome.plan.walk.prefill_tokens > 200
    assert (
        outcome.counts.prompt_tokens == prompts + outcome.counts.cached_tokens + outcome.counts.assumed_tokens
    )
    assert outcome.rows_checked == (tokens + prompts) * 4 * 2
    assert outcome.prefill_rows_checked == prompts * 4 * 2
    assert outcome.rows_wrong == 0
    assert outcome.first_wrong is None
    assert not outcome.interrupted
    assert outcome.counts.finished == len(CONVERSATION)
    assert outcome.counts.shared_pages > 0


@pytest.mark.parametrize("options", [
    {"world_size": 2},
    {"page_size": 256},
    {"world_size": 2, "page_size": 256, "tagged": False},
    {"tagged": False},
    {"max_batch": 2},
    {"max_batch": 7, "cache_tokens": 4000, "step_ms": 5.0},
])  # fmt: skip
def test_selections_depend_neither_on_layout_nor_form_nor_batch(tmp_path, outcome, options):
    other = replay(small_plan(tmp_path, check_every=4, **options))
    assert other.rows_wrong == 0
    assert other.rows_checked > other.prefill_rows_checked > 0
    assert other.digest == outcome.digest
    if "max_batch" not in options:  # which tokens find their prefix in the cache depends on who came before
        assert other.prefill_digest == outcome.prefill_digest


@pytest.mark.parametrize("options", [
    {"chunk_tokens": 8192},
    {"chunk_tokens": 5},
    {"prefill_tokens": 1, "chunk_tokens": 1},
])  # fmt: skip
def test_selections_do_not_depend_on_how_prompts_enter(tmp_path, outcome, options):
    other = replay(small_plan(tmp_path, **options))
    assert other.rows_wrong == 0
    assert other.digest == outcome.digest
    if "prefill_tokens" not in options:
        assert other.prefill_digest == outcome.prefill_digest
    else:
        assert other.progress.prefill_tokens == other.progress.prefill_windows == len(CONVERSATION)


def test_whole_prompts_in_chunks(tmp_path, outcome):
    plans = [
        small_plan(tmp_path, prefill_tokens=2**20, chunk_tokens=512, world_size=w, page_size=p, check_rows=40)
        for w, p in ((4, 128), (2, 256))
    ]
    one, other = (replay(plan) for plan in plans)
    assert one.counts.assumed_tokens == 0
    assert one.progress.prefill_tokens == one.counts.prompt_tokens - one.counts.cached_tokens > 3000
    assert one.rows_wrong == other.rows_wrong == 0
    assert one.prefill_rows_checked == other.prefill_rows_checked > 100
    assert one.prefill_digest == other.prefill_digest
    assert one.digest == other.digest == outcome.digest


def test_prompts_are_scored_in_the_form_that_the_indexer_names(tmp_path, monkeypatch):
    """With the pool, or with score rows of so many tokens, which may take a chunk in several windows."""
    calls, planned, digests = [], [], []
    fused_form, plan = msa_icp.api.msa_icp_prefill_score_select, msa_icp.MSAIcpIndexerPlan.prefill_window_plan

    def noting_call(*arguments, **numbers):
        calls.append(arguments)
        fused_form(*arguments, **numbers)

    def noting_plan(indexer, number, *lens, total_q, **rest):
        planned.append((number, total_q))
        return plan(indexer, number, *lens, total_q=total_q, **rest)

    monkeypatch.setattr(msa_icp.api, "msa_icp_prefill_score_select", noting_call)
    monkeypatch.setattr(msa_icp.MSAIcpIndexerPlan, "prefill_window_plan", noting_plan)
    for fused, most in ((True, 128), (False, 128), (False, 7)):
        monkeypatch.setattr(indexer.rules, "fused_prefill", lambda *_, answer=fused: answer)
        monkeypatch.setattr(indexer.limits, "prefill_chunk_tokens", lambda _, answer=most: answer)
        calls.clear()
        planned.clear()
        done = replay(small_plan(tmp_path, requests=2, check_rows=16, sparse_layers=1))
        assert done.rows_wrong == 0
        assert done.prefill_rows_checked > 0
        digests.append((done.digest, done.prefill_digest))
        assert bool(calls) == fused
        assert max(planned) == ((3, 3) if most == 7 else (0, 24))  # a chunk of 24 tokens: 7, 7, 7 and 3
        assert max(tokens for _, tokens in planned) == min(most, 24)
    assert len(set(digests)) == 1


def test_prompts_have_an_indexer_of_their_own_where_the_backend_has_no_prefill(
    tmp_path, outcome, monkeypatch
):
    prepare, made = msa_icp.prepare_msa_icp_indexer, []

    def noting(*, backend, **limits):
        made.append((limits["rank"], backend))
        return prepare(backend=backend, **limits)

    monkeypatch.setattr(msa_icp, "prepare_msa_icp_indexer", noting)
    monkeypatch.setattr(Plan, "prefill_backend", "auto")
    other = replay(small_plan(tmp_path))
    assert made == [(rank, backend) for rank in range(4) for backend in ("torch", "auto")]
    assert (other.digest, other.prefill_digest) == (outcome.digest, outcome.prefill_digest)


@pytest.mark.exchange
@pytest.mark.large
@pytest.mark.parametrize("options", [{}, {"tagged": False, "chunk_tokens": 512}])
def test_every_backend_selects_the_same(tmp_path, outcome, backend, device, options):
    other = replay(small_plan(tmp_path, backend=backend, device=device, check_rows=10**6, **options))
    assert other.rows_wrong == 0, other.first_wrong
    assert other.digest == outcome.digest
    assert other.prefill_digest == outcome.prefill_digest


@pytest.mark.parametrize("options", [
    {"seed": 1},
    {"decode_steps": 3},
    {"init_blocks": 2},
])  # fmt: skip
def test_the_digests_tell_different_selections_apart(tmp_path, outcome, options):
    other = replay(small_plan(tmp_path, **options))
    assert other.digest != outcome.digest
    assert other.prefill_digest != outcome.prefill_digest


def test_whole_queries_of_several_tokens(tmp_path):
    plans = [small_plan(tmp_path, query_len=3, world_size=w, check_rows=10**6) for w in (2, 4)]
    one, other = (replay(plan) for plan in plans)
    assert one.digest == other.digest
    assert one.rows_wrong == other.rows_wrong == 0
    assert one.rows_checked == other.rows_checked > 0
    assert one.tokens == sum(-(-output // 3) * 3 for _, _, output, _ in CONVERSATION)


def test_checks_are_as_many_as_asked_for_and_reach_every_request(tmp_path, monkeypatch):
    seen = set()

    class Recorder(rank_module.Checker):
        def _compare(self, step, request, first, context, layer, tokens, merged):
            prompt = CONVERSATION[request][1]
            seen.add((request, layer, first + tokens[0] < prompt))
            super()._compare(step, request, first, context, layer, tokens, merged)

    monkeypatch.setattr(rank_module, "Checker", Recorder)
    outcome = replay(small_plan(tmp_path, check_every=1, check_rows=8))
    assert outcome.prefill_rows_checked == 8 * outcome.progress.prefill_windows
    assert outcome.rows_checked == 8 * (outcome.progress.decode_steps + outcome.progress.prefill_windows)
    everybody = {(request, layer) for request in range(len(CONVERSATION)) for layer in range(2)}
    assert {(request, layer) for request, layer, prompt in seen if not prompt} == everybody
    assert {request for request, _, prompt in seen if prompt} == set(range(len(CONVERSATION)))
    assert {layer for _, layer, prompt in seen if prompt} == {0, 1}
    assert replay(small_plan(tmp_path, check_every=0)).rows_checked == 0


def wrong_once(monkeypatch, number, kind):
    """Another block in the first row that the `number`-th merge of a kind of step has merged."""
    merge, calls = kind.merge, []

    def wrong(step, **slot):
        merge(step, **slot)
        calls.append(None)
        if len(calls) == number:
            step.output[0, 0, 3] += 1

    monkeypatch.setattr(kind, "merge", wrong)


def test_a_wrong_selection_is_counted_and_the_first_one_shown(tmp_path, monkeypatch):
    wrong_once(monkeypatch, 4 * 2 * 4 + 6, MSAIcpDecodeStep)  # decode step 4, layer 1, rank 1
    outcome = replay(small_plan(tmp_path, check_every=1, check_rows=10**6))
    assert outcome.rows_wrong == 1
    wrong = outcome.first_wrong
    assert wrong is not None
    # Two chunks had to enter before request 0 could decode.
    assert (wrong.step, wrong.layer, wrong.head, wrong.request) == (4 + 2, 1, 1, 0)
    assert wrong.position == 1100 + 4
    assert wrong.got != wrong.expected
    assert str(wrong).startswith("step 6, request 0, position 1104, layer 1, head 1: expected [0, ")


def test_a_wrong_selection_of_a_prompt_is_found(tmp_path, monkeypatch):
    wrong_once(monkeypatch, 2 * 4 + 7, MSAIcpPrefillStep)  # the second chunk, layer 1, rank 2
    outcome = replay(small_plan(tmp_path, check_every=1, check_rows=10**6))
    assert outcome.rows_wrong == 1
    wrong = outcome.first_wrong
    assert wrong is not None
    assert (wrong.step, wrong.layer, wrong.head, wrong.request) == (1, 1, 2, 0)
    assert wrong.position == 1060 + 24


def test_rows_that_are_exchanged_wrong_are_found(tmp_path, monkeypatch):
    exchange = msa_icp.exchange_prefill

    def late(carriers, received):
        """The rows of the layer before."""
        before = [carrier.clone() for carrier in carriers]
        exchange(kept.get("carriers", before) if before[0].shape == kept.get("shape") else before, received)
        kept.update(carriers=before, shape=before[0].shape)

    kept: dict = {}
    monkeypatch.setattr(msa_icp, "exchange_prefill", late)
    assert replay(small_plan(tmp_path, check_every=1)).rows_wrong > 0


def test_a_key_of_another_prefix_is_found(tmp_path, monkeypatch):
    """The reference takes its keys from the prefix: a page wrongly shared is a wrong selection."""
    keys = engine.prefix_keys
    monkeypatch.setattr(
        engine,
        "prefix_keys",
        lambda request, size: [
            (request.hash_ids[column * size // 512] % 2, column) for _, column in keys(request, size)
        ],
    )
    assert replay(small_plan(tmp_path, check_rows=10**6)).rows_wrong > 0


def test_ctrl_c_ends_after_the_step_at_hand_and_keeps_what_was_done(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def interrupt(progress):
        seen.append(progress.steps)
        if progress.steps == 5:
            signal.raise_signal(signal.SIGINT)

    outcome = replay(small_plan(tmp_path), interrupt)
    assert outcome.interrupted
    assert outcome.steps == 5 == seen[-1]
    assert signal.getsignal(signal.SIGINT) == before


def test_the_second_ctrl_c_ends_at_once(tmp_path):
    def interrupt(progress):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        replay(small_plan(tmp_path), interrupt)


def test_a_peer_that_does_not_publish_is_named(tmp_path, monkeypatch):
    publish, steps = MSAIcpDecodeStep.publish, []

    def all_but_rank_2(step, *layer, slot):
        steps.append(step)
        if len(steps) % 4 == 3:
            step.record(*layer, slot=slot)
        else:
            publish(step, *layer, slot=slot)

    monkeypatch.setattr(MSAIcpDecodeStep, "publish", all_but_rank_2)
    monkeypatch.setattr(rank_module, "SPIN_LIMIT", 100)
    with pytest.raises(msa_icp.IcpTimeoutError, match="rank 2 did not come"):
        replay(small_plan(tmp_path))


def test_the_report_holds_the_numbers_and_two_pictures(tmp_path, outcome):
    report.prepare_folder(tmp_path / "a" / "report")
    report.write_report(outcome, tmp_path / "trace.jsonl", tmp_path / "a" / "report")
    summary = json.loads((tmp_path / "a" / "report" / "summary.json").read_text())
    assert summary["world_size"] == 4
    assert summary["page_size"] == 128
    assert summary["requests"] == len(CONVERSATION)
    assert summary["steps"] == summary["steps_planned"] == outcome.steps
    assert 0 < summary["decode_steps"] == summary["decode_steps_planned"] < outcome.steps
    assert summary["decode_tokens"] == outcome.tokens
    assert summary["prefill_tokens"] == summary["prefill_tokens_planned"] == outcome.progress.prefill_tokens
    assert summary["prefill_windows"] == sum(map(bool, outcome.plan.walk.windows))
    assert summary["prefill_rows_checked"] == outcome.prefill_rows_checked
    parts = summary["prefill_tokens"] + summary["cached_tokens"] + summary["assumed_tokens"]
    assert summary["prompt_tokens"] == parts == sum(prompt for _, prompt, _, _ in CONVERSATION)
    assert summary["prefill_tokens_per_second"] > 0
    assert summary["decode_tokens_per_second"] > 0
    assert summary["prefill_k_bytes_per_rank"] == sum(k_bytes(outcome.plan, outcome.plan.walk.windows)) > 0
    assert summary["k_bytes_per_rank"] == sum(k_bytes(outcome.plan, outcome.plan.walk.contexts))
    assert set(summary["seconds_by_phase"]) == {"admission", "prefill", "decode"}
    assert summary["rows_checked"] == outcome.rows_checked
    assert summary["rows_wrong"] == 0
    assert summary["replicated_k_bytes"] == 4 * summary["k_bytes_per_rank"] > 0
    assert summary["seconds"] > 0
    assert summary["backend"] == "torch"
    assert summary["row_form"] == "tagged"
    assert summary["selection_digest"] == outcome.digest
    assert summary["prefill_digest"] == outcome.prefill_digest
    assert summary["interrupted"] is False
    assert summary["versions"]["torch"] == torch.__version__
    for picture in ("selection.png", "bytes.png"):
        data = (tmp_path / "a" / "report" / picture).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 20_000


def test_a_replay_that_was_ended_before_its_first_step_has_a_report_too(tmp_path):
    plan = small_plan(tmp_path, max_batch=2)
    nothing = rank_module.Progress(0, 0, 0, 0, 0, 0, 0)
    ranks = [rank_module.RankResult(rank, nothing, 0, 0, 0, None, 0, 0, {}, []) for rank in range(4)]
    ended = Outcome(plan, ranks, engine.Counts(0, 0, 0, 0, 0, 0, 0, 0), 0.5, True)
    report.write_report(ended, tmp_path / "trace.jsonl", tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["decode_steps"] == 0
    assert report.table(ended, tmp_path / "trace.jsonl").row_count > 5
