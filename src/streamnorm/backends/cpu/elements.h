// Numbers in memory, float32 or bfloat16, and how they are read and written. All arithmetic is in float32.
#pragma once

typedef float Lanes __attribute__((vector_size(32)));
typedef float Half __attribute__((vector_size(16)));

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float wide(float value) { return value; }
inline float wide(Bfloat16 value) { return from_bits((uint32_t)value.bits << 16); }

// With the nearest bfloat16 in the upper half, of two the even one. `value` comes from arithmetic, so a NaN is quiet: it
// shows in the upper half, and it is cut where rounding could carry it into its sign.
inline uint32_t rounded(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = std::min(bits, 0xffff0000u);
    bits = (uint32_t)std::min((int32_t)bits, 0x7fff0000);
    return bits + 0x7fffu + (bits >> 16 & 1u);
}

// One number, or eight.
template <class V>
inline V load(const float* at) {
    V value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

template <class V>
inline V load(const Bfloat16* at) {
    float values[sizeof(V) / sizeof(float)];
    for (float& value : values) value = wide(*at++);
    return load<V>(values);
}

template <class V>
inline void store(float* at, V value) {
    std::memcpy(at, &value, sizeof value);
}

inline void put(float& at, float value) { at = value; }
inline void put(Bfloat16& at, float value) { at.bits = (uint16_t)(rounded(value) >> 16); }

// The number in the lower (0) or the upper (1) half of a word.
template <int HALF>
inline float half_of(const Bfloat16* at) {
    uint32_t word;
    std::memcpy(&word, at, sizeof word);
    return from_bits(HALF ? word & 0xffff0000u : word << 16);
}

// out[i] = f(in[i] ...) for a run of numbers. Where all are bfloat16, two by two: the halves of a word stay in their lane,
// which single ones have to leave and come back to.
template <class T, class F, class... In>
inline void map_run(int64_t n, T* __restrict out, const F& f, const In* __restrict... in) {
    int64_t done = 0;
    if constexpr ((std::is_same_v<T, Bfloat16> && ... && std::is_same_v<In, Bfloat16>)) {
        for (int64_t i = 0; i < n / 2; i++) {
            const uint32_t lower = rounded(f(half_of<0>(in + 2 * i)...)), upper = rounded(f(half_of<1>(in + 2 * i)...));
            const uint32_t word = lower >> 16 | (upper & 0xffff0000u);
            std::memcpy(out + 2 * i, &word, sizeof word);
        }
        done = n / 2 * 2;
    }
    for (int64_t i = done; i < n; i++) put(out[i], f(wide(in[i])...));
}
