"""Parts can be taken away: without a backend, or without the lab, everything else works and passes its tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import streamnorm

ROOT = Path(__file__).parent.parent
# In a Python of its own: nothing of the package may come from elsewhere, and the part is not there.
CODE = """
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

copy, part, *arguments = sys.argv[1:]
torch.set_num_threads(1)
failed = pytest.main(arguments)
files = {module.__file__ for name, module in list(sys.modules.items()) if name.split(".")[0] == "streamnorm"}
assert files and all(Path(file).is_relative_to(copy) for file in files), files
assert find_spec(f"streamnorm.{part}") is None, part
from streamnorm import backends
assert part.removeprefix("backends.") not in backends.registered()
sys.exit(failed)
"""
CALLS = ["test_contract.py", "test_masks.py"]
WITHOUT = {
    "backends.cpu": [
        *CALLS,
        "test_exactness.py::test_streaming_special_case_of_no_gradients",
        "test_recurrent.py::test_a_layer_is_its_cell_in_a_loop",
        "test_recurrent.py::test_a_chunk_boundary_is_no_event",
    ],
    "backends.torch_ops": [
        *CALLS,
        "test_identities.py::test_batch_norm",
        "test_identities.py::test_layer_norm_over_channels_and_space",
        "test_identities.py::test_instance_norm",
        "test_identities.py::test_memory_format_is_kept",
    ],
    "backends.triton": CALLS,
    "lab": ["test_contract.py", "test_optim.py", "test_encoders.py"],
}


@pytest.mark.parametrize("part", WITHOUT)
def test_without_a_part_everything_else_works(part, tmp_path):
    copy = tmp_path / "streamnorm"
    shutil.copytree(
        Path(streamnorm.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "*.cpp", "*.h")
    )
    away = copy / part.replace(".", "/")
    if away.is_dir():
        shutil.rmtree(away)
    else:
        away.with_suffix(".py").unlink()
    options = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    tests = [str(ROOT / "tests" / name) for name in WITHOUT[part]]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(copy), part, *options, *tests],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
