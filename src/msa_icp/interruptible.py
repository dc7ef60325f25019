"""A wait that a signal ends: Python runs no handler while its main thread waits in compiled code."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable

_LAST_S = 3.0
"""How long the end of the interpreter waits for the threads that an interrupt has left in a wait."""


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
_left_waiting: list[_Waiter] = []
"""Those that an interrupt has left in a wait."""


@atexit.register
def _let_end() -> None:
    """Wait a little for the waits that an interrupt has left, while there is an interpreter to come back to.

    Ranks that get one signal end together: a wait that a closed connection ends in the middle of that would
    abort the process.
    """
    until = time.monotonic() + _LAST_S
    for waiter in _left_waiting:
        waiter.join(max(0.0, until - time.monotonic()))


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
        _left_waiting[:] = [*filter(_Waiter.is_alive, _left_waiting), _waiter]
        _waiter = None
        raise
    if failure:
        raise failure.pop()
