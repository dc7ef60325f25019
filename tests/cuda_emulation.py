"""The CUDA backend on CPU tensors: its sources, compiled with g++ over the emulator of tests/cuda_emulator.

`install()` puts the emulator in the place of the loader's launch and lets the backend serve the CPU; the
tests of an op then run over it as over any backend.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from msa_icp import cuda_backend
from msa_icp.cuda_backend.launcher import KernelLaunch
from msa_icp.cuda_backend.loader import Kernel, Variant

REQUESTED = os.environ.get("EMULATE_CUDA") == "1"
"""Whether the tests of this process are to run over the emulator."""
FOLDER = "MSA_ICP_EMULATED_KERNELS"
"""Environment variable that names the folder of compiled kernels."""
EMULATOR = Path(__file__).parent / "cuda_emulator"
FLAGS = ("-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-fno-stack-protector")


def unavailable() -> str | None:
    """None where the emulator can be built, else the reason."""
    return None if shutil.which("g++") else "the emulator of CUDA kernels needs g++"


def _folder() -> Path:
    """Where compiled kernels lie: one folder for this process and those that it starts."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="emulated-kernels-")
        atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)
    return Path(os.environ[FOLDER])


@functools.cache
def library(variant: Variant) -> ctypes.CDLL:
    """A variant, compiled for this machine."""
    text = "\n".join(
        (
            f"#define KERNEL {variant.source}",
            (EMULATOR / "emulator.hpp").read_text().replace("#pragma once", ""),
            variant.text(EMULATOR / "ptx"),
            (EMULATOR / "entry.hpp").read_text(),
        )
    )
    binary = _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not binary.exists():
        own = binary.with_suffix(f".{os.getpid()}")
        command = ["g++", *FLAGS, "-x", "c++", "-", "-o", str(own)]
        built = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if built.returncode != 0:
            raise RuntimeError(f"{variant.name} does not compile for the emulator:\n{built.stderr[:3000]}")
        own.replace(binary)
    loaded = ctypes.CDLL(str(binary))
    loaded.emulate.restype = ctypes.c_char_p
    loaded.emulate.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_bool, ctypes.c_void_p]
    loaded.emulate_late.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong]
    loaded.emulate_late.restype = None
    loaded.emulate_nothing_late.restype = None
    loaded.emulate_watched.argtypes = [ctypes.c_void_p]
    loaded.emulate_watched.restype = ctypes.c_ulonglong
    return loaded


class Late(NamedTuple):
    """Contiguous memory that the predecessor of a dependent launch writes last.

    Every CTA finds `before` there until it has waited and `after` from then on; so does every launch. What a
    kernel writes there is lost.
    """

    tensor: Tensor
    before: Tensor
    after: Tensor


LATE: list[Late] = []
POLLS: Counter[int] = Counter()
"""How often kernels have polled a word, for every address that is a key here."""


def _run(
    self: Kernel, grid: tuple[int, int, int], words: Sequence[int], device: torch.device, dependent: bool
) -> None:
    emulated = library(self.variant)
    emulated.emulate_nothing_late()
    for tensor, before, after in LATE:
        tensor.copy_(before if dependent else after)
        emulated.emulate_late(tensor.data_ptr(), after.data_ptr(), tensor.numel() * tensor.element_size())
    (watched,) = POLLS or (0,)
    emulated.emulate_watched(watched)
    packed = ctypes.create_string_buffer(struct.pack(f"{len(words)}q", *words))
    failed = emulated.emulate((ctypes.c_uint * 3)(*grid), self.threads, dependent, packed)
    if watched:
        POLLS[watched] += emulated.emulate_watched(None)
    if failed is not None:
        raise RuntimeError(f"{self.variant.name}: {failed.decode()}")


def install() -> None:
    """From now on the CUDA backend serves CPU tensors, emulated, and nothing else."""
    _folder()  # before other processes are started
    reason = unavailable()
    cuda_backend.unavailable = lambda device: (
        reason if device.type == "cpu" else "the CUDA backend is emulated in this process"
    )
    Kernel.load = lambda self, device: None  # type: ignore[method-assign]
    Kernel.launch = _run  # type: ignore[method-assign]
    KernelLaunch.__call__ = KernelLaunch.as_a_call  # type: ignore[method-assign]
    Kernel.multiprocessors = staticmethod(lambda device: 1)  # type: ignore[method-assign,assignment]
