"""Launching the kernels: what is compiled, what is loaded, and what one launch needs.

A kernel is compiled from the types that its signature declares, never from the arguments of a call: no
stride, size or address can ask for another compilation. What is loaded is kept here, so that one launch
is a dictionary look-up and a call into Triton's launcher.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launches import Launch, recorder

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run interpreted, on CPU tensors; Triton reads TRITON_INTERPRET at their definition."""

# Types of kernel parameters.
I32 = tl.int32
I64 = tl.int64
BYTES = tl.pointer_type(tl.uint8)
INTS = tl.pointer_type(tl.int32)
LONGS = tl.pointer_type(tl.int64)
FLOATS = tl.pointer_type(tl.float32)
_TORCH_DTYPES = {
    tl.uint8: torch.uint8,
    tl.int32: torch.int32,
    tl.int64: torch.int64,
    tl.float32: torch.float32,
}


@dataclass(frozen=True)
class Target:
    """What the kernels need to know of a device before they are compiled."""

    e4m3: str
    """How e4m3 becomes fp16: see e4m3.py."""
    dependent_launch: bool
    """Whether programmatic dependent launch exists."""
    dot_rows: int
    """Fewest query rows that a matrix instruction takes."""
    multiprocessors: int
    small_shared_memory: bool = False
    """Whether a multiprocessor has at most about 100 KiB of it."""
    warp_group: bool = False
    """Whether a matrix instruction is one of four warps that takes an operand from their registers."""

    @staticmethod
    def of_capability(backend: str, capability: int, multiprocessors: int) -> Target:
        """The target of a CUDA compute capability (times ten), or of an AMD device."""
        if backend != "cuda":
            return Target("integer", False, 16, multiprocessors, True)
        return Target(
            "hardware" if capability >= 89 else "packed",
            capability >= 90,
            8,
            multiprocessors,
            capability in (86, 89) or capability >= 120,
            capability == 90,
        )


if INTERPRETED:

    def trip_count(count):
        """A bound of `tl.range`: from NumPy 2.4 on the interpreter's takes no tensor."""
        return int(count.handle.data.item()) if isinstance(count, tl.tensor) else count

else:

    @triton.jit
    def trip_count(count):
        """A bound of `tl.range`."""
        return count


@cache
def target_of(device: torch.device) -> Target:
    """The target of a device; the interpreter's is that of a small one."""
    if INTERPRETED or device.type == "cpu":
        return Target("integer", False, 8, 1)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Target.of_capability("hip", 0, properties.multi_processor_count)
    return Target.of_capability(
        "cuda", 10 * properties.major + properties.minor, properties.multi_processor_count
    )


class Kernel:
    """A Triton kernel with its launch options; see `kernel`."""

    def __init__(
        self, function: Callable[..., None], aligned: Sequence[str], threads: int, registers: int | None
    ) -> None:
        parameters = inspect.signature(function).parameters.values()
        self.types = {p.name: p.annotation for p in parameters if p.annotation is not tl.constexpr}
        self.constants = [p.name for p in parameters if p.annotation is tl.constexpr]
        self.pointers = sum(isinstance(kind, tl.pointer_type) for kind in self.types.values())
        self.aligned = tuple(aligned)
        self.takes_query = tuple(self.types)[:2] in (("index_q", "index_k"), ("q", "k"))
        plain = [name for name in self.types if name not in aligned]
        self.function = triton.jit(function, do_not_specialize=plain, do_not_specialize_on_alignment=plain)
        self.threads = threads
        self.registers = registers
        self._loaded: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        constants: tuple[Any, ...],
        device: torch.device,
    ) -> None:
        """Launch on the current stream of `device`; `constants` are what the constexpr parameters are."""
        if recorder.launches is None:
            self.launch(grid, arguments, constants, device)
            return

        def again(grid: tuple[int, ...], arguments: list[Any]) -> None:
            self.launch(grid, arguments, constants, device)

        recorder.launches.append(
            Launch(
                (self.function.__name__, constants),
                again,
                arguments,
                grid=grid,
                takes_query=self.takes_query,
                addresses=False,
            )
        )

    def launch(
        self,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        constants: tuple[Any, ...],
        device: torch.device,
    ) -> None:
        """Launch, whether the thread records or not."""
        if INTERPRETED:
            own = map(_interpreted, arguments, self.types.values())
            self.function[tuple(map(int, grid))](*own, *map(_plain, constants))
            return
        if device.index is not None and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.launch(grid, arguments, constants, device)
            return
        launch = self._loaded.get((device.index, constants))
        if launch is None:
            launch = self.load(constants, device)
        # An address saves the launcher the look into the tensor, and fp8 its way through uint8.
        addresses = map(Tensor.data_ptr, arguments[: self.pointers])
        launch(device, (*grid, 1, 1)[:3], (*addresses, *arguments[self.pointers :], *constants))

    def load(self, constants: tuple[Any, ...], device: torch.device) -> Any:
        """What launches the variant of these constants; compiled and loaded where it is not yet."""
        if INTERPRETED:
            return None
        key = (device.index, constants)
        if key not in self._loaded:
            with torch.cuda.device(-1 if device.index is None else device.index):
                if torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        f"{self.function.__name__} is not loaded on {device} yet, and nothing can be loaded "
                        f"while a CUDA graph is captured: call msa_icp.warmup({str(device)!r}) before"
                    )
                self._loaded[key] = _launcher(self.compile(constants))
        return self._loaded[key]

    def compile(self, constants: tuple[Any, ...]) -> Any:
        """The compiled kernel for Triton's current target, not loaded yet."""
        values = dict(zip(self.constants, map(_plain, constants), strict=True))
        samples = [_sample(kind) for kind in self.types.values()]
        backend = triton.runtime.driver.active.get_current_target().backend
        return self.function.warmup(*samples, grid=(1,), **values, **self.options(backend, values))

    def options(self, backend: str, values: dict[str, Any]) -> dict[str, Any]:
        """Triton's options for a variant; loads are issued where the kernel says, so no loop is pipelined."""
        warp = 32 if backend == "cuda" else 64
        options: dict[str, Any] = {"num_warps": max(1, self.threads // warp), "num_stages": 1}
        if backend == "cuda":
            options["maxnreg"] = self.registers
            options["launch_pdl"] = bool(values.get("DEPENDENT"))
        return options


def _launcher(compiled: Any) -> Callable[[torch.device, tuple[int, ...], tuple[Any, ...]], None]:
    """Load a compiled kernel; returns `launch(device, grid, words)`, on the current stream of `device`.

    That is `compiled[grid](*words)` without what Triton prepares in every launch for a profiler, 1.7 of 3.8
    us of its host time (docs/performance.md). Where a profiler listens, it is done that way.
    """
    run = compiled.run  # this loads the binary
    function, metadata = compiled.function, compiled.packed_metadata
    driver, hooks = triton.runtime.driver, triton.knobs.runtime

    def launch(device: torch.device, grid: tuple[int, ...], words: tuple[Any, ...]) -> None:
        if _is_listened_to(hooks.launch_enter_hook) or _is_listened_to(hooks.launch_exit_hook):
            compiled[grid](*words)
        else:
            stream = driver.active.get_current_stream(device.index)
            run(*grid, stream, function, metadata, None, None, None, *words)

    return launch


def _is_listened_to(hook: Any) -> bool:
    """Whether somebody hooks launches: `hook` is a chain of functions, or one that was put in its place."""
    return bool(getattr(hook, "calls", hook))


def kernel(
    *, threads: int, aligned: Sequence[str] = (), registers: int | None = None
) -> Callable[[Callable[..., None]], Kernel]:
    """Make a kernel of a function whose parameters are annotated with the types above or `tl.constexpr`.

    Pointers come first, constants last. `aligned` names the pointers that are always 16-byte aligned,
    `registers` is the most that a thread may use.
    """
    return lambda function: Kernel(function, aligned, threads, registers)


def _sample(kind: Any) -> Any:
    return _TORCH_DTYPES[kind.element_ty] if isinstance(kind, tl.pointer_type) else 0


def _interpreted(argument: Any, kind: Any) -> Any:
    """What the interpreter takes: it goes by a tensor's dtype, the compiled kernel by its declaration."""
    if isinstance(argument, Tensor):
        return argument.view(_TORCH_DTYPES[kind.element_ty])
    return _plain(argument)


def _plain(number: Any) -> Any:
    """Python's integer of NumPy's, of which neither Triton's compiler nor its interpreter knows."""
    return int(number) if isinstance(number, Integral) and not isinstance(number, int) else number
