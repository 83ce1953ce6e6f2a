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
#define KEPT_NUMBERS "w accept weight_share window total own"  // of `Kept` of stream.h, after its vectors

// What inputs, outputs and their gradients are made of; all else is float. In the order of ELEMENTS of binding.py.
enum Element : int64_t { FLOAT32, BFLOAT16 };

struct Bfloat16 {
    uint16_t bits;  // the upper half of a float
};

// A call of a layer. `rows`: x is (samples, channels) with `stride` from row to row; otherwise (samples, channels, space).
template <class T>
struct LayerOf {
    const Settings* settings;
    const H1* h1;  // null in backward
    const H2* h2;  // null in forward
    int64_t rows, samples, channels, space, stride, threads;
    const T* x;
    const float *gain, *bias;  // may be null
    float* kept;               // 5 * channels + 6, between forward and backward
    int64_t batch, begins;     // of the forward pass: its samples, and whether they are new in the window
};
using Layer = LayerOf<float>;

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
    const Norm* norms;  // of the input's products, gate by gate, then of the hidden state's, then of the cell state
    int64_t gates;      // 1: RNN, 3: GRU, 4: LSTM
    int64_t cell_norm;  // whether there is a norm on the cell state of an LSTM
    int64_t relu, training, reverse, steps, hidden;
    int64_t tested, goes_on;  // by the statistics of evaluation; from the state of another sequence
    const int64_t* sizes;
    // (rows, gates * hidden); (samples, hidden), of an LSTM that of h and then of c; (gates * hidden, hidden)
    const float *products, *start, *weight;
    // Kept for backward: the hidden state's products; the hidden state before each step; the activations of the cell,
    // see cells.h; what norms keep, by timestep and norm.
    float *recurrent, *before, *inner, *kept;
    float* output;  // of the forward pass only: it is the caller's, who may change it
};

template <class T>
struct LayerKernels {
    void (*forward)(const LayerOf<T>&, T* y);
    void (*repeat)(const LayerOf<T>&, T* y);  // N(x, s_hat) from what a call kept: nothing is streamed
    void (*normalize)(const LayerOf<T>&, const float* mean, const float* sigma, T* y);  // N(x, s), s being constants
    // `dx` may be null; `scale`: of the loss, 1 without a scaler.
    void (*backward)(const LayerOf<T>&, const T* dy, float scale, T* dx, float* dgain, float* dbias);
};

struct Kernels {
    // F and G alone: `mean` and `sigma` are S(x), `kept` is s_hat and six numbers, `g` is replaced by what flows on.
    void (*push_statistics)(const Settings&, const H1&, int64_t channels, double elements, double samples, bool begins,
                            float* mean, float* sigma, float* kept);
    void (*push_gradients)(const Settings&, const H2&, int64_t channels, float* kept, float* g);
    LayerKernels<float> float32;
    LayerKernels<Bfloat16> bfloat16;
    void (*sequence_forward)(const Sequence&, float* final);
    // `final`, `dfinal` and `dstart` are as `start`. `sums`: (norms, 2, hidden), dgain and dbias of each norm.
    // `dweight`: (hidden, gates * hidden), the transposed of the weight, or null.
    void (*sequence_backward)(const Sequence&, const float* doutput, const float* dfinal, float* dproducts,
                              float* dweight, float* dstart, float* sums);
};

extern const Kernels baseline_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
#endif

// Scratch memory that a thread keeps between calls: at least `count` numbers, their values unknown. Throws
// std::bad_alloc. The only allocation of a kernel: once, before anything is changed, and by the calling thread.
double* workspace(int64_t count);
