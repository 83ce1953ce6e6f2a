// exp, sigmoid and tanh by arithmetic alone, so that loops over them are vectorized; within 2e-7 of the exact values.
#pragma once

// 2^n e^r with |r| <= log(2) / 2, and e^r by its polynomial. NaN passes through, large numbers become inf.
inline float exponential(float given) {
    float x = given > 88.0f ? 88.0f : given;
    x = x < -87.0f ? -87.0f : x;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, kept in the low bits
    const float shifted = x * 1.44269504f + shift, n = shifted - shift;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float e = 1.9875691500e-4f;
    e = e * r + 1.3981999507e-3f;
    e = e * r + 8.3334519073e-3f;
    e = e * r + 4.1665795894e-2f;
    e = e * r + 1.6666665459e-1f;
    e = e * r + 5.0000001201e-1f;
    e = e * (r * r) + r + 1.0f;
    uint32_t power, whole;
    std::memcpy(&whole, &shifted, sizeof whole);
    power = (whole - 0x4b400000u + 127u) << 23;
    float scale;
    std::memcpy(&scale, &power, sizeof scale);
    const float result = given > 88.0f ? HUGE_VALF : e * scale;
    return given < -87.0f ? 0.0f : result;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

inline float hyperbolic_tangent(float x) {
    const float size = std::fabs(x), z = x * x;
    float small = -5.70498872745e-3f;  // near 0, where the quotient below would cancel
    small = small * z + 2.06390887954e-2f;
    small = small * z - 5.37397155531e-2f;
    small = small * z + 1.33314422036e-1f;
    small = small * z - 3.33332819422e-1f;
    small = small * z * x + x;
    const float large = std::copysign(1.0f - 2.0f / (exponential(2.0f * size) + 1.0f), x);
    return size < 0.625f ? small : large;
}
