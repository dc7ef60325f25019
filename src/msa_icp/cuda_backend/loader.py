"""From a `.cu` file to a launch: sources are put together, compiled through NVRTC, kept on disk, loaded.

A *variant* is a source with its constants; it holds one kernel of the source's name, whose only parameter
is a struct of 64-bit words, `Arguments`. What is loaded is kept here; `launcher.py` makes the launches.
"""

from __future__ import annotations

import functools
import importlib
import io
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..driver_calls import checked
from ..launches import recorder
from .kernel_cache import kernel_cache
from .launcher import KernelLaunch, Launcher

SOURCES = Path(__file__).parent
ARCHITECTURE = "sm_90a"
PTX_HEADERS = SOURCES / "device" / "ptx"

SPREAD = True
"""Whether kernels that ask for it keep their CTAs apart (`spread_bytes`)."""
_SHARED_BYTES = 228 * 1024
"""Shared memory of a multiprocessor."""
_RESERVED_BYTES = 1024
"""What the driver takes of it for every CTA."""
_SHARED_UNIT = 128
_RESIDENT_THREADS = 2048
"""Threads of a multiprocessor, which bound its CTAs where shared memory does not."""

_SERIALIZED = r"C7510|C7518"
"""Notices of the assembler."""
_importing = threading.Lock()
_INCLUDE = re.compile(r'#include "(.+)"')


def assemble(source: str, ptx_headers: Path = PTX_HEADERS) -> str:
    """The text of `<source>.cu` with every header in its place, once: what NVRTC and its cache are given.

    `ptx_headers` is where the headers of device/ptx are taken from.
    """
    done: set[Path] = set()

    def text_of(path: Path) -> str:
        if path in done:
            return ""
        done.add(path)
        lines = []
        for line in path.read_text().splitlines():
            include = _INCLUDE.fullmatch(line)
            if include is None:
                lines.append(line)
                continue
            header = (path.parent / include[1]).resolve()
            lines.append(text_of(ptx_headers / header.name if header.parent == PTX_HEADERS else header))
        return "\n".join(lines)

    return text_of(SOURCES / f"{source}.cu") + "\n"


@dataclass(frozen=True)
class Report:
    """What the compiler says of a variant, in a thread's registers and in bytes."""

    registers: int
    shared: int
    spills: int
    serialized: bool
    """Whether the matrix products of warp groups wait for each other: the compiler could not tell where
    their registers are used."""


@dataclass(frozen=True)
class Variant:
    """A source and the constants that it is compiled with."""

    source: str
    constants: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        """For a reader."""
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.constants)])

    def text(self, ptx_headers: Path = PTX_HEADERS) -> str:
        """The whole source."""
        defines = "".join(f"#define {name} {value}\n" for name, value in self.constants)
        return defines + assemble(self.source, ptx_headers)

    def compile(self, architecture: str = ARCHITECTURE) -> Any:
        """The compiled program (`cuda.core.ObjectCode`), from the disk cache where it is there."""
        program = _cuda_core().Program(self.text(), "c++", self._options(architecture))
        return program.compile("cubin", cache=kernel_cache())

    def report(self, architecture: str = ARCHITECTURE) -> Report:
        """Compile, past the cache, and read what the assembler reports. Needs no GPU."""
        log = io.StringIO()
        options = self._options(architecture, ptxas_options="-v")
        _cuda_core().Program(self.text(), "c++", options).compile("cubin", logs=log)
        return Report(
            registers=_sum(r"Used (\d+) registers", log.getvalue()),
            shared=_sum(r"(\d+) bytes smem", log.getvalue(), needed=False),
            spills=_sum(r"(\d+) bytes spill (?:stores|loads)", log.getvalue()),
            serialized=re.search(_SERIALIZED, log.getvalue()) is not None,
        )

    def _options(self, architecture: str, **more: Any) -> Any:
        return _cuda_core().ProgramOptions(name=self.source, arch=architecture, std="c++17", **more)


def _sum(pattern: str, log: str, *, needed: bool = True) -> int:
    found = re.findall(pattern, log)
    if needed and not found:
        raise RuntimeError(f"the compiler's report has no {pattern!r}:\n{log}")
    return sum(map(int, found))


def _cuda_core() -> Any:
    """`cuda.core`. A second thread that imports it at the same time can see it half made, and raise."""
    with _importing:
        return importlib.import_module("cuda.core")


@functools.cache
def spread_bytes(ctas: int, multiprocessors: int, threads: int, static_bytes: int) -> int:
    """Dynamic shared memory that keeps the CTAs of a launch apart, `threads` and `static_bytes` each.

    The CTAs of a dependent launch are placed while its predecessor ends, wherever there is room first, and
    many of them would come to lie on a few multiprocessors. With this each holds its share at most, the least
    with which all of them together hold the launch. What can be is left to the kernels before and after.
    """
    share = -(-ctas // multiprocessors)
    if share * threads >= _RESIDENT_THREADS:
        return 0
    each = (_SHARED_BYTES // (share + 1) // _SHARED_UNIT + 1) * _SHARED_UNIT
    return max(0, each - _RESERVED_BYTES - static_bytes)


class Kernel:
    """A variant that can be launched."""

    def __init__(
        self,
        variant: Variant,
        threads: int,
        words: int,
        shared_bytes: int = 0,
        *,
        takes_query: bool = False,
        spread: bool = False,
    ) -> None:
        """`words` of arguments, `shared_bytes` of dynamic shared memory.

        `takes_query`: the first two words are the addresses of the query and the K shard.
        `spread`: the kernel is given as much dynamic shared memory as keeps its CTAs apart, used or not.
        """
        if spread and shared_bytes:
            raise ValueError("a kernel that is spread has no dynamic shared memory of its own")
        self.variant = variant
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.takes_query = takes_query
        self.spread = spread
        self.words = words
        self._static_bytes = 0  # of shared memory; known once it is loaded
        self._loaded: dict[int, Any] = {}
        self._code: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._launchers = threading.local()

    def __call__(
        self, grid: tuple[int, int, int], words: Sequence[int], device: torch.device, *, dependent: bool
    ) -> None:
        """Launch on the current stream of `device`; `dependent` means programmatic dependent launch."""
        if recorder.launches is None:
            self.launch(grid, words, device, dependent)
        else:
            recorder.launches.append(KernelLaunch(self, grid, words, device, dependent))

    def launch(
        self, grid: tuple[int, ...], words: Sequence[int], device: torch.device, dependent: bool
    ) -> None:
        """Launch, whether the thread records or not."""
        # What `torch.cuda.current_device` and Triton's launcher ask; `current_stream` makes an object, 1 us.
        current = torch._C._cuda_getDevice()
        index = device.index
        if index is not None and index != current:
            with torch.cuda.device(device):
                self.launch(grid, words, device, dependent)
            return
        function = self._loaded.get(index)
        if function is None:
            function = self.load(device)
        stream = torch._C._cuda_getCurrentRawStream(current)
        self._launcher(dependent)(function, grid, words, stream, self.dynamic_bytes(grid, device))

    def dynamic_bytes(self, grid: tuple[int, ...], device: torch.device) -> int:
        """Dynamic shared memory of a launch, once the kernel is loaded."""
        if not (self.spread and SPREAD):
            return self.shared_bytes
        ctas = grid[0] * grid[1] * grid[2]
        return spread_bytes(ctas, self.multiprocessors(device), self.threads, self._static_bytes)

    def _launcher(self, dependent: bool) -> Launcher:
        """This thread's."""
        mine = self._launchers
        try:
            return mine.dependent if dependent else mine.plain  # type: ignore[no-any-return]
        except AttributeError:
            # A thread that has not used CUDA yet has no context, and torch need not have given it one.
            _cuda_core().Device(torch.cuda.current_device()).set_current()
            mine.dependent, mine.plain = (Launcher(self, dependent=flag) for flag in (True, False))
            return self._launcher(dependent)

    @staticmethod
    @functools.cache
    def multiprocessors(device: torch.device) -> int:
        """Multiprocessors of a device."""
        return int(torch.cuda.get_device_properties(device).multi_processor_count)

    def load(self, device: torch.device) -> Any:
        """The kernel's function on `device`; compiled and loaded where that has not been done."""
        if device.index in self._loaded:
            return self._loaded[device.index]
        with self._lock, torch.cuda.device(-1 if device.index is None else device.index):
            if device.index not in self._loaded:
                if torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        f"{self.variant.source} is not loaded on {device} yet, and nothing can be loaded "
                        f"while a CUDA graph is captured: call msa_icp.warmup({str(device)!r}) before"
                    )
                self._loaded[device.index] = self._load(device.index)
            return self._loaded[device.index]

    def _load(self, index: int) -> Any:
        from cuda.bindings import driver

        _cuda_core().Device(index).set_current()
        code = self._code[index] = self.variant.compile()  # owns what the function is part of
        kernel = driver.CUkernel(int(code.get_kernel(self.variant.source).handle))
        function = checked(driver.cuKernelGetFunction(kernel))
        checked(driver.cuFuncLoad(function))  # libraries load lazily, and a peer may be waiting then
        attribute = driver.CUfunction_attribute
        # One split between L1 and shared memory for all: a multiprocessor must be empty to change it, so a
        # launch that wants another one could not overlap with the one before.
        carveout = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        checked(driver.cuFuncSetAttribute(function, carveout, 100))
        static = attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        self._static_bytes = int(checked(driver.cuFuncGetAttribute(static, function)))
        most = spread_bytes(1, 1, self.threads, self._static_bytes) if self.spread else self.shared_bytes
        if most:
            limit = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, limit, most))
        return function
