"""Around the training loop: optimizers, unequal data in several processes, recomputed statistics, the monitor.

Layers never import from here.
"""

from .averaging import update_stats
from .joining import StreamJoin
from .monitoring import Health, LayerHealth, monitor
from .optim import DecoupledUpdate, Manhattan

__all__ = ["DecoupledUpdate", "Health", "LayerHealth", "Manhattan", "StreamJoin", "monitor", "update_stats"]
