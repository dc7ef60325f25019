"""Launches that are kept: what a call would launch, to be launched again with another query and other keys.

A layer differs from the next in its query and its K shard alone. So one call is recorded instead of being
made, and every layer of the step launches what it recorded, without the checks and the arithmetic of a call.
A *launch* is one kernel, or one op where the backend is tensor code.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

P = ParamSpec("P")


class _Recorder(threading.local):
    launches: list[Launch] | None = None
    """Of a thread that records: what would have been launched so far."""


recorder = _Recorder()


class Launch:
    """One launch with its arguments. A thread may not use one that another thread is launching.

    Attributes:
        name: what tells the kernel or the op from others.
        grid: of the kernel; () for an op.
        arguments: what it is launched with. Where `takes_query`, the first two are the query and the K shard.
        takes_query: whether it is bound to a layer.
        window: the query rows that it takes; None: all of them.
    """

    __slots__ = ("_addresses", "_launch", "arguments", "grid", "name", "takes_query", "window")

    def __init__(
        self,
        name: Hashable,
        launch: Callable[[tuple[int, ...], list[Any]], None],
        arguments: Sequence[Any],
        *,
        grid: tuple[int, ...] = (),
        takes_query: bool,
        addresses: bool,
    ) -> None:
        """`addresses`: a tensor is its address in `arguments`."""
        self.name = name
        self.grid = grid
        self.arguments = list(arguments)
        self.takes_query = takes_query
        self.window: tuple[int, int] | None = None
        self._launch = launch
        self._addresses = addresses

    def __call__(self) -> None:
        """Launch."""
        self._launch(self.grid, self.arguments)

    def bind(self, query: Tensor, keys: Tensor) -> None:
        """Take a layer's query and K shard, of the shape, strides, dtype and device that were recorded."""
        if not self.takes_query:
            return
        arguments = self.arguments
        if self._addresses:
            first = 0 if self.window is None else self.window[0] * query.stride(0) * query.element_size()
            arguments[0], arguments[1] = query.data_ptr() + first, keys.data_ptr()
        else:
            arguments[0] = query if self.window is None else query[slice(*self.window)]
            arguments[1] = keys

    def bound(self) -> tuple[Any, ...]:
        """Where the query and the K shard are that it is bound to."""
        return tuple(map(identity, self.arguments[:2])) if self.takes_query else ()

    def key(self) -> tuple[Any, ...]:
        """What tells this launch from another one, but for the memory that it is bound to."""
        arguments = self.arguments[2:] if self.takes_query else self.arguments
        return self.name, self.grid, self.window, *map(identity, arguments)


def identity(value: Any) -> Any:
    """A number as it is, a tensor by its memory: hashable, and equal where a launch would be the same."""
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((name, identity(item)) for name, item in value.items())
    if hasattr(value, "__dataclass_fields__"):
        return tuple(identity(getattr(value, name)) for name in value.__dataclass_fields__)
    return value


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Calls of this thread launch nothing within, and append to the list what they would have launched."""
    before, recorder.launches = recorder.launches, []
    try:
        yield recorder.launches
    finally:
        recorder.launches = before


def refuse_tracing(what: str) -> None:
    """RuntimeError where `torch.compile` traces: what was recorded has addresses, which no graph may keep."""
    if is_dynamo_compiling():
        raise RuntimeError(
            f"{what}: runs eagerly and cannot be compiled; wrap it in torch.compiler.disable, "
            "or call the methods of the facade's plan"
        )


def launch(launches: Sequence[Launch]) -> None:
    """Launch one after the other."""
    for one in launches:
        one()


def tensor_code(*, takes_query: bool) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """An op in tensor code is one launch. `takes_query`: its first arguments are the query and the K
    shard.

    It runs in inference mode, the only one in which PyTorch writes into tensors that were made in it.
    """

    def recordable(op: Callable[P, None]) -> Callable[P, None]:
        name = getattr(op, "__name__", "op")
        op = torch.inference_mode()(op)

        def again(_: tuple[int, ...], arguments: list[Any]) -> None:
            *tensors, numbers = arguments
            op(*tensors, **numbers)

        @functools.wraps(op)
        def call(*tensors: P.args, **numbers: P.kwargs) -> None:
            if recorder.launches is None:
                op(*tensors, **numbers)
            else:
                arguments = (*tensors, numbers)
                recorder.launches.append(
                    Launch(name, again, arguments, takes_query=takes_query, addresses=False)
                )

        return call

    return recordable
