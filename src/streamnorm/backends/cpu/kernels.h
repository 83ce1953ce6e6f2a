// Everything that is compiled once per instruction set, included inside a namespace.
#include "stream.h"
#include "elements.h"
#include "sums.h"
#include "moments.h"
#include "layer.h"
#include "activations.h"
#include "product.h"
#include "gates.h"
#include "cells.h"
#include "sequence.h"

template <class T>
constexpr LayerKernels<T> layer_kernels = {layer_forward<T>, layer_repeat<T>, layer_normalize<T>,
                                             layer_backward<T>};

const Kernels kernels = {push_statistics,         push_gradients,   layer_kernels<float>,
                         layer_kernels<Bfloat16>, sequence_forward, sequence_backward};
