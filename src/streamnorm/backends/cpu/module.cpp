// The Python module: addresses and numbers in, checked for count only; binding.py is its one caller. setup.py says
// whether it is built for the stable interface of Python.
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
    template <class T = float>
    T* address() {
        return reinterpret_cast<T*>(number());
    }
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

enum class Pass { FORWARD, REPEAT, BACKWARD };

template <class T>
LayerOf<T> layer_from(Arguments& in, Pass pass) {
    LayerOf<T> call;
    call.settings = in.record<Settings>();
    call.h1 = pass == Pass::FORWARD ? in.record<H1>() : nullptr;
    call.h2 = pass == Pass::BACKWARD ? in.record<H2>() : nullptr;
    call.rows = in.number();
    call.samples = in.number();
    call.channels = in.number();
    call.space = in.number();
    call.stride = in.number();
    call.threads = in.number();
    call.x = in.address<T>();
    call.gain = in.address();
    call.bias = in.address();
    call.kept = in.address();
    call.batch = pass == Pass::FORWARD ? in.number() : 0;
    call.begins = pass == Pass::FORWARD ? in.number() : 0;
    return call;
}

template <class T>
PyObject* run_layer(const LayerKernels<T>& with, Pass pass, Arguments& in) {
    const LayerOf<T> call = layer_from<T>(in, pass);
    if (pass != Pass::BACKWARD) {
        T* y = in.address<T>();
        if (in.failed) return nullptr;
        return released([&] { (pass == Pass::FORWARD ? with.forward : with.repeat)(call, y); });
    }
    const T* dy = in.address<T>();
    const float scale = (float)in.real();
    T* dx = in.address<T>();
    float *dgain = in.address(), *dbias = in.address();
    if (in.failed) return nullptr;
    return released([&] { with.backward(call, dy, scale, dx, dgain, dbias); });
}

PyObject* run_layer(Pass pass, PyObject* const* args) {
    Arguments in{args};
    return in.number() == BFLOAT16 ? run_layer(kernels->bfloat16, pass, in) : run_layer(kernels->float32, pass, in);
}

PyObject* layer_forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    return counted(count, 16) ? run_layer(Pass::FORWARD, args) : nullptr;
}

PyObject* layer_repeat(PyObject*, PyObject* const* args, Py_ssize_t count) {
    return counted(count, 13) ? run_layer(Pass::REPEAT, args) : nullptr;
}

PyObject* layer_backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    return counted(count, 18) ? run_layer(Pass::BACKWARD, args) : nullptr;
}

PyObject* push_statistics(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!counted(count, 9)) return nullptr;
    Arguments in{args};
    const Settings* settings = in.record<Settings>();
    const H1* state = in.record<H1>();
    const int64_t channels = in.number();
    const double elements = (double)in.number(), samples = (double)in.number();
    const bool begins = in.number() != 0;
    float *mean = in.address(), *sigma = in.address(), *kept = in.address();
    if (in.failed) return nullptr;
    return released([&] {
        kernels->push_statistics(*settings, *state, channels, elements, samples, begins, mean, sigma, kept);
    });
}

PyObject* push_gradients(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!counted(count, 5)) return nullptr;
    Arguments in{args};
    const Settings* settings = in.record<Settings>();
    const H2* state = in.record<H2>();
    const int64_t channels = in.number();
    float *kept = in.address(), *g = in.address();
    if (in.failed) return nullptr;
    return released([&] { kernels->push_gradients(*settings, *state, channels, kept, g); });
}

Sequence sequence_from(Arguments& in) {
    Sequence seq;
    seq.settings = in.record<Settings>();
    seq.gates = in.number();
    seq.cell_norm = in.number();
    seq.norms = in.records<Norm>(2 * seq.gates + seq.cell_norm);
    seq.relu = in.number();
    seq.training = in.number();
    seq.reverse = in.number();
    seq.steps = in.number();
    seq.hidden = in.number();
    seq.tested = in.number();
    seq.goes_on = in.number();
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
    if (!counted(count, 21)) return nullptr;
    Arguments in{args};
    Sequence seq = sequence_from(in);
    seq.output = in.address();
    float* final = in.address();
    if (in.failed) return nullptr;
    return released([&] { kernels->sequence_forward(seq, final); });
}

PyObject* sequence_backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!counted(count, 25)) return nullptr;
    Arguments in{args};
    const Sequence seq = sequence_from(in);
    float* out[6];
    for (float*& address : out) address = in.address();
    if (in.failed) return nullptr;
    return released([&] { kernels->sequence_backward(seq, out[0], out[1], out[2], out[3], out[4], out[5]); });
}

// What tensors are asked at the door, in the words of Python: their memory is torch's.
struct Words {
    PyObject *tensor, *parameter;    // types of plain tensors
    PyObject *float32, *bfloat16;    // and of their numbers
    PyObject *dtype, *is_cpu, *is_nested, *is_neg, *data_ptr, *storage_offset, *shape, *is_contiguous;
    PyObject *untyped_storage, *nbytes, *numel, *stride;
} words;

PyObject* introduce(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!counted(count, 4)) return nullptr;
    words.tensor = Py_NewRef(args[0]), words.parameter = Py_NewRef(args[1]);
    words.float32 = Py_NewRef(args[2]), words.bfloat16 = Py_NewRef(args[3]);
    struct {
        PyObject** at;
        const char* name;
    } const names[] = {{&words.dtype, "dtype"},         {&words.is_cpu, "is_cpu"},     {&words.is_nested, "is_nested"},
                       {&words.is_neg, "is_neg"},       {&words.data_ptr, "data_ptr"}, {&words.shape, "shape"},
                       {&words.storage_offset, "storage_offset"},
                       {&words.untyped_storage, "untyped_storage"},
                       {&words.nbytes, "nbytes"},
                       {&words.numel, "numel"},
                       {&words.stride, "stride"},
                       {&words.is_contiguous, "is_contiguous"}};
    for (const auto& each : names)
        if (!(*each.at = PyUnicode_InternFromString(each.name))) return nullptr;
    Py_RETURN_NONE;
}

// Whether an answer that was just got is true; it is let go of.
bool is_true(PyObject* answer) {
    const bool result = answer && PyObject_IsTrue(answer) == 1;
    Py_XDECREF(answer);
    return result;
}

bool has(PyObject* tensor, PyObject* name) { return is_true(PyObject_GetAttr(tensor, name)); }
bool does(PyObject* tensor, PyObject* name) { return is_true(PyObject_CallMethodObjArgs(tensor, name, nullptr)); }

int64_t number(PyObject* tensor, PyObject* name) {
    PyObject* answer = PyObject_CallMethodObjArgs(tensor, name, nullptr);
    const int64_t result = answer ? PyLong_AsLongLong(answer) : 0;
    Py_XDECREF(answer);
    return result;
}

// Numbers from the first element to the last.
int64_t extent(PyObject* tensor) {
    if (does(tensor, words.is_contiguous)) return number(tensor, words.numel);
    PyObject *shape = PyObject_GetAttr(tensor, words.shape), *stride = PyObject_CallMethodObjArgs(tensor, words.stride, nullptr);
    int64_t last = 1;
    const Py_ssize_t dims = shape && stride ? PyTuple_Size(shape) : 0;
    for (Py_ssize_t i = 0; i < dims; i++) {
        const int64_t size = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        last = size == 0 ? 0 : last + (size - 1) * PyLong_AsLongLong(PyTuple_GetItem(stride, i));
        if (size == 0) break;
    }
    Py_XDECREF(shape);
    Py_XDECREF(stride);
    return last;
}

// Memory that does not begin at 0, and reaches to the last element: so many numbers from the first, counted if negative.
bool has_memory(PyObject* tensor, int64_t numbers, int64_t size) {
    const int64_t before = number(tensor, words.storage_offset) * size;
    if (number(tensor, words.data_ptr) == before) return false;
    PyObject* storage = PyObject_CallMethodObjArgs(tensor, words.untyped_storage, nullptr);
    const int64_t bytes = storage ? number(storage, words.nbytes) : 0;
    Py_XDECREF(storage);
    return bytes >= before + (numbers < 0 ? extent(tensor) : numbers) * size;
}

// As `is_plain` and `has_memory` of backends/memory.py, of float32 or bfloat16.
bool is_plain(PyObject* tensor, PyObject* dtype, int64_t numbers = -1) {
    PyObject* type = (PyObject*)Py_TYPE(tensor);
    if (type != words.tensor && type != words.parameter) return false;
    PyObject* found = PyObject_GetAttr(tensor, words.dtype);
    Py_XDECREF(found);
    const int64_t size = dtype == words.float32 ? sizeof(float) : dtype == words.bfloat16 ? sizeof(Bfloat16) : 0;
    const bool plain = size && found == dtype && has(tensor, words.is_cpu) && !has(tensor, words.is_nested) &&
                       !does(tensor, words.is_neg) && has_memory(tensor, numbers, size);
    const bool asked = !PyErr_Occurred();
    PyErr_Clear();  // a sparse tensor has no storage
    return asked && plain;
}

bool is_vector(PyObject* tensor, PyObject* dtype, int64_t size) {  // or None in its place
    if (tensor == Py_None) return true;
    if (!is_plain(tensor, dtype, size)) return false;
    PyObject* shape = PyObject_GetAttr(tensor, words.shape);
    const bool fits = shape && PyTuple_Size(shape) == 1 && PyLong_AsLongLong(PyTuple_GetItem(shape, 0)) == size;
    Py_XDECREF(shape);
    return fits && does(tensor, words.is_contiguous);
}

// Whether all of these are vectors of so many numbers in float32, or None in their place.
PyObject* vectors(PyObject*, PyObject* const* args, Py_ssize_t count) {
    const int64_t size = count ? PyLong_AsLongLong(args[0]) : 0;
    bool result = !PyErr_Occurred();
    for (Py_ssize_t i = 1; result && i < count; i++) result = is_vector(args[i], words.float32, size);
    return PyErr_Occurred() ? nullptr : PyBool_FromLong(result);
}

// What a `data_ptr` method gives now.
int64_t read(PyObject* readers, Py_ssize_t i) {
    PyObject* number = PyObject_CallNoArgs(PyTuple_GetItem(readers, i));
    const int64_t value = number ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    return value;
}

// The addresses that a tuple of them gives now, as bytes.
PyObject* addresses(PyObject*, PyObject* readers) {
    const Py_ssize_t count = PyTuple_Size(readers);
    if (count < 0) return nullptr;
    PyObject* bytes = PyBytes_FromStringAndSize(nullptr, count * (Py_ssize_t)sizeof(int64_t));
    if (!bytes) return nullptr;
    char* out = PyBytes_AsString(bytes);
    for (Py_ssize_t i = 0; i < count; i++) {
        const int64_t value = read(readers, i);
        if (value == -1 && PyErr_Occurred()) {
            Py_DECREF(bytes);
            return nullptr;
        }
        std::memcpy(out + i * sizeof value, &value, sizeof value);
    }
    return bytes;
}

// Whether they still give what a record says.
bool unmoved(PyObject* readers, PyObject* record) {
    const Py_ssize_t count = PyTuple_Size(readers);
    const char* known = PyBytes_AsString(record);
    if (count < 0 || !known || PyBytes_Size(record) != count * (Py_ssize_t)sizeof(int64_t)) return false;
    for (Py_ssize_t i = 0; i < count; i++) {
        const int64_t value = read(readers, i);
        if (std::memcmp(known + i * sizeof value, &value, sizeof value) != 0) return false;
    }
    return true;
}

PyObject* still(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!counted(count, 2)) return nullptr;
    const bool result = unmoved(args[0], args[1]);
    return PyErr_Occurred() ? nullptr : PyBool_FromLong(result);
}

// Whether an attribute of a tensor, or what a method of it gives, equals a tuple.
bool equals(PyObject* found, PyObject* wanted) {
    const bool same = found && PyObject_RichCompareBool(found, wanted, Py_EQ) == 1;
    Py_XDECREF(found);
    return same;
}

// fits(shape, stride, types of x, gain and bias, channels, readers, record, x, gain, bias): whether a steady call is as
// the one that was looked at.
PyObject* fits(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!counted(count, 11)) return nullptr;
    PyObject* x = args[8];
    const int64_t channels = PyLong_AsLongLong(args[5]);
    const bool result = is_plain(x, args[2]) && equals(PyObject_GetAttr(x, words.shape), args[0]) &&
                        equals(PyObject_CallMethodObjArgs(x, words.stride, nullptr), args[1]) &&
                        is_vector(args[9], args[3], channels) && is_vector(args[10], args[4], channels) &&
                        unmoved(args[6], args[7]);
    return PyErr_Occurred() ? nullptr : PyBool_FromLong(result);
}

// How the kernels read x, `(N, C, ...)`, as `_layout` of layer.py has it; false where they do not.
struct Layout {
    int64_t rows, samples, channels, space, stride;
    bool channels_last;  // the output has the strides of x; otherwise it is contiguous
};

bool lay_out(PyObject* x, Layout& out) {
    const int MOST = 8;
    PyObject *shape = PyObject_GetAttr(x, words.shape), *strides = PyObject_CallMethodObjArgs(x, words.stride, nullptr);
    const Py_ssize_t dims = shape && strides ? PyTuple_Size(shape) : 0;
    int64_t size[MOST], stride[MOST], numbers = 1;
    const bool few = dims >= 2 && dims <= MOST;
    for (Py_ssize_t i = 0; few && i < dims; i++) {
        size[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        stride[i] = PyLong_AsLongLong(PyTuple_GetItem(strides, i));
        numbers *= size[i];
    }
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    if (!few || numbers == 0) return false;
    int64_t plain = 1, last = size[1];  // the strides to expect: of planes, and with channels side by side
    bool planes = true, side_by_side = size[1] == 1 || stride[1] == 1;
    for (Py_ssize_t i = dims - 1; i >= 0; i--) {
        planes &= size[i] == 1 || stride[i] == plain;
        plain *= size[i];
        if (i == 1) continue;
        side_by_side &= size[i] == 1 || stride[i] == last || dims == 2;
        last *= size[i];
    }
    const int64_t space = numbers / (size[0] * size[1]);
    const bool rows = dims == 2 || !planes || space == 1;
    if (rows && !side_by_side) return false;
    const int64_t step = dims == 2 && size[0] > 1 ? stride[0] : size[1];
    out = rows ? Layout{1, size[0] * space, size[1], 1, step, dims > 2 && !planes}
               : Layout{0, size[0], size[1], space, 0, false};
    return true;
}

template <class T>
PyObject* normalize(const LayerKernels<T>& with, PyObject* const* args, const Layout& layout, int64_t threads) {
    LayerOf<T> call{};
    call.rows = layout.rows, call.samples = layout.samples, call.channels = layout.channels;
    call.space = layout.space, call.stride = layout.stride, call.threads = threads;
    const auto at = [](PyObject* tensor) { return tensor == Py_None ? 0 : number(tensor, words.data_ptr); };
    call.x = reinterpret_cast<const T*>(at(args[0]));
    const float *mean = reinterpret_cast<const float*>(at(args[1])), *sigma = reinterpret_cast<const float*>(at(args[2]));
    call.gain = reinterpret_cast<const float*>(at(args[3])), call.bias = reinterpret_cast<const float*>(at(args[4]));
    T* y = reinterpret_cast<T*>(at(args[5]));
    if (PyErr_Occurred()) return nullptr;
    PyObject* done = released([&] { with.normalize(call, mean, sigma, y); });
    if (!done) return nullptr;
    Py_DECREF(done);
    Py_RETURN_TRUE;
}

// layer_normalize(x, mean, sigma, gain, bias, y, threads): N(x, s) into y. False, and nothing is written, if any of them
// is not as the kernels read it.
PyObject* layer_normalize(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!counted(count, 7)) return nullptr;
    PyObject *x = args[0], *y = args[5], *dtype = PyObject_GetAttr(x, words.dtype);
    Py_XDECREF(dtype);  // it is torch's
    const int64_t threads = PyLong_AsLongLong(args[6]);
    Layout layout;
    bool fits = args[1] != Py_None && args[2] != Py_None && is_plain(x, dtype) && lay_out(x, layout);
    for (int i = 1; fits && i < 5; i++) fits = is_vector(args[i], words.float32, layout.channels);
    if (fits) {
        PyObject *shape = PyObject_GetAttr(x, words.shape), *stride = PyObject_CallMethodObjArgs(x, words.stride, nullptr);
        fits = shape && stride && is_plain(y, dtype) && equals(PyObject_GetAttr(y, words.shape), shape) &&
               (layout.channels_last ? equals(PyObject_CallMethodObjArgs(y, words.stride, nullptr), stride)
                                     : does(y, words.is_contiguous));
        Py_XDECREF(shape);
        Py_XDECREF(stride);
    }
    if (PyErr_Occurred()) return nullptr;
    if (!fits) Py_RETURN_FALSE;
    return dtype == words.bfloat16 ? normalize(kernels->bfloat16, args, layout, threads)
                                   : normalize(kernels->float32, args, layout, threads);
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

PyObject* find_threads_in(PyObject*, PyObject* library) {  // a path, as bytes
    const char* path = PyBytes_AsString(library);
    return path ? PyBool_FromLong(find_threads(path)) : nullptr;
}

PyObject* threads(PyObject*, PyObject* wanted) {
    const int64_t number = PyLong_AsLongLong(wanted);
    return number == -1 && PyErr_Occurred() ? nullptr : PyLong_FromLongLong(count_threads(number));
}

// The names of the fields of `Settings`, `H1` and `H2`, and of the numbers of `Kept`.
PyObject* fields(PyObject*, PyObject*) {
    return Py_BuildValue("(ssss)", SETTINGS_FIELDS, H1_FIELDS, H2_FIELDS, KEPT_NUMBERS);
}

// suits(x stride, dy stride, type, channels, x, dy, gain): whether a backward pass is given what its forward pass had,
// and a gain in float32.
PyObject* suits(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!counted(count, 7)) return nullptr;
    PyObject *x = args[4], *dy = args[5];
    bool result = is_plain(x, args[2]) && is_plain(dy, args[2]) &&
                  equals(PyObject_CallMethodObjArgs(x, words.stride, nullptr), args[0]) &&
                  equals(PyObject_CallMethodObjArgs(dy, words.stride, nullptr), args[1]) &&
                  is_vector(args[6], words.float32, PyLong_AsLongLong(args[3]));
    if (result) {
        PyObject* shape = PyObject_GetAttr(x, words.shape);
        result = shape && equals(PyObject_GetAttr(dy, words.shape), shape);
        Py_XDECREF(shape);
    }
    return PyErr_Occurred() ? nullptr : PyBool_FromLong(result);
}

#define FAST(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL
PyMethodDef methods[] = {
    {"layer_forward", FAST(layer_forward), nullptr},
    {"layer_repeat", FAST(layer_repeat), nullptr},
    {"layer_backward", FAST(layer_backward), nullptr},
    {"layer_normalize", FAST(layer_normalize), nullptr},
    {"push_statistics", FAST(push_statistics), nullptr},
    {"push_gradients", FAST(push_gradients), nullptr},
    {"sequence_forward", FAST(sequence_forward), nullptr},
    {"sequence_backward", FAST(sequence_backward), nullptr},
    {"introduce", FAST(introduce), nullptr},
    {"vectors", FAST(vectors), nullptr},
    {"addresses", addresses, METH_O, nullptr},
    {"still", FAST(still), nullptr},
    {"fits", FAST(fits), nullptr},
    {"suits", FAST(suits), nullptr},
    {"fields", fields, METH_NOARGS, nullptr},
    {"find_threads", find_threads_in, METH_O, nullptr},
    {"threads", threads, METH_O, nullptr},
    {"use", use, METH_O, "Choose the kernels for an instruction set; False where there are none for this machine."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native(void) {
    PyObject* module = PyModule_Create(&definition);
#if defined(Py_GIL_DISABLED)
    // What all threads share here is written while the module is imported.
    if (module) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    return module;
}
