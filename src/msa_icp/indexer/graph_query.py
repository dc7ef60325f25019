"""Where the kernels of a captured graph read the query, and how it is made another place before a replay.

A graph is captured over a staging buffer, which nothing else has an address of. So a 64-bit word of a
kernel's parameters that points into it is the query's, whichever backend launched the kernel. The driver
writes another address there, and only when the query has moved; a copy into the buffer takes more of the
host than the replay itself, and a launch on the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..driver_calls import checked

_WORD = 8
_KNOWS_PARAMETERS = 12040
"""The first driver that tells the sizes of a kernel's parameters."""


@cache
def can_be_moved() -> bool:
    """Whether the query of a graph can be: with CUDA 12.4, `cuda.bindings`, a torch that shows its graphs."""
    if torch.version.cuda is None or not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec"):
        return False
    try:
        from cuda.bindings import driver
    except ImportError:  # Triton alone needs none
        return False
    return bool(checked(driver.cuDriverGetVersion()) >= _KNOWS_PARAMETERS)


class _Reader:
    """A kernel of a graph that reads the query: its parameters, with the words to be changed."""

    def __init__(self, node: Any, parameters: Any, values: list[Any], words: list[tuple[Any, int]]) -> None:
        """`values`: a copy of each parameter; `words`: those in them, each with its bytes into the query."""
        self.node = node
        self.parameters = parameters
        self.words = words
        self._values = values  # that the addresses below lead to
        self._addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        parameters.kernelParams = ctypes.addressof(self._addresses)


class QueryWords:
    """The words of an executable graph that say where the query is. For one thread at a time."""

    def __init__(self, graph: torch.cuda.CUDAGraph, staged: Tensor) -> None:
        """`graph`: captured with `keep_graph` and instantiated, over the query in `staged`."""
        from cuda.bindings import driver

        self._set = driver.cuGraphExecKernelNodeSetParams
        self._success = driver.CUresult.CUDA_SUCCESS
        self._address: int | None = staged.data_ptr()
        begin, end = staged.data_ptr(), staged.data_ptr() + staged.numel() * staged.element_size()
        self._graph = graph  # owns the nodes
        self._executable = driver.CUgraphExec(graph.raw_cuda_graph_exec())
        self._readers = list(_readers(driver.CUgraph(graph.raw_cuda_graph()), begin, end))
        self.count = sum(len(reader.words) for reader in self._readers)

    def read_from(self, query: Tensor) -> None:
        """Replays from now on read `query`, of the shape and strides of the staging buffer; those that are
        under way do not notice.

        Raises:
            RuntimeError: the driver refuses.
        """
        address = query.data_ptr()
        if address == self._address:
            return
        self._address = None  # neither, where the driver refuses
        for reader in self._readers:
            for word, offset in reader.words:
                word.value = address + offset
            answer = self._set(self._executable, reader.node, reader.parameters)
            if answer[0] != self._success:
                checked(answer)
        self._address = address


def _readers(graph: Any, begin: int, end: int) -> Iterator[_Reader]:
    """The kernels of a graph with a parameter that holds an address from `begin` to before `end`."""
    from cuda.bindings import driver

    _, count = _nodes(driver, graph, 0)
    nodes, _ = _nodes(driver, graph, count)
    for node in nodes[:count]:
        if checked(driver.cuGraphNodeGetType(node)) != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            continue
        parameters = checked(driver.cuGraphKernelNodeGetParams(node))
        values = list(_values(driver, parameters))
        words = [
            (word, word.value - begin)
            for value in values
            for word in (
                ctypes.c_uint64.from_buffer(value, place)
                for place in range(0, ctypes.sizeof(value) - _WORD + 1, _WORD)
            )
            if begin <= word.value < end
        ]
        if words:
            yield _Reader(node, parameters, values, words)


def _nodes(driver: Any, graph: Any, room: int) -> tuple[list[Any], int]:
    status, nodes, count = driver.cuGraphGetNodes(graph, room)
    checked((status,))
    return nodes or [], count


def _values(driver: Any, parameters: Any) -> Iterator[Any]:
    """A copy of each parameter of a kernel node; none where they are packed into one buffer."""
    if not parameters.kernelParams:
        return
    if int(parameters.func):
        sizes = _sizes(driver.cuFuncGetParamInfo, parameters.func)
    else:
        sizes = _sizes(driver.cuKernelGetParamInfo, parameters.kern)
    addresses = (ctypes.c_void_p * len(sizes)).from_address(int(parameters.kernelParams))
    for address, size in zip(addresses, sizes, strict=True):
        yield ctypes.create_string_buffer(ctypes.string_at(address, size), size)


def _sizes(info: Any, function: Any) -> list[int]:
    """Bytes of each parameter; the driver tells their number by refusing the next one."""
    from cuda.bindings import driver

    sizes: list[int] = []
    while True:
        answer = info(function, len(sizes))
        if answer[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
            return sizes
        checked(answer)
        sizes.append(int(answer[2]))
