"""Norms of other papers as plain loops over NumPy float64 numbers, each from its paper's equations.

Nothing here imports the package. x is (N, C, S): S places, of which there may be one. `forward` gives y and keeps what
`backward` needs, `backward` takes dE/dy and gives dE/dx, dE/dgain, dE/dbias; the state is in plain attributes.
"""

from math import sqrt

import numpy as np


class Affine:
    """y = gain * x_hat + bias, in whose loops each norm fills in x_hat and dE/dx."""

    def __init__(self, channels, gain, bias):
        self.channels, self.gain, self.bias = channels, gain, bias

    def forward(self, x):
        self.x, self.hat = x, np.full(x.shape, np.nan)
        for c in range(self.channels):
            self.normalize(c)
        y = np.full(x.shape, np.nan)
        for n, c, s in np.ndindex(*x.shape):
            y[n, c, s] = self.gain[c] * self.hat[n, c, s] + self.bias[c]
        self.after_forward()
        return y

    def backward(self, g):
        d_gain, d_bias = np.zeros(self.channels), np.zeros(self.channels)
        d_hat, self.d_x = np.full(g.shape, np.nan), np.full(g.shape, np.nan)
        for n, c, s in np.ndindex(*g.shape):
            d_gain[c] += g[n, c, s] * self.hat[n, c, s]
            d_bias[c] += g[n, c, s]
            d_hat[n, c, s] = g[n, c, s] * self.gain[c]
        for c in range(self.channels):
            self.pull_back(c, d_hat)
        self.after_backward()
        return self.d_x, d_gain, d_bias

    def places(self):
        return [(n, s) for n in range(self.x.shape[0]) for s in range(self.x.shape[2])]

    def after_forward(self):
        pass

    def after_backward(self):
        pass


class Renorm(Affine):
    """Ioffe 2017, Algorithm 1, with bounds on r and d that grow linearly after `schedule[0]` calls."""

    def __init__(self, channels, gain, bias, schedule, rate=0.01, eps=1e-5):
        super().__init__(channels, gain, bias)
        self.schedule, self.rate, self.eps, self.calls = schedule, rate, eps, 0
        self.mean, self.sigma = [0.0] * channels, [1.0] * channels

    def bounds(self):
        start, d_end, r_end = self.schedule
        if self.calls <= start:
            return 1.0, 0.0
        r = 3.0 if self.calls >= r_end else 1 + 2 * (self.calls - start) / (r_end - start)
        d = 5.0 if self.calls >= d_end else 5 * (self.calls - start) / (d_end - start)
        return r, d

    def normalize(self, c):
        if c == 0:
            self.m, self.s, self.r = [], [], []
        count = len(self.places())
        m = sum(self.x[n, c, s] for n, s in self.places()) / count
        sigma = sqrt(sum((self.x[n, c, s] - m) ** 2 for n, s in self.places()) / count + self.eps)
        r_max, d_max = self.bounds()
        r = min(max(sigma / self.sigma[c], 1 / r_max), r_max)
        d = min(max((m - self.mean[c]) / self.sigma[c], -d_max), d_max)
        for n, s in self.places():
            self.hat[n, c, s] = (self.x[n, c, s] - m) / sigma * r + d
        self.m.append(m)
        self.s.append(sigma)
        self.r.append(r)

    def after_forward(self):
        for c in range(self.channels):
            self.mean[c] += self.rate * (self.m[c] - self.mean[c])
            self.sigma[c] += self.rate * (self.s[c] - self.sigma[c])
        self.calls += 1

    def pull_back(self, c, d_hat):
        """dE/dsigma_B and dE/dmu_B of the paper, then dE/dx; r and d are constants."""
        m, sigma, r, count = self.m[c], self.s[c], self.r[c], len(self.places())
        d_sigma = sum(d_hat[n, c, s] * (self.x[n, c, s] - m) * -r / sigma**2 for n, s in self.places())
        d_mean = sum(d_hat[n, c, s] * -r / sigma for n, s in self.places())
        for n, s in self.places():
            self.d_x[n, c, s] = (
                d_hat[n, c, s] * r / sigma + d_sigma * (self.x[n, c, s] - m) / (count * sigma) + d_mean / count
            )

    def evaluate(self, x):
        y = np.full(x.shape, np.nan)
        for n, c, s in np.ndindex(*x.shape):
            y[n, c, s] = self.gain[c] * (x[n, c, s] - self.mean[c]) / self.sigma[c] + self.bias[c]
        return y


class Mabn(Affine):
    """Yan et al. 2020: averages over the last m calls of q forward and of psi backward, kept as whole lists here."""

    def __init__(self, channels, gain, bias, schedule, eps=1e-5):
        super().__init__(channels, gain, bias)
        self.schedule, self.eps = schedule, eps
        self.squares, self.psis = [[] for _ in range(channels)], [[] for _ in range(channels)]
        self.running = [1.0] * channels

    def averaged(self, values):
        memory, warm, _ = self.schedule
        if len(values) <= max(memory, warm):
            return values[-1]
        return sum(values[-memory:]) / memory

    def normalize(self, c):
        if c == 0:
            self.scale, self.r = [], []
        self.squares[c].append(sum(self.x[n, c, s] ** 2 for n, s in self.places()) / len(self.places()))
        square, call = self.averaged(self.squares[c]), len(self.squares[c])
        scale, r = sqrt(square + self.eps), 1.0
        if call > self.schedule[2]:
            r = min(max(scale / sqrt(self.running[c] + self.eps), 1 / 5), 5.0)
        self.running[c] = square if call == 1 else 0.98 * self.running[c] + 0.02 * square
        for n, s in self.places():
            self.hat[n, c, s] = r * self.x[n, c, s] / scale
        self.scale.append(scale)
        self.r.append(r)

    def pull_back(self, c, d_hat):
        r, scale, count = self.r[c], self.scale[c], len(self.places())
        z = {(n, s): self.x[n, c, s] / scale for n, s in self.places()}
        self.psis[c].append(sum(r * d_hat[n, c, s] * z[n, s] for n, s in self.places()) / count)
        psi = self.averaged(self.psis[c])
        for n, s in self.places():
            self.d_x[n, c, s] = (r * d_hat[n, c, s] - z[n, s] * psi) / scale

    def evaluate(self, x):
        y = np.full(x.shape, np.nan)
        for n, c, s in np.ndindex(*x.shape):
            y[n, c, s] = self.gain[c] * x[n, c, s] / sqrt(self.running[c] + self.eps) + self.bias[c]
        return y


class Frn(Affine):
    """Singh & Krishnan 2019: each channel of each sample by itself."""

    def __init__(self, channels, gain, bias, eps=1e-6):
        super().__init__(channels, gain, bias)
        self.eps = eps

    def scale(self, n, c):
        places = range(self.x.shape[2])
        return sqrt(sum(self.x[n, c, s] ** 2 for s in places) / len(places) + self.eps)

    def normalize(self, c):
        for n, s in self.places():
            self.hat[n, c, s] = self.x[n, c, s] / self.scale(n, c)

    def pull_back(self, c, d_hat):
        """By the whole Jacobian: d hat_j / d x_k = (j == k) / scale - x_j x_k / (S scale^3)."""
        places = range(self.x.shape[2])
        for n, k in self.places():
            scale, total = self.scale(n, c), 0.0
            for j in places:
                slope = (j == k) / scale - self.x[n, c, j] * self.x[n, c, k] / (len(places) * scale**3)
                total += d_hat[n, c, j] * slope
            self.d_x[n, c, k] = total


def tlu(y, tau, g):
    """max(y, tau), dE/dy and dE/dtau."""
    z, d_y, d_tau = np.full(y.shape, np.nan), np.zeros(y.shape), np.zeros(len(tau))
    for n, c, s in np.ndindex(*y.shape):
        z[n, c, s] = max(y[n, c, s], tau[c])
        if y[n, c, s] > tau[c]:
            d_y[n, c, s] = g[n, c, s]
        else:
            d_tau[c] += g[n, c, s]
    return z, d_y, d_tau


class Online:
    """Chiley et al. 2019: one sample after the other, forward and backward; gain and bias; layer scaling."""

    def __init__(self, channels, gain, bias, forward_decay=0.999, backward_decay=0.99, eps=1e-5):
        self.channels, self.gain, self.bias, self.eps = channels, gain, bias, eps
        self.a, self.b = forward_decay, backward_decay
        self.mean, self.var = [0.0] * channels, [1.0] * channels
        self.error_y, self.error_1 = [0.0] * channels, [0.0] * channels

    def forward(self, x):
        self.y, self.affine, z = (np.full(x.shape, np.nan) for _ in range(3))
        self.scales, self.layer = np.full(x.shape[:2], np.nan), []
        places = range(x.shape[2])
        for n in range(len(x)):
            for c in range(self.channels):
                scale = sqrt(self.var[c] + self.eps)
                self.scales[n, c] = scale
                for s in places:
                    self.y[n, c, s] = (x[n, c, s] - self.mean[c]) / scale
                    self.affine[n, c, s] = self.gain[c] * self.y[n, c, s] + self.bias[c]
                m = sum(x[n, c, s] for s in places) / len(places)
                v = sum((x[n, c, s] - m) ** 2 for s in places) / len(places)
                self.var[c] = self.a * self.var[c] + (1 - self.a) * v + self.a * (1 - self.a) * (m - self.mean[c]) ** 2
                self.mean[c] = self.a * self.mean[c] + (1 - self.a) * m
            size = self.channels * len(places)
            self.layer.append(sqrt(sum(value**2 for value in self.affine[n].flat) / size + self.eps))
            for c in range(self.channels):
                for s in places:
                    z[n, c, s] = self.affine[n, c, s] / self.layer[n]
        return z

    def backward(self, g):
        d_x, d_gain, d_bias = np.full(g.shape, np.nan), np.zeros(self.channels), np.zeros(self.channels)
        places, size = range(g.shape[2]), self.channels * g.shape[2]
        for n in range(len(g)):
            along = sum(g[n, c, s] * self.affine[n, c, s] for c in range(self.channels) for s in places)
            for c in range(self.channels):
                controlled = []
                for s in places:
                    # Layer scaling: z_j = a_j / L with L = sqrt(mean a^2 + eps)
                    d_affine = g[n, c, s] / self.layer[n] - self.affine[n, c, s] * along / (size * self.layer[n] ** 3)
                    d_gain[c] += d_affine * self.y[n, c, s]
                    d_bias[c] += d_affine
                    controlled.append(d_affine * self.gain[c] - (1 - self.b) * self.error_y[c] * self.y[n, c, s])
                self.error_y[c] += sum(controlled[s] * self.y[n, c, s] for s in places) / len(places)
                for s in places:
                    d_x[n, c, s] = controlled[s] / self.scales[n, c] - (1 - self.b) * self.error_1[c]
                self.error_1[c] += sum(d_x[n, c, s] for s in places) / len(places)
        return d_x, d_gain, d_bias

    def evaluate(self, x):
        y = np.full(x.shape, np.nan)
        for n in range(len(x)):
            for c in range(self.channels):
                for s in range(x.shape[2]):
                    hat = (x[n, c, s] - self.mean[c]) / sqrt(self.var[c] + self.eps)
                    y[n, c, s] = self.gain[c] * hat + self.bias[c]
            y[n] /= sqrt(sum(value**2 for value in y[n].flat) / y[n].size + self.eps)
        return y


def centralized(w):
    """Each output filter without its mean over the fan-in."""
    result = np.full(w.shape, np.nan)
    for out in range(len(w)):
        mean = sum(w[out].flat) / w[out].size
        for rest in np.ndindex(*w.shape[1:]):
            result[(out, *rest)] = w[(out, *rest)] - mean
    return result
