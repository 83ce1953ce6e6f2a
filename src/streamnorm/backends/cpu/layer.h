// Streaming normalization of one layer with one statistic per channel (BA1), forward and backward.
//
// Planes (N, C, S): a few channels usually fit a core's cache, so they are finished, statistics streamed and output
// written, before the next are read, and the data come from memory once. Should the call turn out not to be accepted,
// which only the last channel can tell, the output is written again.
// Rows (M, C), which is channels last too: all rows must be read before one can be normalized.
#pragma once

template <class T>
inline int64_t workers(const LayerOf<T>& call) {  // starting threads costs as much as some 20,000 elements
    return call.samples * call.channels * call.space < 65536 ? 1 : call.threads;
}

// ---- S(x) -----------------------------------------------------------------------------------------------------------

// Planes are walked in groups of neighbouring channels, whose planes lie side by side: long runs of memory are read
// faster than pages here and there.
const int64_t GROUP = 16;

template <class T>
inline int64_t group_of(const LayerOf<T>& call) {
    const int64_t bytes = call.space * (int64_t)sizeof(T);
    return std::max<int64_t>(1, std::min<int64_t>(GROUP, 16384 / bytes));
}

// Calls body(first, last) for groups of channels, and shares them out among threads.
template <class T, class Body>
inline void each_group(const LayerOf<T>& call, const Body& body) {
    const int64_t group = group_of(call), groups = (call.channels + group - 1) / group;
    share_out(groups, workers(call), [&](int64_t begin, int64_t end, int64_t) {
        for (int64_t i = begin; i < end; i++) body(i * group, std::min(call.channels, (i + 1) * group));
    });
}

// The sums of each channel of a group, (SUMS, channels): `term(i, c, sums)` adds what element i, of channel c, gives.
template <int SUMS, class T, class Term>
inline void sum_group(const LayerOf<T>& call, int64_t first, int64_t last, double* out, const Term& term) {
    RunSums<SUMS> sums[GROUP];
    for (int64_t n = 0; n < call.samples; n++)
        for (int64_t c = first; c < last; c++) {
            const int64_t at = (n * call.channels + c) * call.space;
            sums[c - first].add(call.space, [&, at, c](int64_t i, auto* s) { term(at + i, c, s); });
        }
    for (int64_t c = first; c < last; c++) {
        sums[c - first].empty();
        for (int s = 0; s < SUMS; s++) out[s * call.channels + c] = sums[c - first].sums[s];
    }
}

// Sums of x - c and |x - c|^p of a group.
template <class T>
inline void sum_powers(const LayerOf<T>& call, int64_t first, int64_t last, const float* center, double* out) {
    const T* x = call.x;
    if (call.settings->p == 2)
        sum_group<2>(call, first, last, out, [=](int64_t i, int64_t c, auto* s) {
            const auto d = load<Lane<decltype(s)>>(x + i) - center[c];
            s[0] += d;
            s[1] += d * d;
        });
    else
        sum_group<2>(call, first, last, out, [=](int64_t i, int64_t c, auto* s) {
            const auto d = load<Lane<decltype(s)>>(x + i) - center[c];
            s[0] += d;
            s[1] += absolute(d);
        });
}

// Shares out 0 .. n - 1: body(begin, end, part) adds to `count` sums of its own, which are then added up at `sums`.
// There has to be room for a set per thread.
template <class Body>
inline void share_sums(int64_t n, int64_t threads, int64_t count, double* sums, const Body& body) {
    std::fill(sums, sums + count * threads, 0.0);
    share_out(n, threads, [&](int64_t begin, int64_t end, int64_t thread) { body(begin, end, sums + thread * count); });
    for (int64_t t = 1; t < threads; t++)
        for (int64_t i = 0; i < count; i++) sums[i] += sums[t * count + i];
}

// All channels of the layer, about the centers given: sums into (2, C).
template <class T>
inline void sum_all(const LayerOf<T>& call, const float* center, double* sums) {
    const int64_t channels = call.channels, threads = workers(call);
    if (!call.rows) {
        each_group(call, [&](int64_t first, int64_t last) { sum_powers(call, first, last, center, sums); });
        return;
    }
    share_sums(call.samples, threads, 2 * channels, sums, [&](int64_t begin, int64_t end, double* part) {
        double* columns[2] = {part, part + channels};
        sum_rows(call.x, call.stride, begin, end, channels, center, call.settings->p, columns);
    });
}

// Whether center "running" has to start from the layer's mean of this call.
inline bool starts(const Settings& set, const H1& state) {
    return set.center == RUNNING && set.warmup > 0 && *state.seen == 0;
}

// The centers of a call, from what is known before it, or from a pass over the data for the means.
template <class T>
inline void find_centers(const LayerOf<T>& call, Kept kept, double* sums) {
    const Settings& set = *call.settings;
    const int64_t channels = call.channels;
    if (set.center == RUNNING)
        std::copy(call.h1->mean, call.h1->mean + channels, kept.center);
    else  // about one of the channel's own elements, the mean of data far from 0 loses no digits
        for (int64_t c = 0; c < channels; c++)
            kept.center[c] = set.center == ZERO ? 0 : wide(call.x[call.rows ? c : c * call.space]);
    if (set.center != MEAN && !starts(set, *call.h1)) return;
    sum_all(call, kept.center, sums);
    for (int64_t c = 0; c < channels; c++)
        kept.mean[c] = (float)(kept.center[c] + sums[c] / (double)(call.samples * call.space));
    if (set.center == MEAN)
        std::copy(kept.mean, kept.mean + channels, kept.center);
    else
        std::fill(kept.center, kept.center + channels, layer_mean(kept.mean, channels));
}

template <class T>
inline int64_t scratch_of(const LayerOf<T>& call) { return 3 * call.channels * (workers(call) + 1); }

// S and F of rows: fills `kept`. `sums` is scratch, as is that of the function below.
template <class T>
inline void stream_rows(const LayerOf<T>& call, Kept kept, double* sums) {
    const double n = (double)(call.samples * call.space);
    find_centers(call, kept, sums);
    sum_all(call, kept.center, sums);
    finish_moments(*call.settings, n, sums, call.channels, 0, call.channels, kept);
    stream_statistics(*call.settings, *call.h1, call.channels, n, (double)call.batch, call.begins != 0,
                      kept);
}

// ---- forward -------------------------------------------------------------------------------------------------------

// Channel c of sample n.
template <class T>
inline void normalize_plane(const LayerOf<T>& call, int64_t n, int64_t c, const float* mean, const float* sigma, T* y) {
    const float scale = (call.gain ? call.gain[c] : 1.0f) / sigma[c], shift = call.bias ? call.bias[c] : 0.0f;
    const float m = mean[c];
    const int64_t at = (n * call.channels + c) * call.space;
    map_run(call.space, y + at, [=](float x) { return (x - m) * scale + shift; }, call.x + at);
}

template <class T>
inline void normalize_group(const LayerOf<T>& call, int64_t first, int64_t last, const float* mean, const float* sigma,
                            T* y) {
    for (int64_t n = call.samples - 1; n >= 0; n--)  // from the end, which is still in the cache
        for (int64_t c = first; c < last; c++) normalize_plane(call, n, c, mean, sigma, y);
}

template <class T>
inline void normalize_rows(const LayerOf<T>& call, const float* mean, const float* sigma, float* scale, T* y) {
    const int64_t channels = call.channels;
    find_units(call.gain, sigma, 0, channels, scale);
    share_out(call.samples, workers(call), [&](int64_t begin, int64_t end, int64_t) {
        const float* by = scale;
        rows_from_the_end(begin, end, channels, [&](int64_t row) {
            const T* in = call.x + row * call.stride;
            T* out = y + row * channels;
            if (call.bias)
                map_run(channels, out, [](float x, float m, float k, float b) { return (x - m) * k + b; }, in, mean, by,
                        call.bias);
            else
                map_run(channels, out, [](float x, float m, float k) { return (x - m) * k; }, in, mean, by);
        });
    });
}

template <class T>
void layer_forward(const LayerOf<T>& call, T* y) {
    const Settings& set = *call.settings;
    const H1& state = *call.h1;
    const int64_t channels = call.channels;
    const double n = (double)(call.samples * call.space);
    const Kept kept(call.kept, channels);
    double* sums = workspace(scratch_of(call));
    fold_statistics(set, state, channels);

    if (call.rows) {
        stream_rows(call, kept, sums);
        normalize_rows(call, kept.mean_hat, kept.sigma_hat, (float*)sums, y);
        return;
    }
    const bool steady = !starts(set, state) && warm_up(set, *state.seen + n) == 1;
    if (set.center != MEAN) find_centers(call, kept, sums);
    const Push push(state.stats, guarded(set.alpha, window_share(set, state, (double)call.batch, n, call.begins != 0)), true);
    each_group(call, [&](int64_t first, int64_t last) {
        if (set.center == MEAN) {  // while the group is in the cache
            for (int64_t c = first; c < last; c++) kept.center[c] = wide(call.x[c * call.space]);
            sum_powers(call, first, last, kept.center, sums);
            for (int64_t c = first; c < last; c++) kept.center[c] = (float)(kept.center[c] + sums[c] / n);
        }
        sum_powers(call, first, last, kept.center, sums);
        finish_moments(set, n, sums, channels, first, last, kept);
        for (int64_t c = first; c < last; c++) {
            kept.mean_hat[c] = push.preview(c, kept.mean[c]);
            kept.sigma_hat[c] = push.preview(channels + c, kept.sigma[c]);
        }
        if (steady) normalize_group(call, first, last, kept.mean_hat, kept.sigma_hat, y);
    });
    stream_statistics(set, state, channels, n, (double)call.batch, call.begins != 0, kept);
    if (steady && *kept.accept != 0) return;
    each_group(call, [&](int64_t first, int64_t last) {
        normalize_group(call, first, last, kept.mean_hat, kept.sigma_hat, y);
    });
}

template <class T>
void layer_normalize(const LayerOf<T>& call, const float* mean, const float* sigma, T* y) {
    if (call.rows)
        normalize_rows(call, mean, sigma, (float*)workspace(scratch_of(call)), y);
    else  // in the order of memory
        share_out(call.samples * call.channels, workers(call), [&](int64_t begin, int64_t end, int64_t) {
            for (int64_t i = begin; i < end; i++)
                normalize_plane(call, i / call.channels, i % call.channels, mean, sigma, y);
        });
}

template <class T>
void layer_repeat(const LayerOf<T>& call, T* y) {
    const Kept kept(call.kept, call.channels);
    layer_normalize(call, kept.mean_hat, kept.sigma_hat, y);
}

// ---- backward ------------------------------------------------------------------------------------------------------

// Sums of dy, dy * (x - mean_hat) and, where they matter, of sign(x - center) of a group.
template <class T>
inline void sum_gradients(const LayerOf<T>& call, const T* dy, int64_t first, int64_t last, Kept kept, double* out) {
    const T* x = call.x;
    const float *mean = kept.mean_hat, *center = kept.center;
    sum_group<2>(call, first, last, out, [=](int64_t i, int64_t c, auto* s) {
        using V = Lane<decltype(s)>;
        const V slope = load<V>(dy + i);
        s[0] += slope;
        s[1] += slope * (load<V>(x + i) - mean[c]);
    });
    if (has_signs(*call.settings))
        sum_group<1>(call, first, last, out + 2 * call.channels, [=](int64_t i, int64_t c, auto* s) {
            s[0] += sign(load<Lane<decltype(s)>>(x + i) - center[c]);
        });
}

template <class T>
inline void pull_back_group(const LayerOf<T>& call, const T* dy, int64_t first, int64_t last, const float* center,
                            Slopes slopes, T* dx) {
    for (int64_t n = call.samples - 1; n >= 0; n--)  // from the end, which is still in the cache
        for (int64_t c = first; c < last; c++) {
            const float unit = slopes.unit[c], slope = slopes.slope[c], offset = slopes.offset[c], mid = center[c];
            const int64_t at = (n * call.channels + c) * call.space;
            const auto each = [&](auto f) { map_run(call.space, dx + at, f, call.x + at, dy + at); };
            if (call.settings->p == 2)
                each([=](float x, float g) { return g * unit + (x - mid) * slope + offset; });
            else
                each([=](float x, float g) { return g * unit + sign(x - mid) * slope + offset; });
        }
}

// G of rows: dE/dgain and dE/dbias are added to, and the slopes that lead to dx are left in the scratch memory.
template <class T>
inline Slopes stream_back_rows(const LayerOf<T>& call, const T* dy, int64_t dy_stride, float scale, Kept kept,
                               double* scratch, float* dgain, float* dbias) {
    const Settings& set = *call.settings;
    const int64_t channels = call.channels, threads = workers(call);
    const double n = (double)call.samples;
    float* g = (float*)(scratch + 3 * channels * threads);  // (2, C)
    fold_gradients(set, *call.h2, channels, kept);
    const Slopes slopes{g + 2 * channels, g + 3 * channels, g + 4 * channels};
    share_sums(call.samples, threads, 3 * channels, scratch, [&](int64_t begin, int64_t end, double* part) {
        double* columns[3] = {part, part + channels, part + 2 * channels};
        sum_gradients_of_rows(call.x, call.stride, dy, dy_stride, begin, end, channels, kept, has_signs(set), columns);
    });
    find_units(call.gain, kept.sigma_hat, 0, channels, slopes.unit);
    finish_gradients(slopes.unit, kept.sigma_hat, scratch, channels, 0, channels, dgain, dbias, g);
    stream_gradients(set, *call.h2, channels, kept, scale, g);
    find_slopes(set, n, g, scratch + 2 * channels, channels, 0, channels, kept, slopes);
    return slopes;
}

template <class T>
inline void back_through_rows(const LayerOf<T>& call, const T* dy, float scale, double* scratch, T* dx,
                              float* dgain, float* dbias) {
    const int64_t channels = call.channels;
    const Kept kept(call.kept, channels);
    const Slopes slopes = stream_back_rows(call, dy, channels, scale, kept, scratch, dgain, dbias);
    if (!dx) return;
    share_out(call.samples, workers(call), [&](int64_t begin, int64_t end, int64_t) {
        pull_back_rows(call.settings->p, call.x, call.stride, dy, channels, begin, end, channels, kept.center, slopes,
                       dx, channels);
    });
}

template <class T>
inline void back_through_planes(const LayerOf<T>& call, const T* dy, float scale, double* sums, T* dx, float* dgain,
                                float* dbias) {
    const Settings& set = *call.settings;
    const int64_t channels = call.channels;
    const double n = (double)(call.samples * call.space);
    const Kept kept(call.kept, channels);
    double* signs = sums + 2 * channels;
    float *g = (float*)(sums + 3 * channels), *flow = g + 2 * channels;  // dE/ds_hat and what flows on, (2, C) each
    const Slopes slopes{g + 4 * channels, g + 5 * channels, g + 6 * channels};
    const bool likely = *kept.accept != 0 && *kept.share == 1;  // else only the last channel tells how long g is
    fold_gradients(set, *call.h2, channels, kept);
    const Push push(call.h2->grads, guarded(set.beta, *kept.share), true, *kept.own);
    const auto pull_back = [&](int64_t first, int64_t last, const float* from) {
        find_slopes(set, n, from, signs, channels, first, last, kept, slopes);
        pull_back_group(call, dy, first, last, kept.center, slopes, dx);
    };
    each_group(call, [&](int64_t first, int64_t last) {
        sum_gradients(call, dy, first, last, kept, sums);
        find_units(call.gain, kept.sigma_hat, first, last, slopes.unit);
        finish_gradients(slopes.unit, kept.sigma_hat, sums, channels, first, last, dgain, dbias, g);
        for (int64_t c = first; c < last; c++)
            for (const int64_t i : {c, channels + c})
                flow[i] = passed_on(set, push.preview(i, g[i] / scale), g[i] / scale, *kept.w * scale);
        if (likely && dx) pull_back(first, last, flow);
    });
    const bool accepted = stream_gradients(set, *call.h2, channels, kept, scale, g);
    if (!dx || (likely && accepted)) return;
    each_group(call, [&](int64_t first, int64_t last) { pull_back(first, last, g); });
}

template <class T>
void layer_backward(const LayerOf<T>& call, const T* dy, float scale, T* dx, float* dgain, float* dbias) {
    double* scratch = workspace(call.rows ? scratch_of(call) : 7 * call.channels);
    std::fill(dgain, dgain + call.channels, 0.0f);
    std::fill(dbias, dbias + call.channels, 0.0f);
    const auto back = call.rows ? back_through_rows<T> : back_through_planes<T>;
    back(call, dy, scale, scratch, dx, dgain, dbias);
}
