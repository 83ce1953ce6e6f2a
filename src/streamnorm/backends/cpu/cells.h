// One timestep of the RNN, of the paper's GRU and of the LSTM, and back. `forward` gets the hidden state before the step
// and writes the one after it; `backward` gets the gradient of what is carried from step to step and replaces it.
// `inner` of a sequence has a cell's activations, each (rows of all timesteps, hidden).
#pragma once

// The part of the recurrent weight W that makes the products of some gates, packed for one of the two passes.
struct Factor {
    const Pass& pass;
    int64_t first, columns;  // of the products
    float *packed, *packed_gradient;

    static int64_t size(const Sequence& seq, int64_t gates) {
        const int64_t hidden = seq.hidden, columns = gates * hidden;
        return std::max(packed_size(hidden, columns), packed_size(columns, hidden)) + packed_size(seq.sizes[0], columns);
    }
    Factor(const Pass& pass, int64_t gate, int64_t gates, bool backward, float* memory)
        : pass(pass), first(gate * pass.hidden), columns(gates * pass.hidden), packed(memory),
          packed_gradient(memory + size(pass.seq, gates) - packed_size(pass.seq.sizes[0], columns)) {
        const float* weight = pass.seq.weight + first * pass.hidden;
        if (backward)
            pack(weight, columns, pass.hidden, pass.hidden, 1, memory);
        else
            pack(weight, pass.hidden, columns, 1, pass.hidden, memory);
    }
    // products = h W^T
    void forward(const Step& step, const float* h) const {
        multiply(step.rows, pass.hidden, columns, h, {pass.hidden, 1}, packed,
                 pass.seq.recurrent + step.row * pass.wide + first, pass.wide, false);
    }
    // dh (+)= dproducts W, and dW^T += h^T dproducts.
    void backward(const Step& step, const float* h, float* dh, bool add) const {
        const float* dproducts = pass.drecurrent + first;
        multiply(step.rows, columns, pass.hidden, dproducts, {pass.wide, 1}, packed, dh, pass.hidden, add);
        if (!pass.dweight) return;
        pack(dproducts, step.rows, columns, pass.wide, 1, packed_gradient);
        multiply(pass.hidden, step.rows, columns, h, {1, pass.hidden}, packed_gradient, pass.dweight + first, pass.wide,
                 true);
    }
};

// Gradients of what is carried from step to step, (samples, hidden) each: of h, and of c of an LSTM.
struct Carried {
    float *h, *c;
};

struct Rnn {
    // Tensors that are carried from step to step, and blocks of as many numbers that backward needs beside them.
    static const int64_t carried = 1, blocks = 1;
    const Pass& pass;
    const Factor factor;
    float* da;

    static int64_t packed(const Sequence& seq) { return Factor::size(seq, 1); }
    Rnn(const Pass& pass, bool backward, float* memory, int64_t)
        : pass(pass), factor(pass, 0, 1, backward, memory), da(memory + packed(pass.seq)) {}

    void forward(const Step& step, const float* h, float* y) const {
        float* fresh = pass.seq.inner + step.row * pass.hidden;
        factor.forward(step, h);
        with_nonlinearity(pass.seq, [&](auto f) { gate_forward(pass, 0, step, fresh, f); });
        std::copy(fresh, fresh + step.rows * pass.hidden, y);
    }
    void backward(const Step& step, const float* h, Carried d) const {
        const int64_t n = step.rows * pass.hidden;
        std::copy(d.h, d.h + n, da);
        through_nonlinearity(pass.seq, n, pass.seq.inner + step.row * pass.hidden, da);
        gate_backward(pass, 0, step, da);
        factor.backward(step, h, d.h, false);
    }
};

struct Gru {
    static const int64_t carried = 1, blocks = 3;
    const Pass& pass;
    const Factor gates, fresh;  // of r and z, which multiply h; of the new state, which multiplies h * r
    float *da, *db, *dreset;

    static int64_t packed(const Sequence& seq) { return Factor::size(seq, 2) + Factor::size(seq, 1); }
    Gru(const Pass& pass, bool backward, float* memory, int64_t block)
        : pass(pass), gates(pass, 0, 2, backward, memory),
          fresh(pass, 2, 1, backward, memory + Factor::size(pass.seq, 2)), da(memory + packed(pass.seq)),
          db(da + block), dreset(db + block) {}

    struct Inner {
        float *r, *z, *fresh, *reset;  // reset: h * r
        Inner(const Pass& pass, const Step& step) {
            const int64_t each = pass.total * pass.hidden;
            r = pass.seq.inner + step.row * pass.hidden, z = r + each, fresh = z + each, reset = fresh + each;
        }
    };

    void forward(const Step& step, const float* __restrict h, float* __restrict y) const {
        const Inner in(pass, step);
        const int64_t n = step.rows * pass.hidden;
        gates.forward(step, h);
        gate_forward(pass, 0, step, in.r, Sigmoid());
        gate_forward(pass, 1, step, in.z, Sigmoid());
        const float *__restrict r = in.r, *__restrict z = in.z, *__restrict made = in.fresh;
        float* __restrict reset = in.reset;
        for (int64_t i = 0; i < n; i++) reset[i] = h[i] * r[i];
        fresh.forward(step, reset);
        with_nonlinearity(pass.seq, [&](auto f) { gate_forward(pass, 2, step, in.fresh, f); });
        for (int64_t i = 0; i < n; i++) y[i] = z[i] * made[i] + (1 - z[i]) * h[i];
    }

    void backward(const Step& step, const float* h, Carried d) const {
        const Inner in(pass, step);
        const int64_t n = step.rows * pass.hidden;
        through_mixture(n, in, h, d.h);
        through_nonlinearity(pass.seq, n, in.fresh, da);
        gate_backward(pass, 2, step, da);
        gate_backward(pass, 1, step, db);
        fresh.backward(step, in.reset, dreset, false);
        through_reset(n, in, h, d.h);
        gate_backward(pass, 0, step, da);
        gates.backward(step, h, d.h, true);
    }
    // To the new state (da), to the argument of z (db), and what goes straight on to the state before (dh).
    void through_mixture(int64_t n, const Inner& in, const float* __restrict h, float* __restrict dh) const {
        const float *__restrict z = in.z, *__restrict made = in.fresh;
        float *__restrict to_new = da, *__restrict to_z = db;
        for (int64_t i = 0; i < n; i++) {
            to_new[i] = dh[i] * z[i];
            to_z[i] = dh[i] * (made[i] - h[i]) * (z[i] * (1 - z[i]));
            dh[i] *= 1 - z[i];
        }
    }
    // To the argument of r (da), and to the state before (dh).
    void through_reset(int64_t n, const Inner& in, const float* __restrict h, float* __restrict dh) const {
        const float *__restrict r = in.r, *__restrict from = dreset;
        float* __restrict to_r = da;
        for (int64_t i = 0; i < n; i++) {
            to_r[i] = from[i] * h[i] * (r[i] * (1 - r[i]));
            dh[i] += from[i] * r[i];
        }
    }
};

struct Lstm {
    static const int64_t carried = 2, blocks = 4;
    static const int64_t CELL = 4;  // which of the activations the cell state is
    const Pass& pass;
    const Factor factor;
    float* da[4];

    static int64_t packed(const Sequence& seq) { return Factor::size(seq, 4); }
    Lstm(const Pass& pass, bool backward, float* memory, int64_t block)
        : pass(pass), factor(pass, 0, 4, backward, memory) {
        for (int64_t gate = 0; gate < 4; gate++) da[gate] = memory + packed(pass.seq) + gate * block;
    }

    struct Inner {
        float *i, *f, *g, *o, *c, *s;  // c: the cell state after the step; s: f(N(c))
        Inner(const Pass& pass, const Step& step) {
            const int64_t each = pass.total * pass.hidden;
            i = pass.seq.inner + step.row * pass.hidden, f = i + each, g = f + each, o = g + each, c = o + each;
            s = c + each;
        }
    };

    // Calls body(first, last, c) for the elements that go on and for those that begin; c: the cell state before.
    template <class Body>
    void each_part(const Step& step, const Inner& in, const Body& body) const {
        const int64_t hidden = pass.hidden, on = step.going_on() * hidden, samples = pass.seq.sizes[0];
        body(0, on, in.c + (step.earlier_row - step.row) * hidden);
        body(on, step.rows * hidden, pass.seq.start + samples * hidden);
    }

    void forward(const Step& step, const float* h, float* __restrict y) const {
        const Inner in(pass, step);
        factor.forward(step, h);
        gate_forward(pass, 0, step, in.i, Sigmoid());
        gate_forward(pass, 1, step, in.f, Sigmoid());
        with_nonlinearity(pass.seq, [&](auto f) { gate_forward(pass, 2, step, in.g, f); });
        gate_forward(pass, 3, step, in.o, Sigmoid());
        each_part(step, in, [&](int64_t first, int64_t last, const float* __restrict before) {
            const float *__restrict i = in.i, *__restrict f = in.f, *__restrict g = in.g;
            float* __restrict c = in.c;
            for (int64_t j = first; j < last; j++) c[j] = f[j] * before[j] + i[j] * g[j];
        });
        with_nonlinearity(pass.seq, [&](auto f) { squash(pass, step, in.c, in.s, f); });
        const float *__restrict o = in.o, *__restrict s = in.s;
        for (int64_t j = 0; j < step.rows * pass.hidden; j++) y[j] = o[j] * s[j];
    }

    void backward(const Step& step, const float* h, Carried d) const {
        const Inner in(pass, step);
        const int64_t n = step.rows * pass.hidden;
        through_output(n, in, d.h);
        through_nonlinearity(pass.seq, n, in.s, da[0]);
        float* to_c = da[pass.seq.cell_norm ? 1 : 0];
        if (pass.seq.cell_norm)
            norm_backward(pass, pass.cell_norm(), step, in.c, pass.hidden, da[0], to_c, pass.hidden);
        for (int64_t j = 0; j < n; j++) d.c[j] += to_c[j];
        each_part(step, in, [&](int64_t first, int64_t last, const float* before) {
            through_cell(first, last, in, before, d.c);
        });
        through_nonlinearity(pass.seq, n, in.g, da[2]);
        for (int64_t gate = 0; gate < 4; gate++) gate_backward(pass, gate, step, da[gate]);
        factor.backward(step, h, d.h, false);
    }
    // To the argument of o, and to s (da[0], for a while).
    void through_output(int64_t n, const Inner& in, const float* __restrict dh) const {
        const float *__restrict o = in.o, *__restrict s = in.s;
        float *__restrict to_s = da[0], *__restrict to_o = da[3];
        for (int64_t j = 0; j < n; j++) {
            to_s[j] = dh[j] * o[j];
            to_o[j] = dh[j] * s[j] * (o[j] * (1 - o[j]));
        }
    }
    // To the arguments of i and f, to g, and to the cell state before (dc).
    void through_cell(int64_t first, int64_t last, const Inner& in, const float* __restrict before,
                      float* __restrict dc) const {
        const float *__restrict i = in.i, *__restrict f = in.f, *__restrict g = in.g;
        float *__restrict to_i = da[0], *__restrict to_f = da[1], *__restrict to_g = da[2];
        for (int64_t j = first; j < last; j++) {
            to_i[j] = dc[j] * g[j] * (i[j] * (1 - i[j]));
            to_f[j] = dc[j] * before[j] * (f[j] * (1 - f[j]));
            to_g[j] = dc[j] * i[j];
            dc[j] *= f[j];
        }
    }
};
