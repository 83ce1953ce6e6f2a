"""Surgery on models: torch's norms to ours, ours to torch's, or into the layer before; standardized weights.

Layers never import from here.
"""

from .convert import convert
from .deploy import to_batchnorm
from .folding import fuse
from .standardize import remove_weight_standardization, weight_standardize

__all__ = ["convert", "fuse", "remove_weight_standardization", "to_batchnorm", "weight_standardize"]
