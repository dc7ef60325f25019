"""The driver's functions on the nodes of a graph, for a process without a driver; `install` puts them there.

A node is a kernel with its parameters, as byte strings in memory of their own; what a replay would read is
what the last `cuGraphExecKernelNodeSetParams` left there.
"""

from __future__ import annotations

import ctypes
import enum
import sys
import types


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class CUgraphNodeType(enum.IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1


class Node:
    """A kernel with parameters; without any: a copy. `packed`: they are in one buffer, which is not shown."""

    def __init__(self, *parameters, by_kernel=False, packed=False):
        self.parameters, self.packed = parameters, packed
        self.is_kernel = bool(parameters)
        self.memory = [ctypes.create_string_buffer(value, len(value)) for value in parameters]
        self.addresses = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, self.memory))
        handles = (0, id(self)) if by_kernel else (id(self), 0)
        self.handles = handles
        self.sets = 0


class Driver(types.SimpleNamespace):
    """`graph`: its nodes. `refuse`: the next setting of parameters fails."""

    CUresult, CUgraphNodeType = CUresult, CUgraphNodeType

    def __init__(self, graph, version=13000):
        super().__init__(graph=graph, version=version, refuse=False)
        self.CUgraph = self.CUgraphExec = lambda handle: handle

    def cuDriverGetVersion(self):
        return CUresult.CUDA_SUCCESS, self.version

    def cuGetErrorString(self, status):
        return CUresult.CUDA_SUCCESS, b"invalid argument"

    def cuGraphGetNodes(self, graph, room):
        assert graph == 11
        return CUresult.CUDA_SUCCESS, list(self.graph[:room]), room or len(self.graph)

    def cuGraphNodeGetType(self, node):
        kinds = CUgraphNodeType
        kind = kinds.CU_GRAPH_NODE_TYPE_KERNEL if node.is_kernel else kinds.CU_GRAPH_NODE_TYPE_MEMCPY
        return CUresult.CUDA_SUCCESS, kind

    def cuGraphKernelNodeGetParams(self, node):
        assert node.is_kernel
        func, kern = node.handles
        at = 0 if node.packed else ctypes.addressof(node.addresses)
        return CUresult.CUDA_SUCCESS, types.SimpleNamespace(func=func, kern=kern, kernelParams=at)

    def cuFuncGetParamInfo(self, handle, place):
        return self._size(0, handle, place)

    def cuKernelGetParamInfo(self, handle, place):
        return self._size(1, handle, place)

    def _size(self, kind, handle, place):
        (node,) = [node for node in self.graph if node.handles[kind] == handle]
        if place >= len(node.parameters):
            return CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0
        return CUresult.CUDA_SUCCESS, 0, len(node.parameters[place])

    def cuGraphExecKernelNodeSetParams(self, executable, node, parameters):
        assert executable == 22
        if self.refuse:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        addresses = (ctypes.c_void_p * len(node.parameters)).from_address(parameters.kernelParams)
        sizes = map(len, node.parameters)
        node.parameters = tuple(map(ctypes.string_at, addresses, sizes))
        node.sets += 1
        return (CUresult.CUDA_SUCCESS,)


class Graph:
    """A `torch.cuda.CUDAGraph` that shows its handles."""

    def raw_cuda_graph(self):
        return 11

    def raw_cuda_graph_exec(self):
        return 22


def install(monkeypatch, driver):
    """`from cuda.bindings import driver` gives this one."""
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = driver
    for name, module in (("cuda", types.ModuleType("cuda")), ("cuda.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
