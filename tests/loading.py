"""The scripts in `benchmarks/` and `examples/` as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def benchmark(name: str) -> ModuleType:
    """Load a script of `benchmarks/` without running it."""
    return _load("benchmarks", name)


def example(name: str) -> ModuleType:
    """Load a script of `examples/` without running it."""
    return _load("examples", name)


def _load(folder: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
