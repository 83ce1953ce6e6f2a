// The twin of moments.py for one statistic per channel: S(x) and the gradient through it, for blocks of rows.
#pragma once

template <class Sums>
using Lane = std::remove_reference_t<decltype(*std::declval<Sums>())>;

// Sums of x - c and |x - c|^p down the columns.
inline void sum_rows(const float* x, int64_t stride, int64_t first, int64_t last, int64_t channels,
                     const float* center, int64_t p, double* const* sums) {
    const auto powers = [=](auto power) {
        sum_columns<2>(first, last, channels, sums, [=](int64_t row, int64_t j, auto* s) {
            using V = Lane<decltype(s)>;
            const V d = load<V>(x + row * stride + j) - load<V>(center + j);
            s[0] += d;
            s[1] += power(d);
        });
    };
    if (p == 2)
        powers([](auto d) { return d * d; });
    else
        powers([](auto d) { return absolute(d); });
}

// eps, in its one place.
inline float root(const Settings& set, double power) {
    return (float)(set.p == 2 ? std::sqrt(power + set.eps) : power + std::sqrt(set.eps));
}

inline void finish_moments(const Settings& set, double n, float center, double first, double power, int64_t c,
                           Kept kept) {
    kept.mean[c] = (float)(center + first / n);
    kept.center[c] = center;
    kept.sigma[c] = root(set, power / n);
}

// Whether sigma depends on its own center: it does not for p = 2, where the derivative is 0.
inline bool has_signs(const Settings& set) { return set.p == 1 && set.center == MEAN; }

// dx = dy * unit + (x - center) * slope + offset, with the sign of x - center in its place for p = 1:
// the direct way, and (dS/dx)^T g of what G passes on.
struct Slopes {
    float unit, slope, offset;

    Slopes() = default;
    // `g_mean`, `g_sigma`: what flows into S(x). `signs`: average sign of x - center, the derivative of sigma by its
    // own center for p = 1 (for p = 2 it is 0).
    Slopes(const Settings& set, double n, float unit_, float g_mean, float g_sigma, float sigma, float signs)
        : unit(unit_), offset((float)(g_mean / n)) {
        slope = (float)(g_sigma / n);
        if (set.p == 2) {
            slope /= sigma;
        } else {
            if (!is_finite(sigma)) slope = 0;
            if (has_signs(set)) offset -= slope * signs;
        }
    }
};

// dE/dgain, dE/dbias and g = dE/ds_hat of a channel, from its sums of dy and dy * (x - mean_hat).
inline void finish_gradients(float unit, float sigma_hat, const double* sums, int64_t c, int64_t channels,
                             float* dgain, float* dbias, float* g) {
    *dbias = (float)sums[0];
    *dgain = (float)(sums[1] / sigma_hat);
    g[c] = -*dbias * unit;
    g[channels + c] = -*dgain * unit;
}

// Sums of dy, dy * (x - mean_hat) and, where `signs` are wanted, of sign(x - center).
inline void sum_gradients_of_rows(const float* x, int64_t stride, const float* dy, int64_t dy_stride, int64_t first,
                                  int64_t last, int64_t channels, Kept kept, bool signs, double* const* sums) {
    const float *mean = kept.mean_hat, *center = kept.center;
    sum_columns<2>(first, last, channels, sums, [=](int64_t row, int64_t j, auto* s) {
        using V = Lane<decltype(s)>;
        const V slope = load<V>(dy + row * dy_stride + j);
        s[0] += slope;
        s[1] += slope * (load<V>(x + row * stride + j) - load<V>(mean + j));
    });
    if (signs)
        sum_columns<1>(first, last, channels, sums + 2, [=](int64_t row, int64_t j, auto* s) {
            using V = Lane<decltype(s)>;
            s[0] += sign(load<V>(x + row * stride + j) - load<V>(center + j));
        });
}

// `unit`, `slope` and `offset` are vectors over channels here.
inline void pull_back_rows(int64_t p, const float* x, int64_t stride, const float* dy, int64_t dy_stride,
                           int64_t first, int64_t last, int64_t channels, const float* center, const float* unit,
                           const float* slope, const float* offset, float* dx, int64_t dx_stride) {
    for (int64_t row = last - 1; row >= first; row--) {  // from the end, which is still in the cache
        const float *__restrict in = x + row * stride, *__restrict g = dy + row * dy_stride;
        const float *__restrict c = center, *__restrict u = unit, *__restrict s = slope, *__restrict o = offset;
        float* __restrict out = dx + row * dx_stride;
        if (p == 2)
            for (int64_t j = 0; j < channels; j++) out[j] = g[j] * u[j] + (in[j] - c[j]) * s[j] + o[j];
        else
            for (int64_t j = 0; j < channels; j++) out[j] = g[j] * u[j] + sign(in[j] - c[j]) * s[j] + o[j];
    }
}
