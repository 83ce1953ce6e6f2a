// Whole sequences of streaming-normalized recurrent layers, forward and backward. Statistics are streamed step by step,
// as the layer would be called step by step; the products of the input come from one matrix product before.
#pragma once

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

inline int64_t all_rows(const Sequence& seq) {
    int64_t rows = 0;
    for (int64_t t = 0; t < seq.steps; t++) rows += seq.sizes[t];
    return rows;
}

template <class Cell>
inline void run_forward(const Sequence& seq, float* final) {
    const int64_t hidden = seq.hidden, total = all_rows(seq), block = seq.sizes[0] * hidden;
    double* scratch = workspace(Pass::scratch_size(seq) + Cell::packed(seq));
    const Pass pass{seq, hidden, seq.gates * hidden, total, scratch, nullptr, nullptr, nullptr, nullptr};
    const Cell cell(pass, false, (float*)(scratch + Pass::scratch_size(seq)), block);
    const float* values[2] = {seq.output, seq.inner + Lstm::CELL * total * hidden};

    walk(seq, false, [&](const Step& step) {
        float *h = seq.before + step.row * hidden, *y = seq.output + step.row * hidden;
        const int64_t on = step.going_on();
        copy_rows(seq.output + step.earlier_row * hidden, h, on, hidden);
        copy_rows(seq.start + on * hidden, h + on * hidden, step.rows - on, hidden);
        cell.forward(step, h, y);
        for (int64_t s = 0; s < Cell::carried; s++) {
            const float *before = values[s] + step.earlier_row * hidden, *after = values[s] + step.row * hidden;
            float* out = final + s * block;
            if (step.earlier > step.rows)  // these rows have ended
                copy_rows(before + step.rows * hidden, out + step.rows * hidden, step.earlier - step.rows, hidden);
            if (step.later == 0) copy_rows(after, out, step.rows, hidden);
        }
    });
}

template <class Cell>
inline void run_backward(const Sequence& seq, const float* doutput, const float* dfinal, float* dproducts,
                         float* dweight, float* dstart, float* sums) {
    const int64_t hidden = seq.hidden, wide = seq.gates * hidden, block = seq.sizes[0] * hidden;
    const int64_t blocks = Cell::blocks + Cell::carried + seq.gates;
    double* scratch = workspace(Pass::scratch_size(seq) + Cell::packed(seq) + blocks * block);
    float* memory = (float*)(scratch + Pass::scratch_size(seq));
    float* d = memory + Cell::packed(seq) + Cell::blocks * block;  // the gradients that are carried
    float* drecurrent = d + Cell::carried * block;
    const Pass pass{seq, hidden, wide, all_rows(seq), scratch, dproducts, drecurrent, dweight, sums};
    const Cell cell(pass, true, memory, block);
    std::fill(sums, sums + pass.norms() * 2 * hidden, 0.0f);
    if (dweight) std::fill(dweight, dweight + hidden * wide, 0.0f);

    walk(seq, true, [&](const Step& step) {
        const int64_t n = step.rows * hidden, carried = std::min(step.later, step.rows) * hidden;
        const int64_t on = step.going_on() * hidden;
        for (int64_t s = 0; s < Cell::carried; s++)  // the other rows end here
            copy_rows(dfinal + s * block + carried, d + s * block + carried, 1, n - carried);
        for (int64_t i = 0; i < n; i++) d[i] += doutput[step.row * hidden + i];
        cell.backward(step, seq.before + step.row * hidden, {d, d + block});
        for (int64_t s = 0; s < Cell::carried; s++)  // the others began here
            copy_rows(d + s * block + on, dstart + s * block + on, 1, n - on);
    });
}

void sequence_forward(const Sequence& seq, float* final) {
    const auto run = seq.gates == 1 ? run_forward<Rnn> : seq.gates == 3 ? run_forward<Gru> : run_forward<Lstm>;
    run(seq, final);
}

void sequence_backward(const Sequence& seq, const float* doutput, const float* dfinal, float* dproducts,
                       float* dweight, float* dstart, float* sums) {
    const auto run = seq.gates == 1 ? run_backward<Rnn> : seq.gates == 3 ? run_backward<Gru> : run_backward<Lstm>;
    run(seq, doutput, dfinal, dproducts, dweight, dstart, sums);
}
