// Small matrix products for the steps of a recurrence. One factor is a weight, packed once per sequence into panels of
// 16 columns; tiles of up to 6 rows by 16 columns stay in registers.
#pragma once

const int64_t PANEL = 16;

inline int64_t panels(int64_t columns) { return (columns + PANEL - 1) / PANEL; }
inline int64_t packed_size(int64_t inner, int64_t columns) { return panels(columns) * PANEL * inner; }

// b(k, j) = weight[k * row + j * column], as panels (inner, 16) filled up with zeros.
inline void pack(const float* weight, int64_t inner, int64_t columns, int64_t row, int64_t column, float* packed) {
    for (int64_t first = 0; first < columns; first += PANEL)
        for (int64_t k = 0; k < inner; k++)
            for (int64_t j = first; j < first + PANEL; j++)
                *packed++ = j < columns ? weight[k * row + j * column] : 0.0f;
}

struct Strides {
    int64_t row, inner;
};

template <int ROWS>
inline void tile(int64_t inner, const float* a, Strides by, const float* panel, float* c, int64_t c_stride,
                 int64_t columns, bool add) {
    Lanes sums[ROWS][2];
    for (int i = 0; i < ROWS; i++) sums[i][0] = sums[i][1] = Lanes{};
    for (int64_t k = 0; k < inner; k++) {
        const Lanes left = load<Lanes>(panel + k * PANEL), right = load<Lanes>(panel + k * PANEL + 8);
        for (int i = 0; i < ROWS; i++) {
            const float factor = a[i * by.row + k * by.inner];
            sums[i][0] += factor * left;
            sums[i][1] += factor * right;
        }
    }
    for (int i = 0; i < ROWS; i++) {
        float* out = c + i * c_stride;
        if (columns == PANEL) {
            store(out, add ? load<Lanes>(out) + sums[i][0] : sums[i][0]);
            store(out + 8, add ? load<Lanes>(out + 8) + sums[i][1] : sums[i][1]);
        } else {
            float values[PANEL];
            std::memcpy(values, sums[i], sizeof values);
            for (int64_t j = 0; j < columns; j++) out[j] = add ? out[j] + values[j] : values[j];
        }
    }
}

// As many rows as go into tiles of so many, from `done` on; returns where they end.
template <int ROWS>
inline int64_t tiles(int64_t done, int64_t rows, int64_t inner, const float* a, Strides by, const float* panel,
                     float* c, int64_t c_stride, int64_t columns, bool add) {
    for (; done + ROWS <= rows; done += ROWS)
        tile<ROWS>(inner, a + done * by.row, by, panel, c + done * c_stride, c_stride, columns, add);
    return done;
}

// c (+)= a b with a (rows, inner), as its strides say, and b packed.
inline void multiply(int64_t rows, int64_t inner, int64_t columns, const float* a, Strides by,
                     const float* packed, float* c, int64_t c_stride, bool add) {
    for (int64_t first = 0; first < columns; first += PANEL) {
        const float* panel = packed + first * inner;
        const int64_t width = std::min(PANEL, columns - first);
        int64_t done = tiles<6>(0, rows, inner, a, by, panel, c + first, c_stride, width, add);
        done = tiles<2>(done, rows, inner, a, by, panel, c + first, c_stride, width, add);
        tiles<1>(done, rows, inner, a, by, panel, c + first, c_stride, width, add);
    }
}
