"""Weight standardization as plain loops over NumPy float64 numbers, from its paper (Qiao et al. 2019).

Nothing here imports the package. Which weights belong to an output filter is read off what a layer computes: the
output channel o of group g sees the inputs of group g alone.
"""

from math import sqrt

import numpy as np


def filters(shape, groups, transposed):
    """For each output channel, the indices of its weights: I of them, the fan-in."""
    found = []
    if not transposed:  # (out, in / groups, *kernel)
        for out in range(shape[0]):
            found.append([(out, *rest) for rest in np.ndindex(*shape[1:])])
        return found
    per_group = shape[0] // groups  # (in, out / groups, *kernel)
    for group in range(groups):
        for out in range(shape[1]):
            inputs = range(group * per_group, (group + 1) * per_group)
            found.append([(i, out, *place) for i in inputs for place in np.ndindex(*shape[2:])])
    return found


def standardized(w, eps, groups=1, transposed=False):
    """W_hat = (W - mu) / sigma with mu = sum W / I and sigma = sqrt(sum (W - mu)^2 / I + eps)."""
    result = np.full(w.shape, np.nan)
    for indices in filters(w.shape, groups, transposed):
        mu = sum(w[i] for i in indices) / len(indices)
        sigma = sqrt(sum((w[i] - mu) ** 2 for i in indices) / len(indices) + eps)
        for i in indices:
            result[i] = (w[i] - mu) / sigma
    return result


def scale(w, eps, groups=1, transposed=False):
    """What `keep_scale` multiplies by: sqrt(average over the filters of sum (W - mu)^2 / I, plus eps)."""
    variances = []
    for indices in filters(w.shape, groups, transposed):
        mu = sum(w[i] for i in indices) / len(indices)
        variances.append(sum((w[i] - mu) ** 2 for i in indices) / len(indices))
    return sqrt(sum(variances) / len(variances) + eps)


def gradient(w, g, eps, groups=1, transposed=False):
    """dL/dW for g = dL/dW_hat, by the whole Jacobian of each filter: d W_hat_j / d W_k."""
    result = np.full(w.shape, np.nan)
    for indices in filters(w.shape, groups, transposed):
        n = len(indices)
        mu = sum(w[i] for i in indices) / n
        sigma = sqrt(sum((w[i] - mu) ** 2 for i in indices) / n + eps)
        for k in indices:
            total = 0.0
            for j in indices:
                d_centered = (1.0 if j == k else 0.0) - 1 / n
                d_sigma = (w[k] - mu) / (n * sigma)
                total += g[j] * (d_centered / sigma - (w[j] - mu) * d_sigma / sigma**2)
            result[k] = total
    return result
