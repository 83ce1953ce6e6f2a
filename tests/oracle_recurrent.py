"""Normalized RNN, GRU and LSTM, step by step in NumPy, forward and backward; norms come from `oracle`."""

import numpy as np
from oracle import StreamingOracle


def tanh(u):
    return np.tanh(u), 1 - np.tanh(u) ** 2


def relu(u):
    return np.maximum(u, 0), (u > 0).astype(float)


def sigmoid(u):
    s = 1 / (1 + np.exp(-u))
    return s, s * (1 - s)


class RecurrentOracle:
    """`norms_x`, `norms_h`: one norm oracle per gate. Gates of the GRU are r, z, new; of the LSTM i, f, g, o.

    `norm_c`: of the cell state of an LSTM, or None. What is carried is an array, or a pair (h, c).
    """

    def __init__(self, weight_x, weight_h, norms_x, norms_h, f, norm_c=None):
        self.weight_x, self.weight_h = weight_x, weight_h  # one matrix per gate
        self.norms_x, self.norms_h, self.norm_c, self.f = norms_x, norms_h, norm_c, f

    def normalized(self, v, norm):
        call = norm.forward(v, **({"step": self.t} if isinstance(norm, StreamingOracle) else {}))
        return call.output(norm.bias), (norm, call)

    def normalized_backward(self, d, record):
        norm, call = record
        dv, dgain, dbias = norm.backward(call, d)
        self.add({("gain", id(norm)): dgain, ("bias", id(norm)): dbias})
        return dv

    def product(self, v, weight, norm):
        y, record = self.normalized(v @ weight.T, norm)
        return y, (v, weight, record)

    def product_backward(self, d, record):
        """Gradient of the input vector; weight, gain and bias gradients are added up."""
        v, weight, normalized = record
        dp = self.normalized_backward(d, normalized)
        self.add({id(weight): dp.T @ v})
        return dp @ weight

    def add(self, gradients):
        for store, value in gradients.items():
            self.gradients[store] = self.gradients.get(store, 0) + value

    def forward(self, xs, h):
        self.records, self.gradients, outputs = [], {}, []
        for self.t, x in enumerate(xs):
            h, record = self.step(x, h)
            self.records.append(record)
            outputs.append(h[0] if isinstance(h, tuple) else h)
        self.final = h
        return np.stack(outputs)

    def backward(self, douts, dh=0):
        """`dh`: gradient of what is carried, after the last step. Returns those of the inputs and before the first."""
        dxs = []
        for record, dout in zip(reversed(self.records), reversed(douts), strict=True):
            dx, dh = self.step_backward(record, (dh[0] + dout, dh[1]) if isinstance(dh, tuple) else dh + dout)
            dxs.append(dx)
        return np.stack(dxs[::-1]), dh


class RNNOracle(RecurrentOracle):
    def step(self, x, h):
        a, from_x = self.product(x, self.weight_x[0], self.norms_x[0])
        b, from_h = self.product(h, self.weight_h[0], self.norms_h[0])
        out, slope = self.f(a + b)
        return out, (from_x, from_h, slope)

    def step_backward(self, record, dh):
        from_x, from_h, slope = record
        return self.product_backward(dh * slope, from_x), self.product_backward(dh * slope, from_h)


class GRUOracle(RecurrentOracle):
    def step(self, x, h):
        sides, gates = [], []
        for g in range(2):
            a, from_x = self.product(x, self.weight_x[g], self.norms_x[g])
            b, from_h = self.product(h, self.weight_h[g], self.norms_h[g])
            sides.append((from_x, from_h))
            gates.append(sigmoid(a + b))
        (r, dr), (z, dz) = gates
        a, from_x = self.product(x, self.weight_x[2], self.norms_x[2])
        b, from_h = self.product(h * r, self.weight_h[2], self.norms_h[2])
        new, dnew = self.f(a + b)
        return z * new + (1 - z) * h, (sides, (from_x, from_h), h, r, dr, z, dz, new, dnew)

    def step_backward(self, record, dout):
        sides, (from_x, from_h), h, r, dr, z, dz, new, dnew = record
        d = dout * z * dnew
        dx, dreset = self.product_backward(d, from_x), self.product_backward(d, from_h)
        dh = dout * (1 - z) + dreset * r
        for (gate_x, gate_h), d in zip(sides, (dreset * h * dr, dout * (new - h) * dz), strict=True):
            dx, dh = dx + self.product_backward(d, gate_x), dh + self.product_backward(d, gate_h)
        return dx, dh


class GRUResetAfterOracle(RecurrentOracle):
    """The form of torch.nn.GRU: r multiplies the normalized product, and z weighs the old state."""

    def step(self, x, h):
        from_x, from_h = [], []
        for g in range(3):
            from_x.append(self.product(x, self.weight_x[g], self.norms_x[g]))
            from_h.append(self.product(h, self.weight_h[g], self.norms_h[g]))
        r, dr = sigmoid(from_x[0][0] + from_h[0][0])
        z, dz = sigmoid(from_x[1][0] + from_h[1][0])
        new, dnew = self.f(from_x[2][0] + r * from_h[2][0])
        return (1 - z) * new + z * h, (from_x, from_h, h, r, dr, z, dz, new, dnew)

    def step_backward(self, record, dout):
        from_x, from_h, h, r, dr, z, dz, new, dnew = record
        d_new = dout * (1 - z) * dnew
        d_z = dout * (h - new) * dz
        d_r = d_new * from_h[2][0] * dr
        dx, dh = 0, dout * z
        for g, (to_x, to_h) in enumerate(((d_r, d_r), (d_z, d_z), (d_new, d_new * r))):
            dx = dx + self.product_backward(to_x, from_x[g][1])
            dh = dh + self.product_backward(to_h, from_h[g][1])
        return dx, dh


class LSTMOracle(RecurrentOracle):
    def step(self, x, carried):
        h, c = carried
        from_x, from_h, gates = [], [], []
        for g, squash in enumerate((sigmoid, sigmoid, self.f, sigmoid)):
            a, record_x = self.product(x, self.weight_x[g], self.norms_x[g])
            b, record_h = self.product(h, self.weight_h[g], self.norms_h[g])
            from_x.append(record_x)
            from_h.append(record_h)
            gates.append(squash(a + b))
        (i, _), (forget, _), (g, _), (o, _) = gates
        new = forget * c + i * g
        normal, from_c = (new, None) if self.norm_c is None else self.normalized(new, self.norm_c)
        out, slope = self.f(normal)
        return (o * out, new), (from_x, from_h, from_c, gates, c, out, slope)

    def step_backward(self, record, d):
        from_x, from_h, from_c, ((i, di), (forget, df), (g, dg), (o, do)), c, out, slope = record
        dout, dc = d
        to_c = dout * o * slope
        dc = dc + (to_c if from_c is None else self.normalized_backward(to_c, from_c))
        dx = dh = 0
        for k, to_gate in enumerate((dc * g * di, dc * c * df, dc * i * dg, dout * out * do)):
            dx, dh = dx + self.product_backward(to_gate, from_x[k]), dh + self.product_backward(to_gate, from_h[k])
        return dx, (dh, dc * forget)
