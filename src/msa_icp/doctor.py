"""`msa-icp doctor`: what this machine can run, and for each missing backend the reason."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table

from . import __version__, dispatch


def run(console: Console) -> int:
    """Print the backends of every device; returns 0 where at least one serves the CPU."""
    console.print(
        f"msa-icp {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        highlight=False,
    )
    table = Table(show_header=True)
    for heading in ("device", "backend", "", "reason"):
        table.add_column(heading)
    for device, name in _devices():
        for backend, reason in dispatch.backends(device).items():
            state = "[green]yes[/green]" if reason is None else "[yellow]no[/yellow]"
            table.add_row(name, backend, state, reason or "")
    console.print(table)
    return 0 if dispatch.is_supported("cpu") else 1


def _devices() -> Iterator[tuple[torch.device, str]]:
    yield torch.device("cpu"), "cpu"
    for index in range(torch.cuda.device_count()):
        yield torch.device("cuda", index), f"cuda:{index} ({torch.cuda.get_device_name(index)})"
