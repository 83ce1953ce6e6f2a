// The Python module: addresses and numbers in, checked for count only; kernels/__init__.py is its one caller.
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <cstring>
#include <new>

#include "parallel.h"
#include "types.h"

namespace {

const Kernels* kernels = &baseline_kernels;

struct Arguments {
    PyObject* const* next;
    bool failed = false;

    int64_t number() {
        const int64_t value = PyLong_AsLongLong(*next++);
        failed |= value == -1 && PyErr_Occurred() != nullptr;
        return value;
    }
    float* address() { return reinterpret_cast<float*>(number()); }
    double real() {
        const double value = PyFloat_AsDouble(*next++);
        failed |= value == -1 && PyErr_Occurred() != nullptr;
        return value;
    }
    template <class Record>
    const Record* records(int64_t wanted) {  // a bytes object that holds so many
        char* bytes = nullptr;
        Py_ssize_t size = 0;
        if (PyBytes_AsStringAndSize(*next++, &bytes, &size) < 0) {
            failed = true;
        } else if (size != (Py_ssize_t)(wanted * sizeof(Record))) {
            PyErr_Format(PyExc_ValueError, "record of %zd bytes, expected %zd", size, wanted * sizeof(Record));
            failed = true;
        }
        return reinterpret_cast<const Record*>(bytes);
    }
    template <class Record>
    const Record* record() {
        return records<Record>(1);
    }
};

// Runs a kernel without the GIL, and is the one place where exceptions end: there is no memory. A kernel asks for its
// memory before it changes anything.
template <class Run>
PyObject* released(const Run& run) {
    bool enough = true;
    Py_BEGIN_ALLOW_THREADS
    try {
        run();
    } catch (const std::bad_alloc&) {
        enough = false;
    }
    Py_END_ALLOW_THREADS
    if (enough) Py_RETURN_NONE;
    PyErr_SetString(PyExc_MemoryError, "no scratch memory for the kernels of streamnorm; the state of the layer is as "
                                       "before the call: free some memory and call it again");
    return nullptr;
}

bool counted(Py_ssize_t given, Py_ssize_t wanted) {
    if (given != wanted) PyErr_Format(PyExc_TypeError, "%zd arguments, expected %zd", given, wanted);
    return given == wanted;
}

Layer layer_from(Arguments& in) {
    Layer call;
    call.settings = in.record<Settings>();
    call.state = in.record<State>();
    call.rows = in.number();
    call.samples = in.number();
    call.channels = in.number();
    call.space = in.number();
    call.stride = in.number();
    call.threads = in.number();
    call.x = in.address();
    call.gain = in.address();
    call.bias = in.address();
    call.kept = in.address();
    return call;
}

PyObject* layer_forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!counted(count, 13)) return nullptr;
    Arguments in{args};
    const Layer call = layer_from(in);
    float* y = in.address();
    if (in.failed) return nullptr;
    return released([&] { kernels->layer_forward(call, y); });
}

PyObject* layer_backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!counted(count, 17)) return nullptr;
    Arguments in{args};
    const Layer call = layer_from(in);
    const float* dy = in.address();
    const float scale = (float)in.real();
    float *dx = in.address(), *dgain = in.address(), *dbias = in.address();
    if (in.failed) return nullptr;
    return released([&] { kernels->layer_backward(call, dy, scale, dx, dgain, dbias); });
}

Sequence sequence_from(Arguments& in) {
    Sequence seq;
    seq.settings = in.record<Settings>();
    seq.gates = in.number();
    seq.norms = in.records<Norm>(2 * seq.gates);
    seq.relu = in.number();
    seq.training = in.number();
    seq.reverse = in.number();
    seq.steps = in.number();
    seq.hidden = in.number();
    seq.sizes = in.records<int64_t>(seq.steps);
    seq.products = in.address();
    seq.start = in.address();
    seq.weight = in.address();
    seq.recurrent = in.address();
    seq.before = in.address();
    seq.inner = in.address();
    seq.kept = in.address();
    seq.output = nullptr;
    return seq;
}

PyObject* sequence_forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!counted(count, 18)) return nullptr;
    Arguments in{args};
    Sequence seq = sequence_from(in);
    seq.output = in.address();
    float* final = in.address();
    if (in.failed) return nullptr;
    return released([&] { kernels->sequence_forward(seq, final); });
}

PyObject* sequence_backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!counted(count, 22)) return nullptr;
    Arguments in{args};
    const Sequence seq = sequence_from(in);
    float* out[6];
    for (float*& address : out) address = in.address();
    if (in.failed) return nullptr;
    return released([&] { kernels->sequence_backward(seq, out[0], out[1], out[2], out[3], out[4], out[5]); });
}

PyObject* use(PyObject*, PyObject* name) {
    PyObject* ascii = PyUnicode_AsASCIIString(name);
    if (!ascii) return nullptr;
    const char* wanted = PyBytes_AsString(ascii);
    const Kernels* found = nullptr;
    if (wanted && std::strcmp(wanted, "baseline") == 0) found = &baseline_kernels;
#if defined(__x86_64__)
    if (wanted && std::strcmp(wanted, "avx2") == 0 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        found = &avx2_kernels;
#endif
    Py_DECREF(ascii);
    if (found) kernels = found;
    return PyBool_FromLong(found != nullptr);
}

#define FAST(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL
PyMethodDef methods[] = {
    {"layer_forward", FAST(layer_forward), nullptr},
    {"layer_backward", FAST(layer_backward), nullptr},
    {"sequence_forward", FAST(sequence_forward), nullptr},
    {"sequence_backward", FAST(sequence_backward), nullptr},
    {"use", use, METH_O, "Choose the kernels for an instruction set; False where there are none for this machine."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native(void) {
    find_threads();
    return PyModule_Create(&definition);
}
