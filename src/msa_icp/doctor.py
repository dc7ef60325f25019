"""`msa-icp doctor`: what this machine can run, for each missing backend the reason, and what the CUDA kernels
compile to."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
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
            table.add_row(name, backend, state, escape(reason or ""))
    console.print(table)
    return 0 if dispatch.is_supported("cpu") else 1


def compile_kernels(console: Console, architecture: str) -> int:
    """Compile every CUDA kernel for `architecture` and print what it takes; no GPU is needed.

    Returns 0 where all compile, none spills registers, and no matrix products wait for each other, else 1.
    """
    from .cuda_backend import ARCHITECTURE, kernels, not_installed

    if architecture != ARCHITECTURE:
        console.print(
            f"--compile: must be {ARCHITECTURE}, was {architecture!r}: the CUDA kernels use instructions "
            "that no other architecture has; other GPUs are served by the Triton backend",
            style="red",
            markup=False,
        )
        return 1

    missing = not_installed()
    if missing is not None:
        console.print(f"The CUDA kernels cannot be compiled: {missing}", style="red", markup=False)
        return 1
    table = Table(title=f"CUDA kernels for {architecture}, NVRTC {_nvrtc_version()}")
    table.add_column("kernel")
    for heading in ("registers", "shared memory, bytes", "spilled, bytes"):
        table.add_column(heading, justify="right")
    bad = 0
    for kernel in track(list(kernels()), "compiling", console=console, transient=True):
        try:
            report = kernel.variant.report(architecture)
        except Exception as error:  # whatever the compiler raises is what the user is to read
            bad += 1
            console.print(f"{kernel.variant.name}: {error}", style="red", markup=False)
            continue
        bad += report.spills > 0 or report.serialized
        spills = f"[red]{report.spills}[/red]" if report.spills else "0"
        if report.serialized:
            spills += " [red]its products wait for each other[/red]"
        table.add_row(kernel.variant.name, str(report.registers), str(report.shared), spills)
    console.print(table)
    return 1 if bad else 0


def _nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def _devices() -> Iterator[tuple[torch.device, str]]:
    yield torch.device("cpu"), "cpu"
    for index in range(torch.cuda.device_count()):
        yield torch.device("cuda", index), f"cuda:{index} ({torch.cuda.get_device_name(index)})"
