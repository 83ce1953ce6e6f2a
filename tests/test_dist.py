"""What is shipped: what setup.py decides, what is in a wheel and in the sdist, and that a wheel says what it has."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from itertools import chain

import pytest
from makefile import ROOT, has_make, recipe, run_line
from setuptools import Distribution
from setuptools.errors import CompileError

import streamnorm

specification = importlib.util.spec_from_file_location("setup_of_streamnorm", ROOT / "setup.py")
setup = importlib.util.module_from_spec(specification)
specification.loader.exec_module(setup)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NEEDED = ["pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"]
MADE = ("*.so", "__pycache__", "*.egg-info")


# What setup.py decides


@pytest.mark.parametrize(
    ("wanted", "platform", "expected"),
    [
        (None, "linux", True),
        (None, "darwin", True),
        (None, "win32", False),  # MSVC
        (True, "win32", True),
        (False, "linux", False),
    ],
)
def test_where_kernels_are_built(wanted, platform, expected):
    assert setup.with_kernels(wanted, platform) == expected


def test_the_variable_is_0_1_or_nothing(monkeypatch):
    for value, expected in {"": None, "0": False, "1": True}.items():
        monkeypatch.setenv("STREAMNORM_KERNELS", value)
        assert setup.flag("STREAMNORM_KERNELS") is expected
    monkeypatch.setenv("STREAMNORM_KERNELS", "yes")
    with pytest.raises(SystemExit, match="STREAMNORM_KERNELS='yes': it is 0, 1 or nothing"):
        setup.flag("STREAMNORM_KERNELS")


def test_python_without_a_gil_has_no_stable_interface():
    """There the limited API does not compile."""
    limited, free = (setup.kernels(True, False, without_gil, "linux") for without_gil in (False, True))
    assert (limited.py_limited_api, free.py_limited_api) == (True, False)
    assert limited.define_macros == [("Py_LIMITED_API", "0x030b0000")]
    assert free.define_macros == []
    assert PROJECT["project"]["requires-python"] == ">={}.{}".format(*setup.OLDEST)


@pytest.mark.parametrize("required", [False, True])
def test_with_msvc_kernels_are_left_out_or_an_error(required, tmp_path):
    """Before the compiler is started: its options are not those of gcc."""
    from setuptools._distutils.ccompiler import new_compiler

    command = setup.BuildKernels(Distribution({"ext_modules": [setup.kernels(required, False, False, "win32")]}))
    command.ensure_finalized()
    command.build_lib, command.compiler = str(tmp_path), new_compiler("nt")
    assert command.compiler.compiler_type == "msvc"
    if required:
        with pytest.raises(CompileError, match="written for gcc and clang, not for MSVC"):
            command.build_extensions()
    else:
        command.build_extensions()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wanted", ["", "1"])
def test_a_failed_compile(wanted, tmp_path):
    """Leaves a package without kernels, or none at all where they are asked for."""
    broken = {"CC": "false", "CXX": "false", "STREAMNORM_KERNELS": wanted}
    built = f"setup.py -q build --build-lib {tmp_path}/lib --build-temp {tmp_path}/temp"
    done = run_line(f"{sys.executable} {built}", env=os.environ | broken)
    assert (done.returncode != 0) == bool(wanted), done.stderr
    assert not list(tmp_path.rglob("_native*"))


# What is shipped


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Of what a build reads, and of a test."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "src/streamnorm", folder / "src/streamnorm", ignore=shutil.ignore_patterns(*MADE))
    (folder / "tests").mkdir()
    for name in [*NEEDED, "tests/test_dist.py", "tests/installed.py"]:
        shutil.copy(ROOT / name, folder / name)
    return folder


def fast_compiler(folder):
    """A g++ that does not optimize, whatever it is told."""
    script = folder / "quick"
    script.write_text('#!/bin/sh\nexec g++ "$@" -O0\n', encoding="utf-8")
    script.chmod(0o755)
    return {"CC": str(script), "CXX": str(script)}


def wheel_names(path):
    with zipfile.ZipFile(path) as wheel:
        return set(wheel.namelist())


@pytest.mark.skipif(not (has_make and shutil.which("g++")), reason="needs make and g++")
@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="of Python with a GIL")
def test_make_dist(copy, tmp_path):
    """Up to the two environments, in which torch would be installed."""
    for tool in ("build", "twine", "check_wheel_contents", "abi3audit"):
        pytest.importorskip(tool)
    *steps, shown, environments = recipe("dist", "BUILD=--no-isolation")
    for line in steps:
        done = run_line(line, cwd=copy, env=os.environ | fast_compiler(tmp_path))
        assert done.returncode == 0, (line, done.stdout, done.stderr)
    assert shown == "ls -l dist"
    assert all(part in environments for part in ("torch==", "dist/*.$kind", "installed.py --without numpy"))

    version = streamnorm.__version__
    (wheel,), (archive,) = (copy / "dist").glob("*.whl"), (copy / "dist").glob("*.tar.gz")
    assert re.fullmatch(rf"streamnorm-{version}-cp311-abi3-\w+\.whl", wheel.name)
    assert archive.name == f"streamnorm-{version}.tar.gz"
    code = {path.relative_to(copy / "src").as_posix() for path in (copy / "src").rglob("*") if path.is_file()}
    code = {name for name in code if ".egg-info/" not in name}
    sources = {name for name in code if name.endswith((".cpp", ".h"))}
    kernels = "streamnorm/backends/cpu/_native.abi3.so"
    shipped = {name for name in wheel_names(wheel) if ".dist-info/" not in name}
    assert shipped == code - sources | {kernels}
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames() if ".egg-info" not in name}
    assert {f"src/{name}" for name in code} | set(NEEDED) <= names
    assert not [name for name in names if name.startswith("tests")]


def test_a_wheel_without_kernels_does_not_have_the_name_of_one_with_them(copy, tmp_path):
    pytest.importorskip("build")
    line = f"{sys.executable} -m build --wheel --no-isolation --outdir {tmp_path} ."
    done = run_line(line, cwd=copy, env=os.environ | {"STREAMNORM_KERNELS": "0"})
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"streamnorm-{streamnorm.__version__}-py3-none-any.whl"
    assert not [name for name in wheel_names(wheel) if "_native" in name]


def test_the_training_of_an_installed_package_refuses_the_source():
    """It says so instead of passing: what it runs is what was installed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "tests/installed.py"], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode != 0
    assert "is not what was installed" in done.stderr


# What the project says of itself


def test_the_version_is_in_one_place():
    """And is the first heading of the changes that has a number."""
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "streamnorm.__version__"}
    assert "\nversion:" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\d[\w.]*)", changes, re.MULTILINE)[1] == streamnorm.__version__


def test_torch_is_not_needed_to_build():
    """One build serves all of its versions; installing one to build would take the newest."""
    assert not [name for name in PROJECT["build-system"]["requires"] if name.startswith("torch")]


def test_extras_are_for_users_and_groups_for_developers():
    """Neither has what the other is for."""
    extras, groups = PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"]
    assert not {"dev", "test", "lint", "docs"} & set(extras)
    tools = {re.split(r"[<>=; ]", name)[0] for name in chain(*groups.values()) if isinstance(name, str)}
    assert not [
        name for name in chain(*extras.values()) if re.split(r"[<>=; ]", name)[0] in tools - {"numpy", "triton"}
    ]
    assert not [name for name in tools if name.startswith("streamnorm")]  # which would be looked for elsewhere
