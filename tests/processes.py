"""Waiting for other processes."""

import time


def wait_for(condition, process):
    """Until `condition`, or the end of the process; five minutes are too long."""
    limit = time.monotonic() + 300
    while not condition() and process.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.01)
