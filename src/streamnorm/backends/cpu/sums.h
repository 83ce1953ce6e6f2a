// Sums over many elements at once: in eight lanes of float32, and in float64 across blocks, so that neither the
// number of elements nor an order of summation chosen by the compiler costs precision.
#pragma once

inline float absolute(float v) { return std::fabs(v); }
template <class V>
inline V absolute(V v) {
    return (V)((decltype(v > v))v & 0x7fffffff);
}

inline float sign(float v) { return (float)(v > 0) - (float)(v < 0); }  // 0 for NaN, as torch has it
template <class V>
inline V sign(V v) {
    const auto one = (decltype(v > v))(V{} + 1.0f);
    return (V)((v > 0) & one) - (V)((v < 0) & one);
}

template <class V>
inline double total(V v) {
    float lanes[sizeof(V) / sizeof(float)];
    std::memcpy(lanes, &v, sizeof v);
    double sum = 0;
    for (float lane : lanes) sum += lane;
    return sum;
}

// Over runs of elements: `term(i, sums)` adds what element i of a run (or the eight from i on) contributes. The lanes go
// on from run to run, and are emptied into float64 before they have added up too much.
template <int SUMS>
struct RunSums {
    double sums[SUMS] = {};
    Lanes lanes[4][SUMS] = {};
    float rest[SUMS] = {};
    int64_t in_lanes = 0;

    template <class Term>
    void add(int64_t n, const Term& term) {
        const int64_t stride = 32, most = 128 * stride;
        for (int64_t begin = 0; begin < n; begin += most) {
            const int64_t end = std::min(n, begin + most), whole = begin + (end - begin) / stride * stride;
            if (in_lanes + (end - begin) > most) empty();
            in_lanes += end - begin;
            Lanes local[4][SUMS];  // in registers, which members are not
            std::memcpy(local, lanes, sizeof lanes);
            for (int64_t i = begin; i < whole; i += stride)
                for (int k = 0; k < 4; k++) term(i + 8 * k, local[k]);
            int64_t i = whole;
            for (; i + 8 <= end; i += 8) term(i, local[0]);
            std::memcpy(lanes, local, sizeof lanes);
            for (; i < end; i++) term(i, rest);
        }
    }
    void empty() {
        for (int s = 0; s < SUMS; s++) {
            sums[s] += total(lanes[0][s] + lanes[1][s]) + total(lanes[2][s] + lanes[3][s]) + rest[s];
            for (int k = 0; k < 4; k++) lanes[k][s] = Lanes{};
            rest[s] = 0;
        }
        in_lanes = 0;
    }
};

// Down the columns of a block of rows: `term(row, column, sums)` adds what the element (or eight from it on) contributes.
// Columns are taken in chunks, rows in blocks that stay in the nearest cache while the tiles of a chunk pass over them;
// sums are in float32 for 128 rows, then in float64. Columns beyond the last whole eight are taken by four and one by one.
const int64_t CHUNK = 512, ROWS_IN_FLOAT = 128;

template <class V, int VECTORS, int SUMS, class Term>
inline void sum_tile(int64_t first_row, int64_t last_row, int64_t column, float* partial, const Term& term) {
    const int64_t width = sizeof(V) / sizeof(float);
    V lanes[VECTORS][SUMS];
    for (int k = 0; k < VECTORS; k++)
        for (int s = 0; s < SUMS; s++) lanes[k][s] = load<V>(partial + s * CHUNK + width * k);
    for (int64_t row = first_row; row < last_row; row++)
        for (int k = 0; k < VECTORS; k++) term(row, column + width * k, lanes[k]);
    for (int k = 0; k < VECTORS; k++)
        for (int s = 0; s < SUMS; s++) store(partial + s * CHUNK + width * k, lanes[k][s]);
}

template <int SUMS, class Term>
inline void sum_columns(int64_t first_row, int64_t last_row, int64_t columns, double* const* sums, const Term& term) {
    float partial[SUMS * CHUNK];
    for (int64_t left = 0; left < columns; left += CHUNK) {
        const int64_t width = std::min(CHUNK, columns - left), block = std::max<int64_t>(8, 4096 / width);
        for (int64_t top = first_row; top < last_row; top += ROWS_IN_FLOAT) {
            const int64_t bottom = std::min(last_row, top + ROWS_IN_FLOAT);
            for (int s = 0; s < SUMS; s++) std::fill(partial + s * CHUNK, partial + s * CHUNK + width, 0.0f);
            for (int64_t begin = top; begin < bottom; begin += block) {
                const int64_t end = std::min(bottom, begin + block);
                int64_t j = 0;
                for (; j + 32 <= width; j += 32)
                    sum_tile<Lanes, 4, SUMS>(begin, end, left + j, partial + j, term);
                for (; j + 8 <= width; j += 8) sum_tile<Lanes, 1, SUMS>(begin, end, left + j, partial + j, term);
                for (; j + 4 <= width; j += 4) sum_tile<Half, 1, SUMS>(begin, end, left + j, partial + j, term);
                for (; j < width; j++) sum_tile<float, 1, SUMS>(begin, end, left + j, partial + j, term);
            }
            for (int s = 0; s < SUMS; s++)
                for (int64_t j = 0; j < width; j++) sums[s][left + j] += partial[s * CHUNK + j];
        }
    }
}
