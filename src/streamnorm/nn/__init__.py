"""The layers: what they are told, what they keep, how that is saved, and the checks at their door.

How a call is computed does not live here (`backends`), nor how autograd and the compiler see it (`engine`).
"""

from .affine import Affine
from .batch import GeneralBatchNorm, TimeSpecificNorm
from .lazy import LazyStreamingNorm, LazyStreamingNorm1d, LazyStreamingNorm2d, LazyStreamingNorm3d
from .ranked import StreamingNorm1d, StreamingNorm2d, StreamingNorm3d
from .recurrent import GRU, LSTM, RNN, ConvGRU, ConvRNN, GRUCell, LSTMCell, RNNCell
from .sample import SampleNorm
from .streaming import StreamingNorm

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Affine",
    "ConvGRU",
    "ConvRNN",
    "GRUCell",
    "GeneralBatchNorm",
    "LSTMCell",
    "LazyStreamingNorm",
    "LazyStreamingNorm1d",
    "LazyStreamingNorm2d",
    "LazyStreamingNorm3d",
    "RNNCell",
    "SampleNorm",
    "StreamingNorm",
    "StreamingNorm1d",
    "StreamingNorm2d",
    "StreamingNorm3d",
    "TimeSpecificNorm",
]
