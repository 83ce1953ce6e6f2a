// Everything that is compiled once per instruction set, included inside a namespace.
#include "stream.h"
#include "sums.h"
#include "moments.h"
#include "layer.h"
#include "activations.h"
#include "product.h"
#include "sequence.h"

const Kernels kernels = {layer_forward, layer_repeat, layer_backward, sequence_forward, sequence_backward};
