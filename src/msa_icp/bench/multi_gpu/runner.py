"""The exchange on several GPUs of one host: right, how fast, and what happens when a rank is killed.

`run` starts the ranks (`team.py`), lets them do the parts one after another, and writes the
document after every row, so that nothing is lost when it is interrupted. A part that fails does not keep the
others from running. The parts are a module each: `correctness.py`, `latency.py`, `chain.py`,
`prefill.py`, `faults.py`; `together.py` says how ranks are timed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .. import results, ruler
from ..prefill import SIZES, Window
from . import chain, correctness, faults, latency, prefill
from .team import ONE_CARD, OWN_CARDS, PROCESSOR, Rank, RanksFailed, Setting, Team

PARTS = ("correctness", "latency", "prefill", "chain", "faults")
"""In the order in which they run if none are named: what comes last may be cut short by a time limit."""
UNTIMED = ("correctness", "faults")
"""The parts that mean something where ranks share a card."""
FAULTS_S = 75.0
"""Seconds that the parts before the faults leave to them, where time is limited."""
TIMED = (*chain.MEASURED, "publish+merge", "prefill")
"""Rows that are about time: each says where it was taken."""
HOLDS = {
    OWN_CARDS: "timings of the slowest rank, every rank on a card of its own",
    ONE_CARD: "timings of ranks that take turns on a card: they say nothing about NVLink",
    PROCESSOR: "timings of a processor through shared memory: they say nothing about GPUs",
}
"""What the timings of a place are worth."""


@dataclass(frozen=True)
class Sizes:
    """What is run."""

    steps: int
    """Of each combination of the exchange's correctness."""
    tokens: tuple[int, ...]
    columns: tuple[int, ...]
    """Of publish and merge."""
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    page_sizes: tuple[int, ...]
    """Of the decode chain, and the first of them of prefill."""
    windows: tuple[Window, ...]
    all_kills: bool = True
    """Whether ranks are killed in both row forms of each backend."""


FULL = Sizes(
    steps=10_000,
    tokens=(64, 8),
    columns=(1024, 64, 8192),
    contexts=tuple(1 << power for power in (13, 15, 17, 19, 20)),
    batches=(32, 1, 8, 128),
    page_sizes=(128, 256),
    windows=SIZES,
)
QUICK = replace(
    FULL,
    tokens=(64,),
    columns=(1024,),
    contexts=(8192, 131072, 1048576),
    batches=(32, 1),
    page_sizes=(128,),
    windows=(SIZES[0], SIZES[2]),
    all_kills=False,
)
ON_A_CPU = Sizes(
    steps=480,
    tokens=(8,),
    columns=(64,),
    contexts=(4096, 16384),
    batches=(1, 4),
    page_sizes=(128,),
    windows=(Window("64", ((64, 1984),)),),
)
ON_A_CPU_QUICK = replace(ON_A_CPU, steps=48, contexts=(4096,), batches=(2,))


def sizes(device: str, quick: bool) -> Sizes:
    """What is run where."""
    return {
        ("cuda", False): FULL,
        ("cuda", True): QUICK,
        ("cpu", False): ON_A_CPU,
        ("cpu", True): ON_A_CPU_QUICK,
    }[device, quick]


def parts_for(place: str) -> tuple[str, ...]:
    """The parts to run if none are named."""
    return UNTIMED if place == ONE_CARD else PARTS


@dataclass
class Document:
    """What a run found; written to `path` whenever something is added, if there is one."""

    facts: dict[str, Any]
    path: Path | None = None
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def begin(self, part: str) -> dict[str, Any]:
        """The entry of a part that has not come to its end yet."""
        self.parts[part] = {"complete": False, "problem": None, "seconds": None, "rows": []}
        self.write()
        return self.parts[part]

    def write(self) -> None:
        """All of it or nothing: a run may end at any time."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f".{self.path.name}")
        draft.write_text(json.dumps({**self.facts, "parts": self.parts}, indent=1) + "\n")
        draft.replace(self.path)

    @property
    def wrong(self) -> list[str]:
        """What went wrong, in words: parts that failed, and rows that are not right. Goals do not count."""
        found = [f"{name}: {part['problem']}" for name, part in self.parts.items() if part["problem"]]
        for name, part in self.parts.items():
            found += [f"{name}: {words(row)}" for row in part["rows"] if not row.get("ok", True)]
        return found


def facts(setting: Setting, commit: str | None, which: Sizes) -> dict[str, Any]:
    """The head of the document."""
    return {
        **results.heading(torch.device(setting.device), commit),
        "ranks": setting.world_size,
        "backends": list(setting.backends),
        "place": setting.place,
        "timings": HOLDS[setting.place],
        "multicast": False,
        "steps": which.steps,
    }


def run(
    setting: Setting,
    parts: Sequence[str],
    which: Sizes,
    document: Document,
    *,
    plant: bool = False,
    until: float = float("inf"),
    say: Callable[[str], None] = print,
) -> None:
    """Run the parts into `document`; after `until` (`time.time()`) nothing new is begun.

    `plant` makes the rows of the correctness part wrong, to see that it notices.
    """
    team: Team | None = None
    entry: dict[str, Any] = {}

    def hear(kind: str, content: Any) -> None:
        if kind == "say":
            say(content)
            return
        if content["what"] in TIMED:
            content["place"] = setting.place
        entry["rows"].append(content)
        document.write()
        say(words(content))

    try:
        for place, part in enumerate(parts):
            end = until - FAULTS_S * ("faults" in parts[place + 1 :])
            if time.time() > end:
                say(f"{part}: the time is over")
                continue
            entry, began = document.begin(part), time.monotonic()
            try:
                if team is not None and part == "faults":  # NCCL's group would not survive it
                    team.close()
                    team = None
                if team is None:
                    say(f"starting {setting.world_size} ranks ({setting.place})")
                    team = Team(setting, hear)
                    _note_speed(team, document, say)
                say(f"{part} ...")
                _run_part(team, part, which, plant, end, lambda row: hear("row", row))
                entry["complete"] = time.time() <= end
            except RanksFailed as failure:
                entry["problem"] = str(failure)
                say(f"{part} failed:\n{failure}")
                if team is not None:
                    team.close()
                team = None
            entry["seconds"] = round(time.monotonic() - began, 1)
            document.write()
            say(f"{part}: {entry['seconds']} s")
    finally:
        if team is not None:
            team.close()


def _run_part(
    team: Team, part: str, which: Sizes, plant: bool, until: float, row: Callable[[dict[str, Any]], None]
) -> None:
    if part == "correctness":
        team.run(correctness.part, which.steps, plant, until)
    elif part == "latency":
        team.run(latency.part, which.tokens, which.columns, until)
    elif part == "chain":
        team.run(chain.part, which.contexts, which.batches, which.page_sizes, until)
    elif part == "prefill":
        team.run(prefill.part, which.windows, which.page_sizes[:1], until)
    else:
        faults.part(team, which.all_kills, row, until)


def _note_speed(team: Team, document: Document, say: Callable[[str], None]) -> None:
    """The plain read of 268 MB of every rank's card, all at once: by it a run is judged."""
    if "plain_read_tb_s" in document.facts:
        return
    document.facts["plain_read_tb_s"] = speeds = team.run(_speed)
    document.write()
    if any(speed is not None for speed in speeds):
        say(f"plain read of 268 MB, TB/s: {', '.join(map(str, speeds))}")


def _speed(rank: Rank) -> float | str | None:
    """None where there is no such figure; a ruler that fails must not keep all parts from running."""
    try:
        return ruler.speed(rank.device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# ---------------------------------------------------------------- for a reader


def words(row: dict[str, Any]) -> str:
    """A row in a line."""
    what = row["what"]
    if what == "exchange":
        wrong = f"{sum(row['wrong_rows'])} wrong rows"
        late = "; ".join(sorted({error for error in row["errors"] if error}))
        return (
            f"{row['backend']:7} {row['form']:6} {row['run']:7} {row['steps']:6} steps "
            f"{row['us_a_step']:8.1f} us each: {_verdict(row, wrong)}{', first at ' if _found(row) else ''}"
            f"{_found(row)}{' ' if late else ''}{late}"
        )
    if what == "prefill all-to-all":
        wrong = f"{sum(row['wrong_words'])} wrong words"
        return (
            f"prefill over {row['over']:4} {row['run']:7} {row['steps']:3} exchanges: {_verdict(row, wrong)}"
        )
    if what == "selection":
        wrong = f"{sum(row['wrong_rows'])} wrong rows"
        return (
            f"{row['backend']:7} {row['form']:6} {row['part']:7} of one cache, P{row['page_size']}, "
            f"{row['run']}: {_verdict(row, wrong)}"
        )
    if what == "killed":
        named = ", ".join(f"rank {number} names {ranks}" for number, ranks in row["named"].items())
        again = sum(row["again"]["wrong_rows"])
        error = next(iter(row["errors"].values()))
        return (
            f"{row['backend']:7} {row['form']:6} {row['run']:7} rank {row['dead']} killed: {named}, after "
            f"{row['seconds']:.2f} s; a new group's {row['again']['steps']} steps: {again} wrong rows: "
            f"{'ok' if row['ok'] else 'WRONG'}\n    {error}"
        )
    return _timed(row)


def _verdict(row: dict[str, Any], wrong: str) -> str:
    if row["run"] == "control":
        return f"{wrong}, as planted: ok" if row["ok"] else f"{wrong}, not what was planted: WRONG"
    return f"{wrong}: {'ok' if row['ok'] else 'WRONG'}"


def _found(row: dict[str, Any]) -> str:
    """Where the first wrong row of a run is that should have none."""
    if row["run"] == "control":
        return ""
    return "; ".join(
        f"rank {rank}, layer {first[0]}, token {first[1]}, head {first[2]}"
        for rank, first in enumerate(row["first_wrong"])
        if first
    )


def _timed(row: dict[str, Any]) -> str:
    if row["what"] == "publish+merge":
        parts = "" if row["publish_us"] is None else f" ({row['publish_us']:.2f} + {row['merge_us']:.2f})"
        goal = (
            "" if row["goal_us"] is None else f", goal {row['goal_us']}: {'met' if row['met'] else 'missed'}"
        )
        return (
            f"{row['backend']:7} {row['form']:6} {row['tokens']:3} tokens x {row['columns']:5} columns: "
            f"publish + merge {row['us']:7.2f} us{parts}, alone {row['alone_us']:.2f}{goal}"
        )
    if row["what"] == "prefill":
        return (
            f"{row['backend']:7} P{row['page_size']} {row['query_tokens']:5} tokens {row['form']:13} "
            f"{row['layer_us']:9.2f} us (local {row['local_us']:.2f}, exchange {row['exchange_us']:.2f}, "
            f"merge {row['merge_us']:.2f}; limit of the local part "
            f"{max(row['operations_us'], row['plain_read_us'] or 0):.2f})"
        )
    ratio = "" if row["of_plain_read"] is None else f", plain read / ours {row['of_plain_read']:.2f}"
    return (
        f"{row['backend']:7} P{row['page_size']} {row['requests']:4} x {row['context']:8} {row['what']:12} "
        f"{row['us']:9.2f} us{ratio}{'' if row.get('ok', True) else ': WRONG, another selection than chain'}"
    )


def summary(document: Document) -> list[str]:
    """Replicated / chain of every cell, with each way's quickest backend."""
    cells: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in document.parts.get("chain", {}).get("rows", []):
        cell = cells.setdefault((row["page_size"], row["requests"], row["context"]), {})
        way = "replicated" if row["what"] == "replicated" else "sharded"
        cell[way] = min(row["us"], cell.get(way, float("inf")))
    return [
        f"P{page} {requests:4} x {context:8}: replicated / sharded {cell['replicated'] / cell['sharded']:.2f}"
        for (page, requests, context), cell in cells.items()
        if {"replicated", "sharded"} <= cell.keys()
    ]
