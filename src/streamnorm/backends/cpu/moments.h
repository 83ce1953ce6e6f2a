// The twin of core/statistics.py for one statistic per channel: S(x) and the gradient through it, for blocks of rows.
#pragma once

template <class Sums>
using Lane = std::remove_reference_t<decltype(*std::declval<Sums>())>;

// Sums of x - c and |x - c|^p down the columns.
template <class T>
inline void sum_rows(const T* x, int64_t stride, int64_t first, int64_t last, int64_t channels,
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

// Mean and sigma of some channels, from the sums (2, C) about their centers. The one place of eps.
inline void finish_moments(const Settings& set, double n, const double* sums, int64_t channels, int64_t first,
                           int64_t last, Kept kept) {
    const double share = 1 / n, eps = set.eps, floor = std::sqrt(eps);
    const double *__restrict distance = sums, *__restrict power = sums + channels;
    float *__restrict mean = kept.mean, *__restrict sigma = kept.sigma;
    const float* __restrict center = kept.center;
    for (int64_t c = first; c < last; c++) mean[c] = (float)(center[c] + distance[c] * share);
    if (set.p == 2)
        for (int64_t c = first; c < last; c++) sigma[c] = std::sqrt((float)(power[c] * share + eps));
    else
        for (int64_t c = first; c < last; c++) sigma[c] = (float)(power[c] * share + floor);
}

// Whether sigma depends on its own center: it does not for p = 2, where the derivative is 0.
inline bool has_signs(const Settings& set) { return set.p == 1 && set.center == MEAN; }

// dx = dy * unit + (x - center) * slope + offset, with the sign of x - center in its place for p = 1:
// the direct way, and (dS/dx)^T g of what G passes on. Vectors over channels.
struct Slopes {
    float *unit, *slope, *offset;
};

inline void find_units(const float* gain, const float* sigma_hat, int64_t first, int64_t last, float* unit) {
    for (int64_t c = first; c < last; c++) unit[c] = (gain ? gain[c] : 1.0f) / sigma_hat[c];
}

// dE/dgain, dE/dbias (both are added to) and g = dE/ds_hat (2, C) of some channels, from the sums (2, C) of dy and
// dy * (x - mean_hat).
inline void finish_gradients(const float* unit, const float* sigma_hat, const double* sums, int64_t channels,
                             int64_t first, int64_t last, float* dgain, float* dbias, float* g) {
    for (int64_t c = first; c < last; c++) {
        const float bias = (float)sums[c], gain = (float)sums[channels + c] / sigma_hat[c];
        dbias[c] += bias, dgain[c] += gain;
        g[c] = -bias * unit[c];
        g[channels + c] = -gain * unit[c];
    }
}

// `flow`: what goes into S(x), (2, C). `signs`: sums of sign(x - center), read where sigma depends on its center.
inline void find_slopes(const Settings& set, double n, const float* flow, const double* signs, int64_t channels,
                        int64_t first, int64_t last, Kept kept, Slopes out) {
    const float share = (float)(1 / n);
    const float *to_mean = flow, *to_sigma = flow + channels;
    if (set.p == 2) {
        for (int64_t c = first; c < last; c++) {
            out.slope[c] = to_sigma[c] * share / kept.sigma[c];
            out.offset[c] = to_mean[c] * share;
        }
        return;
    }
    for (int64_t c = first; c < last; c++) {
        out.slope[c] = to_sigma[c] * share * (is_finite(kept.sigma[c]) ? 1.0f : 0.0f);  // NaN stays
        out.offset[c] = to_mean[c] * share - (has_signs(set) ? out.slope[c] * (float)(signs[c] / n) : 0.0f);
    }
}

// Sums of dy, dy * (x - mean_hat) and, where `signs` are wanted, of sign(x - center).
template <class T>
inline void sum_gradients_of_rows(const T* x, int64_t stride, const T* dy, int64_t dy_stride, int64_t first,
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

// Rows in blocks from the last to the first, whose data is still in the cache, and forward within a block, as memory is
// read best.
template <class Body>
inline void rows_from_the_end(int64_t first, int64_t last, int64_t channels, const Body& body) {
    const int64_t block = std::max<int64_t>(1, 16384 / channels);
    for (int64_t end = last; end > first; end -= std::min(block, end - first))
        for (int64_t row = std::max(first, end - block); row < end; row++) body(row);
}

template <class T>
inline void pull_back_rows(int64_t p, const T* x, int64_t stride, const T* dy, int64_t dy_stride, int64_t first,
                           int64_t last, int64_t channels, const float* center, Slopes k, T* dx, int64_t dx_stride) {
    rows_from_the_end(first, last, channels, [&](int64_t row) {
        const auto each = [&](auto f) {
            map_run(channels, dx + row * dx_stride, f, x + row * stride, dy + row * dy_stride, center,
                    (const float*)k.unit, (const float*)k.slope, (const float*)k.offset);
        };
        if (p == 2)
            each([](float x, float g, float c, float u, float s, float o) { return g * u + (x - c) * s + o; });
        else
            each([](float x, float g, float c, float u, float s, float o) { return g * u + sign(x - c) * s + o; });
    });
}
