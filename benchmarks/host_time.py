"""Measure the host time of one eager call of every decode entry point, by its parts, and of a facade's layer.

python benchmarks/host_time.py [--device cuda] [--name h200]

Without a GPU there are the checks and the dispatch, and the Triton backend's code up to the launch where
Triton is installed. `--name` writes `benchmarks/results/host_time_<name>.json`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from msa_icp.bench import host_time, results
from msa_icp.bench.measure import versions

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    args = results.parser(__doc__, RESULTS, backends=False).parse_args()
    device = torch.device(args.device)
    measured: list[Any] = []
    with results.until_interrupted():
        for row in itertools.chain(host_time.rows(device), host_time.layer_rows(device)):
            measured.append(row)
            print(row.op, flush=True)
    if measured:
        show(device, measured)
    memory = host_time.graph_memory(device) if measured and device.type == "cuda" else {}
    if memory:
        print(f"layer graphs: {memory}", flush=True)
    results.write(args, "host_time", measured, layer_graphs=memory)


def show(device: torch.device, measured: list[Any]) -> None:
    """The rows as a table."""
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


if __name__ == "__main__":
    main()
