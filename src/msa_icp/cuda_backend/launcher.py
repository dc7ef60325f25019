"""Launching a kernel that is loaded: what the driver takes is kept, and only what changes is set.

A *launcher* holds the driver's structs and a kernel's arguments, `words` 64-bit ones, of launches that no two
threads make at a time. An eager call packs its words into the launcher of its thread. A recorded launch
(`launches.py`) that is launched again has one of its own, where a layer changes two words.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..driver_calls import checked
from ..launches import Launch

if TYPE_CHECKING:
    from .loader import Kernel

_C = torch._C


class Launcher:
    """Launches of one kernel, with or without programmatic dependent launch.

    A field of the driver's structs is set when it changes, and not before.

    Attributes:
        words: the arguments.
        stream: of the last launch, an address; None before the first.
        launch, config, address: `launch(config, function, address, 0)` launches `function` with them.
        success: what it answers first where that went well.
    """

    __slots__ = (
        "_grid",
        "_pack_into",
        "_parameters",
        "_shared_bytes",
        "_stream_type",
        "address",
        "config",
        "launch",
        "stream",
        "success",
        "words",
    )

    def __init__(self, kernel: Kernel, *, dependent: bool) -> None:
        from cuda.bindings import driver

        self.launch = driver.cuLaunchKernelEx
        self.success = driver.CUresult.CUDA_SUCCESS
        self._stream_type = driver.CUstream
        self.words = array("q", bytes(8 * kernel.words))
        self._pack_into = struct.Struct(f"{kernel.words}q").pack_into
        self._parameters = array("q", [self.words.buffer_info()[0]])  # of the kernel's only one
        self.address = self._parameters.buffer_info()[0]
        self.config = config = driver.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        if dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        self._grid: tuple[int, ...] = ()
        self._shared_bytes = 0
        self.stream: int | None = None

    def __call__(
        self, function: Any, grid: tuple[int, ...], words: Sequence[int], stream: int, shared_bytes: int
    ) -> None:
        """Launch a kernel's function, with `shared_bytes` of dynamic shared memory."""
        self._pack_into(self.words, 0, *words)
        if grid != self._grid or shared_bytes != self._shared_bytes:
            self._set_grid(grid, shared_bytes)
        if stream != self.stream:
            self.set_stream(stream)
        answer = self.launch(self.config, function, self.address, 0)
        if answer[0] is not self.success:
            checked(answer)

    def _set_grid(self, grid: tuple[int, ...], shared_bytes: int) -> None:
        """Of the launches from now on."""
        self.config.gridDimX, self.config.gridDimY, self.config.gridDimZ = self._grid = grid
        self.config.sharedMemBytes = self._shared_bytes = shared_bytes

    def set_stream(self, stream: int) -> None:
        """Of the launches from now on."""
        self.config.hStream, self.stream = self._stream_type(stream), stream


class _OwnLauncher(Launcher):
    """That of one recorded launch: it keeps the function, and all arguments but those of a layer."""

    __slots__ = ("device", "function")

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        words: Sequence[int],
        device: torch.device,
        dependent: bool,
    ) -> None:
        super().__init__(kernel, dependent=dependent)
        self.function = kernel.load(device)
        self.device = device.index
        self._pack_into(self.words, 0, *words)
        self._set_grid(grid, kernel.dynamic_bytes(grid, device))


class _Thread(threading.local):
    has_context = False
    """Whether the thread has launched: one that has not used CUDA yet has no context."""


_thread = _Thread()


class KernelLaunch(Launch):
    """A recorded launch of a kernel.

    The first one is made as that of an eager call, which may be all that it is recorded for. The second one
    gives it a launcher of its own. From the third on two words are written, those that `bind` changes.
    """

    __slots__ = ("_dependent", "_device", "_kernel", "_launched", "_own")

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        words: Sequence[int],
        device: torch.device,
        dependent: bool,
    ) -> None:
        """Arguments of `Kernel.launch`."""
        # Not through `super`, for an eager call of the facade makes three of them: 0.3 us.
        self.name = kernel.variant
        self.grid = grid
        self.arguments = list(words)
        self.takes_query = kernel.takes_query
        self.window = None
        self._addresses = True
        self._kernel = kernel
        self._device = device
        self._dependent = dependent
        self._launched = False
        self._own: _OwnLauncher | None = None

    def __call__(self) -> None:
        """Launch on the current stream of its device."""
        own = self._own
        if own is None or not _thread.has_context or _C._cuda_getDevice() != own.device:
            self._launch_and_keep()
            return
        stream = _C._cuda_getCurrentRawStream(own.device)
        if self.takes_query:
            words, arguments = own.words, self.arguments
            words[0], words[1] = arguments[0], arguments[1]
        if stream != own.stream:
            own.set_stream(stream)
        answer = own.launch(own.config, own.function, own.address, 0)
        if answer[0] is not own.success:
            checked(answer)

    def key(self) -> tuple[Any, ...]:
        """As of any launch; one that starts before its predecessor has ended is another launch."""
        return self._dependent, *super().key()

    def as_a_call(self) -> None:
        """Launch as an eager call does: load, go to the device, give the thread a context, as is needed."""
        self._kernel.launch(self.grid, self.arguments, self._device, self._dependent)

    def _launch_and_keep(self) -> None:
        """The first and the second launch, and those of a thread or on a device that is new to this one."""
        self.as_a_call()
        _thread.has_context = True
        if self._launched and self._own is None:
            self._own = _OwnLauncher(self._kernel, self.grid, self.arguments, self._device, self._dependent)
        self._launched = True
