"""What `make` would run: the lines of a recipe, so that tests can run them with options that keep them short."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
READY = (".venv/.ready", ".venv-integrations/.ready")  # environments are there: the one that the tests run in


def recipe(target, *variables, ready=READY):
    """The commands of a target; `variables`: such as "CALLS=300"."""
    old = [part for mark in ready for part in ("-o", mark)]
    command = ["make", "-n", "--no-print-directory", *old, *target.split(), f"RUN={shlex.quote(sys.executable)}"]
    done = subprocess.run([*command, *variables], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("\\\n", "").splitlines()


def run_line(line, *options, **settings):
    """One of them in a shell, with options at its end."""
    command, settings = shlex.join(map(str, options)), {"cwd": ROOT} | settings
    return subprocess.run(f"{line} {command}", shell=True, capture_output=True, text=True, **settings)


has_make = shutil.which("make") is not None
