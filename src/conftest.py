"""Doctests of modules that need what is not installed are left out."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["streamnorm/backends/triton/*.py"]
