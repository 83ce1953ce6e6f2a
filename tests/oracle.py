"""The paper's algorithms as plain loops over NumPy float64 numbers, slow and literal. The layers are compared to these.

Nothing here imports the package: a reference is a tuple (samples, channels, space), as in the table of the design.
"""

from itertools import product
from math import hypot

import numpy as np

REFERENCES = {
    "BA1": (True, "each", "all"),
    "BA2": (True, "all", "all"),
    "BA3": (True, "all", 5),
    "BA4": (True, "each", 5),
    "BA5": (True, "all", 1),
    "BA6": (True, "each", 1),
    "SP1": (False, "all", "all"),
    "SP2": (False, "each", "all"),
    "SP3": (False, "all", 5),
    "SP4": (False, "each", 5),
    "SP5": (False, "all", 1),
}


def statistic_of(index, reference):
    """The name of the statistic that normalizes the neuron at index (n, c, *location)."""
    samples, channels, space = reference
    n, c, *location = index
    return (None if samples else n, c if channels == "each" else None, None if space == "all" else tuple(location))


def members(name, shape, reference, mask=None):
    """All activations in the reference of a statistic."""
    n, c, location = name
    space = reference[2]
    found = []
    for index in np.ndindex(*shape):
        if n is not None and index[0] != n:
            continue
        if c is not None and index[1] != c:
            continue
        if location is not None and any(abs(a - b) > space // 2 for a, b in zip(index[2:], location, strict=True)):
            continue
        if mask is not None and not mask[(index[0], *index[2:])]:
            continue
        found.append(index)
    return found


class Statistics:
    """S(x) for every statistic of a mini-batch, and its derivative."""

    def __init__(self, x, reference, p, eps, mask=None):
        self.x, self.reference, self.p, self.eps = x, reference, p, eps
        names = dict.fromkeys(statistic_of(index, reference) for index in np.ndindex(*x.shape))
        everyone = {name: members(name, x.shape, reference, mask) for name in names}
        self.members = {name: found for name, found in everyone.items() if found}
        self.mean = {name: sum(x[i] for i in found) / len(found) for name, found in self.members.items()}

    def center_at(self, center, own):
        """`center`: from the name of a statistic to c; `own`: whether that is its own mean."""
        self.c, self.own = {name: center(name) for name in self.members}, own
        self.sigma = {}
        for name, found in self.members.items():
            moment = sum(abs(self.x[i] - self.c[name]) ** self.p for i in found) / len(found)
            self.sigma[name] = (moment + self.eps ** (self.p / 2)) ** (1 / self.p)

    def gradient(self, g_mean, g_sigma):
        """(dS/dx)^T g."""
        dx = np.zeros_like(self.x)
        for name, found in self.members.items():
            n, c, p = len(found), self.c[name], self.p
            slope = {i: abs(self.x[i] - c) ** (p - 1) * np.sign(self.x[i] - c) for i in found}
            outer = self.sigma[name] ** (1 - p) / n
            for i in found:
                direct = slope[i] - (sum(slope.values()) / n if self.own else 0)
                dx[i] += g_mean[name] / n + g_sigma[name] * outer * direct
        return dx


class Call:
    """One forward pass: what was used, for its own backward pass."""

    def __init__(self, x, own, mean, sigma, reference, weight, mask, w=1.0, window=None, large=False):
        self.x, self.own, self.mean, self.sigma, self.w = x, own, mean, sigma, w
        self.reference, self.weight, self.mask, self.window, self.large = reference, weight, mask, window, large

    def real(self):
        for index in np.ndindex(*self.x.shape):
            if self.mask is None or self.mask[(index[0], *index[2:])]:
                yield index, self.user(index)

    def user(self, index):
        return statistic_of(index, self.reference)

    def output(self, bias):
        y = np.zeros_like(self.x)
        for i, name in self.real():
            y[i] = self.weight[i[1]] * (self.x[i] - self.mean[name]) / self.sigma[name] + bias[i[1]]
        return y

    def backward(self, dy, stream):
        """`stream` maps dE/ds_hat to what flows on: two dictionaries in, two dictionaries out."""
        dx, dweight, dbias = np.zeros_like(self.x), np.zeros_like(self.weight), np.zeros_like(self.weight)
        g_mean, g_sigma = dict.fromkeys(self.mean, 0.0), dict.fromkeys(self.sigma, 0.0)
        for i, name in self.real():
            sigma, centered, channel = self.sigma[name], self.x[i] - self.mean[name], i[1]
            dweight[channel] += dy[i] * centered / sigma
            dbias[channel] += dy[i]
            dx[i] = dy[i] * self.weight[channel] / sigma
            g_mean[name] -= dy[i] * self.weight[channel] / sigma
            g_sigma[name] -= dy[i] * self.weight[channel] * centered / sigma**2
        return dx + self.own.gradient(*stream(g_mean, g_sigma)), dweight, dbias


class Stream:
    """long, short, count; a value is a dictionary from statistic to number."""

    def __init__(self):
        self.long, self.short, self.count = None, None, 0

    def push(self, value):
        self.count += 1
        if self.count == 1:
            self.short = dict(value)
        else:
            self.short = {k: v + (value[k] - v) / self.count for k, v in self.short.items()}

    def blend(self, a, b):
        long = self.short if self.long is None else self.long
        return {k: a * long[k] + b * self.short[k] for k in self.short}

    def fold(self, keep, take):
        if self.count == 0:
            return
        if self.long is None:
            self.long = dict(self.short)
        else:
            self.long = {k: keep * self.long[k] + take * self.short[k] for k in self.short}
        self.count = 0


class StreamingOracle:
    """Streaming Normalization with its warm start, its guard and its memory for evaluation."""

    def __init__(
        self,
        channels,
        reference,
        p,
        center,
        alpha=(0.7, 0.3),
        beta=(0.7, 0.3, 0),
        kappa=None,
        warmup=256,
        eps=1e-5,
        guard=True,
        eval_memory=None,
    ):
        self.eval_memory, self.samples = (64 if guard else 0) if eval_memory is None else eval_memory, 0
        self.lasting = {"mean": Stream(), "sigma": Stream()}  # as H1, folded more slowly
        self.guard, self.elements, self.elements_before, self.counted = guard, 0.0, None, 0.0
        self.reference, self.p, self.center, self.eps = reference, p, center, eps
        self.alpha, self.beta, self.kappa = alpha, beta, kappa or (*alpha, *alpha)
        self.warmup, self.seen, self.pending = warmup, 0.0, False
        self.weight, self.bias = np.ones(channels), np.zeros(channels)
        self.stats = {"mean": Stream(), "sigma": Stream()}
        self.grads = {"mean": Stream(), "sigma": Stream()}
        self.latest = self.tested = None

    def weights_updated(self):
        self.pending = True

    def weights(self, long, short, elements, part=None):
        """Of a window of so many elements, which is `part` of everything so far; they are known from the second on."""
        if not self.guard or elements is None or elements >= 256 or long == 0:
            return long, short
        taken = short * (elements / 256) ** (2 / 3)
        if part is not None:
            taken = max(taken, (long + short) * part)
        return long + short - taken, taken

    def slowed(self, long, short, part=0.0):
        """Weights for evaluation: what the window holds of its memory, at most, and `part` at least."""
        if not self.eval_memory or long == 0:
            return long, short
        taken = min(short, (long + short) * max(self.samples / self.eval_memory, part))
        return long + short - taken, taken

    def window(self):
        return None if self.elements_before is None else max(self.elements_before, self.elements)

    def pooled(self, name):
        """The stored statistic that a sample's statistic contributes to."""
        return (None, *name[1:])

    def forward(self, x, mask=None, step=0):
        if self.pending:
            k1, k2, k3, k4 = self.kappa
            share = self.elements / max(self.counted, 1)
            for part in ("mean", "sigma"):
                weights = self.weights(k1, k2, self.elements or None, share)
                self.lasting[part].fold(*self.slowed(*weights, share))
                self.stats[part].fold(*weights)
                self.grads[part].fold(*self.weights(k3, k4, self.elements or None, share))
            if self.elements:
                self.elements_before, self.elements, self.samples = self.elements, 0.0, 0
            self.pending = False
        own = Statistics(x, self.reference, self.p, self.eps, mask)
        layer_mean = sum(own.mean.values()) / len(own.mean)
        first = layer_mean if self.warmup else 0.0
        center = {
            "mean": lambda name: own.mean[name],
            "zero": lambda name: 0.0,
            "running": lambda name: first if self.latest is None else self.latest["mean"][self.pooled(name)],
        }[self.center]
        own.center_at(center, self.center == "mean")
        samples = {}
        for name in own.members:
            samples.setdefault(self.pooled(name), []).append(name)
        new = sum(len(found) for found in own.members.values()) / len(samples)
        self.seen += new
        here = len({index[0] for found in own.members.values() for index in found})
        per_location = x.shape[1] if self.reference[1] == "all" else 1
        unlike = min(new, 12 * here * per_location)  # locations of a sample are alike
        self.counted -= self.elements
        self.elements = max(self.elements + unlike if step == 0 else self.elements, unlike)  # a sequence counts once
        self.counted += self.elements
        self.samples = max(self.samples + here if step == 0 else self.samples, here)
        s_hat, tested = {}, {}
        for part in ("mean", "sigma"):
            values = getattr(own, part)
            s = {key: sum(values[n] for n in names) / len(names) for key, names in samples.items()}
            self.stats[part].push(s)
            self.lasting[part].push(s)
            weights = self.weights(*self.alpha, self.window())
            s_hat[part] = self.stats[part].blend(*weights)
            tested[part] = self.lasting[part].blend(*self.slowed(*weights))
        w = min(1.0, self.seen / self.warmup) if self.warmup else 1.0
        layer = {
            "mean": layer_mean,
            "sigma": (sum(v**self.p for v in own.sigma.values()) / len(own.sigma)) ** (1 / self.p),
        }
        self.latest, self.tested = (
            {part: {key: w * v + (1 - w) * layer[part] for key, v in found[part].items()} for part in found}
            for found in (s_hat, tested)
        )
        large = (self.elements_before or 0) >= 256 and new >= 32 * here * per_location
        return self.call(x, own, mask, self.latest, w, self.window(), large)

    def call(self, x, own, mask, by, w=1.0, window=None, large=False):
        names = dict.fromkeys(statistic_of(index, self.reference) for index in np.ndindex(*x.shape))
        used = {
            part: {name: by[part][self.pooled(name)] for name in names if self.pooled(name) in by[part]}
            for part in ("mean", "sigma")
        }
        return Call(x, own, used["mean"], used["sigma"], self.reference, self.weight.copy(), mask, w, window, large)

    def evaluate(self, x):
        return self.call(x, None, None, self.tested if self.eval_memory else self.latest).output(self.bias)

    def backward(self, call, dy):
        def stream(*g_users):
            gs, g_hats = [], []
            for part, g_user in zip(("mean", "sigma"), g_users, strict=True):
                g = {}
                for name, value in g_user.items():
                    g[self.pooled(name)] = g.get(self.pooled(name), 0.0) + value
                self.grads[part].push(g)
                b1, b2, b3 = self.beta
                long, short = self.weights(b1, b2, call.window)
                blend = self.grads[part].blend(long, short)
                if self.guard and call.large and b1 != 0:  # half of `short` is its own
                    blend = {key: v + short * (g[key] - self.grads[part].short[key]) / 2 for key, v in blend.items()}
                gs.append(g)
                g_hats.append({key: blend[key] + b3 * g[key] for key in g})
            length, streamed = (hypot(*(v for one in both for v in one.values())) for both in (gs, g_hats))
            small = self.guard and call.window is not None and call.window < 256
            factor = call.w * (length / streamed if small and streamed > length else 1.0)
            flows = []
            for g_hat in g_hats:
                samples = {key: sum(self.pooled(n) == key for n in call.own.members) for key in g_hat}
                flows.append({n: factor * g_hat[self.pooled(n)] / samples[self.pooled(n)] for n in call.own.members})
            return flows

        return call.backward(dy, stream)


class BatchOracle:
    """General Batch Normalization, with one set of running estimates per timestep; sample normalization without."""

    def __init__(self, channels, reference, p, center, momentum=0.1, steps=1, eps=1e-5):
        self.reference, self.p, self.center, self.eps, self.momentum = reference, p, center, eps, momentum
        self.weight, self.bias = np.ones(channels), np.zeros(channels)
        self.running = [{"mean": {}, "sigma": {}} for _ in range(steps)]

    def forward(self, x, mask=None, step=0):
        own = Statistics(x, self.reference, self.p, self.eps, mask)
        running = self.running[min(step, len(self.running) - 1)]
        center = {
            "mean": lambda name: own.mean[name],
            "zero": lambda name: 0.0,
            "running": lambda name: running["mean"].get(name, 0.0),
        }[self.center]
        own.center_at(center, self.center == "mean")
        if step < len(self.running):
            for part, start in (("mean", 0.0), ("sigma", 1.0)):
                for name, s in getattr(own, part).items():
                    running[part][name] = (1 - self.momentum) * running[part].get(name, start) + self.momentum * s
        return Call(x, own, own.mean, own.sigma, self.reference, self.weight.copy(), mask)

    def evaluate(self, x, step=0):
        running = self.running[min(step, len(self.running) - 1)]
        call = Call(x, None, running["mean"], running["sigma"], self.reference, self.weight, None)
        return call.output(self.bias)

    def backward(self, call, dy):
        return call.backward(dy, lambda g_mean, g_sigma: (g_mean, g_sigma))


def stacked(value, channels, space, reference):
    """A dictionary of statistics as an array of the shape that the layers store."""
    _, per_channel, per_location = reference
    rows = range(channels) if per_channel == "each" else [None]
    places = [None] if per_location == "all" else list(product(*map(range, space)))
    out = np.array([[value[(None, c, place)] for place in places] for c in rows])
    return out.reshape(((channels,) if per_channel == "each" else ()) + (() if per_location == "all" else space))
