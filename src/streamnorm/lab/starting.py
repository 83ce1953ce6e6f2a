"""Ctrl-C while a command is still importing what it needs."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STOPPED = 128 + 2  # as a shell names the end by SIGINT


@contextmanager
def stoppable() -> Iterator[None]:
    """Within, Ctrl-C ends the process at once: an exception in the middle of an import may be taken for another one.

    Where it is ignored, or heeded by somebody else, it is left alone.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(number: int, frame: Any) -> None:
    print("\nstreamnorm: stopped", file=sys.stderr, flush=True)
    os._exit(STOPPED)
