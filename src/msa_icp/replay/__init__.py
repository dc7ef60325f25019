"""Replay of a serving trace over the ranks of an index-context-parallel indexer.

    trace.py     a trace file becomes requests
    plan.py      which of them, how many pages, does it fit
    engine.py    the schedule: continuous batching over the page allocator of pages.py
    synth.py     keys and queries of any request, position and layer
    shard.py     a rank's keys and block table
    rank.py      what one rank does in a step, prefill.py with the prompts; loop.py runs the steps
    run.py       all ranks in one process; processes.py: a process for each
    checker.py   compares merged rows with the reference
    report.py    table, summary.json and the pictures of pictures.py

Needs the extra `cli` (rich, matplotlib, psutil). The library does not import this package.
"""

from .errors import RankFailure, ReplayError, TraceError, UsageError
from .options import ReplayOptions
from .plan import Plan, make_plan
from .run import Outcome, replay
from .trace import Request, load_trace

__all__ = [
    "Outcome",
    "Plan",
    "RankFailure",
    "ReplayError",
    "ReplayOptions",
    "Request",
    "TraceError",
    "UsageError",
    "load_trace",
    "make_plan",
    "replay",
]
