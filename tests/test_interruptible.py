"""Waits that a signal ends (`interruptible.py`)."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from msa_icp import interruptible


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="a timer sends the signal")
def test_a_wait_that_is_left_ends_before_the_interpreter(monkeypatch):
    """The thread that still waits is joined at the end, no longer than a bound."""
    monkeypatch.setattr(interruptible, "_left_waiting", [])
    monkeypatch.setattr(interruptible, "_LAST_S", 0.3)
    come = threading.Event()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            interruptible.wait_for(come.wait)
    finally:
        signal.signal(signal.SIGALRM, before)
    (left,) = interruptible._left_waiting
    began = time.monotonic()
    interruptible._let_end()
    assert 0.25 < time.monotonic() - began < 5
    assert left.is_alive()
    come.set()
    interruptible._let_end()
    assert not left.is_alive()


def test_a_wait_gives_back_what_it_raises():
    def wait():
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        interruptible.wait_for(wait)
