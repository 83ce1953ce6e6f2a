"""The paper in pure functions: which activations share statistics, S and N, the streams and their rules.

What needs a module, a backend or autograd does not live here; the folder imports torch, and nothing of ours.
"""

from .reference import NormRef

__all__ = ["NormRef"]
