"""Surgery on models: torch's norms to ours, ours to torch's, or into the layer before.

Layers never import from here.
"""

from .convert import convert
from .deploy import to_batchnorm
from .folding import fuse

__all__ = ["convert", "fuse", "to_batchnorm"]
