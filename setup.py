"""The C++ kernels. Everything else about the package is in pyproject.toml.

They need a compiler and nothing else, torch included, so one build serves every version of torch. Without a compiler
the package installs all the same and runs on plain torch, slower.

`STREAMNORM_SANITIZE=1` builds them with checks of every address and of undefined behaviour, for `make test-sanitized`.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src/streamnorm/backends/cpu")
# After any CFLAGS of the user: NaN and inf must behave, or one bad batch would pass unnoticed.
ARITHMETIC = ["-fno-fast-math", "-fno-math-errno", "-fno-trapping-math"]
SANITIZE = os.environ.get("STREAMNORM_SANITIZE", "") not in ("", "0")
CHECKS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"] if SANITIZE else []
SPEED = ["-O1", "-g", "-fno-omit-frame-pointer"] if SANITIZE else ["-O3", "-g0"]
SMALL = ["-s"] if sys.platform == "linux" and not SANITIZE else []

setup(
    ext_modules=[
        Extension(
            "streamnorm.backends.cpu._native",
            sources=sorted(map(str, FOLDER.glob("*.cpp"))),
            depends=sorted(map(str, FOLDER.glob("*.h"))),
            extra_compile_args=["-std=c++17", *SPEED, "-fvisibility=hidden", "-Wno-psabi", *ARITHMETIC, *CHECKS],
            extra_link_args=["-fno-fast-math", *SMALL, *CHECKS],
            py_limited_api=True,
            optional=not SANITIZE,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
