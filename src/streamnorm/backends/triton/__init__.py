"""Triton kernels for GPUs: a call of a layer in three launches forward and three backward, nothing read by the host.

`layer` is what a call passes through, `launch` starts the kernels, `tiling` says how many programs share the work.
`passes` are the kernels over activations, the twin of core/statistics.py; `statistics`, `gradients` and `rules` those
over the vectors of the state, the twin of core/algorithm.py. `sequence` and `steps` walk through recurrent layers;
`gates` are the kernels for all norms of a timestep, `cells` and `cells_back` what is done with them. No rule is decided
here. Kernels need triton, and are imported by the first call that is served: never by `import streamnorm`.
"""

from .layer import Triton

BACKEND = Triton()
