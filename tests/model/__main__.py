"""python -m model [WORD ...]: run every check, or those whose name contains a word."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from .checks import every_check
from .explore import Outcome

SHOWN = 12
"""Steps of a trace that are shown, from its end."""


def _run(number: int) -> tuple[bool, Outcome, float]:
    began = time.monotonic()
    as_expected, outcome = every_check()[number].run()
    return as_expected, outcome, time.monotonic() - began


def _lines(trace: tuple[str, ...]) -> Iterator[str]:
    if len(trace) > SHOWN:
        yield f"({len(trace) - SHOWN} steps before)"
    yield from trace[-SHOWN:]


def main(words: list[str]) -> int:
    checks = every_check()
    chosen = [n for n, check in enumerate(checks) if not words or any(w in check.name for w in words)]
    began, states, unexpected = time.monotonic(), 0, 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        # In order of the checks: a reader finds the same table every time.
        for place, (number, (as_expected, outcome, seconds)) in enumerate(
            zip(chosen, pool.map(_run, chosen), strict=True), 1
        ):
            check = checks[number]
            states += outcome.states
            unexpected += not as_expected
            verdict = "safe" if outcome.wrong is None else outcome.wrong
            if check.goes_wrong and len(check.cases) > 1:
                verdict = f"{sum(not case.expected for case in check.cases)} of {len(check.cases)} safe"
            mark = "  " if as_expected else "!!"
            print(f"[{place:2}/{len(chosen)}] {mark} {check.name}: {verdict}")
            print(f"           {outcome.states} states, {seconds:.1f} s", flush=True)
            if outcome.wrong is not None and (len(check.cases) == 1 or not as_expected):
                for line in _lines(outcome.trace):
                    print(f"           {line}")
    print(f"{len(chosen)} checks, {states} states, {time.monotonic() - began:.0f} s; ", end="")
    print(f"{unexpected} did not come out as they must" if unexpected else "all came out as they must")
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
