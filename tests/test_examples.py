"""The examples run, and what they compare can differ."""

from __future__ import annotations

import pytest
import torch
from facade import Prefill
from loading import ROOT, example

import msa_icp
from msa_icp import indexer, reference
from msa_icp.indexer import MSAIcpDecodeStep, MSAIcpPrefillStep
from msa_icp.prefill_cases import prefill_case

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_the_serving_loop_proves_itself(device, capsys):
    example("serving_loop").main(["--device", device])
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"4 ranks on {device}: 6 steps of 57 layers in ")
    assert last == "36 rows compared with the reference, none differs"  # 6 steps, 3 of them with a chunk


@pytest.mark.parametrize("fused", [False, True])
def test_the_serving_loop_takes_the_form_that_the_indexer_names(fused, monkeypatch, capsys):
    launched = []
    monkeypatch.setattr(indexer.rules, "fused_prefill", lambda *_: fused)
    local = MSAIcpPrefillStep.local

    def noting(step, *tensors):
        launched.extend(one.name for one in step.record_local(*tensors))
        local(step, *tensors)

    monkeypatch.setattr(MSAIcpPrefillStep, "local", noting)
    example("serving_loop").main(["--device", "cpu", "--layers", "2", "--steps", "2"])
    assert capsys.readouterr().out.splitlines()[-1] == "16 rows compared with the reference, none differs"
    assert ("prefill_score_select" in launched) == fused


@pytest.mark.parametrize("kind", [MSAIcpDecodeStep, MSAIcpPrefillStep])
def test_the_serving_loop_notices_a_wrong_block(kind, monkeypatch):
    merge = kind.merge

    def wrong(step, **slot):
        merge(step, **slot)
        step.output[-1, 0, 3] += 1
        step.output[-2, 0, 3] += 1  # of a decode batch the last row is empty at first

    monkeypatch.setattr(kind, "merge", wrong)
    with pytest.raises(AssertionError, match=r"^position 2[0-9]{3}: expected "):
        example("serving_loop").main(["--device", "cpu", "--layers", "2", "--steps", "1"])


def test_the_prefill_of_the_integration_page():
    """Its code, over a window of several segments on two ranks, selects as one rank would."""
    _, code = (ROOT / "docs" / "integration.md").read_text().split("One window of prompts in code.")
    names: dict = {}
    exec(code.split("```python\n")[1].split("```")[0], names)
    case = prefill_case(
        "", 2, 256, qo_lens=(70, 3, 1), kv_lens=(70, 900, 2000), init_blocks=1, local_blocks=2
    )
    ranks = Prefill(case, "torch", "cpu")
    segments = list(zip(case.qo_lens.tolist(), case.kv_lens.tolist(), case.qo_offset.tolist(), strict=True))
    steps = [
        names["begin_prefill"](
            plan, segments, ranks.table, ranks.num_valid, ranks.scratch, carrier, received, output
        )
        for plan, carrier, received, output in zip(
            ranks.plans, ranks.carriers, ranks.received, ranks.outputs, strict=True
        )
    ]
    for step, keys in zip(steps, ranks.keys, strict=True):
        step.local(ranks.queries, keys)
    msa_icp.exchange_prefill(ranks.carriers, ranks.received)
    for step in steps:
        step.merge()
    assert torch.equal(ranks.merged(), ranks.truth())


def test_the_first_program_selects_as_one_rank_would(capsys):
    _, program = (ROOT / "README.md").read_text().split("## A first program\n\n```python\n")
    names: dict = {}
    exec(program.split("```")[0], names)
    keys = names["cache"][names["block_table"][0].long()].flatten(0, 1)[:8000]
    (expected,) = reference.select_unsharded(names["index_q"], keys, [7999], 0, 1)
    lines = [f"head {head} attends to the blocks {ids}" for head, ids in enumerate(expected)]
    assert capsys.readouterr().out.splitlines() == lines
