"""Kernels for GPUs where there is none: their numbers by Triton's interpreter, their code by its compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from streamnorm import GRU, DecoupledUpdate, StreamingNorm, backends

triton = pytest.importorskip("triton", reason="triton is not installed")
ROOT = Path(__file__).parent.parent


def python(*arguments, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    environment |= {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment)


TARGETS = ("sm_80", "sm_90", "gfx942")
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


@pytest.mark.skipif(VERSION < (3, 9), reason="older interpreters do not know NumPy 2.4")
def test_by_the_interpreter():
    """Outputs, gradients and state are the law's; launches are counted, and the host reads nothing."""
    quiet = "ignore::RuntimeWarning"  # of NumPy, about the values that are not finite
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-W", quiet]
    files = "tests/triton_cases.py", "tests/triton_sequences.py"
    done = python("-m", "pytest", *options, *files, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_kernel_compiles_for_every_target(tmp_path):
    """Ahead of time, without a GPU, and no register is spilled."""
    file = tmp_path / "kernels.json"
    done = python("benchmarks/gpu_kernels.py", "--few", "--out", str(file), TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))["kernels"]
    names = {row["kernel"].split(",")[0] for row in found}
    assert names == {
        "sum_powers", "sum_powers again", "push_statistics", "normalize", "sum_gradients", "push_gradients",
        "pull_back", "note_addresses", "note_addresses again", "sum_gates", "sum_gates again", "stream_gates",
        "step_forward", "step_backward", "stream_gate_gradients", "pull_gates_back",
    }  # fmt: skip
    for name in names:
        rows = [row for row in found if row["kernel"].split(",")[0] == name]
        assert {row["target"] for row in rows} == {"sm_80", "sm_90", "gfx942"}
        assert all(0 < row["registers"] <= 128 and row["spilled"] == 0 for row in rows), rows


def test_the_published_table_is_of_every_kernel():
    rows = json.loads((ROOT / "benchmarks" / "results" / "gpu_kernels.json").read_text(encoding="utf-8"))["kernels"]
    assert len({(row["kernel"], row["target"]) for row in rows}) == len(rows)
    assert all(row["spilled"] == 0 for row in rows)
    found = {}
    for row in rows:
        found.setdefault((row["kernel"].split(",")[0].split()[0], row["target"]), set()).add(row["registers"])
    page = (ROOT / "docs/reference/devices.md").read_text(encoding="utf-8")
    for kernel in {kernel for kernel, _ in found}:
        line = next(line for line in page.splitlines() if line.startswith(f"| {kernel}"))
        ranges = [sorted({min(found[kernel, target]), max(found[kernel, target])}) for target in TARGETS]
        assert line.split(" | ", 1)[1] == " | ".join("-".join(map(str, each)) for each in ranges) + " |"


def test_importing_the_library_does_not_import_triton():
    code = (
        "import sys, torch, streamnorm; streamnorm.StreamingNorm(2)(torch.randn(3, 2)); print('triton' in sys.modules)"
    )
    before = python("-c", "import sys, torch; print('triton' in sys.modules)").stdout
    done = python("-c", code)
    assert done.stdout == before, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_never_asked():
    assert "triton" not in backends.available()
    with pytest.raises(ValueError, match=r"triton.*cannot be used here: there is no GPU"), backends.use("triton"):
        pass
    assert backends.explain(StreamingNorm(5), torch.randn(9, 5)).count("triton does not: ") <= 1


class Last(nn.Module):
    def forward(self, found):
        return found[0]


@pytest.mark.parametrize(
    "inner", [[StreamingNorm(6), nn.Tanh(), StreamingNorm(6, p=1, affine=False)], [GRU(6, 6), Last()]]
)
@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, lambda optimizer: DecoupledUpdate(optimizer, 2)])
def test_a_training_whose_numbers_cannot_be_read(inner, wrap):
    """On a device whose tensors have no numbers: reading one, or a copy to the host, is refused by torch."""
    model = nn.Sequential(nn.Linear(4, 6), *inner).to("meta")
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    norm = next(layer for layer in model.modules() if isinstance(layer, StreamingNorm))
    before = norm._pulse.updates
    for _ in range(4):
        optimizer.zero_grad()
        model(
            torch.randn(8, 3, 4, device="meta") if isinstance(inner[0], GRU) else torch.randn(8, 4, device="meta")
        ).sum().backward()
        optimizer.step()
    assert norm._pulse.updates > before
    with pytest.raises(RuntimeError, match="meta"):
        norm.stats.count.item()
    with pytest.raises(NotImplementedError, match="meta"):
        norm.stats.count.cpu()
