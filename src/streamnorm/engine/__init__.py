"""What PyTorch asks of a layer: autograd, the compiler, checkpointing, transforms, optimizers, process groups.

No mathematics lives here (that is `core`), no way to compute it (`backends`), and no layer (`nn`).
"""

from .updates import attach, paused

__all__ = ["attach", "paused"]
