"""CUDA graphs on a CPU: the launches with the arguments that they were captured with, launched by a replay.

That is what a graph does, as far as the cache of layer graphs can tell.
"""

from __future__ import annotations

import copy
from typing import Any

from msa_icp.launches import Launch


class StandIn:
    """Graphs of a CPU. `launch` takes the place of the module's own.

    `copies`: the query of a replay is copied, as where nothing can be written into a graph. Else it is read
    where it is: the launches get its memory for their part of the staging buffer.
    """

    captured: list | None = None

    def __init__(self, *, copies: bool = False) -> None:
        self.copies = copies

    def replaced(self) -> dict[str, Any]:
        """What takes the place of which names of `msa_icp.indexer.graphs`."""
        return {
            "can_capture": lambda device: True,
            "capture": self.capture,
            "launch": self.launch,
            "QueryWords": Words,
            "can_be_moved": lambda: not self.copies,
        }

    def capture(self, body, device):
        self.captured = []
        try:
            body()
            return Graph(self.captured)
        finally:
            self.captured = None

    def launch(self, launches):
        for one in launches:
            self.do(frozen(one) if self.captured is not None else one)

    def do(self, what):
        """Do it, or put it into the graph that is being captured."""
        if self.captured is None:
            what()
        else:
            self.captured.append(what)


class Graph:
    def __init__(self, launches):
        self.launches = launches

    def replay(self):
        for one in self.launches:
            one()


def frozen(launch):
    """A launch that keeps its arguments, whatever the other one is bound to."""
    copied = copy.copy(launch)
    copied.arguments = list(launch.arguments)
    return copied


class Words:
    """Of a graph here: the launches whose first argument is in the staging buffer."""

    def __init__(self, graph, staged):
        self.at = staged
        self.launches = [
            one
            for one in graph.launches
            if isinstance(one, Launch)
            and one.takes_query
            and 0 <= address(one.arguments[0]) - staged.data_ptr() < staged.numel()
        ]
        self.count = len(self.launches)

    def read_from(self, query):
        for one in self.launches:
            before = one.arguments[0]
            offset = address(before) - self.at.data_ptr()
            if isinstance(before, int):
                one.arguments[0] = query.data_ptr() + offset
            else:
                begin = offset // query[0].numel()
                one.arguments[0] = query[begin : begin + before.shape[0]]
        self.at = query


def address(value):
    return value if isinstance(value, int) else value.data_ptr()
