"""The CUDA kernels compile without a GPU, spill nothing, and are kept on disk."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from msa_icp import cuda_backend, doctor
from msa_icp.cuda_backend import loader

needs_nvrtc = pytest.mark.skipif(
    cuda_backend.not_installed() is not None, reason=str(cuda_backend.not_installed())
)
SOURCES = sorted(path.stem for path in loader.SOURCES.glob("*.cu"))


def doctor_says(architecture: str) -> tuple[int, str]:
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=200, file=nowhere)
        code = doctor.compile_kernels(console, architecture)
    return code, console.export_text()


@needs_nvrtc
def test_every_kernel_compiles_and_none_spills():
    code, text = doctor_says(loader.ARCHITECTURE)
    assert code == 0, text
    for kernel in cuda_backend.kernels():
        row = re.search(rf"│ {re.escape(kernel.variant.name)}\D+(\d+)\D+(\d+)\D+(\d+)", text)
        assert row, kernel.variant.name
        registers, _, spills = map(int, row.groups())
        assert 8 < registers <= 255
        assert spills == 0
    assert {kernel.variant.source for kernel in cuda_backend.kernels()} == set(SOURCES)


@needs_nvrtc
def test_a_spill_is_an_error(monkeypatch):
    scorer = importlib.import_module("msa_icp.cuda_backend.decode_index_score_sharded")
    crowded = scorer.kernel_for((128, 4), 4, scorer.Form(2, 8, 2, False, 0))
    monkeypatch.setattr(cuda_backend, "kernels", lambda: [crowded])
    code, text = doctor_says(loader.ARCHITECTURE)
    assert code == 1
    assert re.search(r"RESIDENT=8\D+\d+\D+\d+\D+[1-9]", text), text


@needs_nvrtc
def test_products_that_wait_for_each_other_are_an_error(monkeypatch):
    """A branch around the products, and the compiler cannot tell where their registers are used."""
    real = loader.Variant.text

    def branching(self, *arguments):
        source = real(self, *arguments)
        for before in ("    begin_products();\n", "    wait_for_products(sums);\n"):
            assert source.count(before) == 1
            source = source.replace(before, f"    if (piece.seen[group] > 9) {{\n{before}")
        return source.replace("    end_products();\n", "    end_products();\n    }\n").replace(
            "    wait_for_products(sums);\n", "    wait_for_products(sums);\n    }\n"
        )

    monkeypatch.setattr(loader.Variant, "text", branching)
    monkeypatch.setattr(cuda_backend, "kernels", lambda: [*cuda_backend._prefill_score_kernels()][:1])
    code, text = doctor_says(loader.ARCHITECTURE)
    assert code == 1
    assert "products wait for each other" in text


@needs_nvrtc
def test_a_kernel_that_does_not_compile_is_an_error(monkeypatch):
    monkeypatch.setattr(loader.Variant, "text", lambda self: "extern int;")
    monkeypatch.setattr(cuda_backend, "kernels", lambda: [*cuda_backend._write_kernels()][:1])
    code, text = doctor_says(loader.ARCHITECTURE)
    assert code == 1
    assert "write_index_keys" in text
    assert "error" in text


def test_without_the_compiler_doctor_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cuda_backend, "_INSTALLED", False)
    code, text = doctor_says(loader.ARCHITECTURE)
    assert code == 1
    assert "msa-icp[cuda13]" in text


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_is_whole_and_needs_no_header(source):
    text = loader.assemble(source)
    assert "#include" not in text
    assert text.count(f" {source}(const __grid_constant__ Arguments with)") == 1
    kinds = re.findall(r"^(?:struct|template .*\nstruct)[^;{]* (\w+) \{", text, flags=re.M)
    assert len(kinds) == len(set(kinds)), "a header is there twice"


def test_a_spread_launch_fits_at_once_and_no_denser():
    """228 KB a multiprocessor, of which a CTA takes 1 KB more than it has."""
    for ctas in (1, 4, 131, 132, 133, 256, 264, 265, 1024, 132 * 15, 132 * 15 + 1, 5000):
        for static_bytes in (0, 700, 6500):
            dynamic = loader.spread_bytes(ctas, 132, 128, static_bytes)
            each = dynamic + static_bytes + 1024
            share = -(-ctas // 132)
            if dynamic:
                assert share * each <= 228 * 1024 < (share + 1) * each
                assert dynamic + static_bytes <= 227 * 1024
            else:
                assert share >= 16 or (share + 1) * each > 228 * 1024
    assert loader.spread_bytes(132, 132, 128, 6500) < loader.spread_bytes(1, 1, 128, 0) < 117 * 1024


COMPILE = """
from msa_icp import cuda_backend
kernel = next(k for k in cuda_backend.kernels() if k.variant.source == "merge_candidates")
code = kernel.variant.compile()
print(len(bytes(code.code)))
"""


@needs_nvrtc
def test_compiled_kernels_are_kept_and_shared_by_processes(tmp_path):
    """Two processes at once from an empty cache, then a third one that finds what they left."""
    environment = dict(
        os.environ,
        XDG_CACHE_HOME=str(tmp_path),
        PYTHONPATH=os.pathsep.join([str(loader.SOURCES.parents[1]), os.environ.get("PYTHONPATH", "")]),
    )

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", COMPILE],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    outputs = []
    for process in [start(), start()]:
        outputs.append(process.communicate(timeout=120)[0])
        assert process.returncode == 0, outputs[-1]
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert len(kept) == 1, kept
    before = kept[0].stat().st_mtime_ns
    later = start()
    outputs.append(later.communicate(timeout=120)[0])
    assert later.returncode == 0, outputs[-1]
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 1000] == kept
    assert kept[0].stat().st_mtime_ns == before, "compiled again"
    assert len({output.split()[-1] for output in outputs}) == 1


@needs_nvrtc
def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    loader._disk_cache.cache_clear()
    try:
        assert loader._disk_cache() is None
        kernel = next(k for k in cuda_backend.kernels() if k.variant.source == "write_index_keys")
        assert len(bytes(kernel.variant.compile().code)) > 1000
    finally:
        loader._disk_cache.cache_clear()
