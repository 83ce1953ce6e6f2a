// What crosses the border between the Python module and the kernels. Data only: code here would be compiled for
// several instruction sets under one name.
#pragma once
#include <cstdint>

enum Center : int64_t { MEAN, RUNNING, ZERO };

struct Settings {
    int64_t p;       // 1 or 2
    int64_t center;
    double eps, alpha[2], beta[3], kappa[4], warmup;
    int64_t guard;
    double eval_memory;
};
#define SETTINGS_FIELDS "p center eps alpha beta kappa warmup guard eval_memory"

// The fields of the next three are in the order of core/config.py and core/state.py; binding.py compares their names.
struct Stream {
    float* lasting;  // `long`, (2, C): row 0 mean, row 1 sigma
    float* recent;   // `short`
    int64_t* count;
    bool *empty, *pending;
};

struct H1 {  // what forward passes write
    Stream stats;
    float *mean, *sigma;
    double *seen, *elements, *elements_before, *counted, *samples;
    float *eval_long, *eval_mean, *eval_sigma;
};
#define H1_FIELDS                                                                                    \
    "stats_long stats_short stats_count stats_empty stats_pending mean sigma seen elements "          \
    "elements_before counted samples eval_long eval_mean eval_sigma"

struct H2 {  // what backward passes write
    Stream grads;
};
#define H2_FIELDS "grads_long grads_short grads_count grads_empty grads_pending"

// A call of a layer. `rows`: x is (samples, channels) with `stride` from row to row; otherwise (samples, channels, space).
struct Layer {
    const Settings* settings;
    const H1* h1;  // null in backward
    const H2* h2;  // null in forward
    int64_t rows, samples, channels, space, stride, threads;
    const float *x, *gain, *bias;  // gain and bias may be null
    float* kept;                   // 5 * channels + 5, between forward and backward
    int64_t batch, begins;         // of the forward pass: its samples, and whether they are new in the window
};

// The norm of one product of one gate.
struct Norm {
    const float *gain, *bias;
    H1 h1;
    H2 h2;
    double scale;  // of the loss, 1 without a scaler
};

// One recurrent layer over a packed sequence: `sizes` rows at each timestep, never rising, one after the other.
struct Sequence {
    const Settings* settings;
    const Norm* norms;  // of the input's products, gate by gate, then of the hidden state's
    int64_t gates;      // 1: RNN, 3: GRU
    int64_t relu, training, reverse, steps, hidden;
    int64_t tested, goes_on;  // by the statistics of evaluation; from the state of another sequence
    const int64_t* sizes;
    const float *products, *start, *weight;  // (rows, gates * hidden), (samples, hidden), (gates * hidden, hidden)
    // Kept for backward: the hidden state's products; the hidden state before each step; the new state, of a GRU r, z,
    // the new state and h * r; what norms keep, by timestep and norm.
    float *recurrent, *before, *inner, *kept;
    float* output;  // of the forward pass only: it is the caller's, who may change it
};

struct Kernels {
    void (*layer_forward)(const Layer&, float* y);
    void (*layer_repeat)(const Layer&, float* y);  // N(x, s_hat) from what a call kept: nothing is streamed
    // `dx` may be null; `scale`: of the loss, 1 without a scaler.
    void (*layer_backward)(const Layer&, const float* dy, float scale, float* dx, float* dgain, float* dbias);
    void (*sequence_forward)(const Sequence&, float* final);
    // `sums`: (2 * gates, 2, hidden), dgain and dbias of each norm.
    void (*sequence_backward)(const Sequence&, const float* doutput, const float* dfinal, float* dproducts,
                              float* drecurrent, float* dstart, float* sums);
};

extern const Kernels baseline_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
#endif

// Scratch memory that a thread keeps between calls: at least `count` numbers, their values unknown. Throws
// std::bad_alloc. The only allocation of a kernel: once, before anything is changed, and by the calling thread.
double* workspace(int64_t count);
