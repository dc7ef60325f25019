"""Launches of the CUDA backend over a driver that notes what it is given: no GPU, no kernel."""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from contextlib import contextmanager

import cuda_emulation
import driver_stand_in
import pytest
import torch

from msa_icp.cuda_backend.loader import Kernel, Variant
from msa_icp.launches import launch, recording

pytestmark = pytest.mark.skipif(cuda_emulation.REQUESTED, reason="the emulator takes the launcher's place")

WORDS = 5
GRID = (3, 2, 1)
DEVICES = [torch.device("cuda", index) for index in range(2)]


class Machine:
    """Two devices, and the launches that reach them.

    Attributes:
        launched: a dictionary of each.
        current: the current device.
        streams: the current stream of each device, an address.
        configs: how many structs of the driver have been made.
        by_call: how many launches came as those of an eager call.
        refuse: whether the driver does.
    """

    CUresult = driver_stand_in.CUresult

    def __init__(self) -> None:
        self.launched: list[dict] = []
        self.current = 0
        self.streams = [70, 71]
        self.configs = self.by_call = 0
        self.refuse = False
        self.contexts = threading.local()
        self.CUlaunchAttributeID = types.SimpleNamespace(
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="dependent"
        )

    def CUlaunchConfig(self):
        self.configs += 1
        return types.SimpleNamespace(attrs=[], numAttrs=0, hStream=None)

    def CUlaunchAttribute(self):
        return types.SimpleNamespace(value=types.SimpleNamespace())

    def CUstream(self, address):
        return address

    def cuGetErrorString(self, status):
        return self.CUresult.CUDA_SUCCESS, b"refused"

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        if self.refuse:
            return (self.CUresult.CUDA_ERROR_INVALID_VALUE,)
        at = ctypes.c_void_p.from_address(parameters).value
        self.launched.append(
            {
                "function": function,
                "words": tuple((ctypes.c_int64 * WORDS).from_address(at)),
                "grid": (config.gridDimX, config.gridDimY, config.gridDimZ),
                "block": (config.blockDimX, config.blockDimY, config.blockDimZ),
                "shared": config.sharedMemBytes,
                "stream": config.hStream,
                "dependent": [attribute.id for attribute in config.attrs[: config.numAttrs]],
                "device": self.current,
                "context": getattr(self.contexts, "device", None),
            }
        )
        return (self.CUresult.CUDA_SUCCESS,)

    @contextmanager
    def on(self, device):
        before, self.current = self.current, device.index
        self.contexts.device, outer = device.index, getattr(self.contexts, "device", None)
        try:
            yield
        finally:
            self.current, self.contexts.device = before, outer

    def Device(self, index):
        def set_current():
            self.contexts.device = index

        return types.SimpleNamespace(set_current=set_current)

    def kernel(self, *, takes_query=True):
        """One that is loaded on both devices."""
        kernel = Kernel(Variant("some_kernel", ()), 64, WORDS, 1024, takes_query=takes_query)
        kernel._loaded = {0: "function 0", 1: "function 1"}
        return kernel


@pytest.fixture
def machine(monkeypatch):
    found = Machine()
    driver_stand_in.install(monkeypatch, found)
    core = types.ModuleType("cuda.core")
    core.Device = found.Device
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: found.current, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: found.streams[index], raising=False
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.current)
    monkeypatch.setattr(torch.cuda, "device", found.on)
    own = Kernel.launch

    def counted(self, *arguments):
        found.by_call += 1
        own(self, *arguments)

    monkeypatch.setattr(Kernel, "launch", counted)
    return found


def recorded(kernel, words, device=DEVICES[0], *, dependent=True):
    with recording() as launches:
        kernel(GRID, words, device, dependent=dependent)
    (one,) = launches
    return one


def query_and_keys():
    return torch.zeros(4, 4, 128, dtype=torch.uint8), torch.zeros(9, 128, dtype=torch.uint8)


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("window", [None, (2, 4)])
def test_every_launch_of_a_recorded_one_is_that_of_a_call(machine, dependent, window):
    kernel = machine.kernel()
    one = recorded(kernel, (1, 2, 3, -4, 1 << 40), dependent=dependent)
    one.window = window
    for layer in range(5):
        query, keys = query_and_keys()
        machine.streams[0] = 80 + layer // 2
        one.bind(query, keys)
        one()
        first = 0 if window is None else 2 * 4 * 128
        words = (query.data_ptr() + first, keys.data_ptr(), 3, -4, 1 << 40)
        kernel(GRID, words, DEVICES[0], dependent=dependent)
        ours, calls = machine.launched[-2:]
        assert ours == calls
        assert ours["words"] == words
        assert ours["stream"] == 80 + layer // 2
        assert ours["dependent"] == ["dependent"] * dependent
        assert (ours["grid"], ours["block"], ours["shared"]) == (GRID, (64, 1, 1), 1024)


def test_what_is_launched_again_has_structs_of_its_own_and_then_makes_no_more(machine):
    kernel = machine.kernel()
    one, other = recorded(kernel, (1, 2, 3, 4, 5)), recorded(kernel, (1, 2, 6, 7, 8))
    launch([one])
    once = machine.configs  # those of the thread
    launch([one, other, other])
    assert machine.configs == once + 2
    calls = machine.by_call
    for _ in range(3):
        launch([one, other])
    assert (machine.configs, machine.by_call) == (once + 2, calls)
    assert [seen["words"] for seen in machine.launched[-6:]] == [(1, 2, 3, 4, 5), (1, 2, 6, 7, 8)] * 3


def test_a_launch_without_a_query_is_bound_to_none(machine):
    one = recorded(machine.kernel(takes_query=False), (1, 2, 3, 4, 5))
    for _ in range(4):
        one.bind(*query_and_keys())
        one()
    assert {seen["words"] for seen in machine.launched} == {(1, 2, 3, 4, 5)}


def test_the_stream_is_asked_for_at_every_launch(machine):
    one = recorded(machine.kernel(), (1, 2, 3, 4, 5))
    streams = [70, 70, 70, 90, 90, 70, 91]
    for machine.streams[0] in streams:
        one()
    assert [seen["stream"] for seen in machine.launched] == streams


def test_a_thread_that_has_not_used_cuda_gets_a_context(machine):
    one = recorded(machine.kernel(), (1, 2, 3, 4, 5))
    for _ in range(3):
        one()
    before = len(machine.launched)

    def twice():
        one()
        one()

    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
    assert [seen["context"] for seen in machine.launched[before:]] == [0, 0]


def test_a_launch_goes_to_its_device_whichever_is_current(machine):
    one = recorded(machine.kernel(), (1, 2, 3, 4, 5), DEVICES[1])
    for machine.current in (1, 0, 1, 1, 0, 0, 1):
        before = machine.current
        one()
        seen = machine.launched[-1]
        assert (seen["device"], seen["stream"], seen["function"]) == (1, 71, "function 1")
        assert machine.current == before


@pytest.mark.parametrize("launches", range(4))
def test_what_the_driver_refuses_is_an_error_and_the_next_launch_is_right(machine, launches):
    one = recorded(machine.kernel(), (1, 2, 3, 4, 5))
    for _ in range(launches):
        one()
    machine.refuse = True
    query, keys = query_and_keys()
    one.bind(query, keys)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE: refused"):
        one()
    machine.refuse = False
    one()
    assert machine.launched[-1]["words"] == (query.data_ptr(), keys.data_ptr(), 3, 4, 5)
    assert len(machine.launched) == launches + 1
