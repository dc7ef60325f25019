"""Planted faults: each must make the tests fail.

    PYTHONPATH=tests python -m mutants [--tested] [WORD ...]

All faults, or those whose name contains a word.

For every fault the sources are copied, a text that must occur exactly once is replaced, and the part of
the tests that ought to notice runs against the copy. A fault that no test notices survives: exit code 1.
A text that does not occur exactly once means that the code has moved on and the fault must follow it:
exit code 2. First of all the copy without a fault must pass; `--tested` says that the tests have just done
so, and leaves that out.

Tests run in forks of this process, which has imported all that takes long and nothing of msa_icp.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from . import (
    bench,
    checks,
    compiled,
    decode,
    exchange,
    exchange_kernels,
    indexer,
    install,
    kernels,
    prefill,
    replay,
    triton_kernels,
)
from .fault import Mutant

TESTS = Path(__file__).resolve().parents[1]
SOURCES = TESTS.parent / "src"
PARALLEL = 2
TAKE_LONG = ("torch.distributed", "numpy", "hypothesis")
"""Imports that most tests need."""
TIMEOUT_S = 40
"""Of one test: a fault may turn a short wait into an endless one. The process then ends there, with exit
code 1: the other way, an exception raised at whatever instruction runs, hits places that have no line
number, and pytest breaks off without a verdict when it words them."""

BASELINE = (
    "test_geometry.py",
    "test_cache.py",
    "test_write_index_keys.py",
    "test_checks.py",
    "test_checks_remembered.py",
    "test_storage.py",
    "test_custom_ops.py",
    "test_exchange_model.py",
    "test_symmetric_memory.py",
    "test_prefill_plan.py",
    "test_index_score_sharded.py",
    "test_topk_select_prefill.py",
    "test_prefill_score_select.py",
    "test_prefill_windows.py",
    "test_exchange_prefill.py",
    "test_replay_engine.py",
    "test_replay_run.py",
    "test_decode_index_score_sharded.py",
    "test_topk_select_publish.py",
    "test_merge_candidates.py",
    "test_exchange.py",
    "test_decode_score_publish.py",
    "test_field_cases.py",
    "test_indexer.py",
    "test_indexer_steps.py",
    "test_indexer_graphs.py",
    "test_indexer_allocations.py",
    "test_graph_query.py",
    "test_launcher.py",
    "test_cuda_order.py",
    "test_polls.py",
    "test_flashinfer_install.py",
    "-k",
    "not million and not production and not threads and not one_limit and not hold_up and not 8192 "
    "and not no_score_rows and not disagree and not test_07 and not what_comes_out and not real_package "
    "and not microseconds",
)

CUDA_BASELINE = (
    "test_cuda_forms.py",
    "test_cuda_late.py",
    "test_polls.py",
    "test_topk_select_publish.py",
    "test_topk_select_prefill.py",
    "test_merge_candidates.py",
    "test_exchange.py",
    "test_decode_score_publish.py",
    "-k",
    "cuda-cpu and (every_form and (1-4-128 or 1-2-256) or not forms)",
)

TRITON_BASELINE = (
    "test_triton_interpreted.py",
    "test_decode_score_publish.py",
    "test_field_cases.py",
    "test_write_index_keys.py",
    "test_triton_compile.py",
    "-k",
    "triton-cpu and (interpreted or rounds or test_07 or big_pitch) or compiles_for and 90",
)

MUTANTS = (
    decode.MUTANTS
    + exchange.MUTANTS
    + checks.MUTANTS
    + compiled.MUTANTS
    + prefill.MUTANTS
    + kernels.MUTANTS
    + exchange_kernels.MUTANTS
    + triton_kernels.MUTANTS
    + indexer.MUTANTS
    + replay.MUTANTS
    + bench.MUTANTS
    + install.MUTANTS
)


@dataclass
class Run:
    """Tests that run against a copy of the sources, in a process of their own."""

    folder: Path
    process: int
    began: float

    @classmethod
    def start(
        cls, folder: Path, tests: tuple[str, ...], *, emulated: bool = False, interpreted: bool = False
    ) -> Run:
        """The tests against `folder / "src"`, up to the first failure."""
        files = [str(TESTS / word) if word.endswith(".py") else word for word in tests]
        options = ["-x", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}", "--timeout-method=thread"]
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            status = 3
            try:
                os.environ["PYTHONPATH"] = str(folder / "src")
                os.environ["EMULATE_CUDA"] = "1" if emulated else "0"
                os.environ["TRITON_INTERPRET"] = "1" if interpreted else "0"
                sys.path.insert(0, str(folder / "src"))
                output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
                status = int(pytest.main([*options, *files]))
                sys.stdout.flush()
            finally:
                os._exit(status)
        return cls(folder, process, time.monotonic())

    def output(self) -> str:
        """What the tests have printed."""
        return (self.folder / "output").read_text(errors="replace")


def copy_sources(folder: Path) -> Path:
    copy = folder / "src"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return copy


def plant(copy: Path, mutant: Mutant) -> str:
    """Make the fault in the copy; why it cannot be made, or an empty text."""
    for file, text, replacement in mutant.edits:
        path = copy / "msa_icp" / file
        source = path.read_text()
        if source.count(text) != 1:
            return f"{file} holds {text!r} {source.count(text)} times"
        path.write_text(source.replace(text, replacement))
    return ""


def verdict_of(mutant: Mutant, run: Run, status: int) -> tuple[str, str]:
    """What became of a fault: 'killed', 'SURVIVED' or 'STALE', and a line about it."""
    failed = [line for line in run.output().splitlines() if line.startswith(("FAILED", "ERROR"))]
    seconds = f"{time.monotonic() - run.began:.1f} s"
    if status == 1:
        return "killed", f"{seconds}  {failed[0].split(' - ')[0] if failed else 'a test took too long'}"
    if status == 0:
        return "SURVIVED", f"{seconds}  {' '.join(mutant.tests)}"
    return "STALE", f"the tests did not run: {run.output()[-500:]}"


def verdicts(chosen: Sequence[Mutant]) -> Iterator[tuple[Mutant, str, str]]:
    """Every fault with its verdict and a line about it, PARALLEL at a time, as they come."""
    waiting = list(reversed(chosen))
    running: dict[int, tuple[Mutant, Run]] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < PARALLEL:
                    mutant = waiting.pop()
                    own = Path(tempfile.mkdtemp(dir=folder))
                    if stale := plant(copy_sources(own), mutant):
                        yield mutant, "STALE", stale
                        continue
                    run = Run.start(
                        own, mutant.tests, emulated=mutant.emulated, interpreted=mutant.interpreted
                    )
                    running[run.process] = mutant, run
                if running:
                    process, status = os.wait()
                    mutant, run = running.pop(process)
                    yield mutant, *verdict_of(mutant, run, os.waitstatus_to_exitcode(status))
                    shutil.rmtree(run.folder)
        finally:
            for process in running:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def without_fault(*, tested: bool) -> bool:
    """Whether the tests run on the copy at all, and, unless they have been `tested`, pass without a fault."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = copy_sources(Path(folder))
        where = subprocess.run(
            [sys.executable, "-c", "import msa_icp; print(msa_icp.__file__)"],
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        if str(copy) not in where:
            print(f"The tests would not run on the copy but on {where}")
            return False
        if tested:
            print("tested before")
            return True
        right = True
        for tests, emulated, interpreted in (
            (BASELINE, False, False),
            (CUDA_BASELINE, True, False),
            (TRITON_BASELINE, False, True),
        ):
            run = Run.start(Path(folder), tests, emulated=emulated, interpreted=interpreted)
            passed = os.waitpid(run.process, 0)[1] == 0
            print(run.output()[-3000:] if not passed else run.output().strip().splitlines()[-1], flush=True)
            (run.folder / "output").unlink()
            right = right and passed
    return right


def main(words: list[str]) -> int:
    tested = "--tested" in words
    words = [word for word in words if word != "--tested"]
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    os.chdir(TESTS.parent)  # where the tests run otherwise
    for name in TAKE_LONG:
        importlib.import_module(name)
    print("Without a fault: ", end="", flush=True)
    if not without_fault(tested=tested):
        return 2
    counts = {"killed": 0, "SURVIVED": 0, "STALE": 0}
    for number, (mutant, verdict, line) in enumerate(verdicts(chosen), 1):
        counts[verdict] += 1
        print(f"[{number:2}/{len(chosen)}] {verdict:8} {mutant.name}: {line}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 2 if counts["STALE"] else int(counts["SURVIVED"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
