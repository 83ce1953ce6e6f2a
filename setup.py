"""The C++ kernels, and the readme. Everything else about the package is in pyproject.toml.

They need a compiler and nothing else, torch included, so one build serves every version of torch, and every Python that
has a GIL. Without a compiler the package installs all the same and runs on plain torch, slower; with MSVC they are left
out, as they are written for gcc and clang.

`STREAMNORM_KERNELS=1`: a build without them is an error, for releases. `STREAMNORM_KERNELS=0`: they are left out, and
the wheel is one for any machine. `STREAMNORM_SANITIZE=1` builds them with checks of every address and of undefined
behaviour, for `make test-sanitized`.
"""

import os
import re
import sys
import sysconfig
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = Path("src/streamnorm/backends/cpu")
OLDEST = (3, 11)  # Python whose stable interface is used
# After any CFLAGS of the user: NaN and inf must behave, or one bad batch would pass unnoticed.
ARITHMETIC = ["-fno-fast-math", "-fno-math-errno", "-fno-trapping-math"]
NO_MSVC = "the kernels of streamnorm are written for gcc and clang, not for MSVC"


def flag(name: str) -> bool | None:
    """What an environment variable says; None if nothing."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise SystemExit(f"{name}={value!r}: it is 0, 1 or nothing")
    return bool(int(value)) if value else None


def with_kernels(wanted: bool | None, platform: str) -> bool:
    """Whether to try. Python for Windows takes MSVC by default; where others serve, they have to be asked for."""
    return platform != "win32" if wanted is None else wanted


def kernels(required: bool, sanitize: bool, free_threaded: bool, platform: str) -> Extension:
    """Python without a GIL has no stable interface: each of its versions needs a build of its own."""
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"] if sanitize else []
    speed = ["-O1", "-g", "-fno-omit-frame-pointer"] if sanitize else ["-O3", "-g0"]
    small = ["-s"] if platform == "linux" and not sanitize else []
    return Extension(
        "streamnorm.backends.cpu._native",
        sources=sorted(path.as_posix() for path in FOLDER.glob("*.cpp")),
        depends=sorted(path.as_posix() for path in FOLDER.glob("*.h")),
        define_macros=[] if free_threaded else [("Py_LIMITED_API", "0x{:02x}{:02x}0000".format(*OLDEST))],
        extra_compile_args=["-std=c++17", *speed, "-fvisibility=hidden", "-Wno-psabi", *ARITHMETIC, *checks],
        extra_link_args=["-fno-fast-math", *small, *checks],
        py_limited_api=not free_threaded,
        optional=not required,
    )


class BuildKernels(build_ext):
    def build_extension(self, ext: Extension) -> None:
        if self.compiler.compiler_type == "msvc":
            raise CompileError(NO_MSVC)
        super().build_extension(ext)


def readme() -> str:
    """README.md for a package index, which has no files: its links lead to the sources, wherever the urls of the
    project say that those are, and are plain words as long as they do not."""
    source = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {}).get("Source")

    def moved(link: re.Match[str]) -> str:
        picture, words, path = link.groups()
        if source is None:
            return "" if picture else words
        return f"{picture}[{words}]({source}/{'raw' if picture else 'blob'}/main/{path})"

    return re.sub(r"(!?)\[([^]]*)\]\((?!https?:)([^)\s]+)\)", moved, Path("README.md").read_text(encoding="utf-8"))


def main() -> None:
    wanted, sanitize = flag("STREAMNORM_KERNELS"), bool(flag("STREAMNORM_SANITIZE"))
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    found = [kernels(bool(wanted) or sanitize, sanitize, free_threaded, sys.platform)]
    setup(
        long_description=readme(),
        long_description_content_type="text/markdown",
        ext_modules=found if with_kernels(wanted, sys.platform) else [],
        cmdclass={"build_ext": BuildKernels},
        options={} if free_threaded else {"bdist_wheel": {"py_limited_api": "cp{}{}".format(*OLDEST)}},
    )


if __name__ == "__main__":
    main()
