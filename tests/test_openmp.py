"""The kernels find the threads of torch, also where its OpenMP runtime is a private copy, as in wheels for ARM."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from streamnorm import kernels

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/streamnorm/backends/cpu"
# A compiler, and what runs its programs.
MACHINES = {"here": ("g++",), "aarch64": ("aarch64-linux-gnu-g++", "qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")}
STUB = """extern "C" int omp_get_max_threads(); extern "C" int used() { return omp_get_max_threads(); }"""


def compiled(compiler, *arguments):
    done = subprocess.run([compiler, "-std=c++17", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def private_library(compiler, folder):
    """A library as wheels have it: its OpenMP runtime lies beside it, under its own path."""
    folder.joinpath("lib").mkdir(parents=True)
    folder.joinpath("torch.libs").mkdir()
    named = subprocess.run([compiler, "-print-file-name=libgomp.so.1"], capture_output=True, text=True).stdout.strip()
    if not Path(named).is_absolute():
        pytest.skip("no libgomp for this machine")
    shutil.copy(named, folder / "torch.libs/libgomp.so.1")
    stub, library = folder / "stub.cpp", folder / "lib/libtorch_cpu.so"
    stub.write_text(STUB, encoding="utf-8")
    path = "-Wl,--disable-new-dtags,-rpath,$ORIGIN/../torch.libs"
    compiled(compiler, "-shared", "-fPIC", stub, "-o", library, f"-Wl,-soname,{library.name}", path, "-l:libgomp.so.1")
    return library


@pytest.mark.skipif(sys.platform != "linux", reason="libraries of Linux")
@pytest.mark.parametrize("machine", MACHINES)
def test_a_private_runtime_is_found_by_the_library_that_needs_it(machine, tmp_path):
    """By its name or its path, once it is loaded, and never before: nothing is loaded by looking."""
    compiler, *runner = MACHINES[machine]
    if not all(map(shutil.which, [compiler, *runner[:1]])):
        pytest.skip(f"needs {compiler} {' '.join(runner[:1])}")
    library, harness = private_library(compiler, tmp_path / "torch"), tmp_path / "harness"
    compiled(compiler, f"-I{SOURCE}", ROOT / "tests/files/threads.cpp", SOURCE / "parallel.cpp", "-o", harness, "-ldl")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "LD_"))}
    for name in (library.name, library, library.parent.parent / "torch.libs/libgomp.so.1"):
        done = subprocess.run([*runner, harness, library, name], capture_output=True, text=True, env=environment)
        assert done.stdout == "before 0 1, global 0, after 1 4\n", (name, done.stdout, done.stderr)


PRIVATE = """
import ctypes
ctypes.RTLD_GLOBAL = ctypes.RTLD_LOCAL  # torch loads one library for all others to see, and that brings OpenMP along
import torch
assert not hasattr(ctypes.CDLL(None), "GOMP_parallel")
torch.set_num_threads(2)
from streamnorm.backends.cpu import binding
print(binding.details())
"""


@pytest.mark.skipif(not kernels.available() or sys.platform != "linux", reason="of the kernels, on Linux")
def test_the_runtime_of_torch_is_found_where_it_is_not_global():
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", PRIVATE], capture_output=True, text=True, env=environment)
    assert done.stdout == f"{kernels.variant}, 2 threads\n", done.stderr
