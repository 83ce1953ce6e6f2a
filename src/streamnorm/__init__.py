"""Streaming normalization for PyTorch: batch norm's benefits where batch norm cannot go."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .averaging import update_stats
    from .cells import GRUCell, LSTMCell, RNNCell
    from .convert import convert
    from .convolutional import ConvGRU, ConvRNN
    from .deploy import to_batchnorm
    from .folding import fuse
    from .joining import StreamJoin
    from .layers import Affine, GeneralBatchNorm, SampleNorm, TimeSpecificNorm
    from .monitoring import Health, LayerHealth, monitor
    from .normref import NormRef
    from .optim import DecoupledUpdate, Manhattan
    from .recurrent import GRU, LSTM, RNN
    from .streaming import StreamingNorm
    from .updates import attach, paused

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
    "Manhattan",
    "NormRef",
    "RNNCell",
    "SampleNorm",
    "StreamJoin",
    "StreamingNorm",
    "TimeSpecificNorm",
    "__version__",
    "attach",
    "convert",
    "fuse",
    "monitor",
    "paused",
    "to_batchnorm",
    "update_stats",
]

_HOMES = {
    "averaging": ["update_stats"],
    "cells": ["GRUCell", "LSTMCell", "RNNCell"],
    "convert": ["convert"],
    "convolutional": ["ConvGRU", "ConvRNN"],
    "deploy": ["to_batchnorm"],
    "folding": ["fuse"],
    "joining": ["StreamJoin"],
    "layers": ["Affine", "GeneralBatchNorm", "SampleNorm", "TimeSpecificNorm"],
    "monitoring": ["Health", "LayerHealth", "monitor"],
    "normref": ["NormRef"],
    "optim": ["DecoupledUpdate", "Manhattan"],
    "recurrent": ["GRU", "LSTM", "RNN"],
    "streaming": ["StreamingNorm"],
    "updates": ["attach", "paused"],
}


class _Package(ModuleType):
    """Imports torch, and all of itself, when the first name is asked for: the command line starts sooner."""

    def __getattr__(self, name: str) -> Any:
        if name in __all__:
            for home, names in _HOMES.items():
                module = import_module(f".{home}", __name__)
                vars(self).update({public: getattr(module, public) for public in names})
            return vars(self)[name]
        if name.startswith("_") or find_spec(f".{name}", __name__) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f".{name}", __name__)

    def __setattr__(self, name: str, value: Any) -> None:
        """Python sets an attribute for each file that is imported; `convert` stays the function."""
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
