// The twin of core/algorithm.py for one statistic per channel: push, blend, fold and warm start, in float32 and in place.
// Layer and sequence kernels both use it. Compiled once per instruction set (see variant.h).
#pragma once

// What one call keeps for its backward pass: five vectors over channels and six numbers.
struct Kept {
    float *mean, *center, *sigma;  // S(x) and its c
    float *mean_hat, *sigma_hat;   // what normalized
    float *w, *accept;             // of the warm start; whether the statistics were pushed
    float *share, *window, *total, *own;  // as in `Kept` of core/algorithm.py

    static int64_t size(int64_t channels) { return 5 * channels + 6; }
    Kept(float* at, int64_t channels)
        : mean(at), center(at + channels), sigma(at + 2 * channels), mean_hat(at + 3 * channels),
          sigma_hat(at + 4 * channels), w(at + 5 * channels), accept(w + 1), share(w + 2), window(w + 3),
          total(w + 4), own(w + 5) {}
    // S(x) elsewhere: `rest` is what follows it above. There is no center.
    Kept(float* mean, float* sigma, float* rest, int64_t channels)
        : mean(mean), center(nullptr), sigma(sigma), mean_hat(rest), sigma_hat(rest + channels), w(rest + 2 * channels),
          accept(w + 1), share(w + 2), window(w + 3), total(w + 4), own(w + 5) {}
};

// By the bits: a comparison would be removed by compilers told that everything is finite.
inline bool is_finite(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return (bits & 0x7f800000u) != 0x7f800000u;
}

// Nor so large that averaging could end in a number that is not: see `all_finite` of core/statistics.py.
inline bool all_finite(const float* values, int64_t n) {
    uint32_t bad = 0;
    for (int64_t i = 0; i < n; i++) bad |= is_finite(4 * values[i]) ? 0u : 1u;
    return bad == 0;
}

inline float lerp(float from, float to, float share) {  // rounds as torch.lerp does
    return share < 0.5f ? from + share * (to - from) : to - (to - from) * (1 - share);
}

const double FULL = 256;  // elements per statistic in a window from which on it counts whole
const double POWER = 2.0 / 3;  // a smaller one counts for its part of that to this power
const double ALIKE = 12;  // locations of a sample count for so many elements at most
const double LARGE = 32;  // locations from which on a sample has a spread of its own
const float OWN = 0.5f;  // of `short` of the gradients is a call's own, after a full window, if its samples are large

// How much a window of so many elements counts; 1 where their number is not known, 0, or nothing is guarded.
inline float share_of(const Settings& set, double elements) {
    return set.guard && elements > 0 && elements < FULL ? (float)std::pow(elements / FULL, POWER) : 1.0f;
}

// What a window holds after a call: what begins adds up, and timesteps of the same samples are one.
inline double held(double before, double more, bool begins) { return std::max(begins ? before + more : before, more); }

// Of the present window, with a call of so many samples and elements.
inline float window_share(const Settings& set, const H1& state, double samples, double elements, bool begins) {
    const double before = *state.elements_before, more = std::min(elements, ALIKE * samples);
    return share_of(set, before > 0 ? std::max(held(*state.elements, more, begins), before) : 0.0);
}

struct Weights {
    float lasting, recent;
};

// The weights of long and short for a window that counts for `share` of a full one: see `guarded` of core/algorithm.py.
inline Weights guarded(const double* weights, float share, float part = 0) {
    const float lasting = (float)weights[0], recent = (float)weights[1];
    if (!(share < 1) || lasting == 0) return {lasting, recent};
    const float taken = share * recent, least = (lasting + recent) * part;
    const float lost = recent - (part > 0 ? std::max(taken, least) : taken);
    return {lasting + lost, recent - lost};
}

// The same for evaluation: a window of so many samples counts for no more than these are of its memory, but for at least
// its `part` of everything so far. See `slowed` of core/algorithm.py.
inline Weights slowed(const Settings& set, Weights weights, double samples, float part = 0) {
    if (!(set.eval_memory > 0) || weights.lasting == 0) return weights;
    const float most = (weights.lasting + weights.recent) * std::max((float)(samples / set.eval_memory), part);
    const float lost = std::max(weights.recent - most, 0.0f);
    return {weights.lasting + lost, weights.recent - lost};
}

inline void fold_into(float* lasting, const Stream& s, int64_t channels, Weights weights) {
    for (int64_t i = 0; i < 2 * channels; i++)
        lasting[i] = *s.empty ? s.recent[i] : weights.lasting * lasting[i] + weights.recent * s.recent[i];
}

// A pending weight update: long = keep * long + take * short (the first time, short), count = 0. Whether it was one.
inline bool fold(const Stream& s, int64_t channels, Weights weights) {
    const bool due = *s.pending && *s.count != 0;
    *s.pending = false;
    if (!due) return false;
    fold_into(s.lasting, s, channels, weights);
    *s.count = 0;
    *s.empty = false;
    return true;
}

inline Weights fold_weights(const Settings& set, const double* kappa, double elements, double counted) {
    return guarded(kappa, share_of(set, elements), (float)(elements / std::max(counted, 1.0)));
}

inline void fold_statistics(const Settings& set, const H1& state, int64_t channels) {
    if (!*state.stats.pending) return;
    const double elements = *state.elements, counted = *state.counted;
    const Weights weights = fold_weights(set, set.kappa, elements, counted);
    const Weights lasting = slowed(set, weights, *state.samples, (float)(elements / std::max(counted, 1.0)));
    if (*state.stats.count != 0) fold_into(state.eval_long, state.stats, channels, lasting);
    if (!fold(state.stats, channels, weights)) return;
    *state.elements_before = elements;
    *state.elements = *state.samples = 0;
}

// By the window that H1 had closed when the call was made that these are the gradients of.
inline void fold_gradients(const Settings& set, const H2& state, int64_t channels, Kept kept) {
    if (*state.grads.pending) fold(state.grads, channels, fold_weights(set, set.kappa + 2, *kept.window, *kept.total));
}

// In double the products are exact, so the sum rounds alike wherever it is computed, whichever of them the compiler
// fuses with it: s_hat is the same to the bit when it normalizes, when it is kept, and in evaluation.
inline float blend_of(float a, float lasting, float b, float recent) {
    return (float)((double)a * lasting + (double)b * recent);
}

// count += 1; short += (value - short) / count, and what long and short then blend to. Without `accept` nothing is
// pushed. `preview` leaves the stream alone, so that a channel can be finished before all channels are known.
// `own`: what of short is to be the value itself in the blend.
struct Push {
    const Stream& stream;
    const float share, long_weight, short_weight, own;
    const bool empty;

    Push(const Stream& s, Weights weights, bool accept, float own = 0)
        : stream(s), share(accept ? 1.0f / (float)(*s.count + 1) : 0.0f), long_weight(weights.lasting),
          short_weight(weights.recent), own(accept ? own : 0.0f), empty(*s.empty) {}
    float blend(float lasting, float recent, float value) const {
        const float shown = own > 0 ? lerp(recent, value, own) : recent;
        return blend_of(long_weight, empty ? recent : lasting, short_weight, shown);
    }
    float preview(int64_t i, float value) const {
        return blend(stream.lasting[i], share == 0 ? stream.recent[i] : lerp(stream.recent[i], value, share), value);
    }
    // n values, from number `at` of the stream on.
    void take(int64_t at, int64_t n, const float* __restrict values) const {
        float* __restrict recent = stream.recent + at;
        const float part = share;
        if (part == 0) return;
        for (int64_t i = 0; i < n; i++) recent[i] = lerp(recent[i], values[i], part);
    }
    void blend_all(int64_t at, int64_t n, float* __restrict out) const {
        const float *__restrict recent = stream.recent + at, *__restrict lasting = empty ? recent : stream.lasting + at;
        const float a = long_weight, b = short_weight;
        for (int64_t i = 0; i < n; i++) out[i] = blend_of(a, lasting[i], b, recent[i]);
    }
};

inline float warm_up(const Settings& set, double seen) {
    return set.warmup > 0 ? (float)std::min(1.0, seen / set.warmup) : 1.0f;
}

inline float layer_mean(const float* mean, int64_t channels) {
    double total = 0;
    for (int64_t i = 0; i < channels; i++) total += mean[i];
    return (float)(total / channels);
}

inline float layer_sigma(const float* sigma, int64_t channels, int64_t p) {
    double total = 0;
    for (int64_t i = 0; i < channels; i++) total += p == 2 ? (double)sigma[i] * sigma[i] : sigma[i];
    return (float)(p == 2 ? std::sqrt(total / channels) : total / channels);
}

// F of the paper and the warm start: S(x) in `kept` is pushed into H1, and s_hat put beside it. A call whose
// statistics are not all finite is not pushed, and the latest s_hat serves.
inline void stream_statistics(const Settings& set, const H1& state, int64_t channels, double elements, double samples,
                              bool begins, Kept kept) {
    const bool accept = all_finite(kept.mean, channels) && all_finite(kept.sigma, channels);
    *kept.accept = accept;
    *kept.share = window_share(set, state, accept ? samples : 0, accept ? elements : 0, begins);
    if (accept) {
        *state.seen += elements;
        const double holds = held(*state.elements, std::min(elements, ALIKE * samples), begins);
        *state.counted += holds - *state.elements;
        *state.elements = holds;
        *state.samples = held(*state.samples, samples, begins);
    }
    const bool large = accept && elements >= LARGE * samples, full = *state.elements_before >= FULL;
    *kept.own = set.guard && set.beta[0] != 0 && large && full ? OWN : 0.0f;
    *kept.window = (float)*state.elements_before;
    *kept.total = (float)(*state.counted - *state.elements);
    *kept.w = warm_up(set, *state.seen);
    if (!accept) {
        std::copy(state.mean, state.mean + channels, kept.mean_hat);
        std::copy(state.sigma, state.sigma + channels, kept.sigma_hat);
        return;
    }
    const Weights weights = guarded(set.alpha, *kept.share);
    const Push push(state.stats, weights, true);
    push.take(0, channels, kept.mean);
    push.take(channels, channels, kept.sigma);
    push.blend_all(0, channels, kept.mean_hat);
    push.blend_all(channels, channels, kept.sigma_hat);
    Stream lasting = state.stats;
    lasting.lasting = state.eval_long;
    const Push tested(lasting, slowed(set, weights, *state.samples), true);
    tested.blend_all(0, channels, state.eval_mean);
    tested.blend_all(channels, channels, state.eval_sigma);
    *state.stats.count += 1;
    if (*kept.w < 1) {
        const float mean = layer_mean(kept.mean, channels), sigma = layer_sigma(kept.sigma, channels, set.p);
        for (int64_t i = 0; i < channels; i++) {
            kept.mean_hat[i] = lerp(mean, kept.mean_hat[i], *kept.w);
            kept.sigma_hat[i] = lerp(sigma, kept.sigma_hat[i], *kept.w);
            state.eval_mean[i] = lerp(mean, state.eval_mean[i], *kept.w);
            state.eval_sigma[i] = lerp(sigma, state.eval_sigma[i], *kept.w);
        }
    }
    std::copy(kept.mean_hat, kept.mean_hat + channels, state.mean);
    std::copy(kept.sigma_hat, kept.sigma_hat + channels, state.sigma);
}

// In double, where squares of floats neither overflow nor vanish: what `by_largest` of core/algorithm.py is for.
inline double square_sum(const float* values, int64_t n) {
    double total = 0;
    for (int64_t i = 0; i < n; i++) total += (double)values[i] * values[i];
    return total;
}

// What flows on into S(x) in place of g, from the blend of H2 with g pushed.
inline float passed_on(const Settings& set, float blend, float g, float factor) {
    const float present = (float)set.beta[2];
    return factor * (present != 0 ? blend + present * g : blend);
}

// G of the paper: g = dE/ds_hat, (2, C), is pushed into H2 and replaced by what flows on. Returns whether it was pushed.
inline bool stream_gradients(const Settings& set, const H2& state, int64_t channels, Kept kept, float scale,
                             float* g) {
    const int64_t n = 2 * channels;
    if (scale != 1)
        for (int64_t i = 0; i < n; i++) g[i] /= scale;
    const bool accept = *kept.accept != 0 && all_finite(g, n), guards = *kept.share < 1;
    const Push push(state.grads, guarded(set.beta, *kept.share), accept, *kept.own);
    const double length = guards ? square_sum(g, n) : 0;
    const float factor = *kept.w * scale;
    push.take(0, n, g);
    if (set.beta[2] == 0 && push.own == 0) {
        push.blend_all(0, n, g);
    } else {
        for (int64_t i = 0; i < n; i++)
            g[i] = passed_on(set, push.blend(state.grads.lasting[i], state.grads.recent[i], g[i]), g[i], 1);
    }
    const double streamed = guards ? square_sum(g, n) : 0;
    if (length < streamed) {  // no longer than g itself
        const double shorter = std::sqrt(length / streamed);
        for (int64_t i = 0; i < n; i++) g[i] = (float)(g[i] * shorter);
    }
    for (int64_t i = 0; i < n; i++) g[i] *= factor;
    *state.grads.count += accept;
    return accept;
}

void push_statistics(const Settings& set, const H1& state, int64_t channels, double elements, double samples,
                     bool begins, float* mean, float* sigma, float* kept) {
    fold_statistics(set, state, channels);
    stream_statistics(set, state, channels, elements, samples, begins, Kept(mean, sigma, kept, channels));
}

void push_gradients(const Settings& set, const H2& state, int64_t channels, float* kept, float* g) {
    const Kept its(nullptr, nullptr, kept, channels);
    fold_gradients(set, state, channels, its);
    stream_gradients(set, state, channels, its, 1, g);
}
