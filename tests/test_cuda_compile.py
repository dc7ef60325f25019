"""The CUDA kernels compile without a GPU, spill nothing, and are kept on disk."""

from __future__ import annotations

import errno
import importlib
import os
import re
import subprocess
import sys
import tempfile
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
    first = next(cuda_backend.kernels(["index_score_sharded"]))
    monkeypatch.setattr(cuda_backend, "kernels", lambda: [first])
    code, text = doctor_says(loader.ARCHITECTURE)
    assert code == 1
    assert "products wait for each other" in text


@needs_nvrtc
def test_a_kernel_that_does_not_compile_is_an_error(monkeypatch):
    monkeypatch.setattr(loader.Variant, "text", lambda self: "extern int;")
    first = next(cuda_backend.kernels(["write_index_keys"]))
    monkeypatch.setattr(cuda_backend, "kernels", lambda: [first])
    code, text = doctor_says(loader.ARCHITECTURE)
    assert code == 1
    assert "write_index_keys" in text
    assert "error" in text


def test_without_the_compiler_doctor_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cuda_backend, "_INSTALLED", False)
    code, text = doctor_says(loader.ARCHITECTURE)
    assert code == 1
    assert "msa-icp[cuda13]" in text


@needs_nvrtc
def test_without_the_library_of_the_compiler_the_reason_says_so(monkeypatch):
    """The Python package is there, and what it loads is not."""
    from cuda.bindings import nvrtc

    def missing():
        raise RuntimeError("Failure finding libnvrtc.so\nmore")

    cuda_backend._without_nvrtc.cache_clear()
    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    try:
        assert cuda_backend.not_installed() == (
            "NVRTC cannot be loaded (Failure finding libnvrtc.so); install msa-icp[cuda13] or msa-icp[cuda12]"
        )
        assert doctor_says(loader.ARCHITECTURE)[0] == 1
    finally:
        cuda_backend._without_nvrtc.cache_clear()


@needs_nvrtc
@pytest.mark.parametrize(("served", "enough"), [(12090, False), (13000, True), (14010, True)])
def test_a_driver_that_is_older_than_the_compiler_is_the_reason(monkeypatch, served, enough):
    from cuda.bindings import driver, nvrtc

    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (0, 13, 0))
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (driver.CUresult.CUDA_SUCCESS, served))
    cuda_backend._behind_nvrtc.cache_clear()
    try:
        reason = cuda_backend._behind_nvrtc()
    finally:
        cuda_backend._behind_nvrtc.cache_clear()
    older = "NVRTC is of CUDA 13, and this driver serves CUDA 12; install msa-icp[cuda12]"
    assert reason == (None if enough else older)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "foo", ""])
def test_an_architecture_without_kernels_is_refused_in_a_sentence(architecture):
    code, text = doctor_says(architecture)
    assert code == 1
    assert f"must be sm_90a, was '{architecture}'" in text
    assert len(text.splitlines()) < 4


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_is_whole_and_needs_no_header(source):
    text = loader.assemble(source)
    assert "#include" not in text
    assert text.count(f" {source}(const __grid_constant__ Arguments with)") == 1
    kinds = re.findall(r"^(?:struct|template .*\nstruct)[^;{]* (\w+) \{", text, flags=re.M)
    assert len(kinds) == len(set(kinds)), "a header is there twice"


@needs_nvrtc
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("more", [0, 1], ids=["", "control"])
def test_the_host_launches_what_the_kernel_declares(source, more, monkeypatch):
    """Words of arguments and threads of a CTA; with one word more it does not compile."""
    (kernel, *_) = (kernel for kernel in cuda_backend.kernels() if kernel.variant.source == source)
    real = loader.Variant.text
    checks = (
        f"static_assert(sizeof(Arguments) == 8 * {kernel.words + more});\n"
        f"static_assert(kThreads == {kernel.threads});\n"
    )
    monkeypatch.setattr(loader.Variant, "text", lambda self, *headers: real(self, *headers) + checks)
    if more:
        with pytest.raises(Exception, match="static assertion failed"):
            kernel.variant.report()
    else:
        kernel.variant.report()


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


@pytest.fixture
def fresh_cache(monkeypatch, tmp_path):
    """An empty cache for this test alone; a function that lists its compiled kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loader.kernel_cache.cache_clear()
    yield lambda: [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "tmp"]
    loader.kernel_cache.cache_clear()


def compiled():
    """The code of a kernel, through the cache."""
    kernel = next(cuda_backend.kernels(["write_index_keys"]))
    return bytes(kernel.variant.compile().code)


@needs_nvrtc
def test_a_cache_without_a_folder_is_done_without(fresh_cache, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert loader.kernel_cache() is None
    assert len(compiled()) > 1000


@needs_nvrtc
@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None], ids=["empty", "short", "one byte"])
def test_a_damaged_file_of_the_cache_is_compiled_again(fresh_cache, damage):
    code = compiled()
    (kept,) = fresh_cache()
    whole = kept.read_bytes()
    assert code in whole
    middle = len(whole) // 2
    kept.write_bytes(
        whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :] if damage is None else damage
    )
    assert compiled() == code
    assert fresh_cache() == [kept]
    assert kept.read_bytes() == whole


@needs_nvrtc
@pytest.mark.parametrize("error", [errno.EROFS, errno.ENOSPC, errno.EFBIG], ids=errno.errorcode.get)
def test_a_cache_that_fails_while_it_is_written_is_done_without(fresh_cache, error, monkeypatch):
    """A read-only mount, a full disk, a limit on a file's size."""

    def fails(*arguments, **options):
        raise OSError(error, "no")

    monkeypatch.setattr(tempfile, "mkstemp", fails)
    assert len(compiled()) > 1000
    assert fresh_cache() == []


@needs_nvrtc
def test_a_cache_that_cannot_be_read_is_done_without(fresh_cache, monkeypatch):
    code = compiled()
    (kept,) = fresh_cache()
    kept.unlink()
    kept.mkdir()  # whose reading is an OSError that root gets too
    assert compiled() == code
