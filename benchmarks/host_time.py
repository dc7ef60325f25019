"""Measure the host time of one eager call of every decode entry point, by its parts.

python benchmarks/host_time.py [--device cuda] [--name h200]

Without a GPU there are the checks and the dispatch, and the Triton backend's code up to the launch where
Triton is installed. `--name` writes `benchmarks/results/host_time_<name>.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from msa_icp.bench import host_time
from msa_icp.bench.measure import versions

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", help="of the machine: writes the JSON file of that name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="what is measured; default: git's HEAD")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()

    device = torch.device(args.device)
    measured = list(host_time.rows(device))
    facts = versions(device)
    table = Table(
        title=f"Host time of a call, us, {facts['card']}, torch {facts['torch']}, triton {facts['triton']}"
    )
    names = list(measured[0].whole)
    headings = (
        "op",
        "checks and dispatch",
        "Triton op up to the launch",
        *(f"whole, {name}" for name in names),
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "op" else "right")
    for row in measured:
        parts = (row.checks, row.triton_op, *(row.whole[name] for name in names))
        table.add_row(row.op, *("-" if part is None else f"{part:.2f}" for part in parts))
    Console().print(table)
    if args.name is None:
        return
    commit = (
        args.commit or subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    )
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"host_time_{args.name}.json"
    date = datetime.date.today().isoformat()
    document = host_time.document(device, measured, date=date, commit=commit)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
