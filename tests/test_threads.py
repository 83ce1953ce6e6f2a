"""Threads that share a layer never touch freed memory. A short form; `make test-sanitized` runs the long one."""

import subprocess
import sys
from pathlib import Path

import pytest
import stress_threads


@pytest.mark.parametrize("target", stress_threads.TARGETS)
def test_training_and_reading_at_once_does_not_crash(target):
    script = Path(stress_threads.__file__)
    call = [sys.executable, "-W", "ignore", str(script), "--seconds", "1.5", target]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
