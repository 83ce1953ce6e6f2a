"""The house: imports point one way, the core needs torch alone, and the public names are those of the docs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import streamnorm

SOURCE = Path(streamnorm.__file__).parent
# From the ground up: a file imports only from lines above its own.
FLOORS = [
    {"_version", "normref", "drawing", "transforms", "encoders", "loading", "hints", "packing", "starting"},
    {"moments", "stream"},
    {"kernels", "rules"},
    {"fused", "distributed", "checkpointing"},
    {"listener"},
    {"native"},
    {"dispatch", "updates"},
    {"base", "compiled"},
    {"stateful"},
    {"layers", "streaming", "optim", "joining"},
    {"recurrence", "monitoring"},
    {"recurrentbase"},
    {"cells", "recurrent"},
    {"convolutional", "swap"},
    {"convert", "deploy", "averaging"},
    {"folding"},
    {"__init__"},
    {"lab"},
    {"cli"},
    {"__main__"},
]
LAB = [
    {"__init__", "errors", "runs", "shapes"},
    {"store", "figures", "scales", "models", "health", "grid"},
    {"data", "results"},
    {"tasks", "measures", "online"},
    {"train", "claims", "goals"},
    {"jobs", "progress", "view"},
    {"experiment"},
    {"bench"},
    {"commands"},
]
DATA = [{"download", "batches"}, {"tar", "index"}, {"cifar"}, {"__init__"}]
VIEW = [{"__init__", "lines", "looks", "page", "cells"}, {"matrix"}, {"plot"}, {"report", "panels"}]
LATE = {"drawing.py", "monitoring.py"}  # may import what torch does not need, inside functions and for types
HOUSES = {SOURCE: FLOORS, SOURCE / "lab": LAB, SOURCE / "lab/data": DATA, SOURCE / "lab/view": VIEW}


def imports(path, level=1):
    """What a file imports from its own folder; level 2: from the folder that this is in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == level:
            names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
            yield from [name for name in names if name != "_native"]  # the compiled part of `kernels`
        elif isinstance(node, ast.ImportFrom | ast.Import) and not getattr(node, "level", 0):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not any(name.split(".")[0] == "streamnorm" for name in names), f"{path}: import relatively"


@pytest.mark.parametrize("folder", HOUSES, ids=lambda folder: folder.name)
def test_imports_point_one_way(folder):
    inner = {path.parent.name: path.parent for path in folder.glob("*/__init__.py")}
    files = {path.stem: path for path in folder.glob("*.py")}
    assert set(files | inner) == set().union(*HOUSES[folder]), "a new file needs a floor"
    below = set()
    for floor in HOUSES[folder]:
        for name in floor:
            used = set(imports(files[name])) if name in files else outside(inner[name])
            assert used <= below, f"{name} imports from its own floor or above"
        below |= floor


def outside(folder):
    """What the files of a folder import from the one that it is in, as the house sees it; `lab` stands above it all."""
    return set() if folder.name == "lab" else {name for path in folder.glob("*.py") for name in imports(path, 2)}


def test_the_library_does_not_notice_the_lab():
    """Imported, with a layer called, nothing of the lab is there; nor is anything that the lab needs."""
    code = "import sys, torch, streamnorm; streamnorm.StreamingNorm(2)(torch.randn(3, 2)); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "streamnorm.streaming" in loaded
    assert not [
        name for name in loaded if name.startswith(("streamnorm.lab", "streamnorm.cli", "matplotlib", "sklearn"))
    ]


def test_the_core_needs_torch_alone():
    """The lab and drawings too at the head of their files: what else they need is imported late."""
    standard = set(sys.stdlib_module_names) | {"torch"}
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        late = SOURCE / "lab" in path.parents or path.name in LATE
        for node in tree.body if late else ast.walk(tree):
            if isinstance(node, ast.Import):
                used = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                used = {node.module.split(".")[0]}
            else:
                continue
            assert used <= standard, f"{path.name} imports {used - standard}"


def test_public_names():
    """Type checkers and Python are told the same of where they come from."""
    found = {
        node.module: [alias.name for alias in node.names]
        for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    }
    assert found == {"_version": ["__version__"]} | streamnorm._HOMES
    assert sorted(name for names in found.values() for name in names) == sorted(streamnorm.__all__)


def test_files_are_small():
    lines = {path.name: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert max(lines.values()) <= 350, lines
    assert sum(n > 300 for n in lines.values()) <= len(lines) / 4, lines
