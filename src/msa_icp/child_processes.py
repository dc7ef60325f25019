"""What the processes of ranks have in common, whoever starts them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def end_with_parent() -> None:
    """From now on this process ends when its parent is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def how_it_ended(exit_code: int | None) -> str:
    """In words, for an error."""
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
