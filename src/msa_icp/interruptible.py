"""A wait that a signal ends: Python runs no handler while its main thread waits in compiled code."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class _Waiter(threading.Thread):
    """Makes one call after the other, 16 us each there and back; a thread for each would take 50."""

    def __init__(self) -> None:
        super().__init__(name="msa-icp waiter", daemon=True)
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            call()
            del call  # and with it what it waited for


_waiter: _Waiter | None = None
"""Of the main thread; there is none in a process that has forked."""


def wait_for(wait: Callable[[], None]) -> None:
    """`wait()`, but in the main thread signals are handled meanwhile.

    What `wait` raises is raised. Where a handler raises, as that of Ctrl-C does, its exception goes on at
    once, and `wait` is left to a thread that ends with it.
    """
    global _waiter
    if threading.current_thread() is not threading.main_thread():
        wait()  # no handler ever runs here
        return
    if _waiter is None or not _waiter.is_alive():
        _waiter = _Waiter()
    failure: list[BaseException] = []
    ended = threading.Lock()
    ended.acquire()

    def call() -> None:
        try:
            wait()
        except BaseException as error:
            failure.append(error)
        ended.release()

    try:
        _waiter.calls.put(call)
        ended.acquire()
    except BaseException:
        _waiter.calls.put(None)
        _waiter = None
        raise
    if failure:
        raise failure.pop()
