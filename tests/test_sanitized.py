"""What runs under compute-sanitizer runs at all: over tensor code here, where it is quick."""

from __future__ import annotations

import pytest
import sanitized
import torch

from msa_icp import cases


@pytest.mark.parametrize(
    "part", [sanitized.calls, sanitized.decode_scores, sanitized.hostile_scores, sanitized.windows]
)
def test_a_part(part, monkeypatch, capsys):
    monkeypatch.setattr(sanitized, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cases, "LAYOUTS", [(4, 128), (2, 256)])
    part("torch")
    assert capsys.readouterr().out


def test_windows_of_short_segments_are_planned_as_such_too(monkeypatch):
    """Both variants of a scorer run, the one for short segments over long ones as well."""
    seen = set()
    monkeypatch.setattr(sanitized, "DEVICE", "cpu")
    monkeypatch.setattr(
        sanitized, "run_fused", lambda case, plan, *_, **__: seen.add((case.total_q, plan.max_query_len))
    )
    for tokens in (3, 40):
        case = sanitized.prefill_cases.prefill_case("", 2, 256, qo_lens=(tokens,))
        sanitized.every_prefill_op(case, "torch")
    assert seen == {(3, 3), (40, 16), (40, 40)}
