"""Recurrent layers: one step, cells, the loop over a sequence, sequences of vectors and of images.

They are made of norms and products; what a norm is does not live here (`..streaming`, `..batch`, `..sample`).
"""

from .cells import GRUCell, LSTMCell, RNNCell
from .convolutional import ConvGRU, ConvRNN
from .sequence import GRU, LSTM, RNN

__all__ = ["GRU", "LSTM", "RNN", "ConvGRU", "ConvRNN", "GRUCell", "LSTMCell", "RNNCell"]
