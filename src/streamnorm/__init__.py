"""Streaming normalization for PyTorch: a norm of channels for any size of batch, down to one sample."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder

    class _Finder(MetaPathFinder, Loader): ...

    from . import backends, functional
    from .convert.convert import convert
    from .convert.deploy import to_batchnorm
    from .convert.folding import fuse
    from .convert.standardize import remove_weight_standardization, weight_standardize
    from .core import NormRef
    from .engine import attach, paused
    from .nn import (
        GRU,
        LSTM,
        RNN,
        Affine,
        ConvGRU,
        ConvRNN,
        GeneralBatchNorm,
        GRUCell,
        LazyStreamingNorm,
        LazyStreamingNorm1d,
        LazyStreamingNorm2d,
        LazyStreamingNorm3d,
        LSTMCell,
        RNNCell,
        SampleNorm,
        StreamingNorm,
        StreamingNorm1d,
        StreamingNorm2d,
        StreamingNorm3d,
        TimeSpecificNorm,
    )
    from .training import DecoupledUpdate, Health, LayerHealth, Manhattan, StreamJoin, monitor, update_stats

else:
    _Finder = object  # the other two import a third of what the command line does

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Affine",
    "ConvGRU",
    "ConvRNN",
    "DecoupledUpdate",
    "GRUCell",
    "GeneralBatchNorm",
    "Health",
    "LSTMCell",
    "LayerHealth",
    "LazyStreamingNorm",
    "LazyStreamingNorm1d",
    "LazyStreamingNorm2d",
    "LazyStreamingNorm3d",
    "Manhattan",
    "NormRef",
    "RNNCell",
    "SampleNorm",
    "StreamJoin",
    "StreamingNorm",
    "StreamingNorm1d",
    "StreamingNorm2d",
    "StreamingNorm3d",
    "TimeSpecificNorm",
    "__version__",
    "attach",
    "backends",
    "convert",
    "functional",
    "fuse",
    "monitor",
    "paused",
    "remove_weight_standardization",
    "to_batchnorm",
    "update_stats",
    "weight_standardize",
]

# The folders whose `__init__` has the public names.
_HOMES = ("core", "engine", "nn", "training", "convert")

# Where files have gone that older versions had, by which whole modules were pickled; `kernels` was public.
_MOVED = {
    "cells": "nn.recurrent.cells",
    "convolutional": "nn.recurrent.convolutional",
    "deploy": "convert.deploy",
    "distributed": "engine.merging",
    "kernels": "backends.cpu",
    "layers": "nn.layers",
    "normref": "core.reference",
    "optim": "training.optim",
    "recurrence": "nn.recurrent.step",
    "recurrent": "nn.recurrent.sequence",
    "stream": "core.state",
    "streaming": "nn.streaming",
}


class _Moved(_Finder):
    """Finds a file under its old name: it is the same module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, old = name.rpartition(".")
        if package != __name__ or old not in _MOVED:
            return None
        place = Path(__file__).parent.joinpath(*_MOVED[old].split("."))
        return spec_from_loader(name, self) if place.is_dir() or place.with_suffix(".py").exists() else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(f".{_MOVED[spec.name.rpartition('.')[2]]}", __name__)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed under its own name, and keeps that."""
        spec = module.__spec__
        module.__spec__ = None if spec is None else spec.loader_state


class _Package(ModuleType):
    """Imports torch, and all of itself, when the first name is asked for: the command line starts sooner."""

    def __getattr__(self, name: str) -> Any:
        if name in __all__:
            for home in _HOMES:
                module = import_module(f".{home}", __name__)
                vars(self).update({public: getattr(module, public) for public in module.__all__})
            for module_name in ("backends", "functional"):
                vars(self)[module_name] = import_module(f".{module_name}", __name__)
            return vars(self)[name]
        if name.startswith("_") or find_spec(f".{name}", __name__) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f".{name}", __name__)

    def __setattr__(self, name: str, value: Any) -> None:
        """Python sets an attribute for each file that is imported; `convert` stays the function."""
        if name not in _FUNCTIONS or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


_FUNCTIONS = {"convert"}
sys.meta_path.append(_Moved())
sys.modules[__name__].__class__ = _Package
