"""CUDA graphs on a CPU: the launches with the arguments that they were captured with, launched by a replay.

That is what a graph does, as far as the cache of layer graphs can tell.
"""

from __future__ import annotations

import copy
from typing import Any


class StandIn:
    """Graphs of a CPU. `launch` takes the place of the module's own."""

    captured: list | None = None

    def replaced(self) -> dict[str, Any]:
        """What takes the place of which names of `msa_icp.indexer.graphs`."""
        return {"can_capture": lambda device: True, "capture": self.capture, "launch": self.launch}

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
