// Whole sequences of the streaming-normalized RNN and GRU, forward and backward. Statistics are streamed step by step,
// as the layer would be called step by step; the products of the input come from one matrix product before, and the
// gradient of the recurrent weight from one after.
#pragma once

// A timestep, and its neighbours in the order in which the sequence is walked.
struct Step {
    int64_t t, row, rows;    // timestep, its first row, its rows
    int64_t earlier, later;  // rows of the steps walked before and after it, 0 at the ends
    int64_t earlier_row;     // first row of the step walked before
};

// Calls visit(step) for every timestep in the direction of the sequence, or against it.
template <class Visit>
inline void walk(const Sequence& seq, bool against, const Visit& visit) {
    const int64_t steps = seq.steps, *sizes = seq.sizes;
    const bool falling = (seq.reverse != 0) != against;  // t goes down
    int64_t row = 0;
    if (falling)
        for (int64_t t = 0; t < steps - 1; t++) row += sizes[t];
    for (int64_t i = 0; i < steps; i++) {
        const int64_t t = falling ? steps - 1 - i : i;
        const int64_t below = t > 0 ? sizes[t - 1] : 0, above = t + 1 < steps ? sizes[t + 1] : 0;
        visit(seq.reverse ? Step{t, row, sizes[t], above, below, row + sizes[t]}
                          : Step{t, row, sizes[t], below, above, row - below});
        row += falling ? -below : sizes[t];
    }
}

inline void copy_rows(const float* from, float* to, int64_t rows, int64_t width) {
    std::copy(from, from + rows * width, to);
}

// Kept by one norm at one timestep.
inline Kept kept_of(const Sequence& seq, int64_t t, int64_t norm) {
    return Kept(seq.kept + (t * 2 * seq.gates + norm) * Kept::size(seq.hidden), seq.hidden);
}

// The call of one norm at one timestep, as a layer of rows. `x`: the first row of its gate's products.
inline Layer call_of(const Sequence& seq, int64_t norm, int64_t rows, const float* x, bool begins = false) {
    const Norm& n = seq.norms[norm];
    const int64_t stride = seq.gates * seq.hidden;
    return {seq.settings, &n.h1, &n.h2, 1, rows, seq.hidden, 1, stride, 1, x, n.gain, n.bias, nullptr, rows, begins};
}

// ---- forward -------------------------------------------------------------------------------------------------------

// (x - mean) * scale, for one product; the biases of both products of a gate add up in `shift`.
struct Linear {
    const float *mean, *scale;
};

inline Linear take_statistics(const Sequence& seq, int64_t norm, const Step& step, const float* x, double* scratch,
                              float* scale, float* shift) {
    const Norm& n = seq.norms[norm];
    const float *mean = seq.tested ? n.h1.eval_mean : n.h1.mean, *sigma = seq.tested ? n.h1.eval_sigma : n.h1.sigma;
    if (seq.training) {
        const Kept kept = kept_of(seq, step.t, norm);
        fold_statistics(*seq.settings, n.h1, seq.hidden);
        stream_rows(call_of(seq, norm, step.rows, x, step.earlier == 0 && !seq.goes_on), kept, scratch);
        mean = kept.mean_hat, sigma = kept.sigma_hat;
    }
    find_units(n.gain, sigma, 0, seq.hidden, scale);
    if (n.bias)
        for (int64_t j = 0; j < seq.hidden; j++) shift[j] += n.bias[j];
    return {mean, scale};
}

// out = f(N(product of the input) + N(product of the hidden state)) for one gate.
template <class Activation>
inline void gate_forward(const Sequence& seq, int64_t gate, const Step& step, double* scratch, float* out,
                         const Activation& f) {
    const int64_t hidden = seq.hidden, stride = seq.gates * hidden, at = step.row * stride + gate * hidden;
    float *shift = (float*)(scratch + 9 * hidden), *scales = shift + hidden;
    std::fill(shift, shift + hidden, 0.0f);
    const Linear of_x = take_statistics(seq, gate, step, seq.products + at, scratch, scales, shift);
    const Linear of_h =
        take_statistics(seq, seq.gates + gate, step, seq.recurrent + at, scratch, scales + hidden, shift);
    for (int64_t i = 0; i < step.rows; i++) {
        const float *__restrict x = seq.products + at + i * stride, *__restrict h = seq.recurrent + at + i * stride;
        const float *__restrict mx = of_x.mean, *__restrict sx = of_x.scale, *__restrict b = shift;
        const float *__restrict mh = of_h.mean, *__restrict sh = of_h.scale;
        float* __restrict y = out + i * hidden;
        for (int64_t j = 0; j < hidden; j++) y[j] = f((x[j] - mx[j]) * sx[j] + ((h[j] - mh[j]) * sh[j] + b[j]));
    }
}

inline void new_state(const Sequence& seq, int64_t gate, const Step& step, double* scratch, float* out) {
    if (seq.relu)
        gate_forward(seq, gate, step, scratch, out, [](float a) { return a < 0 ? 0.0f : a; });
    else
        gate_forward(seq, gate, step, scratch, out, hyperbolic_tangent);
}

// The four inner activations of a GRU at a timestep, each (rows, hidden).
struct Inner {
    float *r, *z, *fresh, *reset;  // reset: h * r
    Inner(const Sequence& seq, int64_t all_rows, const Step& step) {
        float* at = seq.inner + step.row * seq.hidden;
        const int64_t each = all_rows * seq.hidden;
        r = at, z = at + each, fresh = at + 2 * each, reset = at + 3 * each;
    }
};

inline void reset_state(int64_t n, const float* __restrict h, const float* __restrict r, float* __restrict reset) {
    for (int64_t i = 0; i < n; i++) reset[i] = h[i] * r[i];
}

inline void mix(int64_t n, const Inner& in, const float* __restrict h, float* __restrict y) {
    const float *__restrict z = in.z, *__restrict fresh = in.fresh;
    for (int64_t i = 0; i < n; i++) y[i] = z[i] * fresh[i] + (1 - z[i]) * h[i];
}

inline int64_t all_rows(const Sequence& seq) {
    int64_t rows = 0;
    for (int64_t t = 0; t < seq.steps; t++) rows += seq.sizes[t];
    return rows;
}

void sequence_forward(const Sequence& seq, float* final) {
    const int64_t hidden = seq.hidden, wide = seq.gates * hidden, total = all_rows(seq);
    const int64_t shared = seq.gates == 3 ? 2 * hidden : hidden;  // columns of the product with h itself
    double* scratch = workspace(12 * hidden + packed_size(hidden, shared) + packed_size(hidden, hidden));
    float* packed = (float*)(scratch + 12 * hidden);
    float* packed_new = packed + packed_size(hidden, shared);
    pack(seq.weight, hidden, shared, 1, hidden, packed);
    if (seq.gates == 3) pack(seq.weight + shared * hidden, hidden, hidden, 1, hidden, packed_new);

    walk(seq, false, [&](const Step& step) {
        float *h = seq.before + step.row * hidden, *y = seq.output + step.row * hidden;
        float* products = seq.recurrent + step.row * wide;
        // Rows that go on, rows that begin here, and those that have ended.
        const int64_t going_on = std::min(step.earlier, step.rows);
        const float* previous = seq.output + step.earlier_row * hidden;
        copy_rows(previous, h, going_on, hidden);
        copy_rows(seq.start + going_on * hidden, h + going_on * hidden, step.rows - going_on, hidden);
        if (step.earlier > step.rows)
            copy_rows(previous + step.rows * hidden, final + step.rows * hidden, step.earlier - step.rows, hidden);

        multiply(step.rows, hidden, shared, h, hidden, packed, products, wide, false);
        if (seq.gates == 1) {
            float* fresh = seq.inner + step.row * hidden;
            new_state(seq, 0, step, scratch, fresh);
            copy_rows(fresh, y, step.rows, hidden);
        } else {
            const Inner in(seq, total, step);
            gate_forward(seq, 0, step, scratch, in.r, sigmoid);
            gate_forward(seq, 1, step, scratch, in.z, sigmoid);
            reset_state(step.rows * hidden, h, in.r, in.reset);
            multiply(step.rows, hidden, hidden, in.reset, hidden, packed_new, products + shared, wide, false);
            new_state(seq, 2, step, scratch, in.fresh);
            mix(step.rows * hidden, in, h, y);
        }
        if (step.later == 0) copy_rows(y, final, step.rows, hidden);
    });
}

// ---- backward ------------------------------------------------------------------------------------------------------

// From da, the gradient before the activation, to the products of the input and of the hidden state.
inline void gate_backward(const Sequence& seq, int64_t gate, const Step& step, const float* da, double* scratch,
                          float* dproducts, float* drecurrent, float* sums) {
    const int64_t hidden = seq.hidden, stride = seq.gates * hidden, at = step.row * stride + gate * hidden;
    const float* products[2] = {seq.products + at, seq.recurrent + at};
    float* gradients[2] = {dproducts + at, drecurrent + at};
    for (int side = 0; side < 2; side++) {
        const int64_t norm = side * seq.gates + gate;
        const Layer call = call_of(seq, norm, step.rows, products[side]);
        const Kept kept = kept_of(seq, step.t, norm);
        float* dgain = sums + norm * 2 * hidden;
        const Slopes slopes = stream_back_rows(call, da, hidden, (float)seq.norms[norm].scale, kept, scratch, dgain,
                                               dgain + hidden);
        pull_back_rows(seq.settings->p, products[side], stride, da, hidden, 0, step.rows, hidden, kept.center, slopes,
                       gradients[side], stride);
    }
}

// da of the new state: f is tanh or relu, and known by its value.
inline void through_activation(const Sequence& seq, int64_t n, const float* dy, const float* y, float* da) {
    if (seq.relu)
        for (int64_t i = 0; i < n; i++) da[i] = y[i] <= 0 ? 0.0f : dy[i];
    else
        for (int64_t i = 0; i < n; i++) da[i] = dy[i] * (1 - y[i] * y[i]);
}

// To the new state (da), to the argument of z (db), and what goes straight on to the state before (dh).
inline void mix_backward(int64_t n, const Inner& in, const float* __restrict h, float* __restrict dh,
                         float* __restrict da, float* __restrict db) {
    const float *__restrict z = in.z, *__restrict fresh = in.fresh;
    for (int64_t i = 0; i < n; i++) {
        da[i] = dh[i] * z[i];
        db[i] = dh[i] * (fresh[i] - h[i]) * (z[i] * (1 - z[i]));
        dh[i] *= 1 - z[i];
    }
}

// To the argument of r (da), and to the state before (dh).
inline void reset_backward(int64_t n, const float* __restrict h, const float* __restrict r,
                           const float* __restrict dreset, float* __restrict dh, float* __restrict da) {
    for (int64_t i = 0; i < n; i++) {
        da[i] = dreset[i] * h[i] * (r[i] * (1 - r[i]));
        dh[i] += dreset[i] * r[i];
    }
}

void sequence_backward(const Sequence& seq, const float* doutput, const float* dfinal, float* dproducts,
                       float* drecurrent, float* dstart, float* sums) {
    const int64_t hidden = seq.hidden, wide = seq.gates * hidden, total = all_rows(seq);
    const int64_t shared = seq.gates == 3 ? 2 * hidden : hidden, block = seq.sizes[0] * hidden;
    double* scratch = workspace(12 * hidden + packed_size(shared, hidden) + packed_size(hidden, hidden) + 3 * block);
    float* packed = (float*)(scratch + 12 * hidden);
    float* packed_new = packed + packed_size(shared, hidden);
    float* dh = packed_new + packed_size(hidden, hidden);  // the gradient that is carried from step to step
    float *da = dh + block, *db = da + block, *dreset = db + block;
    pack(seq.weight, shared, hidden, hidden, 1, packed);
    if (seq.gates == 3) pack(seq.weight + shared * hidden, hidden, hidden, hidden, 1, packed_new);
    std::fill(sums, sums + 4 * seq.gates * hidden, 0.0f);

    walk(seq, true, [&](const Step& step) {
        const int64_t n = step.rows * hidden, carried = std::min(step.later, step.rows) * hidden;
        const float* h = seq.before + step.row * hidden;
        copy_rows(dfinal + carried, dh + carried, 1, n - carried);  // these rows end here
        for (int64_t i = 0; i < n; i++) dh[i] += doutput[step.row * hidden + i];

        if (seq.gates == 1) {
            through_activation(seq, n, dh, seq.inner + step.row * hidden, da);
            gate_backward(seq, 0, step, da, scratch, dproducts, drecurrent, sums);
            multiply(step.rows, hidden, hidden, drecurrent + step.row * wide, wide, packed, dh, hidden, false);
        } else {
            const Inner in(seq, total, step);
            mix_backward(n, in, h, dh, da, db);
            through_activation(seq, n, da, in.fresh, da);
            gate_backward(seq, 2, step, da, scratch, dproducts, drecurrent, sums);
            gate_backward(seq, 1, step, db, scratch, dproducts, drecurrent, sums);
            float* drec = drecurrent + step.row * wide;
            multiply(step.rows, hidden, hidden, drec + shared, wide, packed_new, dreset, hidden, false);
            reset_backward(n, h, in.r, dreset, dh, da);
            gate_backward(seq, 0, step, da, scratch, dproducts, drecurrent, sums);
            multiply(step.rows, shared, hidden, drec, wide, packed, dh, hidden, true);
        }
        const int64_t going_on = std::min(step.earlier, step.rows) * hidden;  // the others began here
        copy_rows(dh + going_on, dstart + going_on, 1, n - going_on);
    });
}
