"""Streaming normalization for PyTorch: batch norm's benefits where batch norm cannot go."""

from ._version import __version__
from .layers import Affine, GeneralBatchNorm, SampleNorm, TimeSpecificNorm
from .normref import NormRef
from .optim import DecoupledUpdate, Manhattan
from .streaming import StreamingNorm
from .updates import attach, paused

__all__ = [
    "Affine",
    "DecoupledUpdate",
    "GeneralBatchNorm",
    "Manhattan",
    "NormRef",
    "SampleNorm",
    "StreamingNorm",
    "TimeSpecificNorm",
    "__version__",
    "attach",
    "paused",
]
