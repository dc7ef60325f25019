"""Ctrl-C: the first asks a replay to end after the step at hand, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Whether somebody asked for the end."""

    def __init__(self) -> None:
        self.requested = False
        self._insisted = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to SIGINT and SIGTERM; in a thread that is not the main one nobody can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = [signal.signal(number, self._on_signal) for number in _SIGNALS]
        try:
            yield
        finally:
            for number, handler in zip(_SIGNALS, before, strict=True):
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and not self._insisted:
            self._insisted = True  # once: the way out is not to be interrupted
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def ignored() -> Iterator[None]:
    """Processes started in here ignore Ctrl-C from their first instruction on; their parent ends them.

    A terminal sends SIGINT to all of its processes, and a new interpreter would die of it while it is
    still importing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
