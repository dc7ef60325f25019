"""`msa-icp bench`: the decode scorer on this machine, as a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

from msa_icp.dispatch import backends

from . import decode_score, ruler
from .measure import versions


def kernel_backends(device: torch.device) -> list[str]:
    """The backends to measure: on a GPU the kernels, on a CPU whatever serves it."""
    served = [name for name, reason in backends(device).items() if reason is None]
    return [name for name in served if device.type == "cpu" or name != "torch"]


def sizes_up_to(max_bytes: float) -> list[decode_score.Size]:
    """The batch sizes whose launches read at most so many bytes."""
    layout = decode_score.LAYOUTS["P128W4"]
    return [size for size in decode_score.SIZES if size.k_bytes(layout) <= max_bytes]


def run(
    device: torch.device,
    names: Sequence[str],
    layouts: Sequence[str],
    query_lens: Sequence[int],
    max_bytes: float,
    console: Console,
) -> None:
    """Measure and print; a row is shown as soon as it is there."""
    facts = versions(device)
    table = Table(title=f"Decode scorer, {facts['card']}, torch {facts['torch']}, triton {facts['triton']}")
    columns = ("backend", "layout", "query", "batch x rows", "MB", "us", "GB/s", "read / ours")
    for column in columns:
        table.add_column(column, justify="left" if column in ("backend", "layout") else "right")
    with Live(table, console=console, vertical_overflow="visible"):
        measured = decode_score.rows(
            device, list(names), sizes=sizes_up_to(max_bytes), layouts=layouts, query_lens=query_lens
        )
        for row in measured:
            ratio = row.of_plain_read
            table.add_row(
                row.backend,
                row.layout,
                str(row.query_len),
                f"{row.batch} x {row.keys}",
                f"{row.bytes / 1e6:.1f}",
                f"{row.us:.2f}",
                f"{row.bytes / row.us / 1e3:.2f}",
                "-" if ratio is None else f"{ratio:.2f}",
            )
    if (reason := ruler.unavailable(device)) is not None:
        console.print(f"No plain read to compare with: {reason}.")
