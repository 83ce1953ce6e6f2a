// The gates of a recurrent layer at one timestep: the products of input and hidden state, each with a norm of its own,
// are streamed and normalized, and back.
#pragma once

// A timestep, and its neighbours in the order in which the sequence is walked.
struct Step {
    int64_t t, row, rows;    // timestep, its first row, its rows
    int64_t earlier, later;  // rows of the steps walked before and after it, 0 at the ends
    int64_t earlier_row;     // first row of the step walked before

    int64_t going_on() const { return std::min(earlier, rows); }  // the other rows begin here
};

// What a pass over a sequence works with.
struct Pass {
    const Sequence& seq;
    int64_t hidden, wide, total;  // of a gate, of all gates; rows of all timesteps
    double* scratch;              // of the norms
    // Of backward: gradients of the input's products, and of the hidden state's at one timestep; of the recurrent
    // weight, transposed, or null; of gains and biases, norm by norm.
    float *dproducts, *drecurrent, *dweight, *sums;

    static int64_t scratch_size(const Sequence& seq) { return 12 * seq.hidden; }
    int64_t cell_norm() const { return 2 * seq.gates; }  // the number of the norm on the cell state
    int64_t norms() const { return 2 * seq.gates + seq.cell_norm; }
    Kept kept(const Step& step, int64_t norm) const {
        return Kept(seq.kept + (step.t * norms() + norm) * Kept::size(hidden), hidden);
    }
    // The call of one norm at one timestep, as a layer of rows.
    Layer call(const Step& step, int64_t norm, const float* x, int64_t stride) const {
        const Norm& n = seq.norms[norm];
        const bool begins = step.earlier == 0 && !seq.goes_on;
        return {seq.settings, &n.h1, &n.h2, 1, step.rows, hidden, 1, stride, 1, x, n.gain, n.bias, nullptr, step.rows,
                begins};
    }
};

// ---- forward -------------------------------------------------------------------------------------------------------

struct Sigmoid {
    float operator()(float x) const { return sigmoid(x); }
};
struct Tanh {
    float operator()(float x) const { return hyperbolic_tangent(x); }
};
struct Relu {
    float operator()(float x) const { return x < 0 ? 0.0f : x; }
};

// Calls run(f) with the nonlinearity of the layer.
template <class Run>
inline void with_nonlinearity(const Sequence& seq, const Run& run) {
    if (seq.relu)
        run(Relu());
    else
        run(Tanh());
}

// (x - mean) * scale, for one product; the biases of both products of a gate add up in `shift`.
struct Linear {
    const float *mean, *scale;
};

inline Linear take_statistics(const Pass& pass, int64_t norm, const Step& step, const float* x, int64_t stride,
                              float* scale, float* shift) {
    const Sequence& seq = pass.seq;
    const Norm& n = seq.norms[norm];
    const float *mean = seq.tested ? n.h1.eval_mean : n.h1.mean, *sigma = seq.tested ? n.h1.eval_sigma : n.h1.sigma;
    if (seq.training) {
        const Kept kept = pass.kept(step, norm);
        fold_statistics(*seq.settings, n.h1, seq.hidden);
        stream_rows(pass.call(step, norm, x, stride), kept, pass.scratch);
        mean = kept.mean_hat, sigma = kept.sigma_hat;
    }
    find_units(n.gain, sigma, 0, seq.hidden, scale);
    if (n.bias)
        for (int64_t j = 0; j < seq.hidden; j++) shift[j] += n.bias[j];
    return {mean, scale};
}

// out = f(N(product of the input) + N(product of the hidden state)) for one gate.
template <class Activation>
inline void gate_forward(const Pass& pass, int64_t gate, const Step& step, float* out, const Activation& f) {
    const int64_t hidden = pass.hidden, stride = pass.wide, at = step.row * stride + gate * hidden;
    const float *products = pass.seq.products + at, *recurrent = pass.seq.recurrent + at;
    float *shift = (float*)(pass.scratch + 9 * hidden), *scales = shift + hidden;
    std::fill(shift, shift + hidden, 0.0f);
    const Linear of_x = take_statistics(pass, gate, step, products, stride, scales, shift);
    const Linear of_h = take_statistics(pass, pass.seq.gates + gate, step, recurrent, stride, scales + hidden, shift);
    for (int64_t i = 0; i < step.rows; i++) {
        const float *__restrict x = products + i * stride, *__restrict h = recurrent + i * stride;
        const float *__restrict mx = of_x.mean, *__restrict sx = of_x.scale, *__restrict b = shift;
        const float *__restrict mh = of_h.mean, *__restrict sh = of_h.scale;
        float* __restrict y = out + i * hidden;
        for (int64_t j = 0; j < hidden; j++) y[j] = f((x[j] - mx[j]) * sx[j] + ((h[j] - mh[j]) * sh[j] + b[j]));
    }
}

// out = f(N(c)) for a cell state; f(c) without a norm on it.
template <class Activation>
inline void squash(const Pass& pass, const Step& step, const float* __restrict c, float* __restrict out,
                   const Activation& f) {
    const int64_t hidden = pass.hidden, n = step.rows * hidden;
    if (!pass.seq.cell_norm) {
        for (int64_t i = 0; i < n; i++) out[i] = f(c[i]);
        return;
    }
    float *shift = (float*)(pass.scratch + 9 * hidden), *scale = shift + hidden;
    std::fill(shift, shift + hidden, 0.0f);
    const Linear of_c = take_statistics(pass, pass.cell_norm(), step, c, hidden, scale, shift);
    for (int64_t i = 0; i < step.rows; i++) {
        const float *__restrict x = c + i * hidden, *__restrict m = of_c.mean, *__restrict s = of_c.scale;
        const float* __restrict b = shift;
        float* __restrict y = out + i * hidden;
        for (int64_t j = 0; j < hidden; j++) y[j] = f((x[j] - m[j]) * s[j] + b[j]);
    }
}

// ---- backward ------------------------------------------------------------------------------------------------------

// From da, the gradient of what a norm gives, to that of its input.
inline void norm_backward(const Pass& pass, int64_t norm, const Step& step, const float* x, int64_t stride,
                          const float* da, float* dx, int64_t dx_stride) {
    const int64_t hidden = pass.hidden;
    const Kept kept = pass.kept(step, norm);
    float* dgain = pass.sums + norm * 2 * hidden;
    const Slopes slopes = stream_back_rows(pass.call(step, norm, x, stride), da, hidden,
                                           (float)pass.seq.norms[norm].scale, kept, pass.scratch, dgain, dgain + hidden);
    pull_back_rows(pass.seq.settings->p, x, stride, da, hidden, 0, step.rows, hidden, kept.center, slopes, dx,
                   dx_stride);
}

// From da, the gradient before the activation, to the products of the input and of the hidden state.
inline void gate_backward(const Pass& pass, int64_t gate, const Step& step, const float* da) {
    const int64_t stride = pass.wide, at = step.row * stride + gate * pass.hidden;
    norm_backward(pass, gate, step, pass.seq.products + at, stride, da, pass.dproducts + at, stride);
    norm_backward(pass, pass.seq.gates + gate, step, pass.seq.recurrent + at, stride, da,
                  pass.drecurrent + gate * pass.hidden, stride);
}

// From the gradient of y = f(a) to that of a, in place: f is tanh or relu, and known by its value.
inline void through_nonlinearity(const Sequence& seq, int64_t n, const float* __restrict y, float* __restrict d) {
    if (seq.relu)
        for (int64_t i = 0; i < n; i++) d[i] = y[i] <= 0 ? 0.0f : d[i];
    else
        for (int64_t i = 0; i < n; i++) d[i] *= 1 - y[i] * y[i];
}
