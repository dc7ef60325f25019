"""Small traces for the tests of the replay."""

from __future__ import annotations

import json
from pathlib import Path

from msa_icp.replay.options import ReplayOptions
from msa_icp.replay.plan import Plan, make_plan
from msa_icp.replay.trace import load_trace

CONVERSATION = [
    # timestamp, input_length, output_length, hash_ids
    (0, 1100, 6, [0, 1, 2]),
    (0, 2300, 9, [0, 3, 4, 5, 6]),
    (40, 1030, 4, [0, 1, 7]),
    (70, 200, 12, [8]),
    (200, 1300, 5, [0, 1, 9]),
    (210, 2500, 7, [0, 3, 4, 5, 10]),
    (9000, 513, 3, [0, 11]),
]
"""Shared prefixes, a request that is shorter than a page, one that comes after a long silence."""


def write_trace(folder: Path, records: list[tuple[int, int, int, list[int]]] = CONVERSATION) -> Path:
    """A Mooncake trace."""
    path = folder / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, record, strict=True))) + "\n" for record in records))
    return path


def small_plan(folder: Path, **options: object) -> Plan:
    """A plan for the conversation."""
    settings = {
        "sparse_layers": 2,
        "max_batch": 3,
        "chunk_tokens": 24,
        "prefill_tokens": 40,
        "check_every": 2,
        "in_process": True,
        "backend": "torch",
        **options,
    }
    return make_plan(load_trace(write_trace(folder)), ReplayOptions(**settings))  # type: ignore[arg-type]
