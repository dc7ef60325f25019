"""Try schedules of the CUDA decode scorer and print plain read / ours of each, the best first.

python benchmarks/tune_decode_score.py [--layout P128W4 ...] [--query-len 1 4 8] [--size "64 x 8K" ...]
    [--form short short-together looping looping-together] [--resident 6 8] [--chains 1 2] [--gaps 0 2 4]
    [--rounds 2 4 8] [--quick] [--name h200]

A line is printed as soon as it is there; for each layout and query length a table follows, ordered by the
geometric mean, and the best candidate of each size. The default grid takes about two minutes and a half of an
H200, --quick about half a minute. With --name everything is written to `tune_decode_score_<name>.json` as
well.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from msa_icp.bench import results
from msa_icp.bench import tune_decode_score as tune
from msa_icp.bench.decode_score import LAYOUTS, SIZES

RESULTS = Path(__file__).parent / "results"
NAMES = [size.name for size in SIZES]
RESIDENTS = {"short": (5, 7, 8), "short-together": (6, 7), "looping": (4, 5, 6), "looping-together": (5, 6)}
FORMS = tuple(RESIDENTS)


def main() -> None:
    args = arguments()
    sizes = [size for size in SIZES if size.name in args.size]
    stop = time.monotonic() + 60 * args.minutes
    console = Console(width=max(160, 60 + 12 * len(sizes)))
    tuner = tune.Tuner(torch.device(args.device), sizes)
    measured: list[tune.Row] = []
    with results.until_interrupted():
        for row in tuner.rows(candidates(args), args.layout, args.query_len):
            print(line(row), flush=True)
            if isinstance(row, tune.Row):
                measured.append(row)
            if time.monotonic() > stop:
                print("time is over", flush=True)
                break
    for case in dict.fromkeys((row.layout, row.query_len) for row in measured):
        show(console, *case, [row for row in measured if (row.layout, row.query_len) == case])
    results.write(args, "tune_decode_score", measured)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = results.parser(__doc__, RESULTS, backends=False)
    parser.add_argument("--layout", nargs="+", choices=tuple(LAYOUTS), default=["P128W4", "P256W2"])
    parser.add_argument("--query-len", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--size", nargs="+", choices=NAMES, default=NAMES[1:])
    parser.add_argument("--form", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--resident", nargs="+", type=int, help="CTAs a multiprocessor; default: some a form")
    parser.add_argument("--chains", nargs="+", type=int, default=[1, 2], help="of warps that multiply alone")
    parser.add_argument("--gaps", nargs="+", type=int, default=[0, 2, 4], help="a multiprocessor")
    parser.add_argument("--rounds", nargs="+", type=int, default=[2, 4, 8], help="of a looping CTA")
    parser.add_argument("--quick", action="store_true", help="P128W4, query length 1 and three sizes")
    parser.add_argument("--minutes", type=float, default=1e9, help="end after so long with what is there")
    args = parser.parse_args()
    if args.quick:
        args.layout, args.query_len, args.size = ["P128W4"], [1], ["16 x 8K", "64 x 8K", "ragged / 4"]
        args.form = args.form if args.form != FORMS else ("short", "looping")
    return args


def candidates(args: argparse.Namespace) -> list[tune.Candidate]:
    """The grid that was asked for."""
    made: list[tune.Candidate] = []
    for form in args.form:
        residents = args.resident or RESIDENTS[form]
        together = form.endswith("together")
        chains = [1] if together else args.chains
        stages, rounds = (1, [1]) if form.startswith("short") else (2, args.rounds)
        made += tune.forms(stages, residents, chains, args.gaps, rounds, together)
    return made


def line(row: tune.Row | tune.LeftOut) -> str:
    """A row for a reader."""
    head = f"{row.layout} q{row.query_len} {row.candidate:40}"
    if isinstance(row, tune.LeftOut):
        return f"{head} left out, {row.reason}"
    bits = "" if row.same_bits else "  (other bits)"
    return f"{head} {row.registers:3} registers  {'  '.join(cell(row, size) for size in row.us)}{bits}"


def cell(row: tune.Row, size: str) -> str:
    """Plain read / ours, and microseconds."""
    ratio = "   -" if row.plain_read_us[size] is None else f"{row.ratios[size]:.2f}"
    return f"{ratio} ({row.us[size]:.2f})"


def show(console: Console, layout: str, query_len: int, rows: list[tune.Row]) -> None:
    """One table, the best mean first."""
    table = Table(title=f"{layout}, query length {query_len}: plain read / ours (us)")
    for heading in ("candidate", "registers", "mean", *rows[0].us):
        table.add_column(heading, justify="left" if heading == "candidate" else "right")
    for row in sorted(rows, key=lambda row: row.mean, reverse=True):
        cells = (cell(row, size) for size in row.us)
        table.add_row(row.candidate, str(row.registers), f"{row.mean:.3f}", *cells)
    console.print(table)
    for size, row in tune.best_by_size(rows).items():
        print(f"{layout} q{query_len} {size:12} best: {row.candidate:40} {cell(row, size)}", flush=True)


if __name__ == "__main__":
    main()
