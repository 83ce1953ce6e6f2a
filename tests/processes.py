"""Waiting for other processes, and finding those that they have started."""

import os
import subprocess
import time


def wait_for(condition, process):
    """What `condition` gives when it holds, or at the end of the process; five minutes are too long."""
    limit = time.monotonic() + 300
    while not (found := condition()) and process.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.01)
    return found


def workers_of(parent):
    """Processes that train for `parent`, by the table of processes; not the one that tracks their resources."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return [int(pid) for pid, ppid, args in rows if int(ppid) == parent and "spawn_main" in args]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
