"""The name under which older versions pickled these."""

from .affine import Affine
from .batch import GeneralBatchNorm, TimeSpecificNorm
from .sample import SampleNorm

__all__ = ["Affine", "GeneralBatchNorm", "SampleNorm", "TimeSpecificNorm"]
