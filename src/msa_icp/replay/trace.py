"""Request traces: Mooncake JSON lines and Azure LLM inference CSV.

Both become `Request`s in order of arrival. Mooncake records carry *hash ids*, each of which stands for
`HASH_TOKENS` prompt tokens; equal ids at the head of two prompts are a shared prefix. Azure records
carry only token counts, so there no two requests share anything.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from .errors import TraceError

HASH_TOKENS = 512
"""Prompt tokens that one hash id stands for."""

AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]

_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(?:Z|[+-]00:?00)?")


@dataclass(frozen=True)
class Request:
    """One request of a trace."""

    index: int
    """Place among the requests of the file, from 0."""
    arrival: float
    """Seconds after the first request."""
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    """One for each started `HASH_TOKENS` of the prompt; negative ones are shared with nobody."""


def load_trace(path: Path) -> list[Request]:
    """The requests of a trace, in order of arrival. Raises TraceError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(path, None, "is not a text file in UTF-8") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise TraceError(path, None, "holds no requests")
    number, first = lines[0]
    if first.lstrip().startswith("{"):
        requests = _read_mooncake(path, lines)
    elif first.startswith(AZURE_COLUMNS[0]):
        requests = _read_azure(path, lines)
    else:
        raise TraceError(
            path, number, "starts neither a Mooncake trace (JSON lines) nor an Azure one (CSV with a header)"
        )
    start = min(request.arrival for request in requests)
    shifted = (replace(request, arrival=request.arrival - start) for request in requests)
    return sorted(shifted, key=lambda request: (request.arrival, request.index))


class _Problem(Exception):
    """What is wrong with the line at hand."""


@contextmanager
def _line(path: Path, number: int) -> Iterator[None]:
    """Turns a problem into a TraceError that says where it is."""
    try:
        yield
    except _Problem as problem:
        raise TraceError(path, number, str(problem)) from None


# ---------------------------------------------------------------- Mooncake


def _read_mooncake(path: Path, lines: list[tuple[int, str]]) -> list[Request]:
    requests = []
    for index, (number, line) in enumerate(lines):
        with _line(path, number):
            requests.append(_mooncake(index, line))
    return requests


def _mooncake(index: int, line: str) -> Request:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise _Problem(f"is not JSON ({error.msg}, column {error.colno})") from None
    if not isinstance(record, dict):
        raise _Problem(f"must be a JSON object, was {_shown(record)}")
    arrival = _field(record, "timestamp")
    if type(arrival) not in (int, float) or not 0 <= arrival < 1e15:
        raise _Problem(f"timestamp must be milliseconds from 0 on, was {_shown(arrival)}")
    prompt = _tokens("input_length", _field(record, "input_length"), 1)
    output = _tokens("output_length", _field(record, "output_length"), 0)
    ids = _field(record, "hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**63 for i in ids):
        raise _Problem(f"hash_ids must be a list of integers from 0 on, was {_shown(ids)}")
    if len(ids) != _sections(prompt):
        raise _Problem(
            f"hash_ids must hold {_sections(prompt)} ids for an input_length of {prompt}, one for each"
            f" started {HASH_TOKENS} tokens, held {len(ids)}"
        )
    return Request(index, arrival / 1000, prompt, output, tuple(ids))


def _field(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise _Problem(f"{name} is missing")
    return record[name]


# ---------------------------------------------------------------- Azure


def _read_azure(path: Path, lines: list[tuple[int, str]]) -> list[Request]:
    (number, header), *rest = lines
    with _line(path, number):
        if [name.strip() for name in header.split(",")] != AZURE_COLUMNS:
            raise _Problem(f"the header must be {','.join(AZURE_COLUMNS)}, was {_shown(header)}")
    if not rest:
        raise TraceError(path, None, "holds no requests")
    requests = []
    for index, (number, line) in enumerate(rest):
        with _line(path, number):
            requests.append(_azure(index, next(csv.reader([line]))))
    return requests


def _azure(index: int, fields: list[str]) -> Request:
    if len(fields) != len(AZURE_COLUMNS):
        raise _Problem(f"must have {len(AZURE_COLUMNS)} fields, had {len(fields)}")
    stamp, context, generated = (field.strip() for field in fields)
    match = _AZURE_TIME.fullmatch(stamp)
    if match is None:
        raise _Problem(f"TIMESTAMP must be like 2023-11-16 18:17:03.9799600, was {_shown(stamp)}")
    try:
        moment = datetime.fromisoformat(match[1])
    except ValueError as error:
        raise _Problem(f"TIMESTAMP is no time ({error}), was {_shown(stamp)}") from None
    seconds = (moment - datetime(2000, 1, 1)).total_seconds() + float(match[2] or 0)
    prompt = _tokens(AZURE_COLUMNS[1], _number(context), 1)
    output = _tokens(AZURE_COLUMNS[2], _number(generated), 0)
    return Request(index, seconds, prompt, output, (-1 - index,) * _sections(prompt))


def _number(field: str) -> int | str:
    return int(field) if re.fullmatch(r"-?\d{1,12}", field) else field


# ---------------------------------------------------------------- both


def _sections(prompt_tokens: int) -> int:
    return -(-prompt_tokens // HASH_TOKENS)


def _tokens(name: str, value: Any, low: int) -> int:
    if type(value) is not int or not low <= value < 2**31:
        raise _Problem(f"{name} must be an integer from {low} to 2147483647, was {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
