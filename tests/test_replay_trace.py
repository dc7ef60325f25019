"""Traces: both formats are read as they are published, and a broken line is named in one sentence."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from msa_icp.replay.errors import TraceError
from msa_icp.replay.trace import Request, load_trace

GOOD = {"timestamp": 3000, "input_length": 1025, "output_length": 7, "hash_ids": [4, 5, 9]}


def mooncake(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def azure(path: Path, *lines: str, header: str = "TIMESTAMP,ContextTokens,GeneratedTokens") -> Path:
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def test_mooncake_records_become_requests_in_order_of_arrival(tmp_path):
    early = {"timestamp": 1500.5, "input_length": 512, "output_length": 0, "hash_ids": [7]}
    path = mooncake(tmp_path / "t.jsonl", GOOD, early)
    assert load_trace(path) == [
        Request(1, 0.0, 512, 0, (7,)),
        Request(0, pytest.approx(1.4995), 1025, 7, (4, 5, 9)),
    ]


def test_equal_arrivals_keep_their_order_and_blank_lines_are_nothing(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\ufeff" + json.dumps(GOOD) + "\r\n\n" + json.dumps(GOOD | {"output_length": 8}) + "\n\n")
    assert [(r.index, r.output_tokens) for r in load_trace(path)] == [(0, 7), (1, 8)]


def test_azure_lines_become_requests_that_share_nothing(tmp_path):
    path = azure(
        tmp_path / "t.csv",
        "2023-11-16 18:17:03.9799600,600,10",
        "2023-11-16 18:17:04.0319600,600,0",
        "2024-05-10 00:00:00.009930+00:00,1,3",
    )
    first, second, third = load_trace(path)
    assert (first.arrival, first.prompt_tokens, first.output_tokens) == (0.0, 600, 10)
    assert second.arrival == pytest.approx(0.052)
    assert third.arrival > 86400
    assert len(first.hash_ids) == len(second.hash_ids) == 2
    assert not set(first.hash_ids) & set(second.hash_ids)


def test_the_shipped_sample_is_a_trace_with_shared_prefixes():
    requests = load_trace(Path(str(files("msa_icp") / "data" / "sample_trace.jsonl")))
    assert len(requests) >= 40
    assert len({r.hash_ids[0] for r in requests}) == 1
    assert 1000 < min(r.prompt_tokens for r in requests) < max(r.prompt_tokens for r in requests) < 16384


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"timestamp": -1}, "timestamp must be milliseconds from 0 on, was -1"),
        ({"timestamp": "now"}, 'timestamp must be milliseconds from 0 on, was "now"'),
        ({"timestamp": True}, "timestamp must be milliseconds from 0 on, was true"),
        ({"input_length": 0, "hash_ids": []}, "input_length must be an integer from 1 to 2147483647, was 0"),
        ({"input_length": 1.5}, "input_length must be an integer from 1 to 2147483647, was 1.5"),
        ({"output_length": None}, "output_length must be an integer from 0 to 2147483647, was null"),
        ({"hash_ids": [1, 2]}, "hash_ids must hold 3 ids for an input_length of 1025"),
        ({"hash_ids": [1, 2, -3]}, "hash_ids must be a list of integers from 0 on, was [1, 2, -3]"),
        ({"hash_ids": 5}, "hash_ids must be a list of integers from 0 on, was 5"),
    ],
)
def test_a_broken_mooncake_value_is_named_with_its_line(tmp_path, change, problem):
    path = mooncake(tmp_path / "t.jsonl", GOOD, GOOD | change)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value).startswith(f"{path}, line 2: {problem}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", list(GOOD))
def test_a_missing_mooncake_field_is_named(tmp_path, name):
    path = mooncake(tmp_path / "t.jsonl", {key: value for key, value in GOOD.items() if key != name})
    with pytest.raises(TraceError, match=f"line 1: {name} is missing"):
        load_trace(path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("2023-11-16 18:17:03.97,600", "must have 3 fields, had 2"),
        ("yesterday,600,10", 'TIMESTAMP must be like 2023-11-16 18:17:03.9799600, was "yesterday"'),
        ("2023-13-16 18:17:03,600,10", "TIMESTAMP is no time"),
        ("2023-11-16 18:17:03,many,10", 'ContextTokens must be an integer from 1 to 2147483647, was "many"'),
        ("2023-11-16 18:17:03,600,-1", "GeneratedTokens must be an integer from 0 to 2147483647, was -1"),
    ],
)
def test_a_broken_azure_line_is_named(tmp_path, line, problem):
    path = azure(tmp_path / "t.csv", "2023-11-16 18:17:03.9799600,600,10", line)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value).startswith(f"{path}, line 3: {problem}")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "holds no requests"),
        (b"\n \n", "holds no requests"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        (b"TIMESTAMP,Prompt\n1,2\n", "line 1: the header must be TIMESTAMP,ContextTokens,GeneratedTokens"),
        (b"hello\n", "line 1: starts neither a Mooncake trace"),
        (b'{"timestamp": 0,\n', "line 1: is not JSON"),
        (b'{"a": 1}\n[1]\n', "line 1: timestamp is missing"),
        (b"\xff\xfe\x00", "is not a text file in UTF-8"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, content, problem):
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert problem in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(TraceError, match="cannot be read: No such file or directory"):
        load_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        load_trace(tmp_path)
