"""C++ kernels for the CPU: layers in one or two passes over memory, and whole sequences of recurrent layers.

They are built when the package is installed, if there is a compiler. `binding` is the door, `layer` and `sequence` are
what passes through it. No rule is decided here: `stream.h` is the twin of core/algorithm.py, `moments.h` of
core/statistics.py.
"""

from contextlib import AbstractContextManager

from .. import PLAIN, active, use
from . import binding
from .layer import Cpu

BACKEND = Cpu()
variant = binding.variant


def available() -> bool:
    """Whether the kernels are there and in use: built, and not switched off.

    >>> with disabled():
    ...     available()
    False
    """
    return binding.missing() is None and BACKEND in active().backends


def disabled() -> AbstractContextManager[None]:
    """A context in which everything runs in plain torch; `streamnorm.backends.use("plain")` is the same."""
    return use(PLAIN)
