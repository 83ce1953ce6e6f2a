"""The C++ kernels. Everything else about the package is in pyproject.toml.

They need a compiler and nothing else, torch included, so one build serves every version of torch. Without a compiler
the package installs all the same and runs on plain torch, slower.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src/streamnorm/kernels")
# After any CFLAGS of the user: NaN and inf must behave, or one bad batch would pass unnoticed.
ARITHMETIC = ["-fno-fast-math", "-fno-math-errno", "-fno-trapping-math"]

setup(
    ext_modules=[
        Extension(
            "streamnorm.kernels._native",
            sources=sorted(map(str, FOLDER.glob("*.cpp"))),
            depends=sorted(map(str, FOLDER.glob("*.h"))),
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wno-psabi", *ARITHMETIC],
            extra_link_args=["-fno-fast-math", *(["-s"] if sys.platform == "linux" else [])],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
