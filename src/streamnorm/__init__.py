"""Streaming normalization for PyTorch: batch norm's benefits where batch norm cannot go."""

from ._version import __version__
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
