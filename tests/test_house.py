"""The house: imports point one way, the core needs torch alone, and the public names are those of the docs."""

import ast
import sys
from pathlib import Path

import streamnorm

SOURCE = Path(streamnorm.__file__).parent
# From the ground up: a file imports only from lines above its own.
FLOORS = [
    {"_version", "normref"},
    {"moments", "stream"},
    {"kernels", "rules"},
    {"fused"},
    {"native"},
    {"dispatch", "updates"},
    {"base", "compiled"},
    {"stateful"},
    {"layers", "streaming", "optim"},
    {"recurrence"},
    {"cells"},
    {"recurrent"},
    {"convolutional"},
    {"__init__"},
]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from [name for name in names if name != "_native"]  # the compiled part of `kernels`
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not any(name.split(".")[0] == "streamnorm" for name in names), f"{path}: import relatively"


def test_imports_point_one_way():
    files = {path.stem: path for path in SOURCE.glob("*.py")} | {"kernels": SOURCE / "kernels/__init__.py"}
    assert set(files) == set().union(*FLOORS), "a new file needs a floor"
    below = set()
    for floor in FLOORS:
        for name in floor:
            assert set(imports(files[name])) <= below, f"{name} imports from its own floor or above"
        below |= floor


def test_the_core_needs_torch_alone():
    standard = set(sys.stdlib_module_names) | {"torch"}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                used = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                used = {node.module.split(".")[0]}
            else:
                continue
            assert used <= standard, f"{path.name} imports {used - standard}"


def test_public_names():
    assert set(streamnorm.__all__) <= set(dir(streamnorm))


def test_files_are_small():
    lines = {path.name: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert max(lines.values()) <= 350, lines
    assert sum(n > 300 for n in lines.values()) <= len(lines) / 4, lines
